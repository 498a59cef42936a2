"""Named feeds, run by Spark: each change delivered, one runner at a time, one checkpoint: the site's."""

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from threading import Event, Thread
from typing import Any

import pyarrow.dataset
import pytest
from msgspec.structs import replace
from pyspark.sql import SparkSession
from tests.contracts.site.base import state_after
from tests.links.support import Served
from tests.spark.support_backup import address_of, fill, writing
from tests.spark.support_garbage import collect_old
from tests.waiting import wait_until

from floodmark.clock import monotonic_ms
from floodmark.feed.named.feeds import FeedState, SinkOptions
from floodmark.feed.sinks.parquet import SCHEMA
from floodmark.model.errors import (
    FeedNotFound,
    FeedStateConflict,
    InvalidArgument,
    LeaseHeld,
    NotAllowed,
    VersionCollected,
)
from floodmark.model.version import Version
from floodmark.site import Namespace, Site
from floodmark.spark.jobs import FeedRunSummary, run_feed
from floodmark.spark.jobs.feed import LeaseWatch

ANYWHERE = ("parquet:",)


@pytest.fixture
def users(site: Site) -> Namespace:
    """Two ranges."""
    users = site.create_namespace("users")
    site.split("users", b"00150")
    fill(users)
    return users


@pytest.fixture
def files(tmp_path: Path) -> Path:
    return tmp_path / "files"


class Running:
    """A feed that is run in a thread of its own."""

    def __init__(self) -> None:
        self.stop = Event()
        self.summary: FeedRunSummary | None = None
        self.failure: BaseException | None = None

    @contextmanager
    def run(self, served: Served, name: str, spark: SparkSession, **options: Any) -> Iterator["Running"]:
        def work() -> None:
            try:
                self.summary = run_feed(
                    address_of(served.url), name, sinks=ANYWHERE, spark=spark, stop=self.stop, **options
                )
            except BaseException as error:
                self.failure = error

        thread = Thread(target=work)
        thread.start()
        try:
            yield self
        finally:
            self.stop.set()
            thread.join()


def delivered(files: Path) -> list[tuple[Version, bytes, bytes | None]]:
    """The rows of a file sink, in order."""
    if not files.exists():
        return []
    table = pyarrow.dataset.dataset(files, schema=SCHEMA, format="parquet").to_table()
    columns = (table[name].to_pylist() for name in ("_commit_version", "key", "value"))
    return sorted(zip(*columns, strict=True))


def expected(site: Site, until: Version) -> list[tuple[Version, bytes, bytes | None]]:
    return [(change.version, change.key, change.value) for change in site.changes("users", until=until)]


def run_once(served: Served, spark: SparkSession, name: str = "copy", **options: Any) -> FeedRunSummary:
    return run_feed(address_of(served.url), name, sinks=ANYWHERE, once=True, spark=spark, **options)


def test_files_get_each_change_once_and_the_site_keeps_the_checkpoint(
    served: Served, spark: SparkSession, users: Namespace, files: Path
) -> None:
    options = SinkOptions(batch_records=50)
    served.site.feeds.create("copy", "users", f"parquet:{files}", since="beginning", options=options)
    first = run_once(served, spark)
    feed = served.site.feeds.show("copy")
    assert (first.state, first.checkpoint) == (FeedState.NORMAL, feed.checkpoint)
    assert feed.lease is None
    assert len(feed.ranges) == 2
    assert delivered(files) == expected(served.site, first.checkpoint)
    assert first.batches > 5
    fill(users, 40)
    second = run_once(served, spark)
    assert second.changes == len(expected(served.site, second.checkpoint)) - first.changes > 0
    # Whoever runs it next goes on from there.
    fill(users, 20)
    runner = served.site.feeds.runner("copy", sinks=ANYWHERE)
    thread = Thread(target=runner.run)
    thread.start()
    end = served.site.resolved_version()
    wait_until(lambda: runner.statistics().checkpoint >= end, "the other runner does not go on")
    runner.request_stop()
    thread.join()
    assert delivered(files) == expected(served.site, served.site.feeds.show("copy").checkpoint)


def test_a_feed_goes_on_over_a_swap(
    served: Served, spark: SparkSession, users: Namespace, files: Path
) -> None:
    site, options = served.site, SinkOptions(batch_records=50)
    site.feeds.create(
        "copy", "users", f"parquet:{files}", since="beginning", options=options, on_generation="difference"
    )
    run_once(served, spark)
    site.generations.publish("users", {b"%05d" % number: b"new" for number in range(100, 400)})
    users.put(b"last", b"3")
    end = site.resolved_version()
    while site.feeds.show("copy").checkpoint < end:
        run_once(served, spark)
    rows = [(key, value) for _, key, value in delivered(files) if key]
    assert state_after(rows) == dict(users.scan())
    assert len(rows) == len(set(rows))


def test_a_new_feed_begins_with_a_snapshot_of_every_key(
    served: Served, spark: SparkSession, users: Namespace, files: Path
) -> None:
    served.site.update_namespace("users", retention=timedelta(0))
    collect_old(served.site)
    options = SinkOptions(batch_records=50)
    feed = served.site.feeds.create("copy", "users", f"parquet:{files}", options=options)
    users.put(b"later", b"x")
    users.delete(next(iter(users.scan()))[0])
    summary = run_once(served, spark)
    state = state_after((key, value) for _, key, value in delivered(files))
    assert state == dict(users.scan())
    assert summary.checkpoint > feed.checkpoint
    assert not served.site.feeds.show("copy").is_at_snapshot
    assert run_once(served, spark).changes == 0


@pytest.mark.slow
def test_files_get_what_is_written_while_the_feed_runs(
    served: Served, spark: SparkSession, users: Namespace, files: Path
) -> None:
    served.site.feeds.create("copy", "users", f"parquet:{files}", since="beginning")
    running = Running()
    with running.run(served, "copy", spark):
        with writing(users):
            wait_until(
                lambda: any(each.key == b"new 00200" for each in served.site.changes("users")),
                "no writes",
            )
            wait_until(lambda: any(files.rglob("*.parquet")), "nothing is delivered")
            with pytest.raises(LeaseHeld, match="is run by spark-"):
                run_once(served, spark)
        end = served.site.resolved_version()
        wait_until(lambda: served.site.feeds.show("copy").checkpoint >= end, "it is not delivered to its end")
    assert running.failure is None
    assert running.summary is not None
    assert running.summary.state is FeedState.NORMAL
    assert delivered(files) == expected(served.site, served.site.feeds.show("copy").checkpoint)


def test_a_feed_ends_at_its_target_and_stays_so(
    served: Served, spark: SparkSession, users: Namespace, files: Path
) -> None:
    until = served.site.now()
    users.put(b"later", b"x")
    served.site.feeds.create("copy", "users", f"parquet:{files}", since="beginning", until=until)
    summary = run_feed(address_of(served.url), "copy", sinks=ANYWHERE, spark=spark)
    assert (summary.state, summary.checkpoint) == (FeedState.FINISHED, until)
    assert delivered(files) == expected(served.site, until)
    with pytest.raises(FeedStateConflict, match="finished"):
        run_once(served, spark)


@pytest.mark.slow
def test_a_sink_that_refuses_is_tried_again(
    served: Served, spark: SparkSession, users: Namespace, files: Path
) -> None:
    # Nobody can make a directory here.
    files.write_text("in the way")
    served.site.feeds.create("copy", "users", f"parquet:{files}/inside", since="beginning")
    running = Running()
    with running.run(served, "copy", spark, once=True):
        wait_until(
            lambda: served.site.feeds.show("copy").state is FeedState.ERROR, "nobody says what is wrong"
        )
        error = served.site.feeds.show("copy").error
        assert error is not None
        assert str(files) in error.text
        users.put(b"meanwhile", b"x")
        files.unlink()
        wait_until(lambda: running.summary is not None, "it does not get over it")
    assert running.failure is None
    feed = served.site.feeds.show("copy")
    assert (feed.state, feed.error) == (FeedState.NORMAL, None)
    assert delivered(files / "inside") == expected(served.site, feed.checkpoint)


def test_a_feed_that_is_paused_or_removed_is_let_go(
    served: Served, spark: SparkSession, users: Namespace, files: Path
) -> None:
    served.site.feeds.create("copy", "users", f"parquet:{files}")
    running = Running()
    with running.run(served, "copy", spark), writing(users):
        wait_until(lambda: len(delivered(files)) > 0, "nothing is delivered")
        served.site.feeds.pause("copy")
        wait_until(lambda: running.summary is not None, "it does not notice the pause")
    assert running.summary is not None
    assert running.summary.state is FeedState.STOPPED
    served.site.feeds.resume("copy")
    removed = Running()
    with removed.run(served, "copy", spark):
        wait_until(lambda: served.site.feeds.show("copy").lease is not None, "it does not begin")
        served.site.feeds.remove("copy")
        wait_until(lambda: removed.summary is not None, "it does not notice that it is gone")
    assert removed.summary is not None
    assert removed.summary.state is FeedState.REMOVED


def test_a_feed_whose_changes_are_gone_has_failed(
    served: Served, spark: SparkSession, users: Namespace, files: Path
) -> None:
    served.site.feeds.create("copy", "users", f"parquet:{files}")
    served.site.host.retention.release_safe_point("feed/copy")
    served.site.update_namespace("users", retention=timedelta(0))
    fill(users)
    collect_old(served.site)
    with pytest.raises(VersionCollected):
        run_once(served, spark)
    assert served.site.feeds.show("copy").state is FeedState.FAILED


@pytest.mark.usefixtures("users")
def test_a_sink_that_the_runner_does_not_allow_is_refused_before_anything_is_read(
    served: Served, spark: SparkSession, files: Path
) -> None:
    served.site.feeds.create("copy", "users", f"parquet:{files}")
    with pytest.raises(NotAllowed, match="sinks="):
        run_feed(address_of(served.url), "copy", sinks=[f"parquet:{files}-elsewhere"], once=True, spark=spark)
    assert not files.exists()


@pytest.mark.usefixtures("users")
def test_a_sink_that_says_no_for_good_ends_the_run(served: Served, spark: SparkSession, files: Path) -> None:
    served.site.feeds.create("copy", "users", f"parquet:{files}")
    served.site.feeds.create("other", "users", f"parquet:{files}")
    run_once(served, spark)
    with pytest.raises(InvalidArgument, match="holds the changes of"):
        run_once(served, spark, "other")
    assert served.site.feeds.show("other").state is FeedState.ERROR
    assert served.site.feeds.show("other").lease is None


@pytest.mark.usefixtures("users")
def test_what_cannot_be_run_here_is_refused(served: Served, spark: SparkSession) -> None:
    served.site.feeds.create("copy", "users", "stdout:")
    with pytest.raises(InvalidArgument, match="on other machines"):
        run_once(served, spark)
    with pytest.raises(FeedNotFound):
        run_once(served, spark, "nothing")


@pytest.mark.usefixtures("users")
def test_a_task_stops_when_its_runner_has_lost_the_lease_or_is_not_heard_of(served: Served) -> None:
    site, now_ms = served.site, [monotonic_ms()]
    site.feeds.create("copy", "users", "blackhole:")
    feed = site.host.feeds.acquire("copy", "one", 0.2)
    (first, _) = feed.ranges
    watch = LeaseWatch(site.host.feeds, site.host.physical_ms, feed, "one", lambda: now_ms[0])
    assert watch.look()
    watch.require_writable()
    cut_anew = replace(feed, ranges=[replace(first, id=99)])
    assert not LeaseWatch(site.host.feeds, site.host.physical_ms, cut_anew, "one").look()
    lease = feed.lease
    assert lease is not None
    # Nobody renews it: the runner is dead.
    wait_until(lambda: site.host.physical_ms() > lease.expires_at_ms, "time stands still")
    with pytest.raises(LeaseHeld, match="another runner may have taken over"):
        watch.look()
    now_ms[0] += 200
    with pytest.raises(LeaseHeld):
        watch.require_writable()
    feed = site.host.feeds.acquire("copy", "other", 60)
    with pytest.raises(LeaseHeld):
        watch.look()
    site.feeds.pause("copy")
    assert not LeaseWatch(site.host.feeds, site.host.physical_ms, feed, "other").look()
