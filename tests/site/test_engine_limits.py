"""A site on an engine with narrow limits cuts its work by them, and refuses only what cannot be cut."""

from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

import pytest
from tests.contracts.site.base import HOUR, HOUR_MS, START_MS
from tests.site.support import host_of, node_of

from floodmark.codec.ordered import encode_namespace
from floodmark.codec.values import encode_value
from floodmark.engine import EngineLimits, Guard, MemoryEngine, WriteRow
from floodmark.feed.subscription.consumer import Subscription, SubscriptionOptions
from floodmark.log import BatchSettings, open_log
from floodmark.merge.counter import add_to_counter
from floodmark.model.change import ChangeType, Stamp
from floodmark.model.errors import (
    CommitTooLarge,
    InvalidKey,
    InvalidValue,
    LimitExceeded,
    Retryable,
    StorageFailed,
)
from floodmark.model.limits import MIB
from floodmark.model.partition import Decision, Fate
from floodmark.partition import FAMILIES, META
from floodmark.partition.prepared import settling
from floodmark.site import Namespace, Site, open_engine
from floodmark.testing.clock import SimulatedTime

# Takes many rows, but not the change-log rows of all that one commit holds.
SMALL_VALUES: Final = EngineLimits(value_bytes_max=20_000, batch_bytes_max=8_000_000, batch_rows_max=2_000)
LIMITS: Final = EngineLimits(
    value_bytes_max=1_000_000,
    batch_bytes_max=4_500_000,
    batch_rows_max=128,
    key_bytes_max=1_000,
    range_rows_max=128,
)


class NarrowEngine(MemoryEngine):
    """Refuses what is above its limits, as databases do."""

    largest_batch = 0

    def __init__(self, limits: EngineLimits = LIMITS) -> None:
        super().__init__(FAMILIES)
        self.limits = limits

    def write(self, rows: Iterable[WriteRow], guards: Sequence[Guard] = ()) -> bool:
        batch, limits = list(rows), self.limits
        sizes = [(len(key), len(value or b"")) for _, key, value in batch]
        self.largest_batch = max(self.largest_batch, len(batch))
        self._require(len(batch) <= limits.batch_rows_max, f"{len(batch)} rows")
        self._require(sum(map(sum, sizes)) <= limits.batch_bytes_max, "bytes of a batch")
        self._require(all(key <= limits.key_bytes_max for key, _ in sizes), "key")
        self._require(all(value <= limits.value_bytes_max for _, value in sizes), "value")
        return super().write(batch, guards)

    def delete_range(self, family: str, start: bytes, end: bytes, guards: Sequence[Guard] = ()) -> bool:
        rows = self.scan(family, start, end, rows_max=1_000, bytes_max=MIB)
        self._require(len(rows) <= self.limits.batch_rows_max, f"a range of {len(rows)} rows")
        return super().delete_range(family, start, end, guards)

    def _require(self, holds: bool, what: str) -> None:
        if not holds:
            raise StorageFailed(f"too large: {what}; try again")


@pytest.fixture
def engine() -> NarrowEngine:
    return NarrowEngine()


@pytest.fixture
def time() -> SimulatedTime:
    return SimulatedTime(START_MS)


@pytest.fixture
def site(engine: NarrowEngine, time: SimulatedTime) -> Site:
    return open_engine(engine, site="narrow", time_source=time)


@pytest.fixture
def users(site: Site) -> Namespace:
    return site.create_namespace("users", retention=HOUR)


def test_rounds_of_many_threads_are_cut_by_the_rows_of_a_batch(
    users: Namespace, engine: NarrowEngine
) -> None:
    def put(number: int) -> None:
        users.put(b"%d" % number, b"x", ttl=3_600)

    with ThreadPoolExecutor(200) as threads:
        list(threads.map(put, range(2_000)))
    assert len(list(users.scan())) == 2_000
    assert engine.largest_batch <= LIMITS.batch_rows_max


def test_rounds_are_cut_by_the_bytes_of_a_batch(users: Namespace) -> None:
    with ThreadPoolExecutor(20) as threads:
        list(threads.map(lambda number: users.put(b"%d" % number, bytes(900_000)), range(20)))
    assert len(list(users.scan())) == 20


def test_a_range_is_deleted_in_portions(users: Namespace) -> None:
    for start in range(0, 1_000, 40):
        users.put_many({b"%d" % number: b"x" for number in range(start, start + 40)})
    assert users.delete_range() == 1_000
    assert list(users.scan()) == []


def test_garbage_and_dropped_namespaces_are_removed_in_portions(
    site: Site, users: Namespace, time: SimulatedTime
) -> None:
    for start in range(0, 600, 40):
        users.put_many({b"%d" % number: b"x" for number in range(start, start + 40)})
    users.delete_range()
    time.advance(3 * HOUR_MS)
    report = site.collect_garbage()
    assert report.versions_removed >= 600
    for start in range(0, 400, 40):
        users.put_many({b"%d" % number: b"x" for number in range(start, start + 40)})
    site.drop_namespace("users")
    time.advance(3 * HOUR_MS)
    site.collect_garbage()
    assert site.namespaces() == []


def test_a_commit_is_cut_into_log_rows_that_the_engine_takes(site: Site, users: Namespace) -> None:
    users.put_many({b"%d" % number: bytes(30_000) for number in range(36)})
    users.put_many({b"%d" % number: bytes(4_000) for number in range(42)})
    assert len(list(site.changes("users"))) == 78


def test_what_cannot_be_cut_is_refused_as_invalid(users: Namespace) -> None:
    with pytest.raises(InvalidValue, match="database of this site takes 999,991"):
        users.put(b"a", bytes(MIB))
    with pytest.raises(InvalidValue, match="database of this site takes 999,991"):
        users.put_many({b"a": b"x", b"b": bytes(MIB)})
    with pytest.raises(InvalidKey, match="database"):
        users.put(bytes(1_000), b"x")
    with pytest.raises(CommitTooLarge):
        users.put_many({b"%d" % number: b"x" for number in range(200)})
    assert list(users.scan()) == []
    longest = 8 * ((LIMITS.key_bytes_max - 8 - 32) // 9) - 2 - 3
    users.put(bytes(longest), b"x", ttl=3_600)
    with pytest.raises(InvalidKey):
        users.put(bytes(longest + 1), b"x")


# Ways in other than a plain commit


@pytest.fixture
def small_values(time: SimulatedTime) -> Site:
    site = open_engine(NarrowEngine(SMALL_VALUES), site="small", time_source=time)
    site.create_namespace("users", retention=HOUR)
    return site


def qualified(users: Namespace[Any], number: int) -> bytes:
    return encode_namespace(users.id) + b"%04d" % number


def test_expiries_are_told_in_portions(
    site: Site, users: Namespace, time: SimulatedTime, engine: NarrowEngine
) -> None:
    site.split("users", b"2")
    site.split("users", b"5")
    for start in range(0, 400, 40):
        users.put_many({b"%d" % number: b"x" for number in range(start, start + 40)}, ttl=60)
    # As large as it may be: it is told with its origin.
    users.put(b"large", bytes(LIMITS.value_bytes_max - 18), ttl=60)
    before = node_of(site).resolved_version()
    time.advance(61_000)
    assert node_of(site).expiries.tell()
    told = [change for change in site.changes("users", since=before) if change.type is ChangeType.DELETE]
    assert len(told) == 401
    assert engine.largest_batch <= LIMITS.batch_rows_max


def test_log_rows_of_expiries_are_cut(small_values: Site, time: SimulatedTime) -> None:
    users = small_values.namespace("users")
    users.put_many({b"%d" % number: bytes(4_000) for number in range(100)}, ttl=60)
    before = node_of(small_values).resolved_version()
    time.advance(61_000)
    assert node_of(small_values).expiries.tell()
    assert len(list(small_values.changes("users", since=before))) == 100


@pytest.mark.parametrize("length", [100, 4_000])
def test_log_rows_of_copies_are_cut(small_values: Site, length: int) -> None:
    users = small_values.namespace("users")
    stamp = Stamp(node_of(small_values).clock.now(), 3)
    copy = encode_value(bytes(length), origin=stamp)
    rows = {qualified(users, number): copy for number in range(300)}
    assert small_values.host.router.apply(rows, durable=True)
    assert len(list(small_values.changes("users"))) == 300


def test_log_rows_of_prepared_commits_are_cut(small_values: Site) -> None:
    users = small_values.namespace("users")
    with small_values.transaction() as transaction:
        for number in range(100):
            transaction.put(users, b"%d" % number, bytes(4_000))
    assert len(list(small_values.changes("users"))) == 100


def test_commits_above_a_prepared_write_leave_room_for_it(
    site: Site, engine: NarrowEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(settling, "ASK_SECONDS", 0.0)
    node_of(site).settle_by(lambda _: Fate(Decision.UNDECIDED))
    counts = site.create_namespace("counts", merge="counter")
    partition = node_of(site).map.route(qualified(counts, 0))
    keys = [qualified(counts, number) for number in range(21)]
    version = partition.prepare("t", keys, [add_to_counter(1)] * 21)
    # With four rows for each prepared key, there is room for three rows of so many further changes.
    for number in range(14):
        counts.add(b"%04d" % number, 1)
    with pytest.raises(Retryable, match="'t'"):
        counts.add(b"0000", 1)
    assert partition.commit_prepared("t", version)
    assert engine.largest_batch <= LIMITS.batch_rows_max
    assert sum(int(value) for _, value in counts.scan()) == 21 + 14


def test_an_expiry_waits_for_a_prepared_write_on_its_key(
    site: Site, users: Namespace, time: SimulatedTime
) -> None:
    partition, expiries = node_of(site).map.route(qualified(users, 1)), node_of(site).expiries
    users.put_many({b"0001": b"x", b"0002": b"x"}, ttl=60)
    before = users.put(b"0003", b"x")
    partition.prepare("t", [qualified(users, 1)], [encode_value(b"y")])
    time.advance(61_000)
    assert expiries.tell()
    assert expiries.told_through == START_MS // 1_000 + 60
    assert partition.abort_prepared("t")
    assert expiries.tell()
    assert expiries.told_through == START_MS // 1_000 + 61
    assert [change.key for change in site.changes("users", since=before)] == [b"0002", b"0001"]


def test_a_key_that_is_too_long_with_its_transaction_is_refused(users: Namespace, site: Site) -> None:
    key = encode_namespace(users.id) + bytes(800)
    partition = node_of(site).map.route(key)
    with pytest.raises(InvalidKey, match="while it is prepared"):
        partition.prepare("t" * 250, [key], [encode_value(b"x")])
    assert partition.prepare("t", [key], [encode_value(b"x")])


def test_merged_states_grow_only_as_far_as_the_engine_takes_them(site: Site) -> None:
    people = site.create_namespace("people", merge="fields")
    people.put(b"ada", b'{"a": "%s"}' % (b"x" * 500_000))
    before = people.get(b"ada")
    with pytest.raises(InvalidValue, match="database of this site takes 1,000,000"):
        people.update(b"ada", b'{"b": "%s"}' % (b"x" * 520_000))
    with pytest.raises(InvalidValue, match="1,000,000"), site.transaction() as transaction:
        transaction.update(people, b"ada", b'{"b": "%s"}' % (b"x" * 520_000))
    assert people.get(b"ada") == before


def test_a_subscription_is_compacted_and_removed_in_portions(
    site: Site, users: Namespace, engine: NarrowEngine, time: SimulatedTime
) -> None:
    def acknowledge() -> Subscription:
        for start in range(0, 320, 40):
            users.put_many({b"%04d" % key: b"x" for key in range(start, start + 40)})
        options = SubscriptionOptions(follow=False, background=False, flush_count=1)
        subscription = site.subscribe("indexer", "users", options=options)
        for delivery in subscription:
            delivery.acknowledge()
            subscription.flush()
        assert _changes_of(engine) >= 320
        return subscription

    acknowledge().close()
    assert _changes_of(engine) == 0
    acknowledge()
    time.advance(HOUR_MS)
    host_of(site).subscriptions.remove("indexer")
    assert _changes_of(engine) == 0


def _changes_of(engine: NarrowEngine) -> int:
    start = b"subscription-changes/"
    return len(engine.scan(META, start, b"subscription-changes0", rows_max=1_000, bytes_max=MIB))


def test_entries_of_a_ledger_are_cut_and_their_marks_stored_in_portions(
    site: Site, engine: NarrowEngine, time: SimulatedTime
) -> None:
    def opened() -> list[bytes]:
        log = open_log(
            node_of(site).storage, "log", BatchSettings(), encode=bytes, decode=bytes, time_source=time
        )
        return [record for _, record in log.live]

    log = open_log(
        node_of(site).storage, "log", BatchSettings(), encode=bytes, decode=bytes, time_source=time
    )
    # Together they are more than one value of the engine.
    futures = [log.writer.add(bytes([number]) * 300_000) for number in range(10)]
    positions = [future.result() for future in futures]
    with pytest.raises(InvalidValue, match="1,000,000"):
        log.writer.write(bytes(LIMITS.value_bytes_max))
    positions += [log.writer.write(b"%d" % number) for number in range(200)]
    log.writer.acknowledge(positions)
    last = log.writer.write(b"last")
    assert opened() == [b"last"]
    log.writer.acknowledge([last])
    log.writer.close()
    assert opened() == []
    log.ledger.delete()
    assert engine.largest_batch <= LIMITS.batch_rows_max


def test_a_write_that_cannot_be_cut_is_refused_before_it_is_written(site: Site, engine: NarrowEngine) -> None:
    storage = node_of(site).storage
    for rows in (
        [(META, b"a%d" % number, b"") for number in range(129)],
        [(META, b"a", bytes(LIMITS.value_bytes_max + 1))],
    ):
        with pytest.raises(LimitExceeded, match="Nothing was written"), storage.settled():
            storage.store(rows)
    assert not storage.stopped
    assert engine.scan(META, b"a", b"b", rows_max=10, bytes_max=MIB) == []


def test_namespaces_are_collected_whose_floors_are_more_than_one_batch(
    site: Site, time: SimulatedTime
) -> None:
    for number in range(LIMITS.batch_rows_max + 1):
        site.create_namespace(f"n{number}", retention=HOUR)
    time.advance(3 * HOUR_MS)
    site.collect_garbage()
    collected = node_of(site).retention.collected_version
    assert all(collected(site.namespace(name).id) for name in site.namespaces())
