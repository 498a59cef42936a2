"""Commands of records of fields.  A value is a JSON string; other JSON values are shown as their text."""

from typing import Any

import msgspec

from floodmark.model.access import Role
from floodmark.server.resp.records import CommandRecords, Held, KeyPlace, require_fields
from floodmark.server.resp.table import TABLE, Arguments, CommandError, integer, text

FIELDS = "differs: in a namespace of fields only; names and values are UTF-8 text"


def _find(records: CommandRecords, key: bytes, role: Role) -> tuple[KeyPlace, dict[str, Any], Held | None]:
    place = require_fields(records.locate(key, role))
    held = records.find_at(place)
    return place, {} if held is None else msgspec.json.decode(held.value), held


def _show(value: object) -> bytes:
    return value.encode() if isinstance(value, str) else msgspec.json.encode(value)


def _update(records: CommandRecords, place: KeyPlace, fields: dict[str, Any], update: dict[str, Any]) -> None:
    """Write some fields; None deletes one."""
    after = {name: value for name, value in (fields | update).items() if value is not None}
    state = place.space.policy.update(place.key, update, place.space.expire(None))
    records.merge(place, state, Held(msgspec.json.encode(after), None) if after else None)


@TABLE.write("HSET", -4, FIELDS)
def set_fields(records: CommandRecords, arguments: Arguments) -> object:
    if len(arguments) % 2:
        raise CommandError("ERR wrong number of arguments for 'hset' command")
    place, fields, _ = _find(records, arguments[1], Role.WRITE)
    update = {
        text(name, "the name of a field"): text(value, "the value of a field")
        for name, value in zip(arguments[2::2], arguments[3::2], strict=True)
    }
    _update(records, place, fields, update)
    return len(update.keys() - fields.keys())


@TABLE.write("HDEL", -3, FIELDS)
def delete_fields(records: CommandRecords, arguments: Arguments) -> object:
    place, fields, _ = _find(records, arguments[1], Role.WRITE)
    gone = fields.keys() & {text(name, "the name of a field") for name in arguments[2:]}
    if gone:
        _update(records, place, fields, dict.fromkeys(gone))
    return len(gone)


@TABLE.write("HINCRBY", 4, FIELDS)
def increment_field(records: CommandRecords, arguments: Arguments) -> object:
    number = integer(arguments[3])
    place, fields, _ = _find(records, arguments[1], Role.WRITE)
    name = text(arguments[2], "the name of a field")
    total = (
        integer(_show(fields[name]), "ERR hash value is not an integer") + number
        if name in fields
        else number
    )
    if not -(1 << 63) <= total < 1 << 63:
        raise CommandError("ERR increment or decrement would overflow")
    _update(records, place, fields, {name: total})
    return total


def _get(fields: dict[str, Any], name: bytes) -> bytes | None:
    key = text(name, "the name of a field")
    return _show(fields[key]) if key in fields else None


@TABLE.read("HGET", 3, FIELDS)
def get_field(records: CommandRecords, arguments: Arguments) -> object:
    return _get(_find(records, arguments[1], Role.READ)[1], arguments[2])


@TABLE.read("HMGET", -3, FIELDS)
def get_fields(records: CommandRecords, arguments: Arguments) -> object:
    fields = _find(records, arguments[1], Role.READ)[1]
    return [_get(fields, name) for name in arguments[2:]]


@TABLE.read("HGETALL", 2, f"{FIELDS}; fields come in the order of their names")
def get_all_fields(records: CommandRecords, arguments: Arguments) -> object:
    return {name.encode(): _show(value) for name, value in _find(records, arguments[1], Role.READ)[1].items()}


@TABLE.read("HEXISTS", 3, FIELDS)
def has_field(records: CommandRecords, arguments: Arguments) -> object:
    return int(_get(_find(records, arguments[1], Role.READ)[1], arguments[2]) is not None)


@TABLE.read("HLEN", 2, FIELDS)
def count_fields(records: CommandRecords, arguments: Arguments) -> object:
    return len(_find(records, arguments[1], Role.READ)[1])
