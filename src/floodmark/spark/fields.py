"""The fields of JSON values as columns.

Arrow reads a whole batch of objects at once, one behind the other.  So that each value gives exactly one
row, every value must begin with `{` and end with `}`: an object then cannot go on in the next value, because
between two braces JSON wants a comma, and the number of rows shows whether a value holds more than one.
"""

from collections.abc import Callable
from typing import Final

import pyarrow
import pyarrow.compute as compute
import pyarrow.json

from floodmark.model.errors import SchemaMismatch

_EMPTY: Final = b"{}"
_WHITESPACE: Final = " \t\r\n"
# A field that no object has: what reads it finds out whether there is an object at all.
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
    """The first of some rows that does not fit: `attempt` fails on the first so many rows."""
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
    return {field.name: _one_array(table[field.name]).cast(field.type) for field in fields}


def _readable(kind: pyarrow.DataType) -> pyarrow.DataType:
    """The type that JSON is read into first: Arrow takes dates for numbers of days there."""
    if pyarrow.types.is_date(kind):
        return pyarrow.string()
    if pyarrow.types.is_list(kind):
        return pyarrow.list_(_readable(kind.value_type))
    if pyarrow.types.is_struct(kind):
        return pyarrow.struct([(field.name, _readable(field.type)) for field in kind.fields])
    return kind


def _one_array(column: pyarrow.ChunkedArray) -> pyarrow.Array:
    return column.chunk(0) if column.num_chunks == 1 else pyarrow.concat_arrays(column.chunks)


def _mismatch(key: bytes, value: pyarrow.BinaryArray, fields: pyarrow.Schema) -> SchemaMismatch:
    """Say what is wrong with a value, and which column it does not fit."""
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
