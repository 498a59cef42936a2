"""The fields of JSON values as columns.

Arrow parses a whole batch of concatenated objects at once.  So that each value gives exactly one row, every
value must begin with `{` and end with `}`: an object cannot continue in the next value, because JSON wants a
comma between two braces, and the number of rows shows whether a value holds more than one object.

Arrow does not read objects as maps.  In columns with maps, each map is first rewritten as a list of entries,
value by value, which costs more.
"""

from collections.abc import Callable
from decimal import Decimal
from typing import Any, Final

import msgspec
import pyarrow
import pyarrow.compute as compute
import pyarrow.json

from floodmark.model.errors import SchemaMismatch

_EMPTY: Final = b"{}"
# An entry of a map on its way through Arrow.
_KEY: Final = "key"
_ITEM: Final = "value"
_WHITESPACE: Final = " \t\r\n"
# Numbers with a fraction keep all of their digits.
_decode: Final = msgspec.json.Decoder(float_hook=Decimal).decode
_encode: Final = msgspec.json.Encoder(decimal_format="number").encode
# A field that no object has, to test whether a value is an object at all.
_ABSENT: Final = pyarrow.schema([("", pyarrow.null())])


def read_fields(
    keys: pyarrow.BinaryArray, values: pyarrow.BinaryArray, fields: pyarrow.Schema
) -> dict[str, pyarrow.Array]:
    """The columns of some fields, by name.  A field that an object does not have is null, and so is every
    field where there is no value.

    >>> values = pyarrow.array([b'{"age": 36, "born": "1815-12-10"}', None])
    >>> fields = pyarrow.schema([("age", pyarrow.int32()), ("born", pyarrow.date32())])
    >>> read_fields(pyarrow.array([b"ada", b"alan"]), values, fields)["age"].to_pylist()
    [36, None]
    """
    if not len(values):
        return {field.name: pyarrow.array([], field.type) for field in fields}
    objects = compute.fill_null(values, _EMPTY)
    try:
        return _read(objects, fields)
    except (pyarrow.ArrowException, ValueError) as error:
        row = find_first(len(objects), lambda rows: _read(objects.slice(0, rows), fields))
        raise _mismatch(keys[row].as_py(), objects.slice(row, 1), fields) from error


def find_first(count: int, attempt: Callable[[int], object]) -> int:
    """The index of the first row that does not fit: `attempt(n)` raises if the first n rows do not."""
    fitting, failing = 0, count
    while failing - fitting > 1:
        middle = (fitting + failing) // 2
        try:
            attempt(middle)
            fitting = middle
        except (pyarrow.ArrowException, ValueError):
            failing = middle
    return fitting


def _read(objects: pyarrow.BinaryArray, fields: pyarrow.Schema) -> dict[str, pyarrow.Array]:
    trimmed = compute.ascii_trim(objects.cast(pyarrow.string()), _WHITESPACE)
    bounded = compute.and_(compute.starts_with(trimmed, "{"), compute.ends_with(trimmed, "}"))
    if bounded.false_count:
        raise ValueError("it is not an object")
    if any(_holds_map(field.type) for field in fields):
        trimmed = pyarrow.array([_list_entries(text, fields) for text in trimmed.to_pylist()], trimmed.type)
    lines = pyarrow.ListArray.from_arrays(pyarrow.array([0, len(trimmed)], pyarrow.int32()), trimmed)
    document = compute.binary_join(lines, "\n")[0].as_buffer()
    table = pyarrow.json.read_json(
        pyarrow.BufferReader(document),
        read_options=pyarrow.json.ReadOptions(use_threads=False, block_size=document.size + 1),
        parse_options=pyarrow.json.ParseOptions(
            explicit_schema=pyarrow.schema([(field.name, _readable(field.type)) for field in fields]),
            newlines_in_values=True,
            unexpected_field_behavior="ignore",
        ),
    )
    if table.num_rows != len(objects):
        raise ValueError("it holds more than one object")
    return {field.name: _convert(table[field.name].combine_chunks(), field.type) for field in fields}


def _readable(kind: pyarrow.DataType) -> pyarrow.DataType:
    """The type to parse first: Arrow parses a date as a number of days."""
    if pyarrow.types.is_date(kind):
        return pyarrow.string()
    if pyarrow.types.is_list(kind):
        return pyarrow.list_(_readable(kind.value_type))
    if pyarrow.types.is_struct(kind):
        return pyarrow.struct([(field.name, _readable(field.type)) for field in kind.fields])
    if pyarrow.types.is_map(kind):
        entry = {_KEY: pyarrow.string(), _ITEM: _readable(kind.item_type)}
        return pyarrow.list_(pyarrow.struct(list(entry.items())))
    return kind


def _holds_map(kind: pyarrow.DataType) -> bool:
    if pyarrow.types.is_list(kind):
        return _holds_map(kind.value_type)
    if pyarrow.types.is_struct(kind):
        return any(_holds_map(field.type) for field in kind.fields)
    return bool(pyarrow.types.is_map(kind))


def _list_entries(text: str, fields: pyarrow.Schema) -> str:
    """An object with only these fields, and each map in them as a list of entries."""
    try:
        content = _decode(text)
    except msgspec.DecodeError as error:
        raise ValueError(str(error)) from None
    found = {
        field.name: _entries(content[field.name], field.type) for field in fields if field.name in content
    }
    return _encode(found).decode()


def _entries(content: Any, kind: pyarrow.DataType) -> Any:
    # Content of another type is left alone: Arrow raises the error.
    if pyarrow.types.is_map(kind) and isinstance(content, dict):
        return [{_KEY: key, _ITEM: _entries(item, kind.item_type)} for key, item in content.items()]
    if pyarrow.types.is_map(kind) and content is not None:
        raise ValueError(f"a map is an object, not {content!r:.60}")
    if pyarrow.types.is_list(kind) and isinstance(content, list):
        return [_entries(each, kind.value_type) for each in content]
    if pyarrow.types.is_struct(kind) and isinstance(content, dict):
        return {
            field.name: _entries(content[field.name], field.type)
            for field in kind.fields
            if field.name in content
        }
    return content


def _convert(array: pyarrow.Array, kind: pyarrow.DataType) -> pyarrow.Array:
    """A parsed array in the type of the column: Arrow does not cast lists to maps."""
    if not _holds_map(kind):
        return array.cast(kind)
    missing = array.is_null()
    if pyarrow.types.is_struct(kind):
        parts = [_convert(part, field.type) for part, field in zip(array.flatten(), kind.fields, strict=True)]
        return pyarrow.StructArray.from_arrays(parts, fields=kind.fields, mask=missing)
    offsets = array.offsets
    if pyarrow.types.is_list(kind):
        return pyarrow.ListArray.from_arrays(
            offsets, _convert(array.values, kind.value_type), kind, mask=missing
        )
    keys, items = (array.values.field(number) for number in range(2))
    return pyarrow.MapArray.from_arrays(
        offsets, keys.cast(kind.key_type), _convert(items, kind.item_type), kind, mask=missing
    )


def _mismatch(key: bytes, value: pyarrow.BinaryArray, fields: pyarrow.Schema) -> SchemaMismatch:
    """The error of a value, with the column that it does not fit."""
    if (problem := _problem(value, _ABSENT)) is not None:
        return SchemaMismatch(
            f"the value of the key {key!r:.60} is not one JSON object: {problem}; read it with valueFormat "
            "binary or string",
            column=fields.names[0],
            key=key,
        )
    problems = {field.name: _problem(value, pyarrow.schema([field])) for field in fields}
    column, problem = next(each for each in problems.items() if each[1] is not None)
    return SchemaMismatch(
        f"the value of the key {key!r:.60} does not fit the column {column!r} of type "
        f"{fields.field(column).type}: {problem}",
        column=column,
        key=key,
    )


def _problem(value: pyarrow.BinaryArray, fields: pyarrow.Schema) -> str | None:
    try:
        _read(value, fields)
    except (pyarrow.ArrowException, ValueError) as error:
        return f"{error!s:.120}"
    return None
