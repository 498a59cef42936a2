"""Transactions over a batched log and over a bare one: same disk, same run, as a ratio.

    make bench-log                                          all of it, some minutes
    make bench-log ARGS="--seconds 0.2 --repeat 1"          see that it works
    make bench-log ARGS="--only transactions --level 1"     some of it

A coordinator begins a transaction, joins two participants and commits it; each step is durable before the
next.  Then it notifies the participants, which have nothing to do, and deletes the transaction's records.
Each transaction in flight has a thread of its own.

At a site, a transaction only writes a record, or it takes a change from a subscription, writes a record and
acknowledges the change.  Each thread has one transaction in flight.
"""

import argparse
import json
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import timedelta
from itertools import count, product
from pathlib import Path
from statistics import median, quantiles
from threading import Barrier
from time import perf_counter, sleep
from timeit import timeit
from typing import Final, TypeVar

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.harness import (
    BATCH,
    MICROSECONDS,
    Measure,
    Row,
    Target,
    as_data,
    compare,
    describe_machine,
    render,
    state,
    tell,
)

from floodmark.clock import system_time_ms
from floodmark.engine import Engine
from floodmark.engine.rocks import RocksEngine
from floodmark.host.transaction_port import BatchUpdate, LogKind
from floodmark.log import FAMILY, BatchedWriter, BatchSettings, StoredLedger, Trigger
from floodmark.log.statistics import FlushCounter
from floodmark.model.transaction import Participant, ParticipantKind
from floodmark.model.version import Version
from floodmark.partition import FAMILIES, FILTERED_BYTES
from floodmark.site import open_engine
from floodmark.testing.ledgers import EngineStore, MemoryLedger
from floodmark.transaction import LEDGERS, TransactionCoordinator, start_sweeping

LEVELS: Final = (1, 8, 64, 512)
FILLING_THREADS: Final = 512
TURNS: Final = 20
SITE_LEVELS: Final = (1, 64)
# Messages that a subscription can consume: more than a turn does.
MESSAGES: Final = 50_000
RECORD_BYTES: Final = 60
SYNC_SECONDS: Final = 0.002
FINISHED, OPEN = 100_000, 1_000
FILLED: Final = 2_048
TIMEOUT: Final = timedelta(hours=1)
VERSION: Final[Version] = 1 << 58
JOINING: Final = (
    Participant(ParticipantKind.PARTITION, b"rusers/ada".hex()),
    Participant(ParticipantKind.SUBSCRIPTION, "indexer"),
)
MILLISECONDS: Final = 1e3
BARE, BATCHED = "bare", "batched"
NUMBERS: Final = {BARE: 0, BATCHED: 1}

Result = TypeVar("Result")


class SlowRocks(RocksEngine):
    """RocksDB on a disk that takes two milliseconds longer to sync."""

    def sync(self) -> None:
        super().sync()
        sleep(SYNC_SECONDS)


DISKS: Final[Mapping[str, type[RocksEngine]]] = {"this disk": RocksEngine, "2 ms fsync": SlowRocks}


class Idlers:
    """Participants that have nothing to do."""

    def commit(self, participant: Participant, transaction: str, version: Version) -> None: ...

    def abort(self, participant: Participant, transaction: str) -> None: ...


class Side:
    """A coordinator with its own log in an engine, and its sweeping thread."""

    def __init__(self, engine: Engine, side: str) -> None:
        self.engine, self.side = engine, side
        names = count(system_time_ms() << 18)
        self.coordinator: TransactionCoordinator = TransactionCoordinator(
            NUMBERS[side],
            EngineStore(engine),
            Idlers(),
            settings=BatchSettings(enabled=side == BATCHED),
            mint=lambda: next(names),
            time_source=system_time_ms,
        )
        self._sweeping = start_sweeping(self.coordinator)

    def ledger(self) -> StoredLedger:
        """The ledger of its log, opened a second time."""
        return StoredLedger(EngineStore(self.engine), f"{LEDGERS}{NUMBERS[self.side]}")

    def close(self) -> None:
        self.coordinator.close()
        self._sweeping.join()


@dataclass
class Run:
    """What one side did in one repetition."""

    seconds: float = 0.0
    latencies: list[float] = field(default_factory=list)

    @property
    def transactions_per_second(self) -> float:
        return len(self.latencies) / self.seconds


def main() -> None:
    options = parse_arguments()
    machine = describe_machine()
    sections: dict[str, Callable[[Path, argparse.Namespace], Iterator[Row]]] = {
        "transactions": transaction_rows,
        "site": site_rows,
        "entries": entry_rows,
        "recovery": recovery_rows,
        "cost": cost_rows,
    }
    rows: list[Row] = []
    with tempfile.TemporaryDirectory(prefix="floodmark-bench-", dir=options.directory) as name:
        for section, measure in sections.items():
            if not options.only or section in options.only:
                rows += measure(Path(name) / section, options)
    print(json.dumps(as_data(machine, rows), indent=2) if options.json else render(machine, rows))


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=1.0, help="of each side in each repetition")
    parser.add_argument("--repeat", type=int, default=5, help="repetitions")
    parser.add_argument("--level", type=int, action="append", help="transactions in flight (1, 8, 64, 512)")
    parser.add_argument("--only", action="append", help="transactions, site, entries, recovery or cost")
    parser.add_argument("--disk", action="append", choices=list(DISKS), help="of the transactions")
    parser.add_argument("--directory", type=Path, default=Path.cwd(), help="on the disk to measure")
    parser.add_argument("--json", action="store_true", help="for machines")
    return parser.parse_args()


# Transactions in flight


def drive(side: Side, level: int, seconds: float, run: Run) -> None:
    """Keep `level` transactions in flight for `seconds`, and add their latencies to `run`."""
    begun: list[float] = []
    barrier = Barrier(level, action=lambda: begun.append(perf_counter()))

    def work(_: int) -> list[float]:
        latencies: list[float] = []
        barrier.wait()
        while (start := perf_counter()) < begun[0] + seconds:
            side.coordinator.commit(begin_one(side.coordinator), VERSION)
            latencies.append(perf_counter() - start)
        return latencies

    with ThreadPoolExecutor(level) as pool:
        for latencies in pool.map(work, range(level)):
            run.latencies += latencies
    run.seconds += perf_counter() - begun[0]


def begin_one(coordinator: TransactionCoordinator) -> str:
    """Begin a transaction and join its participants; returns its id."""
    transaction = coordinator.begin(TIMEOUT)
    for participant in JOINING:
        coordinator.join(transaction, participant)
    return transaction


def wait_all(futures: Sequence[Future[Result]]) -> list[Result]:
    return [future.result() for future in futures]


def transaction_rows(directory: Path, options: argparse.Namespace) -> Iterator[Row]:
    for disk in options.disk or DISKS:
        engine = DISKS[disk](directory / disk.replace(" ", "-"), (FAMILY,))
        sides = {side: Side(engine, side) for side in (BARE, BATCHED)}
        for level in options.level or LEVELS:
            tell(f"{level} transactions in flight, {disk}")
            for side in sides.values():
                drive(side, level, options.seconds / 5, Run())
            runs: dict[str, list[Run]] = {name: [Run() for _ in range(options.repeat)] for name in sides}
            # The sides take many short turns, so that a noisy neighbour slows both; fewer with many threads.
            turns = min(TURNS, max(3, 640 // level))
            for repetition, turn in product(range(options.repeat), range(turns)):
                for name in (BARE, BATCHED)[:: 1 if (repetition + turn) % 2 else -1]:
                    drive(sides[name], level, options.seconds / turns, runs[name][repetition])
            yield from level_rows(f"{level} in flight, {disk}", level, disk, runs)
        for side in sides.values():
            side.close()
        engine.close()


def level_rows(work: str, level: int, disk: str, runs: Mapping[str, Sequence[Run]]) -> Iterator[Row]:
    limit = 0.95 if level == 1 else (5 if disk == "this disk" else 10) if level >= 64 else None
    rates = {side: Measure.of([run.transactions_per_second for run in runs[side]]) for side in runs}
    target = None if limit is None else Target(limit=limit, unit="x bare", at_least=True)
    yield compare(work, "transactions/s", rates[BARE], rates[BATCHED], target)
    for percent in (50, 99):
        times = {
            side: Measure.of([percentile(run.latencies, percent) * MILLISECONDS for run in runs[side]])
            for side in runs
        }
        worst = Target(limit=1, unit="x bare") if (level, percent) == (64, 99) else None
        yield compare(f"  p{percent}", "ms", times[BARE], times[BATCHED], worst)


def percentile(samples: Sequence[float], percent: int) -> float:
    return median(samples) if len(samples) < 2 else quantiles(samples, n=100, method="inclusive")[percent - 1]


# Transactions of a site


class SiteSide:
    """A site with batched or bare transaction logs, and a subscription that all threads consume."""

    def __init__(self, engine: RocksEngine, side: str) -> None:
        self.site = open_engine(engine, site=side, background=True)
        for log in LogKind:
            self.site.transactions.set_batching(log, BatchUpdate(enabled=side == BATCHED))
        messages = self.site.create_namespace("messages")
        for first in range(0, MESSAGES, BATCH):
            messages.put_many({b"%06d" % each: b"message" for each in range(first, first + BATCH)})
        self._counts = self.site.create_namespace("counts")
        self._subscription = self.site.subscribe("counting", "messages")
        self.works = {"write": self.write, "consume, write, acknowledge": self.consume}

    def write(self, thread: int) -> None:
        with self.site.transaction() as transaction:
            transaction.put(self._counts, b"%d" % thread, b"1")

    def consume(self, thread: int) -> None:
        delivery = next(self._subscription)
        with self.site.transaction() as transaction:
            transaction.put(self._counts, b"%d" % thread, b"1")
            transaction.acknowledge(delivery)

    def drive(self, work: str, level: int, seconds: float, run: Run) -> None:
        """Run `level` threads for `seconds`; the first message, which opens the stream, is not counted."""
        self._subscription.seek("beginning")
        next(self._subscription).acknowledge()
        do = self.works[work]
        begun: list[float] = []
        barrier = Barrier(level, action=lambda: begun.append(perf_counter()))

        def repeat(thread: int) -> list[float]:
            latencies: list[float] = []
            barrier.wait()
            while (start := perf_counter()) < begun[0] + seconds:
                do(thread)
                latencies.append(perf_counter() - start)
            return latencies

        with ThreadPoolExecutor(level) as pool:
            for latencies in pool.map(repeat, range(level)):
                run.latencies += latencies
        run.seconds += perf_counter() - begun[0]

    def close(self) -> None:
        self._subscription.close()
        self.site.close()


def site_rows(directory: Path, options: argparse.Namespace) -> Iterator[Row]:
    for disk in options.disk or DISKS:
        sides: dict[str, SiteSide] = {}
        for side in (BARE, BATCHED):
            path = directory / disk.replace(" ", "-") / side
            sides[side] = SiteSide(DISKS[disk](path, FAMILIES, prefix_bytes=FILTERED_BYTES), side)
        for work, level in product(sides[BARE].works, options.level or SITE_LEVELS):
            tell(f"{work}, {level} threads, {disk}")
            for each in sides.values():
                each.drive(work, level, options.seconds / 5, Run())
            runs = {name: [Run() for _ in range(options.repeat)] for name in sides}
            for repetition in range(options.repeat):
                for name in (BARE, BATCHED)[:: 1 if repetition % 2 else -1]:
                    sides[name].drive(work, level, options.seconds, runs[name][repetition])
            yield from site_level_rows(f"{work}, {level} threads, {disk}", level, runs)
        for each in sides.values():
            each.close()


def site_level_rows(work: str, level: int, runs: Mapping[str, Sequence[Run]]) -> Iterator[Row]:
    rates = {side: Measure.of([run.transactions_per_second for run in runs[side]]) for side in runs}
    target = Target(limit=5, unit="x bare", at_least=True) if level == 64 else None
    yield compare(work, "transactions/s", rates[BARE], rates[BATCHED], target)
    times = {
        side: Measure.of([percentile(run.latencies, 99) * MILLISECONDS for run in runs[side]])
        for side in runs
    }
    yield compare("  p99", "ms", times[BARE], times[BATCHED])


# Entries and bytes


def entry_rows(directory: Path, _: argparse.Namespace) -> Iterator[Row]:
    """The same transactions on both sides, all left open, so that recovery reads all of them."""
    engine = RocksEngine(directory, (FAMILY,))
    numbers = {side: fill(engine, side) for side in (BARE, BATCHED)}
    engine.close()
    twentieth = Target(limit=1 / 20, unit="x bare")
    for work, unit, target, remark in (
        ("entries written", "entries", twentieth, ""),
        ("bytes of entries", "bytes", twentieth, "the records themselves, which both sides write"),
        ("bytes to the disk", "bytes", twentieth, "what the kernel counts, in whole pages"),
        ("entries read at recovery", "entries", twentieth, ""),
    ):
        bare, batched = (Measure.of([numbers[side][work]]) for side in (BARE, BATCHED))
        if bare.median:
            yield compare(f"{work}, 512 in flight", unit, bare, batched, target, remark)


def fill(engine: Engine, name: str) -> dict[str, int]:
    """Begin `FILLED` transactions, 512 at a time, and recover the log; returns entries and bytes."""
    tell(f"entries and bytes, {name}")
    side = Side(engine, name)
    before = bytes_to_disk()
    with ThreadPoolExecutor(FILLING_THREADS) as pool:
        list(pool.map(begin_one, [side.coordinator] * FILLED))
    written = bytes_to_disk() - before
    side.close()
    statistics = side.coordinator.log.statistics()
    again = Side(engine, name)
    assert len(again.coordinator.transactions()) == FILLED
    again.close()
    return {
        "entries written": statistics.entries,
        "bytes of entries": statistics.bytes,
        "bytes to the disk": written,
        "entries read at recovery": sum(segment.entries for segment in side.ledger().segments()),
    }


def bytes_to_disk() -> int:
    """The bytes that this process has caused to be written so far; 0 without /proc/self/io."""
    counts = Path("/proc/self/io")
    if not counts.exists():
        return 0
    lines = dict(line.split(": ") for line in counts.read_text("utf-8").splitlines())
    return int(lines["write_bytes"])


# Recovery


def recovery_rows(directory: Path, _: argparse.Namespace) -> Iterator[Row]:
    tell(f"recovery of {FINISHED:,} finished and {OPEN:,} open transactions")
    engine = RocksEngine(directory, (FAMILY,))
    side = Side(engine, BATCHED)
    every = (FINISHED + OPEN) // OPEN

    def run(number: int) -> None:
        transaction = begin_one(side.coordinator)
        if number % every:
            side.coordinator.commit(transaction, VERSION)

    with ThreadPoolExecutor(FILLING_THREADS) as pool:
        list(pool.map(run, range(FINISHED + OPEN)))
    side.close()
    engine.close()
    engine = RocksEngine(directory, (FAMILY,))
    start = perf_counter()
    again = Side(engine, BATCHED)
    found = again.coordinator.transactions()
    seconds = perf_counter() - start
    assert len(found) == OPEN
    entries, records = again.coordinator.log.acknowledgements.count_live()
    again.close()
    engine.close()
    yield state(
        f"recovery of {FINISHED:,} finished and {OPEN:,} open",
        "s",
        seconds,
        Target(limit=2, unit="s", strictly=True),
        f"{records:,} records were read back from {entries:,} entries, and all transactions listed",
    )


# What the writer itself costs


def cost_rows(directory: Path, options: argparse.Namespace) -> Iterator[Row]:
    tell("the cost of the writer, and of counting")
    engine = RocksEngine(directory, (FAMILY,))
    ledger = StoredLedger(EngineStore(engine), "raw")
    lone = BatchedWriter[bytes](StoredLedger(EngineStore(engine), "lone"))
    record = bytes(RECORD_BYTES)
    samples: dict[str, list[float]] = {"raw": [], "ours": []}
    for _repetition in range(options.repeat):
        samples["raw"].append(timeit(lambda: ledger.append(record), number=500) / 500 * MICROSECONDS)
        samples["ours"].append(timeit(lambda: lone.write(record), number=500) / 500 * MICROSECONDS)
    lone.close()
    engine.close()
    raw, ours = Measure.of(samples["raw"]), Measure.of(samples["ours"])
    yield compare("a lone record, ledger.append and writer.write", "us", raw, ours)
    counter = FlushCounter()
    counting = timeit(lambda: counter.flushed(Trigger.IDLE, 1, 100, 0.0), number=100_000) / 100_000
    share = Target(limit=1, unit="%", strictly=True)
    percent = counting * MICROSECONDS / ours.median * 100
    yield state("counting, of a lone record on this disk", "%", percent, share)
    writer = BatchedWriter[bytes](MemoryLedger())
    batch = timeit(lambda: wait_all([writer.add(record) for _ in range(512)]), number=40) / 40
    writer.close()
    yield state("counting, of 512 records without a disk", "%", counting / batch * 100, share)


if __name__ == "__main__":
    main()
