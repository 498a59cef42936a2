"""Scans jump over what they do not want: many versions of a key, and long rows of dead ones, either way."""

from collections.abc import Iterator
from random import Random

import pytest
from tests.site.support import START_MS
from tests.sizes import only

from floodmark.clock import HybridClock
from floodmark.codec.values import PLAIN, TOMBSTONE
from floodmark.engine import MemoryEngine, Row
from floodmark.model.limits import PAGE_ROWS_MAX
from floodmark.model.partition import Content
from floodmark.model.ranges import KeyRange, prefix_end
from floodmark.model.version import Version
from floodmark.partition import FAMILIES, LocalPartition, Node
from floodmark.partition.read import records

NAMESPACE = bytes([0, 0, 1])
EVERYTHING = KeyRange(NAMESPACE, prefix_end(NAMESPACE))


class CountingEngine(MemoryEngine):
    """Counts the scans, and the rows that they gave."""

    def __init__(self) -> None:
        super().__init__(FAMILIES)
        self.scans = self.rows = 0

    def scan(
        self,
        family: str,
        start: bytes,
        end: bytes | None,
        *,
        rows_max: int,
        bytes_max: int,
        reverse: bool = False,
    ) -> list[Row]:
        page = super().scan(family, start, end, rows_max=rows_max, bytes_max=bytes_max, reverse=reverse)
        self.scans += 1
        self.rows += len(page)
        return page

    def forget(self) -> None:
        self.scans = self.rows = 0


@pytest.fixture
def engine() -> CountingEngine:
    return CountingEngine()


@pytest.fixture
def partition(engine: CountingEngine) -> Iterator[LocalPartition]:
    node = Node(engine, HybridClock(lambda: START_MS), 7)
    yield node.map.partitions[0]
    node.close()


def put(partition: LocalPartition, key: bytes, value: bytes) -> Version:
    stored = TOMBSTONE if value == b"" else value + PLAIN
    return partition.put([NAMESPACE + key], [stored], durable=False)


def scan(
    partition: LocalPartition, at: Version, *, reverse: bool = False, limit: int | None = None
) -> list[Row]:
    pages = partition.scan(EVERYTHING, at, rows_max=limit, reverse=reverse)
    rows = [row for page in pages for row in page]
    return rows[::-1] if reverse else rows


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("place", ["first", "middle", "last"])
def test_snapshot_of_keys_with_many_versions_reads_few_of_them(
    engine: CountingEngine, partition: LocalPartition, place: str, reverse: bool
) -> None:
    keys = [b"key-%02d" % number for number in range(20)]
    versions = [[put(partition, key, b"%d" % turn) for key in keys][-1] for turn in range(250)]
    turn = {"first": 0, "middle": 125, "last": 249}[place]
    engine.forget()
    assert scan(partition, versions[turn], reverse=reverse) == [(key, b"%d" % turn) for key in keys]
    # A full page for the first key, which is not known yet to have many; then some for each.
    assert engine.rows < PAGE_ROWS_MAX + 60 * len(keys)
    assert engine.scans < 5 * len(keys)


@pytest.mark.parametrize("turn", [0, 125, 249])
def test_columns_of_keys_with_many_versions_read_few_of_them_and_come_together(
    engine: CountingEngine, partition: LocalPartition, monkeypatch: pytest.MonkeyPatch, turn: int
) -> None:
    monkeypatch.setattr(records, "RECORDS_PAGE_ROWS_MAX", 500)
    keys = [b"key-%02d" % number for number in range(20)]
    versions = [[put(partition, key, b"%d" % turn) for key in keys][-1] for turn in range(250)]
    engine.forget()
    batches = list(partition.scan_records(EVERYTHING, versions[turn], content=Content.WHOLE))
    assert [key for batch in batches for key in batch.column("key").to_pylist()] == keys
    assert engine.rows < 500 + 60 * len(keys)
    assert len([batch for batch in batches if batch.num_rows]) == 1


@pytest.mark.parametrize("reverse", [False, True])
def test_limit_behind_many_deleted_keys_takes_few_pages(
    engine: CountingEngine, partition: LocalPartition, reverse: bool
) -> None:
    for number in range(5_000):
        put(partition, b"key-%05d" % number, b"")
    put(partition, b"a", b"1")
    at = put(partition, b"z", b"2")
    engine.forget()
    live = NAMESPACE + b"key-"
    keys = KeyRange(NAMESPACE, prefix_end(live)) if reverse else KeyRange(live, prefix_end(NAMESPACE))
    rows = [row for page in partition.scan(keys, at, rows_max=1, reverse=reverse) for row in page]
    assert rows == [(b"a", b"1")] if reverse else [(b"z", b"2")]
    assert engine.scans < 5_000 / PAGE_ROWS_MAX + 10


@pytest.mark.parametrize("seed", only(range(5), range(10)))
def test_any_versions_read_like_a_plain_dict_at_every_version_and_either_way(
    partition: LocalPartition, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    randomness = Random(seed)
    monkeypatch.setattr(records, "PAGE_ROWS_MAX", randomness.choice([2, 9, 20, 1000]))
    monkeypatch.setattr(records, "RECORDS_PAGE_ROWS_MAX", randomness.choice([2, 9, 20, 1000]))
    monkeypatch.setattr(records, "PAGE_BYTES_MAX", randomness.choice([60, 1000, 1 << 20]))
    keys = [randomness.randbytes(randomness.randint(1, 20)) for _ in range(12)]
    weights = [randomness.choice([1, 5, 200]) for _ in keys]
    model: dict[bytes, bytes] = {}
    moments: list[tuple[Version, dict[bytes, bytes]]] = []
    for _ in range(400):
        (key,) = randomness.choices(keys, weights)
        value = randomness.choice([b"", b"%d" % randomness.randint(0, 9) * randomness.choice([1, 40])])
        model[key] = value
        moments.append((put(partition, key, value), dict(model)))
    for at, state in randomness.sample(moments, 25):
        expected = sorted((key, value) for key, value in state.items() if value)
        limit = randomness.choice([None, 1, 3, 50])
        assert scan(partition, at, limit=limit) == expected
        assert scan(partition, at, limit=limit, reverse=True) == expected
        batches = partition.scan_records(EVERYTHING, at)
        assert [key for batch in batches for key in batch.column("key").to_pylist()] == [
            key for key, _ in expected
        ]


def test_catching_up_by_a_scan_passes_over_versions_that_it_does_not_want(
    engine: CountingEngine, partition: LocalPartition, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(records, "PAGE_ROWS_MAX", 10)
    versions = [put(partition, b"%d" % (number % 2), b"x") for number in range(400)]
    engine.forget()
    pages = records.scan_versions(engine, EVERYTHING, versions[199], versions[205])
    assert [version for page in pages for version, _, _ in page.rows] == [
        *versions[204:199:-2],
        *versions[205:199:-2],
    ]
    assert engine.rows <= 60
