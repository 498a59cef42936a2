"""Ctrl-C at the worst moments: what was taken is written, what is durable is told, and nobody hangs."""

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from threading import Condition, Event, Thread
from typing import Any

import pytest
from tests.contracts.ledger import entries_of
from tests.log.support import PATIENCE_SECONDS, GatedLedger, answers, busy, records_of

from floodmark.engine import MemoryEngine
from floodmark.log import FAMILY, BatchedWriter, EngineStore, Position, Promise, StoredLedger
from floodmark.log import writer as writer_module
from floodmark.log.segments import SegmentBook
from floodmark.log.statistics import FlushCounter
from floodmark.model.errors import OutcomeUnknown, StorageFailed


@pytest.fixture
def ledger() -> GatedLedger:
    return GatedLedger()


@pytest.fixture
def writer(ledger: GatedLedger) -> Iterator[BatchedWriter[bytes]]:
    writer = BatchedWriter[bytes](ledger)
    yield writer
    ledger.gate.set()
    writer.close()


@contextmanager
def interrupting(owner: type, name: str, times: int = 1) -> Iterator[None]:
    """Within the block, Ctrl-C comes when something is called, and again as often as it is said."""
    called, calls = getattr(owner, name), count(1)

    def interrupt(*arguments: Any, **named: Any) -> Any:
        if next(calls) <= times:
            raise KeyboardInterrupt
        return called(*arguments, **named)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(owner, name, interrupt)
        yield


class Shout(Promise[str]):
    """A future of one's own, which is interrupted when it is told, as often as it is said."""

    interruptions = 0

    def complete(self, position: Position) -> None:
        if self.interruptions:
            self.interruptions -= 1
            raise KeyboardInterrupt
        self.set_result(f"at {position.entry}!")


def test_a_record_that_was_taken_is_told_to_its_promise_though_nobody_waits_any_more(
    writer: BatchedWriter[bytes], ledger: GatedLedger
) -> None:
    promise = Shout()
    with busy(writer, ledger), interrupting(Promise, "result"), pytest.raises(KeyboardInterrupt):
        writer.write_for(b"x", promise)
    assert promise.is_taken
    assert promise.result(PATIENCE_SECONDS) == "at 2!"


def test_a_record_whose_place_nobody_got_to_know_is_let_go_of(
    writer: BatchedWriter[bytes], ledger: GatedLedger
) -> None:
    with busy(writer, ledger), interrupting(Promise, "result"), pytest.raises(KeyboardInterrupt):
        writer.write(b"x")
    writer.drain()
    assert writer.acknowledgements.count_live() == (1, 1)
    assert records_of(ledger) == []


def test_one_that_was_interrupted_before_it_was_taken_is_not_there(
    writer: BatchedWriter[bytes], ledger: GatedLedger
) -> None:
    promise = Shout()
    with busy(writer, ledger), interrupting(BatchedWriter, "_require_room"), pytest.raises(KeyboardInterrupt):
        writer.write_for(b"x", promise)
    assert not promise.is_taken
    writer.drain()
    assert records_of(ledger) == []


@pytest.mark.parametrize("how", ["write", "add"])
def test_nothing_is_taken_if_nobody_could_write_it(
    writer: BatchedWriter[bytes], ledger: GatedLedger, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    class NoThread(Thread):
        def start(self) -> None:
            raise RuntimeError("can't start new thread")

    ledger.gate.clear()
    leading = Thread(target=writer.write, args=(b"plug",))
    leading.start()
    ledger.wait_append()
    monkeypatch.setattr(writer_module, "Thread", NoThread)
    with pytest.raises(StorageFailed, match=r"no thread can be started.*nothing was written"):
        (writer.write if how == "write" else writer.add)(b"x")
    # What was done with waits for somebody who comes by.
    writer.acknowledge([])
    ledger.gate.set()
    leading.join(PATIENCE_SECONDS)
    assert writer.write(b"y") == Position(2, 1, 0)
    assert records_of(ledger) == [b"y"]


@pytest.mark.parametrize("alone", [True, False])
def test_a_batch_that_is_durable_is_told_so_whatever_interrupts_the_one_who_leads(
    writer: BatchedWriter[bytes], ledger: GatedLedger, alone: bool
) -> None:
    promises = [Shout() for _ in range(1 if alone else 3)]
    with interrupting(FlushCounter, "flushed", times=9):
        if alone:
            with pytest.raises(KeyboardInterrupt):
                writer.write_for(b"x", promises[0])
        else:
            with busy(writer, ledger):
                for promise in promises:
                    writer.hand_over(b"x", promise)
            answers([writer.add(b"last")])
    assert len({promise.result(PATIENCE_SECONDS) for promise in promises}) == 1
    assert records_of(ledger).count(b"x") == len(promises)
    assert writer.acknowledgements.count_live()[1] >= len(promises)


def test_a_promise_that_was_interrupted_is_told_again_and_the_others_are_told(
    writer: BatchedWriter[bytes], ledger: GatedLedger
) -> None:
    once, ever, last = Shout(), Shout(), Shout()
    once.interruptions, ever.interruptions = 1, 9
    with busy(writer, ledger):
        for promise in (once, ever, last):
            writer.hand_over(b"x", promise)
    assert (once.result(PATIENCE_SECONDS), last.result(PATIENCE_SECONDS)) == ("at 2!", "at 2!")
    assert isinstance(ever.exception(PATIENCE_SECONDS), OutcomeUnknown)
    assert writer.write(b"y").entry == 3


@pytest.mark.parametrize("where", ["add", "remove"])
def test_an_entry_of_which_nobody_heard_is_taken_back_by_the_next_one(where: str) -> None:
    engine = MemoryEngine((FAMILY,))
    ledger = StoredLedger(EngineStore(engine), "log")
    first = ledger.append(b"first")
    with interrupting(SegmentBook, where), pytest.raises(KeyboardInterrupt):
        ledger.append(b"interrupted", {first: None})
    ledger.append(b"next", {first: None})
    for each in (ledger, StoredLedger(EngineStore(engine), "log")):
        assert [entry for _, entry in entries_of(each)] == [b"next"]
        assert [(segment.entries, segment.bytes) for segment in each.segments()] == [(1, 4)]


def test_what_one_leaves_who_was_to_lead_is_written_by_another(
    writer: BatchedWriter[bytes], ledger: GatedLedger, monkeypatch: pytest.MonkeyPatch
) -> None:
    promise = Shout()
    ledger.gate.clear()
    leading = Thread(target=writer.write, args=(b"plug",))
    leading.start()
    ledger.wait_append()

    def wait_alone(_: int) -> None:
        """When the record is taken, nobody leads any more."""
        writer._lock.release()
        ledger.gate.set()
        leading.join(PATIENCE_SECONDS)
        writer._lock.acquire()

    monkeypatch.setattr(writer, "_require_room", wait_alone)
    with interrupting(Shout, "result"), pytest.raises(KeyboardInterrupt):
        writer.write_for(b"x", promise)
    assert promise.result(PATIENCE_SECONDS) == "at 2!"


@pytest.mark.parametrize("how", ["hand_over", "write_for"])
def test_a_record_that_was_taken_when_ctrl_c_came_is_written_by_the_thread(
    writer: BatchedWriter[bytes], how: str
) -> None:
    answers([writer.add(b"first")])
    wait_asleep(writer)
    promise = Shout()
    put = writer._put

    def put_and_interrupt(record: bytes, taken: Promise[Any]) -> None:
        put(record, taken)
        raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(writer, "_put", put_and_interrupt)
        # As if somebody had led when it came, and had left since.
        patch.setattr(writer, "_write_alone", lambda *_: False)
        with pytest.raises(KeyboardInterrupt):
            getattr(writer, how)(b"x", promise)
    assert promise.is_taken
    assert promise.result(PATIENCE_SECONDS) == "at 2!"


def wait_asleep(writer: BatchedWriter[bytes]) -> None:
    """Return when the thread sleeps, so that nothing is written unless somebody calls it."""
    pause = Event()
    for _ in range(int(PATIENCE_SECONDS * 1_000)):
        with writer._lock:
            if writer._called._waiters:  # type: ignore[attr-defined]
                return
        pause.wait(0.001)
    raise AssertionError("the thread does not sleep")


def test_ctrl_c_while_one_looks_whether_it_is_done_keeps_nobody_from_telling_it(
    writer: BatchedWriter[bytes], ledger: GatedLedger
) -> None:
    promise = Shout()
    with busy(writer, ledger):
        writer.hand_over(b"x", promise)
        with interrupting(Condition, "__exit__"):
            assert not promise.done()
    assert promise.result(PATIENCE_SECONDS) == "at 2!"
