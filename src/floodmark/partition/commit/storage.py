"""All writes of a node to its engine, one thread at a time, and recovery from their failures.

A thread that writes holds the turn.  If the engine fails, it is recovered and read, so that the caller learns
whether the write happened.  Only if that fails too is the outcome unknown; then nothing is written until
recovery has succeeded.  State in memory is loaded again after each recovery: the engine's truth wins.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

from floodmark.codec.ordered import NAMESPACE_BYTES
from floodmark.engine import Engine, Guard, WriteRow, durable_writes
from floodmark.engine.base import BulkLoads
from floodmark.model.errors import (
    CatalogChanged,
    Closed,
    FloodmarkError,
    LimitExceeded,
    NamespaceNotFound,
    OutcomeUnknown,
    PartitionStopped,
    StorageFailed,
)
from floodmark.model.limits import LOG_ROW_BYTES_MAX, PAGE_BYTES_MAX, PAGE_ROWS_MAX
from floodmark.model.ranges import after
from floodmark.partition.commit.commit import Commit
from floodmark.partition.commit.entering import Entrance
from floodmark.partition.commit.turn import Turn
from floodmark.partition.generations import remover

Result = TypeVar("Result")


class Storage:
    """An engine, the turn to write to it, and whether a failure is not settled yet."""

    def __init__(self, engine: Engine, entrance: Entrance | None = None) -> None:
        self.engine = engine
        self.write_durably = durable_writes(engine)
        self.turn: Turn[Commit] = Turn()
        self.stopped = False
        # Whether the engine failed; otherwise a caller was interrupted.
        self.failed = False
        # The ids of dropped namespaces, which take no more writes.
        self.dropped: set[bytes] = set()
        # Checks what may be stored in which namespace.
        self.entrance = Entrance(engine.limits) if entrance is None else entrance
        # Whether writes are stopped or refused: one flag for the hot path.
        self.is_unusual = False
        self.recoveries = 0
        # The guards of site-wide writes, where several nodes share the engine (`fencing.py`).
        self.keeper_guards: Callable[[], Sequence[Guard]] = tuple
        # A quarter, because the lengths of keys and values may take more bytes than these.
        self.log_row_bytes_max = min(LOG_ROW_BYTES_MAX, engine.limits.value_bytes_max // 4)
        # Called after each recovery, with the turn held.
        self.on_recovery: list[Callable[[], None]] = []
        self._refusal: FloodmarkError | None = None
        self._writers_refusal: FloodmarkError | None = None
        # Called before a refusal is raised; may lift it.
        self.reconsider: Callable[[], object] = lambda: None

    @contextmanager
    def exclusive(self) -> Iterator[None]:
        """Hold the turn within the block: no other thread writes."""
        token, turn = None, self.turn
        try:
            token = turn.try_take() or turn.wait(Commit(None, None, durable=True))
            yield
        finally:
            if token is not None:
                turn.give_back(token)
                if turn.line:
                    turn.lead_next()

    @contextmanager
    def settled(self) -> Iterator[None]:
        """Hold the turn within the block, over an engine that has recovered from earlier failures."""
        with self.exclusive():
            self.recover_if_stopped()
            yield

    def refuse(self, refusal: FloodmarkError | None) -> None:
        """Refuse all writes, as on a disk that is nearly full; None accepts them again."""
        self._refusal = refusal
        self._look_around()

    def refuse_writers(self, refusal: FloodmarkError | None) -> None:
        """Refuse writes that do not come from another site; None accepts them again."""
        self._writers_refusal = refusal
        self._look_around()

    def stop(self, *, failed: bool = True) -> None:
        """Write nothing before `recover_if_stopped`.  `failed` says that the engine itself has to recover."""
        self.failed = self.failed or failed
        self.stopped = True
        self._look_around()

    def drop(self, namespace: bytes) -> None:
        """Refuse all further writes into a namespace."""
        self.dropped.add(namespace)

    def _look_around(self) -> None:
        refusals = self._refusal, self._writers_refusal
        self.is_unusual = self.stopped or refusals != (None, None)

    def require_wanted(self) -> None:
        """Raise the refusal of all writes, if there is one."""
        if self._refusal is not None:
            self.reconsider()
        if self._refusal is not None:
            raise self._refusal.again()

    def require_writers(self) -> None:
        """Raise the refusal of this site's own writes, if there is one."""
        if self._writers_refusal is not None:
            raise self._writers_refusal.again()

    def require_not_dropped(self, keys: Sequence[bytes]) -> None:
        """Raise `NamespaceNotFound` for qualified keys of a dropped namespace."""
        if any(key[:NAMESPACE_BYTES] in self.dropped for key in keys):
            raise NamespaceNotFound("the namespace was dropped; create it again with site.create_namespace()")

    def store(self, rows: Sequence[WriteRow]) -> None:
        """Write rows atomically, and return when they are on disk.  The caller holds the turn."""
        self.store_guarded(rows, ())

    def store_guarded(self, rows: Sequence[WriteRow], guards: Sequence[Guard]) -> bool:
        """Like `store`, but writes nothing and returns False if a guard does not hold."""
        self.require_fitting(rows)
        try:
            if not self.write_durably(rows, guards):
                return False
        except Closed:
            raise
        except FloodmarkError as failure:
            self.stop()
            try:
                self.recover_if_stopped()
                written = all(self.engine.get(family, key) == value for family, key, value in rows)
            except FloodmarkError:
                raise unknown(failure) from failure
            if not written:
                raise refused(failure) from failure
        except BaseException:
            self.stop(failed=False)
            raise
        return True

    def store_later(self, rows: Sequence[WriteRow]) -> None:
        """Write rows atomically; the next sync makes them durable.  The caller holds the turn."""
        with self._stopping():
            self.engine.write(rows)

    def load(self, engine: Engine, family: str, keys: Sequence[bytes], values: Sequence[bytes]) -> None:
        """Store rows that no reader finds, in order of keys; they are on disk on return.

        `engine` is the engine below this one's generations (`generations.below`).  The caller must not hold
        the turn; after an error it must load the same rows again, or remove those that may be there.
        """
        if not isinstance(engine, BulkLoads):
            for portion in self.cut([(family, *row) for row in zip(keys, values, strict=True)]):
                with self.settled():
                    self.require_wanted()
                    self.store_later(portion)
            self.engine.sync()
            return
        with self.settled():
            self.require_wanted()
        try:
            engine.load(family, keys, values)
        except OutcomeUnknown:
            with self.exclusive():
                self.stop()
            raise

    def remove(
        self, rows: Sequence[WriteRow], guards: Sequence[Guard] = (), engine: Engine | None = None
    ) -> None:
        """Write rows that a crash may undo, such as the removal of garbage.

        They are cut into batches, so any number of the first rows must be harmless without the others.
        `engine` is the view in which the garbage was found, if that shows certain generations.
        """
        for batch in self.cut(rows):
            with self.settled(), self._stopping():
                remover(engine or self.engine)(batch, guards)

    def store_in_portions(self, rows: Sequence[WriteRow], guards: Sequence[Guard] = ()) -> None:
        """`store` in as many writes as the engine needs.  After a failure, only the first rows may be there.

        The caller holds the turn.
        """
        for batch in self.cut(rows):
            self.store_guarded(batch, guards)

    def cut(self, rows: Sequence[WriteRow]) -> Iterator[Sequence[WriteRow]]:
        """Cut rows into batches that the engine takes."""
        limits = self.engine.limits
        batch: list[WriteRow] = []
        size = 0
        for row in rows:
            added = _size_of(row)
            if batch and (len(batch) == limits.batch_rows_max or size + added > limits.batch_bytes_max):
                yield batch
                batch, size = [], 0
            batch.append(row)
            size += added
        if batch:
            yield batch

    def require_fitting(self, rows: Sequence[WriteRow]) -> None:
        """Raise `LimitExceeded` for rows that the engine does not take in one write."""
        limits = self.engine.limits
        size, largest = sum(map(_size_of, rows)), max((len(row[2] or b"") for row in rows), default=0)
        if (
            len(rows) > limits.batch_rows_max
            or size > limits.batch_bytes_max
            or largest > limits.value_bytes_max
        ):
            raise LimitExceeded(
                f"{len(rows):,} rows of {size:,} bytes, the largest of {largest:,}, belong in one write; the "
                f"database of this site takes {limits.batch_rows_max:,} rows of {limits.batch_bytes_max:,} "
                f"bytes, and {limits.value_bytes_max:,} bytes in one row. Nothing was written; write less at "
                "once, or raise the limits of the database",
                size=size,
            )

    def remove_range(self, family: str, start: bytes, end: bytes, engine: Engine | None = None) -> None:
        """Remove a range of garbage, in portions if the engine limits the rows of a range.

        To remove rows that no reader finds, pass the engine below this one's generations.
        """
        engine = engine or self.engine
        rows_max = engine.limits.range_rows_max
        while rows_max is not None:
            page = engine.scan(
                family, start, end, rows_max=min(rows_max, PAGE_ROWS_MAX), bytes_max=PAGE_BYTES_MAX
            )
            if not page:
                return
            behind = after(page[-1][0])
            self._delete_settled(engine, family, start, behind)
            start = behind
        self._delete_settled(engine, family, start, end)

    def _delete_settled(self, engine: Engine, family: str, start: bytes, end: bytes) -> None:
        with self.settled(), self._stopping():
            engine.delete_range(family, start, end)

    def recover_if_stopped(self) -> None:
        """Recover after a failure or an interruption.  The caller holds the turn."""
        if not self.stopped:
            return
        try:
            if self.failed:
                self.engine.recover()
            self.engine.sync()
            for reload in self.on_recovery:
                reload()
        except OutcomeUnknown as error:
            self.failed = True
            raise PartitionStopped(
                f"storage has not recovered from a failed write yet ({error}); try again"
            ) from error
        self.recoveries += self.failed
        self.stopped = self.failed = False
        self._look_around()

    def retry_recovered(self, operation: Callable[[], Result]) -> Result:
        """Run an operation that may write, such as minting a version; retry it once after a recovery."""
        recoveries = self.recoveries
        try:
            return operation()
        except (StorageFailed, OutcomeUnknown):
            with self.exclusive():
                # Of many threads that failed together, the first recovers for all.
                if self.recoveries == recoveries:
                    self.stop()
                self.recover_if_stopped()
            return operation()

    @contextmanager
    def _stopping(self) -> Iterator[None]:
        try:
            yield
        except CatalogChanged:
            # Nothing was written.
            raise
        except BaseException as failure:
            self.stop(failed=isinstance(failure, FloodmarkError))
            raise


def _size_of(row: WriteRow) -> int:
    return len(row[1]) + len(row[2] or b"")


def refused(failure: FloodmarkError) -> FloodmarkError:
    """The error for a write that did not happen."""
    if isinstance(failure, OutcomeUnknown):
        return PartitionStopped(f"storage failed and the write did not happen ({failure}); try again")
    return failure.again()


def unknown(failure: BaseException) -> OutcomeUnknown:
    """The error for a write of unknown outcome."""
    return OutcomeUnknown(
        f"the write was interrupted ({failure!r}) and storage has not recovered; whether it happened is "
        "not known. Read once the site answers again, before you repeat the write"
    )
