"""The commits of a site as its feeds deliver them: all readings must be equal (promises 1, 2, 4 and 5).

The first reading of an interval is the reference.  A later reader of the same interval, from memory, from the
log or by a scan, before or after a crash, must get the same commits with the same changes.  The reference
must also agree with the answers to the writers: a write that returned is in it, a refused one is not, a
commit is never split, and a crash loses only the last asynchronous writes, never some in the middle.
"""

from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import groupby, pairwise
from operator import attrgetter
from typing import Final, NamedTuple, TypeAlias

from floodmark.codec.stamps import NO_STAMP, encode_stamp, find_origins, stamp_version
from floodmark.codec.states import decode_state, live_value
from floodmark.codec.values import IN_BATCH, TOMBSTONE, decode_value
from floodmark.merge.policies import MergePolicy
from floodmark.merge.states import merge_states, stamps_of
from floodmark.model.version import Version, physical_ms
from floodmark.testing.simulation.history import Key, Violation, show_version
from floodmark.testing.simulation.workload import KEYS, Check


class WriteOutcome(StrEnum):
    """The outcome of a write as the writer knows it."""

    DONE = "done"
    REFUSED = "refused"
    UNKNOWN = "unknown"


@dataclass(frozen=True, kw_only=True)
class Intent:
    """An attempted write: its commit is in `(low, high]`, and no other write's commit is.

    `expected` checks for each key that the logged change is the intended one; `adds` is what the write adds
    to a counter.  `era` changes whenever unsynced writes may have been lost.
    """

    operation: str
    outcome: WriteOutcome
    durable: bool
    low: Version
    high: Version
    era: tuple[int, int]
    expected: Mapping[Key, Check]
    adds: int = 0
    batch: bool = False


class SeenChange(NamedTuple):
    """A change as a feed delivered it, with the stored value."""

    version: Version
    key: Key
    stored: bytes
    partition: int | None
    """Where it was written; a scan does not know, if partitions were split or merged since."""
    exact: bool
    """Whether the value is what was logged; else it is the whole record, where records are merged."""
    whole: bytes = b""
    """What the record was after the change, for the chronicle alone."""


# The rows of a data set as they are stored, by key.
DataSet: TypeAlias = Mapping[bytes, bytes]


class SeenSwap(NamedTuple):
    """A data set that was published: the version of its swap, and the stamp of its rows."""

    version: Version
    stamp: bytes


@dataclass
class Chronicle:
    """The commits of one site up to `through`."""

    site: str
    site_id: int
    through: Version = 0
    changes: list[SeenChange] = field(default_factory=list)
    intents: list[Intent] = field(default_factory=list)
    copies_are_whole: bool = True
    """Whether a commit of another site must be one commit in each partition here."""
    forgotten: Version = 0
    """What was written up to here may have been deleted, without a trace, before the chronicle began."""

    def __post_init__(self) -> None:
        self._judged = 0
        self._lost: tuple[int, int] | None = None
        self._stamps: dict[Key, bytes] = {}
        self._copies: dict[tuple[bytes, str], Version] = {}
        self._records: dict[Key, bytes] = {}
        self.swaps: list[SeenSwap] = []
        self.totals: dict[Key, int] = {}
        """What was added at this site to each counter, all in all."""

    def begin_with(self, loaded: list[SeenChange], through: Version, forgotten: Version) -> None:
        """Begin with the records that were loaded into the site, which no feed delivers."""
        self.through, self.forgotten = through, forgotten
        for seen in sorted(loaded):
            self._records[seen.key] = seen.stored
            self._stamps[seen.key] = find_origins([seen.stored])[0]
            self.changes.append(seen._replace(whole=seen.stored))

    def between(self, since: Version, until: Version) -> list[SeenChange]:
        """The changes in `(since, until]`."""
        version = attrgetter("version")
        first = bisect_right(self.changes, since, key=version)
        return self.changes[first : bisect_right(self.changes, until, key=version)]

    def records(self, namespace: str, at: Version) -> dict[bytes, bytes]:
        """The record that each key of a namespace must have at a version, deleted ones included."""
        told = self.between(0, at)
        return {seen.key.key: seen.whole for seen in told if seen.key.namespace == namespace}

    def compare(
        self, told: list[SeenChange], since: Version, through: Version, namespace: str | None
    ) -> None:
        """Check a reading of `(since, through]`, which must not go beyond the chronicle."""
        expected = [
            seen
            for seen in self.between(since, min(through, self.through))
            if namespace is None or seen.key.namespace == namespace
        ]
        for before, now in zip(expected, told, strict=False):
            if before[:2] != now[:2] or not _agree(before, now):
                raise self._differs("4", before, now)
        if len(expected) > len(told):
            raise self._differs("4", expected[len(told)], None)
        if len(told) > len(expected):
            late = told[len(expected)]
            raise Violation(
                "3",
                self.site,
                f"{late.key} appeared where all was resolved",
                keys=[late.key],
                version=late.version,
            )

    def _differs(self, promise: str, before: SeenChange, now: SeenChange | None) -> Violation:
        told = "nothing" if now is None else _show(now)
        return Violation(
            promise,
            self.site,
            f"a reader had {_show(before)}; now it is {told}",
            keys=[before.key],
            version=before.version,
        )

    def extend(self, told: list[SeenChange], through: Version) -> None:
        """Append the first reading of all namespaces after `self.through`, up to `through`."""
        if any(left.version > right.version for left, right in pairwise(told)):
            raise Violation("2", self.site, "a feed is not in commit order", keys=[seen.key for seen in told])
        for version, commit in groupby(told, key=attrgetter("version")):
            changes = list(commit)
            self._check_commit(version, changes)
            self.changes += [seen._replace(whole=self._records[seen.key]) for seen in changes]
        self.through = through
        self._judge()

    def cross(self, told: list[SeenChange], swap: SeenSwap, rows: DataSet) -> None:
        """Append the reading of a swap in the first namespace.

        Its result must be the data set, with all writes above its stamp.
        """
        at_ms, changed = physical_ms(swap.version), {seen.key: seen.stored for seen in told}
        for key in [Key(NAMESPACES[0], key) for key in KEYS]:
            before, stamp = self._records.get(key), self._stamps.get(key, NO_STAMP)
            expected = before if stamp > swap.stamp else rows.get(key.key)
            found = changed.get(key, before)
            if found is not None and expected is not None:
                differs = live_record(found, at_ms) != live_record(expected, at_ms)
            else:
                differs = live_value(found or expected or TOMBSTONE, at_ms) is not None
            if differs:
                raise Violation(
                    "4",
                    self.site,
                    f"{key} is {found!r} after a data set was published, and should be {expected!r}",
                    keys=[key],
                    version=swap.version,
                )
            self._records[key] = expected or TOMBSTONE
            self._stamps[key] = max(stamp, swap.stamp)
        self.changes += [seen._replace(whole=self._records[seen.key]) for seen in told]
        self.swaps.append(swap)
        self.through = swap.version

    def data_set_at(self, version: Version) -> bytes:
        """The stamp of the data set that is read as of a version."""
        return next((each.stamp for each in reversed(self.swaps) if each.version <= version), NO_STAMP)

    def _check_commit(self, version: Version, commit: list[SeenChange]) -> None:
        origins = find_origins([seen.stored for seen in commit])
        own = [seen for seen, origin in zip(commit, origins, strict=True) if not origin]
        if own:
            self._check_own(version, own)
        for seen in commit:
            self._records[seen.key] = _joined(seen, self._records.get(seen.key))
        for seen, origin in zip(commit, origins, strict=True):
            self._check_stamp(seen, origin or encode_stamp(version, self.site_id))
            if stamp_version(origin) >= version:
                raise Violation(
                    "2",
                    self.site,
                    f"{seen.key} is stored below its stamp {show_version(stamp_version(origin))}",
                    keys=[seen.key],
                    version=version,
                )
            if origin and self.copies_are_whole and _is_of(seen, origin) and not _is_expiry(seen):
                self._check_copy(seen, origin)

    def _check_copy(self, seen: SeenChange, origin: bytes) -> None:
        """What another site committed to a namespace is one commit here, as is an atomic batch to several."""
        namespace = "" if seen.stored[-1] & IN_BATCH else seen.key.namespace
        if self._copies.setdefault((origin, namespace), seen.version) != seen.version:
            raise Violation(
                "8",
                self.site,
                f"a commit of another site was split: {seen.key} came later than the rest",
                keys=[seen.key],
                version=seen.version,
            )

    def _check_own(self, version: Version, commit: list[SeenChange]) -> None:
        """A commit that was first written here must be one that a writer tried, and whole."""
        index = bisect_right(self.intents, version - 1, key=attrgetter("low")) - 1
        intent = self.intents[index] if index >= 0 else None
        keys = [seen.key for seen in commit]
        if intent is None or version > intent.high or intent.outcome is WriteOutcome.REFUSED:
            what = "no writer wrote" if intent is None or version > intent.high else "a refused write left"
            raise Violation("1", self.site, f"{what} {keys[0]}", keys=keys, version=version)
        for seen in commit:
            check = intent.expected.get(seen.key)
            if check is None or (seen.exact and not check(self._records.get(seen.key), seen.stored)):
                raise Violation(
                    "1",
                    self.site,
                    f"{intent.operation} became {seen.stored!r} under {seen.key}",
                    keys=[seen.key],
                    version=version,
                )
            if bool(seen.stored[-1] & IN_BATCH) != intent.batch:
                what = "has the mark of a batch" if not intent.batch else "lacks the mark of a batch"
                raise Violation(
                    "6",
                    self.site,
                    f"{intent.operation} {what} in {seen.key}",
                    keys=[seen.key],
                    version=version,
                )
        for key in (key for key in keys if POLICIES[key.namespace] == "counter"):
            self.totals[key] = self.totals.get(key, 0) + intent.adds
        # A scan leaves out what was overwritten since.
        if all(seen.partition is not None for seen in commit) and sorted(intent.expected) != sorted(keys):
            raise Violation(
                "1",
                self.site,
                f"{intent.operation} was split: only {keys} of {list(intent.expected)}",
                keys=intent.expected,
                version=version,
            )

    def _check_stamp(self, seen: SeenChange, stamp: bytes) -> None:
        """On each key commit order is stamp order, where a record has one stamp."""
        if POLICIES[seen.key.namespace] != "last_write":
            return
        standing = self._stamps.get(seen.key, b"")
        if stamp < standing or (stamp == standing and not _is_expiry(seen)):
            raise Violation(
                "2",
                self.site,
                f"an older write of {seen.key} was stored",
                keys=[seen.key],
                version=seen.version,
            )
        self._stamps[seen.key] = stamp

    def _judge(self) -> None:
        """Find acknowledged writes that are missing."""
        while self._judged < len(self.intents) and self.intents[self._judged].high <= self.through:
            intent = self.intents[self._judged]
            self._judged += 1
            if intent.outcome is not WriteOutcome.DONE or not intent.expected:
                continue
            there = {seen.key for seen in self.between(intent.low, intent.high)}
            if all(key in there for key in intent.expected):
                if intent.era == self._lost:
                    raise self._missing(intent, "came after one that a crash took, and is there")
            elif intent.durable:
                raise self._missing(intent, "was acknowledged, and is not there")
            else:
                self._lost = intent.era

    def _missing(self, intent: Intent, what: str) -> Violation:
        return Violation(
            "1", self.site, f"{intent.operation} {what}", keys=intent.expected, version=intent.high
        )


# The namespaces of every site, in the order in which they are made, and their merge policies.
POLICIES: Final[dict[str, MergePolicy]] = {"users": "last_write", "profiles": "fields", "counts": "counter"}
NAMESPACES: Final = tuple(POLICIES)


def _agree(before: SeenChange, now: SeenChange) -> bool:
    """Whether a change is read as before, or as the record that resulted from it.

    The record may lack parts that were dead when the change arrived, because garbage collection removed them
    first.
    """
    if before.exact and now.exact:
        return before.stored == now.stored
    at_ms = physical_ms(before.version)
    return now.exact or live_value(before.whole, at_ms) == live_value(now.stored, at_ms)


def live_record(stored: bytes, at_ms: int) -> tuple[bytes | None, int | None]:
    """The value that a reader finds in a record at a time, and its expiry."""
    record = decode_value(stored)
    return (None, None) if record.is_dead_at(at_ms) else (record.value, record.expires_at)


def _joined(seen: SeenChange, record: bytes | None) -> bytes:
    """The record that results from a change."""
    return seen.stored if POLICIES[seen.key.namespace] == "last_write" else merge_states(record, seen.stored)


def _show(seen: SeenChange) -> str:
    return f"{seen.key} {seen.stored!r} at {show_version(seen.version)}"


def _is_expiry(seen: SeenChange) -> bool:
    """Whether a record had expired when it was stored: an expiry is the record once more, under its stamp."""
    record = decode_value(seen.stored)
    return not record.deleted and record.is_dead_at(physical_ms(seen.version))


def _is_of(seen: SeenChange, origin: bytes) -> bool:
    """Whether a change is known to be what the commit of its origin wrote, and nothing else.

    A scan finds whole records, here or at the source, and they bear the newest of the stamps in them.
    """
    if POLICIES[seen.key.namespace] == "last_write":
        return seen.partition is not None
    stamps = stamps_of(decode_state(seen.stored))
    return seen.exact and all(encode_stamp(stamp.version, stamp.site) == origin for stamp in stamps)


def qualified(key: Key) -> bytes:
    """The qualified form of a key, as partitions use it."""
    return (NAMESPACES.index(key.namespace) + 1).to_bytes(3, "big") + key.key


def unqualified(key: bytes) -> Key:
    """The key of a qualified one."""
    return Key(NAMESPACES[int.from_bytes(key[:3], "big") - 1], key[3:])
