"""Atomic batches in the simulation of nodes: writers that die after any step, and lost calls.

The rules are the real ones (`routing/batches.py`, `routing/atomic.py`); only the calls between nodes are
simulated.  Checked in the end: a batch is at all its keys at one version, or at none (promises 3 and 6); one
that was acknowledged is there (1); and no atomic read saw a part of one (6).
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import count
from random import Random
from typing import Any, Final, Protocol, TypeVar

from floodmark.codec.states import live_value
from floodmark.codec.values import encode_value
from floodmark.model.errors import FloodmarkError, OutcomeUnknown, PartitionMoved, Unreachable
from floodmark.model.partition import Decision, Fate, Partition, PartitionMap
from floodmark.model.version import Version
from floodmark.partition import Node
from floodmark.partition.prepared.writes import read_prepared
from floodmark.routing import BatchWriter, Router
from floodmark.routing.atomic import read_atomic
from floodmark.routing.batches import ask_fate, forget_ended
from floodmark.testing.atomicity import find_fracture, locate
from floodmark.testing.clock import SimulatedTime
from floodmark.testing.simulation.history import Violation

DEATHS: Final = 0.03
LOSSES: Final = 0.03
PAUSES: Final = 0.3
ATTEMPTS_MAX: Final = 3

Result = TypeVar("Result")


class BatchMember(Protocol):
    """The part of a simulated node that batches use."""

    number: int
    offset_ms: int
    lives: list[Node]


class BatchWorld(Protocol):
    """The part of the simulation of nodes that batches use."""

    random: Random
    time: SimulatedTime
    engine: Any
    record: Any
    numbers: Iterator[int]
    busy: list[Any]
    depth_max: int
    transactions: Any

    @property
    def members(self) -> Sequence[BatchMember]: ...

    def pass_time(self, milliseconds: int) -> None: ...

    def act(self) -> None: ...

    def any_life(self, member: Any, doing: str = "") -> Node: ...


class CallerDied(Exception):
    """The death of a caller.  Not a FloodmarkError, so that no code of the caller handles it."""


class CalledPartition:
    """A partition as called by another node: the call or its answer may be lost, and the caller may die."""

    def __init__(self, batches: "NodeBatches", owner: BatchMember, partition: Partition) -> None:
        self.id, self.range, self.limits = partition.id, partition.range, partition.limits
        self.place = f"node {owner.number}"
        self._batches = batches
        self._owner = owner

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def call(*arguments: object, **options: object) -> Any:
            def work(node: Node) -> Any:
                for partition in node.map.partitions:
                    if partition.id == self.id:
                        answer = getattr(partition, name)(*arguments, **options)
                        # Pages are read in the call.
                        return (page for page in list(answer)) if isinstance(answer, Iterator) else answer
                raise PartitionMoved(f"partition {self.id} is not here")

            result = self._batches.reach(self._owner, work)
            if self._batches.is_lost():
                # As a connection reports it.
                kind = OutcomeUnknown if name == "write" else Unreachable
                raise kind(f"the answer of {self.place} is lost")
            return result

        return call


class CalledMaps:
    """The partition map of a node, in which every partition is reached by simulated calls."""

    def __init__(self, batches: "NodeBatches", node: Node) -> None:
        self._batches = batches
        self._node = node

    @property
    def map(self) -> PartitionMap[Partition]:
        members = self._batches.world.members
        owners = {row.id: row.node for row in self._node.rows}
        served = self._node.map
        if not served.partitions:
            # That of a node which was fenced refuses.
            return served
        called: list[Any] = [
            CalledPartition(self._batches, members[owners.get(each.id, self._node.number) - 1], each)
            for each in served.partitions
        ]
        return PartitionMap(served.starts, called)

    def refresh(self) -> None:
        self._node.refresh()

    def call(self, key: bytes, operation: Callable[[Partition], Result]) -> Result:
        """Call the partition of a key once."""
        try:
            return operation(self.map.route(key))
        except PartitionMoved:
            self.refresh()
            raise


class FewMoves:
    """Retries a call a few times."""

    def __init__(self, batches: "NodeBatches", maps: CalledMaps, *, stream: bool = False) -> None:
        self._batches = batches
        self._maps = maps
        self._left = ATTEMPTS_MAX

    def follows(self, error: FloodmarkError) -> bool:
        return isinstance(error, PartitionMoved | Unreachable)

    def follow(self, error: FloodmarkError, partition: Partition | None) -> None:
        self._left -= 1
        if not self._left or not self.follows(error):
            raise error
        self._batches.world.pass_time(200)
        self._maps.refresh()

    def renew(self) -> None:
        pass


class NodeBatches:
    """The batches of a world, and the atomic reads of it."""

    def __init__(self, world: BatchWorld, keys: Sequence[bytes]) -> None:
        self.world = world
        self._keys = keys
        # Whether callers die and calls get lost.
        self.calm = False
        # Whether an open batch with a partition that does not answer stays open, or raises an error.
        self.leaves_open = False
        self._ids = count()
        self._written: dict[bytes, Sequence[bytes]] = {}
        self._acknowledged: dict[bytes, Version] = {}
        self._reads: list[Mapping[bytes, bytes | None]] = []
        # The versions and values of each key.
        self.history: dict[bytes, dict[Version, bytes]] = {}

    def reach(self, owner: BatchMember, work: Callable[[Node], Result]) -> Result:
        """Call a node.  The call takes time, in which others run."""
        world, chance = self.world, self.world.random.random
        if not self.calm and chance() < DEATHS:
            raise CallerDied
        is_own = bool(world.busy) and world.busy[-1] is owner
        if not owner.lives or (owner in world.busy and not is_own) or self.is_lost():
            raise Unreachable(f"node {owner.number} does not answer")
        if not self.calm and len(world.busy) < world.depth_max and chance() < PAUSES:
            for _ in range(world.random.randint(1, 4)):
                world.pass_time(world.random.choice((10, 500, 1_500)))
                world.act()
        if is_own:
            return work(owner.lives[-1])
        world.busy.append(owner)
        try:
            return work(owner.lives[-1])
        finally:
            world.busy.pop()

    def is_lost(self) -> bool:
        """Draw whether a message is lost."""
        return not self.calm and self.world.random.random() < LOSSES

    def settle(self, node: Node, batch: str, siblings: Sequence[bytes]) -> Fate:
        """The settler of a node: asks the partitions of a batch, without waiting for any."""
        maps = CalledMaps(self, node)
        try:
            return ask_fate(maps.call, batch, siblings)
        except FloodmarkError:
            if not self.leaves_open:
                raise
            return Fate(Decision.UNDECIDED)

    def beat(self, node: Node) -> None:
        """Write a heartbeat; batches that cannot be settled stay open."""
        self.leaves_open = True
        try:
            node.heartbeat()
        finally:
            self.leaves_open = False

    def _some_keys(self) -> list[bytes]:
        return sorted(self.world.random.sample(self._keys, self.world.random.randint(2, len(self._keys))))

    def write(self, member: BatchMember) -> None:
        """Write a batch from a node."""
        if not member.lives:
            return
        maps = CalledMaps(self, self.world.any_life(member, "batch"))
        keys, value = self._some_keys(), b"batch %d" % next(self.world.numbers)
        self._written[value] = keys
        with self.world.transactions.observe(dict.fromkeys(keys, value)):
            rows = dict.fromkeys(keys, encode_value(value))
            version = self.router(member, maps).write_batch(rows, durable=True)
        self._acknowledged[value] = version
        for key in keys:
            self.world.record.acknowledged[key].append(version)

    def router(self, member: BatchMember, maps: CalledMaps) -> Router:
        """The router of a client or coordinator that has the clock of a node."""

        def mint() -> str:
            return self._mint(member)

        moves = partial(FewMoves, self, maps)
        return Router(maps, moves=moves, batches=BatchWriter(mint), mint=mint)

    def _mint(self, member: BatchMember) -> str:
        """An id of the form of `mint_batch`, by the seed."""
        return f"b-{self.world.time() + member.offset_ms:011x}-{next(self._ids):016x}"

    def read(self, member: BatchMember) -> None:
        """Read keys atomically from a node."""
        if not member.lives:
            return
        node, keys = self.world.any_life(member), self._some_keys()
        maps = CalledMaps(self, node)
        router = Router(maps, moves=partial(FewMoves, self, maps))

        def snapshot(seen: Version) -> list[bytes | None]:
            node.committer.observe(seen)
            return router.get_many(keys, node.committer.now())

        self._reads.append(read_atomic(router, keys, snapshot))

    def forget(self, member: BatchMember) -> None:
        """Delete the outcomes of old batches at a node."""
        if member.lives:
            node = self.world.any_life(member)
            maps = CalledMaps(self, node)
            forget_ended(node, maps, maps.call)

    # What was observed

    def add(self, key: bytes, version: Version, stored: bytes | None) -> None:
        """Record the value stored at a key at a version; None if it was removed."""
        history = self.history.setdefault(key, {})
        if stored is None:
            history.pop(version, None)
        else:
            history[version] = live_value(stored, 0) or b""

    def judge(self, site: str) -> None:
        """Check all batches and all reads, after all batches have ended."""
        if left := next(read_prepared(self.world.engine), None):
            raise Violation("6", site, f"{left[0]} stays prepared")
        batches: list[dict[bytes, Version]] = []
        for value, keys in self._written.items():
            found = {
                (key, version)
                for key in keys
                for version, held in self.history.get(key, {}).items()
                if held == value
            }
            versions = {version for _, version in found}
            if len(versions) > 1 or len(found) not in (0, len(keys)):
                raise Violation("6", site, f"{value.decode()} to {len(keys)} keys is at {sorted(found)}")
            if self._acknowledged.get(value, 0) not in {0, *versions}:
                raise Violation("1", site, f"{value.decode()} was acknowledged, and is not there")
            batches.append(dict(found))
        for read in self._reads:
            seen = {key: locate(self.history.get(key, {}).items(), value) for key, value in read.items()}
            known = {key: each for key, each in seen.items() if each is not None}
            fracture = find_fracture(known, batches)
            if len(known) < len(read) or fracture is not None:
                raise Violation("6", site, f"an atomic read found {read}: {fracture}")
