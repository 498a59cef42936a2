"""Ctrl-C in a caller: its record is written and answered, or it is not written; and the log goes on."""

from collections.abc import Iterator
from itertools import count
from threading import Thread

import pytest
from tests.log.support import GatedLedger, Shout, busy, interrupt_at, records_of
from tests.waiting import HANG_SECONDS

from floodmark.log import BatchedWriter, Position
from floodmark.log import writer as writer_module
from floodmark.model.errors import StorageFailed


@pytest.fixture
def ledger() -> GatedLedger:
    return GatedLedger()


@pytest.fixture
def writer(ledger: GatedLedger) -> Iterator[BatchedWriter[bytes]]:
    writer = BatchedWriter[bytes](ledger)
    yield writer
    ledger.gate.set()
    writer.close()


@pytest.mark.parametrize("is_busy", [True, False], ids=["busy", "idle"])
def test_a_caller_that_is_interrupted_at_any_call_can_tell_whether_its_record_is_written(
    writer: BatchedWriter[bytes], ledger: GatedLedger, is_busy: bool
) -> None:
    written: list[bytes] = []
    for number in count(1):
        record, promise = b"%d" % number, Shout()
        if is_busy:
            with busy(writer, ledger):
                was_interrupted = interrupt_at(
                    number,
                    "floodmark/log/",
                    lambda: writer.hand_over(record, promise),  # noqa: B023
                )
                is_cancelled = was_interrupted and promise.cancel()
        else:
            was_interrupted = interrupt_at(
                number,
                "floodmark/log/",
                lambda: writer.hand_over(record, promise),  # noqa: B023
            )
            is_cancelled = was_interrupted and promise.cancel()
        if not is_cancelled:
            assert promise.result(HANG_SECONDS).startswith("at ")
            written.append(record)
        assert writer.flush(HANG_SECONDS)
        assert records_of(ledger) == written
        assert writer.statistics().bytes_in_flight == 0
        if not was_interrupted:
            break
    assert number > 3


def test_a_record_is_written_and_its_promise_answered_though_its_caller_has_left(
    writer: BatchedWriter[bytes], ledger: GatedLedger
) -> None:
    promise = Shout()
    with busy(writer, ledger):
        writer.hand_over(b"x", promise)
    assert writer.flush(HANG_SECONDS)
    assert promise.result(0) == "at 2!"


@pytest.mark.parametrize("how", ["write", "add", "flush"])
def test_nothing_is_taken_if_the_thread_cannot_be_started(
    writer: BatchedWriter[bytes], ledger: GatedLedger, how: str
) -> None:
    class NoThread(Thread):
        def start(self) -> None:
            raise RuntimeError("can't start new thread")

    writer.acknowledgements.opened(ledger.append(b"old"), 1)
    writer.acknowledge([Position(1, 1, 0)])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(writer_module, "Thread", NoThread)
        with pytest.raises(StorageFailed, match=r"thread cannot be started.*nothing was written"):
            writer.flush(HANG_SECONDS) if how == "flush" else getattr(writer, how)(b"x")
    assert writer.write(b"y") == Position(2, 1, 0)
    assert records_of(ledger) == [b"y"]
