"""Atomic reads of one node, with batches that are written between the reads of two keys."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any
from unittest.mock import patch

import pytest
from tests.site.support import START_MS, host_of

from floodmark.codec.ordered import encode_namespace
from floodmark.codec.values import encode_value, mark_batch
from floodmark.engine import MemoryEngine, Row
from floodmark.model.change import Stamp
from floodmark.model.errors import NamespaceNotFound
from floodmark.model.record import AtomicAnswer
from floodmark.model.version import Version
from floodmark.partition import FAMILIES
from floodmark.partition.commit.batches import BatchCache
from floodmark.partition.partition import LocalPartition
from floodmark.site import Namespace, Site, open_engine
from floodmark.site.batch import Batch, Pair
from floodmark.testing.clock import SimulatedTime
from floodmark.testing.simulation.atomic_readers import forget_siblings

KEYS = (b"a", b"h", b"q", b"z")
ORDERS = pytest.mark.parametrize("order", [1, -1], ids=["forwards", "backwards"])


class SteppingEngine(MemoryEngine):
    """Reads several keys one by one, in their order or backwards, with a call before each but the first."""

    def __init__(self) -> None:
        super().__init__(FAMILIES)
        self.order = 1
        self.between: list[Callable[[], object]] = []

    def ceilings(
        self, family: str, prefixes: Sequence[bytes], starts: Sequence[bytes] | None = None
    ) -> list[Row | None]:
        found: dict[int, Row | None] = {}
        for place in range(len(prefixes))[:: self.order]:
            if found and self.between:
                self.between.pop(0)()
            found[place] = self.ceiling(family, (starts or prefixes)[place], prefixes[place])
        return [found[place] for place in range(len(prefixes))]


class World:
    """A site of four partitions, and what its atomic reads ask of it."""

    def __init__(self, engine: SteppingEngine, site: Site, time: SimulatedTime) -> None:
        self.engine = engine
        self.site = site
        self.time = time
        self.users = site.create_namespace("users")
        self.unread = site.create_namespace("unread", merge="counter")
        self.people = site.create_namespace("people", merge="fields")
        for key in (b"d", b"m", b"s"):
            site.split("users", key)
        # The versions at which records were read; None stands for the newest.
        self.rounds: list[Version | None] = []
        self.snapshots = 0

    def batch(self, write: Callable[[Batch], object]) -> Callable[[], None]:
        """Writes an atomic batch when it is called."""

        def run() -> None:
            with self.site.atomic() as batch:
                write(batch)

        return run

    def put(self, value: bytes, *keys: bytes) -> Callable[[], None]:
        def write(batch: Batch) -> None:
            for key in keys or KEYS:
                batch.put(self.users, key, value)

        return self.batch(write)

    def read(self, *pairs: Pair, between: Iterable[Callable[[], object]] = ()) -> list[Any]:
        """Read keys while others write."""
        self.rounds.clear()
        self.engine.between = list(between)
        with self._watched():
            found = self.site.read_atomic(pairs)
        assert not self.engine.between, "not everything was written"
        return found

    def read_users(self, *keys: bytes, between: Iterable[Callable[[], object]] = ()) -> list[Any]:
        return self.read(*((self.users, key) for key in keys or KEYS), between=between)

    @contextmanager
    def _watched(self) -> Iterator[None]:
        read, get_many = LocalPartition.read_batches, LocalPartition.get_many
        self.snapshots = 0

        def watch(
            partition: LocalPartition,
            keys: Sequence[bytes],
            among: Sequence[bytes],
            at: Version | None = None,
        ) -> AtomicAnswer:
            self.rounds.append(at)
            return read(partition, keys, among, at)

        def watch_snapshot(partition: LocalPartition, keys: Sequence[bytes], at: Version) -> Any:
            self.snapshots = 1
            return get_many(partition, keys, at)

        with (
            patch.object(LocalPartition, "read_batches", watch),
            patch.object(LocalPartition, "get_many", watch_snapshot),
        ):
            yield

    def forget(self) -> None:
        """Lose all siblings."""
        forget_siblings(host_of(self.site).node)


@pytest.fixture
def world() -> Iterator[World]:
    time = SimulatedTime(START_MS)
    engine = SteppingEngine()
    with open_engine(engine, site="oslo", site_id=7, time_source=time) as site:
        yield World(engine, site, time)


@ORDERS
def test_a_batch_between_two_reads_is_read_whole_in_a_second_round(world: World, order: int) -> None:
    world.engine.order = order
    world.put(b"old")()
    assert world.read_users() == [b"old"] * 4
    assert world.rounds == [None]
    assert world.read_users(between=[world.put(b"new")]) == [b"new"] * 4
    record = world.users.record(b"a")
    assert record is not None
    assert (world.rounds, world.snapshots) == ([None, record.version], 0)


@ORDERS
def test_the_second_round_reads_the_batch_and_not_the_newest(world: World, order: int) -> None:
    world.engine.order = order
    world.put(b"0")()
    first, last = (b"a", b"z") if order == 1 else (b"z", b"a")
    read = LocalPartition.read_batches

    def write_before_second(partition: LocalPartition, keys: Any, among: Any, at: Any = None) -> AtomicAnswer:
        if at is not None:
            world.put(b"2")()
        return read(partition, keys, among, at)

    with patch.object(LocalPartition, "read_batches", write_before_second):
        assert world.read_users(first, last, between=[world.put(b"1")]) == [b"1", b"1"]
    assert world.read_users(first, last) == [b"2", b"2"]


@ORDERS
def test_unknown_siblings_above_the_resolved_version_need_a_snapshot(world: World, order: int) -> None:
    world.engine.order = order
    world.put(b"old")()
    world.forget()
    assert world.read_users() == [b"old"] * 4
    assert (world.rounds, world.snapshots) == ([None], 0), "a batch that was there before is whole"
    write = world.put(b"new")

    def write_and_forget() -> None:
        write()
        world.forget()

    assert world.read_users(between=[write_and_forget]) == [b"new"] * 4
    assert (world.rounds, world.snapshots) == ([None], 1)


@ORDERS
def test_deletes_and_expiry_of_a_batch_are_read_with_the_rest_of_it(world: World, order: int) -> None:
    world.engine.order = order
    world.put(b"old")()

    def change(batch: Batch) -> None:
        batch.delete(world.users, b"a")
        batch.put(world.users, b"h", b"new")
        batch.put(world.users, b"q", b"brief", ttl=timedelta(seconds=2))
        batch.put(world.users, b"z", b"new")

    assert world.read_users(between=[world.batch(change)]) == [None, b"new", b"brief", b"new"]
    assert world.read_users() == [None, b"new", b"brief", b"new"]
    world.time.advance(3_000)
    assert world.read_users() == [None, b"new", None, b"new"]
    assert world.read_users(between=[world.put(b"again")]) == [b"again"] * 4


@ORDERS
def test_keys_that_did_not_exist_appear_together(world: World, order: int) -> None:
    world.engine.order = order
    assert world.read_users() == [None] * 4
    assert world.read_users(between=[world.put(b"new", b"a", b"z")]) == [b"new", None, None, b"new"]


@ORDERS
def test_fields_and_counters_are_read_with_the_batch_that_changed_them(world: World, order: int) -> None:
    world.engine.order = order
    world.people.put(b"ada", {"name": "Ada", "city": "London"})

    def change(batch: Batch) -> None:
        batch.put(world.users, b"a", b"message")
        batch.add(world.unread, b"ada", 1)
        batch.update(world.people, b"ada", {"city": "Paris"})

    pairs: list[Pair] = [(world.users, b"a"), (world.unread, b"ada"), (world.people, b"ada")]
    old = [None, None, b'{"city":"London","name":"Ada"}']
    new = [b"message", 1, b'{"city":"Paris","name":"Ada"}']
    assert world.read(*pairs) == old
    found = world.read(*pairs, between=[world.batch(change)])
    assert found == new
    assert world.snapshots == 1
    assert world.read(*pairs) == new
    assert (world.rounds, world.snapshots) == ([None], 0)


@ORDERS
def test_a_counter_that_took_in_two_batches_shows_neither_in_part(world: World, order: int) -> None:
    """The mark of a counter tells of the last batch alone: a reader must not see the sum of both without
    the message of the first.
    """
    world.engine.order = order
    other = world.site.create_namespace("aardvarks")

    def message(namespace: Namespace) -> Callable[[], None]:
        def write(batch: Batch) -> None:
            batch.put(namespace, b"m", b"text")
            batch.add(world.unread, b"ada", 1)

        return world.batch(write)

    pairs: list[Pair] = [(world.users, b"m"), (world.unread, b"ada"), (other, b"m")]
    first, _, last = pairs if order == 1 else pairs[::-1]
    assert isinstance(first[0], Namespace)
    assert isinstance(last[0], Namespace)
    found = world.read(*pairs, between=[message(first[0]), message(last[0])])
    assert found == [b"text", 2, b"text"]
    found = world.read(*pairs, between=[lambda: world.unread.add(b"ada", 1)])
    assert found == [b"text", 3, b"text"]


def test_a_key_that_is_named_twice_has_one_value(world: World) -> None:
    pairs = [(world.users, key) for key in (b"a", b"z", b"a")]
    assert world.read(*pairs, between=[world.put(b"new")]) == [b"new"] * 3


def test_a_namespace_that_is_dropped_meanwhile_is_refused(world: World) -> None:
    world.put(b"old")()
    pairs: list[Pair] = [(world.unread, b"a"), (world.users, b"a")]
    world.site.drop_namespace("users")
    with pytest.raises(NamespaceNotFound):
        world.read(*pairs)


@ORDERS
def test_partitions_that_split_and_merge_meanwhile_do_not_tear_a_batch(world: World, order: int) -> None:
    world.engine.order = order
    world.put(b"old")()
    write = world.put(b"new")

    def split_and_write() -> None:
        world.site.split("users", b"x")
        write()

    assert world.read_users(between=[split_and_write]) == [b"new"] * 4
    left, right = (each.id for each in world.site.partitions()[:2])

    def merge_and_write() -> None:
        world.site.merge(left, right)
        world.put(b"last")()

    assert world.read_users(between=[merge_and_write]) == [b"last"] * 4


@ORDERS
def test_a_copied_batch_that_lost_some_keys_is_whole(world: World, order: int) -> None:
    """Compared by stamps: a key that holds something newer than the copied batch needs no second round."""
    world.engine.order = order
    stamp = Stamp(world.site.now(), 9)
    world.users.put(b"z", b"newer")
    prefix = encode_namespace(world.users.id)
    copied = mark_batch(encode_value(b"copied", origin=stamp))
    router, node = host_of(world.site).router, host_of(world.site).node

    def apply() -> None:
        version = router.apply({prefix + b"a": copied, prefix + b"z": copied}, durable=True)
        node.committer.place.batches.remember(version, {prefix + b"a", prefix + b"z"})

    assert world.read_users(b"a", b"z", between=[apply]) in ([b"copied", b"newer"], [None, b"newer"])
    assert world.read_users(b"a", b"z") == [b"copied", b"newer"]
    assert (world.rounds, world.snapshots) == ([None], 0)


def test_asynchronous_commits_need_no_second_round(world: World) -> None:
    with world.site.atomic(durability="async") as batch:
        batch.put(world.users, b"a", b"1")
        batch.add(world.unread, b"z", 1)
    assert world.read((world.users, b"a"), (world.unread, b"z")) == [b"1", 1]
    assert (world.rounds, world.snapshots) == ([None], 0)
    world.forget()
    assert world.read((world.users, b"a"), (world.unread, b"z")) == [b"1", 1]
    assert (world.rounds, world.snapshots) == ([None], 0)


def test_the_cache_of_siblings_is_bounded_by_their_bytes() -> None:
    cache = BatchCache(bytes_max=10)
    cache.remember(1, {b"aa", b"bb"})
    cache.remember(2, {b"cc", b"dd"})
    assert cache.find(1) == {b"aa", b"bb"}
    cache.remember(3, {b"eee"})
    assert (cache.find(1), cache.find(2), cache.find(3)) == (None, {b"cc", b"dd"}, {b"eee"})
    cache.remember(3, {b"eee"})
    cache.remember(4, {b"x" * 11})
    assert [cache.find(version) for version in (2, 3, 4)] == [None, None, None]
    cache.remember(5, {b"a"})
    assert cache.find(5) == {b"a"}
