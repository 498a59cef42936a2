"""The store against raw rocksdict: same options, same keys, same run, as a ratio.

    make bench                                            all of it, some minutes
    make bench ARGS="--keys 20000 --large 0 --repeat 3"   a quick look, under a minute
    make bench ARGS="--processor-time …"                  on a machine that others use at the same time

harness.py describes the method.  Keys have 16 bytes, random unless a row says that they ascend; values have
100 random bytes.  Raw rocksdict keeps one version of a key and no change log; a site keeps all versions and a
change log.
"""

import argparse
import gc
import json
import random
import shutil
import statistics
import sys
import tempfile
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from time import perf_counter, thread_time
from typing import Final

from rocksdict import Rdict, WriteBatch, WriteOptions

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.harness import (
    BATCH,
    MICROSECONDS,
    Database,
    Measure,
    Pair,
    Peers,
    Put,
    Row,
    Target,
    as_data,
    compare,
    describe_machine,
    in_batches,
    make_pairs,
    puts_per_second,
    render,
    settle_peers,
    state,
    take_turns,
    tell,
    timing_each,
)
from benchmarks.large import encoded_overheads, large_site
from benchmarks.newest import VersionedRows

from floodmark import Namespace
from floodmark.site.arguments import Durability

THREADS: Final = (1, 2, 4, 8, 16, 32)
CHECKED_KEYS: Final = 1_000
# So few that random and ascending keys together fit into the write buffer.
ABSENT_KEYS: Final = 40_000

RAW, OURS, OURS_SYNC = "raw", "ours", "ours with fsync"
RAW_SYNC, RAW_FLUSH = "raw put with sync=True", "raw put + flush_wal(True)"

Samples = defaultdict[str, list[float]]


def main() -> None:
    options = parse_arguments()
    machine = describe_machine()
    with tempfile.TemporaryDirectory(prefix="floodmark-bench-", dir=options.directory) as name:
        rows = [*run(Path(name), options), *encoded_overheads()]
        if options.large:
            rows += large_site(Path(name) / "large", options.large)
    print(json.dumps(as_data(machine, rows), indent=2) if options.json else render(machine, rows))


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--keys", type=int, default=500_000)
    parser.add_argument("--repeat", type=int, default=5, help="repetitions of each kind of work")
    parser.add_argument("--fsync-puts", type=int, help="synced puts in a repetition (follows --keys)")
    parser.add_argument("--seconds", type=float, help="of synced puts by several threads (follows --keys)")
    parser.add_argument("--large", type=int, default=5_000_000, help="records of the large site; 0: none")
    parser.add_argument("--directory", type=Path, default=Path.cwd(), help="on the disk to measure")
    parser.add_argument(
        "--processor-time",
        action="store_true",
        help="measure what does not wait for the disk by the processor time of its thread",
    )
    parser.add_argument("--json", action="store_true", help="for machines")
    options = parser.parse_args()
    if options.keys < 1 or options.repeat < 1:
        parser.error("--keys and --repeat start at 1")
    if options.fsync_puts is not None and options.fsync_puts < 100:
        parser.error("--fsync-puts starts at 100: fewer have no p99")
    if options.fsync_puts is None:
        options.fsync_puts = max(500, min(4_000, options.keys // 100))
    if options.seconds is None:
        options.seconds = max(0.1, min(1.0, options.keys / 100_000))
    return options


class Clock:
    """The clock for work that does not wait for the disk: wall time, or with an option thread time."""

    now: Callable[[], float] = staticmethod(perf_counter)


def run(directory: Path, options: argparse.Namespace) -> Iterator[Row]:
    Clock.now = thread_time if options.processor_time else perf_counter
    pairs = make_pairs(options.keys, seed=42)
    # Python's garbage collector stays on, as for users, but must not traverse the keys of the benchmark.
    gc.collect()
    gc.freeze()
    yield from put_fsync(directory / "fsync", options)
    loaded = directory / "loaded"
    yield put_async(loaded, pairs, options.repeat)
    yield from put_many(directory / "many", pairs, options.repeat)
    yield from get_absent(directory / "absent", pairs, options.repeat)
    yield from read(loaded, directory / "newest", pairs, options.repeat)


# Synced puts


def put_fsync(directory: Path, options: argparse.Namespace) -> Iterator[Row]:
    with Peers(directory / "sync") as peers, Database(directory / "flush") as flushed:
        sides: dict[str, Put] = {
            RAW_SYNC: synced_put(peers.raw),
            RAW_FLUSH: flushed_put(flushed.rows),
            OURS: peers.ours.put,
        }
        yield from put_fsync_alone(sides, options.fsync_puts, options.repeat)
        yield from put_fsync_together(sides, options.seconds, options.repeat)
    shutil.rmtree(directory)


def put_fsync_alone(sides: Mapping[str, Put], count: int, repeat: int) -> Iterator[Row]:
    tell("put, fsync, 1 thread")
    means, tails = Samples(list), Samples(list)
    for repetition in range(repeat):
        times: dict[str, list[float]] = {name: [] for name in sides}
        take_turns(
            make_pairs(count, seed=repetition),
            {name: timing_each(put, times[name]) for name, put in sides.items()},
        )
        for name, seconds in times.items():
            means[name].append(statistics.fmean(seconds) * MICROSECONDS)
            tails[name].append(statistics.quantiles(seconds, n=100)[98] * MICROSECONDS)
    target = Target(limit=1.2)
    for what, samples in (("mean", means), ("p99", tails)):
        raw, flushed, ours = (Measure.of(samples[name]) for name in sides)
        yield compare(f"put, fsync, 1 thread: {what}", "µs", raw, ours, target)
        yield compare(f"  against {RAW_FLUSH}", "µs", flushed, ours)


def put_fsync_together(sides: Mapping[str, Put], seconds: float, repeat: int) -> Iterator[Row]:
    tell("put, fsync, several threads")
    samples: dict[int, Samples] = {threads: Samples(list) for threads in THREADS}
    for repetition in range(repeat):
        pairs = make_pairs(10_000, seed=1_000 + repetition)
        order = deque(sides)
        for threads in THREADS:
            for name in order:
                rate = puts_per_second(sides[name], pairs, threads, seconds)
                samples[threads][name].append(rate)
            order.rotate(-1)
    measures = {
        (name, threads): Measure.of(rates)
        for threads, by_side in samples.items()
        for name, rates in by_side.items()
    }
    raw = {place: measure for place, measure in measures.items() if place[0] != OURS}
    best = max(raw, key=lambda place: raw[place].median)
    most = THREADS[-1]
    yield compare(
        f"put, fsync, {most} threads, to raw's best",
        "puts/s",
        raw[best],
        measures[OURS, most],
        Target(limit=4, at_least=True),
        f"raw is at its best with {best[0]} and threads: {best[1]}",
    )
    for name in (RAW_SYNC, RAW_FLUSH):
        for threads in THREADS:
            work = f"  threads: {threads}, {name}"
            yield compare(work, "puts/s", raw[name, threads], measures[OURS, threads])


def synced_put(raw: Rdict) -> Put:
    options = synced()
    return lambda key, value: raw.put(key, value, options)


def flushed_put(raw: Rdict) -> Put:
    def put(key: bytes, value: bytes) -> None:
        raw.put(key, value)
        raw.flush_wal(True)

    return put


def synced() -> WriteOptions:
    options = WriteOptions()
    options.sync = True
    return options


# Other puts


def put_async(directory: Path, pairs: Sequence[Pair], repeat: int) -> Row:
    """Load fresh databases in every repetition; the last ones stay for the reads."""
    tell("put, async")
    samples = Samples(list)
    for _ in range(repeat):
        shutil.rmtree(directory, ignore_errors=True)
        note(samples, load(directory, pairs), len(pairs))
    raw, ours = Measure.of(samples[RAW]), Measure.of(samples[OURS])
    return compare("put, async", "µs", raw, ours, Target(limit=3))


def load(directory: Path, pairs: Sequence[Pair]) -> dict[str, float]:
    with Peers(directory) as peers:
        raw_put, our_put = peers.raw.put, peers.ours.put

        def put_raw(chunk: Sequence[Pair]) -> None:
            for key, value in chunk:
                raw_put(key, value)

        def put_ours(chunk: Sequence[Pair]) -> None:
            for key, value in chunk:
                our_put(key, value, durability="async")

        return take_turns(pairs, {RAW: put_raw, OURS: put_ours}, Clock.now)


def put_many(directory: Path, pairs: Sequence[Pair], repeat: int) -> Iterator[Row]:
    ascending = [(b"user-%011d" % number, value) for number, (_, value) in enumerate(pairs)]
    for order, rows in (("random", pairs), ("ascending", ascending)):
        tell(f"put_many of {BATCH:,} {order} keys")
        samples = Samples(list)
        for _ in range(repeat):
            note(samples, load_in_batches(directory, rows), len(rows) / BATCH)
            shutil.rmtree(directory)
        raw, ours = Measure.of(samples[RAW]), Measure.of(samples[OURS])
        work = f"put_many of {BATCH:,}, async, {order}"
        yield compare(work, "µs/batch", raw, ours, Target(limit=2.2))
        raw, ours = Measure.of(samples[RAW_SYNC]), Measure.of(samples[OURS_SYNC])
        yield compare("  fsync, to raw with sync=True", "µs/batch", raw, ours)


def load_in_batches(directory: Path, pairs: Sequence[Pair]) -> dict[str, float]:
    with Peers(directory / "async") as unsynced, Peers(directory / "fsync") as durable:
        sides = {
            RAW: raw_batches(unsynced.raw, WriteOptions()),
            OURS: our_batches(unsynced.ours, "async"),
            RAW_SYNC: raw_batches(durable.raw, synced()),
            OURS_SYNC: our_batches(durable.ours, "fsync"),
        }
        return take_turns(in_batches(pairs), sides, Clock.now)


def raw_batches(raw: Rdict, options: WriteOptions) -> Callable[[Sequence[Sequence[Pair]]], None]:
    def write(batches: Sequence[Sequence[Pair]]) -> None:
        for pairs in batches:
            batch = WriteBatch(raw_mode=True)
            put = batch.put
            for key, value in pairs:
                put(key, value)
            raw.write(batch, options)

    return write


def our_batches(ours: Namespace, durability: Durability) -> Callable[[Sequence[Sequence[Pair]]], None]:
    def write(batches: Sequence[Sequence[Pair]]) -> None:
        for pairs in batches:
            ours.put_many(pairs, durability=durability)

    return write


# Reads


def read(loaded: Path, indexes: Path, pairs: Sequence[Pair], repeat: int) -> Iterator[Row]:
    """Gets and scans of the databases that `put_async` loaded, after their flushes and compactions."""
    costs = put_with_index(indexes, pairs, repeat)
    settle_peers(loaded)
    with ExitStack() as stack:
        peers = stack.enter_context(Peers(loaded))
        rows = stack.enter_context(VersionedRows(indexes / "indexed", indexed=True))
        rows.settle()
        rows.load_dict(pairs)
        yield from get_newest(peers, rows, pairs, repeat)
        yield costs
        yield scan(peers, len(pairs), repeat, reverse=False)
        yield scan(peers, len(pairs), repeat, reverse=True)
    shutil.rmtree(loaded)
    shutil.rmtree(indexes)


def get_newest(peers: Peers, rows: VersionedRows, pairs: Sequence[Pair], repeat: int) -> Iterator[Row]:
    tell("get newest")
    keys = [key for key, _ in pairs]
    random.Random(7).shuffle(keys)
    sides: dict[str, Callable[[Sequence[bytes]], bytes | None]] = {
        RAW: getting(peers.raw.get),
        OURS: getting(peers.ours.get),
        "seek": rows.get_by_seek,
        "family": rows.get_by_family,
        "dict": rows.get_by_dict,
    }
    for key, value in pairs[:CHECKED_KEYS]:
        for name, get in sides.items():
            if get([key]) != value:
                raise AssertionError(f"{name} does not give the value of {key.hex()}")
    samples = Samples(list)
    for _ in range(repeat):
        note(samples, take_turns(keys, sides, Clock.now), len(keys))
    raw, ours, seek, family, memory = (Measure.of(samples[name]) for name in sides)
    bare = "bare rocksdict over a site's encoded rows, without the calls of a site"
    yield compare("get newest", "µs", raw, ours, Target(limit=2.5))
    yield compare("  without index, bare seek", "µs", raw, seek, remark=bare)
    yield compare("  index (a), column family", "µs", raw, family, remark=bare)
    remark = "on disk, flushed and compacted"
    yield state("  index (a), size", "bytes/key", rows.family_bytes() / len(pairs), remark=remark)
    yield compare("  index (b), dict in memory", "µs", raw, memory, remark=bare)
    remark = "in memory: dict, keys and versions by sys.getsizeof"
    yield state("  index (b), size", "bytes/key", rows.dict_bytes() / len(pairs), remark=remark)


def put_with_index(directory: Path, pairs: Sequence[Pair], repeat: int) -> Row:
    """The time that the index column family adds to a put; the last databases stay for the gets."""
    tell("put with an index of newest versions")
    samples = Samples(list)
    for _ in range(repeat):
        shutil.rmtree(directory, ignore_errors=True)
        with (
            VersionedRows(directory / "plain", indexed=False) as plain,
            VersionedRows(directory / "indexed", indexed=True) as indexed,
        ):
            note(samples, take_turns(pairs, {RAW: plain.put, OURS: indexed.put}, Clock.now), len(pairs))
    without, with_index = Measure.of(samples[RAW]), Measure.of(samples[OURS])
    added = with_index.median - without.median
    return compare(
        "  index (a), put async",
        "µs",
        without,
        with_index,
        remark=f"adds {added:.2f} µs; raw: row and change-log row in one batch, ours: the index row too",
    )


def get_absent(directory: Path, pairs: Sequence[Pair], repeat: int) -> Iterator[Row]:
    """Gets of absent keys while all rows are in the memtable."""
    tell("get, absent")
    held = pairs[:ABSENT_KEYS]
    absent = {
        "random": [key for key, _ in make_pairs(len(held), seed=43)],
        # Between keys that are present, with the same first bytes as many of them.
        "among ascending": [b"user-%011d" % (2 * number + 1) for number in range(len(held))],
    }
    with Peers(directory) as peers:
        ascending = [(b"user-%011d" % (2 * number), value) for number, (_, value) in enumerate(held)]
        for batch in in_batches([*held, *ascending]):
            raw_batches(peers.raw, WriteOptions())([batch])
            peers.ours.put_many(batch, durability="async")
        for kind, keys in absent.items():
            random.Random(7).shuffle(keys)
            samples = Samples(list)
            for _ in range(repeat):
                sides = {RAW: getting(peers.raw.get), OURS: getting(peers.ours.get)}
                note(samples, take_turns(keys, sides, Clock.now), len(keys))
            raw, ours = Measure.of(samples[RAW]), Measure.of(samples[OURS])
            yield compare(f"get absent, {kind}, in the memtable", "µs", raw, ours, Target(limit=2))
    shutil.rmtree(directory)


def scan(peers: Peers, count: int, repeat: int, *, reverse: bool) -> Row:
    work = "scan, reverse" if reverse else "scan"
    tell(work)
    sides: dict[str, Callable[[Sequence[None]], object]] = {
        RAW: lambda _: deque(peers.raw.items(backwards=reverse), maxlen=0),
        OURS: lambda _: deque(peers.ours.scan(reverse=reverse), maxlen=0),
    }
    for name, rows in ((RAW, peers.raw.items()), (OURS, peers.ours.scan())):
        if (seen := sum(1 for _ in rows)) != count:
            raise AssertionError(f"the scan of {name} gives {seen:,} rows of {count:,}")
    samples = Samples(list)
    for repetition in range(repeat):
        order = (RAW, OURS) if repetition % 2 == 0 else (OURS, RAW)
        note(samples, take_turns([None], {name: sides[name] for name in order}, Clock.now), count)
    raw, ours = Measure.of(samples[RAW]), Measure.of(samples[OURS])
    return compare(work, "µs/row", raw, ours, Target(limit=3.5 if reverse else 3))


def getting(get: Callable[[bytes], bytes | None]) -> Callable[[Sequence[bytes]], bytes | None]:
    def run_gets(keys: Sequence[bytes]) -> bytes | None:
        value: bytes | None = None
        for key in keys:
            value = get(key)
        return value

    return run_gets


def note(samples: Samples, seconds: Mapping[str, float], operations: float) -> None:
    """Add one repetition to the samples, in microseconds an operation."""
    for name, total in seconds.items():
        samples[name].append(total / operations * MICROSECONDS)


if __name__ == "__main__":
    main()
