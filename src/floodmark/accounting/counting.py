"""Counts of the changes that a reader delivers, cut where heartbeats end an interval.

Each change is counted when it is delivered, with the digest that it had when it was read, so a change that is
lost or doubled in between shows in the count:

    changes       a b c     d e         f g h
    heartbeats           T1       T2
    entries       [a, c]  |  [d, e]  |  [f, h]

Several readers share a namespace by keys or by versions, and progress at different speeds.  Their entries can
be added at every heartbeat that divides none of them, so a reader may leave out cuts: a heartbeat that would
divide an entry is joined with the next one.  So the stored counts stay small, however far apart readers are.
"""

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from operator import attrgetter, itemgetter
from threading import Lock
from typing import Final, TypeAlias

import msgspec
import numpy
from msgspec.structs import replace
from numpy.typing import NDArray

from floodmark.codec.digest import digest_change, digest_rows
from floodmark.codec.ordered import NAMESPACE_BYTES
from floodmark.codec.stamps import digest_copies
from floodmark.codec.values import HAS_ORIGIN, HAS_STAMPS
from floodmark.model.change import Heartbeat, NamespaceBeat, Tally, narrow_heartbeat
from floodmark.model.stream import ChangeBatch, Way
from floodmark.model.version import Version, physical_ms

# Heartbeats that are kept until they are checked; more are joined with their neighbours.
BEATS_MAX: Final = 32

# Longer than the time between any two heartbeats.
_SPAN_MS_MAX: Final = 1 << 50

Versions: TypeAlias = NDArray[numpy.uint64]

_NONE: Final[Versions] = numpy.zeros(0, numpy.uint64)
_flags: Final = itemgetter(-1)
_last: Final = attrgetter("last")


class CountedRun(msgspec.Struct, frozen=True, array_like=True):
    """Changes counted together, with versions from `first` to `last`.

    The digest is None for whole records of which only parts were written.
    """

    first: Version
    last: Version
    changes: int
    digest: int | None

    @property
    def tally(self) -> Tally:
        """The tally of these changes, for a comparison with a heartbeat."""
        return Tally(self.changes, self.digest or 0)

    def plus(self, other: "CountedRun") -> "CountedRun":
        """Two runs joined into one."""
        known = self.digest is not None and other.digest is not None
        return CountedRun(
            min(self.first, other.first),
            max(self.last, other.last),
            self.changes + other.changes,
            (self.digest or 0) ^ (other.digest or 0) if known else None,
        )


class Counted(msgspec.Struct, frozen=True, kw_only=True):
    """The entries of some keys, in order, and the heartbeats among them.

    Some changes at or below `scanned` were found by a scan.
    """

    entries: list[CountedRun] = []
    beats: list[NamespaceBeat] = []
    scanned: Version = 0

    def plus(self, other: "Counted") -> "Counted":
        """The joint counts of two disjoint sets of changes."""
        return Counted(
            entries=sorted([*self.entries, *other.entries], key=_last),
            beats=unite_beats(self.beats, other.beats),
            scanned=max(self.scanned, other.scanned),
        )

    def then(self, more: "Counted") -> "Counted":
        """These counts, then later ones of the same keys; an entry continues until a heartbeat ends it."""
        beats = [*self.beats, *more.beats]
        ends = _ends(beats)
        entries = list(self.entries)
        for entry in more.entries:
            if entries and bisect_left(ends, entries[-1].last) == bisect_left(ends, entry.last):
                entries[-1] = entries[-1].plus(entry)
            else:
                entries.append(entry)
        return Counted(entries=entries, beats=beats, scanned=max(self.scanned, more.scanned))

    def behind(self, version: Version) -> "Counted":
        """The part above a version, which must be where an entry ends."""
        return Counted(
            entries=[entry for entry in self.entries if entry.last > version],
            beats=[beat for beat in self.beats if beat.version > version],
            scanned=self.scanned if self.scanned > version else 0,
        )

    def thinned(self) -> "Counted":
        """These counts with at most `BEATS_MAX` cuts."""
        beats = thin(self.beats)
        return Counted(entries=compact(self.entries, beats), beats=beats, scanned=self.scanned)


class Counting:
    """Counts the changes of one range, which one thread reads and another delivers.

    `namespace` is the id of the namespace, and `site_id` that of the site, whose own changes carry no stamp.
    """

    def __init__(self, since: Version, *, site_id: int, namespace: int) -> None:
        self._site_id = site_id
        self._namespace = namespace
        self._lock = Lock()
        self._through = since
        # Read and not delivered yet.
        self._read = Digests()
        self._coming: list[NamespaceBeat] = []
        self._scanning: Version = 0
        # The reported counts, which must not change any more, and the counts since the last report.
        self._reported = Counted()
        self._unreported = Counted()

    def read(self, batch: ChangeBatch) -> None:
        """Enter a batch that was read."""
        digests = digest_batch(batch, self._site_id)
        beats = [slim_beat(beat, self._site_id, self._namespace) for beat in batch.heartbeats]
        with self._lock:
            self._read.add(numpy.array(batch.versions, numpy.uint64), digests)
            self._coming += beats
            if batch.way is Way.SCAN:
                self._scanning = max(self._scanning, batch.through)

    def deliver(self, versions: Sequence[Version], through: Version) -> None:
        """Enter the delivery of changes with these versions, and of everything up to `through`."""
        with self._lock:
            beats = [beat for beat in self._coming if beat.version <= through]
            self._coming = self._coming[len(beats) :]
            entries = _cut(numpy.array(versions, numpy.uint64), self._read, beats, through)
            scanned = min(self._scanning, through)
            if self._scanning <= through:
                self._scanning = 0
            counted = Counted(entries=list(entries), beats=beats, scanned=scanned)
            self._unreported, self._through = self._unreported.then(counted), through

    def take_over(self, counted: Counted, through: Version) -> None:
        """Enter the counts of another process that read and delivered changes up to `through`."""
        with self._lock:
            self._unreported, self._through = self._unreported.then(counted), through

    def report(self) -> tuple[Version, Counted]:
        """The version delivered up to, and all counts since the last acknowledged report."""
        with self._lock:
            fresh, known = self._unreported.thinned(), self._reported
            self._reported = Counted(
                entries=[*known.entries, *fresh.entries],
                beats=[*known.beats, *fresh.beats],
                scanned=max(known.scanned, fresh.scanned),
            )
            self._unreported = Counted()
            return self._through, self._reported

    def acknowledge(self, checkpoint: Version) -> None:
        """Drop the reported counts up to a checkpoint that the site has stored."""
        with self._lock:
            self._reported = self._reported.behind(checkpoint)


def count_idle(
    batches: Iterable[ChangeBatch], since: Version, through: Version, *, site_id: int, namespace: int
) -> Counted:
    """The heartbeats of an interval in which nothing is delivered; a change in it counts as lost."""
    counting = Counting(since, site_id=site_id, namespace=namespace)
    for batch in batches:
        counting.read(batch)
    counting.deliver((), through)
    return counting.report()[1]


class Digests:
    """The digests of changes, with their versions, in order.  One unknown digest makes all unknown."""

    def __init__(self) -> None:
        self._versions: list[Versions] = []
        self._digests: list[Versions | None] = []

    def add(self, versions: Versions, digests: Versions | None) -> None:
        """Append digests, or None if they are unknown."""
        if len(versions):
            self._versions.append(versions)
            self._digests.append(digests)

    def take(self, through: Version | None = None) -> tuple[Versions, Versions | None]:
        """Remove and return all up to a version, or all."""
        versions, digests = self._together()
        end = len(versions) if through is None else _end(versions, through)
        self._versions, self._digests = [], []
        self.add(versions[end:], None if digests is None else digests[end:])
        return versions[:end], None if digests is None else digests[:end]

    def take_tally(self, through: Version | None = None) -> Tally:
        """Remove all up to a version, or all; returns their tally."""
        versions, digests = self.take(through)
        return Tally(len(versions), _combine(digests) or 0)

    def _together(self) -> tuple[Versions, Versions | None]:
        if not self._versions:
            return _NONE, _NONE
        digests = [each for each in self._digests if each is not None]
        known = len(digests) == len(self._digests)
        return numpy.concatenate(self._versions), numpy.concatenate(digests) if known else None


def digest_batch(batch: ChangeBatch, site_id: int) -> Versions | None:
    """The digests that heartbeats sum up; None if the batch has whole records of which parts were written."""
    highest = max(map(_flags, batch.values), default=0)
    if highest >= HAS_STAMPS:
        return None
    if highest < HAS_ORIGIN:
        digests = digest_rows(batch.versions, site_id, batch.keys, batch.values)
    else:
        digests = [
            _digest_one(version, site_id, key, stored)
            for version, key, stored in zip(batch.versions, batch.keys, batch.values, strict=True)
        ]
    return numpy.array(digests, numpy.uint64)


def _digest_one(version: Version, site_id: int, key: bytes, stored: bytes) -> int:
    if not stored[-1] & HAS_ORIGIN:
        return digest_change(version, site_id, key[NAMESPACE_BYTES:], stored)
    ((_, _, digest, _),) = digest_copies((key,), (stored,), site_id)
    return digest


def slim_beat(heartbeat: Heartbeat, site_id: int, namespace: int) -> NamespaceBeat:
    """The part of a heartbeat about a namespace's changes, without the fields that only links read."""
    return replace(narrow_heartbeat(heartbeat, site_id, namespace), watermark={}, own=Tally())


# Cutting and joining


def _cut(
    delivered: Versions, read: Digests, beats: Iterable[NamespaceBeat], through: Version
) -> Iterator[CountedRun]:
    """The entries of a delivery up to a version, one for each interval with changes."""
    done = 0
    for end in [*_ends(beats), through]:
        versions, digests = read.take(end)
        place = max(done, _end(delivered, end))
        yield from _entry(delivered[done:place], versions, digests)
        done = place
    if done < len(delivered):
        yield from _entry(delivered[done:], _NONE, _NONE)


def _entry(delivered: Versions, read: Versions, digests: Versions | None) -> Iterator[CountedRun]:
    """An entry with the count of the delivered changes and the digests of those that were read, if any."""
    counted = [each for each in (delivered, read) if len(each)]
    if counted:
        first, last = min(each[0] for each in counted), max(each[-1] for each in counted)
        yield CountedRun(int(first), int(last), len(delivered), _combine(digests))


def compact(entries: Sequence[CountedRun], beats: Sequence[NamespaceBeat]) -> list[CountedRun]:
    """Join the entries that lie between the same heartbeats.

    >>> beat = NamespaceBeat(site=1, node=0, version=9, wall_ms=0, since=2, through=8)
    >>> compact([CountedRun(3, 4, 2, 5), CountedRun(6, 6, 1, 3), CountedRun(9, 9, 1, 7)], [beat])
    [CountedRun(first=3, last=6, changes=3, digest=6), CountedRun(first=9, last=9, changes=1, digest=7)]
    """
    ends = _ends(beats)
    merged: dict[int, CountedRun] = {}
    for entry in sorted(entries, key=_last):
        place = bisect_left(ends, entry.last)
        merged[place] = merged[place].plus(entry) if place in merged else entry
    return list(merged.values())


def thin(beats: Sequence[NamespaceBeat]) -> list[NamespaceBeat]:
    """A node's heartbeats, with neighbours joined until at most `BEATS_MAX` are left.

    Those in the same two seconds are joined, then in the same four, eight and so on, so that independent
    readers leave the same cuts.  The first stays as it is: its interval may go unchecked and should be short.
    """
    ordinary = [beat for beat in beats if beat.log is None]
    if len(ordinary) <= BEATS_MAX:
        return list(beats)
    sealed = [beat for beat in beats if beat.log is not None]
    # An interval in which the node lost count is joined with checkable ones only as a last resort.
    for gently in (True, False):
        span_ms = 1_024
        while len(ordinary) > BEATS_MAX and span_ms < _SPAN_MS_MAX:
            span_ms *= 2
            ordinary = [ordinary[0], *_join_within(ordinary[1:], span_ms, gently=gently)]
    return sorted([*ordinary, *sealed], key=_order)


def _join_within(beats: Iterable[NamespaceBeat], span_ms: int, *, gently: bool) -> list[NamespaceBeat]:
    joined: list[NamespaceBeat] = []
    for beat in beats:
        last = joined[-1] if joined else None
        if (
            last is not None
            and physical_ms(last.through) // span_ms == physical_ms(beat.through) // span_ms
            and (not gently or (last.since and last.through == beat.since))
        ):
            joined[-1] = join_beats(last, beat)
        else:
            joined.append(beat)
    return joined


def join_beats(beat: NamespaceBeat, following: NamespaceBeat) -> NamespaceBeat:
    """Join two heartbeats of a node; the result proves nothing if one between them is missing."""
    return replace(
        following,
        since=beat.since if beat.through == following.since else 0,
        all=beat.all.plus(following.all),
    )


def go_on_with(
    beats: Iterable[NamespaceBeat], others: Iterable[NamespaceBeat], since: Version
) -> list[NamespaceBeat]:
    """The known heartbeats from `since` on, continued by those of another reader.

    The two readers may have joined different heartbeats.  If the first new one overlaps known ones, those of
    the other reader replace them from the last version on at which both have an end.
    """
    known = [beat for beat in beats if beat.log is None]
    told = [beat for beat in others if beat.log is None]
    heard = known[-1].through if known else since
    new = [beat for beat in told if beat.through > heard]
    if new and 0 < new[0].since < heard:
        ends = {since, *(beat.through for beat in known)} - {0}
        place = max(ends & {end for beat in told for end in (beat.since, beat.through)}, default=0)
        if place:
            known = [beat for beat in known if beat.through <= place]
            new = [beat for beat in told if beat.through > place]
        else:
            new[0] = replace(new[0], since=0)
    sealed = (beat for beat in (*beats, *others) if beat.log is not None)
    return unite_beats([*known, *new], sealed)


def unite_beats(beats: Iterable[NamespaceBeat], others: Iterable[NamespaceBeat]) -> list[NamespaceBeat]:
    """All heartbeats, each once, in order."""
    return sorted({(beat.version, beat.log): beat for beat in (*beats, *others)}.values(), key=_order)


def _ends(beats: Iterable[NamespaceBeat]) -> list[Version]:
    """The versions at which intervals end."""
    return [beat.through for beat in beats if beat.log is None]


def _order(beat: NamespaceBeat) -> tuple[Version, int]:
    return beat.version, -1 if beat.log is None else beat.log


def _combine(digests: Versions | None) -> int | None:
    return None if digests is None else int(numpy.bitwise_xor.reduce(digests))


def _end(versions: Versions, through: Version) -> int:
    """How many versions lie at or below one."""
    # A plain integer would be compared as a float, which does not distinguish neighbouring versions.
    return int(numpy.searchsorted(versions, numpy.uint64(through), side="right"))
