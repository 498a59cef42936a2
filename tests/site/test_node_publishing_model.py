"""Publications at a site of several nodes, held against a plain model of what readers must find.

All nodes run in one thread.  Before an operation of the engine that they share, another node may take any of
its steps, or be given up for dead: so a node stops between two operations for as long as chance wants, with
the turn to write in its hand.  A node that holds its turn answers no call of others.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from random import Random
from typing import Any

import pytest
from tests.cluster import SiteCluster
from tests.sizes import only

from floodmark.codec.ordered import encode_namespace, qualify_range
from floodmark.codec.values import encode_value
from floodmark.engine import MemoryEngine
from floodmark.host.catalog import load_namespaces
from floodmark.host.embedded import EmbeddedHost
from floodmark.model.batch import mint_batch
from floodmark.model.errors import FloodmarkError, GenerationSwapped, Retryable, VersionCollected
from floodmark.model.partition import GenerationStream
from floodmark.partition import FAMILIES, LocalPartition
from floodmark.partition.generations import _Places
from floodmark.partition.learning import KnownSwaps
from floodmark.partition.membership import SharedNode
from floodmark.routing.atomic import read_atomic
from floodmark.testing.simulation.nodes import tick

KEYS = [b"%02d" % number for number in range(9)]
Pairs = dict[bytes, bytes]
# What goes on in the middle of what goes on in the middle of something is not disturbed.
DEPTH_MAX = 3


class InterruptedEngine(MemoryEngine):
    """An engine that lets others go on before each of its operations."""

    def __init__(self) -> None:
        super().__init__(FAMILIES)
        self.interrupt: Callable[[], None] = lambda: None

    def get(self, *arguments: Any, **options: Any) -> Any:
        self.interrupt()
        return super().get(*arguments, **options)

    def get_many(self, *arguments: Any, **options: Any) -> Any:
        self.interrupt()
        return super().get_many(*arguments, **options)

    def ceilings(self, *arguments: Any, **options: Any) -> Any:
        self.interrupt()
        return super().ceilings(*arguments, **options)

    def scan(self, *arguments: Any, **options: Any) -> Any:
        self.interrupt()
        return super().scan(*arguments, **options)

    def write(self, *arguments: Any, **options: Any) -> Any:
        self.interrupt()
        return super().write(*arguments, **options)


class Batch:
    """An atomic batch that is prepared at some nodes."""

    def __init__(self, number: int, time_ms: int, keys: list[bytes]) -> None:
        self.id, self.keys, self.value = mint_batch(time_ms), keys, b"batch %d" % number
        self.version = 0
        self.is_prepared = self.is_ending = False


class World:
    """Three nodes, and a plain account of all changes and data sets."""

    def __init__(self, seed: int) -> None:
        self.random = Random(seed)
        self.engine = InterruptedEngine()
        self.nodes = SiteCluster(3, engine=self.engine)
        self.time = self.nodes.cluster.time
        self.id = self.nodes.sites[0].create_namespace("rows").id
        self.prefix = encode_namespace(self.id)
        for host in self.nodes.hosts:
            host.refresh()
        for key in (KEYS[3], KEYS[6]):
            self.nodes.hosts[0].partitions.split("rows", key)
        for number, key in ((2, KEYS[3]), (3, KEYS[6])):
            self.nodes.give(number, self.prefix + key)
        self.start = self.nodes.hosts[0].versions.now()
        self.changes: list[tuple[int, bytes, bytes | None]] = []
        # By generation, the data set.
        self.rows: dict[int, Pairs] = {}
        self.batches: list[Batch] = []
        # Reads that are not at their end.
        self.readers = 0
        self.reads: list[tuple[int, list[bytes], Pairs]] = []
        self.writes = 0
        self.depth = 0
        self.is_publishing = self.swaps_only = False
        self.nodes.is_lost = lambda: self.random.random() < 0.5
        self.rate = self.random.choice([0.03, 0.1])

    # The account

    def swaps(self) -> list[tuple[int, int, Pairs]]:
        """Version, base and data set of each swap that is stored."""
        with self.undisturbed():
            (row,) = [each for each in load_namespaces(self.engine) if each.id == self.id]
        return [
            (each.since, each.base, self.rows[each.number])
            for each in row.generations[1:]
            if each.since is not None
        ]

    @contextmanager
    def undisturbed(self) -> Iterator[None]:
        """Let nobody else go on meanwhile."""
        self.depth += DEPTH_MAX
        try:
            yield
        finally:
            self.depth -= DEPTH_MAX

    def state_at(self, version: int) -> Pairs:
        """What a reader as of a version must find."""
        _, base, rows = max((each for each in self.swaps() if each[0] <= version), default=(0, 0, Pairs()))
        state = dict(rows)
        for committed, key, value in sorted(self.changes, key=lambda each: each[0]):
            if base < committed <= version:
                state.pop(key, None)
                if value is not None:
                    state[key] = value
        return state

    # Who can do what

    def free(self) -> list[tuple[SharedNode, EmbeddedHost]]:
        """The nodes that are not in the middle of a write."""
        pairs = zip(self.nodes.cluster.nodes, self.nodes.hosts, strict=True)
        return [(shared, host) for shared, host in pairs if self.nodes.is_free(shared)]

    def served(self, shared: SharedNode) -> list[LocalPartition]:
        """The partitions with the keys of the namespace that a node takes for its own."""
        return [each for each in shared.node.map.partitions if not each.retired]

    def own(self, partitions: list[LocalPartition]) -> list[bytes]:
        return [key for key in KEYS if any(each.range.contains(self.prefix + key) for each in partitions)]

    def route(self, partitions: list[LocalPartition], key: bytes) -> LocalPartition:
        return next(each for each in partitions if each.range.contains(self.prefix + key))

    # Steps

    def interrupt(self) -> None:
        if self.depth < DEPTH_MAX and self.random.random() < self.rate:
            self.act()

    def act(self) -> None:
        steps: Mapping[Callable[[], None], int] = {
            self.put: 10,
            self.read: 12,
            self.prepare: 1,
            self.finish: 3,
            self.begin: 3,
            self.swap: 5,
        }
        self.depth += 1
        try:
            if self.swaps_only:
                self.swap()
            else:
                self.random.choices(list(steps), list(steps.values()))[0]()
        except (Retryable, FloodmarkError):
            # A node was replaced, or does not serve or keep any more.
            pass
        finally:
            self.depth -= 1

    def put(self) -> None:
        for shared, _ in self.random.sample(self.free(), min(1, len(self.free()))):
            if not (keys := self.own(partitions := self.served(shared))):
                return
            key = self.random.choice(keys)
            self.writes += 1
            value = b"%d" % self.writes
            version = self.route(partitions, key).put(
                [self.prefix + key], [encode_value(value)], durable=True
            )
            self.changes.append((version, key, value))

    def read(self) -> None:
        """Read what a node has as of a version, perhaps one of another node; it is looked at later."""
        prepared = (shared.node.committer.prepared.all() for shared in self.nodes.cluster.nodes)
        if self.batches or any(prepared):
            # It would ask nodes that are at work.
            return
        self.readers += 1
        try:
            self.read_some()
        finally:
            self.readers -= 1

    def read_some(self) -> None:
        for shared, _ in self.random.sample(self.free(), min(1, len(self.free()))):
            other = self.random.choice(self.nodes.cluster.nodes)
            at = self.random.choice([other.clock.latest, other.clock.latest, shared.clock.latest])
            keys, found = self.own(partitions := self.served(shared)), {}
            for key in keys:
                value = self.route(partitions, key).get(self.prefix + key, at)
                if value is not None:
                    found[key] = value
            self.reads.append((at, keys, found))

    def prepare(self) -> None:
        """Prepare an atomic batch at two nodes."""
        if len(free := self.free()) < 2 or self.batches or self.readers:
            return
        parts = [self.served(shared) for shared, _ in self.random.sample(free, 2)]
        keys = [self.random.choice(own) for part in parts if (own := self.own(part))]
        if len(keys) < 2:
            return
        self.writes += 1
        batch = Batch(self.writes, self.time(), sorted(keys))
        qualified = [self.prefix + key for key in batch.keys]
        partitions = {key: self.route(part, key) for part in parts for key in self.own(part)}
        self.batches.append(batch)
        for key in batch.keys:
            version = partitions[key].prepare(
                batch.id, [self.prefix + key], [encode_value(batch.value)], qualified, qualified
            )
            batch.version = max(batch.version, version)
        batch.is_prepared = True

    def finish(self) -> None:
        """Commit a batch at the highest version that a node has answered, or abort it."""
        if not self.batches or self.batches[-1].is_ending:
            return
        batch, partitions = self.batches[-1], dict[bytes, LocalPartition]()
        for shared, _ in self.free():
            for partition in self.served(shared):
                partitions |= {key: partition for key in batch.keys if key in self.own([partition])}
        if len(partitions) < len(batch.keys):
            return
        batch.is_ending = True
        try:
            for key, partition in partitions.items():
                if not batch.is_prepared:
                    partition.abort_prepared(batch.id, self.prefix + key)
                elif partition.commit_prepared(batch.id, batch.version):
                    self.changes.append((batch.version, key, batch.value))
            self.batches.remove(batch)
        finally:
            batch.is_ending = False

    def keeper(self) -> EmbeddedHost | None:
        return next((host for shared, host in self.free() if shared.engine.keeper is not None), None)

    @contextmanager
    def publishing(self) -> Iterator[EmbeddedHost | None]:
        """The keeper, if it can publish; it does not publish while it is at that."""
        keeper = None if self.is_publishing else self.keeper()
        self.is_publishing = keeper is not None or self.is_publishing
        try:
            yield keeper
        finally:
            self.is_publishing = self.is_publishing and keeper is None

    def begin(self) -> None:
        with self.publishing() as keeper:
            if keeper is None or keeper.catalog.get("rows").loading is not None:
                return
            bases = [0, 0, *(version for version, _, _ in self.changes[-2:])]
            base = self.random.choice(bases)
            generation = keeper.generations.begin_generation("rows", base, "model")
            number, count = generation.number, self.random.randrange(len(KEYS))
            self.rows[number] = dict.fromkeys(self.random.sample(KEYS, count), b"set %d" % number)
            self.load(number)

    def load(self, number: int) -> None:
        """Load the data set through nodes that do not keep the site, too."""
        for key, value in self.rows[number].items():
            for _, host in self.random.sample(self.free(), 1):
                stream = host.write_stream(GenerationStream(self.id, number))
                stream.send({self.prefix + key: encode_value(value)}).result()

    def swap(self) -> None:
        with self.publishing() as keeper:
            if keeper is None or (loading := keeper.catalog.get("rows").loading) is None:
                return
            if not loading.joined:
                # Its publisher may not have loaded all.
                self.load(loading.number)
            keeper.generations.swap_generation("rows", loading.number, 2)

    def bury(self) -> None:
        """Give a node up for dead; it begins anew later."""
        dead = self.random.choice(self.nodes.cluster.nodes)
        self.nodes.cluster.bury(dead)
        self.nodes.renew()
        self.nodes.cluster.tick(*self.nodes.cluster.nodes, times=2)
        self.nodes.renew()

    def read_all(self) -> None:
        """Read all keys at once while nothing but a swap happens: it is seen whole or not at all."""
        if self.batches:
            return
        for host in self.nodes.hosts:
            host.refresh()
        host = self.random.choice(self.nodes.hosts)
        before, keys = self.state_at(1 << 63), [self.prefix + key for key in KEYS]

        def snapshot(version: int) -> list[bytes | None]:
            at = max(version, *(shared.clock.latest for shared in self.nodes.cluster.nodes))
            return [host.router.get(key, at) for key in keys]

        self.swaps_only, self.depth = True, DEPTH_MAX - 1
        try:
            values = read_atomic(host.router, keys, snapshot)
        finally:
            self.swaps_only, self.depth = False, 0
        found = {key: value for key in KEYS if (value := values[self.prefix + key]) is not None}
        assert found in (before, self.state_at(1 << 63))

    def collect(self) -> None:
        if (keeper := self.keeper()) is not None and not self.batches:
            keeper.retention.collect_garbage()

    # Checks

    def check_reads(self) -> None:
        reads, self.reads = self.reads, []
        for at, keys, found in reads:
            state = self.state_at(at)
            assert found == {key: state[key] for key in keys if key in state}, at

    def check_state(self) -> None:
        """Look at the present and at both sides of the last swaps, by each node."""
        if self.batches:
            return
        versions = [version + step for version, _, _ in self.swaps()[-2:] for step in (-1, 0)]
        versions += [version for version, _, _ in self.changes[-2:]]
        for host in self.nodes.hosts:
            with suppress(VersionCollected):
                for version in [*versions, max(shared.clock.latest for shared in self.nodes.cluster.nodes)]:
                    found = {
                        row["key"]: row["value"][:-1]
                        for page in host.router.scan_records(qualify_range(self.id), version)
                        for row in page.to_pylist()
                    }
                    assert found == self.state_at(version), version

    def check_changes(self) -> None:
        """A stream has all changes up to the next swap, and fails there."""
        swaps = [version for version, _, _ in self.swaps()]
        since = self.random.choice([self.start, *swaps])
        swap = min((version for version in swaps if version > since), default=None)
        for number, host in enumerate(self.nodes.hosts):
            got: list[tuple[int, bytes, bytes | None]] = []
            told: Any = None
            resolved = host.versions.resolved_version()
            try:
                for change in self.nodes.sites[number].changes("rows", since=since, until=resolved):
                    got.append((change.version, change.key, change.value))
            except GenerationSwapped as error:
                told = error.details["oldest"]
            except VersionCollected:
                return
            end = resolved if told is None else told - 1
            assert told == (swap if swap is not None and swap <= resolved else None)
            assert got == sorted(each for each in self.changes if since < each[0] <= end)

    def run(self, steps: int) -> None:
        for _ in range(steps):
            self.time.advance(self.random.choice([0, 1, 3, 300]))
            for shared in self.nodes.cluster.nodes:
                tick(shared)
            self.nodes.renew()
            self.engine.interrupt = self.interrupt
            with suppress(FloodmarkError):
                step = self.random.choices(
                    [self.act, self.read_all, self.bury, self.collect], [20, 5, 0.5, 0.5]
                )[0]
                step()
            self.engine.interrupt = lambda: None
            self.nodes.renew()
            # A reader as of a version that is far ahead would be refused.
            self.time.advance(max(shared.clock.ahead_ms() for shared in self.nodes.cluster.nodes))
            self.check_reads()
            if self.random.random() < 0.2:
                self.finish()
                self.check_state()
                self.check_changes()


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    # The only thread waits for no other node.
    monkeypatch.setattr("floodmark.host.publishing.JOIN_MS_MAX", 0)


@pytest.mark.parametrize("seed", range(3))
def test_readers_at_all_nodes_find_one_data_set_as_of_a_version(seed: int) -> None:
    world = World(seed)
    world.run(80)
    assert world.swaps()


@pytest.mark.parametrize("seed", only((), range(100, 120), range(120, 160)))
def test_readers_at_all_nodes_find_one_data_set_in_many_runs(seed: int) -> None:
    World(seed).run(250)


# Canaries


def run_until_it_fails() -> None:
    with pytest.raises(AssertionError):
        run_many()


def run_many() -> None:
    for seed in range(40):
        World(seed).run(80)


def test_the_model_catches_a_swap_below_what_a_node_has_announced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SharedNode, "pass_ceilings", lambda _: ())
    run_until_it_fails()


def test_the_model_catches_a_node_that_reads_above_a_swap_which_it_has_not_learnt(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(KnownSwaps, "learn", lambda *_: None)
    run_until_it_fails()


def test_the_model_catches_a_swap_before_all_changes_are_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.cluster.ClusterNodes.settled_version", lambda _: 0)
    run_until_it_fails()


def test_the_model_catches_writes_that_miss_a_generation_which_has_joined(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(_Places, "move", _Places.move_present)
    run_until_it_fails()


def test_the_model_catches_an_atomic_read_of_two_generations(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("floodmark.partition.atomic_reading.swapped_at", lambda *_: 0)
    run_until_it_fails()
