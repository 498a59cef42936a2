"""A site without its façade, for the tests of feeds: a node, safe points, a store of feeds, and a reader."""

from collections.abc import Callable, Iterator, Sequence
from queue import Empty, SimpleQueue
from random import Random
from threading import Thread
from typing import Final

from tests.waiting import HANG_SECONDS

from floodmark.clock import HybridClock
from floodmark.codec.ordered import encode_namespace
from floodmark.codec.values import TOMBSTONE, encode_value
from floodmark.engine import Engine, MemoryEngine
from floodmark.feed.named.feeds import Feed, FeedError, FeedSpec, RangeProgress
from floodmark.feed.named.store import LocalFeedStore
from floodmark.feed.reading.items import Decoder
from floodmark.feed.reading.reader import ChangeReader
from floodmark.feed.safepoints import SafePoint, SafePoints
from floodmark.model.change import Change
from floodmark.model.errors import NamespaceNotFound
from floodmark.model.ranges import KeyRange
from floodmark.model.stream import ChangeBatch, ChangesRequest
from floodmark.model.version import VERSION_MAX, Version
from floodmark.partition import FAMILIES, EngineBound, Node
from floodmark.routing import Router
from floodmark.testing import SimulatedTime

SITE_ID: Final = 7
USERS: Final = 1


class World:
    """One site under simulated time, with the namespace `users`."""

    def __init__(self, engine: Engine | None = None, time: SimulatedTime | None = None) -> None:
        self.time = time or SimulatedTime()
        self.engine = engine or MemoryEngine(FAMILIES)
        self.clock = HybridClock(self.time, upper_bound=EngineBound(self.engine))
        self.node = Node(self.engine, self.clock, SITE_ID)
        self.namespaces = {"users": (USERS, self.node.born_version())}
        self.safe_points = SafePoints(self.node.storage, self.time, self._live, self.node.retention)
        self.store = LocalFeedStore(
            self.safe_points,
            resolve_namespace=self.resolve,
            partition_ranges=lambda: [partition.range for partition in self.node.map.partitions],
            resolved_version=self.node.resolved_version,
        )
        self.reader = ChangeReader(self.node, self.safe_points, lambda namespace: namespace in self._live())
        self.decoder = Decoder(SITE_ID, self._names, self.clock.physical_ms)
        self.router = Router(self.node)

    def _live(self) -> list[int]:
        return [namespace for namespace, _ in self.namespaces.values()]

    def _names(self) -> dict[int, str]:
        return {namespace: name for name, (namespace, _) in self.namespaces.items()}

    def resolve(self, name: str) -> tuple[int, Version]:
        if name not in self.namespaces:
            raise NamespaceNotFound(f"no namespace {name!r}")
        return self.namespaces[name]

    # Data

    def put(self, key: bytes, value: bytes = b"value", expires_at: int | None = None) -> Version:
        rows = {encode_namespace(USERS) + key: encode_value(value, expires_at)}
        return self.router.put(rows, durable=True)

    def put_many(self, keys: Sequence[bytes], value: bytes = b"value") -> Version:
        return self.router.put(
            {encode_namespace(USERS) + key: encode_value(value) for key in keys}, durable=True
        )

    def delete(self, key: bytes) -> Version:
        return self.router.put({encode_namespace(USERS) + key: TOMBSTONE}, durable=True)

    def split(self, key: bytes) -> None:
        self.node.reshaping.split(encode_namespace(USERS) + key)

    def collect(self) -> Version:
        """Collect as far as the safe points allow; the oldest version that can still be read then."""
        resolved = self.node.resolved_version()
        with self.node.storage.settled(), self.safe_points.lock:
            self.node.retention.declare_collected({USERS: self.safe_points.lowest(USERS, resolved)})
        self.node.retention.collect(USERS, lambda: True, told_through=VERSION_MAX)
        return self.node.retention.collected_version(USERS)

    def changes(self) -> list[Change]:
        """All changes that there are, in commit order."""
        request = ChangesRequest(keys=USER_KEYS, namespace=USERS, since=self.namespaces["users"][1])
        return [change for batch in self.reader.read(request) for change in self.decoder.decode(batch)]

    def read(self, request: ChangesRequest) -> Iterator[ChangeBatch]:
        return self.reader.read(request)

    # Feeds

    def create(self, name: str = "copy", **settings: object) -> Feed:
        return self.store.create(spec(name, **settings))

    def safe_point(self, name: str = "copy") -> SafePoint | None:
        return next((point for point in self.safe_points.list() if point.name == f"feed/{name}"), None)

    def move(self, name: str = "copy", to: Version | None = None, error: FeedError | None = None) -> Feed:
        """Report as the holder `runner` that all ranges have come to a version, or to the present."""
        version = self.node.resolved_version() if to is None else to
        ranges = self.store.find(name).ranges
        return self.store.report(name, "runner", [moved(part, version) for part in ranges], error)


USER_KEYS: Final = KeyRange(encode_namespace(USERS), encode_namespace(USERS + 1))


def spec(name: str = "copy", **settings: object) -> FeedSpec:
    """A specification; what is not given is as it is by default."""
    given = {"namespace": "users", "sink": "blackhole:", **settings}
    return FeedSpec(name=name, **given)  # type: ignore[arg-type]


def moved(part: RangeProgress, version: Version) -> RangeProgress:
    """A range that has come to a version."""
    return RangeProgress(id=part.id, keys=part.keys, checkpoint=version, resolved=version)


def merge_or_split(world: World, random: Random) -> None:
    """Reshape the partitions somehow."""
    partitions = world.node.map.partitions
    if len(partitions) > 5:
        world.node.reshaping.merge(partitions[0].id, partitions[1].id)
        return
    key = bytes([random.randrange(ord("b"), ord("z"))])
    if all(partition.range.start != encode_namespace(USERS) + key for partition in partitions):
        world.split(key)


class Task:
    """Something that runs in a thread; `result` waits for it and raises what it raised."""

    def __init__(self, work: Callable[[], object]) -> None:
        self._outcome: SimpleQueue[tuple[object, BaseException | None]] = SimpleQueue()
        Thread(target=self._run, args=(work,), daemon=True).start()

    def _run(self, work: Callable[[], object]) -> None:
        try:
            self._outcome.put((work(), None))
        except BaseException as error:
            self._outcome.put((None, error))

    def result(self) -> object:
        try:
            result, error = self._outcome.get(timeout=HANG_SECONDS)
        except Empty:
            raise AssertionError("a thread hangs") from None
        if error is not None:
            raise error
        return result
