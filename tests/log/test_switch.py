"""Batched and bare entries in one ledger, in any order, and who can read them."""

from itertools import product
from threading import Thread

import pytest
from tests.contracts.ledger import entries_of
from tests.log.support import GatedLedger, answers, batches_of, busy, records_of
from tests.waiting import HANG_SECONDS

from floodmark.codec.entries import MAGIC, decode_entry, encode_batch, is_batched
from floodmark.log import Acknowledgements, BatchedWriter, BatchSettings, Ledger, holds_batches
from floodmark.model.errors import FormatTooNew, StorageFailed
from floodmark.testing.ledgers import MemoryLedger


def live_records(ledger: Ledger) -> list[bytes]:
    return [record for _, record in Acknowledgements(ledger).recover()]


def read_as_before(ledger: Ledger) -> list[bytes]:
    """A reader that knows only bare entries: every entry is a record."""
    return [entry for _, entry in entries_of(ledger)]


@pytest.mark.parametrize("switches", list(product([True, False], repeat=5)))
def test_any_sequence_of_on_and_off_is_read_back(switches: tuple[bool, ...]) -> None:
    ledger = MemoryLedger()
    writer = BatchedWriter[bytes](ledger, BatchSettings(enabled=switches[0]))
    records = [b"%d" % number for number in range(3 * len(switches))]
    for number, enabled in enumerate(switches):
        writer.enabled = enabled
        for record in records[3 * number : 3 * number + 3]:
            writer.write(record)
    writer.close()
    kinds = [is_batched(entry) for _, entry in entries_of(ledger)]
    assert kinds == [enabled for enabled in switches for _ in range(3)]
    assert live_records(ledger) == records
    assert holds_batches(ledger) is any(switches)


def test_the_switch_works_on_what_is_added_next_also_behind_an_append() -> None:
    ledger = GatedLedger()
    writer = BatchedWriter[bytes](ledger)
    futures = []
    with busy(writer, ledger):
        for enabled, record in [(True, b"a"), (True, b"b"), (False, b"c"), (False, b"d"), (True, b"e")]:
            writer.enabled = enabled
            assert writer.enabled is enabled
            futures.append(writer.add(record))
        futures.append(writer.add(b"f"))
    answers(futures)
    writer.close()
    assert batches_of(ledger) == [[b"a", b"b"], [b"c"], [b"d"], [b"e", b"f"]]
    assert [is_batched(entry) for _, entry in entries_of(ledger)] == [True, True, False, False, True]


def test_bare_entries_are_the_records_byte_for_byte() -> None:
    ledger = MemoryLedger()
    writer = BatchedWriter[bytes](ledger, BatchSettings(enabled=False))
    records = [b"", b"a", bytes(5_000)]
    for record in records:
        writer.write(record)
    answers([writer.add(record) for record in records])
    writer.close()
    assert read_as_before(ledger) == records * 2
    assert writer.statistics().bare_entries == 6
    assert writer.statistics().batched_entries == 0


@pytest.mark.parametrize("enabled", [True, False])
def test_a_record_that_looks_like_a_batch_comes_back_as_it_was(enabled: bool) -> None:
    ledger = MemoryLedger()
    writer = BatchedWriter[bytes](ledger, BatchSettings(enabled=enabled))
    records = [MAGIC, MAGIC + bytes(2), MAGIC + b"\x00\x01" + bytes(20)]
    for record in records:
        writer.write(record)
    writer.close()
    assert live_records(ledger) == records


def test_the_format_version_is_checked_whenever_a_log_is_read() -> None:
    ledger = MemoryLedger()
    writer = BatchedWriter[bytes](ledger)
    writer.write(b"known")
    writer.close()
    entry = encode_batch([b"unknown"])
    ledger.append(entry[:2] + b"\x00\x02" + entry[4:])
    with pytest.raises(FormatTooNew, match="format 2"):
        live_records(ledger)


def test_the_way_to_a_reader_that_knows_only_bare_entries_and_back() -> None:
    """Switch off, wait until no batch is left, let it read and write; then switch on again."""
    ledger = GatedLedger()
    writer = BatchedWriter[bytes](ledger)
    with busy(writer, ledger) as plug:
        batched = [writer.add(b"batched %d" % number) for number in range(3)]
    open_positions = answers([plug, *batched])

    writer.enabled = False
    bare = [writer.write(b"bare %d" % number) for number in range(2)]
    assert holds_batches(ledger)
    assert any(entry.startswith(MAGIC) for entry in read_as_before(ledger)), "it cannot read this yet"

    for position in open_positions[:-1]:
        writer.acknowledge([position])
        assert writer.flush(HANG_SECONDS)
        assert holds_batches(ledger)
    writer.acknowledge([open_positions[-1]])
    assert writer.flush(HANG_SECONDS)
    assert not holds_batches(ledger)
    writer.close()
    assert read_as_before(ledger) == [b"bare 0", b"bare 1"]

    ledger.append(b"written by that one")
    acknowledgements = Acknowledgements(ledger)
    assert [record for _, record in acknowledgements.recover()] == [
        b"bare 0",
        b"bare 1",
        b"written by that one",
    ]
    again = BatchedWriter[bytes](ledger, acknowledgements=acknowledgements)
    again.acknowledge(bare)
    again.write(b"batched again")
    again.close()
    assert records_of(ledger) == [b"written by that one", b"batched again"]


def test_a_flush_waits_for_what_came_before_and_for_nothing_else() -> None:
    ledger = GatedLedger()
    writer = BatchedWriter[bytes](ledger)
    with busy(writer, ledger):
        before = [writer.add(b"a"), writer.add(b"b")]
        writer.enabled = False
        assert not writer.flush(0.001)
        # What comes later holds nobody up, however much it is.
        ledger.on_append = lambda: writer.add(b"more") if ledger.appends < 50 else None
        ledger.gate.set()
        assert writer.flush(HANG_SECONDS)
        assert all(future.done() for future in before)
    writer.close()
    assert writer.flush(0)
    batched = [decode_entry(entry) for _, entry in entries_of(ledger) if is_batched(entry)]
    assert batched == [[b"plug"], [b"a", b"b"]]
    writer.close()


def test_a_flush_waits_for_one_who_writes_alone() -> None:
    ledger = GatedLedger()
    writer = BatchedWriter[bytes](ledger)
    ledger.gate.clear()
    alone = Thread(target=writer.write, args=(b"alone",))
    alone.start()
    ledger.wait_append()
    assert not writer.flush(0.001)
    ledger.gate.set()
    assert writer.flush(HANG_SECONDS)
    assert [is_batched(entry) for _, entry in entries_of(ledger)] == [True]
    alone.join(HANG_SECONDS)
    ledger.failures = [StorageFailed("no")]
    assert isinstance(writer.add(b"fails").exception(HANG_SECONDS), StorageFailed)
    assert writer.flush(HANG_SECONDS), "also if it could not be written"
    writer.close()
