"""The batched writer: when it writes, in which order, and what it costs to wait for nothing."""

import asyncio
from collections.abc import Iterator
from concurrent.futures import wait
from pathlib import Path
from random import Random
from threading import Event
from threading import enumerate as all_threads
from typing import Any

import pytest
from tests.log.support import (
    GatedLedger,
    SimulatedSeconds,
    answers,
    batches_of,
    busy,
    records_of,
    run_threads,
)
from tests.waiting import HANG_SECONDS, wait_until

from floodmark.log import BatchedWriter, BatchSettings, LogStatistics, Position, Trigger
from floodmark.model.errors import InvalidArgument
from floodmark.model.limits import LEDGER_ENTRY_RECORDS_MAX, LEDGER_RECORD_BYTES_MAX
from floodmark.testing.ledgers import MemoryLedger


@pytest.fixture
def ledger() -> GatedLedger:
    return GatedLedger()


@pytest.fixture
def time() -> SimulatedSeconds:
    return SimulatedSeconds()


@pytest.fixture
def writer(ledger: GatedLedger, time: SimulatedSeconds) -> Iterator[BatchedWriter[bytes]]:
    writer = BatchedWriter[bytes](
        ledger, BatchSettings(max_records=4, max_bytes=100, max_delay_ms=10), time_seconds=time
    )
    yield writer
    ledger.gate.set()
    writer.close()


def triggers(statistics: LogStatistics) -> dict[str, int]:
    """The triggers that were counted, without the flush of the plug."""
    counts = {str(trigger): count for trigger, count in statistics.flushes.items()}
    counts["idle"] -= 1
    return {trigger: count for trigger, count in counts.items() if count}


# Positions


def test_a_lone_record_is_an_entry_of_its_own(writer: BatchedWriter[bytes], ledger: GatedLedger) -> None:
    assert writer.write(b"a") == Position(1, 1, 0)
    assert writer.add(b"b").result() == Position(2, 1, 0)
    assert batches_of(ledger) == [[b"a"], [b"b"]]
    assert writer.statistics().flushes[Trigger.IDLE] == 2


def test_what_gathers_behind_an_append_is_one_entry_with_positions_in_order(
    writer: BatchedWriter[bytes], ledger: GatedLedger
) -> None:
    with busy(writer, ledger) as plug:
        futures = [writer.add(b"%d" % number) for number in range(3)]
    assert plug.result() == Position(1, 1, 0)
    assert answers(futures) == [Position(2, 3, 0), Position(2, 3, 1), Position(2, 3, 2)]


# Thresholds: one below, at, and one above


@pytest.mark.parametrize(
    ("count", "sizes", "expected"),
    [
        (3, [3], {"idle": 1}),
        (4, [4], {"count": 1}),
        (5, [4, 1], {"count": 1, "idle": 1}),
        (9, [4, 4, 1], {"count": 2, "idle": 1}),
    ],
)
def test_an_entry_is_full_by_count(
    writer: BatchedWriter[bytes], ledger: GatedLedger, count: int, sizes: list[int], expected: dict[str, int]
) -> None:
    with busy(writer, ledger):
        futures = [writer.add(b"%d" % number) for number in range(count)]
    answers(futures)
    assert [len(batch) for batch in batches_of(ledger)] == sizes
    assert triggers(writer.statistics()) == expected


@pytest.mark.parametrize(
    ("sizes", "entries", "expected"),
    [
        ([50, 49], [2], {"idle": 1}),
        ([50, 50], [2], {"bytes": 1}),
        ([50, 51], [1, 1], {"bytes": 1, "idle": 1}),
        ([99, 1, 99], [2, 1], {"bytes": 1, "idle": 1}),
    ],
)
def test_an_entry_is_full_by_bytes(
    writer: BatchedWriter[bytes],
    ledger: GatedLedger,
    sizes: list[int],
    entries: list[int],
    expected: dict[str, int],
) -> None:
    with busy(writer, ledger):
        futures = [writer.add(bytes(size)) for size in sizes]
    answers(futures)
    assert [len(batch) for batch in batches_of(ledger)] == entries
    assert triggers(writer.statistics()) == expected


@pytest.mark.parametrize(
    ("waited_ms", "expected"), [(9, {"idle": 1}), (10, {"age": 1}), (11, {"age": 1}), (0, {"idle": 1})]
)
def test_the_age_is_that_of_the_oldest_record(
    writer: BatchedWriter[bytes],
    ledger: GatedLedger,
    time: SimulatedSeconds,
    waited_ms: int,
    expected: dict[str, int],
) -> None:
    with busy(writer, ledger):
        oldest = writer.add(b"oldest")
        time.now += waited_ms / 1_000
        youngest = writer.add(b"youngest")
    answers([oldest, youngest])
    assert triggers(writer.statistics()) == expected
    delays = writer.statistics().oldest_record_delay_seconds
    assert delays.sum == pytest.approx(waited_ms / 1_000)


@pytest.mark.parametrize(
    ("size", "entries", "expected"),
    [
        (99, [[1, 99]], {"bytes": 1}),
        (100, [[1], [100]], {"bytes": 1, "large": 1}),
        (101, [[1], [101]], {"bytes": 1, "large": 1}),
    ],
)
def test_a_record_as_large_as_an_entry_goes_alone_behind_what_stands_before_it(
    writer: BatchedWriter[bytes],
    ledger: GatedLedger,
    size: int,
    entries: list[list[int]],
    expected: dict[str, int],
) -> None:
    with busy(writer, ledger):
        futures = [writer.add(b"x"), writer.add(bytes(size))]
    answers(futures)
    assert [[len(record) for record in batch] for batch in batches_of(ledger)] == entries
    assert triggers(writer.statistics()) == expected


def test_what_comes_behind_a_large_record_does_not_join_what_stood_before_it(
    writer: BatchedWriter[bytes], ledger: GatedLedger
) -> None:
    with busy(writer, ledger):
        futures = [writer.add(record) for record in (b"a", bytes(100), bytes(200), b"b", b"c")]
    answers(futures)
    assert batches_of(ledger) == [[b"a"], [bytes(100)], [bytes(200)], [b"b", b"c"]]


def test_only_large_records_are_counted_as_large(writer: BatchedWriter[bytes], ledger: GatedLedger) -> None:
    with busy(writer, ledger):
        futures = [writer.add(record) for _ in range(50) for record in (b"small", bytes(100))]
    answers(futures)
    assert triggers(writer.statistics()) == {"bytes": 50, "large": 50}


def test_a_large_record_that_is_written_alone_is_counted_as_large(writer: BatchedWriter[bytes]) -> None:
    writer.write(bytes(100))
    assert writer.statistics().flushes[Trigger.LARGE] == 1


# Nobody waits for nothing


@pytest.mark.parametrize("way", ["callback", "wait", "asyncio", "timeout"])
def test_a_record_goes_at_once_though_the_delay_is_an_hour(ledger: GatedLedger, way: str) -> None:
    writer = BatchedWriter[bytes](ledger, BatchSettings(max_delay_ms=3_600_000))
    future = writer.add(b"x")
    if way == "callback":
        came = Event()
        future.add_done_callback(lambda _: came.set())
        assert came.wait(HANG_SECONDS)
    elif way == "wait":
        assert wait([future], timeout=HANG_SECONDS).done == {future}
    elif way == "asyncio":

        async def wrapped() -> Position:
            return await asyncio.wrap_future(future)

        assert asyncio.run(wrapped()) == Position(1, 1, 0)
    else:
        assert future.result(HANG_SECONDS) == Position(1, 1, 0)
    writer.close()


def log_threads() -> list[int]:
    return [
        thread.native_id or 0
        for thread in all_threads()
        if thread.name == "floodmark-log" and thread.is_alive()
    ]


def test_the_thread_starts_with_the_first_record_and_ends_when_the_log_is_closed(ledger: GatedLedger) -> None:
    before = log_threads()
    writer = BatchedWriter[bytes](ledger)
    assert writer.flush(HANG_SECONDS)
    assert log_threads() == before
    writer.write(b"x")
    assert len(log_threads()) == len(before) + 1
    writer.close()
    assert log_threads() == before


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="the kernel does not count switches here")
def test_an_idle_writer_is_not_woken(ledger: GatedLedger) -> None:
    """A timer of a millisecond, as Pulsar's, would wake 200 times in this test."""
    known = set(log_threads())
    writer = BatchedWriter[bytes](ledger)
    answers([writer.add(b"x")])
    (thread,) = set(log_threads()) - known
    status = Path(f"/proc/self/task/{thread}/status")

    def switches() -> int:
        lines = status.read_text("utf-8").splitlines()
        return sum(int(line.split()[1]) for line in lines if "ctxt_switches" in line)

    wait_until(lambda: "\nState:\tS" in status.read_text("utf-8"), "the writer does not fall asleep")
    before = switches()
    Event().wait(0.2)
    assert switches() - before <= 20
    writer.close()


# Order


def test_callbacks_run_in_the_order_of_the_records(ledger: GatedLedger) -> None:
    writer = BatchedWriter[bytes](ledger, BatchSettings(max_records=7))
    order: list[int] = []
    futures = []
    for number in range(500):
        future = writer.add(b"%d" % number)
        future.add_done_callback(lambda _, number=number: order.append(number))  # type: ignore[misc]
        futures.append(future)
    writer.close()
    answers(futures)
    assert records_of(ledger) == [b"%d" % number for number in range(500)]
    # A callback that is added when its future is done runs at once, in the thread that adds it.
    assert sorted(order) == list(range(500))


def test_callbacks_of_several_entries_run_in_order_behind_an_append(
    writer: BatchedWriter[bytes], ledger: GatedLedger
) -> None:
    order: list[int] = []
    with busy(writer, ledger):
        for number in range(50):
            future = writer.add(b"%d" % number)
            future.add_done_callback(lambda _, number=number: order.append(number))  # type: ignore[misc]
    writer.close()
    assert order == list(range(50))


@pytest.mark.parametrize("how", ["write", "add"])
def test_64_threads_get_positions_of_their_own_records_in_their_order(how: str) -> None:
    ledger = MemoryLedger()
    writer = BatchedWriter[bytes](ledger, BatchSettings(max_records=50))
    found: dict[int, list[Position]] = {}

    def work(number: int) -> None:
        records = [b"%d-%d" % (number, index) for index in range(20)]
        if how == "write":
            found[number] = [writer.write(record) for record in records]
        else:
            found[number] = [future.result() for future in [writer.add(record) for record in records]]

    run_threads(work, 64)
    writer.close()
    batches = {entry + 1: batch for entry, batch in enumerate(batches_of(ledger))}
    for number, positions in found.items():
        assert positions == sorted(positions)
        for index, (entry, size, place) in enumerate(positions):
            assert batches[entry][place] == b"%d-%d" % (number, index)
            assert len(batches[entry]) == size
    assert sum(map(len, batches.values())) == 64 * 20
    assert writer.statistics().records == 64 * 20
    assert writer.statistics().bytes_in_flight == 0


# Clocks


def test_a_clock_that_jumps_holds_nothing_up_and_no_delay_is_negative(ledger: GatedLedger) -> None:
    random = Random(5)
    writer = BatchedWriter[bytes](
        ledger, BatchSettings(max_records=5), time_seconds=lambda: random.uniform(-1e9, 1e9)
    )
    answers([writer.add(b"%d" % number) for number in range(200)])
    for number in range(200, 220):
        writer.write(b"%d" % number)
    writer.close()
    assert records_of(ledger) == [b"%d" % number for number in range(220)]
    assert writer.statistics().oldest_record_delay_seconds.sum >= 0


# Settings


@pytest.mark.parametrize(
    "wrong",
    [
        {"max_records": 0},
        {"max_records": LEDGER_ENTRY_RECORDS_MAX + 1},
        {"max_bytes": 0},
        {"max_bytes": LEDGER_RECORD_BYTES_MAX + 1},
        {"max_delay_ms": 0},
        {"max_bytes": 1_000, "max_bytes_in_flight": 999},
    ],
)
def test_settings_that_make_no_sense_are_refused(ledger: GatedLedger, wrong: dict[str, Any]) -> None:
    with pytest.raises(InvalidArgument, match=next(reversed(wrong))):
        BatchedWriter[bytes](ledger, BatchSettings(**wrong))


def test_the_largest_settings_are_accepted(ledger: GatedLedger) -> None:
    largest = LEDGER_RECORD_BYTES_MAX
    BatchedWriter[bytes](
        ledger, BatchSettings(max_records=LEDGER_ENTRY_RECORDS_MAX, max_bytes=largest)
    ).close()
