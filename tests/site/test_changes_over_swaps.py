"""Streams of changes that go on where a data set was published."""

from collections.abc import Iterator
from datetime import timedelta
from itertools import islice

import pytest
from tests.waiting import HANG_SECONDS

from floodmark import Change, ChangeType, Resolved, Site
from floodmark.codec.ordered import qualify_range
from floodmark.engine import MemoryEngine
from floodmark.model.errors import InvalidArgument, InvalidVersion
from floodmark.model.stream import ChangesRequest, OnGeneration, SwapPlace
from floodmark.partition import FAMILIES
from floodmark.site.embedding import open_engine
from floodmark.testing.clock import SimulatedTime

HOUR_MS = 3_600_000
DELETE, GENERATION, UPSERT = ChangeType.DELETE, ChangeType.GENERATION, ChangeType.UPSERT


@pytest.fixture
def time() -> SimulatedTime:
    return SimulatedTime()


@pytest.fixture
def site(time: SimulatedTime) -> Iterator[Site]:
    with open_engine(MemoryEngine(FAMILIES), site="oslo", background=False, time_source=time) as site:
        yield site


def told(change: Change) -> tuple[ChangeType, bytes, bytes | None]:
    return change.type, change.key, change.value


def test_a_difference_has_what_a_data_set_changed_and_nothing_else(site: Site) -> None:
    users = site.create_namespace("users")
    before = users.put_many({b"gone": b"1", b"same": b"1", b"other": b"1"})
    published = site.generations.publish("users", {b"same": b"1", b"other": b"2", b"new": b"2"})
    after = users.put(b"gone", b"3")
    changes = list(site.changes("users", since=before, on_generation="difference"))
    assert [told(change) for change in changes] == [
        (GENERATION, b"", None),
        (DELETE, b"gone", None),
        (UPSERT, b"new", b"2"),
        (UPSERT, b"other", b"2"),
        (UPSERT, b"gone", b"3"),
    ]
    assert [change.version for change in changes] == [published.version] * 4 + [after]
    behind_base = published.base + published.generation
    assert [change.stamp.version for change in changes[1:]] == [behind_base] * 3 + [after]
    assert not any(change.snapshot for change in changes)


def test_a_difference_is_the_same_before_and_after_the_clock_was_set_back(
    site: Site, time: SimulatedTime
) -> None:
    users = site.create_namespace("users")
    base = users.put(b"gone", b"1")
    kept = users.put(b"kept", b"1", ttl=timedelta(seconds=10))
    time.advance(20_000)
    site.generations.publish("users", {b"new": b"2"}, base=base)

    def read() -> list[tuple[ChangeType, bytes, bytes | None]]:
        return [told(change) for change in site.changes("users", since=kept, on_generation="difference")]

    before = read()
    time.advance(-HOUR_MS)
    assert users.get(b"kept") == b"1"
    assert read() == before == [(GENERATION, b"", None), (DELETE, b"gone", None), (UPSERT, b"new", b"2")]
    time.advance(HOUR_MS)
    site.heartbeat()
    site.collect_garbage()
    assert read() == [*before, (DELETE, b"kept", None)]


def test_a_snapshot_has_the_whole_data_set_and_says_so_with_its_marker(site: Site) -> None:
    users = site.create_namespace("users")
    before = users.put_many({b"gone": b"1", b"same": b"1"})
    published = site.generations.publish("users", {b"same": b"1", b"new": b"2"})
    changes = list(site.changes("users", since=before, on_generation="snapshot"))
    assert [told(change) for change in changes] == [
        (GENERATION, b"", None),
        (UPSERT, b"new", b"2"),
        (UPSERT, b"same", b"1"),
    ]
    assert {(change.version, change.snapshot) for change in changes} == {(published.version, True)}


def test_before_images_stand_in_a_difference(site: Site) -> None:
    users = site.create_namespace("users")
    before = users.put_many({b"gone": b"1", b"other": b"1"})
    site.generations.publish("users", {b"other": b"2", b"new": b"2"})
    changes = site.changes("users", since=before, before_images=True, on_generation="difference")
    assert [told(change) for change in changes] == [
        (GENERATION, b"", None),
        (DELETE, b"gone", b"1"),
        (ChangeType.INSERT, b"new", b"2"),
        (ChangeType.UPDATE_PREIMAGE, b"other", b"1"),
        (ChangeType.UPDATE_POSTIMAGE, b"other", b"2"),
    ]


def test_a_stream_of_some_keys_gets_the_difference_of_these(site: Site) -> None:
    users = site.create_namespace("users")
    before = users.put_many({b"a": b"1", b"b": b"1", b"c": b"1"})
    site.generations.publish("users", {b"a": b"2", b"b": b"2", b"d": b"2"})
    changes = site.changes("users", since=before, start_key=b"b", end_key=b"d", on_generation="difference")
    assert [told(change)[1] for change in changes] == [b"", b"b", b"c"]


def test_a_stream_of_all_namespaces_gets_the_difference_of_the_one_that_was_published(site: Site) -> None:
    users, other = site.create_namespace("users"), site.create_namespace("other")
    before = users.put(b"ada", b"1")
    other.put(b"ada", b"1")
    site.generations.publish("users", {b"bob": b"2"})
    for way, rows in (("difference", 2), ("snapshot", 1)):
        changes = list(site.changes(since=before, on_generation=way))  # type: ignore[call-overload]
        assert [change.namespace for change in changes] == ["other", "users", *["users"] * rows]


def test_a_namespace_that_was_dropped_has_no_difference(site: Site) -> None:
    users, other = site.create_namespace("users"), site.create_namespace("other")
    before = users.put(b"ada", b"1")
    site.generations.publish("users", {b"bob": b"2"})
    site.drop_namespace("users")
    other.put(b"ada", b"1")
    changes = site.changes(since=before, on_generation="difference")
    assert [change.namespace for change in changes if change.namespace != "users"] == ["other"]


def test_a_record_that_has_expired_is_deleted_if_nothing_told_so_before(
    site: Site, time: SimulatedTime
) -> None:
    users = site.create_namespace("users")
    before = users.put(b"ada", b"1", ttl=timedelta(minutes=1))
    time.advance(HOUR_MS)
    site.generations.publish("users", {})
    changes = site.changes("users", since=before, on_generation="difference")
    assert [told(change) for change in changes] == [(GENERATION, b"", None), (DELETE, b"ada", None)]


def test_what_a_place_needs_is_kept_while_a_reader_stands_there(site: Site, time: SimulatedTime) -> None:
    """Also if other data sets are published, and all that is old is collected, meanwhile."""
    users = site.create_namespace("users", retention=timedelta(0))
    before = users.put_many({b"a": b"1", b"b": b"1"})
    site.generations.publish("users", {b"b": b"2"}, keep=0)
    reader = site.changes("users", since=before, resolved_markers=True, on_generation="difference")
    place = next(item for item in reader if isinstance(item, Resolved) and item.snapshot)
    site.hold_safe_point("me", place.version)
    site.generations.publish("users", {b"c": b"3"}, keep=0)
    time.advance(100 * HOUR_MS)
    site.hold_safe_point("me", place.version)
    site.collect_garbage()
    expected = [b"a", b"b", b"", b"b", b"c"]
    assert [item.key for item in reader if isinstance(item, Change)] == expected
    again = site.changes("users", since=place, on_generation="difference")
    assert [change.key for change in again] == expected


def test_a_follower_goes_on_over_several_swaps(site: Site) -> None:
    users = site.create_namespace("users")
    before = users.put(b"a", b"1")
    reader = site.changes("users", since=before, follow=True, on_generation="difference")
    site.generations.publish("users", {b"b": b"2"})
    assert [change.key for change in islice(reader, 3)] == [b"", b"a", b"b"]
    users.put(b"c", b"3")
    assert next(reader).key == b"c"
    site.generations.rollback("users")
    assert [told(change) for change in islice(reader, 3)] == [
        (GENERATION, b"", None),
        (UPSERT, b"a", b"1"),
        (DELETE, b"b", None),
    ]


def test_a_stream_ends_where_it_was_told_to(site: Site) -> None:
    users = site.create_namespace("users")
    before = users.put(b"a", b"1")
    swap = site.generations.publish("users", {b"b": b"2"}).version
    users.put(b"c", b"3")
    for until, keys in ((swap - 1, []), (swap, [b"", b"a", b"b"])):
        changes = site.changes("users", since=before, until=until, on_generation="difference")
        assert [change.key for change in changes] == keys


def test_wrong_requests_are_refused(site: Site) -> None:
    users = site.create_namespace("users")
    version = users.put(b"a", b"1")
    with pytest.raises(InvalidArgument, match="on_generation is one of"):
        site.changes("users", on_generation="ignore")  # type: ignore[call-overload]
    place = SwapPlace(OnGeneration.DIFFERENCE).encode()
    with pytest.raises(InvalidVersion, match="no data set was published"):
        list(site.changes("users", since=Resolved(version, place)))
    with pytest.raises(InvalidVersion, match="no place"):
        list(site.changes("users", since=Resolved(version, b"\xff\xff\xffx")))
    keys = qualify_range(users.id)
    request = ChangesRequest(keys=keys, namespace=users.id, own=True, on_generation=OnGeneration.DIFFERENCE)
    with pytest.raises(InvalidArgument, match="whole records"):
        site.host.changes(request)


def test_a_data_set_completes_the_watches_of_keys_that_it_changes(site: Site) -> None:
    users = site.create_namespace("users")
    users.put_many({b"gone": b"1", b"same": b"1", b"other": b"1"})
    watches = {key: site.watch(users, key) for key in (b"gone", b"same", b"other")}
    swap = site.generations.publish("users", {b"same": b"1", b"other": b"2"}).version
    assert [watches[key].result(HANG_SECONDS) for key in (b"gone", b"other")] == [swap, swap]
    assert not watches[b"same"].done()
    assert users.put(b"same", b"2") == watches[b"same"].result(HANG_SECONDS)
