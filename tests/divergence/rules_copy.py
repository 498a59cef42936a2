"""The rules once more, in another way, and each of them can be left out.

With all rules this must say the same as the real one; with one left out, it must call something drift that is
only lag, or else the rule is not needed or nobody looks where it is.
"""

from collections.abc import Mapping
from enum import StrEnum
from typing import NamedTuple

from floodmark.codec.states import CounterState, FieldsState
from floodmark.divergence.rules import Evidence, Side, Verdict
from floodmark.model.change import Stamp
from floodmark.model.version import Version, physical_ms


class Rule(StrEnum):
    """What a verdict of drift needs."""

    LEFT_HAS_HEARD = "the left site has heard of what the right one holds"
    RIGHT_HAS_HEARD = "the right site has heard of what the left one holds"
    TOMBSTONES_COUNT = "a tombstone has a stamp of its own, and is not nothing"
    HORIZON = "what was collected where nothing is has come to the other site"
    PART_HORIZON = "that holds for each part of a record"
    EVERY_ENTRY = "from every site that writes"
    HORIZON_LAST = "the horizon is read after the records"
    ONE_MOMENT = "expiry is judged at one moment, the later one"
    PART_BY_PART = "each part of a record is judged by itself"
    DELETED_PARTS = "a part that the record's delete took away has the delete's stamp"


class _Held(NamedTuple):
    stamp: Stamp
    content: object
    """None if it is dead."""


def is_drift(left: Side, right: Side, without: Rule | None = None) -> bool:
    """Whether two sites have drifted apart in a record, by all rules or all but one."""
    return any(
        _part_drifted(left, right, part, without) for part in _names(left.record, right.record, without)
    ) and not _both_dead(left, right, without)


def _now_ms(side: Side, other: Side, without: Rule | None) -> int:
    return physical_ms(side.at if without is Rule.ONE_MOMENT else max(side.at, other.at))


def _both_dead(left: Side, right: Side, without: Rule | None) -> bool:
    return not any(
        side.record is not None and side.record.is_alive_at(_now_ms(side, other, without))
        for side, other in ((left, right), (right, left))
    )


def _names(left: Evidence | None, right: Evidence | None, without: Rule | None) -> set[str | int]:
    names: set[str | int] = set()
    for record in (left, right):
        state = None if record is None or without is Rule.PART_BY_PART else record.state
        if isinstance(state, FieldsState):
            names |= {field.name for field in state.fields}
        elif isinstance(state, CounterState):
            names |= {entry.site for entry in state.entries}
        elif record is not None:
            names.add("")
    return names


def _hold(side: Side, other: Side, part: str | int, without: Rule | None) -> _Held | None:
    record, now_ms = side.record, _now_ms(side, other, without)
    if record is None:
        return None
    if part == "":
        return _Held(record.stamp, record.digest if record.is_alive_at(now_ms) else None)
    state = record.state
    if isinstance(state, FieldsState):
        for field in state.fields:
            if field.name == part:
                alive = field.is_live_at(now_ms)
                return _Held(field.stamp, (field.text, field.expires_at) if alive else None)
    if isinstance(state, CounterState):
        for entry in state.entries:
            if entry.site == part:
                return _Held(entry.stamp, entry.total)
    return None


def _part_drifted(left: Side, right: Side, part: str | int, without: Rule | None) -> bool:
    held = [_hold(left, right, part, without), _hold(right, left, part, without)]
    sides = left, right
    for place in (0, 1):
        mine, theirs = held[place], held[1 - place]
        if mine is None and theirs is not None and without is not Rule.DELETED_PARTS:
            held[place] = _deleted(sides[place].record, theirs.stamp)
        elif without is Rule.TOMBSTONES_COUNT and mine is not None and mine.content is None:
            held[place] = None
    on_left, on_right = held
    if (on_left and on_left.content) == (on_right and on_right.content):
        return False
    if on_left is None:
        assert on_right is not None
        return _absent_drifted(left, right, on_right, part, without)
    if on_right is None:
        return _absent_drifted(right, left, on_left, part, without)
    left_heard = without is Rule.LEFT_HAS_HEARD or _has_heard(left.mark, on_right.stamp)
    return left_heard and (without is Rule.RIGHT_HAS_HEARD or _has_heard(right.mark, on_left.stamp))


def _deleted(record: Evidence | None, stamp: Stamp) -> _Held | None:
    state = None if record is None else record.state
    if state is None or state.deleted is None:
        return None
    at_once = stamp == state.deleted and isinstance(state, CounterState)
    return _Held(state.deleted, None) if stamp < state.deleted or at_once else None


def _absent_drifted(absent: Side, other: Side, held: _Held, part: str | int, without: Rule | None) -> bool:
    if held.content is None or not _has_heard(absent.mark, held.stamp):
        return False
    if without is Rule.HORIZON or (without is Rule.PART_HORIZON and part != ""):
        return True
    entries = {site: other.mark.get(site, 0) for site in (*other.mark, *absent.mark)}
    if without is Rule.EVERY_ENTRY:
        entries = {held.stamp.site: entries[held.stamp.site]}
    return min(entries.values()) >= absent.horizon


def _has_heard(mark: Mapping[int, Version], stamp: Stamp) -> bool:
    return stamp.site in mark and mark[stamp.site] >= stamp.version


def drifted(verdict: Verdict) -> bool:
    """The same question to a verdict of the real rules."""
    return verdict.is_drift
