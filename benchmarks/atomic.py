"""Atomic batches and reads beside plain reads and writes of the same keys, and beside two-phase locking.

    make bench-atomic                                     all of it, on a quiet machine: some minutes
    make bench-atomic ARGS="--quick --only memory"        a look

    one-node   one RocksDB: a batch of 4 keys in 4 partitions beside put_many of 4 keys in one, and its bytes
    memory     3 nodes on an engine in memory, where each message takes 1 ms and nothing else takes time
    nodes      3 nodes as processes on PostgreSQL, over the wire

A call reads or writes 4 keys, which follow a zipfian distribution of 0.99; 95 of 100 calls read.  Clients are
threads of this process, which also runs all nodes of `memory`.  There, many clients would only measure the
interpreter, so time is stretched: a millisecond of a message lasts 50, and rates are scaled back.  The
processor time of a call is printed too.
"""

import argparse
import sys
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate, count
from pathlib import Path
from random import Random
from threading import Condition, Event, Thread, local
from time import perf_counter, process_time, sleep
from typing import Any, Final, Protocol

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.floodmark_peer import Line, held, in_turns, line, run_timed
from benchmarks.harness import NAMESPACE, Measure, Target, make_pairs
from benchmarks.nodes import database, served_by

import floodmark
from floodmark.clock import monotonic_ms, system_time_ms
from floodmark.codec.ordered import encode_namespace
from floodmark.codec.values import encode_value
from floodmark.engine import MemoryEngine
from floodmark.model.batch import mint_batch
from floodmark.model.partition import Decision, Fate, Partition, PartitionMap, PartitionMaps
from floodmark.model.version import Version
from floodmark.partition import FAMILIES
from floodmark.partition.membership import BEAT_MS, SharedNode
from floodmark.routing import BatchWriter, CallPool, Router
from floodmark.routing.atomic import read_atomic
from floodmark.routing.batches import ask_fate
from floodmark.site import open_engine
from floodmark.testing.simulation.nodes import tick

CLIENTS: Final = (1, 8, 32, 64)
HELD_CLIENTS: Final = 32
KEYS: Final = 4
READS: Final = 0.95
SKEW: Final = 0.99
NODES: Final = 3
DELAY_SECONDS: Final = 0.001
# Real seconds in a second of `memory`.
SLOWNESS: Final = 50
RECORDS_MAX: Final = 20_000
FREE, ATOMIC, LOCKED = "no control", "atomic", "two-phase locking"

Rows = Mapping[bytes, bytes]


def main() -> None:
    run_timed(__doc__, {"one-node": one_node, "memory": memory, "nodes": nodes})


# One node


def one_node(directory: Path, options: argparse.Namespace) -> Iterator[Line]:
    """Batches over several partitions of one node; each batch is one commit."""
    with floodmark.open(directory / "site", site="bench") as site:
        users = site.create_namespace(NAMESPACE)
        for border in (64, 128, 192):
            site.split(NAMESPACE, bytes([border]))
        numbers = count()

        def rows(prefixes: Sequence[int]) -> dict[bytes, bytes]:
            number = next(numbers)
            return {bytes([prefix]) + b"%012d" % number: bytes(100) for prefix in prefixes}

        def write_batch() -> None:
            with site.atomic() as batch:
                for key, value in rows((0, 64, 128, 192)).items():
                    batch.put(users, key, value)

        sides: dict[str, Callable[[], object]] = {
            "put_many, one partition": lambda: users.put_many(rows((0, 1, 2, 3))),
            "atomic, four partitions": write_batch,
        }
        measures = {name: partial(per_second, call, options.seconds) for name, call in sides.items()}
        samples = in_turns("writes of 4 keys", measures, options.repetitions)
        first = next(iter(samples))
        against = first, Measure.of(samples[first])
        yield line("write of 4 keys", first, "calls/s", samples[first])
        yield held(
            line("write of 4 keys", "atomic", "calls/s", samples["atomic, four partitions"], against=against),
            Target(limit=0.9, unit="x put_many", at_least=True),
        )
    extra = (stored_bytes(atomic=True) - stored_bytes(atomic=False)) / KEYS
    target = Target(limit=0, unit="bytes")
    yield line("stored beyond a plain put, a key", "atomic", "bytes", [extra], target=target)


def per_second(call: Callable[[], object], seconds: float) -> float:
    begun, done = perf_counter(), 0
    while perf_counter() - begun < seconds:
        call()
        done += 1
    return done / (perf_counter() - begun)


def stored_bytes(*, atomic: bool) -> int:
    """The bytes of all rows that a write of four keys in four partitions adds to the engine."""
    engine = MemoryEngine(FAMILIES)
    with open_engine(engine, site="bench", time_source=lambda: 1_700_000_000_000) as site:
        users = site.create_namespace(NAMESPACE)
        for border in (64, 128, 192):
            site.split(NAMESPACE, bytes([border]))
        rows = {bytes([prefix]): bytes(100) for prefix in (0, 64, 128, 192)}
        before = _size(engine)
        if atomic:
            with site.atomic() as batch:
                for key, value in rows.items():
                    batch.put(users, key, value)
        else:
            users.put_many(rows)
        return _size(engine) - before


def _size(engine: MemoryEngine) -> int:
    pages = (engine.scan(family, b"", None, rows_max=10**6, bytes_max=10**9) for family in FAMILIES)
    return sum(len(key) + len(value) for page in pages for key, value in page)


# Several nodes


class CountedPartition:
    """A partition whose calls first sleep for the time of a message, and are counted for each thread."""

    def __init__(self, partition: Partition, counts: local, seconds: float) -> None:
        self.id, self.range, self.limits = partition.id, partition.range, partition.limits
        self.place = partition.place
        self._partition = partition
        self._counts = counts
        self._seconds = seconds

    def __getattr__(self, name: str) -> Any:
        operation = getattr(self._partition, name)

        def call(*arguments: Any, **options: Any) -> Any:
            calls = self._counts.__dict__.setdefault("calls", Counter())
            calls["messages"] += 1
            if name == "read_batches":
                calls["second" if len(arguments) > 2 else "first"] += 1
            elif name == "get_many" and arguments[1] is not None:
                calls["snapshot"] += 1
            if self._seconds:
                sleep(self._seconds)
            return operation(*arguments, **options)

        return call


class CountedMaps:
    """A partition map of `CountedPartition`s, except for the partitions whose place is `own`."""

    def __init__(self, maps: PartitionMaps, seconds: float = 0, own: str | None = None) -> None:
        self.counts = local()
        self._maps = maps
        self._seconds = seconds
        self._own = own
        self._known: tuple[Any, PartitionMap[Any]] = (None, PartitionMap([], []))

    @property
    def map(self) -> PartitionMap[Any]:
        known, counted = self._known
        if (present := self._maps.map) is not known:
            partitions = [
                each if each.place == self._own else CountedPartition(each, self.counts, self._seconds)
                for each in present.partitions
            ]
            counted = PartitionMap(present.starts, partitions)
            self._known = present, counted
        return counted

    def refresh(self) -> None:
        self._maps.refresh()


class Side(Protocol):
    """A way to read and write some keys."""

    def read(self, keys: Sequence[bytes]) -> object: ...

    def write(self, rows: Rows) -> object: ...


@dataclass(frozen=True)
class FreeSide:
    """Plain gets and puts."""

    router: Router

    def read(self, keys: Sequence[bytes]) -> object:
        return self.router.get_many(keys, None)

    def write(self, rows: Rows) -> object:
        return self.router.put(rows, durable=True)


@dataclass(frozen=True)
class AtomicSide:
    """Atomic reads and batches.  `write_batch` sends a batch to the node of its first key."""

    router: Router
    read_version: Callable[[], Version]
    write_batch: Callable[[Rows], object]

    def read(self, keys: Sequence[bytes]) -> object:
        def snapshot(seen: Version) -> list[bytes | None]:
            return self.router.get_many(keys, max(seen, self.read_version()))

        return read_atomic(self.router, keys, snapshot)

    def write(self, rows: Rows) -> object:
        return self.write_batch(rows)


class KeyLocks:
    """Shared and exclusive locks of keys.  Callers acquire them in key order, so there is no deadlock."""

    def __init__(self) -> None:
        self._changed = Condition()
        self._held: Counter[bytes] = Counter()

    def take(self, keys: Sequence[bytes], *, shared: bool) -> None:
        with self._changed:
            for key in keys:
                while self._held[key] < 0 or (self._held[key] and not shared):
                    self._changed.wait()
                self._held[key] += 1 if shared else -1

    def give_back(self, keys: Sequence[bytes], *, shared: bool) -> None:
        with self._changed:
            for key in keys:
                self._held[key] -= 1 if shared else -1
            self._changed.notify_all()


@dataclass(frozen=True)
class LockedSide:
    """Two-phase locking.  A read acquires its locks with its own message, a write with a message before it.

    Callers do not wait for the message that releases locks: `later` sends it.
    """

    router: Router
    later: Callable[[Callable[[], object]], object] = lambda give_back: give_back()
    locks: KeyLocks = field(default_factory=KeyLocks)

    def read(self, keys: Sequence[bytes]) -> object:
        found: dict[bytes, bytes | None] = {}

        def read(partition: Partition, group: Sequence[bytes]) -> None:
            self.locks.take(group, shared=True)
            found.update(zip(group, partition.get_many(group, None), strict=True))

        self.router.each(keys, read)
        self.later(lambda: self.locks.give_back(keys, shared=True))
        return found

    def write(self, rows: Rows) -> object:
        def lock(partition: Partition, group: Sequence[bytes]) -> None:
            partition.get(group[0], None)
            self.locks.take(group, shared=False)

        self.router.each(list(rows), lock)
        try:
            return self.router.put(rows, durable=True)
        finally:
            self.later(lambda: self.locks.give_back(list(rows), shared=False))


@dataclass(frozen=True, kw_only=True)
class Sample:
    """The result of a turn, over all clients."""

    per_second: float
    processor_us: float
    counts: Counter[str]


class Zipfian:
    """Draws `KEYS` distinct keys with a zipfian distribution."""

    def __init__(self, keys: Sequence[bytes]) -> None:
        self._keys = keys
        self._bounds = list(accumulate(1 / rank**SKEW for rank in range(1, len(keys) + 1)))

    def draw(self, random: Random) -> list[bytes]:
        drawn: set[bytes] = set()
        while len(drawn) < KEYS:
            drawn.add(self._keys[bisect_right(self._bounds, random.random() * self._bounds[-1])])
        return sorted(drawn)


def run(side: Side, keys: Zipfian, counts: local, clients: int, seconds: float) -> Sample:
    """Read and write by `clients` threads for `seconds`."""
    until = perf_counter() + seconds

    def work(number: int) -> Counter[str]:
        random, done = Random(number), Counter[str]()
        while perf_counter() < until:
            drawn = keys.draw(random)
            calls = counts.__dict__["calls"] = Counter[str]()
            if random.random() < READS:
                side.read(drawn)
                done.update(
                    reads=1,
                    messages=calls["messages"],
                    second=bool(calls["second"]),
                    snapshot=bool(calls["snapshot"]),
                )
            else:
                side.write({key: encode_value(random.randbytes(100)) for key in drawn})
            done["calls"] += 1
        return done

    begun, used = perf_counter(), process_time()
    with ThreadPoolExecutor(clients) as pool:
        total = sum(pool.map(work, range(clients)), Counter[str]())
    return Sample(
        per_second=total["calls"] / (perf_counter() - begun),
        processor_us=1e6 * (process_time() - used) / total["calls"],
        counts=total,
    )


def compare(
    sides: Mapping[str, Side],
    keys: Zipfian,
    counts: local,
    options: argparse.Namespace,
    slowness: float = 1,
) -> Iterator[Line]:
    for clients in CLIENTS:
        work = f"{clients} client{'s' * (clients > 1)}"
        # One client makes few calls in a second.
        seconds = options.seconds * (4 if clients == 1 else 1)
        measures = {name: partial(run, side, keys, counts, clients, seconds) for name, side in sides.items()}
        samples = in_turns(work, measures, options.repetitions)
        rates = {name: [slowness * each.per_second for each in found] for name, found in samples.items()}
        measured = {name: Measure.of(numbers) for name, numbers in rates.items()}
        for name in (FREE, LOCKED):
            yield line(work, name, "calls/s", rates[name])
        against_free = line(work, ATOMIC, "calls/s", rates[ATOMIC], against=(FREE, measured[FREE]))
        yield held(against_free, Target(limit=0.95, unit=f"x {FREE}", at_least=True))
        against_locks = line(work, ATOMIC, "calls/s", rates[ATOMIC], against=(LOCKED, measured[LOCKED]))
        target = Target(limit=2, unit=f"x {LOCKED}", at_least=True)
        yield held(against_locks, target) if clients == HELD_CLIENTS else against_locks
        used = {name: [each.processor_us for each in found] for name, found in samples.items()}
        against = FREE, Measure.of(used[FREE])
        for name in sides:
            yield line(f"{work}: processor time a call", name, "us", used[name], against=against)
        total = sum((each.counts for each in samples[ATOMIC]), Counter[str]())
        yield line(f"{work}: a read", ATOMIC, "messages", [total["messages"] / total["reads"]])
        only_first = 100 - 100 * (total["second"] + total["snapshot"]) / total["reads"]
        target = Target(limit=99, unit="%", at_least=True)
        yield line(f"{work}: reads of one round", ATOMIC, "%", [only_first], target=target)
        for name in ("second", "snapshot"):
            share = 100 * total[name] / total["reads"]
            yield line(f"{work}: reads with a {name}{' round' * (name == 'second')}", ATOMIC, "%", [share])


def memory(_: Path, options: argparse.Namespace) -> Iterator[Line]:
    """Nodes in this process; each call that would cross a network first sleeps for a message's time."""
    delay = SLOWNESS * DELAY_SECONDS
    with memory_nodes() as (maps, shared), ThreadPoolExecutor(256) as pool:
        prefix = encode_namespace(1)
        pairs = make_pairs(min(options.records, RECORDS_MAX), seed=42)
        rows = {prefix + key: encode_value(value) for key, value in pairs}
        Router(maps).put(rows, durable=True)
        counted = CountedMaps(maps, delay)
        router, writers = Router(counted), {}
        for each in shared:
            place = f"node {each.number}"
            batches = BatchWriter(lambda: mint_batch(system_time_ms()), CallPool(256))
            writers[place] = Router(CountedMaps(maps, delay, own=place), batches=batches)
            settler = lambda batch, siblings: ask_fate(router.call, batch, siblings)  # noqa: E731
            each.node.settle_by(lambda _: Fate(Decision.ABORT, 0), settler)

        def write_batch(rows: Rows) -> None:
            sleep(delay)
            writers[maps.map.route(min(rows)).place].write_batch(rows, durable=True)

        def send(give_back: Callable[[], object]) -> None:
            sleep(delay)
            give_back()

        sides: dict[str, Side] = {
            FREE: FreeSide(router),
            ATOMIC: AtomicSide(router, shared[0].clock.now, write_batch),
            LOCKED: LockedSide(router, lambda give_back: pool.submit(send, give_back)),
        }
        yield from compare(sides, Zipfian(list(rows)), counted.counts, options, SLOWNESS)


class MemoryMaps:
    """The partitions of several nodes in this process; the place of each names its node."""

    def __init__(self, shared: Sequence[SharedNode]) -> None:
        self._shared = shared
        self.refresh()

    def refresh(self) -> None:
        for each in self._shared:
            each.node.refresh()
        rows = self._shared[0].node.rows
        owned = [self._shared[row.node - 1].node.map.route(row.start) for row in rows]
        for row, partition in zip(rows, owned, strict=True):
            partition.place = f"node {row.node}"
        self.map: PartitionMap[Any] = PartitionMap([row.start for row in rows], owned)


@contextmanager
def memory_nodes() -> Iterator[tuple[MemoryMaps, list[SharedNode]]]:
    """Run nodes on one engine in memory, with a thread that beats for them, and a partition for each."""
    engine, stopping = MemoryEngine(FAMILIES), Event()
    shared = [
        SharedNode(
            engine, number, 1, time_source=system_time_ms, elapsed_source=monotonic_ms, url=f"node {number}"
        )
        for number in range(1, NODES + 1)
    ]

    def beat() -> None:
        while not stopping.wait(BEAT_MS / 1_000):
            for each in shared:
                tick(each)

    for each in shared:
        tick(each)
    beating = Thread(target=beat)
    beating.start()
    try:
        first = shared[0].node
        borders = [encode_namespace(1) + bytes([256 * number // NODES]) for number in range(1, NODES)]
        for border in borders:
            first.reshaping.split(border)
        for number, border in enumerate(borders, 2):
            first.reshaping.move(first.map.route(border).id, number)
        yield MemoryMaps(shared), shared
    finally:
        stopping.set()
        beating.join()


def nodes(directory: Path, options: argparse.Namespace) -> Iterator[Line]:
    """Nodes as processes on PostgreSQL.  The locks are in this process: releasing them costs no message."""
    with ExitStack() as stack:
        url = stack.enter_context(database(directory))
        server = stack.enter_context(served_by(url, NODES, directory))
        site = stack.enter_context(server.opened())
        users = site.namespace(NAMESPACE)
        pairs = make_pairs(min(options.records, RECORDS_MAX), seed=42)
        users.put_many(dict(pairs))
        counted = CountedMaps(site.host.router.maps)
        router, prefix = Router(counted), encode_namespace(users.id)
        sides: dict[str, Side] = {
            FREE: FreeSide(router),
            ATOMIC: AtomicSide(
                router, site.host.versions.read_version, partial(router.write_batch, durable=True)
            ),
            LOCKED: LockedSide(router),
        }
        keys = Zipfian([prefix + key for key, _ in pairs])
        yield from compare(sides, keys, counted.counts, options)


if __name__ == "__main__":
    main()
