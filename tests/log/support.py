"""Ledgers that wait or fail when they are told to, and what tests of the writer ask again and again."""

import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from itertools import count
from threading import Event, Semaphore, Thread
from types import FrameType

from tests.contracts.ledger import entries_of
from tests.waiting import HANG_SECONDS

from floodmark.codec.entries import decode_entry
from floodmark.log import BatchedWriter, EntryId, Ledger, Marks, Position, Promise
from floodmark.log.base import NO_MARKS
from floodmark.testing.ledgers import MemoryLedger

# Only a failure waits as long as this.


class GatedLedger(MemoryLedger):
    """A ledger whose appends wait at a gate while it is shut, and fail if a failure is due."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = Event()
        self.gate.set()
        self.failures: list[BaseException | None] = []
        self.appends = 0
        # Called in each append, once it is let through.
        self.on_append: Callable[[], object] = lambda: None
        self._entered = Semaphore(0)

    def append(self, entry: bytes, marks: Marks = NO_MARKS) -> EntryId:
        self.appends += 1
        self._entered.release()
        assert self.gate.wait(HANG_SECONDS)
        self.on_append()
        failure = self.failures.pop(0) if self.failures else None
        if failure is not None:
            raise failure
        return super().append(entry, marks)

    def wait_append(self) -> None:
        """Return when one more append has come to the gate."""
        assert self._entered.acquire(timeout=HANG_SECONDS)


class SimulatedSeconds:
    """A clock in seconds that a test moves."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@contextmanager
def busy(writer: BatchedWriter[bytes], ledger: GatedLedger) -> Iterator[Future[Position]]:
    """Within the block an append is in flight; what is added meanwhile gathers behind it."""
    ledger.gate.clear()
    plug = writer.add(b"plug")
    ledger.wait_append()
    try:
        yield plug
    finally:
        ledger.gate.set()


def batches_of(ledger: Ledger) -> list[list[bytes]]:
    """The records of a ledger, entry by entry, without the plug."""
    batches = [decode_entry(entry) for _, entry in entries_of(ledger)]
    return [batch for batch in batches if batch != [b"plug"]]


def records_of(ledger: Ledger) -> list[bytes]:
    return [record for batch in batches_of(ledger) for record in batch]


def answers(futures: Sequence[Future[Position]]) -> list[Position]:
    return [future.result(HANG_SECONDS) for future in futures]


def run_threads(work: Callable[[int], object], count: int) -> None:
    """Run `work` with the number of each thread and raise what one of them raised."""
    errors: list[BaseException] = []

    def run(number: int) -> None:
        try:
            work(number)
        except BaseException as error:
            errors.append(error)

    threads = [Thread(target=run, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(HANG_SECONDS)
        assert not thread.is_alive(), "a thread is stuck"
    if errors:
        raise errors[0]


def interrupt_at(number: int, where: str, step: Callable[[], object]) -> bool:
    """Run something in which Ctrl-C comes at a call of a function of some files, the so-and-so-many-th.

    False if there are not so many.  A generator is also called when it is thrown away, and then nobody hears
    of it; so these are left out.
    """
    calls, before = count(1), sys.gettrace()

    def trace(frame: FrameType, event: str, _: object) -> None:
        code = frame.f_code
        is_call = event == "call" and code.co_name != "<genexpr>"
        if is_call and where in code.co_filename and next(calls) == number:
            raise KeyboardInterrupt

    try:
        sys.settrace(trace)
        step()
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(before)
    return next(calls) > number


class Shout(Promise[str]):
    """A promise that says where its record is."""

    def complete(self, position: Position) -> None:
        self.set_result(f"at {position.entry}!")
