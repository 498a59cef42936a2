"""Batch-index acknowledgement: a bit per record, durable and cheap, and what recovery reads."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from time import thread_time

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.contracts.ledger import entries_of
from tests.log.support import GatedLedger, answers, busy
from tests.waiting import HANG_SECONDS

from floodmark.codec.entries import encode_batch
from floodmark.engine import Engine, Guard, MemoryEngine, WriteRow
from floodmark.engine.rocks import RocksEngine
from floodmark.log import FAMILY, Acknowledgements, BatchedWriter, EntryId, Marks, Position, StoredLedger
from floodmark.log.base import NO_MARKS
from floodmark.model.errors import Corruption, InvalidArgument
from floodmark.testing.ledgers import EngineStore, MemoryLedger


def open_log(engine: Engine) -> tuple[StoredLedger, Acknowledgements, list[tuple[Position, bytes]]]:
    ledger = StoredLedger(EngineStore(engine), "log")
    acknowledgements = Acknowledgements(ledger)
    return ledger, acknowledgements, list(acknowledgements.recover())


@pytest.fixture
def engine() -> MemoryEngine:
    return MemoryEngine((FAMILY,))


class HastyLedger(MemoryLedger):
    """A ledger with which somebody lets go of a record while another is appended, behind its marks."""

    def __init__(self) -> None:
        super().__init__()
        self.writer: BatchedWriter[bytes] | None = None
        self.hasty: list[Position] = []

    def append(self, entry: bytes, marks: Marks = NO_MARKS) -> EntryId:
        number = super().append(entry, marks)
        if self.writer is not None and self.hasty:
            self.writer.acknowledge(self.hasty)
        return number


@pytest.mark.parametrize("alone", [True, False])
def test_what_is_acknowledged_during_an_append_is_stored_though_no_other_follows(alone: bool) -> None:
    ledger = HastyLedger()
    ledger.writer = writer = BatchedWriter[bytes](ledger)
    ledger.hasty = [writer.write(b"first")]
    if alone:
        writer.write(b"second")
    else:
        writer.add(b"second").result()
    assert writer.flush(HANG_SECONDS)
    assert [entry for entry, _ in entries_of(ledger)] == [2]


def test_an_entry_goes_when_its_last_record_is_acknowledged() -> None:
    ledger = GatedLedger()
    writer = BatchedWriter[bytes](ledger)
    with busy(writer, ledger) as plug:
        futures = [writer.add(b"%d" % number) for number in range(3)]
    positions = answers([plug, *futures])
    writer.acknowledge(positions[1:3])
    assert ledger.marks() == {}, "the next append stores it, or a flush"
    assert writer.flush(HANG_SECONDS)
    assert ledger.marks() == {2: b"\x04"}
    writer.acknowledge(positions[3:])
    assert writer.flush(HANG_SECONDS)
    assert [entry for entry, _ in entries_of(ledger)] == [1]
    assert ledger.marks() == {}
    assert writer.acknowledgements.oldest == 1
    assert writer.acknowledgements.count_live() == (1, 1)
    writer.close()


def test_acknowledging_twice_or_what_is_gone_changes_nothing() -> None:
    ledger = GatedLedger()
    writer = BatchedWriter[bytes](ledger)
    first, second = writer.write(b"1"), writer.write(b"2")
    for _ in range(3):
        writer.acknowledge([first, first, Position(99, 4, 3)])
        assert writer.flush(HANG_SECONDS)
    assert [entry for entry, _ in entries_of(ledger)] == [second.entry]
    assert ledger.marks() == {}
    writer.close()


@pytest.mark.parametrize("wrong", [Position(1, 2, 0), Position(1, 1, 1), Position(1, 1, -1)])
def test_a_position_that_the_writer_never_gave_is_refused(wrong: Position) -> None:
    writer = BatchedWriter[bytes](GatedLedger())
    writer.write(b"x")
    with pytest.raises(InvalidArgument, match="acknowledge the positions that the writer gave"):
        writer.acknowledge([wrong])
    writer.close()


def test_what_is_acknowledged_during_an_append_is_stored_by_closing() -> None:
    ledger = GatedLedger()
    writer = BatchedWriter[bytes](ledger)
    first = writer.write(b"1")
    with busy(writer, ledger):
        writer.acknowledge([first])
        assert [entry for entry, _ in entries_of(ledger)] == [1]
    writer.close()
    assert [entry for entry, _ in entries_of(ledger)] == [2]


def test_acknowledgements_survive_a_restart(engine: MemoryEngine) -> None:
    ledger, acknowledgements, found = open_log(engine)
    assert found == []
    entries: list[int] = []
    for number in range(3):
        entries.append(ledger.append(encode_batch([b"%d-%d" % (number, index) for index in range(9)])))
        acknowledgements.opened(entries[-1], 9)
    writer = BatchedWriter[bytes](ledger, acknowledgements=acknowledgements)
    writer.acknowledge([Position(entries[0], 9, index) for index in (0, 8)])
    writer.acknowledge([Position(entries[1], 9, index) for index in range(9)])
    writer.close()
    _, again, found = open_log(engine)
    expected = [(entries[0], index) for index in range(1, 8)] + [(entries[2], index) for index in range(9)]
    assert [(position.entry, position.batch_index) for position, _ in found] == expected
    assert [record for _, record in found][:2] == [b"0-1", b"0-2"]
    assert again.count_live() == (2, 16)
    assert again.oldest == entries[0]


@pytest.mark.parametrize("mark", [b"", b"\x00", b"\x04", b"\x01\x00"])
def test_marks_that_cannot_be_are_named(engine: MemoryEngine, mark: bytes) -> None:
    ledger, _, _ = open_log(engine)
    ledger.append(encode_batch([b"a", b"b"]))
    ledger.mark({1: mark})
    with pytest.raises(Corruption, match=r"marks .* of ledger entry 1"):
        open_log(engine)


SIZES = st.lists(st.integers(1, 9), min_size=1, max_size=6)


@given(SIZES, st.lists(st.tuples(st.integers(0, 5), st.integers(0, 8)), max_size=40), st.integers(1, 7))
def test_what_is_live_is_what_was_not_acknowledged(
    sizes: list[int], acknowledged: list[tuple[int, int]], restart_every: int
) -> None:
    engine = MemoryEngine((FAMILY,))
    ledger, acknowledgements, _ = open_log(engine)
    for size in sizes:
        acknowledgements.opened(ledger.append(encode_batch([b"%d" % index for index in range(size)])), size)
    live = {(entry, index) for entry, size in enumerate(sizes, start=1) for index in range(size)}
    writer = BatchedWriter[bytes](ledger, acknowledgements=acknowledgements)
    for step, (number, index) in enumerate(acknowledged):
        size = sizes[number % len(sizes)]
        position = Position(number % len(sizes) + 1, size, index % size)
        writer.acknowledge([position])
        live.discard((position.entry, position.batch_index))
        if step % restart_every == 0:
            writer.close()
            ledger, acknowledgements, found = open_log(engine)
            writer = BatchedWriter[bytes](ledger, acknowledgements=acknowledgements)
            assert {(position.entry, position.batch_index) for position, _ in found} == live
    writer.close()
    assert {entry for entry, _ in entries_of(ledger)} == {entry for entry, _ in live}


class CountingEngine(MemoryEngine):
    """Counts what is written and synced."""

    writes = syncs = rows = 0

    def write(self, rows: Iterable[WriteRow], guards: Sequence[Guard] = ()) -> bool:
        written = list(rows)
        self.writes += 1
        self.rows += len(written)
        return super().write(written, guards)

    def sync(self) -> None:
        self.syncs += 1
        super().sync()


def test_acknowledging_costs_no_sync_and_one_row_an_entry() -> None:
    engine = CountingEngine((FAMILY,))
    ledger, acknowledgements, _ = open_log(engine)
    writer = BatchedWriter[bytes](ledger, acknowledgements=acknowledgements)
    acknowledgements.opened(ledger.append(encode_batch([b"x"] * 512)), 512)
    before = engine.writes, engine.rows, engine.syncs
    writer.acknowledge([Position(1, 512, index) for index in range(0, 512, 2)])
    assert writer.flush(HANG_SECONDS)
    assert (engine.writes, engine.rows, engine.syncs) == (before[0] + 1, before[1] + 1, before[2])
    writer.close()


@pytest.mark.slow
def test_recovery_takes_as_long_as_what_is_open_not_as_what_was(tmp_path: Path) -> None:
    """100,000 transactions of four records have ended, and 1,000 spread among them are open.

    Counted is the time of the processor, for the machine may have other things to do.
    """
    transactions, records, every = 101_000, 4, 101
    engine = RocksEngine(tmp_path, (FAMILY,))
    ledger, acknowledgements, _ = open_log(engine)
    writer = BatchedWriter[bytes](ledger, acknowledgements=acknowledgements)
    batch: list[bytes] = []
    for number in range(transactions * records):
        batch.append(b"%060d" % (number // records))
        if len(batch) == 512 or number == transactions * records - 1:
            acknowledgements.opened(entry := ledger.append(encode_batch(batch)), len(batch))
            ended = [index for index, record in enumerate(batch) if int(record) % every]
            writer.acknowledge(Position(entry, len(batch), index) for index in ended)
            batch = []
    writer.close()
    begun = thread_time()
    _, again, found = open_log(engine)
    seconds = thread_time() - begun
    engine.close()
    assert [int(record) for _, record in found] == [
        number for number in range(0, transactions, every) for _ in range(records)
    ]
    assert again.count_live()[1] == 4_000
    assert seconds < 2.0


def test_recovery_of_bare_entries_reads_only_those_that_are_live(tmp_path: Path) -> None:
    engine = RocksEngine(tmp_path, (FAMILY,))
    ledger, _, _ = open_log(engine)
    live = [ledger.append(b"live")]
    # One sync would take long for each of them, so that they are written in the ledger's own rows.
    gone: list[WriteRow] = [
        (FAMILY, b"log\x00e" + number.to_bytes(8, "big"), b"x") for number in range(2, 20_002)
    ]
    engine.write(gone)
    ledger, _, _ = open_log(engine)
    ledger.mark(dict.fromkeys(range(2, 20_002)))
    live.append(ledger.append(b"live too"))
    begun = thread_time()
    _, _, found = open_log(engine)
    seconds = thread_time() - begun
    engine.close()
    assert [position.entry for position, _ in found] == live
    assert seconds < 2.0
