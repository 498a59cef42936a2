"""Any traffic over a ledger that fails at random: everybody gets an answer, and the answer is true."""

from collections.abc import Callable
from concurrent.futures import Future
from random import Random
from threading import Lock

import pytest
from tests.contracts.ledger import entries_of
from tests.log.support import run_threads
from tests.sizes import only
from tests.waiting import HANG_SECONDS

from floodmark.codec.entries import decode_entry
from floodmark.log import BatchedWriter, BatchSettings, EntryId, Marks, Position
from floodmark.log.base import NO_MARKS
from floodmark.model.errors import Closed, FloodmarkError, OutcomeUnknown, StorageFailed
from floodmark.testing import SimulatedCrash
from floodmark.testing.ledgers import MemoryLedger

THREADS = 8
FAILURES: tuple[Callable[[str], BaseException], ...] = (
    StorageFailed,
    OutcomeUnknown,
    KeyError,
    MemoryError,
    SimulatedCrash,
)


class UnreliableLedger(MemoryLedger):
    """Fails at random, before or after it has done what it was asked to do."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self._random = Random(seed)
        self._choosing = Lock()

    def append(self, entry: bytes, marks: Marks = NO_MARKS) -> EntryId:
        self._fail()
        number = super().append(entry, marks)
        self._fail(after=True)
        return number

    def mark(self, marks: Marks) -> None:
        self._fail()
        super().mark(marks)

    def _fail(self, *, after: bool = False) -> None:
        with self._choosing:
            if self._random.random() < 0.15:
                failure = OutcomeUnknown if after else self._random.choice(FAILURES)
                raise failure("planned")


class Caller:
    """A thread that does one thing after the other, as its seed says."""

    def __init__(self, writer: BatchedWriter[bytes], number: int, seed: int) -> None:
        self.writer = writer
        self.number = number
        self.random = Random(1_000 * seed + number)
        self.steps = iter(range(60))
        self.futures: dict[bytes, Future[Position]] = {}
        self.written: dict[bytes, Position] = {}
        self.failed: dict[bytes, BaseException] = {}
        self.acknowledged: set[Position] = set()

    def run(self) -> None:
        for index in self.steps:
            record = b"%d-%d-" % (self.number, index) + bytes(self.random.choice((0, 5, 50, 200)))
            try:
                self._do(record)
            except Closed:
                break
        for record, future in self.futures.items():
            error = future.exception(HANG_SECONDS)
            if error is None:
                self.written[record] = future.result()
            else:
                self.failed[record] = error

    def _do(self, record: bytes) -> None:
        match self.random.randrange(20):
            case 0:
                self.writer.enabled = not self.writer.enabled
            case 1:
                done = [future for future in self.futures.values() if future.done()]
                known = [future.result() for future in done if future.exception() is None]
                self.acknowledged.update(known)
                self.writer.acknowledge(known)
            case 2 if self.number == 0 and self.random.random() < 0.5:
                self.writer.close()
            case 3 | 4 | 5 | 6:
                try:
                    self.written[record] = self.writer.write(record)
                except Closed:
                    raise
                except (FloodmarkError, LookupError, MemoryError, SimulatedCrash) as error:
                    self.failed[record] = error
            case 7:
                self.writer.add(b"%d" % self.number).exception()
            case _:
                self.futures[record] = self.writer.add(record)


@pytest.mark.parametrize("seed", only(range(5), range(25)))
def test_nobody_is_left_hanging_and_every_answer_is_true(seed: int) -> None:
    ledger = UnreliableLedger(seed)
    writer = BatchedWriter[bytes](
        ledger, BatchSettings(max_records=5, max_bytes=150, max_bytes_in_flight=400)
    )
    callers = [Caller(writer, number, seed) for number in range(THREADS)]
    run_threads(lambda number: survive(callers[number].run), THREADS)
    survive(writer.close)
    entries = {entry: decode_entry(content) for entry, content in entries_of(ledger)}
    stored = [record for records in entries.values() for record in records]
    for caller in callers:
        assert all(future.done() for future in caller.futures.values())
        for record, (entry, size, index) in caller.written.items():
            if entry in entries:
                assert len(entries[entry]) == size
                assert entries[entry][index] == record
            else:
                gone = {position for other in callers for position in other.acknowledged}
                assert Position(entry, size, index) in gone
        for record, error in caller.failed.items():
            if isinstance(error, StorageFailed):
                assert record not in stored
        positions = [caller.written[record] for record in caller.futures if record in caller.written]
        assert positions == sorted(positions)
    assert writer.statistics().bytes_in_flight == 0


def survive(run: Callable[[], None]) -> None:
    """Go on where a process would have ended and the next one begun."""
    while True:
        try:
            run()
            return
        except SimulatedCrash:
            continue
