"""Readers of a site: feeds that resume from checkpoints, and snapshots that are read again and again.

Wherever a feed resumes, it must get all changes of the chronicle (promise 4), or fail at once because garbage
collection has passed its checkpoint (promise 5), which must not happen to a feed with a safe point.  A
snapshot never changes.
"""

from collections.abc import Iterator, Sequence
from random import Random
from typing import Final

from floodmark.codec.ordered import qualify_range
from floodmark.codec.stamps import encode_stamp
from floodmark.codec.states import live_value
from floodmark.codec.values import decode_value
from floodmark.merge.states import merge_states
from floodmark.model.change import Stamp
from floodmark.model.errors import FloodmarkError, GenerationSwapped, VersionCollected
from floodmark.model.stream import ChangeBatch, ChangesRequest, OnGeneration, SwapPlace
from floodmark.model.version import Version
from floodmark.testing.simulation.chronicle import NAMESPACES, SeenChange
from floodmark.testing.simulation.history import Key, Violation, show_version
from floodmark.testing.simulation.sites import HOLD, SimulatedSite, embedded, seen_of

POLLS_MAX: Final = 3


class FeedReader:
    """Reads one namespace or all, in pieces, and sometimes loses all state except its checkpoint."""

    def __init__(self, site: SimulatedSite, name: str, random: Random, *, follows: bool, holds: bool) -> None:
        self.name = name
        self.site = self._site = site
        self._random = random
        self._namespace = random.choice((None, *NAMESPACES))
        self._partial = random.random() < 0.5
        self._follows = follows
        self._holds = holds
        self._checkpoint: Version | None = None
        self._position: Version = 0
        self._stream: Iterator[ChangeBatch] | None = None
        self._life = 0
        # Parts of records say nothing of a data set.
        self._goes_on = site.data_sets is not None and not self._partial

    def poll(self) -> None:
        """Read some changes, and check them."""
        if self._checkpoint is None:
            self._begin()
            return
        try:
            told, since = self._read()
        except GenerationSwapped:
            self._check_swapped()
            return
        except VersionCollected:
            self._check_collected()
            return
        self._site.extend_chronicle()
        self._site.chronicle.compare(told, since, self._position, self._namespace)
        if self._random.random() < 0.8:
            self._save()

    def _begin(self) -> None:
        """Begin at the resolved version: every later change must be delivered."""
        self._site.extend_chronicle()
        start = self._site.chronicle.through
        if self._holds:
            self._site.call(lambda site: site.hold_safe_point(self.name, start, lifetime=HOLD))
        self._checkpoint = self._position = start

    def _read(self) -> tuple[list[SeenChange], Version]:
        if self._life != self._site.life or self._random.random() < 0.2:
            # The reader or the site has crashed, so only the checkpoint is left.
            self._stream, self._life = None, self._site.life
            assert self._checkpoint is not None
            self._position = self._checkpoint
        since = self._position
        if not self._follows:
            told, self._position = self._site.read_changes(self._request(since))
            return told, since
        try:
            batches = [self._next_batch(since) for _ in range(self._random.randint(1, POLLS_MAX))]
            while SwapPlace.decode(batches[-1].snapshot) is not None:
                # What comes at a swap is one commit.
                batches.append(self._next_batch(since))
        except FloodmarkError:
            self._stream = None
            raise
        self._position = max(since, batches[-1].through)
        return [seen for batch in batches for seen in seen_of(batch, partial=self._partial)], since

    def _next_batch(self, since: Version) -> ChangeBatch:
        if self._stream is None:
            self._stream = self._site.call_host(lambda host: host.changes(self._request(since)))
        return self._site.read_batch(self._stream)

    def _request(self, since: Version) -> ChangesRequest:
        reaction = OnGeneration.DIFFERENCE if self._goes_on else OnGeneration.FAIL
        if self._namespace is None:
            return ChangesRequest(
                since=since, follow=self._follows, partial=self._partial, on_generation=reaction
            )
        number = NAMESPACES.index(self._namespace) + 1
        keys = qualify_range(number)
        return ChangesRequest(
            keys=keys,
            namespace=number,
            since=since,
            follow=self._follows,
            partial=self._partial,
            on_generation=reaction,
        )

    def _save(self) -> None:
        # The checkpoint first: it is unknown whether a safe point has moved if the site crashes in between.
        position = self._checkpoint = self._position
        if self._holds:
            self._site.call(lambda site: site.hold_safe_point(self.name, position, lifetime=HOLD))

    def _check_swapped(self) -> None:
        """A reader that does not go on must have a data set before it."""
        self._stream = None
        self._site.extend_chronicle()
        swaps = [each.version for each in self._site.chronicle.swaps if each.version > self._position]
        if self._goes_on or not swaps or self._namespace not in (None, NAMESPACES[0]):
            finding = f"{self.name} ended at a swap behind {show_version(self._position)}"
            raise Violation("4", self._site.name, finding)
        self._checkpoint = None

    def _check_collected(self) -> None:
        """A reader that holds a safe point must never lose its place, and another only to a collection."""
        self._stream = None
        oldest = self._site.call_host(lambda host: host.retention.oldest_version(self._namespace))
        if self._holds or self._position >= oldest:
            place, collected = show_version(self._position), show_version(oldest)
            finding = f"{self.name} lost its place {place}; collected is {collected}"
            raise Violation("5", self._site.name, finding)
        self._checkpoint = None


class RepeatedReader:
    """Reads a namespace and its watermark as of a version, and later again as of the same."""

    def __init__(self, site: SimulatedSite, sites: Sequence[SimulatedSite], random: Random) -> None:
        self.site = self._site = site
        self._sites = sites
        self._random = random
        self._namespace = random.choice(NAMESPACES)
        self._version: Version | None = None
        self._records: dict[bytes, bytes] = {}
        self._watermark: dict[int, Version] = {}

    def poll(self) -> None:
        """Read the snapshot again, or begin with another."""
        site = self._site
        begins = self._version is None or self._random.random() < 0.3
        if begins:
            site.extend_chronicle()
            self._version = site.chronicle.through
            self._records = site.chronicle.records(self._namespace, self._version)
        version = self._version
        assert version is not None
        try:
            # After a jump back of the clock the version may lie ahead of it.
            judged_ms = site.call_host(lambda host: embedded(host).node.clock.judged_ms(version))
            rows = dict(site.call(lambda each: list(each.namespace(self._namespace).stored.scan(at=version))))
            watermark = site.call_host(lambda host: host.replication.watermark(self._namespace, version))
        except VersionCollected:
            self._check_collected(version)
            return
        if begins:
            self._watermark = watermark
            self._check_watermark(version)
        if watermark != self._watermark:
            raise self._changed(f"the watermark was {self._watermark} and is {watermark}", ())
        expected = self._expected_rows(judged_ms)
        for key in sorted(rows.keys() | expected.keys()):
            if rows.get(key) != expected.get(key):
                named = Key(self._namespace, key)
                raise self._changed(f"{named} was {expected.get(key)!r} and is {rows.get(key)!r}", [named])

    def _changed(self, what: str, keys: Sequence[Key]) -> Violation:
        assert self._version is not None
        at = show_version(self._version)
        return Violation("snapshot", self._site.name, f"as of {at} {what}", keys=keys)

    def _check_collected(self, version: Version) -> None:
        oldest = self._site.call_host(lambda host: host.retention.oldest_version(self._namespace))
        if version >= oldest:
            raise self._changed(f"all is gone, and collected is {show_version(oldest)}", ())
        self._version = None

    def _expected_rows(self, judged_ms: int) -> dict[bytes, bytes]:
        """The rows that a reader must find by the chronicle, with expiry judged at a time."""
        values = {key: live_value(stored, judged_ms) for key, stored in self._records.items()}
        return {key: value for key, value in values.items() if value is not None}

    def _check_watermark(self, version: Version) -> None:
        """Check that the snapshot includes every change that the watermark covers."""
        records = self._site.chronicle.records(self._namespace, version)
        # Of a site that was removed, changes that no site had got are lost though the watermark covers them.
        for source in [site for site in self._sites if site.id in self._watermark]:
            for seen in source.chronicle.between(0, self._watermark[source.id]):
                key = seen.key
                record = records.get(key.key)
                if key.namespace == self._namespace and not self._covers(record, seen, source.id):
                    raise Violation(
                        "8",
                        self._site.name,
                        f"{key} of {source.name} is missing, and the watermark covers it",
                        keys=[key],
                        version=seen.version,
                    )

    def _covers(self, record: bytes | None, seen: SeenChange, source: int) -> bool:
        """Whether a record has taken in a change of a site, if it was first written there."""
        change = decode_value(seen.stored)
        if change.origin is not None or seen.version <= self._site.chronicle.forgotten:
            return True
        assert self._version is not None
        replaced = self._site.chronicle.data_set_at(self._version)
        if seen.key.namespace == NAMESPACES[0] and encode_stamp(seen.version, source) <= replaced:
            return True
        if record is None:
            return False
        if change.stamps is not None:
            return merge_states(record, seen.stored) == record
        origin = decode_value(record).origin
        # What was first written here, and won, was written above all that had come from elsewhere.
        return origin is None or origin >= Stamp(seen.version, source)
