"""Loading: what is stored is decided as when it is applied, and no reader of changes hears of it."""

from contextlib import suppress

import pytest
from tests.partition.test_apply import Foreign, apply, newest, qualify, stamp
from tests.site.support import HookedEngine, node_of

from floodmark.codec.states import CounterEntry, CounterState, encode_state
from floodmark.model.errors import InvalidArgument, OutcomeUnknown, Retryable, StorageFailed
from floodmark.model.stream import ChangesRequest
from floodmark.model.version import Version
from floodmark.site import Namespace, Site


def load(site: Site, users: Namespace, *records: Foreign) -> Version:
    """Load records as one commit per partition."""
    rows = {qualify(users, record.key): record.stored for record in records}
    return site.host.router.load(rows, durable=True)


def test_records_are_read_under_their_own_stamps_and_are_no_changes(site: Site, users: Namespace) -> None:
    site.heartbeat()
    version = load(
        site,
        users,
        Foreign(b"a", stamp(1), b"1"),
        Foreign(b"b", stamp(2), None),
        Foreign(b"c", stamp(3), b"3"),
    )
    assert list(users.scan()) == [(b"a", b"1"), (b"c", b"3")]
    tombstone = newest(site, users, b"b")
    assert tombstone is not None
    assert (tombstone.deleted, tombstone.origin) == (True, stamp(2))
    assert list(site.changes("users")) == []
    assert site.heartbeat().sums == {}
    assert version > stamp(3).version


def test_followers_hear_nothing_of_it(site: Site, users: Namespace) -> None:
    stream = site.host.changes(ChangesRequest(follow=True))
    next(stream)
    load(site, users, Foreign(b"a", stamp(1), b"1"))
    users.put(b"b", b"2")
    keys: list[bytes] = []
    while not keys:
        keys += next(stream).keys
    assert keys == [qualify(users, b"b")]


def test_newer_stamp_wins_in_either_order(site: Site, users: Namespace) -> None:
    apply(site, users, Foreign(b"a", stamp(5), b"newer"), Foreign(b"b", stamp(1), b"older"))
    assert load(site, users, Foreign(b"a", stamp(1), b"older")) == 0
    load(site, users, Foreign(b"b", stamp(5), b"newer"))
    assert load(site, users, Foreign(b"b", stamp(5), b"newer")) == 0
    assert users.get_many([b"a", b"b"]) == [b"newer", b"newer"]


def test_states_are_merged(site: Site) -> None:
    counts = site.create_namespace("counts", merge="counter")
    counts.add(b"all", 2)
    there = CounterState(None, (CounterEntry(stamp(1).site, stamp(1).version, 40),))
    site.host.router.load({qualify(counts, b"all"): encode_state(there, stamp(1))}, durable=True)
    assert counts.get(b"all") == 42
    assert len(list(site.changes("counts"))) == 1


def test_record_without_an_origin_is_refused(site: Site, users: Namespace) -> None:
    with pytest.raises(InvalidArgument, match="carries no origin"):
        site.host.router.load({qualify(users, b"a"): b"1\x00"}, durable=True)


@pytest.mark.parametrize("operation", ["write", "sync"])
@pytest.mark.parametrize("error", [StorageFailed("no"), OutcomeUnknown("no answer")], ids=["no", "unknown"])
def test_failed_load_is_settled_and_can_be_repeated(
    site: Site, users: Namespace, engine: HookedEngine, operation: str, error: StorageFailed
) -> None:
    failures = [error]

    def fail(coming: str) -> None:
        if coming == operation and failures:
            raise failures.pop()

    engine.before = fail
    record = Foreign(b"key", stamp(1), b"1")
    with suppress(OutcomeUnknown, Retryable):
        load(site, users, record)
    load(site, users, record)
    assert not node_of(site).storage.stopped
    assert users.get(b"key") == b"1"
    assert list(site.changes("users")) == []
