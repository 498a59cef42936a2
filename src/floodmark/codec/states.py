"""Records that are merged: the layout of their stamps (`values.py`).

A state of fields is a JSON object, each field with its own stamp.  The body names the fields in order; their
texts are in the user's value, so that a reader gets stored bytes as they are:

    user value:  {"city":"Oslo","tags":[1, 2]}        texts as they were written, no blanks added

    | kind 1 | delete stamp 9 | count 2 | field | field | ...
    field: | bits 1 | name length 2 | name, UTF-8 | [text length 4] | stamp 9 | [expiry 8] |
                bit 0  present: there is a text; without it the field was deleted
                bit 1  it expires (unix seconds)

A state of a counter has the total of each site; the user's value is the sum, in decimal:

    | kind 2 | delete stamp 9 | count 1 | entry | entry | ...
    entry: | site id 1 | version 8 | total 8, signed |        in the order of ids

A delete stamp of zeros means: never deleted.  A stamp is (version 8, site 1); numbers are big-endian.  A
state without a present field, or without an entry, is a tombstone with an empty value.  If all fields expire,
the record expires with the last of them.  Kind 3 instead of 1 means that a field expires before the record
does, so that the value depends on the time of reading (`live_value`).

Each state has exactly one encoding, and only that is decoded: sites that hold equal states hold equal bytes.

A write that is not committed yet is *unstamped*: its stamps are `HERE`, a delete is `DELETE_HERE`, and a
counter has one entry, of site 0, whose total is the number to add.
"""

from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from struct import Struct
from struct import error as StructError
from typing import Final, NamedTuple, TypeAlias, cast

import msgspec

from floodmark.codec.values import (
    COUNTER,
    EXPIRING_FIELDS,
    FIELDS,
    decode_value,
    encode_value,
)
from floodmark.model.change import Stamp
from floodmark.model.errors import Corruption, LimitExceeded
from floodmark.model.record import Record
from floodmark.model.version import Version

HERE: Final = Stamp(0, 0)
DELETE_HERE: Final = Stamp(0, 255)

_PRESENT: Final = 1 << 0
_EXPIRES: Final = 1 << 1

_FIELDS_HEAD: Final = Struct(">BQBH")
_COUNTER_HEAD: Final = Struct(">BQBB")
_NAME: Final = Struct(">BH")
_ABSENT: Final = Struct(">QB")
_LASTING: Final = Struct(">IQB")
_EXPIRING: Final = Struct(">IQBQ")
_ENTRY: Final = Struct(">BQq")
_EXPIRY_BYTES: Final = _EXPIRING.size - _LASTING.size

_NAMES_REMEMBERED: Final = 1024
_FIELDS_HELD_MAX: Final = (1 << 16) - 1


class Field(msgspec.Struct, frozen=True, gc=False):
    """One field, as it was last written: its JSON text, or None if it was deleted."""

    name: str
    text: bytes | None
    stamp: Stamp
    expires_at: int | None = None

    def is_live_at(self, physical_ms: int) -> bool:
        """Whether a reader at this time finds it."""
        return self.text is not None and (self.expires_at is None or self.expires_at * 1000 > physical_ms)


class FieldsState(msgspec.Struct, frozen=True):
    """A record by its fields, in the order of their names.  None of them is older than `deleted`."""

    deleted: Stamp | None
    fields: tuple[Field, ...]

    @property
    def parts(self) -> tuple[Field, ...]:
        """The fields."""
        return self.fields


class CounterEntry(msgspec.Struct, frozen=True, gc=False):
    """The total that a site has added to a counter, up to a version of that site."""

    site: int
    version: Version
    total: int

    @property
    def name(self) -> int:
        """The site, which names the entry among the parts of its state."""
        return self.site

    @property
    def stamp(self) -> Stamp:
        """The stamp of the site's last addition."""
        return Stamp(self.version, self.site)


class CounterState(msgspec.Struct, frozen=True):
    """A counter by its sites, in the order of their ids.  The stamp of each entry is above `deleted`."""

    deleted: Stamp | None
    entries: tuple[CounterEntry, ...]

    @property
    def parts(self) -> tuple[CounterEntry, ...]:
        """The entries."""
        return self.entries


State: TypeAlias = FieldsState | CounterState
Part: TypeAlias = Field | CounterEntry


def choose_parts(
    state: State, parts: Iterable[Part], is_kept: Callable[[Stamp], bool] = lambda _: True
) -> State:
    """A state of the same kind, with those of the parts, and its delete, whose stamps are kept."""
    deleted = state.deleted if state.deleted is not None and is_kept(state.deleted) else None
    kept = tuple(part for part in parts if is_kept(part.stamp))
    if isinstance(state, FieldsState):
        return FieldsState(deleted, cast(tuple[Field, ...], kept))
    return CounterState(deleted, cast(tuple[CounterEntry, ...], kept))


def is_unstamped(state: State) -> bool:
    """Whether a state is a write that waits for its commit."""
    return not (state.deleted or state.parts[0].stamp).version


def encode_state(state: State, origin: Stamp | None = None) -> bytes:
    """The whole stored value of a state.

    >>> state = FieldsState(None, (Field("city", b'"Oslo"', Stamp(7, 1)), Field("zip", None, Stamp(8, 1))))
    >>> decode_value(encode_state(state)).value
    b'{"city":"Oslo"}'
    >>> decode_value(encode_state(CounterState(None, (CounterEntry(1, 7, 40), CounterEntry(2, 5, 2))))).value
    b'42'
    """
    if isinstance(state, FieldsState):
        return _encode_fields(state, origin)
    return _encode_counter(state, origin)


def decode_state(stored: bytes) -> State:
    """The state of a stored value, without its origin; raises Corruption.

    >>> decode_state(encode_state(CounterState(Stamp(3, 2), (CounterEntry(1, 7, -4),)), Stamp(7, 1)))
    CounterState(deleted=Stamp(version=3, site=2), entries=(CounterEntry(site=1, version=7, total=-4),))
    """
    record = decode_value(stored)
    if record.stamps is None:
        raise Corruption("a stored record that is to be merged carries no stamps")
    try:
        if record.stamps[0] == COUNTER:
            return _decode_counter(record, record.stamps)
        return _decode_fields(record, record.stamps)
    except (StructError, UnicodeDecodeError) as error:
        raise Corruption(f"the stamps of a stored record cannot be read: {error}") from error


def remembers_deletes(body: bytes) -> bool:
    """Whether the stamps of a record hold a delete, or a field that expires.  A put is no delete here.

    >>> put = FieldsState(Stamp(7, 1), (Field("city", b'"Oslo"', Stamp(7, 1)),))
    >>> deleted = FieldsState(None, (*put.fields, Field("zip", None, Stamp(8, 1))))
    >>> [remembers_deletes(decode_value(encode_state(state)).stamps or b"") for state in (put, deleted)]
    [False, True]
    """
    if body[0] == COUNTER:
        return any(body[1 : 1 + _ABSENT.size])
    if body[0] == EXPIRING_FIELDS:
        return True
    *_, count = _FIELDS_HEAD.unpack_from(body)
    deleted = body[1 : 1 + _ABSENT.size]
    is_put = not any(deleted)
    place = _FIELDS_HEAD.size
    for _ in range(count):
        bits, length = _NAME.unpack_from(body, place)
        if not bits:
            return True
        place += _NAME.size + length + (_EXPIRING if bits & _EXPIRES else _LASTING).size
        end = place - _EXPIRY_BYTES if bits & _EXPIRES else place
        is_put = is_put or body[end - _ABSENT.size : end] == deleted
    return not is_put


def live_value(stored: bytes, now_ms: int) -> bytes | None:
    """The value of any stored record, merged or not, at a time; None if the record is dead then.

    >>> fields = Field("brief", b"1", Stamp(7, 1), expires_at=5), Field("lasting", b"2", Stamp(7, 1))
    >>> stored = encode_state(FieldsState(None, fields))
    >>> live_value(stored, 4_999), live_value(stored, 5_000)
    (b'{"brief":1,"lasting":2}', b'{"lasting":2}')
    """
    record = decode_value(stored)
    return None if record.is_dead_at(now_ms) else render_value(record, now_ms)


def render_value(record: Record, now_ms: int) -> bytes:
    """The value of a record that is alive at a time, without fields that have expired."""
    if record.stamps is None or record.stamps[0] != EXPIRING_FIELDS:
        return record.value
    state = decode_state(encode_value(record.value, record.expires_at, record.deleted, stamps=record.stamps))
    assert isinstance(state, FieldsState)
    live = [field for field in state.fields if field.is_live_at(now_ms)]
    return _render([_encode_name(field.name).member + field.text for field in live if field.text is not None])


def _encode_fields(state: FieldsState, origin: Stamp | None) -> bytes:
    if len(state.fields) > _FIELDS_HELD_MAX:
        # Only a merge of many sites' fields can have this many.
        raise LimitExceeded(
            f"a record would have {len(state.fields):,} fields, and can hold {_FIELDS_HELD_MAX:,} at most. "
            "Put it as a whole to forget the deleted ones"
        )
    expires_at, kind = _lifetime(state.fields)
    deleted = state.deleted or HERE
    parts = [_FIELDS_HEAD.pack(kind, deleted.version, deleted.site, len(state.fields))]
    members: list[bytes] = []
    for field in state.fields:
        (_, name, member), text, stamp = _encode_name(field.name), field.text, field.stamp
        if text is None:
            parts += _NAME.pack(0, len(name)), name, _ABSENT.pack(stamp.version, stamp.site)
            continue
        members.append(member + text)
        if field.expires_at is None:
            tail = _LASTING.pack(len(text), stamp.version, stamp.site)
            parts += _NAME.pack(_PRESENT, len(name)), name, tail
        else:
            tail = _EXPIRING.pack(len(text), stamp.version, stamp.site, field.expires_at)
            parts += _NAME.pack(_PRESENT | _EXPIRES, len(name)), name, tail
    value = _render(members)
    return encode_value(value, expires_at, not members, origin=origin, stamps=b"".join(parts))


def _render(members: Sequence[bytes]) -> bytes:
    """The JSON object of some members; empty if there is none."""
    return b"{" + b",".join(members) + b"}" if members else b""


def _lifetime(fields: Sequence[Field]) -> tuple[int | None, int]:
    """The expiry of a state with these fields, and its kind."""
    known = [field.expires_at for field in fields if field.expires_at is not None]
    if not known:
        return None, FIELDS
    all_expire = all(field.expires_at is not None for field in fields if field.text is not None)
    last = max(known) if all_expire else None
    return last, FIELDS if last == min(known) else EXPIRING_FIELDS


def _decode_fields(record: Record, body: bytes) -> FieldsState:
    kind, version, site, count = _FIELDS_HEAD.unpack_from(body)
    deleted = Stamp(version, site) if version or site else None
    fields: list[Field] = []
    members: list[bytes] = []
    place, value, read = _FIELDS_HEAD.size, record.value, len(b"{")
    for _ in range(count):
        bits, length = _NAME.unpack_from(body, place)
        place += _NAME.size + length
        name, _, member = _decode_name(body[place - length : place])
        size = text = expires_at = None
        if bits == _PRESENT:
            size, version, site = _LASTING.unpack_from(body, place)
            place += _LASTING.size
        elif bits == _PRESENT | _EXPIRES:
            size, version, site, expires_at = _EXPIRING.unpack_from(body, place)
            place += _EXPIRING.size
        elif bits:
            raise Corruption(f"field {name!r} of a stored record has unknown bits {bits:#04x}")
        else:
            version, site = _ABSENT.unpack_from(body, place)
            place += _ABSENT.size
        if size is not None:
            begin = read + len(member)
            text = value[begin : begin + size]
            members.append(member + text)
            read = begin + size + len(b",")
        fields.append(Field(name, text, Stamp(version, site), expires_at))
    names = [field.name for field in fields]
    fits = (
        place == len(body)
        and value == _render(members)
        and record.deleted == (not members)
        and names == sorted(set(names))
        and (record.expires_at, kind) == _lifetime(fields)
    )
    if not fits or not _agree(deleted, [field.stamp for field in fields]):
        raise _unfit("the fields of a stored record and their stamps")
    return FieldsState(deleted, tuple(fields))


def _encode_counter(state: CounterState, origin: Stamp | None) -> bytes:
    deleted = state.deleted or HERE
    parts = [_COUNTER_HEAD.pack(COUNTER, deleted.version, deleted.site, len(state.entries))]
    parts += [_ENTRY.pack(entry.site, entry.version, entry.total) for entry in state.entries]
    value = _sum(state.entries)
    return encode_value(value, None, not value, origin=origin, stamps=b"".join(parts))


def _sum(entries: Sequence[CounterEntry]) -> bytes:
    """The value of a counter; empty if no site counts."""
    return b"%d" % sum([entry.total for entry in entries]) if entries else b""


def _decode_counter(record: Record, body: bytes) -> CounterState:
    _, version, site, count = _COUNTER_HEAD.unpack_from(body)
    deleted = Stamp(version, site) if version or site else None
    entries = tuple([CounterEntry(*entry) for entry in _ENTRY.iter_unpack(body[_COUNTER_HEAD.size :])])
    sites = [entry.site for entry in entries]
    stamps = [Stamp(entry.version, entry.site) for entry in entries]
    fits = (
        len(entries) == count
        and record.value == _sum(entries)
        and record.deleted == (not entries)
        and record.expires_at is None
        and sites == sorted(set(sites))
        # Unlike a field, an entry with the stamp of the delete is removed by it.
        and (deleted is None or not entries or deleted not in (DELETE_HERE, *stamps))
    )
    if not fits or not _agree(deleted, stamps):
        raise _unfit("the entries of a stored counter and its value")
    return CounterState(deleted, entries)


def _agree(deleted: Stamp | None, stamps: Sequence[Stamp]) -> bool:
    """Whether all stamps are those of commits and none is below the delete; or all wait for their commit."""
    if not stamps:
        return deleted == DELETE_HERE or (deleted is not None and _is_of_commit(deleted))
    oldest = min(stamps)
    if oldest == HERE:
        return deleted in (None, DELETE_HERE) and stamps.count(HERE) == len(stamps)
    if deleted is not None and not (_is_of_commit(deleted) and deleted <= oldest):
        return False
    return _is_of_commit(oldest) and 0 not in [stamp.site for stamp in stamps]


def _is_of_commit(stamp: Stamp) -> bool:
    return stamp.version > 0 and stamp.site > 0


def _unfit(what: str) -> Corruption:
    return Corruption(f"{what} do not fit together")


class _Name(NamedTuple):
    """The name of a field: as text, as UTF-8, and as the JSON that precedes its value."""

    text: str
    encoded: bytes
    member: bytes


# The records of a namespace have few distinct names, which recur.
@lru_cache(maxsize=_NAMES_REMEMBERED)
def _encode_name(name: str) -> _Name:
    return _Name(name, name.encode(), msgspec.json.encode(name) + b":")


@lru_cache(maxsize=_NAMES_REMEMBERED)
def _decode_name(encoded: bytes) -> _Name:
    return _encode_name(encoded.decode())
