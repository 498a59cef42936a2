"""Stored records merged: a join, whose origin says which of the stamps inside is the newest."""

from functools import reduce

import pytest
from hypothesis import given
from hypothesis import strategies as st

from floodmark.codec.states import (
    CounterEntry,
    CounterState,
    Field,
    FieldsState,
    State,
    decode_state,
    encode_state,
    is_unstamped,
    live_value,
)
from floodmark.codec.values import PLAIN, TOMBSTONE, decode_value
from floodmark.merge.counter import add_to_counter
from floodmark.merge.fields import put_fields, update_fields
from floodmark.merge.policies import POLICIES
from floodmark.merge.states import (
    Kind,
    delete_record,
    merge_states,
    newest_stamp,
    stamp_state,
    stamps_of,
    write_state,
)
from floodmark.model.change import Stamp
from floodmark.model.errors import Corruption, InvalidValue, WrongPolicy

STAMPS = st.builds(Stamp, st.integers(1, 4), st.integers(1, 3))
NAMES = ("a", "b", "c")


def write_fields(stamp: Stamp) -> bytes:
    """What was written with a stamp: one stamp names one write, so the write follows from it."""
    number = stamp.version * 3 + stamp.site
    fields = dict.fromkeys(NAMES[: number % 3 + 1], None if number % 5 == 0 else number)
    unstamped = (
        put_fields(fields, expires_at=number if number % 2 else None),
        update_fields(fields, expires_at=number),
        update_fields(fields),
        delete_record("fields"),
    )
    return stamp_state(unstamped[number % 4], None, stamp.version, stamp.site)


def write_counter(stamp: Stamp) -> bytes:
    if (stamp.version + stamp.site) % 4 == 0:
        return stamp_state(delete_record("counter"), None, stamp.version, stamp.site)
    entry = CounterEntry(stamp.site, stamp.version, stamp.version * 10 - stamp.site)
    return encode_state(CounterState(None, (entry,)))


def merge_all(states: list[bytes]) -> bytes:
    return reduce(merge_states, states[1:], states[0])


# Joins of some writes: from small states to whole records.
FIELDS = st.lists(STAMPS.map(write_fields), min_size=1, max_size=4).map(merge_all)
COUNTERS = st.lists(STAMPS.map(write_counter), min_size=1, max_size=4).map(merge_all)


def alike(count: int) -> st.SearchStrategy[tuple[bytes, ...]]:
    """Some records of one kind."""
    return st.tuples(*[FIELDS] * count) | st.tuples(*[COUNTERS] * count)


@given(alike(2))
def test_it_is_commutative(states: tuple[bytes, bytes]) -> None:
    left, right = states
    assert merge_states(left, right) == merge_states(right, left)


@given(alike(3))
def test_it_is_associative(states: tuple[bytes, bytes, bytes]) -> None:
    first, second, third = states
    assert merge_states(merge_states(first, second), third) == merge_states(
        first, merge_states(second, third)
    )


@given(alike(2))
def test_it_is_idempotent_and_says_so_by_giving_back_what_is_there(states: tuple[bytes, bytes]) -> None:
    left, right = states
    assert merge_states(left, bytes(left)) is left
    merged = merge_states(left, right)
    assert merge_states(merged, left) is merge_states(merged, right) is merged


@given(alike(2), STAMPS, STAMPS)
def test_origins_of_what_is_merged_play_no_part(
    states: tuple[bytes, bytes], one: Stamp, other: Stamp
) -> None:
    left, right = states
    merged = merge_states(left, right)
    if merged != left:
        copies = encode_state(decode_state(left), one), encode_state(decode_state(right), other)
        assert merge_states(*copies) == merged
        assert decode_value(merged).origin is None


@given(alike(2), STAMPS)
def test_record_at_rest_carries_its_newest_stamp_unless_it_is_its_own(
    states: tuple[bytes, bytes], own: Stamp
) -> None:
    for current in (None, states[0]):
        merged = merge_states(current, states[1], own=own)
        if merged is current:
            continue
        newest = max(stamps_of(decode_state(merged)))
        assert newest == newest_stamp(decode_state(merged))
        assert decode_value(merged).origin == (None if newest == own else newest)
        assert decode_state(merged) == decode_state(merge_states(current, states[1]))


@given(alike(1), st.sampled_from([put_fields({"a": 1}), update_fields({"b": None}), delete_record("fields")]))
def test_writing_is_stamping_and_merging(states: tuple[bytes], write: bytes) -> None:
    (current,) = states
    if isinstance(decode_state(current), CounterState):
        write = add_to_counter(5)
    logged = stamp_state(write, current, 9, 2)
    assert write_state(current, write, 9, 2) == (logged, merge_states(current, logged, own=Stamp(9, 2)))
    assert write_state(None, write, 9, 2) == (stamp_state(write, None, 9, 2),) * 2
    assert set(stamps_of(decode_state(logged))) == {Stamp(9, 2)}


def test_write_below_what_is_there_is_merged_all_the_same() -> None:
    newest = Stamp(9, 3)
    current = encode_state(FieldsState(None, (Field("a", b"1", newest),)), newest)
    written = write_state(current, put_fields({"a": 2, "b": 3}), 8, 1)
    assert decode_value(written.stored).value == b'{"a":1,"b":3}'
    assert decode_value(written.stored).origin == newest


def test_stamps_are_those_of_delete_fields_and_entries() -> None:
    fields = FieldsState(Stamp(1, 1), (Field("a", b"1", Stamp(3, 1)), Field("b", None, Stamp(2, 2))))
    assert stamps_of(fields) == [Stamp(1, 1), Stamp(3, 1), Stamp(2, 2)]
    assert newest_stamp(fields) == Stamp(3, 1)
    assert stamps_of(CounterState(None, (CounterEntry(2, 7, 1), CounterEntry(3, 6, 1)))) == [
        Stamp(7, 2),
        Stamp(6, 3),
    ]


@pytest.mark.parametrize("kind", ["fields", "counter"])
def test_delete_leaves_a_tombstone_that_remembers_when(kind: Kind) -> None:
    write = put_fields({"a": 1}) if kind == "fields" else add_to_counter(1)
    current = write_state(None, write, 7, 1).stored
    logged, stored = write_state(current, delete_record(kind), 8, 1)
    assert logged == stored
    assert decode_value(stored).deleted
    assert live_value(stored, 0) is None
    assert stamps_of(decode_state(stored)) == [Stamp(8, 1)]


FIELDS_RECORD = stamp_state(put_fields({"a": 1}), None, 7, 1)
COUNTER_RECORD = stamp_state(add_to_counter(1), None, 7, 1)


def test_records_of_two_kinds_are_not_merged() -> None:
    for current, incoming in ((FIELDS_RECORD, COUNTER_RECORD), (COUNTER_RECORD, FIELDS_RECORD)):
        with pytest.raises(WrongPolicy, match="right merge policy"):
            merge_states(current, incoming)
    for current, write in ((FIELDS_RECORD, add_to_counter(1)), (COUNTER_RECORD, put_fields({"a": 1}))):
        with pytest.raises(WrongPolicy, match="right merge policy"):
            write_state(current, write, 8, 1)


@pytest.mark.parametrize("write", [put_fields({"a": 1}), add_to_counter(1), delete_record("counter")])
def test_only_a_commit_gives_stamps(write: bytes) -> None:
    state: State = decode_state(write)
    assert is_unstamped(state)
    with pytest.raises(InvalidValue, match="waits for its commit"):
        merge_states(None, write)
    stamped = stamp_state(write, None, 7, 1)
    assert not is_unstamped(decode_state(stamped))
    with pytest.raises(InvalidValue, match="stamps of its own"):
        stamp_state(stamped, None, 8, 1)
    with pytest.raises(InvalidValue, match="stamps of its own"):
        write_state(None, stamped, 8, 1)


@pytest.mark.parametrize("plain", [b"value" + PLAIN, TOMBSTONE, b"", b"value\x20"])
def test_records_without_stamps_are_refused(plain: bytes) -> None:
    with pytest.raises(Corruption):
        merge_states(FIELDS_RECORD, plain)
    with pytest.raises(Corruption):
        merge_states(plain, FIELDS_RECORD)
    with pytest.raises(Corruption):
        write_state(plain, put_fields({"a": 1}), 8, 1)


def test_there_are_three_policies() -> None:
    assert list(POLICIES) == ["counter", "fields", "last_write"]
