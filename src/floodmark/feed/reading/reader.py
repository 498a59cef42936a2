"""Streams of changes from a node: up to the present, and then live.

There are three ways to catch up, and a stream takes the cheapest one that reaches back far enough:

- the *tail*: the last commits, in memory.  Nothing is read and nothing is decoded;
- the *log*: one sequential scan, O(changes);
- a *scan* of all versions of the keys, O(keys), sorted by version and rate limited.  It serves where the
  change log was trimmed but the versions are still kept.

Changes that were collected cannot be read, and a stream that needs them fails at once.  A reader that needs
every key begins with a *snapshot*: the state at a version S in order of keys, then the changes above S.  None
is missing and none comes twice, because a scan as of S sees every commit at or below S and no other.

    place        (S, "")  (S, key)  …  (S, key)  S        version …
    delivered    nothing  records up to the key  all      changes up to the version

The place is all that a reader stores.  Expiry is judged at S, so the rows depend on S and the keys alone, and
a reader that resumes in the middle finds the same.

A slow reader must cost the writers nothing.  A stream holds one batch in memory, takes no lock that
writers wait for, and gathers the commits of a few milliseconds instead of being woken for
every commit; a commit to other keys does not wake it at all (`partition/following.py`).

A batch ends where a commit ends, so a reader never gets a part of an atomic batch, whatever partitions it
lies in.  A commit that is larger than a batch makes a larger batch: the limit of commits bounds both.
"""

from bisect import bisect_left
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from itertools import count, pairwise
from pathlib import Path
from threading import Event, RLock
from typing import Final

from msgspec.structs import replace

from floodmark.codec.ordered import NAMESPACE_BYTES, encode_namespace, qualify_range
from floodmark.feed.reading.columns import BATCH_BYTES_MAX, Columns
from floodmark.feed.reading.rate import RateLimit
from floodmark.feed.reading.sorter import Sorter
from floodmark.feed.reading.swaps import Swap, cross, end_before_swap, no_swap
from floodmark.feed.safepoints import SafePoints
from floodmark.model.errors import (
    Corruption,
    InvalidArgument,
    InvalidVersion,
    VersionCollected,
    VersionInFuture,
)
from floodmark.model.limits import SORT_BYTES_MAX
from floodmark.model.ranges import KeyRange, after
from floodmark.model.stream import ChangeBatch, ChangesRequest, OnGeneration, SwapPlace, Way
from floodmark.model.version import Version, physical_ms
from floodmark.partition import Follower, LogLine, Node, version_of
from floodmark.routing import Router

# The poll interval of a follower that is not woken, for example to notice that the site was closed.
FOLLOW_SECONDS: Final = 0.2
# A woken follower gathers the commits of this time, so that it is not woken for each.
GATHER_SECONDS: Final = 0.01
SCAN_RATE_BYTES_MAX: Final = 64 * 1024 * 1024


@dataclass(frozen=True, kw_only=True)
class ReaderStatistics:
    """One open stream of changes.

    `namespace` is an id, None for all; `changes` counts deliveries by the way they were read.
    """

    namespace: int | None
    follow: bool
    position: Version
    lag_ms: int
    way: Way
    changes: Mapping[Way, int]


@dataclass(frozen=True, kw_only=True)
class ChangeStatistics:
    """The open streams of changes, and the deliveries of all since the site was opened."""

    open: list[ReaderStatistics]
    changes: Mapping[Way, int]


class ChangeReader:
    """Opens streams of changes, and keeps statistics of the open ones."""

    def __init__(
        self,
        node: Node,
        safe_points: SafePoints,
        is_live: Callable[[int], bool],
        *,
        router: Router | None = None,
        sort_bytes_max: int = SORT_BYTES_MAX,
        scan_rate_bytes_max: int | None = SCAN_RATE_BYTES_MAX,
        sort_directory: Path | None = None,
    ) -> None:
        self._node = node
        self._safe_points = safe_points
        self._is_live = is_live
        # Returns the first swap above a position of a namespace, or of any.
        self.swap_after: Callable[[int | None, Version], Swap | None] = no_swap
        # Reaches the whole site, of which the node may serve only a part.
        self._router = router or Router(node)
        self._sort_bytes_max = sort_bytes_max
        self._scan_rate_bytes_max = scan_rate_bytes_max
        self._sort_directory = sort_directory
        self._streams: dict[int, _ChangeStream] = {}
        self._tokens = count()
        # Deliveries of streams that have ended.
        self._delivered = dict.fromkeys(Way, 0)
        # Reentrant: Python may collect, and so end, a stream in a thread that holds the lock.
        self._lock = RLock()

    def read(self, request: ChangesRequest) -> Iterator[ChangeBatch]:
        """The requested changes.  Their safe point is held from this call on.

        A following stream yields empty batches while there are no changes, so that its reader can stop.
        """
        batches = self._batches(request)
        next(batches)
        return batches

    def statistics(self) -> ChangeStatistics:
        """The open streams, and the deliveries by way."""
        with self._lock:
            streams, delivered = list(self._streams.values()), dict(self._delivered)
        for stream in streams:
            for way, changes in stream.delivered.items():
                delivered[way] += changes
        return ChangeStatistics(open=[stream.statistics() for stream in streams], changes=delivered)

    def _batches(self, request: ChangesRequest) -> Generator[ChangeBatch, None, None]:
        # Nothing is older than the node itself.
        request = replace(request, since=max(request.since, self._node.born_version()))
        self._check_snapshot(request)
        stream, token = _ChangeStream(self, self._node, request), next(self._tokens)
        with self._safe_points.reading(request.since, request.namespace) as advance:
            self._streams[token] = stream
            try:
                yield ChangeBatch(through=request.since, snapshot=request.snapshot)
                if (place := SwapPlace.decode(request.snapshot)) is not None:
                    yield from stream.deliver(self.cross(request, self._swap_at(request), place))
                elif request.snapshot is not None:
                    yield from stream.deliver(self._snapshot(request))
                yield from stream.run(advance)
            finally:
                with self._lock:
                    del self._streams[token]
                    for way, changes in stream.delivered.items():
                        self._delivered[way] += changes

    def _check_snapshot(self, request: ChangesRequest) -> None:
        """Raise an error for a snapshot, or for the rows of a swap, that cannot be read."""
        if request.on_generation is not OnGeneration.FAIL and (request.own or request.partial):
            raise InvalidArgument("a data set has whole records, of no site; ask for neither own nor partial")
        if request.snapshot is None or SwapPlace.decode(request.snapshot) is not None:
            return
        if request.own or request.keys_only:
            raise InvalidArgument("a snapshot has whole records, of all sites; ask for neither own nor keys")
        resolved = self._node.resolved_version(request.since)
        if request.since > resolved:
            raise VersionInFuture(
                f"a snapshot at {request.since} cannot be read yet: the site has only come to {resolved}",
                version=request.since,
            )

    def _snapshot(self, request: ChangesRequest) -> Iterator[ChangeBatch]:
        """The records that are live at the version `since` of a request, after its key.

        A page without a live record is an empty batch, so that a reader can stop.  The last batch is empty,
        and ends the snapshot.
        """
        place, one = request.snapshot or b"", request.namespace
        for namespace in sorted(self._safe_points.live_namespaces()) if one is None else [one]:
            prefix = encode_namespace(namespace)
            within = qualify_range(namespace).intersect(request.keys)
            left = within and within.intersect(KeyRange(after(place)))
            for page in self._router.scan_records(left, request.since) if left is not None else ():
                user_keys, versions, partitions, values = (column.to_pylist() for column in page.columns)
                keys = [prefix + key for key in user_keys]
                place = keys[-1] if keys else place
                self._node.require_open()
                yield ChangeBatch(
                    through=request.since,
                    way=Way.SNAPSHOT,
                    versions=versions,
                    partitions=partitions,
                    keys=keys,
                    values=values,
                    befores=[None] * len(keys) if request.before_images else None,
                    snapshot=place,
                )
        yield ChangeBatch(through=request.since, way=Way.SNAPSHOT)

    def _swap_at(self, request: ChangesRequest) -> Swap:
        """The swap at whose place a request begins."""
        version = request.since + 1
        swap = self.swap_after(request.namespace, request.since)
        if swap is None or swap.version != version:
            raise InvalidVersion(
                f"no data set was published at version {version}, where the stream is to go on"
            )
        return swap

    def cross(self, request: ChangesRequest, swap: Swap, place: SwapPlace | None) -> Iterator[ChangeBatch]:
        """The rows of a swap, after a place if one was reached.  The last batch is empty, and ends them."""
        if not self._is_live(swap.namespace):
            yield ChangeBatch(through=swap.version, way=Way.SNAPSHOT)
            return
        for batch in cross(request, swap, place, self._router.scan_records, self._node.site_id):
            self._node.require_open()
            yield batch

    def look_up(self, key: bytes, version: Version) -> bytes | None:
        try:
            return self._node.look_up_value(key, version)
        except Corruption:
            # The data of a dropped namespace is removed before its changes are.
            if self._is_live(int.from_bytes(key[:NAMESPACE_BYTES], "big")):
                raise
            return None

    def scan(self, keys: KeyRange, since: Version, until: Version, columns: Columns) -> Iterator[ChangeBatch]:
        """The changes of qualified keys in `(since, until]`, in commit order.

        The caller holds a safe point at `since`, and `until` is resolved: the versions in between do not
        change.  An empty batch comes after each page, so that a reader can stop.
        """
        rate = RateLimit(self._scan_rate_bytes_max, self._node.clock.time_source, Event().wait)
        with Sorter(self._sort_directory, self._sort_bytes_max) as sorter:
            for page in self._node.scan_versions(keys, since, until):
                route = self._node.map.route
                sorter.add_page(
                    [
                        (version, key, route(key).id, stored)
                        for version, key, stored in page.rows
                        if columns.wants(stored)
                    ]
                )
                rate.spend(page.bytes_read)
                yield ChangeBatch(through=since, way=Way.SCAN)
            last = since
            for version, key, partition, stored in sorter.rows():
                if version != last and columns.gathered_bytes >= BATCH_BYTES_MAX:
                    yield from columns.drain(last, Way.SCAN)
                columns.add_change(version, partition, key, stored)
                last = version
            yield from columns.drain(until, Way.SCAN)


class _ChangeStream:
    """One stream: its position, and the way in which it reads on."""

    def __init__(self, reader: ChangeReader, node: Node, request: ChangesRequest) -> None:
        self.delivered = dict.fromkeys(Way, 0)
        self._reader = reader
        self._node = node
        self._request = request
        self._position = request.since
        self._goes_on = request.on_generation is not OnGeneration.FAIL
        self._way = Way.LOG
        before = node.find_before if request.before_images else None
        self._columns = Columns(
            request.keys,
            reader.look_up,
            before,
            heartbeats=request.heartbeats,
            own=node.site_id if request.own else None,
            partial=request.partial,
            keys_only=request.keys_only,
        )

    def statistics(self) -> ReaderStatistics:
        now_ms = self._node.clock.physical_ms()
        return ReaderStatistics(
            namespace=self._request.namespace,
            follow=self._request.follow,
            position=self._position,
            lag_ms=max(0, now_ms - physical_ms(self._position)),
            way=self._way,
            changes=dict(self.delivered),
        )

    def deliver(self, batches: Iterable[ChangeBatch]) -> Iterator[ChangeBatch]:
        """Yield the batches, count their changes, and move the position."""
        for batch in batches:
            self._way = batch.way
            self.delivered[batch.way] += len(batch.keys)
            yield batch
            self._position = max(self._position, batch.through)

    def run(self, advance: Callable[[Version], None]) -> Iterator[ChangeBatch]:
        """The batches up to the requested end, or without end."""
        request, committer = self._request, self._node.committer
        committer.sync()
        with self._following() as follower:
            while request.until is None or self._position < request.until:
                self._node.require_open()
                if follower is not None:
                    follower.expect()
                # A following stream waits until its end is resolved.
                wanted = 0 if request.follow else request.until or 0
                resolved = self._node.resolved_version(wanted)
                end = resolved if request.until is None else min(request.until, resolved)
                # Looked up after the resolved version: a swap that is missed here lies above it.
                swap = None if request.own else self._reader.swap_after(request.namespace, self._position)
                if swap is not None and swap.version == self._position + 1 <= end and self._goes_on:
                    batches, target = self._reader.cross(request, swap, None), swap.version
                else:
                    target = end_before_swap(swap, self._position, end)
                    batches = self._catch_up(self._position, target)
                if target > self._position:
                    for batch in self.deliver(batches):
                        yield batch
                        advance(max(self._position, batch.through))
                elif follower is not None:
                    yield ChangeBatch(through=self._position, way=self._way)
                if target < end:
                    # The next round delivers the swap.
                    continue
                if follower is None:
                    return
                if target == resolved:
                    passed = committer.followers.wait(follower, FOLLOW_SECONDS, GATHER_SECONDS)
                    swap = self._reader.swap_after(request.namespace, self._position)
                    is_swapped = swap is not None and swap.version <= passed
                    if request.until is None and not request.heartbeats and not is_swapped:
                        # There is no change of these keys up to `passed`, so the tail need not be read.
                        self._position = max(self._position, passed)

    @contextmanager
    def _following(self) -> Iterator[Follower | None]:
        """Keep the tail and register for wake-ups during the block; None for a stream that ends."""
        request, committer = self._request, self._node.committer
        if not request.follow:
            yield None
            return
        # Heartbeats are only in the log.
        latest = lambda: self._node.clock.latest  # noqa: E731
        with (
            nullcontext() if request.heartbeats else committer.tail.following(latest),
            committer.followers.joining(request.keys, heartbeats=request.heartbeats) as follower,
        ):
            yield follower

    def _catch_up(self, since: Version, target: Version) -> Iterator[ChangeBatch]:
        """Everything in `(since, target]`; the last batch goes through `target`."""
        if self._request.follow and not self._request.heartbeats:
            while (batches := self._from_tail(since, target)) is not None:
                yield from batches
                since = batches[-1].through
                if since >= target:
                    return
        try:
            pages = self._node.read_log(
                since, target, self._request.keys, heartbeats=self._request.heartbeats
            )
            for batch in gather_lines(pages, target, self._columns):
                yield batch
                since = batch.through
        except VersionCollected:
            # The log was trimmed.  The versions are still stored, because of this stream's safe point.
            self._columns.clear()
            yield from self._reader.scan(self._request.keys, since, target, self._columns)

    def _from_tail(self, since: Version, target: Version) -> list[ChangeBatch] | None:
        """The next batch, or None if the tail does not reach back far enough.

        Only one, because batches held here do not count towards the tail's memory limit.
        """
        entries = self._node.committer.tail.between(since, target)
        if entries is None:
            return None
        columns = self._columns
        for place, entry in enumerate(entries, 1):
            columns.add_commit(entry.version, entry.partition, entry.keys, entry.values)
            # A commit to several partitions has an entry for each.
            is_whole = place == len(entries) or entries[place].version != entry.version
            if is_whole and columns.gathered_bytes >= BATCH_BYTES_MAX:
                return list(columns.drain(entry.version, Way.TAIL))
        return list(columns.drain(target, Way.TAIL))


def gather_lines(pages: Iterable[list[LogLine]], target: Version, columns: Columns) -> Iterator[ChangeBatch]:
    """The changes of change-log lines, in batches, the last of which goes through `target`."""
    # The last commit of a page may continue in the next one, and is kept back.
    kept: list[LogLine] = []
    for page in pages:
        lines = kept + page
        last = version_of(lines[-1])
        end = bisect_left(lines, last, key=version_of)
        for line, following in pairwise(lines[: end + 1]):
            columns.add_line(line)
            is_full = columns.gathered_bytes >= BATCH_BYTES_MAX
            if is_full and version_of(line) != version_of(following):
                yield from columns.drain(version_of(line), Way.LOG)
        kept = lines[end:]
        if not columns.is_empty:
            yield from columns.drain(last - 1, Way.LOG)
    for line in kept:
        columns.add_line(line)
    yield from columns.drain(target, Way.LOG)
