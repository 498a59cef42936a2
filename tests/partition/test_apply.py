"""Applying changes of other sites: the newest stamp wins, whatever the order of arrival."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import permutations
from random import Random
from threading import Event
from typing import Any, NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.site.support import START_MS, HookedEngine, node_of, open_memory, watch_line
from tests.waiting import HANG_SECONDS, run_threads

from floodmark.codec.digest import digest_change
from floodmark.codec.ordered import encode_namespace, encode_prefix
from floodmark.codec.values import decode_value, encode_value
from floodmark.model.change import Change, Heartbeat, Stamp
from floodmark.model.errors import ClockSkew, InvalidArgument, OutcomeUnknown, Retryable, StorageFailed
from floodmark.model.record import Record
from floodmark.model.version import Version, compose, physical_ms
from floodmark.partition import LocalPartition
from floodmark.partition.read.records import find_stored
from floodmark.site import Namespace, Site, open_engine
from floodmark.testing.clock import SimulatedTime

BASE = compose(START_MS - 60_000, 0)
HERE = 7


class Foreign(NamedTuple):
    """A change that was first written at another site."""

    key: bytes
    stamp: Stamp
    value: bytes | None
    expires_at: int | None = None

    @property
    def stored(self) -> bytes:
        return encode_value(self.value or b"", self.expires_at, self.value is None, origin=self.stamp)


def qualify(users: Namespace[Any], key: bytes) -> bytes:
    return encode_namespace(users.id) + key


def partition_of(site: Site, key: bytes = b"\0\0\1") -> LocalPartition:
    return node_of(site).map.route(key)


def apply(site: Site, users: Namespace, *changes: Foreign, durable: bool = True) -> Version:
    """Apply changes as one commit per partition."""
    rows = {qualify(users, change.key): change.stored for change in changes}
    return site.host.router.apply(rows, durable=durable)


def newest(site: Site, users: Namespace, key: bytes) -> Record | None:
    """What is stored under a key, dead or alive."""
    found = find_stored(node_of(site).engine, encode_prefix(qualify(users, key)), None)
    return None if found is None else decode_value(found[1])


def stamp(offset: int, site: int = 3) -> Stamp:
    return Stamp(BASE + offset, site)


# One change


def test_change_from_elsewhere_is_read_under_its_own_stamp(site: Site, users: Namespace) -> None:
    version = apply(site, users, Foreign(b"ada", stamp(1), b"countess"))
    record = users.record(b"ada")
    assert record is not None
    assert (record.value, record.version, record.stamp) == (b"countess", version, stamp(1))
    assert users.get(b"ada", at=version - 1) is None
    (change,) = site.changes("users")
    assert (change.value, change.version, change.stamp) == (b"countess", version, stamp(1))


def test_commit_version_lies_above_the_stamp(site: Site, users: Namespace, time: SimulatedTime) -> None:
    """Also above one that is ahead of this site's clock, within the skew that is tolerated."""
    ahead = Stamp(compose(time() + 400, 5), 3)
    assert apply(site, users, Foreign(b"key", ahead, b"1")) > ahead.version
    assert users.put(b"key", b"2") > ahead.version
    assert users.get(b"key") == b"2"


def test_applying_twice_changes_nothing(site: Site, users: Namespace) -> None:
    change = Foreign(b"key", stamp(1), b"1")
    version = apply(site, users, change)
    for _ in range(3):
        assert apply(site, users, change) == 0
    assert [found.version for found in site.changes("users")] == [version]


@pytest.mark.parametrize("dead", ["deleted", "expired"])
def test_older_stamp_loses_to_what_is_dead(
    site: Site, users: Namespace, time: SimulatedTime, dead: str
) -> None:
    """A tombstone or an expired record still says that it was there."""
    if dead == "deleted":
        apply(site, users, Foreign(b"key", stamp(9), None))
    else:
        apply(site, users, Foreign(b"key", stamp(9), b"short", time() // 1000 - 5))
    assert users.get(b"key") is None
    assert apply(site, users, Foreign(b"key", stamp(8), b"late")) == 0
    assert users.get(b"key") is None
    assert apply(site, users, Foreign(b"key", stamp(10), b"new"))
    assert users.get(b"key") == b"new"


def test_ties_go_to_the_higher_site(site: Site, users: Namespace) -> None:
    assert apply(site, users, Foreign(b"key", stamp(1, 3), b"three"))
    assert apply(site, users, Foreign(b"key", stamp(1, 2), b"two")) == 0
    assert apply(site, users, Foreign(b"key", stamp(1, 9), b"nine"))
    assert users.get(b"key") == b"nine"
    local = users.put(b"key", b"local")
    assert apply(site, users, Foreign(b"key", Stamp(local, HERE - 1), b"lower")) == 0
    assert apply(site, users, Foreign(b"key", Stamp(local, HERE), b"its own, come back")) == 0
    assert users.get(b"key") == b"local"
    assert apply(site, users, Foreign(b"key", Stamp(local, HERE + 1), b"higher"))
    assert users.get(b"key") == b"higher"


def test_tombstones_and_expiry_are_kept(site: Site, users: Namespace, time: SimulatedTime) -> None:
    expires_at = time() // 1000 + 100
    users.put(b"gone", b"1")
    apply(
        site, users, Foreign(b"gone", Stamp(site.now(), 9), None), Foreign(b"ttl", stamp(1), b"1", expires_at)
    )
    assert users.get(b"gone") is None
    record = users.record(b"ttl")
    assert record is not None
    assert record.expires_at == expires_at
    found = {change.key: change for change in site.changes("users")}
    assert (found[b"ttl"].expires_at, found[b"ttl"].value) == (expires_at, b"1")
    assert (found[b"gone"].value, found[b"gone"].stamp.site) == (None, 9)
    time.advance(200_000)
    assert users.get(b"ttl") is None
    assert [change.value for change in site.changes("users") if change.key == b"ttl"] == [None]


def test_value_without_an_origin_is_refused(site: Site, users: Namespace) -> None:
    key = qualify(users, b"key")
    with pytest.raises(InvalidArgument):
        partition_of(site).apply([key], [encode_value(b"1")], durable=True)
    assert list(site.changes("users")) == []


# Many changes


def test_losers_are_left_out_and_winners_come_in_order_of_keys(site: Site, users: Namespace) -> None:
    apply(site, users, Foreign(b"b", stamp(5), b"there"), Foreign(b"d", stamp(5), b"there"))
    since = site.now()
    version = apply(
        site,
        users,
        *(Foreign(key, stamp(4), b"late") for key in (b"d", b"c", b"b", b"a")),
    )
    later = list(site.changes("users", since=since))
    assert [(change.key, change.version) for change in later] == [(b"a", version), (b"c", version)]
    assert dict(users.scan()) == {b"a": b"late", b"b": b"there", b"c": b"late", b"d": b"there"}


def test_nothing_left_to_store_is_no_commit(site: Site, users: Namespace) -> None:
    apply(site, users, Foreign(b"a", stamp(5), b"1"), Foreign(b"b", stamp(5), b"1"))
    before = site.statistics()
    assert apply(site, users, Foreign(b"a", stamp(4), b"2"), Foreign(b"b", stamp(5), b"2")) == 0
    assert site.host.router.apply({}, durable=True) == 0
    after = site.statistics()
    assert (after.commits, after.changes) == (before.commits, before.changes)


def test_rows_go_to_their_partitions(site: Site, users: Namespace) -> None:
    site.split("users", b"m")
    apply(site, users, Foreign(b"a", stamp(1), b"1"), Foreign(b"z", stamp(2), b"1"))
    assert len({change.partition for change in site.changes("users")}) == 2
    assert apply(site, users, Foreign(b"a", stamp(1), b"1"), Foreign(b"z", stamp(2), b"1")) == 0


def test_asynchronous_apply_is_published_when_it_is_durable(
    site: Site, users: Namespace, engine: HookedEngine
) -> None:
    version = apply(site, users, Foreign(b"key", stamp(1), b"1"), durable=False)
    assert engine.unsynced
    assert site.resolved_version() < version
    site.sync()
    assert site.resolved_version() > version


# Skew


@pytest.mark.parametrize("split", [False, True], ids=["one partition", "two partitions"])
def test_skew_beyond_the_guard_leaves_nothing(
    site: Site, users: Namespace, time: SimulatedTime, split: bool
) -> None:
    """Not even the rest of the batch, which would be fine by itself: the link stalls as a whole."""
    if split:
        site.split("users", b"m")
    users.put(b"key", b"old")
    latest = node_of(site).clock.latest
    before = list(site.changes("users"))
    ahead = Stamp(compose(time() + 60_000, 0), 3)
    with pytest.raises(ClockSkew):
        apply(site, users, Foreign(b"fine", stamp(1), b"1"), Foreign(b"skewed", ahead, b"1"))
    assert list(site.changes("users")) == before
    assert users.get(b"fine") is users.get(b"skewed") is None
    assert physical_ms(node_of(site).clock.latest) == physical_ms(latest)
    time.advance(60_000)
    assert apply(site, users, Foreign(b"fine", stamp(1), b"1"), Foreign(b"skewed", ahead, b"1"))


# Any order of arrival

changes = st.builds(
    Foreign,
    key=st.sampled_from([b"a", b"b", b"m", b"z"]),
    stamp=st.builds(stamp, st.integers(1, 6), st.sampled_from([2, 3, 9])),
    value=st.none(),
)


def with_content(change: Foreign) -> Foreign:
    """A site gives a stamp to one content only, so the content follows from the stamp."""
    number = change.stamp.version + change.stamp.site
    value = None if number % 3 == 0 else b"%d/%d" % (change.stamp.version, change.stamp.site)
    expires_at = START_MS // 1000 + (100 if number % 2 else -100) if number % 5 == 0 else None
    return change._replace(value=value, expires_at=None if value is None else expires_at)


def state_of(site: Site, users: Namespace) -> Mapping[bytes, Record | None]:
    return {key: newest(site, users, key) for key in (b"a", b"b", b"m", b"z")}


def arrive(batches: Sequence[Sequence[Foreign]], split_after: int) -> Mapping[bytes, Record | None]:
    """Apply batches at a fresh site, which is split on the way; what is stored in the end."""
    with open_memory(HookedEngine(), SimulatedTime(START_MS)) as site:
        users = site.create_namespace("users")
        for number, batch in enumerate(batches):
            if number == split_after:
                site.split("users", b"m")
            by_key = {change.key: change for change in sorted(batch, key=lambda change: change.stamp)}
            apply(site, users, *by_key.values(), durable=bool(number % 2))
        found = list(site.changes("users"))
        check_stamps_grow(found)
        return state_of(site, users)


def check_stamps_grow(found: Sequence[Change]) -> None:
    """On each key, commit order is stamp order: the newest stored record is the winner."""
    highest: dict[bytes, Stamp] = {}
    for change in found:
        assert change.stamp > highest.get(change.key, Stamp(0, 0))
        highest[change.key] = change.stamp


@given(
    written=st.lists(changes.map(with_content), min_size=1, max_size=12),
    seed=st.integers(0, 1000),
    split_after=st.integers(0, 6),
)
def test_any_order_with_any_duplicates_gives_the_same_state(
    written: list[Foreign], seed: int, split_after: int
) -> None:
    chance = Random(seed)
    again = written + chance.choices(written, k=len(written))
    chance.shuffle(again)
    batches = []
    while again:
        count = chance.randrange(1, 4)
        batches.append(again[:count])
        again = again[count:]
    state = arrive(batches, split_after)
    winners = {change.key: change for change in sorted(written, key=lambda change: change.stamp)}
    for key, record in state.items():
        if key not in winners:
            assert record is None
        else:
            assert record is not None
            assert (
                encode_value(record.value, record.expires_at, record.deleted, origin=record.origin)
                == winners[key].stored
            )


def test_every_permutation_of_four_changes_gives_the_same_state() -> None:
    written = [
        Foreign(b"a", stamp(1), b"1"),
        Foreign(b"a", stamp(2, 9), None),
        Foreign(b"a", stamp(2, 2), b"2"),
        Foreign(b"a", stamp(3), b"3", START_MS // 1000 + 50),
    ]
    states = [arrive([[change] for change in order], 2) for order in permutations(written)]
    assert all(state == states[0] for state in states)
    assert states[0][b"a"] == Record(b"3", START_MS // 1000 + 50, False, stamp(3))


# Racing local writes


@pytest.mark.parametrize("moment", ["before the commit", "in the same round"])
def test_local_write_in_between_is_newer(
    site: Site, users: Namespace, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    """The clock has passed the stamp when the local write comes, so the local write wins."""
    partition = partition_of(site)
    committer = partition._committer
    arriving = Foreign(b"key", Stamp(site.now(), 3), b"foreign")
    if moment == "before the commit":
        commit = committer.commit

        def put_first(waiting: object) -> Version:
            monkeypatch.setattr(committer, "commit", commit)
            users.put(b"key", b"local")
            return commit(waiting)  # type: ignore[arg-type]

        monkeypatch.setattr(committer, "commit", put_first)
        assert apply(site, users, arriving) == 0
    else:
        run_in_one_round(site, users, arriving)
    assert users.get(b"key") == b"local"
    check_stamps_grow(list(site.changes("users")))


def run_in_one_round(site: Site, users: Namespace, arriving: Foreign) -> None:
    """Let a local put and an apply stand in one line, the put first."""
    node = node_of(site)
    line = watch_line(site)
    held, put_waits = Event(), Event()
    applied: list[Version] = []

    def hold() -> None:
        with node.storage.exclusive():
            held.set()
            line.wait_length(1)
            put_waits.set()
            line.wait_length(2)

    def put() -> None:
        assert held.wait(HANG_SECONDS)
        users.put(b"key", b"local")

    def apply_behind() -> None:
        assert put_waits.wait(HANG_SECONDS)
        applied.append(apply(site, users, arriving))

    run_threads(hold, put, apply_behind)
    assert applied == [0]


def test_local_and_foreign_writers_leave_the_highest_stamp(real_time_site: Site) -> None:
    site = real_time_site
    users = site.create_namespace("users")
    stamps: list[tuple[Stamp, bytes]] = []

    def write_here(name: int) -> None:
        for index in range(150):
            value = b"here %d %d" % (name, index)
            version = users.put(b"key", value, durability="async" if index % 2 else "fsync")
            stamps.append((Stamp(version, site.id), value))

    def write_there(name: int) -> None:
        for index in range(150):
            change = Foreign(b"key", Stamp(site.now() - index % 3, name), b"there %d %d" % (name, index))
            apply(site, users, change, durable=bool(index % 2))
            stamps.append((change.stamp, change.value or b""))

    run_threads(*(lambda n=n: write_here(n) for n in (1, 2)), *(lambda n=n: write_there(n) for n in (3, 9)))
    found = list(site.changes("users"))
    check_stamps_grow(found)
    assert max(stamps) == (found[-1].stamp, found[-1].value)
    assert users.get(b"key") == max(stamps)[1]


@pytest.fixture
def real_time_site() -> Iterator[Site]:
    with open_engine(HookedEngine(), site="oslo", site_id=HERE) as opened:
        yield opened


# Heartbeats


def test_heartbeat_counts_foreign_changes_under_all_and_not_under_own(site: Site, users: Namespace) -> None:
    site.heartbeat()
    local = users.put(b"local", b"1")
    foreign = [
        Foreign(b"a", stamp(1), b"1"),
        Foreign(b"b", stamp(2, 9), None),
        Foreign(b"c", stamp(3), b"2", 5),
    ]
    apply(site, users, *foreign)
    apply(site, users, foreign[0])
    beat = site.heartbeat()
    sums = beat.sums[users.id]
    own = digest_change(local, HERE, b"local", encode_value(b"1"))
    everything = own
    for change in foreign:
        content = encode_value(change.value or b"", change.expires_at, change.value is None)
        everything ^= digest_change(change.stamp.version, change.stamp.site, change.key, content)
    assert sums.own == (1, own)
    assert sums.all == (4, everything)


def test_heartbeat_of_a_site_and_of_its_copy_agree(site: Site, users: Namespace) -> None:
    """What was own at one site is counted with the same digest at the other."""
    site.heartbeat()
    users.put(b"a", b"1")
    users.put_many({b"b": b"2", b"c": b"3"})
    users.put(b"d", b"4", ttl=1000)
    users.delete(b"a")
    beat = site.heartbeat()
    with open_engine(HookedEngine(), site="bergen", site_id=8, time_source=SimulatedTime(START_MS)) as copy:
        there = copy.create_namespace("users")
        copy.heartbeat()
        for change in site.changes("users"):
            apply(copy, there, Foreign(change.key, change.stamp, change.value, change.expires_at))
        copied = copy.heartbeat()
    assert isinstance(beat, Heartbeat)
    assert copied.sums[there.id].all == beat.sums[users.id].own
    assert copied.sums[there.id].own == (0, 0)


# Failure


@pytest.mark.parametrize("operation", ["write", "sync"])
@pytest.mark.parametrize("error", [StorageFailed("no"), OutcomeUnknown("no answer")], ids=["no", "unknown"])
def test_failed_apply_can_be_repeated(
    site: Site, users: Namespace, engine: HookedEngine, operation: str, error: StorageFailed
) -> None:
    change = Foreign(b"key", stamp(1), b"1")
    failures = [error]

    def fail(coming: str) -> None:
        if coming == operation and failures:
            raise failures.pop()

    engine.before = fail
    with suppress(OutcomeUnknown, Retryable):
        apply(site, users, change)
    apply(site, users, change)
    assert users.get(b"key") == b"1"
    assert [found.stamp for found in site.changes("users")] == [stamp(1)]
