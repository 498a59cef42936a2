"""Merges the stored records of a key, so that sites with the same changes have the same records.

In a namespace that merges, a record is a join of states.  A write logs a small state with only the parts that
it wrote, and links send that; applying it means merging it.  A whole record, from a scan or a backup, is
merged in the same way.  The join is commutative, associative and idempotent: neither the order nor the number
of arrivals matters, and a small state adds nothing to a whole one that contains it.

The kind of a state is stored in it, so nothing here needs a namespace's settings.
"""

from functools import lru_cache
from typing import Final, Literal, NamedTuple, TypeAlias

from floodmark.codec.states import (
    DELETE_HERE,
    CounterState,
    FieldsState,
    State,
    decode_state,
    encode_state,
    is_unstamped,
)
from floodmark.merge.counter import merge_counters, stamp_counter
from floodmark.merge.fields import merge_fields, stamp_fields
from floodmark.model.change import Stamp
from floodmark.model.errors import InvalidValue, WrongPolicy
from floodmark.model.version import Version

Kind: TypeAlias = Literal["fields", "counter"]

_SMALL_BYTES_MAX: Final = 64


class Written(NamedTuple):
    """The state of a write that a commit logs, and the record that it stores."""

    logged: bytes
    stored: bytes


def merge_states(current: bytes | None, incoming: bytes, *, own: Stamp | None = None) -> bytes:
    """The join of the record of a key and an incoming one; `current` itself if that adds nothing.

    The origins of the two are ignored.  The join has no origin, unless `own` is given, the stamp of the
    commit that will store it: then a join whose newest stamp is another one carries that as its origin.

    >>> from floodmark.codec.states import live_value
    >>> from floodmark.merge.fields import update_fields
    >>> oslo = stamp_state(update_fields(b'{"city":"Oslo"}'), None, 7, 1)
    >>> rome = stamp_state(update_fields(b'{"zip":"00184"}'), None, 8, 2)
    >>> live_value(merge_states(oslo, rome), 0)
    b'{"city":"Oslo","zip":"00184"}'
    """
    arrived = decode_state(incoming)
    if is_unstamped(arrived):
        raise InvalidValue("a state that waits for its commit was merged; a commit gives it its stamps first")
    if current is None:
        return _encode_at_rest(arrived, own)
    standing = decode_state(current)
    joined = _join(standing, arrived)
    return current if joined == standing else _encode_at_rest(joined, own)


def stamp_state(unstamped: bytes, current: bytes | None, version: Version, site: int) -> bytes:
    """The small state of a write, with the stamp of a commit at a version of a site.

    `current` is the record of the key: a counter continues from its total.
    """
    standing = None if current is None else decode_state(current)
    return encode_state(_stamp(_decode_write(unstamped), standing, version, site))


def write_state(current: bytes | None, unstamped: bytes, version: Version, site: int) -> Written:
    """The result of a write in a commit at a version of a site: `stamp_state` and `merge_states` in one.

    >>> from floodmark.codec.states import live_value
    >>> from floodmark.merge.counter import add_to_counter
    >>> first = write_state(None, add_to_counter(40), 7, 1)
    >>> live_value(write_state(first.stored, add_to_counter(2), 8, 1).stored, 0)
    b'42'
    """
    standing = None if current is None else decode_state(current)
    stamped = _stamp(_decode_write(unstamped), standing, version, site)
    logged = encode_state(stamped)
    if standing is None:
        return Written(logged, logged)
    return Written(logged, _encode_at_rest(_join(standing, stamped), Stamp(version, site)))


def delete_record(kind: Kind) -> bytes:
    """An unstamped write that deletes a record of a kind."""
    return encode_state(FieldsState(DELETE_HERE, ()) if kind == "fields" else CounterState(DELETE_HERE, ()))


def stamps_of(state: State) -> list[Stamp]:
    """Every stamp in a state: its delete, and its fields or entries."""
    stamps = [part.stamp for part in state.parts]
    return stamps if state.deleted is None else [state.deleted, *stamps]


def newest_stamp(state: State) -> Stamp:
    """The highest stamp in a state."""
    return max(stamps_of(state))


def _decode_write(unstamped: bytes) -> State:
    return _decode_small(unstamped) if len(unstamped) <= _SMALL_BYTES_MAX else decode_state(unstamped)


# Most writes to counters add 1, and deletes are all alike.
_decode_small: Final = lru_cache(maxsize=256)(decode_state)


def _join(current: State, incoming: State) -> State:
    if isinstance(current, FieldsState) and isinstance(incoming, FieldsState):
        return merge_fields(current, incoming)
    if isinstance(current, CounterState) and isinstance(incoming, CounterState):
        return merge_counters(current, incoming)
    raise _wrong_kind()


def _stamp(write: State, current: State | None, version: Version, site: int) -> State:
    if not is_unstamped(write):
        raise InvalidValue("a write brought stamps of its own; only a commit gives stamps")
    if isinstance(write, FieldsState):
        return stamp_fields(write, version, site)
    if isinstance(current, FieldsState):
        raise _wrong_kind()
    return stamp_counter(write, current, version, site)


def _encode_at_rest(state: State, own: Stamp | None) -> bytes:
    newest = None if own is None else newest_stamp(state)
    return encode_state(state, None if newest == own else newest)


def _wrong_kind() -> WrongPolicy:
    return WrongPolicy(
        "a counter and a record with fields cannot be merged; "
        "write to a namespace with the right merge policy"
    )
