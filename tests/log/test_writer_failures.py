"""What fails, fails alone; what was taken in gets an answer; and nobody waits for ever."""

from collections.abc import Callable, Iterator
from concurrent.futures import Future
from threading import Event, Thread

import pytest
from tests.log.support import GatedLedger, Shout, answers, batches_of, busy, records_of, run_threads
from tests.waiting import HANG_SECONDS, wait_until

from floodmark.log import BatchedWriter, BatchSettings, Position, Promise
from floodmark.log import writer as writer_module
from floodmark.model.errors import Closed, InvalidArgument, InvalidValue, OutcomeUnknown, StorageFailed
from floodmark.model.limits import LEDGER_RECORD_BYTES_MAX
from floodmark.testing import SimulatedCrash
from floodmark.testing.ledgers import MemoryLedger


@pytest.fixture
def ledger() -> GatedLedger:
    return GatedLedger()


@pytest.fixture
def writer(ledger: GatedLedger) -> Iterator[BatchedWriter[bytes]]:
    writer = BatchedWriter[bytes](
        ledger, BatchSettings(max_records=4, max_bytes=100, max_bytes_in_flight=200)
    )
    yield writer
    ledger.gate.set()
    writer.close()


def failure_of(future: Future[Position]) -> BaseException | None:
    return future.exception(HANG_SECONDS)


# Records that cannot be encoded


def encode(record: object) -> bytes:
    if record == "poison":
        raise ZeroDivisionError("poison")
    return str(record).encode()


def test_a_record_that_cannot_be_encoded_fails_alone(ledger: GatedLedger) -> None:
    writer = BatchedWriter[object](ledger, encode=encode)
    ledger.gate.clear()
    plug = writer.add("plug")
    ledger.wait_append()
    futures = [writer.add(record) for record in (1, "poison", 2)]
    ledger.gate.set()
    assert isinstance(failure_of(futures[1]), ZeroDivisionError)
    assert answers([plug, futures[0], futures[2]])[1:] == [Position(2, 2, 0), Position(2, 2, 1)]
    with pytest.raises(ZeroDivisionError):
        writer.write("poison")
    assert writer.write(3).batch_size == 1
    writer.close()
    assert records_of(ledger) == [b"1", b"2", b"3"]


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ("text", "not as str"),
        (bytearray(b"x"), "bytearray"),
        (bytes(LEDGER_RECORD_BYTES_MAX + 1), "larger than"),
    ],
)
def test_what_is_not_bytes_or_too_large_is_refused_alone(
    writer: BatchedWriter[object], record: object, message: str
) -> None:
    with pytest.raises(InvalidValue, match=message):
        writer.write(record)
    assert isinstance(failure_of(writer.add(record)), InvalidValue)
    assert writer.write(b"fine").batch_size == 1


def test_the_largest_record_is_written() -> None:
    writer = BatchedWriter[bytes](MemoryLedger())
    assert writer.write(bytes(LEDGER_RECORD_BYTES_MAX)) == Position(1, 1, 0)
    writer.close()


def test_a_batch_that_cannot_be_serialised_is_failed_and_cleared(
    writer: BatchedWriter[bytes], ledger: GatedLedger, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_: object) -> bytes:
        raise MemoryError

    with busy(writer, ledger), monkeypatch.context() as patch:
        futures = [writer.add(b"a"), writer.add(b"b")]
        patch.setattr(writer_module, "encode_batch", refuse)
        ledger.gate.set()
        assert [type(failure_of(future)) for future in futures] == [OutcomeUnknown, OutcomeUnknown]
    assert writer.write(b"c").batch_size == 1
    writer.close()
    assert records_of(ledger) == [b"c"]


# Appends that fail


@pytest.mark.parametrize(
    ("failure", "told"),
    [
        (StorageFailed("no"), StorageFailed),
        (OutcomeUnknown("perhaps"), OutcomeUnknown),
        (KeyError("a bug"), OutcomeUnknown),
        (SimulatedCrash("the end"), SimulatedCrash),
    ],
)
def test_a_failed_append_fails_its_batch_and_nothing_else(
    writer: BatchedWriter[bytes],
    ledger: GatedLedger,
    failure: BaseException,
    told: type[BaseException],
) -> None:
    with busy(writer, ledger) as plug:
        futures = [writer.add(b"%d" % number) for number in range(10)]
        ledger.failures = [None, failure]
    failures = [failure_of(future) for future in futures]
    assert [type(error) for error in failures[:4]] == [told] * 4
    if isinstance(failure, Exception):
        assert len(set(map(id, failures[:4]))) == 4, "each has an error of its own"
    assert failures[4:] == [None] * 6
    assert failure_of(plug) is None
    writer.close()
    assert records_of(ledger) == [b"%d" % number for number in range(4, 10)]
    assert writer.statistics().failed_appends == 1
    assert writer.statistics().bytes_in_flight == 0


def test_a_failed_append_of_a_lone_record_is_raised_and_the_next_goes_through(
    writer: BatchedWriter[bytes], ledger: GatedLedger
) -> None:
    for failure in (StorageFailed("no"), OutcomeUnknown("perhaps"), SimulatedCrash("the end")):
        ledger.failures = [failure]
        with pytest.raises(type(failure)):
            writer.write(b"lost")
        assert writer.write(b"kept").batch_size == 1
    assert records_of(ledger) == [b"kept"] * 3


def test_a_callback_that_fails_or_ends_the_process_keeps_nobody_from_an_answer(
    writer: BatchedWriter[bytes], ledger: GatedLedger
) -> None:
    def end(_: object) -> None:
        raise SimulatedCrash("in a callback")

    def fail(_: object) -> None:
        raise ZeroDivisionError

    with busy(writer, ledger):
        futures = [writer.add(b"%d" % number) for number in range(6)]
        futures[0].add_done_callback(end)
        futures[1].add_done_callback(fail)
        futures[4].add_done_callback(end)
    assert [position.batch_index for position in answers(futures)] == [0, 1, 2, 3, 0, 1]
    assert answers([writer.add(b"next")])[0].batch_size == 1


def test_a_record_can_be_cancelled_until_it_is_being_written(
    writer: BatchedWriter[bytes], ledger: GatedLedger
) -> None:
    with busy(writer, ledger) as plug:
        cancelled, kept = writer.add(b"cancelled"), writer.add(b"kept")
        assert not plug.cancel()
        assert cancelled.cancel()
        with pytest.raises(TimeoutError):
            kept.result(0.001)
    assert kept.result() == Position(2, 1, 0)
    assert records_of(ledger) == [b"kept"]


def test_a_batch_of_which_all_records_are_cancelled_is_not_written(
    writer: BatchedWriter[bytes], ledger: GatedLedger
) -> None:
    with busy(writer, ledger):
        futures = [writer.add(b"%d" % number) for number in range(3)]
        assert [future.cancel() for future in futures] == [True] * 3
    assert writer.flush(HANG_SECONDS)
    assert records_of(ledger) == []
    assert writer.statistics().bytes_in_flight == 0


def test_a_promise_is_told_in_its_turn_and_left_alone_if_its_record_was_not_taken(
    writer: BatchedWriter[object], ledger: GatedLedger
) -> None:
    kept, failed, wrong, late = Shout(), Shout(), Shout(), Shout()
    writer.hand_over(b"kept", kept)
    assert kept.result() == "at 1!"
    ledger.failures = [StorageFailed("no")]
    writer.hand_over(b"failed", failed)
    assert isinstance(failed.exception(), StorageFailed)
    writer.hand_over("text", wrong)
    assert isinstance(wrong.exception(0), InvalidValue)
    writer.close()
    with pytest.raises(Closed):
        writer.hand_over(b"late", late)
    assert not late.done()


class Broken(Promise[str]):
    """A future that cannot be filled in."""

    def complete(self, position: Position) -> None:
        raise ZeroDivisionError


def test_a_promise_that_cannot_be_kept_is_the_trouble_of_its_owner_alone(
    writer: BatchedWriter[bytes], ledger: GatedLedger
) -> None:
    broken, kept = Broken(), Shout()
    with busy(writer, ledger):
        writer.hand_over(b"a", broken)
        writer.hand_over(b"b", kept)
    assert kept.result(HANG_SECONDS) == "at 2!"
    assert isinstance(broken.exception(HANG_SECONDS), ZeroDivisionError)
    assert writer.write(b"c").entry == 3
    assert records_of(ledger) == [b"a", b"b", b"c"]


# Callbacks that use the log


def test_a_callback_may_add_and_acknowledge_but_not_wait(
    writer: BatchedWriter[bytes], ledger: GatedLedger
) -> None:
    added: list[Future[Position]] = []
    refused: list[BaseException] = []

    def go_on(future: Future[Position]) -> None:
        writer.acknowledge([future.result()])
        added.append(writer.add(b"next"))
        waits: list[Callable[[], object]] = [
            lambda: writer.write(b"never"),
            lambda: writer.flush(HANG_SECONDS),
        ]
        for wait in waits:
            try:
                wait()
            except InvalidArgument as error:
                refused.append(error)

    with busy(writer, ledger):
        first = writer.add(b"first")
        first.add_done_callback(go_on)
    answers([first])
    writer.close()
    assert len(refused) == 2
    assert answers(added) == [Position(3, 1, 0)]
    assert records_of(ledger) == [b"next"]


def test_callbacks_may_drive_more_than_the_room_there_is(ledger: GatedLedger) -> None:
    """If a callback had to wait for room, the log would wait for itself."""
    writer = BatchedWriter[bytes](
        ledger, BatchSettings(max_bytes=100, max_bytes_in_flight=100), wait_seconds_max=0.001
    )
    done = Event()
    steps = 50

    def step(left: int) -> Callable[[object], None]:
        def go_on(_: object) -> None:
            if left:
                writer.add(bytes(99)).add_done_callback(step(left - 1))
                writer.add(bytes(98))
            else:
                done.set()

        return go_on

    writer.add(bytes(97)).add_done_callback(step(steps))
    assert done.wait(HANG_SECONDS)
    writer.close()
    assert len(records_of(ledger)) == 2 * steps + 1


# Back-pressure


def test_add_waits_while_too_many_bytes_are_in_flight(
    writer: BatchedWriter[bytes], ledger: GatedLedger
) -> None:
    order: list[str] = []
    with busy(writer, ledger):
        futures = [writer.add(bytes(98)), writer.add(bytes(98))]
        assert writer.statistics().bytes_in_flight == 200

        def late() -> None:
            futures.append(writer.add(b"x"))
            order.append("taken")

        thread = Thread(target=late)
        thread.start()
        wait_until(lambda: bool(writer._line), "the writer takes it at once")
        order.append("released")
    thread.join(HANG_SECONDS)
    answers(futures)
    assert order == ["released", "taken"]


def test_add_gives_up_after_a_while_and_takes_nothing(ledger: GatedLedger) -> None:
    writer = BatchedWriter[bytes](
        ledger, BatchSettings(max_bytes=100, max_bytes_in_flight=100), wait_seconds_max=0.01
    )
    with busy(writer, ledger):
        writer.add(bytes(96))
        for _ in range(2):
            with pytest.raises(StorageFailed, match=r"100 bytes wait to be written.*nothing was written"):
                writer.add(b"x")
        with pytest.raises(StorageFailed):
            writer.write(b"x")
    writer.close()
    assert records_of(ledger) == [bytes(96)]


def test_a_record_larger_than_the_room_is_taken_when_nothing_is_in_flight(ledger: GatedLedger) -> None:
    writer = BatchedWriter[bytes](ledger, BatchSettings(max_bytes=100, max_bytes_in_flight=100))
    assert answers([writer.add(bytes(1_000))]) == [Position(1, 1, 0)]
    assert writer.write(bytes(1_000)) == Position(2, 1, 0)
    writer.close()


def test_memory_stays_within_the_room_under_a_flood(ledger: GatedLedger) -> None:
    writer = BatchedWriter[bytes](
        ledger, BatchSettings(max_records=5, max_bytes=1_000, max_bytes_in_flight=1_000)
    )
    seen: list[int] = []

    def flood(number: int) -> None:
        for _ in range(30):
            writer.add(bytes(100 + number))
            seen.append(writer.statistics().bytes_in_flight)

    run_threads(flood, 16)
    writer.close()
    assert max(seen) <= 1_000
    assert len(records_of(ledger)) == 16 * 30


# Closing


def test_close_writes_what_was_handed_over_and_then_refuses(
    writer: BatchedWriter[bytes], ledger: GatedLedger
) -> None:
    with busy(writer, ledger):
        futures = [writer.add(b"%d" % number) for number in range(10)]
    writer.close()
    assert all(future.done() for future in futures)
    assert records_of(ledger) == [b"%d" % number for number in range(10)]
    uses: list[Callable[[], object]] = [
        lambda: writer.add(b"x"),
        lambda: writer.write(b"x"),
        lambda: writer.acknowledge(answers(futures)),
    ]
    for use in uses:
        with pytest.raises(Closed, match="open it again"):
            use()
    writer.close()


def test_close_of_a_writer_that_was_never_used_is_harmless() -> None:
    writer = BatchedWriter[bytes](MemoryLedger())
    writer.close()
    writer.close()


def test_close_fails_what_cannot_be_written(writer: BatchedWriter[bytes], ledger: GatedLedger) -> None:
    with busy(writer, ledger):
        futures = [writer.add(b"%d" % number) for number in range(8)]
        ledger.failures = [None, StorageFailed("no"), OutcomeUnknown("perhaps")]
    writer.close()
    assert [type(failure_of(future)) for future in futures] == [StorageFailed] * 4 + [OutcomeUnknown] * 4


def test_close_refuses_those_who_wait_for_room(ledger: GatedLedger) -> None:
    writer = BatchedWriter[bytes](ledger, BatchSettings(max_bytes=100, max_bytes_in_flight=100))
    refused: list[BaseException] = []

    def late() -> None:
        try:
            writer.add(b"late")
        except Closed as error:
            refused.append(error)

    with busy(writer, ledger):
        writer.add(bytes(96))
        waiting = Thread(target=late)
        waiting.start()
        wait_until(lambda: bool(writer._line), "the writer takes it at once")
        closing = Thread(target=writer.close)
        closing.start()
        waiting.join(HANG_SECONDS)
    closing.join(HANG_SECONDS)
    assert len(refused) == 1
    assert records_of(ledger) == [bytes(96)]


def test_close_in_a_callback_returns_and_the_rest_is_written(
    writer: BatchedWriter[bytes], ledger: GatedLedger
) -> None:
    with busy(writer, ledger) as plug:
        plug.add_done_callback(lambda _: writer.close())
        futures = [writer.add(b"%d" % number) for number in range(10)]
    answers(futures)
    writer.close()
    assert len(batches_of(ledger)) == 3


@pytest.mark.parametrize("how", ["write", "add"])
def test_close_during_traffic_answers_everybody(how: str) -> None:
    ledger = MemoryLedger()
    writer = BatchedWriter[bytes](ledger, BatchSettings(max_records=3))
    started, written = Event(), [0] * 16

    def work(number: int) -> None:
        for index in range(10_000):
            try:
                if how == "write":
                    writer.write(b"x")
                else:
                    assert writer.add(b"x").exception(HANG_SECONDS) is None
            except Closed:
                return
            written[number] += 1
            if index == 20:
                started.set()

    def close(_: int) -> None:
        assert started.wait(HANG_SECONDS)
        writer.close()

    run_threads(lambda number: close(number) if number >= 16 else work(number), 18)
    assert len(records_of(ledger)) == sum(written)
