"""Batches are repeated where no good answer came, and never overtake one with the same key."""

from collections.abc import Callable, Mapping
from concurrent.futures import Future

import pytest

from floodmark.model.errors import (
    FloodmarkError,
    InvalidValue,
    OutcomeUnknown,
    PartitionStopped,
    StorageFull,
    Unreachable,
)
from floodmark.spark.source.writing import BATCHES_IN_FLIGHT_MAX, BatchSender

Rows = Mapping[bytes, bytes]


class ScriptedStream:
    """A write stream whose answers a test gives, one by one, when it wants to."""

    def __init__(self) -> None:
        self.sent: list[Rows] = []
        self.open: list[Future[int]] = []
        self.refusing: list[FloodmarkError] = []
        self.answer: Callable[[Rows, Future[int]], None] | None = None

    def send(self, rows: Rows) -> "Future[int]":
        if self.refusing:
            raise self.refusing.pop(0)
        future: Future[int] = Future()
        self.sent.append(rows)
        self.open.append(future)
        if self.answer is not None:
            self.answer(rows, future)
        return future

    def close(self) -> None:
        pass


def accept(rows: Rows, future: "Future[int]") -> None:
    future.set_result(len(rows))


def test_batches_without_a_common_key_are_on_their_way_together() -> None:
    stream = ScriptedStream()
    delivery = BatchSender(stream, in_order=True)
    for number in range(BATCHES_IN_FLIGHT_MAX - 1):
        delivery.send({b"%d" % number: b"x"})
    assert len(stream.sent) == BATCHES_IN_FLIGHT_MAX - 1
    assert delivery.sent == 0
    for future in stream.open:
        future.set_result(1)
    delivery.finish()
    assert (delivery.sent, delivery.stored) == (3, 3)


def test_a_batch_waits_until_one_with_the_same_key_is_stored() -> None:
    stream = ScriptedStream()
    outcomes: list[FloodmarkError | None] = [OutcomeUnknown("lost"), None, None]

    def answer(rows: Rows, future: "Future[int]") -> None:
        outcome = outcomes.pop(0)
        if outcome is None:
            accept(rows, future)
        else:
            future.set_exception(outcome)

    stream.answer = answer
    delivery = BatchSender(stream, in_order=True, wait=lambda _: None)
    later, earlier = {b"a": b"last", b"b": b""}, {b"a": b"first", b"c": b""}
    delivery.send(later)
    delivery.send(earlier)
    delivery.finish()
    assert stream.sent == [later, later, earlier]


def test_batches_that_stamps_decide_about_need_not_wait_for_each_other() -> None:
    stream = ScriptedStream()
    delivery = BatchSender(stream, in_order=False)
    delivery.send({b"a": b"1"})
    delivery.send({b"a": b"2"})
    assert len(stream.sent) == 2


@pytest.mark.parametrize("error", [OutcomeUnknown("lost"), PartitionStopped("full"), Unreachable("gone")])
def test_what_may_succeed_later_is_sent_again_after_a_pause(error: FloodmarkError) -> None:
    stream = ScriptedStream()
    stream.refusing = [error, error]
    stream.answer = accept
    pauses: list[float] = []
    delivery = BatchSender(stream, in_order=True, pauses=(1.0, 2.0, 3.0), wait=pauses.append)
    delivery.send({b"a": b"1"})
    delivery.finish()
    assert pauses == [1.0, 2.0]
    assert delivery.sent == 1


def test_after_too_many_attempts_the_error_says_how_many_there_were() -> None:
    stream = ScriptedStream()
    stream.answer = lambda _, future: future.set_exception(Unreachable("no answer from oslo", server="oslo"))
    delivery = BatchSender(stream, in_order=True, pauses=(1.0, 2.0), wait=lambda _: None)
    delivery.send({b"a": b"1"})
    with pytest.raises(Unreachable, match=r"sent 3 times over 3 s: no answer from oslo\. ") as caught:
        delivery.finish()
    assert caught.value.details == {"server": "oslo"}
    assert len(stream.sent) == 3


@pytest.mark.parametrize("error", [InvalidValue("too large"), StorageFull("no room")])
def test_what_will_fail_again_is_not_repeated(error: FloodmarkError) -> None:
    stream = ScriptedStream()
    stream.answer = lambda _, future: future.set_exception(error)
    delivery = BatchSender(stream, in_order=True)
    delivery.send({b"a": b"1"})
    with pytest.raises(type(error)):
        delivery.finish()
    assert len(stream.sent) == 1
