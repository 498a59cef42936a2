"""An engine with planned faults, which can show what a power cut would leave.

It holds two engines in memory: the rows that readers see, and the rows on stable storage.  The difference are
the writes that no `sync` has covered yet, in order, each whole.  A power cut keeps a prefix of these writes:
a suffix is lost, never the middle and never half a batch.

A plan makes one operation fail, the Nth that it counts.  Running a piece of work once for every N, until it
succeeds without a fault, tests every place at which storage can fail:

>>> engine = FaultyEngine(("data",))
>>> engine.arm(FaultPlan(at=2, kind=Fault.TRANSIENT))
>>> engine.write([("data", b"a", b"1")])
True
>>> engine.sync()
Traceback (most recent call last):
...
floodmark.model.errors.StorageFailed: planned: sync, operation 2, failed
>>> engine.crash(keep=0).get("data", b"a") is None
True
>>> engine.crash(keep=1).get("data", b"a")
b'1'
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import reduce
from threading import RLock
from typing import Final, NamedTuple, NoReturn, TypeAlias, TypeVar

from floodmark.engine import Guard, MemoryEngine, Row, WriteRow
from floodmark.engine.base import guards_hold
from floodmark.model.errors import Closed, OutcomeUnknown, StorageFailed
from floodmark.model.limits import MIB
from floodmark.model.ranges import after


class Operation(StrEnum):
    """The kinds of operation that a plan may count."""

    READ = "read"
    WRITE = "write"
    DELETE_RANGE = "delete_range"
    SYNC = "sync"
    CLOSE = "close"


class Fault(StrEnum):
    """How an operation fails.

    After an unknown outcome the engine refuses to write until `recover`, as RocksDB does, and only then shows
    whether the write happened.  A read cannot have an unknown outcome; for reads, these faults are transient.
    """

    TRANSIENT = "transient"
    """Once, and nothing was done."""

    PERSISTENT = "persistent"
    """Every counted operation from here on, and every recovery, until `heal`; nothing was done."""

    UNKNOWN_APPLIED = "unknown, applied"
    """The caller cannot know, but it was done."""

    UNKNOWN_SKIPPED = "unknown, skipped"
    """The caller cannot know, and it was not done."""

    UNKNOWN_LOST = "unknown, lost"
    """It was not done, and recovering loses every other write that was not synced."""

    CRASH = "crash"
    """The process ends.  Whether the last write is whole or gone is for `crash(keep=...)` to say."""


UNKNOWN_FAULTS: Final = frozenset({Fault.UNKNOWN_APPLIED, Fault.UNKNOWN_SKIPPED, Fault.UNKNOWN_LOST})
READS: Final = frozenset({Operation.READ})
WRITES: Final = frozenset(Operation) - READS


@dataclass(frozen=True, kw_only=True)
class FaultPlan:
    """The counted operation that fails, from 1, and how.

    `recover_failures` is how often `recover` fails in its turn after an unknown outcome.
    """

    at: int
    kind: Fault
    counts: frozenset[Operation] = WRITES
    recover_failures: int = 0

    def __post_init__(self) -> None:
        if self.at < 1:
            raise ValueError(f"operations are counted from 1, not {self.at}")
        if self.recover_failures and self.kind not in UNKNOWN_FAULTS:
            raise ValueError(f"after the fault {self.kind!r} there is nothing to recover from")


class SimulatedCrash(BaseException):
    """The end of the simulated process.  Not an `Exception`, so that no error handling survives it."""


class _Batch(NamedTuple):
    rows: tuple[WriteRow, ...]

    def apply(self, engine: MemoryEngine) -> None:
        engine.write(self.rows)


class _RangeDelete(NamedTuple):
    family: str
    start: bytes
    end: bytes

    def apply(self, engine: MemoryEngine) -> None:
        engine.delete_range(self.family, self.start, self.end)


_Write: TypeAlias = _Batch | _RangeDelete

Result = TypeVar("Result")


class FaultyEngine:
    """An engine in memory with a plan of faults.  Without a plan, or before `arm`, nothing fails."""

    limits = MemoryEngine.limits

    def __init__(self, families: Sequence[str], plan: FaultPlan | None = None) -> None:
        self._families = tuple(families)
        self._visible = MemoryEngine(families)
        self._durable = MemoryEngine(families)
        self._unsynced: list[_Write] = []
        self._durable_print = 0
        self._lock = RLock()
        self._closed = self._crashed = self._refusing = self._loses = False
        self.arm(plan)

    # The plan

    def arm(self, plan: FaultPlan | None) -> None:
        """Set the plan.  The next operation that it counts is number 1."""
        with self._lock:
            self._plan = plan
            self.operations = 0
            self.fired = False
            self._recover_failures = 0 if plan is None else plan.recover_failures

    def heal(self) -> None:
        """End the plan: storage works again.  An engine that needs `recover` still needs it."""
        with self._lock:
            self._plan = None
            self._recover_failures = 0

    @property
    def unsynced(self) -> int:
        """How many writes a power cut may lose."""
        return len(self._unsynced)

    def crash(self, keep: int | None = None) -> "FaultyEngine":
        """A new engine with the rows that a power cut leaves: all synced writes and the next `keep`.

        Without `keep`, it has all writes.  This engine is not changed, and may be closed.
        """
        with self._lock:
            image = FaultyEngine(self._families)
            for engine in (image._visible, image._durable):
                _copy(self._durable, engine, self._families)
                for write in self._unsynced[:keep]:
                    write.apply(engine)
            image._durable_print = self.fingerprint(keep)
            return image

    def fingerprint(self, keep: int | None = None) -> int:
        """A number that is equal for crash images with the same writes in the same order.

        It is cheaper than the image itself, and allows a test to skip images that it has seen.
        """
        with self._lock:
            return reduce(_add_print, self._unsynced[:keep], self._durable_print)

    def contents(self) -> Mapping[str, Sequence[Row]]:
        """All rows that readers see, by family, for comparing; no plan counts it."""
        with self._lock:
            return {family: _rows(self._visible, family) for family in self._families}

    def _fault(self, operation: Operation) -> Fault | None:
        """Count an operation; return how it must fail, or None."""
        plan = self._plan
        if plan is None or operation not in plan.counts:
            return None
        self.operations += 1
        if self.operations == plan.at:
            self.fired = True
            return plan.kind
        return plan.kind if self.fired and plan.kind is Fault.PERSISTENT else None

    # Reads

    def get(self, family: str, key: bytes) -> bytes | None:
        return self._read(lambda engine: engine.get(family, key))

    def get_many(self, family: str, keys: Sequence[bytes]) -> list[bytes | None]:
        return self._read(lambda engine: engine.get_many(family, keys))

    def ceiling(self, family: str, key: bytes, prefix: bytes = b"") -> Row | None:
        return self._read(lambda engine: engine.ceiling(family, key, prefix))

    def ceilings(
        self, family: str, prefixes: Sequence[bytes], starts: Sequence[bytes] | None = None
    ) -> list[Row | None]:
        return self._read(lambda engine: engine.ceilings(family, prefixes, starts))

    def scan(
        self,
        family: str,
        start: bytes,
        end: bytes | None,
        *,
        rows_max: int,
        bytes_max: int,
        reverse: bool = False,
    ) -> list[Row]:
        return self._read(
            lambda engine: engine.scan(
                family, start, end, rows_max=rows_max, bytes_max=bytes_max, reverse=reverse
            )
        )

    def _read(self, read: Callable[[MemoryEngine], Result]) -> Result:
        with self._lock:
            self._require_open()
            if (fault := self._fault(Operation.READ)) is not None:
                self._fail(Operation.READ, fault if fault is Fault.CRASH else Fault.TRANSIENT)
            return read(self._visible)

    # Writes

    def write(self, rows: Iterable[WriteRow], guards: Sequence[Guard] = ()) -> bool:
        batch = _Batch(tuple(rows))
        for family, _, _ in batch.rows:
            if family not in self._families:
                raise KeyError(family)
        with self._lock:
            self._require_writable()
            holds = guards_hold(self._visible.get, guards)
            self._write(Operation.WRITE, batch if holds else None)
            return holds

    def delete_range(self, family: str, start: bytes, end: bytes, guards: Sequence[Guard] = ()) -> bool:
        with self._lock:
            self._require_writable()
            holds = guards_hold(self._visible.get, guards)
            self._write(Operation.DELETE_RANGE, _RangeDelete(family, start, end) if holds else None)
            return holds

    def _write(self, operation: Operation, write: _Write | None) -> None:
        """Apply a write, unless it is None, or fail as planned."""
        if (fault := self._fault(operation)) is not None:
            if write is not None and fault in (Fault.UNKNOWN_APPLIED, Fault.CRASH):
                # It may reach the disk, but readers do not see it until the engine has recovered.
                self._unsynced.append(write)
            self._fail(operation, fault)
        if write is not None:
            write.apply(self._visible)
            self._unsynced.append(write)

    def sync(self) -> None:
        with self._lock:
            self._require_writable()
            if (fault := self._fault(Operation.SYNC)) is not None:
                if fault is Fault.UNKNOWN_APPLIED:
                    self._make_durable()
                self._fail(Operation.SYNC, fault)
            self._make_durable()

    def recover(self) -> None:
        with self._lock:
            self._require_open()
            if self._recover_failures and self._refusing:
                self._recover_failures -= 1
                raise StorageFailed("planned: the engine cannot recover yet")
            if self.fired and self._plan is not None and self._plan.kind is Fault.PERSISTENT:
                raise StorageFailed("planned: the engine cannot recover")
            if self._loses:
                self._unsynced.clear()
            if self._refusing:
                self._visible = self.crash()._visible
            self._refusing = self._loses = False

    def sizes(self) -> Mapping[str, int]:
        return self._read(lambda _: self._durable.sizes())

    def close(self) -> None:
        with self._lock:
            self._require_running()
            if self._closed:
                return
            fault = self._fault(Operation.CLOSE)
            self._closed = True
            self._visible.close()
            if fault is Fault.UNKNOWN_APPLIED:
                self._make_durable()
            if fault is not None:
                self._fail(Operation.CLOSE, fault)
            if self._refusing:
                raise OutcomeUnknown("the engine was closed before it had recovered from a failed write")
            self._make_durable()

    def _make_durable(self) -> None:
        self._durable_print = self.fingerprint()
        for write in self._unsynced:
            write.apply(self._durable)
        self._unsynced.clear()

    # Failing

    def _fail(self, operation: Operation, fault: Fault) -> NoReturn:
        what = f"planned: {operation}, operation {self.operations},"
        if fault is Fault.CRASH:
            self._crashed = True
            raise SimulatedCrash(f"{what} was the last")
        if fault in UNKNOWN_FAULTS:
            self._refusing = True
            self._loses = fault is Fault.UNKNOWN_LOST
            raise OutcomeUnknown(f"{what} gave no answer")
        raise StorageFailed(f"{what} failed")

    def _require_running(self) -> None:
        if self._crashed:
            raise SimulatedCrash("the process has ended")

    def _require_open(self) -> None:
        self._require_running()
        if self._closed:
            raise Closed("the site was closed; open it again")

    def _require_writable(self) -> None:
        self._require_open()
        if self._refusing:
            raise OutcomeUnknown("the engine refuses to write until it has recovered from a failed write")


def _add_print(fingerprint: int, write: _Write) -> int:
    return hash((fingerprint, write))


def _rows(engine: MemoryEngine, family: str) -> list[Row]:
    rows: list[Row] = []
    start = b""
    while page := engine.scan(family, start, None, rows_max=10_000, bytes_max=64 * MIB):
        rows += page
        start = after(page[-1][0])
    return rows


def _copy(source: MemoryEngine, target: MemoryEngine, families: Iterable[str]) -> None:
    for family in families:
        target.write((family, key, value) for key, value in _rows(source, family))
