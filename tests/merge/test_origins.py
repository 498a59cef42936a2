"""A record falls apart into what one site wrote and the rest, and the two together are the record."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.codec.strategies import STAMPED, STAMPS

from floodmark.codec.states import Field, FieldsState, State, decode_state, encode_state
from floodmark.codec.values import decode_value, encode_value
from floodmark.merge.parts import Split, split_record
from floodmark.merge.states import merge_states, newest_stamp, stamps_of
from floodmark.model.change import Stamp
from floodmark.model.errors import Corruption


def stamp_in(state: State, index: int) -> Stamp:
    stamps = sorted(stamps_of(state))
    return stamps[index % len(stamps)]


@given(STAMPED, st.integers(0, 9), st.booleans())
def test_state_is_the_join_of_its_two_parts(state: State, index: int, all_of_it: bool) -> None:
    whole = encode_state(state, newest_stamp(state))
    chosen = stamp_in(state, index)
    above = 0 if all_of_it else chosen.version - 1
    part, rest = split_record(whole, chosen.site, above)
    assert part is not None
    wanted = [each for each in stamps_of(state) if each.site == chosen.site and each.version > above]
    assert sorted(stamps_of(decode_state(part))) == sorted(wanted)
    assert decode_value(part).origin == max(wanted)
    if rest is None:
        assert len(wanted) == len(stamps_of(state))
    else:
        assert decode_value(rest).origin == newest_stamp(decode_state(rest))
        assert decode_state(merge_states(part, rest)) == state
        assert decode_state(merge_states(rest, part)) == state
        assert split_record(rest, chosen.site, above) == Split(None, rest)


@given(STAMPS, st.booleans())
def test_plain_record_goes_as_a_whole(stamp: Stamp, deleted: bool) -> None:
    stored = encode_value(b"" if deleted else b"value", None, deleted, origin=stamp)
    assert split_record(stored, stamp.site, stamp.version - 1) == Split(stored, None)
    assert split_record(stored, stamp.site, stamp.version) == Split(None, stored)
    assert split_record(stored, stamp.site % 255 + 1, 0) == Split(None, stored)


def test_delete_of_one_site_and_fields_of_another_part() -> None:
    deleted, kept = Stamp(7, 1), Stamp(9, 2)
    state = FieldsState(deleted, (Field("a", b"1", kept),))
    part, rest = split_record(encode_state(state, kept), 1, 0)
    assert part is not None
    assert rest is not None
    assert decode_state(part) == FieldsState(deleted, ())
    assert decode_value(rest).value == b'{"a":1}'


def test_record_without_an_origin_is_refused() -> None:
    with pytest.raises(Corruption):
        split_record(encode_value(b"value"), 1, 0)
