"""Commits of states, which are merged into the stored records inside the commit.

A stored value that has stamps is a *state* (`codec/states.py`); it says how it is merged, so nothing here
depends on a namespace's settings.  A commit of states stores the merged records and logs the written states:
another site merges these and gets the same records.

A namespace holds states of one kind, or plain records; a write of another kind is refused.
"""

from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import Final

from floodmark.codec.changelog import SINGLE_HEAD_BYTES
from floodmark.codec.ordered import NAMESPACE_BYTES
from floodmark.codec.stamps import NO_STAMP, encode_stamp, find_origins, own_stamp
from floodmark.codec.states import (
    HERE,
    CounterState,
    Field,
    FieldsState,
    State,
    decode_state,
    encode_state,
)
from floodmark.codec.values import (
    COUNTER,
    HAS_ORIGIN,
    HAS_STAMPS,
    IN_BATCH,
    TOMBSTONE,
    decode_value,
    mark_batch,
)
from floodmark.engine import Engine, Row
from floodmark.merge.states import Kind, Written, delete_record, merge_states, newest_stamp, write_state
from floodmark.model.change import Stamp
from floodmark.model.errors import (
    CommitTooLarge,
    Corruption,
    InvalidValue,
    LimitExceeded,
    WrongPolicy,
)
from floodmark.model.limits import FIELDS_MAX, SITE_IDS_MAX, VALUE_BYTES_MAX
from floodmark.model.partition import CommitLimits
from floodmark.model.version import Version
from floodmark.partition.commit.commit import Writes
from floodmark.partition.read.records import require_sound
from floodmark.partition.read.stamps import newest_rows

_flags: Final = itemgetter(-1)

# The record that a write makes from the newest row of a qualified key; None if nothing changes.
Merge = Callable[[bytes, Row | None, bytes], Written | None]


def is_state(stored: bytes) -> bool:
    """Whether a stored value is a state, which is merged and does not replace."""
    return stored[-1] & HAS_STAMPS != 0


def has_states(values: Sequence[bytes]) -> bool:
    """Whether any of the stored values is a state."""
    return any(flags & HAS_STAMPS for flags in set(map(_flags, values)))


def has_origins(values: Sequence[bytes]) -> bool:
    """Whether any of the values is a copy, which carries its origin at another site."""
    return any(value[-1] & HAS_ORIGIN for value in values if value)


def merge_writes(engine: Engine, writes: Writes, limits: CommitLimits, merge: Merge) -> Writes | None:
    """The rows of a commit that merges some writes into the stored records; None if nothing changes.

    The caller is inside the commit, so no other commit can come between.
    """
    keys: list[bytes] = []
    prefixes: list[bytes] = []
    merged: list[Written] = []
    size = 0
    rows = newest_rows(engine, writes.prefixes)
    for key, prefix, value, row in zip(writes.keys, writes.prefixes, writes.values, rows, strict=True):
        written = _merge_one(merge, key, row, value)
        if written is None:
            continue
        keys.append(key)
        prefixes.append(prefix)
        merged.append(written)
        _require_storable(engine, key, written)
        size += len(key) + max(map(len, written))
        if size > limits.bytes_max:
            raise CommitTooLarge(
                f"with what they are merged into, {len(writes.keys):,} pairs make more than the "
                f"{limits.bytes_max:,} bytes that one commit holds at most. Write them in smaller portions",
                size=size,
            )
    if not keys:
        return None
    stored, logged = [each.stored for each in merged], [each.logged for each in merged]
    return Writes(keys, prefixes, stored, size, own=writes.own, loaded=writes.loaded, logged=logged)


def _require_storable(engine: Engine, key: bytes, written: Written) -> None:
    """Refuse a record, or a row of the change log with it alone, that the engine does not take."""
    size = max(len(written.stored), len(key) + len(written.logged) + SINGLE_HEAD_BYTES)
    if size > engine.limits.value_bytes_max and is_state(written.logged):
        raise InvalidValue(
            f"with what it is merged into, {key[NAMESPACE_BYTES:]!r:.60} would have {size:,} bytes; the "
            f"database of this site takes {engine.limits.value_bytes_max:,}. Delete fields of it, or cut it "
            "into several keys",
            key=key[NAMESPACE_BYTES:],
            size=size,
        )


def _merge_one(merge: Merge, key: bytes, row: Row | None, value: bytes) -> Written | None:
    try:
        written = merge(key, row, value)
        return written if written is None else mark_like(value, written)
    except Corruption:
        # Either the stored record or the write is damaged.
        if row is not None:
            require_sound(*row)
        raise


def mark_like(value: bytes, written: Written) -> Written:
    """A written record with the mark of an atomic batch, if the value that makes it has the mark."""
    return Written(*map(mark_batch, written)) if value[-1] & IN_BATCH else written


def deletion_of(stored: bytes) -> bytes:
    """The write that deletes a stored record, of whatever kind it is."""
    return delete_record(kind_of(stored)) if is_state(stored) else TOMBSTONE


# Merges


def write_at(version: Version, site: int) -> Merge:
    """Unstamped states get the stamp of a commit, and are merged."""

    def merge(key: bytes, row: Row | None, value: bytes) -> Written:
        current = _current(key, row, value)
        written = write_state(current, value, version, site)
        _require_size(key, written.stored)
        return written

    return merge


def write_unchanged_at(version: Version, site: int, since: Version) -> Merge:
    """`write_at`, but only for fields of states, and other records, that were not changed after `since`."""
    newest = Stamp(since, SITE_IDS_MAX)
    unchanged = encode_stamp(since, SITE_IDS_MAX)
    write = write_at(version, site)

    def merge(key: bytes, row: Row | None, value: bytes) -> Written | None:
        if not is_state(value):
            return Written(value, value) if stamp_of(row, site) <= unchanged else None
        left = leave_changed(key, _current(key, row, value), value, newest)
        return None if left is None else write(key, row, left)

    return merge


def apply_at(version: Version, site: int) -> Merge:
    """A copy from another site is stored if it wins; a copied state is merged if it adds something.

    Only the engine's limits are checked: every site must accept what another was allowed to write.
    """
    own = Stamp(version, site)

    def merge(key: bytes, row: Row | None, value: bytes) -> Written | None:
        if not is_state(value):
            return Written(value, value) if find_origins([value])[0] > stamp_of(row, site) else None
        current = _current(key, row, value)
        stored = merge_states(current, value, own=own)
        return None if stored is current else Written(value, stored)

    return merge


def newest_version(value: bytes) -> Version:
    """The highest version among the stamps of a state."""
    return newest_stamp(decode_state(value)).version


def kind_of(state: bytes) -> Kind:
    """The policy that a state is merged by."""
    stamps = decode_value(state).stamps
    assert stamps is not None
    return "counter" if stamps[0] == COUNTER else "fields"


def stamp_of(row: Row | None, site: int) -> bytes:
    """The stamp of a stored record; `NO_STAMP` if there is none."""
    if row is None:
        return NO_STAMP
    engine_key, stored = row
    return find_origins([stored])[0] or own_stamp(engine_key, bytes([site]))


def contains(stored: bytes, logged: bytes) -> bool:
    """Whether a stored record is, or was merged with, the value that the change log holds for it."""
    if stored == logged:
        return True
    if not is_state(logged) or not is_state(stored) or kind_of(stored) != kind_of(logged):
        return False
    return merge_states(stored, logged) is stored


def _current(key: bytes, row: Row | None, value: bytes) -> bytes | None:
    """The stored state, which must be of the kind that is written."""
    if row is None:
        return None
    held, written = _name_kind(row[1]), _name_kind(value)
    if held != written:
        raise WrongPolicy(
            f"{key[NAMESPACE_BYTES:]!r:.60} holds {held}, and {written} cannot be merged into it; write to a "
            "namespace with the right merge policy",
            key=key[NAMESPACE_BYTES:],
        )
    return row[1]


def _name_kind(stored: bytes) -> str:
    if not is_state(stored):
        return "a whole value"
    return "a counter" if kind_of(stored) == "counter" else "fields"


# Changed fields, and limits


def leave_changed(key: bytes, current: bytes | None, value: bytes, newest: Stamp) -> bytes | None:
    """The part of an unstamped write of fields that concerns fields not changed after a stamp; None if empty.

    A write that deletes or replaces the record leaves the changed fields, and deletes the others one by one.
    """
    write = decode_state(value)
    if isinstance(write, CounterState):
        raise WrongPolicy(
            f"{key[NAMESPACE_BYTES:]!r:.60} is a counter: what is added again counts again, so a stream that "
            "may be repeated cannot add to it. Write the numbers to a namespace that merges by last_write",
            key=key[NAMESPACE_BYTES:],
        )
    standing = FieldsState(None, ()) if current is None else _fields(decode_state(current))
    if standing.deleted is not None and standing.deleted > newest:
        # The deletion changed all fields at once, also those that no longer exist.
        return None
    changed = {field.name for field in standing.fields if field.stamp > newest}
    if not changed:
        return value
    fields = {field.name: field for field in write.fields if field.name not in changed}
    if write.deleted is not None:
        for field in standing.fields:
            if field.text is not None and field.name not in changed:
                fields.setdefault(field.name, Field(field.name, None, HERE))
    if not fields:
        return None
    return encode_state(FieldsState(None, tuple(fields[name] for name in sorted(fields))))


def _fields(state: State) -> FieldsState:
    assert isinstance(state, FieldsState)
    return state


def _require_size(key: bytes, stored: bytes) -> None:
    """Raise if a write makes a record with too many fields or too many bytes."""
    if len(stored) <= FIELDS_MAX:
        # A field takes more than a byte.
        return
    state = decode_state(stored)
    if isinstance(state, FieldsState) and len(state.fields) > FIELDS_MAX:
        raise LimitExceeded(
            f"the record {key[NAMESPACE_BYTES:]!r:.60} would have {len(state.fields):,} fields, with those "
            f"that were deleted; at most {FIELDS_MAX:,} are allowed. Put it as a whole to forget the deleted "
            "ones, or cut it into several keys",
            key=key[NAMESPACE_BYTES:],
        )
    size = len(decode_value(stored).value)
    if size > VALUE_BYTES_MAX:
        raise InvalidValue(
            f"the value of {key[NAMESPACE_BYTES:]!r:.60} would have {size:,} bytes; at most "
            f"{VALUE_BYTES_MAX:,} are allowed. Cut it into several keys",
            key=key[NAMESPACE_BYTES:],
            size=size,
        )
