"""The histories of two sites walked through: differences that were overwritten since, and are gone.

A comparison of records finds what differs now.  A change that was lost on the way and written over later has
left no trace in the records, but it has in the change logs:

  - one stamp, and two digests: the change was altered on the way, or at rest;
  - a change that was first written at one site and is not in the history of the other, though the other has
    announced that it has everything up to there, and held nothing of the key that would have won over it.

Both sites are walked from a version of each to another.  What a site held of a key before its history begins
is asked for only where something is missing.
"""

from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import permutations
from typing import NamedTuple

import msgspec

from floodmark.model.change import Stamp
from floodmark.model.version import Version


class HistoryChange(NamedTuple):
    """A change as it stands in the log of a site, at a version of that site.

    `digest` is that of what was written (`codec/thin.py`).  It is not `exact` where a merged record came as a
    whole and not as what was written to it: then it cannot be compared.
    """

    version: Version
    key: bytes
    stamp: Stamp
    digest: int
    exact: bool = True


def _nothing(_: bytes) -> Stamp | None:
    return None


@dataclass(frozen=True)
class History:
    """The changes of a site in commit order, and its watermarks by its heartbeats, in order of versions.

    `newest_before` says what the site held of a key when the history begins: the newest stamp of its record;
    None if it had none.  A history that begins with the namespace needs no such thing, and one may not begin
    before the namespace was shared.
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
    """A change that is not the same in the histories of two sites.

    `holder` is a site that has it, at `version` there, and `other` the one that has lost it or has something
    else under its stamp.
    """

    key: bytes
    stamp: Stamp
    kind: DifferenceKind
    holder: str
    other: str
    version: Version


def walk_histories(left: History, right: History) -> list[Difference]:
    """What two sites have not written, or not taken in, in the same way; in order of stamps.

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
            # Who has written it knows what it was.
            if change.stamp.site == right.site_id:
                yield _difference(other, DifferenceKind.ALTERED, right, left)
            else:
                yield _difference(change, DifferenceKind.ALTERED, left, right)


def _lost(holder: History, other: History) -> Iterator[Difference]:
    """What was first written at one site, and that the other should have taken in or known better."""
    known: dict[bytes, list[HistoryChange]] = {}
    for change in other.changes:
        known.setdefault(change.key, []).append(change)
    positions = [mark.get(holder.site_id, 0) for _, mark in other.marks]
    for change in holder.changes:
        if change.stamp.site != holder.site_id:
            continue
        announced = bisect_left(positions, change.stamp.version)
        if announced == len(positions):
            continue
        by_then = other.marks[announced][0]
        came = [each.stamp for each in known.get(change.key, ()) if each.version <= by_then]
        if any(stamp >= change.stamp for stamp in came):
            continue
        before = other.newest_before(change.key)
        if before is None or before < change.stamp:
            yield _difference(change, DifferenceKind.LOST, holder, other)


def _difference(change: HistoryChange, kind: DifferenceKind, holder: History, other: History) -> Difference:
    return Difference(change.key, change.stamp, kind, holder.site, other.site, change.version)
