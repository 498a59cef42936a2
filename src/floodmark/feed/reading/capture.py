"""Change capture: one callback per change, in spite of rewinds, repetitions and switches between sites.

A client reads the feed of one site, and may go back in it or continue with the feed of another site, which
has the same changes at other versions and in another order.  The callback is called once for each change.

**Within one feed, versions decide.**  A *reading* is a stretch of one site's feed without gaps: the client
has every change of that site in `(after, through]`, and a change from that interval is a duplicate.

**Between feeds, stamps decide.**  Only a site's heartbeats tell which changes of other sites it has: stamps
of other sites arrive out of order, so a high one proves nothing about lower ones.  After a heartbeat at h
with the entry "all changes of origin O up to w are in", the client counts the stamps in `(after, w]` as had.
The proof, for a reading of site S that began after version `after`:

1. At S a change's stamp is at or below its commit version.  S's own changes have equal ones, and S moves
   its clock past the stamp of any other before it commits it.
2. A change of O with a stamp at or below w stands in S's log below h, or it lost there to a change of the
   same key with a higher stamp, which stands in S's log below h.
3. If the stamp is above `after`, then by 1 the commit version of either is above `after` too: it lies in
   `(after, h)`, all of which was accepted.  So the change was called back, or one that supersedes it.

At or below `after` the heartbeat claims more than the client has read, and nothing is concluded.  Thus a
reading that begins too late never makes a change be dropped; spans of several readings are united where
they touch.  Conversely, everything that was called back is either in a span or remembered stamp by stamp,
so nothing is called back twice.  Few stamps are remembered, because the next heartbeats cover them.

Each site writes the expiry of a record by itself, under the stamp of the record, and heartbeats say nothing
of it.  So an expiry is called back once for each feed that is read: after a switch it may come again.

The same holds for what comes at a swap, where a data set was published: each site swaps by itself, and its
rows are no changes that a heartbeat knows of.  The marker tells its version, and within a feed versions
decide.  The feed must be read with `on_generation="difference"`.

A heartbeat is not held against what follows it in its own feed, where versions decide; but between feeds
step 2 needs a site not to announce a version as long as it may still commit a stamp at or below it.

**Traps.**  The feed must carry heartbeats and the same namespaces and keys at all times.  After a switch
a change that lost at the old site can be called back later than its winner: to keep the newest value of
each key, compare stamps.  A state holds what was called back before it was taken, so store it after the
effects of the callback: then a crash repeats the changes since, and loses none.
"""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Final, NamedTuple, TypeAlias

import msgspec

from floodmark.feed.reading.items import Item
from floodmark.model.change import Change, ChangeType, Heartbeat
from floodmark.model.errors import InvalidArgument
from floodmark.model.version import Version

# Only a client that skips repeatedly has more spans.  The oldest is then dropped, and the callback would be
# called again for its changes.
SPANS_MAX: Final = 16

# A namespace, and the id of the site at which changes were first written.
Origin: TypeAlias = tuple[str, int]


class Span(NamedTuple):
    """The stamp versions in `(after, through]`."""

    after: Version
    through: Version


class Seen(NamedTuple):
    """Identifies a change that was called back.  An expiry has the stamp of its record."""

    namespace: str
    site: int
    version: Version
    key: bytes
    is_expiry: bool = False


class Had(msgspec.Struct, frozen=True):
    """The stamps of one origin whose changes the client has had."""

    namespace: str
    site: int
    spans: tuple[Span, ...]


class ReadingState(msgspec.Struct, frozen=True, kw_only=True):
    """A reading: all of a site's changes in `(after, through]`, and some at `position`, the last version."""

    site: int
    after: Version
    through: Version
    position: Version
    had: tuple[Had, ...]
    seen: tuple[Seen, ...]
    # The version of the last swap.
    swap: Version = 0


class CaptureState(msgspec.Struct, frozen=True, kw_only=True):
    """The whole state of a capture, to store (for example as JSON) and to pass to the next one.

    >>> msgspec.json.decode(msgspec.json.encode(CaptureState()), type=CaptureState)
    CaptureState(reading=None, had=(), seen=())
    """

    reading: ReadingState | None = None
    had: tuple[Had, ...] = ()
    seen: tuple[Seen, ...] = ()


class ChangeCapture:
    """Calls a function once for each change.  For one thread.

    `names` gives the namespaces of a site by id, as heartbeats name them, each name once.

    >>> from floodmark.model import Stamp
    >>> capture = ChangeCapture(lambda change: print(change.key), lambda site_id: {1: "users"})
    >>> ada = Change("users", b"ada", b"1815", ChangeType.UPSERT, 7, Stamp(7, 1), 0)
    >>> capture.begin(1, since=0)
    >>> capture.accept(1, ada), capture.accept(1, ada)
    b'ada'
    (True, False)
    """

    def __init__(
        self,
        callback: Callable[[Change], object],
        names: Callable[[int], Mapping[int, str]],
        state: CaptureState | None = None,
    ) -> None:
        state = state or CaptureState()
        self._callback = callback
        self._names = names
        self._reading = None if state.reading is None else _Reading.load(state.reading)
        # The stamps covered by earlier readings.
        self._spans = {(had.namespace, had.site): had.spans for had in state.had}
        self._seen = set(state.seen)
        self._begun = False
        # A change whose callback failed: no other item is accepted before its callback succeeds.
        self._owed: Change | None = None

    def begin(self, site_id: int, since: Version, *, held: bool = False) -> None:
        """Declare that the next items are those of a site after version `since`, without gaps.

        `since(site_id)` returns a version from which nothing is missed.  If the client has all changes of the
        site at or below `since` from elsewhere, for example from a snapshot, or does not want them, pass
        `held=True`: they are then not called back when they arrive from another site.  If `since` is the last
        accepted version, this declares that all changes of that version were accepted.
        """
        if held or not self._continues(site_id, since):
            self._end_reading()
            self._reading = _Reading(site_id, 0 if held else since, since, since)
        elif self._reading is not None:
            self._reading.through = max(self._reading.through, since)
        self._begun, self._owed = True, None

    def accept(self, site_id: int, item: Item) -> bool:
        """Process the next item of the site's feed; return whether the callback was called.

        If the callback raises, the state is unchanged: accept the same item again, or begin again.
        """
        reading = self._reading
        if reading is None or reading.site != site_id or not self._begun:
            raise InvalidArgument(
                f"an item of site {site_id} came, and its feed was not begun; call begin({site_id}, since) "
                "with the version that the feed starts after",
                site=site_id,
            )
        if self._owed is not None and item != self._owed:
            raise InvalidArgument(
                f"the callback for {self._owed.key!r:.60} at version {self._owed.version} failed, and "
                "another item came; accept the failed one again, or begin again",
                version=self._owed.version,
            )
        if isinstance(item, Change):
            return self._accept_change(reading, item)
        if item.version > reading.through:
            if isinstance(item, Heartbeat) and item.log is None:
                self._learn(reading, item)
            reading.through = item.version
            reading.position = max(reading.position, item.version)
        return False

    def since(self, site_id: int, *, removed: Collection[int] = ()) -> Version:
        """The version after which to read a site's feed so that nothing is missed.

        For the site that was read last, this is the position of its reading.  For another site, it is the
        lowest version up to which the client has the changes of every origin: the other site's commits up to
        there have lower stamps.  Sites that were `removed` from the mesh are ignored, because their entries
        no longer move.  Only sites and namespaces in heartbeats count: read new ones from their beginning.
        """
        reading = self._reading
        if reading is not None and reading.site == site_id:
            return reading.through
        spans = self._spans if reading is None else _united(self._spans, reading)
        ends = [had[-1].through if had else 0 for (_, site), had in spans.items() if site not in removed]
        return min(ends, default=0)

    def state(self) -> CaptureState:
        """The present state.  Within a callback, it does not include the change of the callback."""
        return CaptureState(
            reading=None if self._reading is None else self._reading.state(),
            had=_list_had(self._spans),
            seen=tuple(sorted(self._seen)),
        )

    def _accept_change(self, reading: "_Reading", change: Change) -> bool:
        stamp = change.stamp
        is_expiry = change.type is ChangeType.DELETE and change.expires_at is not None
        seen = Seen(change.namespace, stamp.site, stamp.version, change.key, is_expiry)
        if change.type is ChangeType.GENERATION:
            if change.snapshot:
                raise InvalidArgument(
                    f"the feed of site {reading.site} goes on over a swap with a snapshot, which voids what "
                    'was called back; read it with on_generation="difference"',
                    site=reading.site,
                )
            reading.swap = change.version
        is_new = not reading.has(change.version, seen)
        if change.version != reading.swap:
            is_new = is_new and not self._had_before(seen)
        if is_new:
            self._owed = change
            self._callback(change)
            self._owed = None
            # A before-image belongs to the image after it, which counts as the change.
            if change.type is not ChangeType.UPDATE_PREIMAGE:
                reading.seen.add(seen)
        reading.reach(change.version)
        return is_new

    def _had_before(self, seen: Seen) -> bool:
        spans = () if seen.is_expiry else self._spans.get((seen.namespace, seen.site), ())
        return any(span.after < seen.version <= span.through for span in spans) or seen in self._seen

    def _continues(self, site_id: int, since: Version) -> bool:
        reading = self._reading
        if reading is None or reading.site != site_id:
            return False
        return reading.after <= since <= (reading.through if self._owed else reading.position)

    def _end_reading(self) -> None:
        """Move the stamps covered by the reading to those of earlier readings."""
        if self._reading is not None:
            self._spans = _united(self._spans, self._reading)
            self._seen |= self._reading.seen

    def _learn(self, reading: "_Reading", heartbeat: Heartbeat) -> None:
        """Apply the watermark of a heartbeat, and forget the single stamps that it covers."""
        names, watermark = self._names(reading.site), heartbeat.watermark
        sites = {site for entries in watermark.values() for site in entries}
        # A missing entry is 0: of that site nothing may be in yet.
        marks = {
            (name, site): watermark.get(namespace, {}).get(site, 0)
            for namespace, name in names.items()
            for site in sites
        }
        marks |= {(name, reading.site): heartbeat.through for name in names.values()}
        for origin, version in marks.items():
            reading.marks[origin] = max(version, reading.marks.get(origin, 0))
        reading.seen = {seen for seen in reading.seen if not reading.covers(seen)}
        if self._seen:
            self._seen = {seen for seen in self._seen if not reading.covers(seen)}


@dataclass
class _Reading:
    """A stretch of one site's feed, with the watermarks of its heartbeats."""

    site: int
    after: Version
    through: Version
    position: Version
    marks: dict[Origin, Version] = field(default_factory=dict)
    seen: set[Seen] = field(default_factory=set)
    swap: Version = 0

    @classmethod
    def load(cls, state: ReadingState) -> "_Reading":
        marks = {(had.namespace, had.site): had.spans[-1].through for had in state.had}
        seen = set(state.seen)
        return cls(state.site, state.after, state.through, state.position, marks, seen, state.swap)

    def state(self) -> ReadingState:
        return ReadingState(
            site=self.site,
            after=self.after,
            through=self.through,
            position=self.position,
            had=_list_had({origin: (Span(self.after, mark),) for origin, mark in self.marks.items()}),
            seen=tuple(sorted(self.seen)),
            swap=self.swap,
        )

    def has(self, version: Version, seen: Seen) -> bool:
        """Whether a change of this feed was accepted before.

        Some changes of the last version may still be missing, so these are looked up one by one.
        """
        return self.after < version <= self.through or seen in self.seen

    def reach(self, version: Version) -> None:
        """Note that a change of this version was accepted, and so all changes of lower versions."""
        if version > self.position:
            self.through, self.position = version - 1, version

    def covers(self, seen: Seen) -> bool:
        """Whether a heartbeat of this reading proves that the client has had a change."""
        return self.after < seen.version <= self.marks.get((seen.namespace, seen.site), 0)


def _united(spans: Mapping[Origin, tuple[Span, ...]], reading: _Reading) -> dict[Origin, tuple[Span, ...]]:
    """The spans united with those of a reading.  Includes origins without any span."""
    united = dict(spans)
    for origin, mark in reading.marks.items():
        had = united.get(origin, ())
        united[origin] = _unite(had, Span(reading.after, mark)) if mark > reading.after else had
    return united


def _unite(spans: tuple[Span, ...], new: Span) -> tuple[Span, ...]:
    """Spans in order, with another one; those that touch become one.

    >>> _unite((Span(0, 5), Span(9, 12)), Span(5, 7))
    (Span(after=0, through=7), Span(after=9, through=12))
    """
    touching = [span for span in spans if span.after <= new.through and new.after <= span.through]
    apart = [span for span in spans if span not in touching]
    touching.append(new)
    whole = Span(min(span.after for span in touching), max(span.through for span in touching))
    return tuple(sorted([*apart, whole])[-SPANS_MAX:])


def _list_had(spans: Mapping[Origin, tuple[Span, ...]]) -> tuple[Had, ...]:
    return tuple(Had(namespace, site, had) for (namespace, site), had in sorted(spans.items()))
