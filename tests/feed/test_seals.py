"""A log that is sealed while something is prepared elsewhere raises no false alarm: nothing was lost."""

from collections.abc import Callable, Iterator
from random import Random
from typing import Final

import pytest
from tests.feed.test_nodes import Stage
from tests.replication.support_links import open_one
from tests.site.support import node_of
from tests.sizes import only

from floodmark.codec.ordered import NAMESPACE_BYTES, qualify_range
from floodmark.codec.values import encode_value
from floodmark.engine import MemoryEngine
from floodmark.model.partition import Decision, Fate
from floodmark.model.stream import ChangeBatch, ChangesRequest
from floodmark.model.version import Version
from floodmark.partition import FAMILIES
from floodmark.testing.clock import SimulatedTime

KEYS: Final = (b"a", b"f", b"n", b"r", b"z")
CUTS: Final = (b"d", b"h", b"p", b"t")
STEPS: Final = 40


class OneProcess:
    """A site of one process, with a stage that reads all of it."""

    def __init__(self) -> None:
        self.time = SimulatedTime()
        self.site = open_one(MemoryEngine(FAMILIES), "oslo", self.time)
        self.users = self.site.create_namespace("users")
        self.namespace = self.users.id
        self.node = node_of(self.site)
        self.node.settle_by(lambda _: Fate(Decision.UNDECIDED))
        self.prepared: dict[bytes, tuple[str, Version]] = {}
        self.stage = Stage(self)
        self.beat(3)
        self.before = self.stage.read()

    def changes(self, _: int, since: Version, *, heartbeats: bool) -> Iterator[ChangeBatch]:
        keys = qualify_range(self.namespace)
        request = ChangesRequest(keys=keys, namespace=self.namespace, since=since, heartbeats=heartbeats)
        return self.site.host.changes(request)

    def qualify(self, key: bytes) -> bytes:
        return self.namespace.to_bytes(NAMESPACE_BYTES, "big") + key

    def beat(self, times: int = 1) -> None:
        for _ in range(times):
            self.time.advance(1_000)
            self.site.heartbeat()

    def prepare(self, key: bytes) -> None:
        """Prepare a write of a key, unless there is one."""
        if key not in self.prepared:
            name, qualified = f"t{len(self.stage.delivered)}-{self.site.now()}", self.qualify(key)
            version = self.node.map.route(qualified).prepare(name, [qualified], [encode_value(b"prepared")])
            self.prepared[key] = name, version

    def commit(self, key: bytes) -> None:
        """Commit the prepared write of a key, if there is one."""
        if key in self.prepared:
            name, version = self.prepared.pop(key)
            assert self.node.map.route(self.qualify(key)).commit_prepared(name, version)

    def split(self, cut: bytes) -> None:
        """Cut a partition in which nothing is prepared."""
        partition = self.node.map.route(self.qualify(cut))
        busy = any(partition.range.contains(self.qualify(key)) for key in self.prepared)
        if not busy and partition.range.start != self.qualify(cut):
            self.site.split("users", cut)

    def merge(self, cut: bytes) -> None:
        """Join the partition of a cut with the next, if nothing is prepared in either."""
        partitions = self.node.map.partitions
        place = partitions.index(self.node.map.route(self.qualify(cut)))
        pair = partitions[place : place + 2]
        keys = map(self.qualify, self.prepared)
        if len(pair) == 2 and not any(each.range.contains(key) for key in keys for each in pair):
            self.site.merge(pair[0].id, pair[1].id)

    def require_counted(self) -> None:
        """End everything, and find that all came and that this was checked."""
        for key in list(self.prepared):
            self.commit(key)
        self.beat(3)
        checks = self.stage.read()
        assert (checks.findings, checks.unchecked) == ((), self.before.unchecked)
        assert checks.checked > self.before.checked


def test_a_log_that_is_sealed_above_a_prepared_write_is_counted_in_one_interval() -> None:
    """The change above the prepared write, told by the seal, belongs to the interval after it."""
    world = OneProcess()
    world.split(b"p")
    world.prepare(b"n")
    world.users.put(b"z", b"1")
    world.split(b"t")
    world.beat()
    world.require_counted()


@pytest.mark.parametrize("seed", only(range(5), range(30)))
def test_reshaping_beside_prepared_writes_raises_no_alarm(seed: int) -> None:
    world, random = OneProcess(), Random(seed)
    actions: list[Callable[[], object]] = [
        lambda: world.users.put(random.choice(KEYS), b"value"),
        lambda: world.prepare(random.choice(KEYS)),
        lambda: world.commit(random.choice(KEYS)),
        lambda: world.split(random.choice(CUTS)),
        lambda: world.merge(random.choice(CUTS)),
        world.beat,
        world.stage.read,
    ]
    for _ in range(STEPS):
        random.choice(actions)()
    world.require_counted()
