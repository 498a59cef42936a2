"""Deletes that hide nothing any more go from a record; its value stays, and so does what becomes of it."""

from collections.abc import Sequence

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
    live_value,
    remembers_deletes,
)
from floodmark.codec.values import decode_value
from floodmark.merge.parts import prune_record, prune_state
from floodmark.merge.states import merge_states, newest_stamp, stamps_of
from floodmark.model.change import Stamp

NAMES = ("a", "b", "c")
stamps = st.builds(Stamp, st.integers(1, 9), st.integers(1, 3))


@st.composite
def fields_states(draw: st.DrawFn) -> FieldsState:
    deleted = draw(st.none() | stamps)
    fields = [
        Field(name, text, stamp, expires_at if text is not None else None)
        for name in NAMES
        if draw(st.booleans())
        for text, stamp, expires_at in [
            draw(st.tuples(st.sampled_from([None, b"1"]), stamps, st.none() | st.integers(1, 4)))
        ]
        if deleted is None or stamp >= deleted
    ]
    return FieldsState(deleted or (None if fields else Stamp(1, 1)), tuple(fields))


@st.composite
def counter_states(draw: st.DrawFn) -> CounterState:
    deleted = draw(st.none() | stamps)
    entries = [
        CounterEntry(site, version, draw(st.integers(-5, 5)))
        for site in (1, 2, 3)
        for version in [draw(st.integers(0, 9))]
        if version and (deleted is None or Stamp(version, site) > deleted)
    ]
    return CounterState(deleted or (None if entries else Stamp(1, 1)), tuple(entries))


def later(state: State, settled: int) -> State | None:
    """What of a state was written above a version: what may still arrive; None if nothing was."""
    deleted = state.deleted if state.deleted is not None and state.deleted.version > settled else None
    if isinstance(state, CounterState):
        entries = tuple(entry for entry in state.entries if entry.version > settled)
        return CounterState(deleted, entries) if deleted or entries else None
    fields = tuple(field for field in state.fields if field.stamp.version > settled)
    return FieldsState(deleted, fields) if deleted or fields else None


kinds = pytest.mark.parametrize("states", [fields_states(), counter_states()], ids=["fields", "counter"])


@kinds
@given(data=st.data(), settled=st.integers(0, 9), now=st.integers(0, 4))
def test_value_stays_from_now_on_and_only_settled_deletes_go(
    states: st.SearchStrategy[State], data: st.DataObject, settled: int, now: int
) -> None:
    state = data.draw(states)
    stored = encode_state(state, newest_stamp(state))
    pruned = prune_record(stored, settled, now * 1000)
    if pruned is None:
        return
    for moment in range(now, 6):
        assert live_value(pruned.stored, moment * 1000) == live_value(stored, moment * 1000)
    left = decode_state(pruned.stored)
    gone = {*stamps_of(state)} - {*stamps_of(left)}
    assert max(stamp.version for stamp in gone) == pruned.newest <= settled
    assert decode_value(pruned.stored).origin == newest_stamp(left)
    assert prune_record(pruned.stored, settled, now * 1000) is None


@kinds
@given(data=st.data(), settled=st.integers(0, 9))
def test_whatever_may_still_arrive_leads_to_the_same(
    states: st.SearchStrategy[State], data: st.DataObject, settled: int
) -> None:
    """A site that has forgotten and one that has not, and what was written after that, in any order."""
    whole = encode_state(data.draw(states))
    pruned = prune_record(whole, settled, 0)
    arriving = [later(data.draw(states), settled) for _ in range(2)]
    changes = [encode_state(state) for state in arriving if state is not None]
    forgot, knew = whole if pruned is None else pruned.stored, whole
    for change in changes:
        forgot, knew = merge_states(forgot, change), merge_states(knew, change)
        assert live_value(forgot, 0) == live_value(knew, 0)
    assert decode_state(merge_states(forgot, knew)) == decode_state(knew), "who knows more tells the other"
    assert forgotten(forgot) == forgotten(knew), "and when both forget everything, the bytes are equal"


def forgotten(stored: bytes) -> bytes:
    if decode_value(stored).deleted:
        return b"dead"
    return encode_state(prune_state(decode_state(stored), 1 << 60, 0))


@kinds
@given(data=st.data())
def test_a_quick_look_overlooks_nothing(states: st.SearchStrategy[State], data: st.DataObject) -> None:
    state = data.draw(states)
    record = decode_value(encode_state(state))
    assert record.stamps is not None
    if not record.deleted and not remembers_deletes(record.stamps):
        assert prune_state(state, 1 << 60, 0) == state


@pytest.mark.parametrize(
    ("fields", "deleted", "kept"),
    [
        ([Field("a", b"1", Stamp(5, 1))], Stamp(5, 1), Stamp(5, 1)),
        ([Field("a", b"1", Stamp(6, 1))], Stamp(5, 1), None),
        ([Field("a", b"1", Stamp(6, 1)), Field("b", b"1", Stamp(5, 1))], Stamp(5, 1), Stamp(5, 1)),
        ([Field("a", b"1", Stamp(6, 1)), Field("b", None, Stamp(5, 2))], Stamp(5, 2), None),
    ],
    ids=["a put", "all of a put was overwritten", "some of a put is left", "what is left of it was deleted"],
)
def test_the_delete_of_a_put_stays_as_long_as_a_field_of_it(
    fields: Sequence[Field], deleted: Stamp, kept: Stamp | None
) -> None:
    assert prune_state(FieldsState(deleted, tuple(fields)), 9, 0).deleted == kept


def test_the_delete_of_a_counter_goes() -> None:
    state = CounterState(Stamp(5, 1), (CounterEntry(1, 6, 3),))
    assert prune_state(state, 5, 0) == CounterState(None, state.entries)
    assert prune_state(state, 4, 0) == state


def test_a_dead_record_goes_as_a_whole_and_not_in_parts() -> None:
    state = FieldsState(None, (Field("a", None, Stamp(5, 1)), Field("b", b"1", Stamp(6, 1), expires_at=3)))
    assert prune_record(encode_state(state), 9, 3000) is None
    assert prune_record(encode_state(state), 9, 2999) is not None
