"""A thin record says when and where everything was written, and whether it is the same, but not what."""

from hypothesis import given
from hypothesis import strategies as st
from tests.codec.strategies import STAMPS, counter_states, fields_states

from floodmark.codec.digest import SEED, hash_bytes
from floodmark.codec.states import CounterEntry, CounterState, Field, FieldsState, decode_state, encode_state
from floodmark.codec.thin import digest_record, thin_record
from floodmark.codec.values import decode_value, encode_value
from floodmark.model.change import Stamp

records = st.one_of(
    st.builds(encode_value, st.binary(max_size=40), st.none() | st.integers(0, 9)),
    st.just(encode_value(b"", deleted=True)),
    st.builds(encode_state, fields_states()),
    st.builds(encode_state, counter_states()),
)


def with_origin(stored: bytes, origin: Stamp) -> bytes:
    record = decode_value(stored)
    return encode_value(record.value, record.expires_at, record.deleted, origin=origin, stamps=record.stamps)


@given(records, STAMPS)
def test_the_digest_is_the_same_at_every_site(stored: bytes, origin: Stamp) -> None:
    assert thin_record(stored)[1] == thin_record(with_origin(stored, origin))[1] == digest_record(stored)
    assert digest_record(stored) == hash_bytes(stored, SEED)


@given(records, records)
def test_equal_digests_mean_equal_records(left: bytes, right: bytes) -> None:
    assert (digest_record(left) == digest_record(right)) == (left == right)


@given(records, STAMPS)
def test_a_thin_record_keeps_all_but_the_values(stored: bytes, origin: Stamp) -> None:
    copied = with_origin(stored, origin)
    thin, record = decode_value(thin_record(copied)[0]), decode_value(copied)
    assert (thin.origin, thin.expires_at, thin.deleted) == (origin, record.expires_at, record.deleted)
    assert (thin.stamps is None) == (record.stamps is None)
    if record.stamps is None:
        assert thin.value == b""


@given(fields_states())
def test_the_texts_of_fields_become_digests(state: FieldsState) -> None:
    thin = decode_state(thin_record(encode_state(state))[0])
    assert isinstance(thin, FieldsState)
    for whole, bare in zip(state.fields, thin.fields, strict=True):
        assert (bare.name, bare.stamp, bare.expires_at) == (whole.name, whole.stamp, whole.expires_at)
        expected = None if whole.text is None else hash_bytes(whole.text, SEED).to_bytes(8, "big")
        assert bare.text == expected


def test_a_thin_record_is_small_however_large_the_value() -> None:
    large = b'"%s"' % (b"x" * 100_000)
    assert len(thin_record(encode_value(large))[0]) == 1
    assert len(thin_record(encode_state(FieldsState(None, (Field("a", large, Stamp(1, 1)),))))[0]) < 64


def test_a_counter_stays_as_it_is() -> None:
    stored = encode_state(CounterState(None, (CounterEntry(1, 7, 40), CounterEntry(2, 5, 2))), Stamp(7, 1))
    assert thin_record(stored)[0] == stored


def test_an_empty_value_and_a_tombstone_have_different_digests() -> None:
    assert digest_record(encode_value(b"")) != digest_record(encode_value(b"", deleted=True))
