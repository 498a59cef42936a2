"""Walks through the change histories of two sites, to find differences that were overwritten since.

A change that was lost on the way and overwritten later has left no trace in the records, but in the logs:

  - one stamp with two digests: the change was altered on the way, or at rest;
  - a change of one site that is not in the history of the other, though the other has announced everything up
    to there, and held nothing newer of the key.

In a merged record a field wins only over itself, a site's count only over that site's earlier count, and a
delete over everything: each part that a change has written is looked for by itself.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import permutations
from typing import NamedTuple

import msgspec

from floodmark.codec.states import FieldsState, State
from floodmark.divergence.rules import PartName
from floodmark.model.change import Stamp
from floodmark.model.version import Version


class HistoryChange(NamedTuple):
    """A change in the log of a site, at a version of that site.

    `digest` is that of the written record (`codec/thin.py`); it is not `exact`, and not compared, if a merged
    record came as a whole.  `parts` are the stamps that a change gave to a merged record: of fields by name,
    of a counter's entries by site, and of its delete under None.  Without them it wrote the whole record.
    """

    version: Version
    key: bytes
    stamp: Stamp
    digest: int
    exact: bool = True
    parts: Mapping[PartName, Stamp] | None = None


def part_stamps(state: State) -> dict[PartName, Stamp]:
    """The `parts` of a change: the stamps of a state by what they belong to.

    >>> from floodmark.codec.states import CounterEntry, CounterState
    >>> part_stamps(CounterState(Stamp(3, 2), (CounterEntry(1, 7, -4),)))
    {None: Stamp(version=3, site=2), 1: Stamp(version=7, site=1)}
    """
    stamps: dict[PartName, Stamp] = {} if state.deleted is None else {None: state.deleted}
    if isinstance(state, FieldsState):
        return stamps | {field.name: field.stamp for field in state.fields}
    return stamps | {entry.site: entry.stamp for entry in state.entries}


def _nothing(_: bytes) -> Stamp | None:
    return None


@dataclass(frozen=True)
class History:
    """The changes of a site in commit order, and its watermarks by its heartbeats, in order of versions.

    `newest_before` returns the newest stamp of a key when the history begins, or None: no older change counts
    as lost.  A history may begin with the namespace, but not before it was shared.
    """

    site: str
    site_id: int
    changes: Sequence[HistoryChange]
    marks: Sequence[tuple[Version, Mapping[int, Version]]]
    newest_before: Callable[[bytes], Stamp | None] = _nothing


class DifferenceKind(StrEnum):
    """What became of a change."""

    ALTERED = "altered"
    LOST = "lost"


class Difference(msgspec.Struct, frozen=True):
    """A change that differs in the histories of two sites.

    `holder` has it, at `version` there; `other` has lost it, or has something else under its stamp.
    """

    key: bytes
    stamp: Stamp
    kind: DifferenceKind
    holder: str
    other: str
    version: Version


def walk_histories(left: History, right: History) -> list[Difference]:
    """The changes that differ in two histories, in order of stamps.

    >>> renamed = HistoryChange(9, b"ada", Stamp(9, 1), digest=0xADA)
    >>> again = HistoryChange(12, b"ada", Stamp(12, 1), digest=0xADB)
    >>> oslo = History("oslo", 1, [renamed, again], marks=[(13, {2: 5})])
    >>> rome = History("rome", 2, [again._replace(version=14)], marks=[(10, {1: 9}), (15, {1: 12})])
    >>> [(each.kind.value, each.stamp, each.other) for each in walk_histories(oslo, rome)]
    [('lost', Stamp(version=9, site=1), 'rome')]
    """
    found = [*_altered(left, right)]
    for holder, other in permutations((left, right)):
        found += _lost(holder, other)
    return sorted(found, key=lambda each: (each.stamp, each.key))


def _altered(left: History, right: History) -> Iterator[Difference]:
    on_right = {(change.key, change.stamp): change for change in right.changes if change.exact}
    for change in left.changes:
        other = on_right.get((change.key, change.stamp), change)
        if change.exact and other.digest != change.digest:
            # The site of the stamp is believed.
            if change.stamp.site == right.site_id:
                yield _difference(other, DifferenceKind.ALTERED, right, left)
            else:
                yield _difference(change, DifferenceKind.ALTERED, left, right)


def _lost(holder: History, other: History) -> Iterator[Difference]:
    """The changes of one site that the other should have applied, or a newer one in their place."""
    known = _Known(other.changes)
    positions = [mark.get(holder.site_id, 0) for _, mark in other.marks]
    for change in holder.changes:
        if change.stamp.site != holder.site_id:
            continue
        announced = bisect_left(positions, change.stamp.version)
        if announced == len(positions) or known.has(change, by=other.marks[announced][0]):
            continue
        before = other.newest_before(change.key)
        if before is None or before < change.stamp:
            yield _difference(change, DifferenceKind.LOST, holder, other)


class _Known:
    """The history of a site by parts: the newest stamp of each at any version."""

    def __init__(self, changes: Sequence[HistoryChange]) -> None:
        self._newest: dict[tuple[bytes, PartName], tuple[list[Version], list[Stamp]]] = {}
        for change in changes:
            for part, stamp in _parts_of(change).items():
                versions, stamps = self._newest.setdefault((change.key, part), ([], []))
                versions.append(change.version)
                stamps.append(max(stamp, stamps[-1]) if stamps else stamp)

    def has(self, change: HistoryChange, by: Version) -> bool:
        """Whether the site had a change at a version of its own, or newer stamps of all its parts."""
        # A record that came as a whole also has parts of other changes.
        written = [part for part, stamp in _parts_of(change).items() if stamp == change.stamp]
        return all(
            self._is_newer(change, part, by) or self._is_newer(change, None, by) for part in written or [None]
        )

    def _is_newer(self, change: HistoryChange, part: PartName, by: Version) -> bool:
        versions, stamps = self._newest.get((change.key, part), ([], []))
        place = bisect_right(versions, by)
        return place > 0 and stamps[place - 1] >= change.stamp


def _parts_of(change: HistoryChange) -> Mapping[PartName, Stamp]:
    return {None: change.stamp} if change.parts is None else change.parts


def _difference(change: HistoryChange, kind: DifferenceKind, holder: History, other: History) -> Difference:
    return Difference(change.key, change.stamp, kind, holder.site, other.site, change.version)
