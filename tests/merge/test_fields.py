"""Writes of fields: what JSON says, as it was written; what is no JSON object is refused with a reason."""

import json
import math
from datetime import datetime
from types import MappingProxyType
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from floodmark.codec.states import DELETE_HERE, HERE, Field, FieldsState, decode_state
from floodmark.codec.values import decode_value
from floodmark.merge.fields import (
    delete_fields,
    merge_fields,
    parse_object,
    put_fields,
    stamp_fields,
    update_fields,
)
from floodmark.model.change import Stamp
from floodmark.model.errors import InvalidValue, LimitExceeded
from floodmark.model.limits import FIELD_NAME_BYTES_MAX, FIELDS_MAX, VALUE_BYTES_MAX

NUMBERS = st.integers(-(1 << 80), 1 << 80) | st.floats(allow_nan=False, allow_infinity=False)
VALUES = st.recursive(
    st.booleans() | NUMBERS | st.text(st.characters(exclude_categories=["Cs"]), max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["a", "b", ","]), inner),
    max_leaves=5,
)
NAMES = st.text(st.characters(exclude_categories=["Cs"]), max_size=5) | st.sampled_from(
    ["a", "b", ",", "a,b"]
)
OBJECTS = st.dictionaries(NAMES, VALUES, max_size=5)


def fields_of(stored: bytes) -> FieldsState:
    state = decode_state(stored)
    assert isinstance(state, FieldsState)
    return state


def test_texts_are_kept_as_they_were_written() -> None:
    written = b' { "b" : [1,  2.50,\n3e5] ,"a":"\\u00e9\\/" , "\\u0063" : {"x" :{}} } '
    assert parse_object(written) == [("a", b'"\\u00e9\\/"'), ("b", b"[1,  2.50,\n3e5]"), ("c", b'{"x" :{}}')]
    value = decode_value(put_fields(written)).value
    assert value == b'{"a":"\\u00e9\\/","b":[1,  2.50,\n3e5],"c":{"x" :{}}}'


def test_numbers_of_any_size_are_kept() -> None:
    digits = b"9" * 5_000
    assert parse_object(b'{"a,":' + digits + b',"b":1e999}') == [("a,", digits), ("b", b"1e999")]


@given(OBJECTS)
def test_mappings_are_written_as_json(value: dict[str, Any]) -> None:
    assert [name for name, _ in parse_object(value)] == sorted(value)
    assert put_fields(value) == put_fields(decode_value(put_fields(value)).value or b"{}")


def test_names_are_sorted_as_their_bytes_are() -> None:
    names = ["", "\x00", "Z", "a", "ø", "￿", "\U00010000"]
    stored = put_fields(dict.fromkeys(reversed(names), 1))
    assert [field.name for field in fields_of(stored).fields] == names
    assert sorted(names, key=str.encode) == names


def test_put_is_a_delete_and_the_fields_that_are_not_null() -> None:
    expected = FieldsState(DELETE_HERE, (Field("a", b"1", HERE, 9),))
    assert fields_of(put_fields(b'{"b":null,"a":1}', 9)) == expected


@pytest.mark.parametrize("empty", [b"{}", b'{"a":null}', {}, {"a": None}])
def test_put_of_nothing_is_a_delete(empty: bytes | dict[str, object]) -> None:
    assert decode_value(put_fields(empty)).deleted
    assert fields_of(put_fields(empty)) == FieldsState(DELETE_HERE, ())


def test_null_in_an_update_deletes_a_field_and_a_null_inside_is_a_value() -> None:
    expected = (Field("a", None, HERE), Field("b", b"[null]", HERE, 9))
    assert fields_of(update_fields(b'{"a":null,"b":[null]}', 9)) == FieldsState(None, expected)


def test_deleted_fields_are_named_once() -> None:
    assert fields_of(delete_fields(["b", "a", "b"])).fields == (
        Field("a", None, HERE),
        Field("b", None, HERE),
    )


@pytest.mark.parametrize(
    "written",
    [
        b"",
        b"[]",
        b'"text"',
        b"null",
        b"1",
        b"{",
        b'{"a"}',
        b'{"a":1,}',
        b'{"a":NaN}',
        b'{"a":Infinity}',
        b'{"a":{"b":[NaN]}}',
        b'{"a":01}',
        b'{"a":1}{}',
        b'{"a":1} x',
        b"{'a':1}",
        b"{a:1}",
        b'{"a":"\xff"}',
        b'{"\xff":1}',
        b'{"a":"\xed\xa0\x80"}',
        b'{"a":"\\ud800"}',
        b'{"\\ud800":1}',
        b'{"a":"\n"}',
        b'\xef\xbb\xbf{"a":1}',
        b'{"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    ],
    ids=lambda written: repr(written[:20]),
)
@pytest.mark.parametrize("build", [put_fields, update_fields])
def test_what_is_no_json_object_is_refused(build: Any, written: bytes) -> None:
    with pytest.raises(InvalidValue, match="must be a JSON object"):
        build(written)


@pytest.mark.parametrize(
    "written",
    [
        b'{"a":1,"a":1}',
        b'{"a":1,"b":2,"a":null}',
        b'{"a":1,"\\u0061":2}',
        b'{"":1,"":2}',
        b'{"a":[1,2],"a":3}',
        b'{",":1,",":2}',
        b'{"\\u002c":1,",":2}',
        b'{",,":1,"a":2,"a":3}',
        b'{"\\u002c":1,"a":2,"a":3}',
        b'{"a":1 , "a":"x,y", "b":{"c":1,"c":2}}',
    ],
)
def test_name_that_stands_there_twice_is_refused(written: bytes) -> None:
    with pytest.raises(InvalidValue, match=r"named 2 times"):
        update_fields(written)


@given(st.lists(st.tuples(NAMES, VALUES), max_size=5), st.booleans())
def test_names_are_told_apart_however_they_are_written(
    pairs: list[tuple[str, Any]], ascii_only: bool
) -> None:
    members = [json.dumps({name: value}, ensure_ascii=ascii_only)[1:-1] for name, value in pairs]
    written = ("{" + " , ".join(members) + "}").encode()
    if len({name for name, _ in pairs}) == len(pairs):
        assert [name for name, _ in parse_object(written)] == sorted(name for name, _ in pairs)
    else:
        with pytest.raises(InvalidValue, match="times"):
            parse_object(written)


def test_names_may_repeat_inside_of_a_field() -> None:
    assert parse_object(b'{"a":{"b":1,"b":2}}') == [("a", b'{"b":1,"b":2}')]


circle: dict[str, object] = {}
circle["circle"] = circle


@pytest.mark.parametrize(
    ("mapping", "message"),
    [
        ({"a": math.nan}, "JSON form"),
        ({"a": [math.inf]}, "JSON form"),
        ({"a": b"bytes"}, "JSON form"),
        ({"a": datetime(2020, 1, 1)}, "JSON form"),
        ({"a": "\ud800"}, "JSON form"),
        ({1: 2}, "must be text, not 1"),
        ({None: 2}, "must be text, not None"),
        ({"": 1, 0: 2}, "must be text, not 0"),
        (circle, "JSON form"),
    ],
)
def test_mapping_without_a_json_form_is_refused(mapping: Any, message: str) -> None:
    with pytest.raises(InvalidValue, match=message):
        put_fields(mapping)


def test_any_mapping_will_do() -> None:
    assert put_fields(MappingProxyType({"a": (1, 2)})) == put_fields(b'{"a":[1,2]}')


def test_name_that_is_no_text_is_refused() -> None:
    with pytest.raises(InvalidValue, match="UTF-8"):
        delete_fields(["\ud800"])


def test_update_and_delete_must_name_a_field() -> None:
    with pytest.raises(InvalidValue, match="name at least one field"):
        update_fields(b"{}")
    with pytest.raises(InvalidValue, match="name at least one"):
        delete_fields([])


def test_limits_of_a_write() -> None:
    names = [f"{number}" for number in range(FIELDS_MAX + 1)]
    assert len(fields_of(put_fields(dict.fromkeys(names[:-1], 1))).fields) == FIELDS_MAX
    with pytest.raises(LimitExceeded, match=r"4,097 fields.*several keys"):
        put_fields(dict.fromkeys(names, 1))
    with pytest.raises(LimitExceeded, match="4,097 fields"):
        delete_fields(names)
    longest = "ø" * (FIELD_NAME_BYTES_MAX // 2)
    assert fields_of(update_fields({longest: None})).fields == (Field(longest, None, HERE),)
    with pytest.raises(InvalidValue, match="1,026 bytes"):
        put_fields({longest + "ø": 1})
    with pytest.raises(InvalidValue, match="1,026 bytes"):
        delete_fields([longest + "ø"])
    with pytest.raises(InvalidValue, match="1,048,577 bytes"):
        put_fields({"a": "x" * (VALUE_BYTES_MAX - 1)})


def test_commit_gives_its_stamp_to_all_that_it_wrote() -> None:
    stamp = Stamp(7, 2)
    put = stamp_fields(fields_of(put_fields({"a": 1, "b": 2}, 9)), 7, 2)
    assert put == FieldsState(stamp, (Field("a", b"1", stamp, 9), Field("b", b"2", stamp, 9)))
    update = stamp_fields(fields_of(update_fields({"a": None})), 7, 2)
    assert update == FieldsState(None, (Field("a", None, stamp),))


@pytest.mark.parametrize(
    ("field", "deleted", "lives"),
    [
        (Stamp(7, 1), Stamp(6, 9), True),
        (Stamp(7, 1), Stamp(7, 1), True),
        (Stamp(7, 1), Stamp(7, 2), False),
        (Stamp(7, 2), Stamp(7, 1), True),
        (Stamp(6, 9), Stamp(7, 1), False),
    ],
)
def test_field_lives_at_or_above_the_delete(field: Stamp, deleted: Stamp, lives: bool) -> None:
    record = FieldsState(None, (Field("a", b"1", field),))
    delete = FieldsState(deleted, ())
    for merged in (merge_fields(record, delete), merge_fields(delete, record)):
        assert merged == FieldsState(deleted, record.fields if lives else ())


def test_deleted_field_is_remembered_against_older_writes_and_forgotten_by_a_later_put() -> None:
    gone = FieldsState(None, (Field("a", None, Stamp(7, 1)),))
    older = FieldsState(None, (Field("a", b"1", Stamp(6, 2)),))
    assert merge_fields(older, gone) == merge_fields(gone, older) == gone
    put = FieldsState(Stamp(8, 2), (Field("b", b"1", Stamp(8, 2)),))
    assert merge_fields(gone, put) == merge_fields(put, gone) == put
