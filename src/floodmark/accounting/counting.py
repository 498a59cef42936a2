"""What a reader counts on the way, so that heartbeats can be held against it.

Each change is counted where it is delivered, with the digest that it had when it was read: what is lost or
doubled in between shows in the count.  The counts are cut where heartbeats say that an interval ends, because
only there can they be compared:

    changes       a b c     d e         f g h
    heartbeats           T1       T2
    entries       [a, c]  |  [d, e]  |  [f, h]

Readers of one namespace share its keys or its versions among themselves, and are not equally far.  Their
entries can be added up at every heartbeat that cuts none of them, so a reader may leave out some cuts: a
heartbeat that would divide an entry is joined with the one after it, and both are checked as one.  Thus what
is kept stays small, however far apart the readers are.
"""

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from operator import itemgetter
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

# So many heartbeats that nobody could be held against yet are kept; more are joined with their neighbours.
BEATS_MAX: Final = 32

# Longer than all time that there are heartbeats of.
_SPAN_MS_MAX: Final = 1 << 50

Versions: TypeAlias = NDArray[numpy.uint64]

_NONE: Final[Versions] = numpy.zeros(0, numpy.uint64)
_flags: Final = itemgetter(-1)


class Entry(msgspec.Struct, frozen=True, array_like=True):
    """Changes that were counted together, with versions from `first` to `last`.

    The digest is None where it is not known: whole records came, of which only parts were written.
    """

    first: Version
    last: Version
    changes: int
    digest: int | None

    @property
    def tally(self) -> Tally:
        """The changes as heartbeats tell them."""
        return Tally(self.changes, self.digest or 0)

    def plus(self, other: "Entry") -> "Entry":
        """Both as one."""
        known = self.digest is not None and other.digest is not None
        return Entry(
            min(self.first, other.first),
            max(self.last, other.last),
            self.changes + other.changes,
            (self.digest or 0) ^ (other.digest or 0) if known else None,
        )


class Counted(msgspec.Struct, frozen=True, kw_only=True):
    """What was counted of some keys, in order, and the heartbeats that came by.

    What lies at or below `scanned` was in part found by a scan.
    """

    entries: list[Entry] = []
    beats: list[NamespaceBeat] = []
    scanned: Version = 0

    def plus(self, other: "Counted") -> "Counted":
        """What was counted of two disjoint sets of changes."""
        return Counted(
            entries=sorted([*self.entries, *other.entries], key=_last),
            beats=unite_beats(self.beats, other.beats),
            scanned=max(self.scanned, other.scanned),
        )

    def behind(self, version: Version) -> "Counted":
        """The part that lies behind a version, where an entry ends."""
        return Counted(
            entries=[entry for entry in self.entries if entry.last > version],
            beats=[beat for beat in self.beats if beat.version > version],
            scanned=self.scanned if self.scanned > version else 0,
        )

    def thinned(self) -> "Counted":
        """The same with fewer cuts, if there are very many."""
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
        self._read = _Digests()
        self._coming: list[NamespaceBeat] = []
        self._scanning: Version = 0
        # Delivered: what a report has told, which must stay as it is, and what none has told yet.
        self._told = Counted()
        self._untold = Counted()

    def read(self, batch: ChangeBatch) -> None:
        """Take note of what was read."""
        digests = digest_batch(batch, self._site_id)
        beats = [slim_beat(beat, self._site_id, self._namespace) for beat in batch.heartbeats]
        with self._lock:
            self._read.add(numpy.array(batch.versions, numpy.uint64), digests)
            self._coming += beats
            if batch.way is Way.SCAN:
                self._scanning = max(self._scanning, batch.through)

    def forget_behind(self, version: Version) -> None:
        """Forget what was read behind a version: it will be read again."""
        with self._lock:
            self._read.forget_behind(version)
            self._coming = [beat for beat in self._coming if beat.version <= version]

    def deliver(self, versions: Sequence[Version], through: Version) -> None:
        """Take note that changes with these versions were delivered, and with them all up to `through`."""
        with self._lock:
            beats = [beat for beat in self._coming if beat.version <= through]
            self._coming = self._coming[len(beats) :]
            counted = Counted(
                entries=list(_cut(numpy.array(versions, numpy.uint64), self._read, beats, through)),
                beats=beats,
                scanned=min(self._scanning, through),
            )
            if self._scanning <= through:
                self._scanning = 0
            self._untold = _joined(self._untold, counted)
            self._through = through

    def told(self) -> tuple[Version, Counted]:
        """How far the range is, and all that was counted since the last report that is known to be stored."""
        with self._lock:
            untold = self._untold.thinned()
            self._told = Counted(
                entries=[*self._told.entries, *untold.entries],
                beats=[*self._told.beats, *untold.beats],
                scanned=max(self._told.scanned, untold.scanned),
            )
            self._untold = Counted()
            return self._through, self._told

    def acknowledge(self, checkpoint: Version) -> None:
        """What was told up to a checkpoint is stored."""
        with self._lock:
            self._told = self._told.behind(checkpoint)


class RowCounting:
    """Counts rows on their way through one task, in the order of their versions."""

    def __init__(self) -> None:
        self._rows = _Digests()
        self._counted = Counted()

    def add(self, versions: Versions, digests: Versions | None) -> None:
        """Count rows; `digests` is None where they are not known."""
        self._rows.add(versions, digests)

    def add_beats(self, beats: Sequence[NamespaceBeat]) -> None:
        """Take heartbeats that came behind the rows so far."""
        for beat in beats:
            self._add(Counted(entries=self._cut(beat.through) if beat.log is None else [], beats=[beat]))

    def add_scanned(self, through: Version) -> None:
        """All up to a version was found by a scan."""
        self._add(Counted(scanned=through))

    def finish(self) -> Counted:
        """All that was counted."""
        self._add(Counted(entries=self._cut(None)))
        return self._counted.thinned()

    def _cut(self, through: Version | None) -> list[Entry]:
        versions, digests = self._rows.take(through)
        return list(_entry(versions, versions, digests))

    def _add(self, more: Counted) -> None:
        self._counted = _joined(self._counted, more)


def count_idle(
    batches: Iterable[ChangeBatch], since: Version, through: Version, *, site_id: int, namespace: int
) -> Counted:
    """The heartbeats of a stretch with nothing to deliver; what is there all the same counts as lost."""
    counting = Counting(since, site_id=site_id, namespace=namespace)
    for batch in batches:
        counting.read(batch)
    counting.deliver((), through)
    return counting.told()[1]


class _Digests:
    """Digests of changes with their versions, in the order of these.  None takes the place of all."""

    def __init__(self) -> None:
        self._versions: list[Versions] = []
        self._digests: list[Versions | None] = []

    def add(self, versions: Versions, digests: Versions | None) -> None:
        if len(versions):
            self._versions.append(versions)
            self._digests.append(digests)

    def take(self, through: Version | None) -> tuple[Versions, Versions | None]:
        """Take out what lies at or below a version, or all."""
        versions, digests = self._together()
        end = len(versions) if through is None else _end(versions, through)
        self._keep(versions[end:], None if digests is None else digests[end:])
        return versions[:end], None if digests is None else digests[:end]

    def forget_behind(self, version: Version) -> None:
        versions, digests = self._together()
        end = _end(versions, version)
        self._keep(versions[:end], None if digests is None else digests[:end])

    def _keep(self, versions: Versions, digests: Versions | None) -> None:
        self._versions, self._digests = [], []
        self.add(versions, digests)

    def _together(self) -> tuple[Versions, Versions | None]:
        if not self._versions:
            return _NONE, _NONE
        digests = [each for each in self._digests if each is not None]
        known = len(digests) == len(self._digests)
        return numpy.concatenate(self._versions), numpy.concatenate(digests) if known else None


def digest_batch(batch: ChangeBatch, site_id: int) -> Versions | None:
    """The digests of changes as heartbeats sum them up; None if whole records came for parts of them."""
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
    """What a heartbeat says about a namespace's changes, without what only links ask for."""
    return replace(narrow_heartbeat(heartbeat, site_id, namespace), watermark={}, own=Tally())


# Cutting and joining


def _cut(
    delivered: Versions, read: _Digests, beats: Iterable[NamespaceBeat], through: Version
) -> Iterator[Entry]:
    """What was delivered up to a version, an entry for each interval that has something."""
    done = 0
    for end in [*(beat.through for beat in beats if beat.log is None), through]:
        versions, digests = read.take(end)
        place = max(done, _end(delivered, end))
        yield from _entry(delivered[done:place], versions, digests)
        done = place
    if done < len(delivered):
        yield from _entry(delivered[done:], _NONE, _NONE)


def _entry(delivered: Versions, read: Versions, digests: Versions | None) -> Iterator[Entry]:
    """What was delivered, with the digests of what was read; nothing if there is neither."""
    counted = [each for each in (delivered, read) if len(each)]
    if counted:
        yield Entry(
            int(min(each[0] for each in counted)),
            int(max(each[-1] for each in counted)),
            len(delivered),
            None if digests is None else int(numpy.bitwise_xor.reduce(digests)),
        )


def _joined(counted: Counted, more: Counted) -> Counted:
    """One thing after another; an entry goes on until a heartbeat ends it."""
    entries = list(counted.entries)
    ends = [beat.through for beat in (*counted.beats, *more.beats) if beat.log is None]
    for entry in more.entries:
        last = entries[-1] if entries else None
        if last is not None and bisect_left(ends, last.last) == bisect_left(ends, entry.last):
            entries[-1] = last.plus(entry)
        else:
            entries.append(entry)
    return Counted(
        entries=entries,
        beats=[*counted.beats, *more.beats],
        scanned=max(counted.scanned, more.scanned),
    )


def compact(entries: Sequence[Entry], beats: Sequence[NamespaceBeat]) -> list[Entry]:
    """Entries that lie between the same heartbeats as one.

    >>> beat = NamespaceBeat(site=1, node=0, version=9, wall_ms=0, since=2, through=8)
    >>> compact([Entry(3, 4, 2, 5), Entry(6, 6, 1, 3), Entry(9, 9, 1, 7)], [beat])
    [Entry(first=3, last=6, changes=3, digest=6), Entry(first=9, last=9, changes=1, digest=7)]
    """
    ends = [beat.through for beat in beats if beat.log is None]
    merged: dict[int, Entry] = {}
    for entry in sorted(entries, key=_last):
        place = bisect_left(ends, entry.last)
        merged[place] = merged[place].plus(entry) if place in merged else entry
    return list(merged.values())


def thin(beats: Sequence[NamespaceBeat], most: int = BEATS_MAX) -> list[NamespaceBeat]:
    """Not more than so many of a node's heartbeats: neighbours are joined, and say together what they said.

    Those are joined that lie in the same two seconds, four, eight and so on, so that readers who do not know
    of each other leave the same cuts.  The first stays as it is: its interval may have to go unchecked, and
    should be short.
    """
    ordinary = [beat for beat in beats if beat.log is None]
    if len(ordinary) <= most:
        return list(beats)
    sealed = [beat for beat in beats if beat.log is not None]
    # Where a node lost count nothing can be checked, and nothing that can be should be joined with it.
    for gently in (True, False):
        span_ms = 1_024
        while len(ordinary) > most and span_ms < _SPAN_MS_MAX:
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
    """Two heartbeats of a node as one.  If there is one missing in between, it vouches for nothing."""
    return replace(
        following,
        since=beat.since if beat.through == following.since else 0,
        all=beat.all.plus(following.all),
    )


def go_on_with(
    beats: Iterable[NamespaceBeat], others: Iterable[NamespaceBeat], since: Version
) -> list[NamespaceBeat]:
    """Heartbeats that were heard of from `since` on, and what another who reads them adds.

    Both may have joined some of them, and not the same.  If the first that is new reaches back over others,
    those of the other reader count from the last place on where both have an end.
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


def _order(beat: NamespaceBeat) -> tuple[Version, int]:
    return beat.version, -1 if beat.log is None else beat.log


def _last(entry: Entry) -> Version:
    return entry.last


def _end(versions: Versions, through: Version) -> int:
    """How many versions lie at or below one."""
    # As a plain number it would be compared as a float, which tells neighbouring versions not apart.
    return int(numpy.searchsorted(versions, numpy.uint64(through), side="right"))
