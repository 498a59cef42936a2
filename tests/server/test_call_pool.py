"""Calls of several nodes at once (`routing/calls.py`)."""

from threading import Event, get_ident

from tests.waiting import HANG_SECONDS

from floodmark.model.errors import InvalidArgument
from floodmark.routing import CallPool


def test_calls_run_at_once_and_answer_in_order() -> None:
    pool, first, second = CallPool(1), Event(), Event()

    def one() -> bool:
        first.set()
        return second.wait(HANG_SECONDS)

    def two() -> bool:
        second.set()
        return first.wait(HANG_SECONDS)

    assert pool.each([one, two]) == [True, True]
    pool.close()


def test_no_call_waits_for_a_free_thread() -> None:
    """One that is made may wait for the effect of one that is not."""
    pool, done = CallPool(1), Event()

    def finish() -> int:
        done.set()
        return get_ident()

    assert pool.each([get_ident, lambda: done.wait(HANG_SECONDS), finish]) == [get_ident(), True, get_ident()]
    pool.close()


def test_the_error_of_one_call_leaves_the_others_alone() -> None:
    error = InvalidArgument("no")

    def fail() -> int:
        raise error

    assert CallPool(0).each([fail, lambda: 1]) == [error, 1]
    assert CallPool(2).each([lambda: 1, fail, lambda: 2]) == [1, error, 2]


def test_a_closed_pool_leaves_calls_to_the_caller() -> None:
    pool = CallPool(2)
    pool.close()
    assert pool.each([get_ident, get_ident]) == [get_ident(), get_ident()]
    assert pool.each([]) == []
