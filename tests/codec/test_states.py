"""States as stored values: one encoding for each, its value in plain sight, and damage refused."""

import json
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.codec.strategies import STAMPED, STAMPS, STATES, UNSTAMPED, fields_states

from floodmark.codec.states import (
    DELETE_HERE,
    HERE,
    CounterEntry,
    CounterState,
    Field,
    FieldsState,
    State,
    decode_state,
    encode_state,
    is_unstamped,
    live_value,
    render_value,
)
from floodmark.codec.values import (
    COUNTER,
    EXPIRING_FIELDS,
    FIELDS,
    PLAIN,
    TOMBSTONE,
    decode_value,
    encode_value,
)
from floodmark.model.change import Stamp
from floodmark.model.errors import Corruption, LimitExceeded

OSLO, ROME = Stamp(0x0102030405060708, 1), Stamp(0x0102030405060709, 2)
PROFILE = FieldsState(
    OSLO,
    (
        Field("city", b'"Oslo"', OSLO),
        Field("mood", b"[1, 2]", ROME, expires_at=9),
        Field("zip", None, ROME),
    ),
)
VISITS = CounterState(Stamp(3, 2), (CounterEntry(1, 7, 40), CounterEntry(2, 8, -2)))


def fields(*states: Field, deleted: Stamp | None = None) -> bytes:
    return encode_state(FieldsState(deleted, states))


def kind_of(stored: bytes) -> int:
    stamps = decode_value(stored).stamps
    assert stamps is not None
    return stamps[0]


def test_fields_are_laid_out_as_drawn() -> None:
    oslo, rome = "010203040506070801", "010203040506070902"
    body = (
        "03" + oslo + "0003"
        # bits, length of the name, name, length of the text, stamp, expiry
        + "01" + "0004" + b"city".hex() + "00000006" + oslo
        + "03" + "0004" + b"mood".hex() + "00000006" + rome + "0000000000000009"
        + "00" + "0003" + b"zip".hex() + rome
    )  # fmt: skip
    value = b'{"city":"Oslo","mood":[1, 2]}'
    assert encode_state(PROFILE).hex() == value.hex() + body + f"{len(body) // 2:08x}" + "20"


def test_counters_are_laid_out_as_drawn() -> None:
    body = (
        "02" + "000000000000000302" + "02"
        + "01" + "0000000000000007" + "0000000000000028"
        + "02" + "0000000000000008" + "fffffffffffffffe"
    )  # fmt: skip
    assert encode_state(VISITS).hex() == b"38".hex() + body + f"{len(body) // 2:08x}" + "20"


def test_more_fields_than_the_count_can_say_are_refused() -> None:
    many = [Field(f"{number:05}", None, OSLO) for number in range(1 << 16)]
    assert len(decode_value(fields(*many[1:])).stamps or b"") > 1 << 20
    with pytest.raises(LimitExceeded, match="65,536 fields"):
        fields(*many)


def test_origin_stands_before_the_stamps() -> None:
    record = decode_value(encode_state(VISITS, Stamp(9, 4)))
    assert (record.value, record.origin) == (b"38", Stamp(9, 4))
    assert record.stamps == decode_value(encode_state(VISITS)).stamps
    assert decode_state(encode_state(VISITS, Stamp(9, 4))) == VISITS


@given(STATES, st.none() | STAMPS)
def test_states_survive_a_round_trip(state: State, origin: Stamp | None) -> None:
    stored = encode_state(state, origin)
    assert decode_state(stored) == state
    assert decode_value(stored).origin == origin


@given(fields_states())
def test_value_is_the_object_of_the_present_fields(state: FieldsState) -> None:
    record = decode_value(encode_state(state))
    present = {field.name: field.text for field in state.fields if field.text is not None}
    assert record.deleted == (not present)
    if present:
        assert json.loads(record.value) == {name: json.loads(text) for name, text in present.items()}
        assert list(json.loads(record.value)) == sorted(present)
    else:
        assert record.value == b""


@pytest.mark.parametrize(
    ("state", "value"),
    [
        (CounterState(None, (CounterEntry(1, 1, 0),)), b"0"),
        (CounterState(None, (CounterEntry(1, 1, -5), CounterEntry(9, 1, 3))), b"-2"),
        # The sum over the sites may be larger than any of them can count.
        (
            CounterState(None, tuple(CounterEntry(site, 1, (1 << 63) - 1) for site in (1, 2))),
            b"18446744073709551614",
        ),
        (CounterState(Stamp(3, 1), ()), b""),
    ],
)
def test_value_of_a_counter_is_the_sum_of_its_entries(state: CounterState, value: bytes) -> None:
    record = decode_value(encode_state(state))
    assert (record.value, record.deleted) == (value, not state.entries)


@given(STATES)
def test_unstamped_states_are_known_as_such(state: State) -> None:
    assert is_unstamped(state) == (HERE in all_stamps(state) or state.deleted == DELETE_HERE)


def all_stamps(state: State) -> list[Stamp]:
    return [part.stamp for part in (state.fields if isinstance(state, FieldsState) else state.entries)]


@pytest.mark.parametrize(
    ("expiries", "expires_at", "kind"),
    [
        ([None], None, FIELDS),
        ([5], 5, FIELDS),
        ([5, 5], 5, FIELDS),
        ([5, 6], 6, EXPIRING_FIELDS),
        ([5, None], None, EXPIRING_FIELDS),
    ],
)
def test_record_expires_with_its_last_field(
    expiries: list[int | None], expires_at: int | None, kind: int
) -> None:
    each = [Field(f"{index}", b"1", OSLO, expiry) for index, expiry in enumerate(expiries)]
    for stored in (fields(*each), fields(*each, Field("gone", None, OSLO))):
        assert decode_value(stored).expires_at == expires_at
        assert kind_of(stored) == kind


@given(fields_states(), st.integers(0, 60_000))
def test_reader_finds_the_fields_that_are_alive_at_the_moment(state: FieldsState, now_ms: int) -> None:
    stored = encode_state(state)
    alive = [
        field
        for field in state.fields
        if field.text is not None and (field.expires_at is None or field.expires_at * 1000 > now_ms)
    ]
    assert live_value(stored, now_ms) == (decode_value(fields(*alive)).value if alive else None)


def test_records_that_are_not_merged_are_read_as_ever() -> None:
    stored = encode_value(b"value", expires_at=2)
    assert (live_value(stored, 1_999), live_value(stored, 2_000)) == (b"value", None)
    assert live_value(TOMBSTONE, 0) is None
    record = decode_value(b"value" + PLAIN)
    assert render_value(record, 0) is record.value


@pytest.mark.parametrize("stored", [b"value" + PLAIN, TOMBSTONE, encode_value(b"", origin=Stamp(7, 1))])
def test_records_without_stamps_are_no_states(stored: bytes) -> None:
    with pytest.raises(Corruption, match="no stamps"):
        decode_state(stored)


# What is wrong, and a body that has it; the value and the flags are those of the sound record.
NAME, TEXT_BYTES = b"\x00\x01a", b"\x00\x00\x00\x01"
SITE_1 = bytes(7) + b"\x07\x01"
HEAD = b"\x01" + bytes(9) + b"\x00\x01"
FIELD = b"\x01" + NAME + TEXT_BYTES + SITE_1
BROKEN_FIELDS = {
    "nothing but a kind": b"\x01",
    "no count": b"\x01" + bytes(9),
    "fields missing": b"\x01" + bytes(9) + b"\x00\x02" + FIELD,
    "something behind": HEAD + FIELD + b"\x00",
    "unknown bits": HEAD + b"\x05" + FIELD[1:],
    "expiry of a deleted field": HEAD + b"\x02" + NAME + SITE_1 + bytes(8),
    "name too long": HEAD + b"\x01\x00\xff" + FIELD[3:],
    "name not text": HEAD + b"\x01\x00\x01\xff" + FIELD[4:],
    "another name": HEAD + b"\x01\x00\x01b" + FIELD[4:],
    "text too long": HEAD + b"\x01" + NAME + b"\x00\x00\x00\x02" + SITE_1,
    "text too short": HEAD + b"\x01" + NAME + b"\x00\x00\x00\x00" + SITE_1,
    "a name twice": b"\x01" + bytes(9) + b"\x00\x02" + FIELD + FIELD,
    "no fields": b"\x01" + bytes(9) + b"\x00\x00",
    "field deleted, text there": HEAD + b"\x00" + NAME + SITE_1,
    "older than the delete": b"\x01" + bytes(7) + b"\x08\x01" + HEAD[10:] + FIELD,
    "delete of no site": b"\x01" + bytes(7) + b"\x06\x00" + HEAD[10:] + FIELD,
    "delete of no version": b"\x01" + bytes(8) + b"\x05" + HEAD[10:] + FIELD,
    "delete waits, field does not": b"\x01" + bytes(8) + b"\xff" + HEAD[10:] + FIELD,
    "field waits, delete does not": b"\x01" + SITE_1 + HEAD[10:] + FIELD[:8] + bytes(9),
    "stamp of no site": HEAD + FIELD[:-1] + b"\x00",
    "stamp of no version": HEAD + FIELD[:8] + bytes(8) + b"\x01",
    "kind of expiring fields": b"\x03" + (HEAD + FIELD)[1:],
    "kind of a counter": b"\x02" + (HEAD + FIELD)[1:],
    "field that expires": HEAD + b"\x03" + FIELD[1:] + bytes(8),
}


@pytest.mark.parametrize("damage", BROKEN_FIELDS)
def test_damaged_fields_are_refused(damage: str) -> None:
    assert decode_state(encode_value(b'{"a":1}', stamps=HEAD + FIELD)) == FieldsState(
        None, (Field("a", b"1", Stamp(7, 1)),)
    )
    with pytest.raises(Corruption):
        decode_state(encode_value(b'{"a":1}', stamps=BROKEN_FIELDS[damage]))


COUNTER_HEAD = b"\x02" + bytes(9) + b"\x01"
ENTRY = b"\x01" + bytes(7) + b"\x07" + bytes(7) + b"\x05"
BROKEN_COUNTERS = {
    "no count": b"\x02" + bytes(9),
    "entries missing": b"\x02" + bytes(9) + b"\x02" + ENTRY,
    "half an entry": COUNTER_HEAD + ENTRY[:-1],
    "something behind": COUNTER_HEAD + ENTRY + b"\x00",
    "another total": COUNTER_HEAD + ENTRY[:-1] + b"\x06",
    "no entries": b"\x02" + bytes(10),
    "a site twice": b"\x02" + bytes(9) + b"\x02" + ENTRY + ENTRY[:-1] + b"\x00",
    "sites out of order": b"\x02" + bytes(9) + b"\x02\x02" + ENTRY[1:-1] + b"\x00" + ENTRY,
    "as old as the delete": b"\x02" + bytes(7) + b"\x07\x01\x01" + ENTRY,
    "older than the delete": b"\x02" + bytes(7) + b"\x08\x01\x01" + ENTRY,
    "delete waits, entry does not": b"\x02" + bytes(8) + b"\xff\x01" + ENTRY,
    "both wait": b"\x02" + bytes(8) + b"\xff\x01" + bytes(9) + ENTRY[9:],
    "entry of no site": COUNTER_HEAD + b"\x00" + ENTRY[1:],
    "entry of no version": COUNTER_HEAD + b"\x01" + bytes(8) + ENTRY[9:],
    "kind of fields": b"\x01" + (COUNTER_HEAD + ENTRY)[1:],
}


@pytest.mark.parametrize("damage", BROKEN_COUNTERS)
def test_damaged_counters_are_refused(damage: str) -> None:
    assert decode_state(encode_value(b"5", stamps=COUNTER_HEAD + ENTRY)) == CounterState(
        None, (CounterEntry(1, 7, 5),)
    )
    with pytest.raises(Corruption):
        decode_state(encode_value(b"5", stamps=BROKEN_COUNTERS[damage]))


@pytest.mark.parametrize(
    ("value", "expires_at", "deleted"),
    [
        (b"", None, False),
        (b'{"a":1}', None, True),
        (b'{"a":1}', 5, False),
        (b'{"a":1} ', None, False),
        (b'{"a": 1}', None, False),
        (b'{"a":1,}', None, False),
        (b'["a":1}', None, False),
        (b'{"a":1]', None, False),
        (b'{"a":1', None, False),
        (b'{"b":1}', None, False),
        (b'{"a":12}', None, False),
    ],
)
def test_value_and_flags_that_do_not_follow_from_the_fields_are_refused(
    value: bytes, expires_at: int | None, deleted: bool
) -> None:
    with pytest.raises(Corruption, match="fit"):
        decode_state(encode_value(value, expires_at, deleted, stamps=HEAD + FIELD))


@pytest.mark.parametrize(
    ("value", "expires_at", "deleted"),
    [(b"5", None, True), (b"5", 5, False), (b"05", None, False), (b"+5", None, False), (b"", None, False)],
)
def test_value_and_flags_that_do_not_follow_from_the_entries_are_refused(
    value: bytes, expires_at: int | None, deleted: bool
) -> None:
    with pytest.raises(Corruption, match="fit"):
        decode_state(encode_value(value, expires_at, deleted, stamps=COUNTER_HEAD + ENTRY))


def flip(stored: bytes, place: int, mask: int) -> bytes:
    return stored[:place] + bytes([stored[place] ^ mask]) + stored[place + 1 :]


DAMAGES: dict[str, Callable[[bytes, int, int], bytes]] = {
    "flipped": flip,
    "cut out": lambda stored, place, width: stored[:place] + stored[place + width % 9 + 1 :],
    "doubled": lambda stored, place, width: stored[: place + width % 9 + 1] + stored[place:],
    "cut off": lambda stored, place, _: stored[:place],
}


@pytest.mark.parametrize("damage", DAMAGES)
@given(STATES, st.data())
def test_damaged_bytes_decode_to_what_encodes_to_them_or_are_refused(
    damage: str, state: State, data: st.DataObject
) -> None:
    stored = encode_state(state, data.draw(st.none() | STAMPS))
    place = data.draw(st.integers(0, len(stored) - 1))
    damaged = DAMAGES[damage](stored, place, data.draw(st.integers(1, 255)))
    try:
        read = decode_state(damaged)
    except Corruption:
        return
    assert encode_state(read, decode_value(damaged).origin) == damaged


@given(STAMPED, st.integers(0, 60_000))
def test_counters_and_lasting_records_are_read_without_a_look_at_their_stamps(
    state: State, now_ms: int
) -> None:
    record = decode_value(encode_state(state))
    if kind_of(encode_state(state)) != EXPIRING_FIELDS:
        assert render_value(record, now_ms) is record.value


@given(UNSTAMPED)
def test_unstamped_states_have_a_kind_too(state: State) -> None:
    expected = (COUNTER,) if isinstance(state, CounterState) else (FIELDS, EXPIRING_FIELDS)
    assert kind_of(encode_state(state)) in expected
