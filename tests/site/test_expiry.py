"""A record that expires is a change: every reader that saw the record alive is told, once, at its time."""

from collections.abc import Iterator
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from random import Random
from threading import Thread

import pyarrow.parquet
import pytest
from tests.replication.support_links import Mesh, embedded
from tests.site.support import START_MS, HookedEngine, node_of, open_memory
from tests.waiting import wait_until

from floodmark.codec.ordered import encode_namespace
from floodmark.feed.named.feeds import FeedState
from floodmark.feed.reading.capture import ChangeCapture
from floodmark.feed.subscription.consumer import SubscriptionOptions
from floodmark.model.change import Change, ChangeType, Heartbeat, Resolved
from floodmark.model.errors import StorageFull
from floodmark.model.limits import EXPIRIES_PER_COMMIT_MAX
from floodmark.model.stream import Way
from floodmark.partition.families import DATA, EXPIRING, EXPIRING_INDEXED, META
from floodmark.site import Namespace, Site
from floodmark.testing import SimulatedTime

BY_HAND = SubscriptionOptions(follow=False, background=False)
LARGE = b"large" * 2000


def tell(site: Site) -> None:
    assert node_of(site).expiries.tell()


def expire(site: Site, time: SimulatedTime, seconds: int = 10) -> None:
    """Let time pass, and the site tell what has expired."""
    time.advance(seconds * 1000)
    tell(site)


def show(changes: Iterator[Change]) -> list[tuple[bytes, ChangeType, bytes | None]]:
    return [(change.key, change.type, change.value) for change in changes]


def indexed(site: Site) -> int:
    page = node_of(site).engine.scan(META, EXPIRING, EXPIRING + b"\xff", rows_max=10_000, bytes_max=1 << 30)
    return len(page)


def test_reader_that_resumes_is_told_once(site: Site, users: Namespace, time: SimulatedTime) -> None:
    put = users.put(b"ada", b"countess", ttl=5)
    (alive,) = site.changes("users")
    expire(site, time, 4)
    assert list(site.changes("users", since=alive.version)) == []
    expire(site, time, 2)
    (told,) = site.changes("users", since=alive.version)
    assert (told.key, told.value, told.type, told.stamp) == (b"ada", None, ChangeType.DELETE, alive.stamp)
    assert told.expires_at == alive.expires_at is not None
    assert told.version > put
    expire(site, time)
    assert list(site.changes("users", since=told.version)) == []
    assert (users.get(b"ada"), list(users.scan()), indexed(site)) == (None, [], 0)


def test_follower_is_told_from_the_tail(site: Site, users: Namespace, time: SimulatedTime) -> None:
    stream = site.changes("users", follow=True)
    users.put(b"ada", b"countess", ttl=5)
    assert next(stream).type is ChangeType.UPSERT
    expire(site, time)
    assert show(iter([next(stream)])) == [(b"ada", ChangeType.DELETE, None)]
    assert site.statistics().readers.changes[Way.TAIL] >= 1


def test_log_and_scan_tell_the_same(site: Site, users: Namespace, time: SimulatedTime) -> None:
    since = users.put(b"zoe", b"stays")
    users.put_many({b"ada": b"countess", b"bob": LARGE}, ttl=5)
    expire(site, time)
    by_log = list(site.changes("users", since=since))
    node_of(site).trim_logs(site.now())
    by_scan = list(site.changes("users", since=since))
    assert by_log == by_scan
    assert show(iter(by_log[2:])) == [(b"ada", ChangeType.DELETE, None), (b"bob", ChangeType.DELETE, None)]


def test_snapshot_is_followed_by_the_expiry(site: Site, users: Namespace, time: SimulatedTime) -> None:
    users.put(b"ada", b"countess", ttl=5)
    items = list(site.changes("users", since="snapshot", resolved_markers=True))
    assert [item.value for item in items if isinstance(item, Change)] == [b"countess"]
    marker = items[-1]
    assert isinstance(marker, Resolved)
    expire(site, time)
    assert show(site.changes("users", since=marker)) == [(b"ada", ChangeType.DELETE, None)]


def test_before_image_is_what_has_expired(site: Site, users: Namespace, time: SimulatedTime) -> None:
    users.put(b"ada", b"countess", ttl=5)
    people = site.create_namespace("people", merge="fields")
    people.put(b"bob", {"job": "builder"}, ttl=5)
    since = site.now()
    expire(site, time)
    assert show(site.changes("users", since=since, before_images=True)) == [
        (b"ada", ChangeType.DELETE, b"countess")
    ]
    assert show(site.changes("people", since=since, before_images=True)) == [
        (b"bob", ChangeType.DELETE, b'{"job":"builder"}')
    ]
    # Read with the put in one batch.
    assert show(site.changes("users", before_images=True))[-1] == (b"ada", ChangeType.DELETE, b"countess")


def test_named_feed_goes_on_with_the_expiry(
    site: Site, users: Namespace, time: SimulatedTime, tmp_path: Path
) -> None:
    put = users.put(b"ada", b"countess", ttl=5)
    site.feeds.create("copy", "users", f"parquet:{tmp_path / 'copy'}", since="beginning", until=put)
    site.feeds.runner("copy", sinks=[f"parquet:{tmp_path}"]).run()
    expire(site, time)
    site.feeds.update("copy", until=site.now())
    site.feeds.resume("copy")
    assert site.feeds.runner("copy", sinks=[f"parquet:{tmp_path}"]).run() is FeedState.FINISHED
    rows = pyarrow.parquet.read_table(tmp_path / "copy").sort_by("_commit_version").to_pylist()
    assert [(row["_change_type"], row["value"]) for row in rows] == [
        ("upsert", b"countess"),
        ("delete", None),
    ]


def test_subscription_delivers_the_expiry(site: Site, users: Namespace, time: SimulatedTime) -> None:
    users.put(b"ada", b"countess", ttl=5)
    with site.subscribe("indexer", "users", start="beginning", options=BY_HAND) as subscription:
        for delivery in subscription:
            delivery.acknowledge()
    expire(site, time)
    with site.subscribe("indexer", "users", options=BY_HAND) as subscription:
        assert show(delivery.change for delivery in subscription) == [(b"ada", ChangeType.DELETE, None)]


@pytest.mark.parametrize("again", ["put", "put with another ttl", "delete", "drop"])
def test_record_that_was_written_over_expires_in_silence(
    site: Site, users: Namespace, time: SimulatedTime, again: str
) -> None:
    users.put(b"ada", b"countess", ttl=5)
    if again == "put":
        users.put(b"ada", b"programmer")
    elif again == "put with another ttl":
        users.put(b"ada", b"programmer", ttl=500)
    elif again == "delete":
        users.delete(b"ada")
    else:
        site.drop_namespace("users")
    since = site.now()
    expire(site, time)
    if again != "drop":
        assert list(site.changes("users", since=since)) == []
        assert users.get(b"ada") == (None if again == "delete" else b"programmer")
    assert indexed(site) == (again == "put with another ttl")


def test_record_that_had_expired_when_it_came_is_told_once() -> None:
    mesh = Mesh("oslo", "rome")
    mesh["oslo"].namespace("users").put(b"ada", b"countess", ttl=5)
    mesh.time.advance(10_000)
    mesh.exchange()
    tell(mesh["rome"])
    assert show(mesh["rome"].changes("users")) == [(b"ada", ChangeType.DELETE, None)]


def test_prepared_write_below_the_expiry_takes_its_place(
    site: Site, users: Namespace, time: SimulatedTime
) -> None:
    users.put(b"ada", b"countess", ttl=5)
    since, node = site.now(), node_of(site)
    key = encode_namespace(1) + b"ada"
    partition = node.map.route(key)
    prepared = partition.prepare("transaction", [key], [b"programmer\x00"])
    expire(site, time)
    partition.commit_prepared("transaction", prepared)
    assert show(site.changes("users", since=since)) == [(b"ada", ChangeType.UPSERT, b"programmer")]
    site.heartbeat()
    assert users.get(b"ada") == b"programmer"


def test_expiry_is_told_after_a_restart_and_by_another_partition(time: SimulatedTime) -> None:
    engine = HookedEngine()
    with open_memory(engine, time) as site:
        users = site.create_namespace("users")
        users.put_many({b"ada": b"1", b"zoe": b"2"}, ttl=5)
        site.split("users", b"m")
        since = site.now()
    engine.reopen()
    with open_memory(engine, time) as site:
        expire(site, time)
        told = list(site.changes("users", since=since))
        assert show(iter(told)) == [(b"ada", ChangeType.DELETE, None), (b"zoe", ChangeType.DELETE, None)]
        assert {change.partition for change in told} == {part.id for part in site.partitions()}


def test_failure_at_any_write_tells_each_expiry_once(time: SimulatedTime) -> None:
    for failing in range(4):
        engine = HookedEngine()
        with open_memory(engine, time) as site:
            users = site.create_namespace("users")
            users.put_many({b"%d" % number: b"1" for number in range(EXPIRIES_PER_COMMIT_MAX + 5)}, ttl=5)
            since, left = site.now(), failing

            def fail(operation: str) -> None:
                nonlocal left
                if operation in ("write", "sync"):
                    left -= 1
                    if left == -1:
                        raise StorageFull("planted", free=0)

            time.advance(10_000)
            engine.before = fail
            with suppress(StorageFull):
                node_of(site).expiries.tell()
            engine.before = lambda _: None
            tell(site)
            told = [change.key for change in site.changes("users", since=since)]
            assert len(told) == len(set(told)) == EXPIRIES_PER_COMMIT_MAX + 5


def test_collection_leaves_what_is_still_to_be_told(time: SimulatedTime) -> None:
    with open_memory(HookedEngine(), time) as site:
        users = site.create_namespace("users", retention=timedelta(0))
        users.put(b"ada", b"countess", ttl=5)
        time.advance(10_000)
        node_of(site).storage.refuse(StorageFull("planted", free=0))
        site.collect_garbage()
        node_of(site).storage.refuse(None)
        since = site.now()
        tell(site)
        assert show(site.changes("users", since=since)) == [(b"ada", ChangeType.DELETE, None)]


def test_damaged_record_does_not_hold_up_the_others(
    site: Site, users: Namespace, time: SimulatedTime
) -> None:
    users.put_many({b"ada": b"countess", b"bob": b"builder"}, ttl=5)
    engine = node_of(site).engine
    (damaged, stored), *_ = engine.scan(DATA, b"", None, rows_max=2, bytes_max=1 << 20)
    engine.write([(DATA, damaged, stored[:-1] + b"\x41")])
    since = site.now()
    expire(site, time)
    assert show(site.changes("users", since=since)) == [(b"bob", ChangeType.DELETE, None)]


def test_expired_records_go_when_the_expiry_is_old(time: SimulatedTime) -> None:
    with open_memory(HookedEngine(), time) as site:
        users = site.create_namespace("users", retention=timedelta(seconds=10))
        users.put(b"ada", b"countess", ttl=5)
        time.advance(60_000)
        site.collect_garbage()
        time.advance(60_000)
        assert site.collect_garbage().keys_removed == 1


def test_records_of_an_earlier_release_are_indexed_by_garbage_collection(
    site: Site, users: Namespace, time: SimulatedTime
) -> None:
    users.put(b"ada", b"countess", ttl=5)
    engine = node_of(site).engine
    page = engine.scan(META, EXPIRING, EXPIRING + b"\xff", rows_max=10, bytes_max=1 << 20)
    engine.write([(META, EXPIRING_INDEXED, None), *((META, key, None) for key, _ in page)])
    since = site.now()
    expire(site, time)
    assert list(site.changes("users", since=since)) == []
    site.collect_garbage()
    assert show(site.changes("users", since=since)) == [(b"ada", ChangeType.DELETE, None)]
    assert engine.get(META, EXPIRING_INDEXED) is not None


def test_namespaces_without_expiry_pay_nothing(site: Site, users: Namespace, engine: HookedEngine) -> None:
    users.put(b"ada", b"countess")
    users.put_many({b"bob": b"builder", b"carl": b"composer"})
    writes: list[str] = []
    engine.before = writes.append
    tell(site)
    assert (indexed(site), [each for each in writes if each in ("write", "sync")]) == (0, [])


def test_heartbeats_account_for_expiries(site: Site, users: Namespace, time: SimulatedTime) -> None:
    site.heartbeat()
    users.put_many({b"ada": b"1", b"bob": LARGE}, ttl=5)
    expire(site, time)
    beat = site.heartbeat()
    assert (beat.sums[1].own.changes, beat.sums[1].all.changes) == (4, 4)
    items = list(site.changes("users", heartbeats=True))
    assert sum(isinstance(item, Heartbeat) for item in items) == 2


def test_late_put_of_another_site_wins_over_an_expiry() -> None:
    mesh = Mesh("oslo", "rome")
    oslo, rome = mesh["oslo"].namespace("users"), mesh["rome"].namespace("users")
    oslo.put(b"ada", b"brief", ttl=5)
    mesh.exchange()
    mesh.time.advance(1_000)
    rome.put(b"ada", b"late")
    mesh.time.advance(10_000)
    tell(mesh["oslo"])
    assert oslo.get(b"ada") is None
    mesh.exchange()
    assert (oslo.get(b"ada"), rome.get(b"ada")) == (b"late", b"late")


@pytest.mark.parametrize("seed", range(3))
def test_sites_that_expire_by_themselves_stay_equal_and_their_links_find_nothing(seed: int) -> None:
    mesh, chance = Mesh("oslo", "rome"), Random(seed)
    for _ in range(60):
        name = chance.choice(("oslo", "rome"))
        users = mesh[name].namespace("users")
        step = chance.random()
        if step < 0.5:
            users.put(
                b"%d" % chance.randrange(5), b"%d" % chance.randrange(99), ttl=chance.choice((None, 2, 4))
            )
        elif step < 0.6:
            mesh.time.advance(chance.randrange(3_000))
        elif step < 0.8:
            node_of(mesh[name]).expiries.tell()
        elif step < 0.9:
            mesh.beat()
        else:
            mesh.exchange()
    mesh.time.advance(10_000)
    for _ in range(2):
        mesh.beat()
        mesh.exchange()
        for site in mesh.sites.values():
            tell(site)
    first, second = (dict(site.namespace("users").scan()) for site in mesh.sites.values())
    assert first == second
    for site in mesh.sites.values():
        view: dict[bytes, bytes | None] = {}
        for change in site.changes("users"):
            view[change.key] = change.value
        assert {key: value for key, value in view.items() if value is not None} == first
        assert all(not link.alarms and not link.intervals_wrong for link in site.replication().links)


def test_capture_calls_an_expiry_back(site: Site, users: Namespace, time: SimulatedTime) -> None:
    called: list[ChangeType] = []
    capture = ChangeCapture(lambda change: called.append(change.type), lambda _: {1: "users"})
    capture.begin(site.id, since=0)
    users.put(b"ada", b"countess", ttl=5)
    for change in list(site.changes("users")):
        capture.accept(site.id, change)
    expire(site, time)
    for change in list(site.changes("users", since=capture.since(site.id))):
        capture.accept(site.id, change)
    assert called == [ChangeType.UPSERT, ChangeType.DELETE]


def test_clock_that_is_set_back_does_not_end_the_telling(time: SimulatedTime) -> None:
    with open_memory(HookedEngine(), time) as site:
        users = site.create_namespace("users")
        expire(site, time)
        time.set(START_MS - 3_600_000)
        users.put(b"ada", b"countess", ttl=5)
        since = site.now()
        expire(site, time)
        assert show(site.changes("users", since=since)) == [(b"ada", ChangeType.DELETE, None)]
        assert embedded(site).node.expiries.told_through == time() // 1000


def test_expiry_stands_below_later_commits_of_its_round_in_the_tail(
    site: Site, users: Namespace, time: SimulatedTime
) -> None:
    stream = site.changes("users", follow=True)
    users.put(b"ada", b"countess", ttl=5)
    next(stream)
    time.advance(10_000)
    node = node_of(site)
    line = node.storage.turn.line
    threads = [Thread(target=tell, args=(site,)), Thread(target=users.put, args=(b"bob", b"later"))]
    with node.storage.exclusive():
        for waiting, thread in enumerate(threads):
            thread.start()
            wait_until(lambda: len(line) > waiting, "the turn is waited for")  # noqa: B023
    for thread in threads:
        thread.join()
    changes = [next(stream), next(stream)]
    assert [change.key for change in changes] == [b"ada", b"bob"]
    assert changes[0].version < changes[1].version


def test_expiries_of_several_partitions_have_a_version_each(
    site: Site, users: Namespace, time: SimulatedTime
) -> None:
    site.split("users", b"k")
    site.split("users", b"c")
    users.put_many({b"ada": b"1", b"dan": b"2", b"zoe": b"3"}, ttl=5)
    put = site.now()
    expire(site, time)
    changes = list(site.changes("users", since=put))
    assert [change.key for change in changes] == [b"ada", b"dan", b"zoe"]
    assert len({change.version for change in changes}) == 3
