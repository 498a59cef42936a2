"""What the tests of a whole site share: an engine with hooks, threads whose errors count, and shortcuts."""

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from threading import Condition, Lock
from typing import Final, TypeVar

from tests.waiting import HANG_SECONDS

from floodmark.codec.ordered import decode_key
from floodmark.engine import Guard, MemoryEngine, Row, WriteRow
from floodmark.host.embedded import EmbeddedHost
from floodmark.model.change import Change
from floodmark.model.errors import OutcomeUnknown, Retryable
from floodmark.model.version import Version
from floodmark.partition import FAMILIES, Node
from floodmark.partition.commit.commit import Commit
from floodmark.site import Site, open_engine
from floodmark.testing.clock import SimulatedTime
from floodmark.testing.engine import FaultyEngine

Result = TypeVar("Result")

# A hundred milliseconds into a second: expiry is judged in whole seconds, and a clock that runs a few
# milliseconds ahead of this time is still in the same one.
START_MS: Final = 1_700_000_000_100

Hook = Callable[[str], None]
Unsynced = tuple[str, bytes, bytes] | Sequence[WriteRow]


def nothing(operation: str) -> None:
    """The hook of an engine that is left alone."""


class HookedEngine(MemoryEngine):
    """An engine in memory that calls `before` and `after` each operation, where a test may wait or raise.

    It can be opened again after `close`, and it knows what is on "disk": `crashed` is what a power cut
    leaves of it.
    """

    def __init__(self, families: Sequence[str] = FAMILIES) -> None:
        super().__init__(families)
        self.before: Hook = nothing
        self.after: Hook = nothing
        self.durable = MemoryEngine(families)
        self._unsynced: list[Unsynced] = []
        self._write_lock = Lock()

    def ceiling(self, family: str, key: bytes, prefix: bytes = b"") -> Row | None:
        self.before("ceiling")
        return super().ceiling(family, key, prefix)

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
        self.before(f"scan {family}")
        return super().scan(family, start, end, rows_max=rows_max, bytes_max=bytes_max, reverse=reverse)

    def write(self, rows: Iterable[WriteRow], guards: Sequence[Guard] = ()) -> bool:
        self.before("write")
        batch = list(rows)
        with self._write_lock:
            written = super().write(batch, guards)
            if written:
                self._unsynced.append(batch)
        self.after("write")
        return written

    def delete_range(self, family: str, start: bytes, end: bytes, guards: Sequence[Guard] = ()) -> bool:
        self.before("delete_range")
        with self._write_lock:
            deleted = super().delete_range(family, start, end, guards)
            if deleted:
                self._unsynced.append((family, start, end))
        self.after("delete_range")
        return deleted

    def sync(self) -> None:
        self.before("sync")
        with self._write_lock:
            super().sync()
            self._replay(self.durable, len(self._unsynced))
            self._unsynced.clear()
        self.after("sync")

    def recover(self) -> None:
        self.before("recover")
        super().recover()
        self.after("recover")

    def close(self) -> None:
        if self._families is not None:
            self.before("close")
            self.sync()
            self._closed_families = self._families
            super().close()

    def reopen(self) -> None:
        """Be as before the closing."""
        if self._families is None:
            self._families = self._closed_families

    def lose_unsynced(self) -> None:
        """Fall back to what was synced, as a recovery may."""
        with self._write_lock:
            for family, rows in rows_of(self).items():
                kept = dict(rows_of(self.durable)[family])
                gone: list[WriteRow] = [(family, key, None) for key, _ in rows if key not in kept]
                super().write([*gone, *((family, key, value) for key, value in kept.items())])
            self._unsynced.clear()

    @property
    def unsynced(self) -> int:
        """How many writes a power cut could take."""
        return len(self._unsynced)

    def crashed(self, kept: int = 0) -> "HookedEngine":
        """A new engine as a power cut leaves this one: what was synced, and `kept` writes behind it."""
        survivor = HookedEngine()
        with self._write_lock:
            for family, rows in rows_of(self.durable).items():
                survivor.write([(family, key, value) for key, value in rows])
            self._replay(survivor, kept)
        survivor.sync()
        return survivor

    def _replay(self, engine: MemoryEngine, count: int) -> None:
        for entry in self._unsynced[:count]:
            if isinstance(entry, tuple):
                engine.delete_range(*entry)
            else:
                engine.write(entry)


def rows_of(engine: MemoryEngine) -> dict[str, list[Row]]:
    """All rows of an engine, by family."""
    return {family: engine.scan(family, b"", None, rows_max=10**9, bytes_max=10**12) for family in FAMILIES}


class WatchedLine(deque[Commit]):
    """The line of waiting commits, in which a test can wait until somebody stands."""

    def __init__(self) -> None:
        super().__init__()
        self._changed = Condition()

    def append(self, commit: Commit) -> None:
        with self._changed:
            super().append(commit)
            self._changed.notify_all()

    def wait_length(self, length: int) -> None:
        """Return when at least so many stand in line."""
        with self._changed:
            assert self._changed.wait_for(lambda: len(self) >= length, HANG_SECONDS), "nobody came"


def watch_line(site: Site) -> WatchedLine:
    """Make the line of a site's committer one that can be waited for.  Call it while nobody writes."""
    line = WatchedLine()
    node_of(site).committer._turn.line = line
    return line


def open_memory(engine: HookedEngine, time: SimulatedTime) -> Site:
    """A site without background work on an engine in memory, under simulated time."""
    engine.reopen()
    return open_engine(engine, site="oslo", site_id=7, time_source=time)


def host_of(site: Site) -> EmbeddedHost:
    """What an embedded site stands on."""
    assert isinstance(site.host, EmbeddedHost)
    return site.host


def node_of(site: Site) -> Node:
    """The node behind a site, for what a user cannot see: heartbeats, logs, the engine."""
    return host_of(site).node


def state_after(changes: Iterable[Change]) -> dict[bytes, bytes]:
    """What a reader holds who has applied some changes in their order."""
    state: dict[bytes, bytes] = {}
    for change in changes:
        if change.value is None:
            state.pop(change.key, None)
        else:
            state[change.key] = change.value
    return state


def stored_versions(site: Site, namespace: str) -> set[tuple[bytes, Version]]:
    """Every version of every key that the engine holds for a namespace."""
    wanted = next(row.id for row in site.statistics().namespaces if row.name == namespace)
    engine = node_of(site).engine
    rows = engine.scan("data", b"", None, rows_max=10**9, bytes_max=10**12)
    decoded = [decode_key(engine_key) for engine_key, _ in rows]
    return {(key, version) for identity, key, version in decoded if identity == wanted}


def persist(engine: FaultyEngine, act: Callable[[], Result]) -> Result:
    """Do something until it succeeds; a fault that would last for ever is healed."""
    for _ in range(5):
        try:
            return act()
        except (Retryable, OutcomeUnknown):
            if engine.fired:
                engine.heal()
    return act()
