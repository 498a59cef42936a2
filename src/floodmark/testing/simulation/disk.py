"""A site's disk: it is slow, fails, and loses unsynced writes at a power cut.

It is the engine of `floodmark.testing.engine` with three additions.  It shows every batch to a watcher before
it writes the batch, because the rows may stay on disk whatever result the site gets.  While it syncs,
simulated time passes and the watcher can read: this is when a reader could see changes that are not durable
yet.  And it can be restarted with the rows that a power cut leaves.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from random import Random
from typing import Final, Protocol

from floodmark.engine import Guard, Row, WriteRow
from floodmark.partition import FAMILIES
from floodmark.partition.families import CLOCK_BOUND
from floodmark.testing.engine import Fault, FaultPlan, FaultyEngine

# The relative frequency of each kind of fault.
_KINDS: Final = {
    Fault.TRANSIENT: 3,
    Fault.UNKNOWN_APPLIED: 2,
    Fault.UNKNOWN_SKIPPED: 2,
    Fault.UNKNOWN_LOST: 2,
    Fault.CRASH: 3,
    Fault.PERSISTENT: 1,
}
OPERATIONS_BETWEEN: Final = 60


class DiskWatcher(Protocol):
    """Observes the writes and syncs of a disk."""

    def writing(self, rows: Sequence[WriteRow]) -> None:
        """A batch is about to be written."""
        ...

    def syncing(self) -> None:
        """A sync is in progress, and simulated time passes."""
        ...


class SimulatedDisk(FaultyEngine):
    """An engine in memory with random faults, none before `disturb`."""

    def __init__(self, watcher: DiskWatcher) -> None:
        super().__init__(FAMILIES)
        self._watcher = watcher
        self._busy = self._stores_bound = False
        self.is_healing = False
        # Called before each record that a reader looks up; `is_backward` makes readers begin with the last
        # one.
        self.meanwhile: Callable[[], None] | None = None
        self.is_backward = False

    def restart(self, keep: int | None = None) -> "SimulatedDisk":
        """The disk after a power cut that `keep` of the unsynced writes survived, or all of them."""
        fresh, image = SimulatedDisk(self._watcher), self.crash(keep)
        fresh._visible, fresh._durable = image._visible, image._durable
        return fresh

    def show_to(self, watcher: DiskWatcher) -> None:
        """Replace the watcher."""
        self._watcher = watcher

    @property
    def fired_kind(self) -> Fault | None:
        """The kind of fault that has occurred since `disturb`, or None."""
        return self._plan.kind if self.fired and self._plan is not None else None

    def disturb(self, random: Random) -> None:
        """Plan a fault at a random later operation."""
        kind = random.choices(list(_KINDS), list(_KINDS.values()))[0]
        self.is_healing = False
        self.arm(FaultPlan(at=1 + int(random.expovariate(1 / OPERATIONS_BETWEEN)), kind=kind))

    def unsynced_rows(self) -> Iterator[WriteRow]:
        """The rows that a power cut may lose."""
        for write in self._unsynced:
            yield from getattr(write, "rows", ())

    def write(self, rows: Iterable[WriteRow], guards: Sequence[Guard] = ()) -> bool:
        batch = list(rows)
        self._stores_bound = all(key == CLOCK_BOUND for _, key, _ in batch)
        self._watcher.writing(batch)
        return super().write(batch, guards)

    def sync(self) -> None:
        # The clock stores its bound under its own lock, and a watcher that asked it for a version now would
        # wait for ever.  Nor are the watcher's own operations watched.
        if not self._stores_bound and not self._busy and not self._refusing:
            plan, self._plan, self._busy = self._plan, None, True
            try:
                self._watcher.syncing()
            finally:
                self._plan, self._busy = plan, False
        super().sync()

    def ceiling(self, family: str, key: bytes, prefix: bytes = b"") -> Row | None:
        # What others read meanwhile is not watched.
        meanwhile, self.meanwhile = self.meanwhile, None
        if meanwhile is not None:
            try:
                meanwhile()
            finally:
                self.meanwhile = meanwhile
        return super().ceiling(family, key, prefix)

    def ceilings(
        self, family: str, prefixes: Sequence[bytes], starts: Sequence[bytes] | None = None
    ) -> list[Row | None]:
        if self.meanwhile is None:
            return super().ceilings(family, prefixes, starts)
        order = range(len(prefixes))[:: -1 if self.is_backward else 1]
        found = {place: self.ceiling(family, (starts or prefixes)[place], prefixes[place]) for place in order}
        return [found[place] for place in range(len(prefixes))]
