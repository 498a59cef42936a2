"""What of a record was first written at one site, after a version, and what was not.

A plain record has one stamp, and belongs to one site as a whole.  A state holds what several sites wrote,
each part under its own stamp, and falls apart into two states whose join it is.  Either of them can be merged
on its own: it says less than the whole, and nothing else.
"""

from typing import NamedTuple

from floodmark.codec.states import CounterState, FieldsState, State, decode_state, encode_state
from floodmark.codec.values import decode_value
from floodmark.merge.states import newest_stamp
from floodmark.model.change import Stamp
from floodmark.model.errors import Corruption
from floodmark.model.version import Version


class Split(NamedTuple):
    """A stored record in two, each with its origin; None is nothing.  `part` is of the site asked for."""

    part: bytes | None
    rest: bytes | None


def split_record(stored: bytes, site: int, above: Version) -> Split:
    """Cut a stored record, which carries its origin, by what a site wrote above a version.

    >>> from floodmark.merge.states import merge_states, stamp_state, update_fields
    >>> oslo = stamp_state(update_fields(b'{"city":"Oslo"}'), None, 7, 1)
    >>> rome = stamp_state(update_fields(b'{"zip":"00184"}'), None, 8, 2)
    >>> both = encode_state(decode_state(merge_states(oslo, rome)), Stamp(8, 2))
    >>> part, rest = split_record(both, 1, 0)
    >>> decode_value(part).value, decode_value(part).origin, decode_value(rest).value
    (b'{"city":"Oslo"}', Stamp(version=7, site=1), b'{"zip":"00184"}')
    >>> split_record(both, 1, 7) == Split(None, both)
    True
    """
    record = decode_value(stored)
    if record.origin is None:
        raise Corruption("a record that is to be split carries no origin")
    if record.stamps is None:
        is_part = _is_wanted(record.origin, site, above)
        return Split(stored, None) if is_part else Split(None, stored)
    state = decode_state(stored)
    part = _choose(state, site, above, wanted=True)
    if part is None:
        return Split(None, stored)
    rest = _choose(state, site, above, wanted=False)
    return Split(_encode(part), None if rest is None else _encode(rest))


def _is_wanted(stamp: Stamp, site: int, above: Version) -> bool:
    return stamp.site == site and stamp.version > above


def _choose(state: State, site: int, above: Version, *, wanted: bool) -> State | None:
    """The parts of a state whose stamps are wanted, or the others; None if there are none."""

    def is_chosen(stamp: Stamp) -> bool:
        return _is_wanted(stamp, site, above) is wanted

    deleted = state.deleted if state.deleted is not None and is_chosen(state.deleted) else None
    if isinstance(state, FieldsState):
        fields = tuple(field for field in state.fields if is_chosen(field.stamp))
        return FieldsState(deleted, fields) if deleted or fields else None
    entries = tuple(entry for entry in state.entries if is_chosen(entry.stamp))
    return CounterState(deleted, entries) if deleted or entries else None


def _encode(state: State) -> bytes:
    return encode_state(state, newest_stamp(state))
