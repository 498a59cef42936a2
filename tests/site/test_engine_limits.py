"""A site on an engine with narrow limits cuts its work by them, and refuses only what cannot be cut."""

from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Final

import pytest
from tests.contracts.site.base import HOUR, HOUR_MS, START_MS

from floodmark.engine import EngineLimits, Guard, MemoryEngine, WriteRow
from floodmark.model.errors import CommitTooLarge, InvalidKey, InvalidValue, StorageFailed
from floodmark.model.limits import MIB
from floodmark.partition import FAMILIES
from floodmark.site import Namespace, Site, open_engine
from floodmark.testing.clock import SimulatedTime

LIMITS: Final = EngineLimits(
    value_bytes_max=1_000_000,
    batch_bytes_max=4_500_000,
    batch_rows_max=128,
    key_bytes_max=1_000,
    range_rows_max=128,
)


class NarrowEngine(MemoryEngine):
    """Refuses what is above its limits, as databases do."""

    limits = LIMITS
    largest_batch = 0

    def write(self, rows: Iterable[WriteRow], guards: Sequence[Guard] = ()) -> bool:
        batch = list(rows)
        sizes = [(len(key), len(value or b"")) for _, key, value in batch]
        self.largest_batch = max(self.largest_batch, len(batch))
        self._require(len(batch) <= LIMITS.batch_rows_max, f"{len(batch)} rows")
        self._require(sum(map(sum, sizes)) <= LIMITS.batch_bytes_max, "bytes of a batch")
        self._require(all(key <= LIMITS.key_bytes_max for key, _ in sizes), "key")
        self._require(all(value <= LIMITS.value_bytes_max for _, value in sizes), "value")
        return super().write(batch, guards)

    def delete_range(self, family: str, start: bytes, end: bytes, guards: Sequence[Guard] = ()) -> bool:
        rows = self.scan(family, start, end, rows_max=1_000, bytes_max=MIB)
        self._require(len(rows) <= LIMITS.batch_rows_max, f"a range of {len(rows)} rows")
        return super().delete_range(family, start, end, guards)

    def _require(self, holds: bool, what: str) -> None:
        if not holds:
            raise StorageFailed(f"too large: {what}; try again")


@pytest.fixture
def engine() -> NarrowEngine:
    return NarrowEngine(FAMILIES)


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
    with pytest.raises(InvalidValue, match="1,000,000"):
        users.put(b"a", bytes(MIB))
    with pytest.raises(InvalidValue, match="1,000,000"):
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
