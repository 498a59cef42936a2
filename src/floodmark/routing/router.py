"""Routes calls by key to partitions, through splits, merges and moves.

A partition that was split, merged or moved refuses with `PartitionMoved`, and the router loads the map again.
It also does so when the owner of a partition does not answer, if another node may take over (`Moves`).
Groups of keys and their partition are always taken from one and the same map: a newer one may give a key to
another partition.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Final, Protocol, TypeAlias, TypeVar

import pyarrow

from floodmark.codec.ordered import NAMESPACE_BYTES
from floodmark.codec.stamps import find_origins, stamp_version
from floodmark.codec.values import IN_BATCH
from floodmark.columns.pairs import Pairs
from floodmark.model.batch import name_commit
from floodmark.model.errors import (
    CommitTooLarge,
    CommitUnknown,
    FloodmarkError,
    OutcomeUnknown,
    PartitionMoved,
    PartlyDone,
    Retryable,
)
from floodmark.model.partition import Content, LinkGuard, Partition, PartitionMap, PartitionMaps, ReadSet
from floodmark.model.ranges import KeyRange, after
from floodmark.model.record import Versioned
from floodmark.model.version import Version
from floodmark.partition.commit.entering import Entrance, WriteKind, ends_of
from floodmark.routing.batches import BatchWriter
from floodmark.routing.calls import CallPool

# How often the partition of a key may move during one call; more often means that something is wrong.
ROUTES_MAX: Final = 100

Result = TypeVar("Result")
Rows = Mapping[bytes, bytes]
Groups: TypeAlias = Sequence[tuple[Partition, Rows]]
# Commits keys and values, and returns the partition's answer.
CommitRows: TypeAlias = Callable[[Partition, Sequence[bytes], Sequence[bytes]], int]


def partly_done(done: int, failure: FloodmarkError) -> FloodmarkError:
    """The error for a failure after `done` keys were written elsewhere; without any, the failure itself."""
    if not done:
        return failure.again()
    return PartlyDone(
        f"{done:,} keys were written before a partition failed ({failure}); read before you repeat",
        done=done,
    )


class Moves(Protocol):
    """The retries of one call after its partition has moved."""

    def follows(self, error: FloodmarkError) -> bool:
        """Whether to repeat the call: it had no effect, and a newer map may help."""

    def follow(self, error: FloodmarkError, partition: Partition | None) -> None:
        """Load the map again, after a partition refused; raises the error if the call must not go on."""

    def renew(self) -> None:
        """Reset the retries, after progress of the call."""


class MakeMoves(Protocol):
    """Makes the `Moves` of a call; of one that reads rows, with `stream`."""

    def __call__(self, *, stream: bool) -> Moves: ...


class MapMoves:
    """Loads the map again, a limited number of times."""

    def __init__(self, maps: PartitionMaps, *, stream: bool = False) -> None:
        self._maps = maps
        self.renew()

    def follows(self, error: FloodmarkError) -> bool:
        return isinstance(error, PartitionMoved)

    def follow(self, error: FloodmarkError, partition: Partition | None) -> None:
        self._left -= 1
        if not self._left or not self.follows(error):
            raise error
        self._maps.refresh()

    def renew(self) -> None:
        self._left = ROUTES_MAX


class Router:
    """Calls the partition of a key, and follows it when it moves."""

    def __init__(
        self,
        maps: PartitionMaps,
        entrance: Entrance | None = None,
        *,
        moves: MakeMoves | None = None,
        batches: BatchWriter | None = None,
        mint: Callable[[], str] | None = None,
    ) -> None:
        self.maps = maps
        # Makes the ids of commits whose answers may get lost.
        self._mint = mint
        # Writes batches over several nodes; without it, the node that owns the first key does.
        self._batches = batches
        # Calls several nodes at once, if the site has several.
        self.calls = CallPool() if batches is None else batches.calls
        # The checks that the partitions of this process make before they store anything.
        self._entrance = entrance
        self._moves: MakeMoves = moves or partial(MapMoves, maps)

    def call(self, key: bytes, operation: Callable[[Partition], Result]) -> Result:
        """Call the partition of a qualified key."""
        moves: Moves | None = None
        while True:
            partition: Partition | None = None
            try:
                partition = self.maps.map.route(key)
                return operation(partition)
            except Retryable as error:
                moves = moves or self._moves(stream=False)
                moves.follow(error, partition)

    def get(self, key: bytes, at: Version | None) -> bytes | None:
        """The value of a qualified key."""
        return self.call(key, lambda partition: partition.get(key, at))

    def find(self, key: bytes, at: Version | None, end: bytes | None = None) -> Versioned | None:
        """`Partition.find` of a qualified key; with `end`, of the first key in `[key, end)`."""
        return self.call(key, lambda partition: partition.find(key, at, end))

    def compare_and_set(self, key: bytes, expected: bytes | None, stored: bytes, *, durable: bool) -> bool:
        """Write a qualified key if its present value is `expected`; returns whether it was."""
        return self.call(
            key, lambda partition: partition.compare_and_set(key, expected, stored, durable=durable) != 0
        )

    def put_one(self, key: bytes, stored: bytes, *, durable: bool) -> Version:
        """Commit one qualified key."""
        return self.call(key, lambda partition: partition.put((key,), (stored,), durable=durable))

    def merge_one(self, key: bytes, state: bytes, *, durable: bool) -> Version:
        """Merge an unstamped state into one qualified key."""
        return self.call(key, lambda partition: partition.merge((key,), (state,), durable=durable))

    def get_many(self, keys: Sequence[bytes], at: Version | None) -> list[bytes | None]:
        """The values of qualified keys, in their order."""
        found: dict[bytes, bytes | None] = {}

        def get_group(partition: Partition, group: Rows) -> None:
            found.update(zip(group, partition.get_many(list(group), at), strict=True))

        groups = self._groups(dict.fromkeys(keys, b""))
        self._each_group(groups, get_group, lambda _, failure: failure.again(), divides=True)
        return [found[key] for key in keys]

    def put(self, rows: Rows, *, durable: bool) -> Version:
        """Commit qualified keys, once per node; returns the highest version, 0 for no rows.

        Rows that do not fit into one commit per node are refused before anything is written.
        """
        return max(
            self._commit_groups(
                rows,
                WriteKind.PUT,
                lambda partition, keys, values: partition.put(keys, values, durable=durable),
                together=partial(_write_together, durable=durable),
            ),
            default=0,
        )

    def merge(self, rows: Rows, *, durable: bool) -> Version:
        """`put` for unstamped states, each of which is merged into the record of its key."""
        return max(
            self._commit_groups(
                rows,
                WriteKind.MERGE,
                lambda partition, keys, values: partition.merge(keys, values, durable=durable),
                together=partial(_write_together, durable=durable),
            ),
            default=0,
        )

    def write_batch(self, rows: Rows, *, durable: bool, transaction: str = "") -> Version:
        """Commit values and unstamped states of any namespaces as one atomic batch; returns its version.

        A batch that does not fit into one commit is refused.  Over several nodes it is always durable.  With
        the id of a `transaction` it is tried once: a caller that gets PartitionMoved takes another id.
        """
        if not transaction:
            return self.call(min(rows), lambda partition: self._write_batch(partition, rows, durable, ""))
        try:
            return self._write_batch(self.maps.map.route(min(rows)), rows, durable, transaction)
        except PartitionMoved:
            self.maps.refresh()
            raise

    def _write_batch(self, partition: Partition, rows: Rows, durable: bool, transaction: str) -> Version:
        if not _fits(rows, partition):
            raise _too_large(rows, partition)
        if self._batches is not None and len(self._groups_by_place(rows)) > 1:
            if self._entrance is not None:
                self._entrance.check(*_columns(rows), WriteKind.WRITE)
            return self._write_spanning(rows, None, partition, transaction)
        return partition.write(*_columns(rows), durable=durable, batch=True, transaction=transaction)

    def write_together(self, rows: Rows, reads: ReadSet | None, *, durable: bool) -> Version | None:
        """Commit values and unstamped states if nothing of `reads` has changed, in one round of a node.

        Returns the version, or None if several nodes have the keys; raises Conflict if a read has changed.
        Writes without reads are an atomic batch.  Raises CommitUnknown if the answer of another process is
        lost.  Each attempt has an id of its own, since an id that was refused is never committed.
        """
        first = min(rows)

        def write(partition: Partition) -> Version | None:
            known, is_spread = self.maps.map, False
            if len(known.partitions) > 1:
                is_spread = len(self._groups_by_place(rows)) > 1
                if reads is not None and (is_spread or not _is_at(known, partition.place, reads)):
                    return None
            transaction = self._mint() if self._mint is not None and (partition.place or is_spread) else ""
            try:
                if reads is None and len(rows) > 1:
                    return self._write_batch(partition, rows, durable, transaction)
                if len(rows) > 1 and not _fits(rows, partition):
                    raise _too_large(rows, partition)
                return partition.write(
                    list(rows),
                    list(rows.values()),
                    durable=durable,
                    batch=len(rows) > 1,
                    reads=reads,
                    transaction=transaction,
                )
            except OutcomeUnknown as error:
                if not transaction:
                    raise
                raise _commit_unknown(name_commit(transaction, first), error) from error

        return self.call(first, write)

    def validate(self, transaction: str, reads: ReadSet, at: Version) -> None:
        """Raise Conflict if anything of `reads` was written up to a version, or is about to be."""

        def validate_keys(partition: Partition, keys: Sequence[bytes]) -> None:
            partition.validate(transaction, ReadSet(reads.since, keys), at)

        def validate_part(partition: Partition, within: KeyRange) -> None:
            partition.validate(transaction, ReadSet(reads.since, (), (within,)), at)

        def validate_range(keys: KeyRange) -> None:
            each_part(self, keys, validate_part)

        keys = sorted(reads.keys)
        groups = [keys[place] for _, place in self.maps.map.group(keys)]
        self.calls.all(
            [
                *(partial(self.each, group, validate_keys) for group in groups),
                *(partial(validate_range, keys) for keys in reads.ranges),
            ]
        )

    def apply(self, rows: Rows, *, durable: bool, link: LinkGuard | None = None) -> Version:
        """`put` for values that carry their origin: each is stored where its stamp wins, if it is admitted.

        The node with the highest stamp is called first: if that is too far ahead, nothing is stored.  An
        atomic batch of another site is one batch here, also over several nodes.
        """
        spanning: list[Rows] = []

        def apply(partition: Partition, keys: Sequence[bytes], values: Sequence[bytes]) -> Version:
            return partition.apply(keys, values, durable=durable, link=link)

        def group(rows: Rows) -> Groups:
            # Called again when partitions have moved: a batch of one node may then be at several.
            groups, apart = _take_spanning(self._groups_by_place(rows))
            spanning.extend(apart)
            return groups

        answers = self._commit_groups(
            rows,
            WriteKind.COPY,
            apply,
            rank=_highest_stamp,
            together=apply,
            group=self._groups_by_place if self._batches is None else group,
        )
        for batch in spanning:
            answers.append(self.call(min(batch), partial(self._write_spanning, batch, link)))
        return max(answers, default=0)

    def _write_spanning(
        self, rows: Rows, link: LinkGuard | None, _: Partition, transaction: str = ""
    ) -> Version:
        assert self._batches is not None
        return self._batches.write(self.call, self._groups(rows), link, transaction)

    def load(self, rows: Rows, *, durable: bool) -> Version:
        """`apply` without rows in the change log."""
        return max(
            self._commit_groups(
                rows,
                WriteKind.COPY,
                lambda partition, keys, values: partition.load(keys, values, durable=durable),
                rank=_highest_stamp,
            ),
            default=0,
        )

    def put_unchanged(self, rows: Rows, since: Version, *, durable: bool) -> int:
        """`put` the qualified keys whose newest stamp is not above `since`; returns how many."""

        def put(partition: Partition, keys: Sequence[bytes], values: Sequence[bytes]) -> int:
            return partition.put_unchanged(keys, values, since, durable=durable)

        return sum(self._commit_groups(rows, WriteKind.WRITE, put, together=put))

    def _commit_groups(
        self,
        rows: Rows,
        kind: WriteKind,
        commit: CommitRows,
        rank: Callable[[Rows], int] | None = None,
        together: CommitRows | None = None,
        group: Callable[[Rows], Groups] | None = None,
    ) -> list[int]:
        """Commit its rows to each partition, the highest rank first; returns their answers.

        `together` commits to several partitions of one node, by way of the first.  `group` makes the groups,
        and may leave rows out.

        All rows are checked before the first commit: rows that one partition would refuse are not stored in
        part at another.
        """
        answers: list[int] = []
        group = group or (self._groups if together is None else self._groups_by_place)
        groups = group(rows)
        if len(groups) > 1 and self._entrance is not None:
            self._entrance.check(*_columns(rows), kind)
        groups = _ranked(groups, rank)
        for partition, own in groups:
            if not _fits(own, partition):
                raise _too_large(own, partition)

        def commit_group(partition: Partition, own: Rows) -> None:
            keys, values = _columns(own)
            is_one = together is None or partition.range.contains(ends_of(keys)[1])
            answers.append((commit if is_one or together is None else together)(partition, keys, values))

        self._each_group(groups, commit_group, rank=rank, group=group)
        return answers

    def delete_unchanged(self, keys: Sequence[bytes], since: Version, *, durable: bool) -> int:
        """Delete qualified keys that were not written after `since`; returns how many."""
        deleted = 0

        def delete_group(partition: Partition, group: Rows) -> None:
            nonlocal deleted
            for portion in _portions(list(group), partition):
                deleted += partition.delete_unchanged(portion, since, durable=durable)

        groups = self._groups_by_place(dict.fromkeys(keys, b""))
        self._each_group(groups, delete_group, divides=True, group=self._groups_by_place)
        return deleted

    def each(
        self,
        keys: Sequence[bytes],
        work: Callable[[Partition, Sequence[bytes]], None],
        *,
        together: bool = False,
    ) -> None:
        """Do work that may be repeated with qualified keys, in order, at the partitions that have them.

        With `together`, once for each place, at the first of its partitions.
        """
        group = self._groups_by_place if together else self._groups
        self._each_group(
            group(dict.fromkeys(sorted(keys), b"")),
            lambda partition, own: work(partition, list(own)),
            lambda _, failure: failure.again(),
            divides=True,
            group=group,
        )

    def scan(
        self, keys: KeyRange, at: Version, limit: int | None, *, reverse: bool
    ) -> Iterator[list[tuple[bytes, bytes]]]:
        """The live (user key, value) pairs of a range of one namespace, as of a version, page by page."""
        namespace = keys.start[:NAMESPACE_BYTES]
        left: KeyRange | None = keys
        moves = self._moves(stream=True)
        while left is not None and limit != 0:
            partition = _first_partition(self.maps.map, left, reverse=reverse)
            within = partition.range.intersect(left)
            if within is None:
                return
            last: bytes | None = None
            finished = False
            try:
                for page in partition.scan(within, at, rows_max=limit, reverse=reverse):
                    rows = page if limit is None else page[:limit]
                    if limit is not None:
                        limit -= len(rows)
                    if rows:
                        last = namespace + rows[-1][0]
                    yield rows
                    if limit == 0:
                        return
                finished = True
            except Retryable as error:
                if last is not None:
                    moves.renew()
                moves.follow(error, partition)
            left = _behind(left, within if finished else None, last, reverse=reverse)

    def scan_records(
        self, keys: KeyRange, at: Version, *, dead: bool = False, content: Content = Content.WHOLE
    ) -> Iterator[pyarrow.RecordBatch]:
        """The newest record at or below `at` of each key of a range of one namespace, in order of keys.

        See `Partition.scan_records`.
        """
        namespace = keys.start[:NAMESPACE_BYTES]
        left: KeyRange | None = keys
        moves = self._moves(stream=True)
        while left is not None:
            partition = self.maps.map.route(left.start)
            within = partition.range.intersect(left)
            if within is None:
                return
            last: bytes | None = None
            finished = False
            try:
                for batch in partition.scan_records(within, at, dead=dead, content=content):
                    if batch.num_rows:
                        last = namespace + batch.column(0)[-1].as_py()
                    yield batch
                finished = True
            except Retryable as error:
                if last is not None:
                    moves.renew()
                moves.follow(error, partition)
            left = _behind(left, within if finished else None, last, reverse=False)

    def _each_group(
        self,
        groups: Groups,
        commit: Callable[[Partition, Rows], None],
        describe: Callable[[int, FloodmarkError], FloodmarkError] = partly_done,
        rank: Callable[[Rows], int] | None = None,
        *,
        divides: bool = False,
        group: Callable[[Rows], Groups] | None = None,
    ) -> None:
        """Commit group by group, up to the first that fails; repeat those whose partition has moved.

        `group` makes the groups of these.

        Unless `commit` divides a group, it must fit into one commit of the partition that has it now.
        """
        done = 0
        moves = self._moves(stream=False)
        while True:
            moved: dict[bytes, bytes] = {}
            failure: FloodmarkError | None = None
            refused: Partition | None = None
            for partition, own in groups:
                try:
                    commit(partition, own)
                    done += len(own)
                except FloodmarkError as error:
                    if not moves.follows(error):
                        raise describe(done, error) from error
                    moved |= own
                    failure, refused = failure or error, partition
            if failure is None:
                return
            try:
                moves.follow(failure, refused)
            except FloodmarkError as error:
                raise describe(done, error) from error
            groups = _ranked((group or self._groups)(moved), rank)
            if not divides and any(not _fits(own, partition) for partition, own in groups):
                raise describe(done, failure) from failure

    def _groups(self, rows: Rows) -> Groups:
        """Rows by the partition that has their keys, in one map."""
        partition_map = self.maps.map
        if len(partition_map.partitions) == 1:
            return [(partition_map.partitions[0], rows)] if rows else []
        # In order, the keys of a partition are consecutive.
        keys = sorted(rows)
        return [
            (partition, {key: rows[key] for key in keys[place]})
            for partition, place in partition_map.group(keys)
        ]

    def _groups_by_place(self, rows: Rows) -> Groups:
        """Rows by the place (the process) that has their keys, with the first of its partitions."""
        groups = self._groups(rows)
        return _by_place(groups) if len(groups) > 1 else groups


def _by_place(groups: Groups) -> Groups:
    """Groups, with those of one place as one."""
    joined: dict[str, tuple[Partition, dict[bytes, bytes]]] = {}
    for partition, own in groups:
        joined.setdefault(partition.place, (partition, {}))[1].update(own)
    return list(joined.values())


def _take_spanning(groups: Groups) -> tuple[Groups, list[Rows]]:
    """Separate the copied atomic batches with keys at several places from the rows of each place alone."""
    if len(groups) < 2:
        return groups, []
    batches: dict[bytes, dict[bytes, bytes]] = {}
    places: dict[bytes, set[int]] = {}
    for place, (_, rows) in enumerate(groups):
        for key, value in rows.items():
            if value[-1] & IN_BATCH:
                origin = find_origins([value])[0]
                batches.setdefault(origin, {})[key] = value
                places.setdefault(origin, set()).add(place)
    spanning: list[Rows] = [batch for origin, batch in batches.items() if len(places[origin]) > 1]
    if not spanning:
        return groups, []
    taken = {key for batch in spanning for key in batch}
    left = [(partition, {key: rows[key] for key in rows if key not in taken}) for partition, rows in groups]
    return [(partition, rows) for partition, rows in left if rows], spanning


def _write_together(
    partition: Partition, keys: Sequence[bytes], values: Sequence[bytes], *, durable: bool
) -> Version:
    return partition.write(keys, values, durable=durable)


def _commit_unknown(transaction: str, error: OutcomeUnknown) -> CommitUnknown:
    return CommitUnknown(
        f"no answer came to the commit of a transaction ({error}); site.transaction_outcome({transaction!r}) "
        "finds out what became of it, or transaction.commit() once more",
        transaction=transaction,
    )


def _first_partition(known: PartitionMap[Partition], keys: KeyRange, *, reverse: bool) -> Partition:
    """The partition at which a scan of a range begins."""
    overlapping = known.overlapping(keys) if reverse else []
    return overlapping[-1] if overlapping else known.route(keys.start)


def _is_at(known: PartitionMap[Partition], place: str, reads: ReadSet) -> bool:
    """Whether one place has all that was read, or declared as written."""
    read = [known.route(key) for key in reads.keys]
    for keys in (*reads.ranges, *reads.writes):
        read += known.overlapping(keys)
    return all(partition.place == place for partition in read)


def each_part(router: Router, keys: KeyRange, work: Callable[[Partition, KeyRange], object]) -> None:
    """Do repeatable work with the part of a range that each partition has."""

    def take(keys: KeyRange, partition: Partition) -> KeyRange | None:
        within = partition.range.intersect(keys)
        assert within is not None
        work(partition, within)
        return None if within.end in (None, keys.end) else KeyRange(within.end or b"", keys.end)

    left: KeyRange | None = keys
    while left is not None:
        left = router.call(left.start, partial(take, left))


def _ranked(groups: Groups, rank: Callable[[Rows], int] | None) -> Groups:
    if rank is None or len(groups) < 2:
        return groups
    return sorted(groups, key=lambda group: rank(group[1]), reverse=True)


def _highest_stamp(rows: Rows) -> Version:
    return stamp_version(max(find_origins(list(rows.values()))))


def _columns(rows: Rows) -> tuple[Sequence[bytes], Sequence[bytes]]:
    """Keys and values; as columns if the rows have them."""
    if isinstance(rows, Pairs) and rows.is_ordered:
        return rows.columns()
    return list(rows), list(rows.values())


def _size(rows: Rows) -> int:
    if isinstance(rows, Pairs):
        return rows.size
    return sum(map(len, rows)) + sum(map(len, rows.values()))


def _fits(rows: Rows, partition: Partition) -> bool:
    return _size(rows) <= partition.limits.bytes_max and len(rows) <= partition.limits.changes_max


def _portions(keys: Sequence[bytes], partition: Partition) -> Iterator[Sequence[bytes]]:
    """Keys in portions that fit into one commit each."""
    limits = partition.limits
    count = max(1, min(limits.changes_max, limits.bytes_max // max(map(len, keys))))
    return (keys[start : start + count] for start in range(0, len(keys), count))


def _too_large(rows: Rows, partition: Partition) -> CommitTooLarge:
    limits, size = partition.limits, _size(rows)
    return CommitTooLarge(
        f"{len(rows):,} pairs for partition {partition.id} make {size:,} bytes; one commit holds at most "
        f"{limits.bytes_max:,} bytes and {limits.changes_max:,} pairs. Write them in smaller portions",
        partition=partition.id,
        size=size,
    )


def _behind(
    keys: KeyRange, finished: KeyRange | None, last: bytes | None, *, reverse: bool
) -> KeyRange | None:
    """The rest of a range after a partition was read to its end, or up to `last`."""
    if finished is not None:
        start, end = (keys.start, finished.start) if reverse else (finished.end, keys.end)
    elif last is not None:
        start, end = (keys.start, last) if reverse else (after(last), keys.end)
    else:
        return keys
    return KeyRange(start, end) if start is not None and (end is None or start < end) else None
