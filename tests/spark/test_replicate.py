"""Changes of one site in another, copied by Spark streams."""

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from threading import Event, Thread
from typing import Any

import pytest
from pyspark.sql import SparkSession
from tests.server.processes import wait_until
from tests.spark.conftest import Served, ServeSite
from tests.spark.support_backup import address_of, contents, fill, writing

from floodmark.model.errors import InvalidArgument, InvalidOption, NamespaceNotFound
from floodmark.site import Namespace, Site
from floodmark.spark.jobs import ReplicateSummary, replicate


@pytest.fixture
def users(site: Site) -> Namespace:
    users = site.create_namespace("users", ttl=timedelta(days=30))
    fill(users)
    return users


@pytest.fixture
def bergen(serve_site: ServeSite) -> Served:
    return serve_site("bergen")


@pytest.fixture
def checkpoint(tmp_path: Path) -> str:
    return str(tmp_path / "checkpoint")


class Replicating:
    """A replication that goes on in a thread of its own."""

    def __init__(self) -> None:
        self.stop = Event()
        self.summary: ReplicateSummary | None = None
        self.failure: BaseException | None = None

    @contextmanager
    def run(self, *arguments: Any, **options: Any) -> Iterator["Replicating"]:
        def work() -> None:
            try:
                self.summary = replicate(*arguments, stop=self.stop, **options)
            except BaseException as error:
                self.failure = error
                raise

        thread = Thread(target=work)
        thread.start()
        try:
            yield self
        finally:
            self.stop.set()
            thread.join()
        if self.failure is not None:
            raise self.failure


def wait_copied(copies: list[Namespace], key: bytes) -> None:
    wait_until(lambda: all(copy.get(key) is not None for copy in copies), 60, "it is not copied")


def test_a_copy_holds_what_the_source_holds_and_goes_on_where_it_was(
    served: Served, bergen: Served, spark: SparkSession, users: Namespace, checkpoint: str
) -> None:
    source, target = address_of(served.url), address_of(bergen.url)
    first = replicate(source, target, ["users"], checkpoint=checkpoint, once=True, spark=spark)
    assert contents(bergen.site, "users") == contents(served.site, "users")
    assert bergen.site.namespace("users").settings == users.settings
    fill(users, 60)
    before = len(list(served.site.changes("users")))
    second = replicate(source, target, ["users"], checkpoint=checkpoint, once=True, spark=spark)
    assert contents(bergen.site, "users") == contents(served.site, "users")
    assert first.changes + second.changes == before
    assert second.changes < first.changes
    idle = replicate(source, target, ["users"], checkpoint=checkpoint, once=True, spark=spark)
    assert (idle.batches, idle.changes, idle.lag_ms_p99) == (0, 0, None)


def test_several_namespaces_are_followed_until_it_is_told_to_stop(
    served: Served, bergen: Served, spark: SparkSession, users: Namespace, checkpoint: str
) -> None:
    orders = served.site.create_namespace("orders")
    source, target = address_of(served.url), address_of(bergen.url)
    following = Replicating()
    with following.run(source, target, ["users", "orders"], checkpoint=checkpoint, spark=spark):
        with writing(users), writing(orders):
            wait_until(lambda: "orders" in bergen.site.namespaces(), 60, "nothing is created")
            copies = [bergen.site.namespace(name) for name in ("users", "orders")]
            wait_copied(copies, b"new 00200")
        for namespace in (users, orders):
            namespace.put(b"last", b"x")
        expected = [contents(served.site, name) for name in ("users", "orders")]
        wait_until(
            lambda: [contents(bergen.site, name) for name in ("users", "orders")] == expected,
            60,
            "not everything is copied",
        )
    summary = following.summary
    assert summary is not None
    assert [each.namespace for each in summary.namespaces] == ["users", "orders"]
    assert summary.changes == sum(each.changes for each in summary.namespaces) > 0
    # The batches before the last ones, which were perhaps stopped before they were counted.
    assert summary.batches >= 2
    assert summary.lag_ms_p50 is not None
    assert summary.lag_ms_p99 is not None
    assert 0 <= summary.lag_ms_p50 <= summary.lag_ms_p99


def test_what_was_written_later_at_the_target_stays(
    served: Served, bergen: Served, spark: SparkSession, users: Namespace, checkpoint: str
) -> None:
    users.put(b"both", b"from oslo")
    copy = bergen.site.create_namespace("users")
    copy.put(b"both", b"from bergen, later")
    replicate(
        address_of(served.url),
        address_of(bergen.url),
        ["users"],
        checkpoint=checkpoint,
        once=True,
        spark=spark,
    )
    assert copy.get(b"both") == b"from bergen, later"


def test_it_begins_behind_a_version(
    served: Served, bergen: Served, spark: SparkSession, users: Namespace, checkpoint: str
) -> None:
    since = served.site.now()
    users.put(b"later", b"x")
    replicate(
        address_of(served.url),
        address_of(bergen.url),
        ["users"],
        checkpoint=checkpoint,
        once=True,
        since=since,
        spark=spark,
    )
    assert [key for key, _ in bergen.site.namespace("users").scan()] == [b"later"]


@pytest.mark.usefixtures("users")
def test_what_cannot_be_copied_is_refused_before_anything_is_done(
    served: Served, bergen: Served, serve_site: ServeSite, spark: SparkSession, checkpoint: str
) -> None:
    source, target = address_of(served.url), address_of(bergen.url)

    def run(from_: Any, to: Any, names: list[str]) -> None:
        replicate(from_, to, names, checkpoint=checkpoint, once=True, spark=spark)

    with pytest.raises(InvalidArgument, match="they are one site"):
        run(source, source, ["users"])
    with pytest.raises(NamespaceNotFound):
        run(source, target, ["nothing"])
    with pytest.raises(InvalidArgument, match="each of them once"):
        run(source, target, ["users", "users"])
    with pytest.raises(InvalidOption, match="can be read, but not replicated to"):
        run(source, address_of(str(bergen.directory)), ["users"])
    run(source, target, ["users"])
    with pytest.raises(InvalidArgument, match="name another checkpoint"):
        run(source, address_of(serve_site("troms").url), ["users"])
