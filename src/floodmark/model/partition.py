"""The partition protocol: what a site needs of a range of keys, wherever it is served.

A *qualified* key is the three bytes of a namespace followed by the user's key.  Every call may raise
`PartitionMoved`; the site then asks for the partition map again and goes on behind what it has.
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

# What requests for data need.  The first is for requests that reveal nothing.
OPEN: Final = Action(Role.READ, repeatable=True, anywhere=True)
READS: Final = Action(Role.READ, Scope.NAMESPACE, repeatable=True, anywhere=True)
WRITES: Final = Action(Role.WRITE, Scope.NAMESPACE, large=True, anywhere=True)
# Decided by stamp, inside the commit.
UNCHANGED: Final = replace(WRITES, repeatable=True)
# A copy carries the stamp of another site, and beats that site's own writes up to there.
COPIES: Final = replace(UNCHANGED, role=Role.REPLICATE, audited=True)
LOADS: Final = replace(COPIES, role=Role.ADMIN)
# A row of a data set replaces itself, and no reader finds it before the swap.
PUBLISHES: Final = replace(UNCHANGED, role=Role.REPLICATE, audited=True)
# Steps that the keeper of a site takes at partitions of other nodes.
STEPS: Final = Action(Role.ADMIN, Scope.SITE, repeatable=True, large=True, anywhere=True)


class CommitLimits(NamedTuple):
    """What one commit may hold; derived from what the engine underneath can take at once."""

    bytes_max: int
    changes_max: int


class Content(StrEnum):
    """How much of a record a scan brings along.

    `WHOLE` is the record as it is stored.  `DIGESTS` has the digests of values in place of them.  `THIN` has
    all that two sites have to know of a record to be compared (`codec/thin.py`), and values in digests only.
    """

    WHOLE = "whole"
    DIGESTS = "digests"
    THIN = "thin"


class ReadSet(msgspec.Struct, frozen=True):
    """What a transaction has read as of a version: qualified keys, and ranges each of one namespace.

    `writes` are ranges that it declares as written, so that others conflict that have read them.  For the
    metrics of a server, it tells the number of the attempt, and whether its version was a cached one.
    """

    since: Version
    keys: Sequence[bytes] = ()
    ranges: Sequence[KeyRange] = ()
    writes: Sequence[KeyRange] = ()
    attempt: int = 1
    is_cached: bool = False


class Partition(Protocol):
    """A range of keys with one writer.  A server's requests derive from calls that declare a role."""

    id: int
    range: KeyRange
    limits: CommitLimits
    # Partitions of one place share an engine write: "" in this process, the URL of a server elsewhere.
    place: str
    # Whether one process serves the whole site: then `get_fresh` tells the read version of the site.
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

        With `end`, the record of the first key in `[key, end)`, which are of one namespace; None if one
        look-up in this partition does not tell, and a scan has to.
        """

    @READS
    def get_many(self, keys: Sequence[bytes], at: Version | None = None) -> list[bytes | None]:
        """The values of several qualified keys, in their order; each is read on its own."""

    @READS
    def read_batches(
        self, keys: Sequence[bytes], among: Sequence[bytes], at: Version | None = None
    ) -> AtomicAnswer:
        """The newest records of distinct qualified keys, for an atomic read of these and `among`.

        With `at`, the newest at or below it, when no write there is still to come.  The keys may lie in any
        partitions of this one's node.  Large values may leave only the first keys room in the answer.
        """

    def scan(
        self, keys: KeyRange, at: Version, *, rows_max: int | None = None, reverse: bool = False
    ) -> Iterator[list[tuple[bytes, bytes]]]:
        """The live (user key, value) pairs of one namespace as of a version, page by page.

        A page may be empty.  `rows_max` says how many rows will be read at most, so that no more are
        prepared; there may be a few more.
        """

    def scan_records(
        self, keys: KeyRange, at: Version, *, dead: bool = False, content: Content = Content.WHOLE
    ) -> "Iterator[pyarrow.RecordBatch]":
        """The newest record at or below `at` of each key of a range of one namespace, in order of keys.

        Columns as in `codec/columns.py`: key, version, partition, value as stored.  Tombstones and records
        that have expired by `at` come only with `dead`.  If `content` is not whole, the stored records hold
        no values, and a column more has digests.  A batch may be empty.
        """

    @WRITES
    def put(self, keys: Sequence[bytes], values: Sequence[bytes], *, durable: bool) -> Version:
        """Store encoded values under distinct qualified keys, as one commit."""

    @WRITES
    def merge(self, keys: Sequence[bytes], values: Sequence[bytes], *, durable: bool) -> Version:
        """Merge unstamped states into what distinct qualified keys hold, as one commit.

        They get the stamp of the commit.  What the change log then holds is what was written and no more,
        so that it can be merged at another site as well.
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
        """Store encoded values, and merge unstamped states, as one commit; its version.

        The keys may lie in any partitions of this one's node; PartitionMoved if another node has one.  With
        `batch` the records and changes carry the mark of an atomic batch.  Conflict if anything of `reads`
        was written after it was read.

        With the id of a `transaction` (`model/batch.py`), `ask_prepared` tells the outcome by the first key.
        The id commits once: the version is returned again.  Raises TransactionEnded if it was refused.
        """

    @WRITES
    def compare_and_set(self, key: bytes, expected: bytes | None, value: bytes, *, durable: bool) -> Version:
        """Store an encoded value if the present one is as expected (None: absent); 0 if it is not.

        An unstamped state is merged instead.
        """

    @WRITES
    def delete_unchanged(self, keys: Sequence[bytes], since: Version, *, durable: bool) -> int:
        """Delete those keys that were not written after `since`, as one commit; how many.

        The keys may lie in any partitions of this one's node.
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

        Their keys lie in any partitions of the same node.  With `link`, they are refused if the link has
        moved on by the time of the commit.  A value whose stamp is not above the stamp of what is there is
        left out, and a state is merged with what is there, so applying twice, or late, changes nothing.  The
        version of the commit; 0 if nothing was left to store.
        """

    @LOADS
    def load(self, keys: Sequence[bytes], values: Sequence[bytes], *, durable: bool) -> Version:
        """`apply` without a trace in the change log, for what all who read that have heard of already.

        A site that joins from a backup of another, or comes back from its own, holds then what it would hold
        if it had been there all the time, and no reader is told of it as if it were new.
        """

    @UNCHANGED
    def put_unchanged(
        self, keys: Sequence[bytes], values: Sequence[bytes], since: Version, *, durable: bool
    ) -> int:
        """Store encoded values, as one commit, under those keys that were not changed since a version.

        The keys may lie in any partitions of this one's node.
        A key is changed if the stamp of its newest record, dead or alive, lies above `since`; the clock is
        moved past `since` first, so what is stored here counts as changed.  How many were stored.
        A call that is repeated counts only what the last one stored.
        A deletion that garbage collection has removed is not known any more.  Of unstamped states of fields,
        those fields are written that were not changed; those of counters are refused.
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
        """Store an invisible write of a transaction or a batch under distinct qualified keys; its version p.

        Repeating it has no effect.  A transaction or batch commits at the highest p of all its partitions.
        Raises Retryable if another transaction has prepared a write on one of the keys, and does not end it
        in time; at once, unless this one `waits`.  The records of a transaction with several keys are marked
        as a `batch`: links copy them together.

        An atomic batch (`model/batch.py`) conflicts with no other write, and its values may all carry their
        origins.  `siblings` names its partitions, each by the first key that the batch writes there, this one
        included.  `members` may name all its keys, which serves atomic reads.  With `link`, copies are
        refused if the link has moved on by the time of the prepare.  Of a batch that is committed here
        already the commit version is returned.  Raises TransactionEnded if the batch is refused here or
        its id is too old.
        """

    @STEPS
    def commit_prepared(self, transaction: str, version: Version) -> bool:
        """Make what a transaction or batch has prepared here a commit at a version; False if none is."""

    @STEPS
    def abort_prepared(self, transaction: str, key: bytes | None = None) -> bool:
        """Remove what a transaction or batch has prepared here; False if there is nothing.

        Only a batch that a sibling has refused may be aborted: others may be committed by a sibling.  A batch
        is refused from then on.  `key` is its first key here, for a batch that may not have been prepared.
        """

    @UNCHANGED
    def ask_prepared(self, transaction: str, key: bytes) -> "Fate":
        """What has become of a batch or commit here, by its first key: UNDECIDED, at p, if it is prepared.

        One that is not known here is refused in the same step: it can never be prepared or committed.
        """

    @STEPS
    def ended_prepared(self, transactions: Sequence[str], siblings: Sequence[bytes]) -> list[bool]:
        """Whether each batch is not prepared, or no longer, where `siblings` has its first key here."""

    @STEPS
    def validate(self, transaction: str, reads: ReadSet, at: Version) -> None:
        """Raise Conflict if anything of `reads` was written at or below `at`, or is prepared by another.

        No write at or below `at` comes afterwards, but those of the transaction itself.
        """

    @STEPS
    def reserve(self, transaction: str, within: KeyRange, at: Version | None = None) -> Version:
        """Declare a range as written by a transaction that has prepared its writes; the version p.

        Others that commit above p conflict if they have read it.  The transaction commits at or above p and
        below `reserved_until(p)` (`partition/conflicts.py`).  With `at` it is told where, or 0 if nowhere.
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
        """Every change at or below it is durable and published, and none will be added."""


class Decision(StrEnum):
    """What has become of a transaction, as far as its prepared writes are concerned."""

    COMMIT = "commit"
    ABORT = "abort"
    UNDECIDED = "undecided"


class Fate(NamedTuple):
    """What the coordinator of a transaction answers; a commit has the version at which it applies."""

    decision: Decision
    version: Version = 0


# Asked by readers and writers that meet a prepared write of a transaction.  It must not wait for a partition.
Settler = Callable[[str], Fate]
# The same for an atomic batch, with the first keys of its partitions, which it may ask: none of them waits
# for a prepared write while it answers.
BatchSettler = Callable[[str, Sequence[bytes]], Fate]


class HoldKind(StrEnum):
    """What can hold the resolved version back."""

    COMMIT = "commit"
    """A round of commits at work, or one that failed and has not been recovered from."""

    UNSYNCED = "unsynced"
    """Commits that were written without waiting for the disk."""

    PREPARED = "prepared"
    """The prepared write of a transaction or an atomic batch."""


class Hold(msgspec.Struct, frozen=True, kw_only=True):
    """Something that keeps the resolved version at or below `version`, for `age_ms` so far.

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
            # At least one goes to it: a map that contradicts itself must not make this endless.
            end = len(keys) if last is None else max(start + 1, bisect_left(keys, last, start))
            yield partition, slice(start, end)
            start = end

    def overlapping(self, keys: KeyRange) -> list[Served_co]:
        """The partitions that hold keys of the range, in order."""
        first = max(bisect_right(self.starts, keys.start) - 1, 0)
        end = len(self.starts) if keys.end is None else bisect_left(self.starts, keys.end)
        return list(self.partitions[first:end])


class PartitionMaps(Protocol):
    """Where the present partition map is to be had."""

    @property
    def map(self) -> PartitionMap[Partition]:
        """The map as it is known."""

    def refresh(self) -> None:
        """Learn the map anew, after a partition refused with `PartitionMoved`."""


class Owners(msgspec.Struct, frozen=True):
    """The nodes that serve a site: their URLs by number, the keeper, and the owner of each partition by id.

    All is empty for a site of one process.  A partition without an owner is served where it is asked for.
    """

    nodes: Mapping[int, str] = {}
    keeper: int = 0
    partitions: Mapping[int, int] = {}


class LinkGuard(msgspec.Struct, frozen=True):
    """What a stream of a link supposes: the positions that namespaces have, by their ids, for its source.

    A batch that comes when a position has moved on is refused: what it brings is there already, and may have
    been deleted since, without a trace.  So is one of an earlier life of the source, or of a source that was
    removed: what the others have of that is being counted, and nothing may be added.

    `starts` says behind which version of the source all lies that is brought, where that is not the position.
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
    """`ApplyStream` without a trace in the change log, to build a site up."""

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
    """A stream of writes; each is stored unless the newest stamp of its key lies above `since`."""

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
    """Batches of writes on their way to a site, several at a time, acknowledged in order."""

    def send(self, rows: Mapping[bytes, bytes]) -> "Future[int]":
        """Commit encoded values under qualified keys, one commit per node.

        The highest version, 0 if nothing was stored; of a stream that puts only what is unchanged since a
        version, how many were stored.  Waits while too much is on its way.
        """

    def close(self) -> None:
        """Return when every batch was answered.  Closing twice is harmless."""
