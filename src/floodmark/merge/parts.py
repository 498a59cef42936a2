"""Cuts records by the stamps of their parts: the parts of one site, and deletes that are not needed any more.

A plain record has one stamp, and belongs to one site as a whole.  A state has parts of several sites, each
with its own stamp, and can be split into two states whose join it is.  Each of the two can be merged on its
own, since it contains a subset of the parts.

A state remembers deletes, because an older change may still arrive from another site.  When every site has
all changes below the stamp of a delete, the delete hides nothing and can be removed (the rule is that of a
tombstone, `settled_version`).  The value stays the same, and merging it with a copy that still has the delete
gives that copy back.
"""

from typing import NamedTuple

from floodmark.codec.states import (
    CounterState,
    FieldsState,
    State,
    choose_parts,
    decode_state,
    encode_state,
    remembers_deletes,
)
from floodmark.codec.values import decode_value
from floodmark.merge.states import newest_stamp, stamps_of
from floodmark.model.change import Stamp
from floodmark.model.errors import Corruption
from floodmark.model.version import Version


class Split(NamedTuple):
    """The two parts of a stored record, each with its origin; None if empty.  `part` is that of the site."""

    part: bytes | None
    rest: bytes | None


class Pruned(NamedTuple):
    """A pruned record, and the highest version among the stamps that were removed."""

    stored: bytes
    newest: Version


def split_record(stored: bytes, site: int, above: Version) -> Split:
    """Split a stored record, which carries its origin: what a site wrote above a version, and the rest.

    >>> from floodmark.merge.fields import update_fields
    >>> from floodmark.merge.states import merge_states, stamp_state
    >>> oslo = stamp_state(update_fields(b'{"city":"Oslo"}'), None, 7, 1)
    >>> rome = stamp_state(update_fields(b'{"zip":"00184"}'), None, 8, 2)
    >>> both = encode_state(decode_state(merge_states(oslo, rome)), Stamp(8, 2))
    >>> part, rest = split_record(both, 1, 0)
    >>> decode_value(part).value, decode_value(part).origin, decode_value(rest).value
    (b'{"city":"Oslo"}', Stamp(version=7, site=1), b'{"zip":"00184"}')
    >>> split_record(both, 1, 7) == Split(None, both)
    True
    """

    def is_wanted(stamp: Stamp) -> bool:
        return stamp.site == site and stamp.version > above

    record = decode_value(stored)
    if record.origin is None:
        raise Corruption("a record that is to be split carries no origin")
    if record.stamps is None:
        return Split(stored, None) if is_wanted(record.origin) else Split(None, stored)
    state = decode_state(stored)
    part = choose_parts(state, state.parts, is_wanted)
    rest = choose_parts(state, state.parts, lambda stamp: not is_wanted(stamp))
    return Split(_encode(part), _encode(rest)) if stamps_of(part) else Split(None, stored)


def _encode(state: State) -> bytes | None:
    return encode_state(state, newest_stamp(state)) if stamps_of(state) else None


def prune_record(stored: bytes, settled: Version, now_ms: int) -> Pruned | None:
    """A stored record without the deletes that are not needed; None if it stays as it is.

    Removes deletes with stamps at or below `settled`, and fields with such stamps that have expired by
    `now_ms`.  A record that is dead stays as it is: garbage collection removes it as a whole.

    >>> from floodmark.merge.fields import delete_fields, put_fields
    >>> from floodmark.merge.states import merge_states, stamp_state
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
    # The origin of a record is the newest of its stamps, unless that is the stamp of its own commit.
    origin = record.origin if newest == newest_stamp(state) else newest
    return Pruned(encode_state(pruned, origin), max(stamp.version for stamp in gone))


def prune_state(state: State, settled: Version, now_ms: int) -> State:
    """A state that is alive, without the deletes that are not needed.

    The delete of a put stays as long as a field of the put does: it has the same stamp.
    """
    deleted = state.deleted
    is_needed = deleted is not None and deleted.version > settled
    if isinstance(state, CounterState):
        return CounterState(deleted if is_needed else None, state.entries)
    fields = tuple(
        field for field in state.fields if field.stamp.version > settled or field.is_live_at(now_ms)
    )
    is_needed = is_needed or deleted in [field.stamp for field in fields]
    return FieldsState(deleted if is_needed else None, fields)
