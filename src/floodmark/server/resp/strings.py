"""Commands of values, counters and their times to live."""

from collections.abc import Iterator, Mapping
from math import ceil
from typing import Final

from floodmark.model.access import Role
from floodmark.model.limits import MIB, TTL_MAX
from floodmark.server.resp.records import CommandRecords, Held, KeyPlace, require_plain
from floodmark.server.resp.table import (
    SYNTAX,
    TABLE,
    WRONG_TYPE,
    Arguments,
    CommandError,
    integer,
    word,
)
from floodmark.wire.resp import OK, Simple

ALL: Final = (1, -1, 1)
PAIRS: Final = (1, -1, 2)
# Values of one reply.
REPLY_BYTES_MAX: Final = 64 * MIB

SECONDS: Final = "differs: a time to live ends with a whole second, up to 999 ms later than asked for"
_TTL_SECONDS_MAX: Final = int(TTL_MAX.total_seconds())


def _invalid_expiry(command: str) -> CommandError:
    return CommandError(f"ERR invalid expire time in '{command}' command")


def moment_ms(name: bytes, number: int, now_ms: int) -> int:
    """The moment that an option or a command sets: a leading P means milliseconds, a final AT unix time."""
    return (number if name.startswith(b"P") else 1000 * number) + (0 if name.endswith(b"AT") else now_ms)


def expiry_of(option: bytes, argument: bytes, now_ms: int, command: str) -> int:
    """The unix second of an option EX, PX, EXAT or PXAT; rounded up, so that nothing expires early."""
    number = integer(argument)
    second = ceil(moment_ms(option, number, now_ms) / 1000)
    if number <= 0 or second > now_ms // 1000 + _TTL_SECONDS_MAX:
        raise _invalid_expiry(command)
    return second


EXPIRY_OPTIONS: Final = (b"EX", b"PX", b"EXAT", b"PXAT")
# Options without a number, and the kind of each.
SET_OPTIONS: Final = {b"NX": b"IF", b"XX": b"IF", b"GET": b"GET", b"KEEPTTL": b"TTL"}
GETEX_OPTIONS: Final = {b"PERSIST": b"TTL"}


# Reads


@TABLE.read("GET", 2)
def get(records: CommandRecords, arguments: Arguments) -> object:
    return records.get(arguments[1])


@TABLE.read("MGET", -2, "differs: at most 64 MiB of values in one reply", keys=ALL)
def get_many(records: CommandRecords, arguments: Arguments) -> object:
    values: list[bytes | None] = []
    size = 0
    for value in records.get_many(arguments[1:], REPLY_BYTES_MAX):
        size += 0 if value is None else len(value)
        if size > REPLY_BYTES_MAX:
            raise CommandError("ERR the values have more than 64 MiB together; ask for fewer keys at a time")
        values.append(value)
    return values


@TABLE.read("EXISTS", -2, keys=ALL)
def exists(records: CommandRecords, arguments: Arguments) -> object:
    return sum(value is not None for value in records.get_many(arguments[1:], REPLY_BYTES_MAX))


@TABLE.read("STRLEN", 2)
def length(records: CommandRecords, arguments: Arguments) -> object:
    return len(records.get(arguments[1]) or b"")


@TABLE.read("TYPE", 2, "differs: a record of a namespace of fields is a hash, all others are strings")
def kind(records: CommandRecords, arguments: Arguments) -> object:
    place = records.locate(arguments[1], Role.READ)
    if records.find_at(place) is None:
        return Simple("none")
    return Simple("hash" if place.space.has_fields else "string")


@TABLE.read("EXPIRETIME", 2, SECONDS)
@TABLE.read("PTTL", 2, SECONDS)
@TABLE.read("TTL", 2, SECONDS)
def time_to_live(records: CommandRecords, arguments: Arguments) -> object:
    held = records.find(arguments[1])
    if held is None or held.expires_at is None:
        return -2 if held is None else -1
    name = word(arguments[0])
    if name == b"EXPIRETIME":
        return held.expires_at
    left_ms = max(0, held.expires_at * 1000 - records.now_ms())
    return left_ms if name == b"PTTL" else left_ms // 1000


# Writes


class SetOptions:
    """The options of SET and GETEX, as Redis parses them: an option may come again, and numbers come last."""

    def __init__(self, arguments: Arguments, others: Mapping[bytes, bytes]) -> None:
        """`others` has the kind of each option without a number; only one option of a kind may be given."""
        self._expiry: tuple[bytes, bytes] | None = None
        # The given option of each kind.
        self.given: dict[bytes, bytes] = {}
        rest: Iterator[bytes] = iter(arguments)
        for argument in rest:
            option = word(argument)
            number = next(rest, None) if option in EXPIRY_OPTIONS else b""
            kind = others.get(option, b"TTL" if option in EXPIRY_OPTIONS else None)
            if number is None or kind is None or self.given.setdefault(kind, option) != option:
                raise CommandError(SYNTAX)
            if option in EXPIRY_OPTIONS:
                self._expiry = option, number

    def expires_at(self, now_ms: int, command: str) -> int | None:
        """The second in which the value expires, if an option sets it."""
        return None if self._expiry is None else expiry_of(*self._expiry, now_ms, command)


@TABLE.write(
    "SET", -3, f"{SECONDS}. In a namespace of fields the value is a JSON object; counters are refused"
)
def set_value(records: CommandRecords, arguments: Arguments) -> object:
    place = records.locate(arguments[1], Role.WRITE)
    if len(arguments) == 3:
        records.put_new(place, arguments[2])
        return OK
    options = SetOptions(arguments[3:], SET_OPTIONS)
    expires_at = options.expires_at(records.now_ms(), "set")
    given = options.given
    held = records.find_at(place)
    before = None if held is None else held.value
    gets = b"GET" in given
    if b"IF" in given and (given[b"IF"] == b"XX") != (held is not None):
        return before if gets else None
    if expires_at is not None:
        records.put(place, arguments[2], expires_at)
    elif b"TTL" in given:
        records.put(place, arguments[2], None if held is None else held.expires_at)
    else:
        records.put_new(place, arguments[2])
    return before if gets else OK


@TABLE.write("SETNX", 3)
def set_new(records: CommandRecords, arguments: Arguments) -> object:
    return int(set_value(records, [*arguments, b"NX"]) is not None)


@TABLE.write("PSETEX", 4, SECONDS)
@TABLE.write("SETEX", 4, SECONDS)
def set_expiring(records: CommandRecords, arguments: Arguments) -> object:
    name, key, number, value = arguments
    expires_at = expiry_of(word(name).replace(b"SET", b""), number, records.now_ms(), name.decode().lower())
    records.put(records.locate(key, Role.WRITE), value, expires_at)
    return OK


@TABLE.write("GETSET", 3)
def get_and_set(records: CommandRecords, arguments: Arguments) -> object:
    return set_value(records, [*arguments, b"GET"])


@TABLE.write("MSET", -3, keys=PAIRS)
def set_many(records: CommandRecords, arguments: Arguments) -> object:
    for key, value in _pairs(arguments):
        records.put_new(records.locate(key, Role.WRITE), value)
    return OK


@TABLE.write("MSETNX", -3, keys=PAIRS)
def set_many_new(records: CommandRecords, arguments: Arguments) -> object:
    pairs = _pairs(arguments)
    if any(records.get(key) is not None for key, _ in pairs):
        return 0
    set_many(records, arguments)
    return 1


def _pairs(arguments: Arguments) -> list[tuple[bytes, bytes]]:
    if len(arguments) % 2 == 0:
        raise CommandError(f"ERR wrong number of arguments for '{arguments[0].decode().lower()}' command")
    # Of a key that comes twice, the last value counts.
    return [*dict(zip(arguments[1::2], arguments[2::2], strict=True)).items()]


DELETES: Final = (
    "same as Redis; a counter keeps all that another site has added if that site adds again before it "
    "hears of the deletion"
)


@TABLE.write("UNLINK", -2, DELETES, keys=ALL)
@TABLE.write("DEL", -2, DELETES, keys=ALL)
def delete(records: CommandRecords, arguments: Arguments) -> object:
    deleted = 0
    for key in arguments[1:]:
        place = records.locate(key, Role.WRITE)
        if records.find_at(place) is not None:
            records.delete(place)
            deleted += 1
    return deleted


@TABLE.write("GETDEL", 2, DELETES)
def get_and_delete(records: CommandRecords, arguments: Arguments) -> object:
    place = records.locate(arguments[1], Role.WRITE)
    held = records.find_at(place)
    if held is None:
        return None
    records.delete(place)
    return held.value


@TABLE.write("GETEX", -2, SECONDS)
def get_and_expire(records: CommandRecords, arguments: Arguments) -> object:
    place = records.locate(arguments[1], Role.WRITE)
    options = SetOptions(arguments[2:], GETEX_OPTIONS)
    held = records.find_at(place)
    if held is None:
        return None
    expires_at = options.expires_at(records.now_ms(), "getex")
    if options.given:
        _set_expiry(records, require_plain(place), held, expires_at)
    return held.value


@TABLE.write("APPEND", 3)
def append(records: CommandRecords, arguments: Arguments) -> object:
    place = require_plain(records.locate(arguments[1], Role.WRITE))
    held = records.find_at(place)
    if held is None:
        records.put_new(place, arguments[2])
        return len(arguments[2])
    value = held.value + arguments[2]
    records.put(place, value, held.expires_at)
    return len(value)


# Times to live


def _set_expiry(records: CommandRecords, place: KeyPlace, held: Held, expires_at: int | None) -> None:
    if expires_at is not None and expires_at * 1000 <= records.now_ms():
        records.delete(place)
    else:
        records.put(place, held.value, expires_at)


EXPIRES: Final = f"{SECONDS}. In namespaces of fields and counters it is refused"


@TABLE.write("PEXPIREAT", -3, EXPIRES)
@TABLE.write("EXPIREAT", -3, EXPIRES)
@TABLE.write("PEXPIRE", -3, EXPIRES)
@TABLE.write("EXPIRE", -3, EXPIRES)
def expire(records: CommandRecords, arguments: Arguments) -> object:
    name = word(arguments[0])
    place = require_plain(records.locate(arguments[1], Role.WRITE))
    conditions = {word(option): option for option in reversed(arguments[3:])}
    for option, given in reversed(conditions.items()):
        if option not in (b"NX", b"XX", b"GT", b"LT"):
            raise CommandError(f"ERR Unsupported option {given.decode(errors='replace')[:64]}")
    if b"NX" in conditions and len(conditions) > 1:
        raise CommandError("ERR NX and XX, GT or LT options at the same time are not compatible")
    if b"GT" in conditions and b"LT" in conditions:
        raise CommandError("ERR GT and LT options at the same time are not compatible")
    number, now_ms = integer(arguments[2]), records.now_ms()
    at_ms = moment_ms(name, number, now_ms)
    if moment_ms(name, number, 0) < -(1 << 63) or at_ms > now_ms + _TTL_SECONDS_MAX * 1000:
        raise _invalid_expiry(name.decode().lower())
    held = records.find_at(place)
    if held is None:
        return 0
    present, wanted = held.expires_at, max(0, ceil(at_ms / 1000))
    if (
        (b"NX" in conditions and present is not None)
        or (b"XX" in conditions and present is None)
        or (b"GT" in conditions and (present is None or wanted <= present))
        or (b"LT" in conditions and present is not None and wanted >= present)
    ):
        return 0
    # A moment in the past deletes the record now, and not at the end of the second.
    _set_expiry(records, place, held, wanted if at_ms > now_ms else 0)
    return 1


@TABLE.write("PERSIST", 2)
def persist(records: CommandRecords, arguments: Arguments) -> object:
    place = require_plain(records.locate(arguments[1], Role.WRITE))
    held = records.find_at(place)
    if held is None or held.expires_at is None:
        return 0
    records.put(place, held.value, None)
    return 1


# Counters


COUNTS: Final = (
    "same as Redis; in a namespace of counters it adds, so that additions at several sites all count"
)


@TABLE.write("DECRBY", 3, COUNTS)
@TABLE.write("INCRBY", 3, COUNTS)
@TABLE.write("DECR", 2, COUNTS)
@TABLE.write("INCR", 2, COUNTS)
def add(records: CommandRecords, arguments: Arguments) -> object:
    number = integer(arguments[2]) if len(arguments) > 2 else 1
    if word(arguments[0]).startswith(b"DECR"):
        if number == -(1 << 63):
            raise CommandError("ERR decrement would overflow")
        number = -number
    place = records.locate(arguments[1], Role.WRITE)
    if place.space.has_fields:
        raise CommandError(WRONG_TYPE)
    held = records.find_at(place)
    total = number if held is None else integer(held.value) + number
    if not -(1 << 63) <= total < 1 << 63:
        raise CommandError("ERR increment or decrement would overflow")
    expires_at = None if held is None else held.expires_at
    if place.space.is_counter:
        records.merge(place, place.space.policy.add(place.key, number), Held(b"%d" % total, expires_at))
    elif held is None:
        records.put_new(place, b"%d" % total)
    else:
        records.put(place, b"%d" % total, expires_at)
    return total


# Floodmark's own commands


@TABLE.write(
    "FM.CAS", 4, "ours: `FM.CAS key expected value` sets a value if the present one is as expected; 1 or 0"
)
def compare_and_set(records: CommandRecords, arguments: Arguments) -> object:
    _, key, expected, value = arguments
    place = records.locate(key, Role.WRITE)
    held = records.find_at(place)
    if held is None or held.value != expected:
        return 0
    records.put_new(place, value)
    return 1
