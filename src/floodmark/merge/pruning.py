"""What a record need not remember: deletes, once nothing that they hide can come any more.

A state remembers which of its fields were deleted, and when the whole record was, because something older may
still arrive from another site.  When every site has everything that was written before such a stamp, it hides
nothing, and can go (the rule is that of a tombstone, `replication/settled.py`).  What is left has the same
value, and merging it with a copy that still remembers gives that copy back.

The stamp of a put stays: it is that of the fields which were put, and takes no room of its own.
"""

from typing import NamedTuple

from floodmark.codec.states import (
    CounterState,
    FieldsState,
    State,
    decode_state,
    encode_state,
    remembers_deletes,
)
from floodmark.codec.values import decode_value
from floodmark.merge.states import newest_stamp, stamps_of
from floodmark.model.version import Version


class Pruned(NamedTuple):
    """A record as it is stored from now on, and the highest version among the stamps that went."""

    stored: bytes
    newest: Version


def prune_record(stored: bytes, settled: Version, now_ms: int) -> Pruned | None:
    """A stored record without the deletes that are not needed; None if it stays as it is.

    Deleted at or below `settled`, or expired before `now_ms` under such a stamp.  A record that is dead as a
    whole stays: it goes as a whole.

    >>> from floodmark.merge.states import delete_fields, merge_states, put_fields, stamp_state
    >>> put = stamp_state(put_fields(b'{"city":"Oslo","zip":"0150"}'), None, 7, 1)
    >>> deleted = merge_states(put, stamp_state(delete_fields(["zip"]), None, 8, 2))
    >>> prune_record(deleted, 7, 0) is None
    True
    >>> pruned = prune_record(deleted, 8, 0)
    >>> [field.name for field in decode_state(pruned.stored).fields], pruned.newest
    (['city'], 8)
    """
    record = decode_value(stored)
    if record.stamps is None or record.is_dead_at(now_ms) or not remembers_deletes(record.stamps):
        return None
    state = decode_state(stored)
    pruned = prune_state(state, settled, now_ms)
    gone = {*stamps_of(state)} - {*stamps_of(pruned)}
    if not gone:
        return None
    newest = newest_stamp(pruned)
    # A record bears the newest of its stamps, unless that is the one of its own commit.
    origin = record.origin if newest == newest_stamp(state) else newest
    return Pruned(encode_state(pruned, origin), max(stamp.version for stamp in gone))


def prune_state(state: State, settled: Version, now_ms: int) -> State:
    """A state that is alive, without the deletes that are not needed."""
    if isinstance(state, CounterState):
        is_needed = state.deleted is not None and state.deleted.version > settled
        return CounterState(state.deleted if is_needed else None, state.entries)
    fields = tuple(
        field for field in state.fields if field.stamp.version > settled or field.is_live_at(now_ms)
    )
    deleted = state.deleted
    if deleted is not None and deleted.version <= settled:
        # That of a put is needed no longer than what was put.
        deleted = deleted if deleted in [field.stamp for field in fields] else None
    return FieldsState(deleted, fields)
