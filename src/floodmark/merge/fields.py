"""Records that are merged field by field.

Each field is a record of its own, of which the last write wins, and a delete of the whole record removes the
fields that are older than it, whenever they arrive.  A put is a delete and its fields at one stamp: hence a
field lives if its stamp is at or above that of the delete.  A write contains only the fields that it sets or
deletes, so if two sites update different fields of a record at the same time, both updates are kept.
"""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Final, TypeAlias

import msgspec

from floodmark.codec.states import DELETE_HERE, HERE, Field, FieldsState, encode_state
from floodmark.model.change import Stamp
from floodmark.model.errors import InvalidValue, LimitExceeded
from floodmark.model.limits import FIELD_NAME_BYTES_MAX, FIELDS_MAX, VALUE_BYTES_MAX
from floodmark.model.version import Version

# A JSON object: its text, or a mapping that has a JSON form.
JsonObject: TypeAlias = bytes | Mapping[str, object]

_NULL: Final = b"null"
_OBJECT: Final = msgspec.json.Decoder(dict[str, msgspec.Raw])


def merge_fields(current: FieldsState, incoming: FieldsState) -> FieldsState:
    """The join of two states: for each name the field with the higher stamp, if no delete is above that.

    >>> old, new = Field("a", b"1", Stamp(5, 1)), Field("a", b"2", Stamp(6, 1))
    >>> merge_fields(FieldsState(None, (new,)), FieldsState(Stamp(5, 2), (old,)))  == FieldsState(
    ...     Stamp(5, 2), (new,)
    ... )
    True
    """
    fields = {field.name: field for field in current.fields}
    for field in incoming.fields:
        standing = fields.get(field.name)
        if standing is None or field.stamp > standing.stamp:
            fields[field.name] = field
    merged = [fields[name] for name in sorted(fields)]
    deleted = later_delete(current.deleted, incoming.deleted)
    if deleted is not None:
        merged = [field for field in merged if field.stamp >= deleted]
    return FieldsState(deleted, tuple(merged))


def later_delete(left: Stamp | None, right: Stamp | None) -> Stamp | None:
    """The higher of two deletes; None if there is neither."""
    if left is None or right is None:
        return left or right
    return max(left, right)


def stamp_fields(write: FieldsState, version: Version, site: int) -> FieldsState:
    """An unstamped write with the stamp of its commit."""
    stamp = Stamp(version, site)
    fields = [Field(field.name, field.text, stamp, field.expires_at) for field in write.fields]
    return FieldsState(None if write.deleted is None else stamp, tuple(fields))


def put_fields(value: JsonObject, expires_at: int | None = None) -> bytes:
    """An unstamped write that replaces a record by a JSON object.  A field that is null is left out.

    A record without fields does not exist: putting an empty object deletes the record.
    """
    members = parse_object(value)
    fields = [Field(name, text, HERE, expires_at) for name, text in members if text != _NULL]
    return _encode_write(FieldsState(DELETE_HERE, tuple(fields)))


def update_fields(value: JsonObject, expires_at: int | None = None) -> bytes:
    """An unstamped write of the fields of a JSON object and of no others; null deletes one (RFC 7396)."""
    members = parse_object(value)
    if not members:
        raise InvalidValue("an update without fields writes nothing; name at least one field")
    fields = [
        Field(name, None, HERE) if text == _NULL else Field(name, text, HERE, expires_at)
        for name, text in members
    ]
    return _encode_write(FieldsState(None, tuple(fields)))


def delete_fields(names: Sequence[str]) -> bytes:
    """An unstamped write that deletes some fields."""
    if not names:
        raise InvalidValue("no field to delete is named; name at least one, or delete the record")
    return _encode_write(FieldsState(None, tuple(Field(name, None, HERE) for name in sorted(set(names)))))


def parse_object(value: JsonObject) -> list[tuple[str, bytes]]:
    """The members of a JSON object in the order of their names, with their texts unchanged.

    >>> parse_object(b'{"b": [1,  2], "a" :1e2}')
    [('a', b'1e2'), ('b', b'[1,  2]')]
    """
    text = value if isinstance(value, bytes) else _write_object(value)
    try:
        # First: the decoder does not check that the strings of members are UTF-8.
        text.decode()
        members = _OBJECT.decode(text)
        texts = sorted((name, bytes(member)) for name, member in members.items())
        _require_distinct(text, texts)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidValue(f"the value of a record with fields must be a JSON object: {error}") from error
    return texts


def _write_object(value: Mapping[str, object]) -> bytes:
    for name in value:
        if not isinstance(name, str):
            raise InvalidValue(f"the names of fields must be text, not {name!r:.60}")
    try:
        # Not msgspec, which writes null for NaN and infinity, and null deletes a field.
        return json.dumps(dict(value), allow_nan=False, ensure_ascii=False, separators=(",", ":")).encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidValue(f"the value of a record with fields must have a JSON form: {error}") from error


def _require_distinct(text: bytes, members: Sequence[tuple[str, bytes]]) -> None:
    """Raise InvalidValue if an object names a field twice: the decoder has kept only the last.

    A dropped member leaves an extra comma, neither within the others nor between them.  Only if names have
    commas, which can be escaped in several ways, or the count differs, the object is parsed once more.
    """
    between = text.count(b",") - sum([member.count(b",") for _, member in members])
    if between == max(0, len(members) - 1) and not any("," in name for name, _ in members):
        return
    pairs = json.loads(text, object_pairs_hook=list, parse_int=str, parse_float=str)
    (name, times), *_ = Counter(name for name, _ in pairs).most_common(1)
    if times > 1:
        raise InvalidValue(f"field {name!r:.60} is named {times} times in one JSON object; name it once")


def _encode_name(name: str) -> bytes:
    try:
        return name.encode()
    except UnicodeEncodeError as error:
        raise InvalidValue(f"the name of field {name!r:.60} cannot be written as UTF-8") from error


def _encode_write(write: FieldsState) -> bytes:
    """Encode a write; raises if it is too large for a record."""
    if len(write.fields) > FIELDS_MAX:
        raise LimitExceeded(
            f"{len(write.fields):,} fields were given; a record has at most {FIELDS_MAX:,}. "
            "Cut it into several keys"
        )
    for field in write.fields:
        size = len(_encode_name(field.name))
        if size > FIELD_NAME_BYTES_MAX:
            raise InvalidValue(
                f"the name of field {field.name!r:.60} has {size:,} bytes; at most "
                f"{FIELD_NAME_BYTES_MAX:,} are allowed. Keep long texts in values"
            )
    size = sum([len(field.text) for field in write.fields if field.text is not None])
    if size > VALUE_BYTES_MAX:
        raise InvalidValue(
            f"the fields have {size:,} bytes together; a value has at most {VALUE_BYTES_MAX:,}. "
            "Cut it into several keys"
        )
    return encode_state(write)
