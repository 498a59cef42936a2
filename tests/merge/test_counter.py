"""Counters: each site adds to its own total, and a delete begins anew."""

from decimal import Decimal
from typing import Any

import pytest

from floodmark.codec.states import CounterEntry, CounterState, decode_state, encode_state
from floodmark.codec.values import decode_value
from floodmark.merge.counter import add_to_counter, merge_counters, stamp_counter
from floodmark.merge.states import delete_record
from floodmark.model.change import Stamp
from floodmark.model.errors import InvalidValue, LimitExceeded
from floodmark.model.limits import COUNTER_TOTAL_MAX


def counter(stored: bytes) -> CounterState:
    state = decode_state(stored)
    assert isinstance(state, CounterState)
    return state


@pytest.mark.parametrize("number", [0, 1, -1, COUNTER_TOTAL_MAX, -COUNTER_TOTAL_MAX])
def test_addition_waits_for_its_commit(number: int) -> None:
    assert counter(add_to_counter(number)) == CounterState(None, (CounterEntry(0, 0, number),))
    assert decode_value(add_to_counter(number)).value == b"%d" % number


@pytest.mark.parametrize("number", [1.0, "1", None, True, Decimal(1), b"1"])
def test_only_whole_numbers_are_added(number: Any) -> None:
    with pytest.raises(InvalidValue, match="whole number"):
        add_to_counter(number)


@pytest.mark.parametrize("number", [COUNTER_TOTAL_MAX + 1, -COUNTER_TOTAL_MAX - 1, 10**40])
def test_numbers_that_no_total_holds_are_refused(number: int) -> None:
    with pytest.raises(LimitExceeded, match="at most"):
        add_to_counter(number)


def test_commit_adds_to_the_total_of_its_own_site() -> None:
    current = CounterState(Stamp(3, 9), (CounterEntry(1, 7, 40), CounterEntry(2, 8, 100)))
    assert stamp_counter(counter(add_to_counter(2)), current, 9, 1) == CounterState(
        None, (CounterEntry(1, 9, 42),)
    )
    assert stamp_counter(counter(add_to_counter(2)), current, 9, 3) == CounterState(
        None, (CounterEntry(3, 9, 2),)
    )
    assert stamp_counter(counter(add_to_counter(2)), None, 9, 1) == CounterState(
        None, (CounterEntry(1, 9, 2),)
    )


def test_commit_of_a_delete_carries_nothing_but_its_stamp() -> None:
    current = CounterState(None, (CounterEntry(1, 7, 40),))
    delete = counter(delete_record("counter"))
    assert stamp_counter(delete, current, 9, 1) == CounterState(Stamp(9, 1), ())


@pytest.mark.parametrize("sign", [1, -1])
def test_total_stays_within_its_bytes(sign: int) -> None:
    current = CounterState(None, (CounterEntry(1, 7, sign * COUNTER_TOTAL_MAX),))
    with pytest.raises(LimitExceeded, match=r"total of site 1.*Delete"):
        stamp_counter(counter(add_to_counter(sign)), current, 8, 1)
    # What another site has counted does not matter.
    stamped = stamp_counter(counter(add_to_counter(sign)), current, 8, 2)
    merged = encode_state(merge_counters(current, stamped))
    assert decode_value(merged).value == b"%d" % (sign * (COUNTER_TOTAL_MAX + 1))


@pytest.mark.parametrize(
    ("entry", "deleted", "lives"),
    [
        (CounterEntry(1, 7, 5), Stamp(6, 9), True),
        (CounterEntry(1, 7, 5), Stamp(7, 1), False),
        (CounterEntry(2, 7, 5), Stamp(7, 1), True),
        (CounterEntry(1, 7, 5), Stamp(7, 2), False),
        (CounterEntry(9, 6, 5), Stamp(7, 1), False),
    ],
)
def test_entry_is_gone_at_or_below_the_delete(entry: CounterEntry, deleted: Stamp, lives: bool) -> None:
    record, delete = CounterState(None, (entry,)), CounterState(deleted, ())
    for merged in (merge_counters(record, delete), merge_counters(delete, record)):
        assert merged == CounterState(deleted, (entry,) if lives else ())


def test_younger_entry_of_a_site_replaces_the_older() -> None:
    old, new = CounterState(None, (CounterEntry(1, 7, 5),)), CounterState(None, (CounterEntry(1, 8, 3),))
    assert merge_counters(old, new) == merge_counters(new, old) == new
