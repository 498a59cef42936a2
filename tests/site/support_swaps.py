"""A site of two nodes that swaps data sets while writers are at both, and a plain model for its readers."""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from random import Random
from threading import Event, Lock
from typing import Final, Literal, NamedTuple, TypeAlias

from tests.nodes import NodeCluster, node_cluster
from tests.waiting import run_threads, wait_until

from floodmark import Change, ChangeType, Site
from floodmark.host.catalog import GenerationRow
from floodmark.links.bringing import bring_data_sets
from floodmark.links.steps import plan_step, run_step
from floodmark.model.change import Stamp
from floodmark.model.errors import PartitionMoved, Retryable
from floodmark.model.version import Version
from floodmark.replication.topology import MemberSite, SharedNamespace, Topology
from floodmark.site.connecting import connect
from floodmark.testing.clock import SimulatedTime

# Half of them at each node.
KEYS: Final = [b"%s%d" % (node, number) for node in (b"a", b"z") for number in range(8)]
# Of simulated time, of which a second passes in so many of real time.
TICK_SECONDS: Final = 0.02
# Real time between two moves of a partition.
MOVE_SECONDS: Final = 0.1
# Changes between two swaps.
CHANGES: Final = 25

Way: TypeAlias = Literal["difference", "snapshot", "fail"]
State: TypeAlias = dict[bytes, bytes]


class Row(NamedTuple):
    """What a reader gets, in the order in which it gets it."""

    version: Version
    key: bytes
    type: str
    value: bytes | None


class Swap(NamedTuple):
    """A data set that readers have had since a version, with all changes above its base."""

    version: Version
    base: Version
    rows: State


class Model:
    """All changes and data sets of a namespace."""

    def __init__(self) -> None:
        self.changes: list[Row] = []
        # With the sites at which they were written.
        self.stamped: list[tuple[Stamp, Row]] = []
        self.swaps: list[Swap] = []
        self._lock = Lock()

    def note(self, site: int, version: Version, changes: dict[bytes, bytes | None]) -> None:
        """Take note of a commit."""
        rows = [
            Row(version, key, str(ChangeType.DELETE if value is None else ChangeType.UPSERT), value)
            for key, value in changes.items()
        ]
        with self._lock:
            self.changes += rows
            self.stamped += [(Stamp(version, site), row) for row in rows]

    def state_at(self, version: Version) -> State:
        """What the namespace holds as of a version."""
        newest = [each for each in self.swaps if each.version <= version][-1:]
        _, base, rows = newest[0] if newest else Swap(0, 0, {})
        state: dict[bytes, bytes | None] = {**rows}
        with self._lock:
            changes = sorted(self.changes)
        state |= {each.key: each.value for each in changes if base < each.version <= version}
        return {key: value for key, value in state.items() if value is not None}

    def merged(self, publisher: int) -> State:
        """What all sites hold that have the last data set and have exchanged all changes."""
        _, base, rows = self.swaps[-1]
        above = sorted(each for each in self.stamped if each[0] > Stamp(base, publisher))
        state = {**rows, **{row.key: row.value for _, row in above}}
        return {key: value for key, value in state.items() if value is not None}

    def markers(self) -> list[Row]:
        """The row that readers get first at a swap."""
        return [Row(swap.version, b"", str(ChangeType.GENERATION), None) for swap in self.swaps]

    def told(self, way: Way) -> list[Row]:
        """What a reader of everything gets; one that fails at swaps goes on behind them."""
        rows = sorted(self.changes)
        if way == "fail":
            return rows
        rows += self.markers()
        for swap in self.swaps:
            before, state = self.state_at(swap.version - 1), self.state_at(swap.version)
            keys = state if way == "snapshot" else before | state
            for key in keys:
                value = state.get(key)
                if way == "snapshot" or value != before.get(key):
                    change = ChangeType.DELETE if value is None else ChangeType.UPSERT
                    rows.append(Row(swap.version, key, str(change), value))
        return sorted(rows)


def row_of(change: Change) -> Row:
    return Row(change.version, change.key, str(change.type), change.value)


class World:
    """Two nodes, each with half of the keys of `users`, and a client of both; perhaps other sites."""

    def __init__(self, cluster: NodeCluster, client: Site, seed: int, others: Sequence[Site] = ()) -> None:
        self.cluster = cluster
        self.client = client
        self.others = others
        self.writers = [*cluster.sites.values(), *others]
        self.model = Model()
        self.random = Random(seed)
        self.before = cluster.sites[1].resolved_version()
        # What was written last, once nothing is written any more.
        self.last: Version | None = None
        self.ended = Event()
        self._stopping = Event()
        self._working: set[int] = set()

    def site(self, place: str) -> Site:
        """A node, or a client of both."""
        return self.client if place == "client" else self.cluster.sites[int(place)]

    def tick(self) -> None:
        """A second passes at all nodes, and each writes a heartbeat."""
        self.cluster.tick()
        for number in self.cluster.sites:
            # The next second has one where a partition moves just now.
            with suppress(PartitionMoved):
                self.cluster.host(number).current.node.heartbeat()
        for site in self.others:
            site.heartbeat()

    def run(
        self,
        *work: Callable[[], object],
        turns: str = "prp",
        between: Callable[[], object] = lambda: None,
    ) -> None:
        """Let data sets be published (p) and rolled back (r) between writes, and others do their work.

        Partitions move meanwhile.  `between` is called before each of these.
        """

        def counted(number: int, task: Callable[[], object]) -> Callable[[], None]:
            def run() -> None:
                try:
                    task()
                finally:
                    self._working.discard(number)

            return run

        tasks = [self._writer(site, number) for number, site in enumerate(self.writers)]
        tasks += [lambda: self._swap_all(turns, between), self._move_on, *work]
        self._working = {*range(len(tasks))}
        run_threads(self._tick_on, *(counted(number, task) for number, task in enumerate(tasks)))

    def _tick_on(self) -> None:
        pause = Event()
        while self._working:
            self.tick()
            pause.wait(TICK_SECONDS)

    def _move_on(self) -> None:
        """Move partitions between the nodes."""
        random = Random(self.random.random())
        while not self.ended.wait(MOVE_SECONDS):
            partition = random.choice(self.client.partitions())
            with suppress(Retryable):
                self.client.host.node_port.move(partition.id, 3 - partition.node)

    # Writes

    def _writer(self, site: Site, number: int) -> Callable[[], object]:
        """A writer at a node, of keys of both nodes."""
        random = Random(self.random.random())

        def write() -> None:
            written = 0
            while not self._stopping.wait(0.002):
                written += 1
                self.write(site, random, b"%d of %d" % (written, number))

        return write

    def write(self, site: Site, random: Random, value: bytes) -> None:
        """Put or delete a key, or several in an atomic batch."""
        users = site.namespace("users")
        keys = random.sample(KEYS, random.choice([1, 1, 1, 4]))
        changes = {key: None if random.random() < 0.3 else value for key in keys}
        if len(keys) == 1:
            ((key, new),) = changes.items()
            version = users.delete(key) if new is None else users.put(key, new)
        else:
            with site.atomic() as batch:
                for key, new in changes.items():
                    batch.delete(users, key) if new is None else batch.put(users, key, new)
            version = batch.version
        self.model.note(site.id, version, changes)

    def _wait_for_changes(self) -> None:
        wanted = len(self.model.changes) + CHANGES
        wait_until(lambda: len(self.model.changes) >= wanted, "writes do not go on")

    # Swaps

    def _swap_all(self, turns: str, between: Callable[[], object]) -> None:
        try:
            for number, turn in enumerate(turns):
                self._wait_for_changes()
                between()
                # Of both nodes, one keeps the site.
                generations = self.cluster.sites[2 - number % 2].generations
                if turn == "p":
                    base, rows = self.data_set(number)
                    published = generations.publish("users", rows, base=base, others=self.others)
                    self.model.swaps.append(Swap(published.version, base, rows))
                else:
                    self.note_rollback(generations.rollback("users", others=self.others))
            self._wait_for_changes()
        finally:
            self._stopping.set()
        wait_until(lambda: self._working.isdisjoint(range(len(self.writers))), "a writer is stuck")
        self.last = self.put_above(b"last")
        self.ended.set()

    def wait_resolved(self) -> None:
        """Wait until everything that was written before is resolved."""
        newest = max(self.model.changes).version
        wait_until(lambda: self.client.resolved_version() >= newest, "the resolved version stays behind")

    def put_above(self, key: bytes) -> Version:
        """Put a key above all that was written before; else a node may write below another one."""
        self.wait_resolved()
        version = self.client.namespace("users").put(key, key)
        self.model.note(self.client.id, version, {key: key})
        return version

    def data_set(self, number: int) -> tuple[Version, State]:
        """The base and the rows of a data set; some changes are newer."""
        base = max(row.version for row in self.model.changes[:-5])
        base = max(base, *(swap.base for swap in self.model.swaps), 0)
        keys = [*self.random.sample(KEYS, len(KEYS) // 2), b"m%d" % number]
        return base, dict.fromkeys(keys, b"set %d" % number)

    def note_rollback(self, back: GenerationRow) -> None:
        """A rollback publishes the state before the last swap, with all changes since."""
        assert back.since is not None
        base = back.base if self.others else self.model.swaps[-1].version - 1
        self.model.swaps.append(Swap(back.since, base, self.model.state_at(base)))

    def has_ended(self, through: Version) -> bool:
        """Whether a reader that has everything up to a version has everything."""
        return self.last is not None and self.last <= through

    def check(self, got: list[Row], way: Way) -> None:
        """A reader has got everything once, in order of versions."""
        assert self.last is not None
        assert [row.version for row in got] == sorted(row.version for row in got), "the order is broken"
        told = self.model.told(way)
        missing, more = [*(Counter(told) - Counter(got))], [*(Counter(got) - Counter(told))]
        assert (missing, more) == ([], []), (
            f"{len(missing)} are missing ({missing[:3]}), {len(more)} too many ({more[:3]})"
        )
        for site in (*self.cluster.sites.values(), self.client):
            assert dict(site.namespace("users").scan()) == self.model.state_at(self.last)


@contextmanager
def swapping_world(seed: int = 0) -> Iterator[World]:
    """Two nodes that are ended behind the block."""
    with node_cluster(2) as cluster:
        cluster.spread()
        assert {cluster.owner_of("users", key) for key in KEYS} == {1, 2}
        with connect(cluster.url) as client:
            yield World(cluster, client, seed)


@contextmanager
def linked_world(other: Site, time: SimulatedTime, seed: int = 0) -> Iterator[World]:
    """Two nodes that share `users` with another site."""
    with node_cluster(2, time=time) as cluster:
        cluster.spread()
        other.create_namespace("users")
        with connect(cluster.url) as client:
            sites = {site.name: MemberSite(id=site.id) for site in (client, other)}
            for site in (client, other):
                site.set_topology(Topology(epoch=1, sites=sites, namespaces={"users": SharedNamespace()}))
            cluster.tick()
            yield World(cluster, client, seed, [other])


def link(world: World) -> None:
    """Let links run in both directions until all has arrived."""
    left, hosts = 4, [world.client.host, world.others[0].host]
    while left:
        left -= world.ended.is_set()
        world.tick()
        for source, target in (hosts, hosts[::-1]):
            step = plan_step(source, target, ["users"])
            bring_data_sets(source, target, step)
            run_step(source, target, step)
