"""A simulated site: a real site on a simulated disk and clock, which crashes and restarts.

All access goes through `call`.  After the end of the process the site is down; other faults are errors that
the caller must handle.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from copy import copy
from datetime import timedelta
from random import Random
from typing import Final, TypeVar

from floodmark.codec.ordered import qualify_range
from floodmark.codec.stamps import find_origins, stamp_version
from floodmark.engine import WriteRow
from floodmark.host.catalog import GenerationRow
from floodmark.host.embedded import EmbeddedHost
from floodmark.host.ports import Host
from floodmark.model.errors import Closed, FloodmarkError, OutcomeUnknown, Retryable
from floodmark.model.stream import ChangeBatch, ChangesRequest, OnGeneration, Way
from floodmark.model.version import Version
from floodmark.replication.topology import Topology
from floodmark.site import Site, open_engine
from floodmark.testing.clock import SimulatedTime
from floodmark.testing.engine import SimulatedCrash
from floodmark.testing.simulation.chronicle import (
    NAMESPACES,
    POLICIES,
    Chronicle,
    DataSet,
    Intent,
    SeenChange,
    SeenSwap,
    WriteOutcome,
    unqualified,
)
from floodmark.testing.simulation.clocks import SkewedTime
from floodmark.testing.simulation.disk import SimulatedDisk
from floodmark.testing.simulation.history import RunHistory, Violation, show_version
from floodmark.testing.simulation.witness import VersionWitness, log_versions
from floodmark.testing.simulation.workload import PlannedWrite

RETENTION: Final = timedelta(milliseconds=100)
SYNC_MS_MAX: Final = 2
SLOW_SYNC_MS_MAX: Final = 200
# The safe point of the chronicle, which must get every change.
CHRONICLE: Final = "chronicle"
HOLD: Final = timedelta(hours=1)

Result = TypeVar("Result")


class Down(Closed):
    """The site is not running."""


# The errors that any call may raise.
TROUBLE: Final = (Down, OutcomeUnknown, Retryable)


class SimulatedSite:
    """One site through all its restarts."""

    def __init__(
        self, name: str, site_id: int, *, true_time: SimulatedTime, random: Random, history: RunHistory
    ) -> None:
        self.name = name
        self.id = site_id
        self.time = SkewedTime(true_time, 0)
        self.witness = VersionWitness(name)
        self.chronicle = Chronicle(name, site_id)
        self.past: list[Chronicle] = []
        """The chronicles of its earlier lives, each of which ended with the loss of all data."""
        self.disk = SimulatedDisk(self)
        self.log_retention: timedelta | None = None
        self.data_sets: Mapping[bytes, DataSet] | None = None
        """The data sets of the world by their stamps, if any are published there."""
        self.life = 0
        self._census: Counter[str] = Counter()
        self.is_restarting = False
        self._true_time = true_time
        self._random = random
        self._history = history
        self._site: Site | None = None

    # The disk's watcher

    def writing(self, rows: Sequence[WriteRow]) -> None:
        self.witness.writing(rows)

    def syncing(self) -> None:
        slow = self._random.random() < 0.05
        self._true_time.advance(self._random.randint(0, SLOW_SYNC_MS_MAX if slow else SYNC_MS_MAX))
        if self._site is not None and self._random.random() < 0.5:
            # A site that is about to close answers no calls.
            with suppress(Closed):
                self.announce(self._site.resolved_version())

    # Lives

    @property
    def is_up(self) -> bool:
        """Whether the site is running."""
        return self._site is not None

    def note(self, what: str) -> None:
        """Record an event that concerns the whole site."""
        self._history.add(self._true_time(), self.name, what)

    def note_arrival(self, rows: Mapping[bytes, bytes]) -> None:
        """Record the arrival of changes of other sites."""
        keys = [unqualified(key) for key in rows]
        stamps = sorted({show_version(stamp_version(origin)) for origin in find_origins(list(rows.values()))})
        self._history.add(self._true_time(), self.name, f"changes of {' '.join(stamps)} arrive:", keys=keys)

    def start(self, *, disturbed: bool = False) -> None:
        """Open the site on its disk; it stays down if that fails."""
        self.disk = self.disk.restart()
        if disturbed:
            self.disk.disturb(self._random)
        self.life += 1
        try:
            self._site = open_engine(
                self.disk,
                site=self.name,
                site_id=self.id,
                background=False,
                log_retention=self.log_retention,
                time_source=self.time,
            )
            self.note(f"started, life {self.life}")
        except (SimulatedCrash, FloodmarkError) as error:
            self.note(f"did not start: {type(error).__name__}")
            self._lose_power()

    def create_namespaces(self, topology: Topology) -> None:
        """Create the namespaces that all sites share, and put the topology in force."""
        assert self._site is not None
        for name, merge in POLICIES.items():
            self._site.create_namespace(name, merge=merge, retention=RETENTION)
        self._site.host.membership.set_topology(topology)

    def crash(self) -> None:
        """End the process here and now."""
        self._lose_power()

    def stop(self) -> None:
        """Close the site in good order."""
        try:
            self.call(lambda site: site.close())
        except TROUBLE as error:
            self.note(f"did not close well: {type(error).__name__}")
        if self._site is not None:
            self._site = None
            self.note("stopped")
            self.disk = self.disk.restart()

    def _lose_power(self) -> None:
        unsynced = self.disk.unsynced
        keep = self._random.randint(0, unsynced)
        self._site = None
        self.disk = self.disk.restart(keep)
        self.note(f"crashed; {unsynced - keep} of {unsynced} unsynced writes are lost")

    def lose(self) -> None:
        """Lose the site with all its data.  If it returns, it is empty."""
        self._site = None
        self.disk = SimulatedDisk(self)
        self.witness = VersionWitness(self.name)
        self.past.append(self.chronicle)
        whole = self.chronicle.copies_are_whole
        self.chronicle = Chronicle(self.name, self.id, copies_are_whole=whole)
        self.note("lost with all its data")

    def split_off(self) -> "SimulatedSite":
        """A running site that was given up, as an object of its own: only its links still reach it."""
        ghost = copy(self)
        ghost.disk.show_to(ghost)
        return ghost

    def call(self, action: Callable[[Site], Result]) -> Result:
        """Run an action at the site.  Raises Down if the site is not running, or crashes meanwhile."""
        if self._site is None:
            raise Down(f"{self.name} is down")
        try:
            return action(self._site)
        except SimulatedCrash as crash:
            self._lose_power()
            raise Down(f"{self.name} crashed") from crash
        finally:
            if self.witness.found is not None:
                raise self.witness.found

    def call_host(self, action: Callable[[Host], Result]) -> Result:
        """`call` for the host of the site."""
        return self.call(lambda site: action(site.host))

    # Promises

    def announce(self, resolved: Version) -> None:
        """Record a resolved version that the site has announced, and check it."""
        self.witness.announce(resolved, self.disk.unsynced_rows())

    def write(self, write: PlannedWrite) -> None:
        """Attempt a write, and record its outcome."""
        low, result, error = self.witness.written, None, ""
        try:
            result = self.call(write.run)
            outcome = WriteOutcome.DONE
        except (Down, OutcomeUnknown) as failure:
            outcome, error = WriteOutcome.UNKNOWN, f" ({type(failure).__name__})"
        except Retryable as failure:
            outcome, error = WriteOutcome.REFUSED, f" ({type(failure).__name__})"
        high = self.witness.written
        what = f"{write.operation} {'fsync' if write.durable else 'async'}: {outcome}{error}"
        self._history.add(self._true_time(), self.name, what, keys=write.expected, version=high)
        self._check_answer(write, result, low, high)
        self.chronicle.intents.append(
            Intent(
                operation=write.operation,
                outcome=outcome,
                durable=write.durable,
                low=low,
                high=high,
                era=self.era,
                expected={} if result is False else write.expected,
                adds=write.adds,
                batch=write.batch,
            )
        )

    def _check_answer(
        self, write: PlannedWrite, result: Version | bool | None, low: Version, high: Version
    ) -> None:
        """Check the result of a write; `result` is None if the site returned none."""
        problem = None
        if type(result) is int and result != high and not (write.prepares and low < result < high):
            problem = "2", f"got version {show_version(result)}, and wrote at {show_version(high)}"
        unsynced = log_versions(self.disk.unsynced_rows())
        if result and write.durable and any(low < version <= high for version in unsynced):
            problem = "1", "was acknowledged, and is not on disk"
        if problem is not None:
            promise, what = problem
            raise Violation(
                promise, self.name, f"{write.operation} {what}", keys=write.expected, version=high
            )

    @property
    def era(self) -> tuple[int, int]:
        """The numbers of restarts and of recoveries.  A later era may lack unsynced writes of this one."""
        recoveries = 0 if self._site is None else embedded(self._site.host).node.storage.recoveries
        return self.life, recoveries

    def count(self, what: str) -> None:
        """Add one to the census."""
        self._census[what] += 1

    def read_changes(self, request: ChangesRequest) -> tuple[list[SeenChange], Version]:
        """Read a stream to its end; return its changes, and the version up to which it went."""
        batches = self.call_host(lambda host: list(host.changes(request)))
        self._census.update(batch.way for batch in batches if batch.keys)
        through = batches[-1].through if batches else request.since
        return [seen for batch in batches for seen in seen_of(batch, partial=request.partial)], through

    def read_batch(self, stream: Iterator[ChangeBatch]) -> ChangeBatch:
        """Read one batch of a stream that follows."""
        batch = self.call(lambda _: next(stream))
        self._census.update([batch.way] if batch.keys else ())
        return batch

    def extend_chronicle(self) -> None:
        """Extend the chronicle to the present."""
        chronicle = self.chronicle
        while self.data_sets is not None:
            row = self.call_host(lambda host: _next_data_set(host, chronicle.through))
            if row is None:
                break
            assert row.since is not None
            if chronicle.through < row.since - 1:
                before = ChangesRequest(since=chronicle.through, until=row.since - 1, partial=True)
                chronicle.extend(*self.read_changes(before))
            told, through = self.read_changes(_difference_at(row.since))
            if through < row.since:
                return
            chronicle.cross(told, SeenSwap(row.since, row.stamp), self.data_sets[row.stamp])
            self.count("data sets read")
        told, through = self.read_changes(ChangesRequest(since=chronicle.through, partial=True))
        if through > chronicle.through:
            self.announce(through)
        chronicle.extend(told, through)

    def check_links(self) -> None:
        """Check that no account of a link has findings: no change was lost, duplicated or altered."""
        for (namespace, source), row in self.call_host(lambda host: embedded(host).links.rows).items():
            if row.findings:
                raise Violation(
                    "heartbeats",
                    self.name,
                    f"{NAMESPACES[namespace - 1]} from site {source}: {row.findings[0].finding}",
                )
            self._census["intervals checked"] += row.checked

    def collect_garbage(self) -> None:
        """Collect garbage, after the chronicle has what it needs."""
        self.extend_chronicle()
        self.call(lambda site: site.hold_safe_point(CHRONICLE, self.chronicle.through, lifetime=HOLD))
        report = self.call(lambda site: site.collect_garbage())
        if report.versions_removed:
            self.note(f"collected {report.versions_removed} versions and {report.keys_removed} keys")
        self._census["versions collected"] += report.versions_removed
        self._census["keys collected"] += report.keys_removed

    def census(self) -> Counter[str]:
        """Counts of the events of interest at this site."""
        return Counter(self._census)


def embedded(host: Host) -> EmbeddedHost:
    """The host of a site in this process."""
    assert isinstance(host, EmbeddedHost)
    return host


def _next_data_set(host: Host, through: Version) -> GenerationRow | None:
    """The first data set that was published above a version."""
    row = host.namespaces.find_namespace(NAMESPACES[0])
    swap = row.swap_after(through)
    return None if swap is None else row.at(swap.version)


def _difference_at(version: Version) -> ChangesRequest:
    """What a data set has changed that is read from a version on."""
    return ChangesRequest(
        keys=qualify_range(1),
        namespace=1,
        since=version - 1,
        until=version,
        on_generation=OnGeneration.DIFFERENCE,
    )


def seen_of(batch: ChangeBatch, *, partial: bool) -> list[SeenChange]:
    """The changes of a batch; `partial` says that merged records were asked for as they were logged.

    The marker of a swap is none.
    """
    if batch.is_marker:
        return []
    scanned = batch.way is Way.SCAN
    logged = partial and not scanned
    return [
        SeenChange(
            version,
            key,
            stored,
            None if scanned else partition,
            exact=logged or POLICIES[key.namespace] == "last_write",
        )
        for version, key, stored, partition in zip(
            batch.versions, map(unqualified, batch.keys), batch.values, batch.partitions, strict=True
        )
    ]
