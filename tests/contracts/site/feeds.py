"""The site's contract: named feeds."""

from collections.abc import Callable
from pathlib import Path
from threading import Event

import pyarrow.parquet
from tests.contracts.site.base import SiteContractBase, age, oldest, refused
from tests.waiting import run_threads, wait_until

from floodmark.feed.named.feeds import Feed, FeedSpec, FeedState, FeedStatistics, SinkOptions
from floodmark.feed.named.runner import FeedRunner
from floodmark.model.errors import (
    FeedExists,
    FeedNotFound,
    FeedStateConflict,
    InvalidArgument,
    InvalidVersion,
    LeaseHeld,
    VersionCollected,
    VersionInFuture,
)
from floodmark.model.version import compose, moment_of
from floodmark.site import Namespace, Site
from floodmark.testing.clock import SimulatedTime

DAY_MS = 24 * 3_600_000


class FeedContract(SiteContractBase):
    """Feeds that remember how far they are, and run into a sink."""

    def test_feed_is_what_it_was_created_as(self, site: Site, users: Namespace, time: SimulatedTime) -> None:
        since = users.put(b"ada", b"countess")
        until = users.put(b"bob", b"builder")
        feed = site.feeds.create(
            "copy",
            "users",
            "parquet:somewhere?concurrency=4&compression=zstd",
            since=since,
            until=until,
            prefix=b"b",
            description="to the warehouse",
            ranges=3,
            options=SinkOptions(batch_records=10, rate_bytes_max=1_000_000),
        )
        assert type(feed) is Feed
        assert type(feed.spec) is FeedSpec
        assert feed.spec == FeedSpec(
            name="copy",
            namespace="users",
            sink="parquet:somewhere?compression=zstd",
            since=since,
            until=until,
            prefix=b"b",
            description="to the warehouse",
            ranges=3,
            options=SinkOptions(concurrency=4, batch_records=10, rate_bytes_max=1_000_000),
        )
        assert (feed.name, feed.checkpoint, feed.state) == ("copy", since, FeedState.NORMAL)
        assert type(feed.state) is FeedState
        assert feed.created_at_ms == feed.changed_at_ms == time()
        assert (feed.error, feed.lease) == (None, None)
        assert site.feeds.show("copy") == feed

    def test_feeds_are_listed_by_name(self, site: Site, users: Namespace) -> None:
        assert site.feeds.list() == []
        users.put(b"ada", b"countess")
        made = [site.feeds.create(name, "users", "blackhole:") for name in ("b", "c", "a")]
        assert site.feeds.list() == sorted(made, key=lambda feed: feed.name)

    def test_feed_begins_where_it_is_told_to(self, site: Site, users: Namespace, time: SimulatedTime) -> None:
        first = users.put(b"ada", b"countess")
        time.advance(10)
        second = users.put(b"ada", b"programmer")
        create = site.feeds.create
        assert create("version", "users", "blackhole:", since=first).checkpoint == first
        assert first <= create("moment", "users", "blackhole:", since=moment_of(first)).checkpoint < second
        start = create("start", "users", "blackhole:")
        assert (start.checkpoint >= second, start.is_at_snapshot, start.spec.snapshot) == (True, True, True)
        assert create("beginning", "users", "blackhole:", since="beginning").checkpoint < first
        assert create("now", "users", "blackhole:", since="now").checkpoint >= second
        target = create("target", "users", "blackhole:", since=first, until=moment_of(second))
        assert target.spec.until is not None
        assert target.spec.until >= second

    def test_name_of_a_feed_is_used_once(self, site: Site, users: Namespace) -> None:
        feed = site.feeds.create("copy", "users", "blackhole:")
        error = refused(FeedExists, lambda: site.feeds.create("copy", "users", "stdout:"), feed="copy")
        assert "feed 'copy' is already there" in str(error)
        assert site.feeds.list() == [feed]

    def test_unknown_feed_is_not_found(self, site: Site, users: Namespace) -> None:
        feeds = site.feeds
        feeds.create("copy", "users", "blackhole:")
        for ask in (
            lambda: feeds.show("nobody"),
            lambda: feeds.pause("nobody"),
            lambda: feeds.resume("nobody"),
            lambda: feeds.resume("nobody", since="now"),
            lambda: feeds.update("nobody", description="x"),
            lambda: feeds.remove("nobody"),
            lambda: feeds.rebalance("nobody"),
            lambda: feeds.statistics("nobody"),
            lambda: feeds.runner("nobody").run(),
        ):
            error = refused(FeedNotFound, ask, feed="nobody")
            assert "no feed 'nobody'; there are: copy" in str(error)

    # States

    def test_feed_is_paused_updated_and_resumed(
        self, site: Site, users: Namespace, time: SimulatedTime
    ) -> None:
        until = users.put(b"ada", b"countess")
        feeds = site.feeds
        made = feeds.create("copy", "users", "blackhole:", since="beginning")
        time.advance(1_000)
        paused = feeds.pause("copy")
        assert (paused.state, paused.changed_at_ms) == (FeedState.STOPPED, time())
        assert feeds.show("copy") == paused
        changed = feeds.update(
            "copy", sink="stdout:", until=until, description="new", options=SinkOptions(concurrency=3)
        )
        assert changed.spec.sink == "stdout:"
        assert (changed.spec.until, changed.spec.description) == (until, "new")
        assert changed.spec.options == SinkOptions(concurrency=3)
        assert changed.spec.ranges == made.spec.ranges
        endless = feeds.update("copy", until=None)
        assert (endless.spec.until, endless.spec.description) == (None, "new")
        assert feeds.update("copy", until=moment_of(until)).spec.until is not None
        resumed = feeds.resume("copy")
        assert (resumed.state, resumed.checkpoint) == (FeedState.NORMAL, made.checkpoint)
        assert feeds.show("copy") == resumed

    def test_what_a_state_does_not_allow_is_refused(self, site: Site, users: Namespace) -> None:
        users.put(b"ada", b"countess")
        feeds = site.feeds
        feeds.create("copy", "users", "blackhole:")
        normal: list[Callable[[], object]] = [
            lambda: feeds.resume("copy"),
            lambda: feeds.update("copy", description="x"),
        ]
        for ask in normal:
            refused(FeedStateConflict, ask, feed="copy", state="normal")
        feeds.pause("copy")
        stopped: list[Callable[[], object]] = [
            lambda: feeds.pause("copy"),
            lambda: feeds.runner("copy").run(),
        ]
        for ask in stopped:
            error = refused(FeedStateConflict, ask, feed="copy", state="stopped")
            assert "feed 'copy' is stopped and cannot be" in str(error)

    def test_feed_may_go_on_from_somewhere_else(self, site: Site, users: Namespace) -> None:
        users.put(b"ada", b"countess")
        version = users.put(b"ada", b"programmer")
        site.feeds.create("copy", "users", "blackhole:")
        site.feeds.pause("copy")
        assert site.feeds.resume("copy", since=version).checkpoint == version

    def test_bad_targets_and_starts_are_refused(
        self, site: Site, users: Namespace, time: SimulatedTime
    ) -> None:
        version = users.put(b"ada", b"countess")
        create = site.feeds.create
        refused(InvalidVersion, lambda: create("copy", "users", "blackhole:", since=version, until=version))
        future = compose(time() + 10_000, 0)
        refused(VersionInFuture, lambda: create("copy", "users", "blackhole:", since=future), version=future)
        site.feeds.create("late", "users", "blackhole:", since=version)
        site.feeds.pause("late")
        refused(InvalidVersion, lambda: site.feeds.update("late", until=version))
        assert [feed.name for feed in site.feeds.list()] == ["late"]

    def test_feed_whose_changes_are_gone_cannot_be_created(
        self, site: Site, users: Namespace, time: SimulatedTime
    ) -> None:
        version = users.put(b"ada", b"countess")
        age(site, time)
        refused(
            VersionCollected,
            lambda: site.feeds.create("copy", "users", "blackhole:", since=version),
            version=version,
            oldest=oldest(site),
        )
        assert site.feeds.list() == []
        assert site.safe_points() == []

    def test_feed_keeps_what_it_has_not_delivered_until_it_is_removed(
        self, site: Site, users: Namespace, time: SimulatedTime
    ) -> None:
        version = users.put(b"ada", b"countess")
        site.feeds.create("copy", "users", "blackhole:", since=version)
        (point,) = site.safe_points()
        assert (point.name, point.version) == ("feed/copy", version)
        age(site, time)
        assert oldest(site) == version
        site.feeds.remove("copy")
        assert site.feeds.list() == []
        assert site.safe_points() == []
        site.collect_garbage()
        assert oldest(site) > version

    def test_feed_that_did_not_run_for_too_long_has_failed(
        self, site: Site, users: Namespace, time: SimulatedTime
    ) -> None:
        version = users.put(b"ada", b"countess")
        site.feeds.create("copy", "users", "blackhole:", since=version)
        users.put(b"ada", b"programmer")
        time.advance(2 * DAY_MS)
        site.collect_garbage()
        refused(VersionCollected, site.feeds.runner("copy").run, version=version, oldest=oldest(site))
        failed = site.feeds.show("copy")
        assert failed.state is FeedState.FAILED
        assert failed.error is not None
        assert failed.error.collected
        refused(
            VersionCollected,
            lambda: site.feeds.resume("copy", since="beginning"),
            version=site.host.namespaces.find_namespace("users").created_at,
            oldest=oldest(site),
        )
        resumed = site.feeds.resume("copy", since="snapshot")
        assert (resumed.state, resumed.error, resumed.is_at_snapshot) == (FeedState.NORMAL, None, True)
        assert resumed.checkpoint >= oldest(site)

    # Ranges

    def test_feed_is_cut_along_partitions(self, site: Site, users: Namespace) -> None:
        users.put(b"ada", b"countess")
        feed = site.feeds.create("copy", "users", "blackhole:", ranges=3)
        assert len(feed.ranges) == 1
        assert site.feeds.rebalance("copy") == feed
        site.split("users", b"g")
        site.split("users", b"p")
        cut = site.feeds.rebalance("copy")
        assert len(cut.ranges) == 3
        assert cut.checkpoint == feed.checkpoint
        assert [part.keys.end for part in cut.ranges][:-1] == [part.keys.start for part in cut.ranges][1:]
        assert site.feeds.show("copy") == cut
        site.feeds.pause("copy")
        assert len(site.feeds.update("copy", ranges=2).ranges) == 2

    # Statistics

    def test_statistics_tell_the_lag(self, site: Site, users: Namespace, time: SimulatedTime) -> None:
        version = users.put(b"ada", b"countess")
        site.feeds.create("copy", "users", "blackhole:", since=version)
        time.advance(5_000)
        statistics = site.feeds.statistics("copy")
        assert type(statistics) is FeedStatistics
        assert statistics == FeedStatistics(
            name="copy",
            state=FeedState.NORMAL,
            checkpoint=version,
            resolved_version=statistics.resolved_version,
            checkpoint_lag_ms=5_000,
            resolved_lag_ms=0,
            ranges=1,
            holder=None,
        )
        assert statistics.resolved_version >= version

    # Running

    def test_feed_runs_to_its_target(self, site: Site, users: Namespace) -> None:
        site.split("users", b"m")
        for number in range(30):
            users.put(b"%c%d" % (b"az"[number % 2], number), b"x")
        until = users.put_many({b"a": b"last", b"z": b"last"})
        site.feeds.create("copy", "users", "blackhole:", since="beginning", until=until)
        runner = site.feeds.runner("copy")
        assert type(runner) is FeedRunner
        assert runner.run() is FeedState.FINISHED
        statistics = runner.statistics()
        assert (statistics.changes, statistics.checkpoint) == (32, until)
        feed = site.feeds.show("copy")
        assert (feed.state, feed.checkpoint, feed.lease) == (FeedState.FINISHED, until, None)
        assert site.feeds.statistics("copy").checkpoint_lag_ms == 0
        refused(FeedStateConflict, site.feeds.runner("copy").run, feed="copy", state="finished")
        refused(FeedStateConflict, lambda: site.feeds.resume("copy"), feed="copy", state="finished")

    def test_parquet_sink_holds_every_change_once(self, site: Site, users: Namespace, tmp_path: Path) -> None:
        site.split("users", b"m")
        for number in range(20):
            users.put(b"%c%d" % (b"az"[number % 2], number % 7), b"%d" % number)
        middle = site.now()
        users.delete(b"a0")
        until = users.put(b"zoe", b"x" * 10_000, ttl=100)
        target = tmp_path / "changes"
        site.feeds.create("export", "users", f"parquet:{target}", since="beginning", until=middle)
        assert site.feeds.runner("export", sinks=[f"parquet:{tmp_path}"]).run() is FeedState.FINISHED
        site.feeds.update("export", until=until)
        site.feeds.resume("export")
        assert site.feeds.runner("export", sinks=[f"parquet:{tmp_path}"]).run() is FeedState.FINISHED
        rows = pyarrow.parquet.read_table(target).to_pylist()
        found = sorted(
            (row["_commit_version"], row["key"], row["value"], row["_change_type"]) for row in rows
        )
        assert found == [
            (change.version, change.key, change.value, change.type.value) for change in site.changes("users")
        ]

    def test_unknown_sink_is_refused_at_once(self, site: Site, users: Namespace) -> None:
        users.put(b"ada", b"countess")
        error = refused(
            InvalidArgument, lambda: site.feeds.create("copy", "users", "parquets:x"), scheme="parquets"
        )
        assert "there is no sink parquets: here" in str(error)
        assert site.feeds.list() == []
        assert site.safe_points() == []
        made = site.feeds.create("copy", "users", "blackhole:")
        site.feeds.pause("copy")
        refused(InvalidArgument, lambda: site.feeds.update("copy", sink="parquets:x"), scheme="parquets")
        assert site.feeds.show("copy").spec == made.spec

    def test_sink_that_the_runner_does_not_know_is_told_when_the_feed_runs(
        self, site: Site, users: Namespace
    ) -> None:
        users.put(b"ada", b"countess")
        site.host.feeds.create(FeedSpec(name="copy", namespace="users", sink="nowhere:"))
        error = refused(InvalidArgument, site.feeds.runner("copy").run, scheme="nowhere")
        assert "there is no sink nowhere: here" in str(error)
        assert site.feeds.show("copy").state is FeedState.ERROR

    def test_one_runner_at_a_time_works_on_a_feed(self, site: Site, users: Namespace) -> None:
        site.feeds.create("copy", "users", "blackhole:")
        version = users.put(b"ada", b"countess")
        first = site.feeds.runner("copy", holder="one")
        running = Event()

        def run() -> None:
            assert first.run() is FeedState.NORMAL
            running.set()

        def interfere() -> None:
            feed = wait_until(
                lambda: (feed := site.feeds.show("copy")).checkpoint >= version and feed, "it does not run"
            )
            assert isinstance(feed, Feed)
            assert feed.lease is not None
            assert site.feeds.statistics("copy").holder == feed.lease.holder == "one"
            error = refused(
                LeaseHeld,
                site.feeds.runner("copy", holder="two").run,
                feed="copy",
                holder="one",
                expires_at_ms=feed.lease.expires_at_ms,
            )
            assert "feed 'copy' is run by one until" in str(error)
            first.request_stop()

        run_threads(run, interfere)
        assert running.is_set()
        assert site.feeds.show("copy").lease is None

    def test_runner_ends_when_its_feed_is_paused(self, site: Site, users: Namespace) -> None:
        users.put(b"ada", b"countess")
        site.feeds.create("copy", "users", "blackhole:")
        runner = site.feeds.runner("copy")

        def run() -> None:
            assert runner.run() is FeedState.STOPPED

        def pause() -> None:
            wait_until(lambda: site.feeds.show("copy").lease, "it does not run")
            site.feeds.pause("copy")

        run_threads(run, pause)
        assert site.feeds.show("copy").state is FeedState.STOPPED
