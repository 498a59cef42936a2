"""The partition protocol: the interface of a range of keys, in this process or at a server.

A *qualified* key is the three bytes of a namespace followed by the user's key.  Every call may raise
`PartitionMoved`; the site then asks for the partition map again and continues after the keys that it has.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import TYPE_CHECKING, Final, Generic, NamedTuple, Protocol, TypeAlias, TypeVar

import msgspec

from floodmark.model.access import Role
from floodmark.model.actions import Action, Scope
from floodmark.model.batch import is_batch
from floodmark.model.errors import InvalidVersion
from floodmark.model.ranges import KeyRange
from floodmark.model.record import AtomicAnswer, FreshValue, Versioned
from floodmark.model.version import VERSION_MAX, Version

if TYPE_CHECKING:
    import pyarrow

# The declarations of requests for data.  The first is for requests that reveal none.
OPEN: Final = Action(Role.READ, repeatable=True, anywhere=True)
READS: Final = Action(Role.READ, Scope.NAMESPACE, repeatable=True, anywhere=True)
WRITES: Final = Action(Role.WRITE, Scope.NAMESPACE, large=True, anywhere=True)
# Decided by stamp, inside the commit.
UNCHANGED: Final = replace(WRITES, repeatable=True)
# A copy carries the stamp of another site, and wins over that site's own writes with lower stamps.
COPIES: Final = replace(UNCHANGED, role=Role.REPLICATE, audited=True)
LOADS: Final = replace(COPIES, role=Role.ADMIN)
# A row of a data set replaces itself, and no reader finds it before the swap.
PUBLISHES: Final = replace(UNCHANGED, role=Role.REPLICATE, audited=True)
# Steps that the keeper of a site takes at partitions of other nodes.
STEPS: Final = Action(Role.ADMIN, Scope.SITE, repeatable=True, large=True, anywhere=True)


class CommitLimits(NamedTuple):
    """The limits of one commit, derived from those of the engine."""

    bytes_max: int
    changes_max: int


class Content(StrEnum):
    """The part of each record that a scan returns.

    `WHOLE` is the record as it is stored.  `DIGESTS` has the digests of values instead of the values.  `THIN`
    has all that a comparison of two sites needs (`codec/thin.py`), with digests instead of values.
    """

    WHOLE = "whole"
    DIGESTS = "digests"
    THIN = "thin"


class ReadSet(msgspec.Struct, frozen=True):
    """The reads of a transaction as of a version: qualified keys, and ranges each of one namespace.

    `writes` are ranges that it declares as written, so that transactions that have read them conflict.  The
    number of the attempt, and whether the version was a cached one, are for the metrics of a server.
    """

    since: Version
    keys: Sequence[bytes] = ()
    ranges: Sequence[KeyRange] = ()
    writes: Sequence[KeyRange] = ()
    attempt: int = 1
    is_cached: bool = False


class Partition(Protocol):
    """A range of keys with one writer.  A server's requests derive from the methods that declare a role."""

    id: int
    range: KeyRange
    limits: CommitLimits
    # Partitions of one place share an engine write: "" in this process, the URL of a server elsewhere.
    place: str
    # Whether one process serves the whole site: then `get_fresh` returns the read version of the site.
    is_alone: bool

    @READS
    def get(self, key: bytes, at: Version | None = None) -> bytes | None:
        """The value of a qualified key, now or as of a version."""

    @replace(READS, delayed=True)
    def get_fresh(self, key: bytes, since: Version = 0) -> FreshValue:
        """The value of a qualified key as of the node's read version, or of `since` if that is higher."""

    @READS
    def find(self, key: bytes, at: Version | None = None, end: bytes | None = None) -> Versioned | None:
        """The live record of a qualified key with its version and stamp.

        With `end`, the record of the first key in `[key, end)`, which are of one namespace.  None may then
        mean that one look-up in this partition does not find it, and that the caller has to scan.
        """

    @READS
    def get_many(self, keys: Sequence[bytes], at: Version | None = None) -> list[bytes | None]:
        """The values of several qualified keys, in their order; each is read on its own."""

    @READS
    def read_batches(
        self, keys: Sequence[bytes], among: Sequence[bytes], at: Version | None = None
    ) -> AtomicAnswer:
        """The newest records of distinct qualified keys, for an atomic read of these and `among`.

        With `at`, the newest at or below it, once no write there is still to come.  The keys may be in any
        partitions of this one's node.  If values are large, the answer may have only the first keys.
        """

    def scan(
        self, keys: KeyRange, at: Version, *, rows_max: int | None = None, reverse: bool = False
    ) -> Iterator[list[tuple[bytes, bytes]]]:
        """The live (user key, value) pairs of one namespace as of a version, page by page.

        A page may be empty.  `rows_max` is the number of rows that the caller wants, so that hardly more are
        prepared; there may be a few more.
        """

    def scan_records(
        self, keys: KeyRange, at: Version, *, dead: bool = False, content: Content = Content.WHOLE
    ) -> "Iterator[pyarrow.RecordBatch]":
        """The newest record at or below `at` of each key of a range of one namespace, in order of keys.

        Columns as in `codec/columns.py`: key, version, partition, value as stored.  Tombstones and records
        that have expired by `at` are included only with `dead`.  If `content` is not whole, the stored
        records have no values, and a further column has digests.  A batch may be empty.
        """

    @WRITES
    def put(self, keys: Sequence[bytes], values: Sequence[bytes], *, durable: bool) -> Version:
        """Store encoded values under distinct qualified keys, as one commit."""

    @WRITES
    def merge(self, keys: Sequence[bytes], values: Sequence[bytes], *, durable: bool) -> Version:
        """Merge unstamped states into the records of distinct qualified keys, as one commit.

        They get the stamp of the commit.  The change log holds the written states and not the merged records,
        so that another site can merge them as well.
        """

    @WRITES
    def write(
        self,
        keys: Sequence[bytes],
        values: Sequence[bytes],
        *,
        durable: bool,
        batch: bool = False,
        reads: ReadSet | None = None,
        transaction: str = "",
    ) -> Version:
        """Store encoded values, and merge unstamped states, as one commit; returns its version.

        The keys may be in any partitions of this one's node; raises PartitionMoved if another node has one.
        With `batch` the records and changes carry the mark of an atomic batch.  Raises Conflict if anything
        of `reads` was written after it was read.

        With the id of a `transaction` (`model/batch.py`), `ask_prepared` returns the outcome, by the first
        key.  An id commits once: a repeated call returns the same version.  Raises TransactionEnded if it was
        refused.
        """

    @WRITES
    def compare_and_set(self, key: bytes, expected: bytes | None, value: bytes, *, durable: bool) -> Version:
        """Store an encoded value if the present one is as expected (None: absent); 0 if it is not.

        An unstamped state is merged instead.
        """

    @WRITES
    def delete_unchanged(self, keys: Sequence[bytes], since: Version, *, durable: bool) -> int:
        """Delete the keys that were not written after `since`, as one commit; returns how many.

        The keys may be in any partitions of this one's node.
        """

    @COPIES
    def apply(
        self,
        keys: Sequence[bytes],
        values: Sequence[bytes],
        *,
        durable: bool,
        link: "LinkGuard | None" = None,
    ) -> Version:
        """Store encoded values that carry their origin, as one commit, where they win.

        The keys may be in any partitions of this one's node.  With `link`, the values are refused if the link
        has moved on by the time of the commit.  A value is left out unless its stamp is above that of the
        stored record, and a state is merged into the stored one, so applying a value again, or late, changes
        nothing.  Returns the version of the commit; 0 if nothing was left to store.
        """

    @LOADS
    def load(self, keys: Sequence[bytes], values: Sequence[bytes], *, durable: bool) -> Version:
        """`apply` without rows in the change log, for values that all its readers know already.

        A site that joins from a backup of another, or is restored from its own, then has the records that it
        would have if it had been there all the time, and no reader gets them as new changes.
        """

    @UNCHANGED
    def put_unchanged(
        self, keys: Sequence[bytes], values: Sequence[bytes], since: Version, *, durable: bool
    ) -> int:
        """Store encoded values, as one commit, under the keys that were not changed since a version.

        The keys may be in any partitions of this one's node.  A key is changed if the stamp of its newest
        record, dead or alive, is above `since`; the clock is moved past `since` first, so the values stored
        here count as changed.  Returns how many were stored; a repeated call counts only those of the last
        attempt.  A deletion that garbage collection has removed is not known any more.  Of an unstamped state
        of fields, the fields that were not changed are written; states of counters are refused.
        """

    @STEPS
    def prepare(
        self,
        transaction: str,
        keys: Sequence[bytes],
        values: Sequence[bytes],
        siblings: Sequence[bytes] = (),
        members: Sequence[bytes] = (),
        link: "LinkGuard | None" = None,
        waits: bool = True,
        batch: bool = False,
    ) -> Version:
        """Store an invisible write of a transaction or a batch under distinct qualified keys; returns p.

        Repeating it has no effect.  A transaction or batch commits at the highest p of all its partitions.
        Raises Retryable if another transaction has prepared a write on one of the keys, and does not end it
        in time; at once, unless this one `waits`.  The records of a transaction with several keys are marked
        as a `batch`: links copy them together.

        An atomic batch (`model/batch.py`) conflicts with no other write, and its values may all carry their
        origins.  `siblings` names its partitions, each by the first key that the batch writes there, this one
        included.  `members` may name all its keys, for atomic reads.  With `link`, copies are refused if the
        link has moved on by the time of the prepare.  If the batch is committed here already, returns the
        commit version.  Raises TransactionEnded if the batch is refused here or its id is too old.
        """

    @STEPS
    def commit_prepared(self, transaction: str, version: Version) -> bool:
        """Commit the write that a transaction or batch has prepared here, at a version; False if none is."""

    @STEPS
    def abort_prepared(self, transaction: str, key: bytes | None = None) -> bool:
        """Remove the write that a transaction or batch has prepared here; False if there is none.

        Abort a batch only if a sibling has refused it: else a sibling may commit it.  It is refused from then
        on.  `key` is its first key here, for a batch that may not have been prepared.
        """

    @UNCHANGED
    def ask_prepared(self, transaction: str, key: bytes) -> "Fate":
        """The outcome of a batch or commit here, by its first key: UNDECIDED, at p, if it is prepared.

        If it is unknown here, it is refused in the same step: it can never be prepared or committed.
        """

    @STEPS
    def ended_prepared(self, transactions: Sequence[str], siblings: Sequence[bytes]) -> list[bool]:
        """Whether each batch is not prepared, or no longer, where `siblings` has its first key here."""

    @STEPS
    def validate(self, transaction: str, reads: ReadSet, at: Version) -> None:
        """Raise Conflict if anything of `reads` was written at or below `at`, or is prepared by another.

        Afterwards no write at or below `at` happens, except for those of the transaction itself.
        """

    @STEPS
    def reserve(self, transaction: str, within: KeyRange, at: Version | None = None) -> Version:
        """Declare a range as written by a transaction that has prepared its writes; returns a version p.

        Others that commit above p conflict if they have read it.  The transaction commits at or above p and
        below `reserved_until(p)` (`partition/conflicts.py`).  A second call passes its commit version as
        `at`, or 0 if it is aborted.
        """

    @STEPS
    def settle(self, keys: Sequence[bytes], at: Version) -> None:
        """Return when no write to qualified keys of one namespace at or below a version is still to come."""

    @replace(STEPS, repeatable=False)
    def repair(self, keys: Sequence[bytes], values: Sequence[bytes], seen: Sequence[Version]) -> list[bytes]:
        """Store records with their origin, as one commit, where a key still has the version that was `seen`.

        0 stands for no record.  Returns the keys that were stored.
        """

    @OPEN
    def resolved_version(self) -> Version:
        """A version at or below which every change is durable and published, and none will be added."""


class Decision(StrEnum):
    """The decision on a transaction or batch, for its prepared writes."""

    COMMIT = "commit"
    ABORT = "abort"
    UNDECIDED = "undecided"


class Fate(NamedTuple):
    """A decision; that of a commit has the commit version."""

    decision: Decision
    version: Version = 0


# Returns the decision on a transaction, for readers and writers that find its prepared write.  It must not
# wait for a partition.
Settler = Callable[[str], Fate]
# Returns the decision on an atomic batch, by its id and the first keys of its partitions.  It may ask these:
# no partition waits for a prepared write while it answers.
BatchSettler = Callable[[str, Sequence[bytes]], Fate]


class HoldKind(StrEnum):
    """The causes that can hold the resolved version back."""

    COMMIT = "commit"
    """A round of commits at work, or one that failed and has not been recovered from."""

    UNSYNCED = "unsynced"
    """Commits that were written without waiting for the disk."""

    PREPARED = "prepared"
    """The prepared write of a transaction or an atomic batch."""


class Hold(msgspec.Struct, frozen=True, kw_only=True):
    """A cause that keeps the resolved version at or below `version`, for `age_ms` so far.

    >>> print(Hold(kind=HoldKind.PREPARED, version=7, age_ms=2_500, transaction="0-9"))
    the prepared write of transaction 0-9 has held the resolved version at 7 for 2.5 s
    """

    kind: HoldKind
    version: Version
    age_ms: int
    transaction: str = ""

    def __str__(self) -> str:
        match self.kind:
            case HoldKind.COMMIT:
                what = "a commit that has not come to its end"
            case HoldKind.UNSYNCED:
                what = "a commit that is not synced to disk"
            case HoldKind.PREPARED:
                kind = "atomic batch" if is_batch(self.transaction) else "transaction"
                what = f"the prepared write of {kind} {self.transaction}"
        return f"{what} has held the resolved version at {self.version} for {self.age_ms / 1000:,.1f} s"


Served_co = TypeVar("Served_co", bound=Partition, covariant=True)


@dataclass(frozen=True)
class PartitionMap(Generic[Served_co]):
    """The partitions in order of keys.  Replaced as a whole, so that readers need no lock."""

    starts: Sequence[bytes]
    partitions: Sequence[Served_co]

    def route(self, key: bytes) -> Served_co:
        """The partition of a qualified key."""
        return self.partitions[bisect_right(self.starts, key) - 1]

    def group(self, keys: Sequence[bytes]) -> Iterator[tuple[Served_co, slice]]:
        """The partitions of qualified keys that are in order, each with the place of its keys."""
        start = 0
        while start < len(keys):
            partition = self.route(keys[start])
            last = partition.range.end
            # At least one key: a map that contradicts itself must not make this loop endless.
            end = len(keys) if last is None else max(start + 1, bisect_left(keys, last, start))
            yield partition, slice(start, end)
            start = end

    def overlapping(self, keys: KeyRange) -> list[Served_co]:
        """The partitions that hold keys of the range, in order."""
        first = max(bisect_right(self.starts, keys.start) - 1, 0)
        end = len(self.starts) if keys.end is None else bisect_left(self.starts, keys.end)
        return list(self.partitions[first:end])


class PartitionMaps(Protocol):
    """A source of the present partition map."""

    @property
    def map(self) -> PartitionMap[Partition]:
        """The map, as last loaded."""

    def refresh(self) -> None:
        """Load the map again, after a partition refused with `PartitionMoved`."""


class Owners(msgspec.Struct, frozen=True):
    """The nodes that serve a site: their URLs by number, the keeper, and the owner of each partition by id.

    All are empty for a site of one process.  A partition without an owner is served by any process.
    """

    nodes: Mapping[int, str] = {}
    keeper: int = 0
    partitions: Mapping[int, int] = {}


class LinkGuard(msgspec.Struct, frozen=True):
    """The expectations of a link's stream: the positions of its source in namespaces, by their ids.

    A batch that arrives after a position has moved on is refused: its changes are there already, and may have
    been deleted and collected since.  So is a batch from an earlier incarnation of the source, or from a
    source that was removed: the sites are determining which of its changes they have, and may add none.

    `starts` has, by namespace, the version of the source after which all changes of the stream are, if that
    is not the position.
    """

    source: int
    positions: Mapping[int, Version]
    incarnation: int = 1
    starts: Mapping[int, Version] = {}


@WRITES
class PutStream(msgspec.Struct, frozen=True, tag="write"):
    """A stream of writes."""

    durable: bool


@WRITES
class MergeStream(msgspec.Struct, frozen=True, tag="merge"):
    """A stream of unstamped states, each merged into the record of its key."""

    durable: bool


@COPIES
class ApplyStream(msgspec.Struct, frozen=True, tag="apply"):
    """A stream of changes that carry their origin; each is stored where its stamp wins.

    With `link`, changes are refused once the link has moved on.
    """

    durable: bool
    link: LinkGuard | None = None


@LOADS
class LoadStream(msgspec.Struct, frozen=True, tag="load"):
    """`ApplyStream` without rows in the change log, to fill a site that joins or is restored."""

    durable: bool


@PUBLISHES
class GenerationStream(msgspec.Struct, frozen=True, tag="generation"):
    """A stream of the records of a data set, by the id of the namespace and the number of the generation.

    They are durable when they are acknowledged.
    """

    namespace: int
    number: int


@UNCHANGED
class PutUnchangedStream(msgspec.Struct, frozen=True, tag="put_unchanged"):
    """A stream of writes; each is stored unless the newest stamp of its key is above `since`."""

    durable: bool
    since: Version

    def __post_init__(self) -> None:
        if not 0 <= self.since <= VERSION_MAX:
            raise InvalidVersion(f"{self.since} is not a version; versions have 64 bits")


# Repeating an applied, loaded or unchanged batch, in whole or in part, changes nothing.
StreamCommand: TypeAlias = (
    PutStream | MergeStream | ApplyStream | LoadStream | PutUnchangedStream | GenerationStream
)


class WriteStream(Protocol):
    """A stream of batches of writes to a site, several in flight at a time, acknowledged in order."""

    def send(self, rows: Mapping[bytes, bytes]) -> "Future[int]":
        """Commit encoded values under qualified keys, one commit per node.

        The future's result is the highest version, 0 if nothing was stored; of a `PutUnchangedStream`, how
        many values were stored.  Waits while too much is in flight.
        """

    def close(self) -> None:
        """Return when every batch was answered.  Closing twice is harmless."""
