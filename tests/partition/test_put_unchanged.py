"""Streams from outside: what is written again never overwrites what came later."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from random import Random
from threading import Event
from typing import NamedTuple, TypeVar

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.site.support import START_MS, HookedEngine, node_of, open_memory, persist, watch_line
from tests.waiting import HANG_SECONDS, run_threads

from floodmark.codec.digest import digest_change
from floodmark.codec.ordered import encode_namespace, encode_prefix, encode_version
from floodmark.codec.stamps import NO_STAMP, encode_stamp
from floodmark.codec.values import TOMBSTONE, decode_value, encode_value
from floodmark.engine import Engine, MemoryEngine
from floodmark.engine.rocks import RocksEngine
from floodmark.model.change import Stamp
from floodmark.model.errors import Corruption, FloodmarkError, InvalidArgument
from floodmark.model.version import Version
from floodmark.partition import FAMILIES, FILTERED_BYTES
from floodmark.partition.read.records import find_stored
from floodmark.partition.read.stamps import newest_stamps
from floodmark.site import Namespace, Site, open_engine
from floodmark.testing.clock import SimulatedTime
from floodmark.testing.engine import Fault, FaultPlan, FaultyEngine, SimulatedCrash

HERE = 7
ELSEWHERE = 9

Result = TypeVar("Result")


def qualify(users: Namespace, key: bytes) -> bytes:
    return encode_namespace(users.id) + key


def put_unchanged(site: Site, users: Namespace, rows: Mapping[bytes, bytes | None], since: Version) -> int:
    """Put values, or delete, where unchanged."""
    stored = {
        qualify(users, key): TOMBSTONE if value is None else encode_value(value)
        for key, value in rows.items()
    }
    return site.host.router.put_unchanged(stored, since, durable=True)


def apply(site: Site, users: Namespace, key: bytes, value: bytes | None, stamp: Stamp) -> Version:
    stored = encode_value(value or b"", None, value is None, origin=stamp)
    return site.host.router.apply({qualify(users, key): stored}, durable=True)


# One commit


def test_key_that_stands_twice_is_refused(site: Site, users: Namespace) -> None:
    key = qualify(users, b"key")
    with pytest.raises(InvalidArgument):
        node_of(site).map.partitions[0].put_unchanged(
            [key, key], [encode_value(b"1")] * 2, site.now(), durable=True
        )
    assert list(site.changes("users")) == []


def test_nothing_left_to_store_is_no_commit(site: Site, users: Namespace) -> None:
    since = site.now()
    users.put_many({b"a": b"1", b"b": b"1"})
    before = site.statistics()
    assert put_unchanged(site, users, {b"a": b"2", b"b": b"2"}, since) == 0
    assert site.host.router.put_unchanged({}, since, durable=True) == 0
    after = site.statistics()
    assert (after.commits, after.changes) == (before.commits, before.changes)


def test_several_partitions_of_a_node_are_one_commit(site: Site, users: Namespace) -> None:
    site.split("users", b"m")
    since = site.now()
    users.put(b"later", b"kept")
    before = site.statistics().commits
    rows = {b"a": b"1", b"later": b"lost", b"z": b"1", b"gone": None}
    assert put_unchanged(site, users, rows, since) == 3
    stored = [change for change in site.changes("users") if change.key != b"later"]
    assert [(change.key, change.value) for change in stored] == [(b"a", b"1"), (b"gone", None), (b"z", b"1")]
    assert len({change.version for change in stored}) == 1
    assert len({change.partition for change in stored}) == 2
    assert site.statistics().commits == before + 1
    assert put_unchanged(site, users, rows, since) == 0
    assert users.get(b"later") == b"kept"


def test_expired_record_counts_with_its_stamp(site: Site, users: Namespace, time: SimulatedTime) -> None:
    since = site.now()
    users.put(b"key", b"brief", ttl=1)
    time.advance(10_000)
    assert users.get(b"key") is None
    assert put_unchanged(site, users, {b"key": b"late"}, since) == 0
    assert put_unchanged(site, users, {b"key": b"new"}, site.now()) == 1


def test_asynchronous_put_is_published_when_it_is_durable(
    site: Site, users: Namespace, engine: HookedEngine
) -> None:
    rows = {qualify(users, b"key"): encode_value(b"1")}
    assert site.host.router.put_unchanged(rows, site.now(), durable=False) == 1
    assert engine.unsynced
    record = users.record(b"key")
    assert record is not None
    assert site.resolved_version() < record.version
    site.sync()
    assert site.resolved_version() >= record.version


def test_heartbeat_counts_what_was_stored_as_own(site: Site, users: Namespace) -> None:
    site.heartbeat()
    since = site.now()
    users.put(b"there", b"1")
    first = site.heartbeat()
    put_unchanged(site, users, {b"a": b"1", b"b": None, b"there": b"2"}, since)
    beat = site.heartbeat()
    (version,) = {change.version for change in site.changes("users", since=first.version)}
    digest = digest_change(version, HERE, b"a", encode_value(b"1"))
    digest ^= digest_change(version, HERE, b"b", TOMBSTONE)
    assert beat.sums[users.id].own == beat.sums[users.id].all == (2, digest)


def test_damaged_record_is_named(site: Site, users: Namespace) -> None:
    version = site.now()
    key = encode_prefix(qualify(users, b"broken")) + encode_version(version)
    node_of(site).engine.write([("data", key, b"value\xff")])
    with pytest.raises(Corruption, match="broken") as caught:
        put_unchanged(site, users, {b"a": b"1", b"broken": b"2"}, site.now())
    assert caught.value.details["version"] == version
    assert users.get(b"a") is None


# Racing local writes


def test_local_write_before_it_in_the_same_round_is_newer(site: Site, users: Namespace) -> None:
    """It is decided inside the commit, when the write in front of it can be read."""
    node, line, since = node_of(site), watch_line(site), site.now()
    held, put_waits = Event(), Event()
    stored: list[int] = []

    def hold() -> None:
        with node.storage.exclusive():
            held.set()
            line.wait_length(1)
            put_waits.set()
            line.wait_length(2)

    def put() -> None:
        assert held.wait(HANG_SECONDS)
        users.put(b"key", b"local")

    def put_behind() -> None:
        assert put_waits.wait(HANG_SECONDS)
        stored.append(put_unchanged(site, users, {b"key": b"outside", b"other": b"outside"}, since))

    run_threads(hold, put, put_behind)
    assert stored == [1]
    assert dict(users.scan()) == {b"key": b"local", b"other": b"outside"}


def test_replays_and_local_writers_at_once_leave_what_came_last() -> None:
    with open_engine(HookedEngine(), site="oslo", site_id=HERE) as site:
        users = site.create_namespace("users")
        keys = [b"%02d" % number for number in range(20)]
        since = site.now()
        last: dict[bytes, bytes] = {}

        def replay() -> None:
            for _ in range(30):
                put_unchanged(site, users, dict.fromkeys(keys, b"outside"), since)

        def write() -> None:
            for number in range(100):
                key, value = keys[number % 10], b"local %d" % number
                users.put(key, value, durability="async" if number % 3 else "fsync")
                last[key] = value

        run_threads(replay, replay, write)
        assert dict(users.scan()) == dict.fromkeys(keys, b"outside") | last
        outside = [change.key for change in site.changes("users") if change.value == b"outside"]
        assert len(outside) == len(set(outside))


# Looking stamps up


@pytest.fixture(params=["memory", "rocks"])
def any_engine(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Engine]:
    engine: Engine = (
        MemoryEngine(FAMILIES)
        if request.param == "memory"
        else RocksEngine(tmp_path, FAMILIES, prefix_bytes=FILTERED_BYTES)
    )
    yield engine
    engine.close()


@pytest.mark.parametrize("seed", range(6))
def test_newest_stamps_are_those_that_are_found_one_by_one(any_engine: Engine, seed: int) -> None:
    """Whether keys are all new, all there, close together or far apart, with one version or many."""
    chance = Random(seed)
    prefixes = [encode_prefix(b"\0\0\1%05d" % number) for number in range(3_000)]
    there = chance.sample(prefixes, 2_000)
    rows: list[tuple[str, bytes, bytes | None]] = []
    for prefix in there:
        for _ in range(chance.choice((1, 1, 2, 40 if chance.random() < 0.05 else 1))):
            origin = Stamp(chance.randrange(1, 1000), ELSEWHERE) if chance.random() < 0.3 else None
            stored = encode_value(b"v", chance.choice((None, 5)), chance.random() < 0.2, origin=origin)
            rows.append(("data", prefix + encode_version(chance.randrange(1, 1000)), stored))
    any_engine.write(rows)
    dense, some = prefixes[100:1_100], sorted(chance.sample(prefixes, 500))
    spans = [dense, some, prefixes[::7], prefixes[::150], prefixes[2_990:]]
    beyond = [encode_prefix(b"\0\0\1%05dx" % number) for number in range(0, 3_000, 3)]
    for wanted in [*spans, beyond, sorted(beyond + dense), prefixes[:1], []]:
        assert newest_stamps(any_engine, wanted, HERE) == [one_stamp(any_engine, key) for key in wanted]


def one_stamp(engine: Engine, prefix: bytes) -> bytes:
    found = find_stored(engine, prefix, None)
    if found is None:
        return NO_STAMP
    origin = decode_value(found[1]).origin
    return encode_stamp(found[0], HERE) if origin is None else encode_stamp(origin.version, origin.site)


# Histories


class Row(NamedTuple):
    """A row of an epoch; without a value it deletes.  A key may come in several."""

    key: bytes
    value: bytes | None


Batch = dict[bytes, bytes | None]


class Epoch(NamedTuple):
    """A number, the version that was drawn for it, and its rows in their order."""

    number: int
    version: Version
    rows: Sequence[Row]

    def batches(self, size: int) -> list[Batch]:
        """As a writer sends them: the last rows first, of each batch the last row of a key."""
        return [dict(self.rows[start : start + size]) for start in reversed(range(0, len(self.rows), size))]


class Held(NamedTuple):
    """What a key holds: under which stamp, and of which epoch it is, if of any."""

    stamp: Stamp
    value: bytes | None
    epoch: int | None = None


NOTHING = Held(Stamp(0, 0), None)
KEYS = [b"a", b"b", b"m", b"n", b"z"]
STREAM = "spark/query"


class History:
    """Epochs that are cut off and sent again, where others write too; what must be held is known."""

    def __init__(self) -> None:
        self.engine, self.time = HookedEngine(), SimulatedTime(START_MS)
        self.site = open_memory(self.engine, self.time)
        self.users = self.site.create_namespace("users")
        self.epochs: list[Epoch] = []
        # The batches of the present attempt that were not sent yet.
        self.left: list[Batch] = []
        self.held: dict[bytes, Held] = {}

    def begin(self, chance: Random) -> None:
        """Begin an epoch; the one before was completed then."""
        if self.epochs:
            self.complete(chance)
        number = len(self.epochs)
        version = self.site.host.versions.open_epoch("users", STREAM, number)
        rows = [
            Row(chance.choice(KEYS), None if chance.random() < 0.2 else b"row %d" % chance.randrange(10**6))
            for _ in range(chance.randrange(1, 9))
        ]
        self.epochs.append(Epoch(number, version, rows))
        self.begin_again(chance)

    def begin_again(self, chance: Random) -> None:
        """Cut the attempt off, and begin another one, perhaps with other batches."""
        if self.epochs:
            epoch = self.epochs[-1]
            version = self.site.host.versions.open_epoch("users", STREAM, epoch.number)
            assert version == epoch.version
            self.left = epoch.batches(chance.randrange(1, 4))

    def send(self, chance: Random) -> None:
        """Send the next batch."""
        if self.left:
            self._put_batch(self.epochs[-1], self.left.pop(0))

    def send_late(self, chance: Random) -> None:
        """Let an attempt of long ago, which everybody has given up, send some batches."""
        if self.epochs:
            epoch = chance.choice(self.epochs)
            batches = epoch.batches(chance.randrange(1, 4))
            for batch in batches[: chance.randrange(1, len(batches) + 1)]:
                self._put_batch(epoch, batch)

    def put(self, chance: Random) -> None:
        """Write something here."""
        key, value = chance.choice(KEYS), b"local %d" % chance.randrange(10**6)
        self.held[key] = Held(Stamp(self.users.put(key, value), HERE), value)

    def delete(self, chance: Random) -> None:
        """Delete something here."""
        key = chance.choice(KEYS)
        self.held[key] = Held(Stamp(self.users.delete(key), HERE), None)

    def apply(self, chance: Random) -> None:
        """Take a change of another site, made around an epoch or just now."""
        key, value = chance.choice(KEYS), b"copy %d" % chance.randrange(10**6)
        marks = [epoch.version for epoch in self.epochs] or [self.site.now()]
        version = chance.choice([self.site.now(), chance.choice(marks), chance.choice(marks) - 1])
        stamp = Stamp(version, chance.choice((3, ELSEWHERE)))
        wins = stamp > self.held.get(key, NOTHING).stamp
        assert bool(apply(self.site, self.users, key, value, stamp)) == wins
        if wins:
            self.held[key] = Held(stamp, value)

    def reshape(self, chance: Random) -> None:
        """Split the partition, or merge the two."""
        partitions = node_of(self.site).map.partitions
        if len(partitions) == 1:
            self.site.split("users", b"m")
        else:
            self.site.merge(partitions[0].id, partitions[1].id)

    def reopen(self, chance: Random) -> None:
        """Close the site and open it again."""
        self.site.close()
        self.site = open_memory(self.engine, self.time)
        self.users = self.site.namespace("users")

    def complete(self, chance: Random) -> None:
        """Send an epoch to its end: then every key of it holds its last row, or something later."""
        self.begin_again(chance)
        while self.left:
            self.send(chance)
        epoch = self.epochs[-1]
        for key, value in dict(epoch.rows).items():
            held = self.held[key]
            assert held.stamp.version > epoch.version
            assert held.epoch != epoch.number or held.value == value
            assert self.users.get(key) == held.value

    def _put_batch(self, epoch: Epoch, batch: Batch) -> None:
        unchanged = [key for key in batch if self.held.get(key, NOTHING).stamp.version <= epoch.version]
        assert put_unchanged(self.site, self.users, batch, epoch.version) == len(unchanged)
        for key in unchanged:
            found = find_stored(node_of(self.site).engine, encode_prefix(qualify(self.users, key)), None)
            assert found is not None
            self.held[key] = Held(Stamp(found[0], HERE), batch[key], epoch.number)

    def check(self) -> None:
        """The site holds what it must, and on each key stamps only grow."""
        state = {key: held.value for key, held in self.held.items() if held.value is not None}
        assert dict(self.users.scan()) == state
        highest: dict[bytes, Stamp] = {}
        for change in self.site.changes("users"):
            assert change.stamp > highest.get(change.key, NOTHING.stamp)
            highest[change.key] = change.stamp
        assert highest == {key: held.stamp for key, held in self.held.items()}


Step = Callable[[History, Random], None]
STEPS: Sequence[Step] = (
    History.begin,
    History.begin_again,
    *[History.send] * 3,
    History.send_late,
    History.put,
    History.delete,
    History.apply,
    History.reshape,
    History.reopen,
)


@given(st.lists(st.tuples(st.sampled_from(STEPS), st.integers(0, 10**6)), min_size=1, max_size=40))
def test_epoch_that_is_sent_again_never_overwrites_what_came_later(steps: list[tuple[Step, int]]) -> None:
    history = History()
    try:
        for step, seed in steps:
            chance = Random(seed)
            history.time.advance(chance.choice((0, 0, 1, 700)))
            step(history, chance)
        if history.epochs:
            history.complete(Random(0))
        history.check()
    finally:
        history.site.close()


# Faults


class Replayed:
    """An epoch that is written twice with a local write in between, and goes on whatever storage does."""

    def __init__(self, engine: FaultyEngine) -> None:
        self.version: Version | None = None
        self.wrote_later = False
        with open_faulty(engine) as site:
            site.create_namespace("users").put(b"before", b"1")

    def run(self, engine: FaultyEngine) -> None:
        """Everything from the beginning, as a stream does that was restarted."""
        with open_faulty(engine) as site:
            users = persist(engine, lambda: site.namespace("users"))
            self.write_epoch(engine, site, users)
            if not self.wrote_later:
                persist(engine, lambda: users.put(b"later", b"local"))
                self.wrote_later = True
            self.write_epoch(engine, site, users)

    def write_epoch(self, engine: FaultyEngine, site: Site, users: Namespace) -> None:
        version = persist(engine, lambda: site.host.versions.open_epoch("users", "s", 0))
        assert self.version in (None, version), "an epoch has one version"
        self.version = version
        for batch in ({b"later": b"outside", b"new": b"outside"}, {b"before": b"outside", b"new": b"older"}):
            persist(engine, lambda batch=batch: put_unchanged(site, users, batch, version))  # type: ignore[misc]

    def check(self, engine: FaultyEngine) -> None:
        """Each key has the last that was written to it, whatever came twice."""
        with open_faulty(engine) as site:
            expected = {b"before": b"outside", b"new": b"outside", b"later": b"local"}
            assert dict(site.namespace("users").scan()) == expected
            found = [(change.key, change.value) for change in site.changes("users")]
            # Only a local put of which nobody knew whether it happened may have come twice.
            assert set(found) == {(b"before", b"1"), *expected.items(), (b"later", b"outside")}
            assert len([pair for pair in found if pair[1] == b"outside"]) == 3


@contextmanager
def open_faulty(engine: FaultyEngine) -> Iterator[Site]:
    site = open_engine(engine, site="oslo", site_id=HERE, time_source=SimulatedTime(START_MS))
    try:
        yield site
    finally:
        with suppress(FloodmarkError, SimulatedCrash):
            site.close()


@pytest.mark.parametrize("fault", [fault for fault in Fault if fault is not Fault.CRASH])
def test_fault_anywhere_leaves_one_version_and_one_outcome(fault: Fault) -> None:
    for position in range(1, 500):
        engine = FaultyEngine(FAMILIES)
        replayed = Replayed(engine)
        reopened = engine.crash()
        reopened.arm(FaultPlan(at=position, kind=fault))
        replayed.run(reopened)
        if not reopened.fired:
            assert position > 10
            return
        replayed.check(reopened.crash())
    raise AssertionError("it never came to an end")


def test_crash_anywhere_leaves_one_version_and_one_outcome() -> None:
    for position in range(1, 500):
        engine = FaultyEngine(FAMILIES)
        replayed = Replayed(engine)
        crashing = engine.crash()
        crashing.arm(FaultPlan(at=position, kind=Fault.CRASH))
        try:
            replayed.run(crashing)
        except SimulatedCrash:
            pass
        else:
            assert position > 10
            return
        version, wrote_later = replayed.version, replayed.wrote_later
        for keep in range(crashing.unsynced + 1):
            replayed.version, replayed.wrote_later = version, wrote_later
            survivor = crashing.crash(keep)
            replayed.run(survivor)
            replayed.check(survivor.crash())
    raise AssertionError("it never came to an end")
