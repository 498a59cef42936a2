"""An ordered log whose appends are spread over partitions, without a hot spot.

    e | site: 1 | bucket: 8 | version: 8 | index: 4    an entry: the version of its commit, its number there
    m | site: 1 | span: 8                              shift: 1     a span of versions that has entries
    i | site: 1                                        the shifts, and from which span on each holds
    t | site: 1                                        version: 8 | index: 4    the last removed entry
    x | site: 1 | bucket: 8                            never written; see below

**Buckets.**  A bucket is `version >> shift` with its 64 bits reversed.  Entries of a quarter of an interval
are stored together in order, and the keys of successive buckets are far apart, so the appends move from
partition to partition.  A reader computes the next bucket.  The commit puts its version into the key
(`Transaction.append`), so the entries are in commit order, and appends do not conflict with each other.

**Spans** have 2³² versions: 16.4 seconds.  Before an appender uses a span it marks the span with the shift of
its entries, in a transaction that reads the shifts.  Its appends are committed within that span or not at
all.  A changed interval takes effect two spans later.  So all entries of a span have one shift, which a
reader finds in the mark, and idle spans cost a reader nothing.

**Reading** ends at the resolved version: no entry will be added at or below it, so a reader misses none.  A
reader that follows continues with the live changes of the namespace.

**Ordered by conflicts**, the buckets are whole intervals, so that few appenders cross the end of one.  An
appender derives its bucket from its read version.  It declares the previous bucket as written (`x`), and its
own as read: it conflicts if a later bucket was begun meanwhile.  It must commit before the end of the next
bucket, because an appender two buckets later declares nothing that this one reads.
"""

from bisect import bisect_right
from collections.abc import Iterable, Iterator
from copy import copy
from datetime import timedelta
from functools import partial
from itertools import chain, islice
from operator import itemgetter
from struct import Struct
from typing import Final, Literal, NamedTuple, TypeAlias

from floodmark.codec.appends import NO_BUCKET, SHIFT_MAX, append_key, encode_bucket
from floodmark.layers.ports import LayerSite, LayerTransaction, claim, present
from floodmark.model.change import ChangeType, Stamp
from floodmark.model.errors import Conflict, InvalidArgument, InvalidValue, VersionCollected, WrongPolicy
from floodmark.model.limits import SITE_IDS_MAX, VALUE_BYTES_MAX
from floodmark.model.ranges import prefix_end
from floodmark.model.version import COUNTER_BITS, VERSION_MAX, Version

ORDERED_LOG: Final = b"ordered log 1"

Ordering: TypeAlias = Literal["commit", "conflicts"]

# The number of low bits of a version that vary within a span.
SPAN_BITS: Final = 32
# The number of attempts of an append whose version comes out in another span or bucket than expected.
ATTEMPTS_MAX: Final = 100
TRIM_ENTRIES: Final = 1_000
# log2 of the buckets in an interval: with four in each, ten intervals spread evenly over eight partitions.
_INTERVAL_BITS: Final[dict[Ordering, int]] = {"commit": 2, "conflicts": 0}
# A reader gets this many entries of a bucket one by one before it opens a scan.
_POINT_READS: Final = 8
# The number of ranges without entries that a reader remembers.
_GAPS_MAX: Final = 1 << 16
INTERVAL_MAX: Final = timedelta(days=365)

_SPAN: Final = 1 << SPAN_BITS
_INDEX_MAX: Final = (1 << 32) - 1
_NUMBER: Final = Struct(">Q")
_POSITION: Final = Struct(">QL")
# The key of an entry: `e`, site and bucket as padding, then the position.
_ENTRY: Final = Struct(">10xQL")
_SHIFTS: Final = Struct(">QB")
_ORDERINGS: Final[dict[bytes, Ordering]] = {b"\x00": "commit", b"\x01": "conflicts"}


class LogPosition(NamedTuple):
    """The position of an entry: its commit version, and its number among the appends of that commit."""

    version: Version
    number: int = 0


class AppendCounts(NamedTuple):
    """The numbers of appends and of retried appends of one handle."""

    appends: int
    conflicts: int


class _Permit(NamedTuple):
    """A marked span: appends before its end have this shift."""

    before: Version
    shift: int


class _BucketRun(NamedTuple):
    """Successive versions with the same bucket."""

    shift: int
    number: int
    low: Version
    high: Version


class OrderedLog:
    """A log of entries in commit order, in a namespace of its own.  Safe to use from many threads.

    Appends move to another bucket four times in each `interval`, which is rounded down to a power of two of
    milliseconds.  Without `bucketing` all appends go to the end of one range.  Both apply to a new log only:
    an existing one keeps its settings until `change_interval`.

    Each site reads the entries that were appended there, and those of a site that it has replaced.

    >>> import floodmark, tempfile
    >>> from floodmark.layers import OrderedLog
    >>> with floodmark.open(tempfile.mkdtemp(), site="oslo") as site:
    ...     log = OrderedLog(site, "audit")
    ...     first = log.append(b"ada logged in")
    ...     second = log.append(b"ada logged out")
    ...     list(log.read(since=first)) == [(second, b"ada logged out")]
    True
    """

    def __init__(
        self,
        site: LayerSite,
        name: str,
        *,
        interval: timedelta = timedelta(seconds=1),
        bucketing: bool = True,
        ordering: Ordering = "commit",
    ) -> None:
        if ordering not in _ORDERINGS.values():
            raise InvalidArgument(f"the ordering is 'commit' or 'conflicts', not {ordering!r:.60}")
        self._site = site
        # The namespace that holds the rows of the layer.
        self.stored = claim(site, name, ORDERED_LOG)
        self._name_rows(site.id)
        shift = _shift_of(interval if bucketing else None, ordering)
        kept, _ = _decode(site.run_transaction(lambda t: self._begin(t, ordering, shift)))
        if kept != ordering:
            raise WrongPolicy(
                f"the log {name!r} orders its entries by {kept!r}, and appends by {ordering!r} would not be "
                f"in order with them; open it with ordering={kept!r}",
                namespace=name,
            )
        self.ordering = ordering
        self._permit = _Permit(0, 0)
        self._appends = self._conflicts = 0

    @property
    def name(self) -> str:
        """The name of the namespace."""
        return self.stored.name

    def __repr__(self) -> str:
        return f"OrderedLog({self.name!r})"

    def _name_rows(self, site: int) -> None:
        own = bytes([site])
        self._entries, self._marks, self._declared = b"e" + own, b"m" + own, b"x" + own
        self._settings, self._trimmed = b"i" + own, b"t" + own

    # Writes

    def append(self, entry: bytes, *, transaction: LayerTransaction | None = None) -> LogPosition | None:
        """Append an entry and return its position.

        In a `transaction` the entry is appended if the transaction commits, and None is returned: the version
        of the position is the commit version.
        """
        self._appends += 1
        if transaction is not None:
            self._append_in(transaction, entry)
            return None
        if self.ordering == "conflicts":
            return LogPosition(self._append_by_conflicts(entry))
        above: Version = 0
        for _ in range(ATTEMPTS_MAX):
            before, shift = self._permit_above(above)
            try:
                version = self._site.append(self.stored, self._entries, entry, shift=shift, before=before)
            except Conflict as conflict:
                # The conflict names the version of the attempt: it leads to another node, or the span is
                # over.
                self._conflicts += 1
                above, failure = _version_of(conflict), conflict
            except InvalidValue as error:
                raise _refused(entry) from error
            else:
                return LogPosition(version)
        raise failure

    def _append_by_conflicts(self, entry: bytes) -> Version:
        attempts = 0

        def work(transaction: LayerTransaction) -> LayerTransaction:
            nonlocal attempts
            attempts += 1
            self._append_in(transaction, entry)
            return transaction

        version = self._site.run_transaction(work).version
        self._conflicts += attempts - 1
        return version

    def _append_in(self, transaction: LayerTransaction, entry: bytes) -> None:
        """Append in a transaction, which must commit in the span of its read version."""
        read_version = transaction.read_version
        before, shift = self._permit_above(read_version)
        if type(entry) is not bytes or len(entry) > VALUE_BYTES_MAX:
            raise _refused(entry)
        if self.ordering == "commit":
            transaction.append(self.stored, self._entries, entry, shift=shift, before=before)
            return
        if read_version < before - _SPAN:
            raise Conflict("a span of an ordered log began after a transaction had read; begin it again")
        number = read_version >> shift
        own, earlier = (encode_bucket(each, 0) for each in (number, max(0, number - 1)))
        transaction.add_read_conflict(self.stored, self._declared + own)
        if number:
            transaction.add_write_conflict(self.stored, self._declared + earlier)
        before = min(before, number + 2 << shift)
        transaction.append(self.stored, self._entries + own, entry, before=before)

    def _permit_above(self, version: Version) -> _Permit:
        """The permit for the span of a version."""
        permit = self._permit
        while not version < permit.before:
            # Entries of the span must be above its mark, whose version this site has seen.
            self._permit = permit = self._site.run_transaction(self._mark)
        return permit

    def _mark(self, transaction: LayerTransaction) -> _Permit:
        """Mark the present span, with its shift."""
        span = transaction.read_version >> SPAN_BITS
        shift = _shift_at(self._read_shifts(transaction), span)
        key = self._marks + _NUMBER.pack(span)
        if transaction.get(self.stored, key) is None:
            transaction.put(self.stored, key, bytes([shift]))
        return _Permit(span + 1 << SPAN_BITS, shift)

    def trim(self, *, before: LogPosition | Version) -> int:
        """Remove the entries before a position; return their number.

        The `read` of a reader that has not passed the position raises VersionCollected.
        """
        position = min(_position(before), LogPosition(self._site.resolved_version()))
        if not position.version:
            return 0
        end = LogPosition(position.version, position.number - 1) if position.number else None
        last = end or LogPosition(position.version - 1, _INDEX_MAX)
        found = chain.from_iterable(self._read(LogPosition(0), last))
        removed = 0
        while keys := [key for key, _ in islice(found, TRIM_ENTRIES)]:
            self._site.run_transaction(lambda t, keys=keys: self._remove(t, keys))  # type: ignore[misc]
            removed += len(keys)
        # Marks of spans without entries.
        self.stored.delete_range(self._marks, self._marks + _NUMBER.pack(position.version >> SPAN_BITS))
        return removed

    def _remove(self, transaction: LayerTransaction, keys: list[bytes]) -> None:
        """Remove entries, and store the last one's position, for readers that have not read it."""
        last = max(self._read_trimmed(transaction), _position_of(keys[-1]))
        transaction.put(self.stored, self._trimmed, _POSITION.pack(*last))
        for key in keys:
            transaction.delete(self.stored, key)

    def change_interval(self, interval: timedelta | None) -> None:
        """Change the interval in which appends move on four times; with None, they stay in one bucket.

        It takes effect after 17 to 33 seconds.  Existing entries are not moved, and the order is kept.
        """
        shift = _shift_of(interval, self.ordering)
        self._site.run_transaction(lambda transaction: self._set_shift(transaction, shift))

    def _set_shift(self, transaction: LayerTransaction, shift: int) -> None:
        # A transaction takes less than a span, so no span that gets the new shift is marked yet.
        span = transaction.read_version >> SPAN_BITS
        shifts = self._read_shifts(transaction)
        current = [each for each in shifts if each[0] <= span][-1:]
        coming = [each for each in shifts if each[0] == span + 1]
        kept = [*current, *coming, (span + 2, shift)]
        transaction.put(self.stored, self._settings, _encode(self.ordering, kept))

    @property
    def interval(self) -> timedelta | None:
        """The interval in which appends move on four times at present; None if they stay in one bucket."""
        version = present(self._site)
        _, shifts = _decode(self.stored.get(self._settings, at=version) or b"")
        shift = _shift_at(shifts, version >> SPAN_BITS)
        if shift == SHIFT_MAX:
            return None
        return timedelta(milliseconds=1 << shift - COUNTER_BITS + _INTERVAL_BITS[self.ordering])

    @property
    def statistics(self) -> AppendCounts:
        """The counts of this handle's appends."""
        return AppendCounts(self._appends, self._conflicts)

    def split_keys(self, partitions: int) -> list[bytes]:
        """The keys at which to split the namespace to spread the buckets over a number of partitions.

        >>> import floodmark, tempfile
        >>> with floodmark.open(tempfile.mkdtemp(), site="oslo") as site:
        ...     for key in OrderedLog(site, "audit").split_keys(4):
        ...         _ = site.split("audit", key)
        ...     len(site.partitions())
        4
        """
        width = (1 << 64) // partitions
        return [self._entries + _NUMBER.pack(number * width) for number in range(1, partitions)]

    # Reads

    def read(
        self, since: LogPosition | Version | None = None, *, follow: bool = False, site: int | None = None
    ) -> Iterator[tuple[LogPosition, bytes]]:
        """The entries after a position, in order, up to the resolved version; with `follow`, without end.

        A version as position stands for the last entry at that version.  Raises VersionCollected if entries
        after the position were trimmed.  Without a position, all remaining entries are read.

        `site` is the id of another site whose entries to read: one that was removed, or whose backup was
        restored here.  Raises InvalidArgument if a link still brings its entries, and with `follow`.
        """
        if site is None or site == self._site.id:
            return chain.from_iterable(self._portions(since, follow=follow))
        if type(site) is not int or not 1 <= site <= SITE_IDS_MAX:
            raise InvalidArgument(f"the id of a site is a number from 1 to {SITE_IDS_MAX}, not {site!r:.60}")
        if follow:
            raise InvalidArgument(f"only the own entries of a site can be followed, not those of site {site}")
        if not self._site.covers(self.name, Stamp(VERSION_MAX, site)):
            raise InvalidArgument(
                f"a link brings entries of site {site} to {self!r}, and not always in order: read them at "
                "that site, or here when it was removed"
            )
        other = copy(self)
        other._name_rows(site)
        settings = self.stored.get(other._settings)
        if settings is None:
            return iter(())
        other.ordering, _ = _decode(settings)
        return chain.from_iterable(other._portions(since, follow=False))

    def _portions(
        self, since: LogPosition | Version | None, *, follow: bool
    ) -> Iterator[Iterable[tuple[LogPosition, bytes]]]:
        """The entries that `read` yields, in pages; followed entries one by one."""
        position = LogPosition(0) if since is None else _position(since, end=True)
        if since is None:
            position = self._read_trimmed(None)
        while True:
            until = LogPosition(self._site.resolved_version(), _INDEX_MAX)
            for page in self._read(position, until) if position < until else ():
                yield zip(_positions_of([key for key, _ in page]), map(itemgetter(1), page), strict=True)
            if not follow:
                return
            position = max(position, until)
            try:
                for change in self._site.changes(
                    self.name, since=position.version, follow=True, prefix=self._entries
                ):
                    if change.type is ChangeType.UPSERT and change.value is not None:
                        position = _position_of(change.key)
                        yield [(position, change.value)]
            except VersionCollected:
                # The changes were collected because this reader is slow, but the entries are still stored.
                continue

    def _read(self, since: LogPosition, until: LogPosition) -> Iterator[list[tuple[bytes, bytes]]]:
        """The rows of the entries in `(since, until]`, in order, in pages that are never empty."""
        at, gaps = self._look(since), _Gaps()
        for run in self._runs(since, until):
            prefix = self._entries + encode_bucket(run.number, 0)
            start = append_key(prefix, NO_BUCKET, run.low, 0)
            if since.version >= run.low:
                start = append_key(prefix, NO_BUCKET, *since) + b"\x00"
            end = append_key(prefix, NO_BUCKET, *min(until, LogPosition(run.high, _INDEX_MAX))) + b"\x00"
            while start < end:
                try:
                    for page in self._pages(start, end, at, gaps):
                        yield page
                        since, start = _position_of(page[-1][0]), page[-1][0] + b"\x00"
                    start = end
                except VersionCollected:
                    at = self._look(since)

    def _pages(
        self, start: bytes, end: bytes, at: Version, gaps: "_Gaps"
    ) -> Iterator[list[tuple[bytes, bytes]]]:
        """The rows in `[start, end)` as of a version, in pages; the first rows one by one, without a scan."""
        behind = prefix_end(self._entries) or b""
        for _ in range(_POINT_READS):
            start = gaps.end_of(start)
            if start >= end:
                return
            found = self.stored.first(start, behind, at=at)
            gaps.add(start, behind if found is None else found[0])
            if found is None or found[0] >= end:
                return
            yield [found]
            start = found[0] + b"\x00"
        yield from self.stored.pages(start, end, at=at)

    def _look(self, since: LogPosition) -> Version:
        """The present version.  Raises VersionCollected if an entry after the position was removed."""
        at = present(self._site)
        row = self.stored.get(self._trimmed, at=at)
        if row is not None and since < (last := LogPosition(*_POSITION.unpack(row))) and since.version:
            raise VersionCollected(
                f"{self!r} was trimmed up to {last}, and its reader has come to {since}: entries between "
                "them are gone. Read from the beginning of what is left, with since=None",
                version=since.version,
            )
        return at

    def _runs(self, since: LogPosition, until: LogPosition) -> Iterator[_BucketRun]:
        """The buckets that may hold entries in `(since, until]`, in order."""
        last: _BucketRun | None = None
        first, end = since.version >> SPAN_BITS, (until.version >> SPAN_BITS) + 1
        for key, mark in self.stored.scan(
            self._marks + _NUMBER.pack(first), self._marks + _NUMBER.pack(min(end, VERSION_MAX))
        ):
            (span,), (shift,) = _NUMBER.unpack(key[-_NUMBER.size :]), mark
            low = max(span << SPAN_BITS, since.version)
            high = min((span + 1 << SPAN_BITS) - 1, until.version)
            number = low >> shift
            if self.ordering == "conflicts":
                # The commit version may belong to the bucket after the entry's own.
                number = max(number - 1, (span << SPAN_BITS) >> shift)
            for each in range(number, (high >> shift) + 1):
                begin = low if self.ordering == "conflicts" else max(low, each << shift)
                stop = high if self.ordering == "conflicts" else min(high, (each + 1 << shift) - 1)
                if last is not None and (last.shift, last.number) == (shift, each):
                    last = last._replace(high=stop)
                    continue
                if last is not None:
                    yield last
                last = _BucketRun(shift, each, begin, stop)
        if last is not None:
            yield last

    # The rows of the layer

    def _begin(self, transaction: LayerTransaction, ordering: Ordering, shift: int) -> bytes:
        """The stored settings; writes them if the log is new."""
        row: bytes | None = transaction.get(self.stored, self._settings)
        if row is None:
            row = _encode(ordering, [(0, shift)])
            transaction.put(self.stored, self._settings, row)
        return row

    def _read_shifts(self, transaction: LayerTransaction) -> list[tuple[int, int]]:
        return _decode(transaction.get(self.stored, self._settings))[1]

    def _read_trimmed(self, transaction: LayerTransaction | None) -> LogPosition:
        """The last entry that was removed."""
        row: bytes | None = (
            self.stored.get(self._trimmed)
            if transaction is None
            else transaction.get(self.stored, self._trimmed)
        )
        return LogPosition(0) if row is None else LogPosition(*_POSITION.unpack(row))


class _Gaps:
    """Ranges of keys without entries that a reader still has to pass."""

    def __init__(self) -> None:
        self._starts: list[bytes] = []
        self._ends: list[bytes] = []

    def add(self, start: bytes, end: bytes) -> None:
        """Remember that there is nothing in `[start, end)`."""
        if len(self._starts) == _GAPS_MAX:
            del self._starts[:], self._ends[:]
        place = bisect_right(self._starts, start)
        self._starts.insert(place, start)
        self._ends.insert(place, end)

    def end_of(self, key: bytes) -> bytes:
        """The end of the gap that contains a key; the key itself if no gap does."""
        place = bisect_right(self._starts, key)
        return max(key, self._ends[place - 1]) if place else key


def _position_of(key: bytes) -> LogPosition:
    """The position of an entry, by its key."""
    return LogPosition._make(_ENTRY.unpack(key))


def _positions_of(keys: Iterable[bytes]) -> Iterator[LogPosition]:
    """The positions of many entries, without a call in Python for each."""
    return map(partial(tuple.__new__, LogPosition), _ENTRY.iter_unpack(b"".join(keys)))


def _version_of(conflict: Conflict) -> Version:
    """The version in the details of a conflict of an append."""
    version = conflict.details.get("version")
    return version if isinstance(version, int) else 0


def _shift_of(interval: timedelta | None, ordering: Ordering) -> int:
    """The shift for an interval.  No bucket is shorter than a millisecond."""
    if interval is None:
        return SHIFT_MAX
    if not isinstance(interval, timedelta) or not timedelta(milliseconds=1) <= interval <= INTERVAL_MAX:
        raise InvalidArgument(
            f"an interval is one millisecond to {INTERVAL_MAX.days} days, not {interval!r:.60}"
        )
    bits = (interval // timedelta(milliseconds=1)).bit_length() - 1
    return COUNTER_BITS + max(0, bits - _INTERVAL_BITS[ordering])


def _shift_at(shifts: list[tuple[int, int]], span: int) -> int:
    """The shift of a span."""
    return next(shift for start, shift in reversed(shifts) if start <= span)


def _encode(ordering: Ordering, shifts: list[tuple[int, int]]) -> bytes:
    kind = next(byte for byte, name in _ORDERINGS.items() if name == ordering)
    return kind + b"".join(_SHIFTS.pack(*each) for each in shifts)


def _decode(row: bytes) -> tuple[Ordering, list[tuple[int, int]]]:
    return _ORDERINGS[row[:1]], list(_SHIFTS.iter_unpack(row[1:]))


def _refused(entry: object) -> InvalidValue:
    found = f"{len(entry):,} bytes" if isinstance(entry, bytes) else f"{entry!r:.60}"
    return InvalidValue(f"an entry of a log is bytes, {VALUE_BYTES_MAX:,} at most, not {found}")


def _position(given: LogPosition | Version, *, end: bool = False) -> LogPosition:
    if isinstance(given, LogPosition):
        return given
    if type(given) is not int or not 0 <= given <= VERSION_MAX:
        raise InvalidArgument(f"a position is a LogPosition, or a version, not {given!r:.60}")
    return LogPosition(given, _INDEX_MAX if end else 0)
