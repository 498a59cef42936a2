"""Feeds beside PostgreSQL, Redis and NATS, and the cost of open feeds and of change capture for writers.

    make bench-feed                                     all of it, on a quiet machine: about half an hour
    make bench-feed ARGS="--quick --only catch-up"      a look

Each section has its own directory and servers.  peers/README.md describes the setup of the peers.

    catch-up    all changes, by one reader: Floodmark in process and over the wire, and the peers
    ways        part of a site's changes: from memory, from the log, and by a scan; a small and a large site
    tail        5,000 writes a second in batches of 50: the latency from write to change seen
    open-feed   writes with and without a reader that follows in the same process
    capture     puts and gets with the change log and without it
"""

import argparse
import gc
import random
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext
from dataclasses import replace
from datetime import timedelta
from functools import partial
from itertools import accumulate, count, cycle
from pathlib import Path
from statistics import harmonic_mean
from threading import Barrier
from time import perf_counter
from typing import Any, Final, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.floodmark_peer import (
    EMBEDDED,
    MEASUREMENT_SECONDS_MAX,
    SERVED,
    SITE,
    Embedded,
    Line,
    LoglessEngine,
    Served,
    SiteServer,
    ahead,
    base_parser,
    best_peer,
    following,
    in_turns,
    line,
    measure_columns,
    parse,
    run_sections,
    running,
    stored_in,
    within,
)
from benchmarks.harness import (
    BATCH,
    MICROSECONDS,
    NAMESPACE,
    Database,
    Measure,
    Pair,
    Target,
    in_batches,
    make_pairs,
    puts_per_second,
    tell,
)
from benchmarks.peers import (
    Latency,
    PeerFailed,
    Server,
    Tail,
    installed_peers,
    measure_catch_up,
    measure_tail,
)
from benchmarks.peers.base import ANSWER_SECONDS_MAX, in_batches_of
from benchmarks.peers.measure import TAIL_BATCH, TAIL_RECORDS_PER_SECOND

import floodmark
from floodmark import Namespace, Site, Version
from floodmark.codec.changelog import encode_log_key, encode_single
from floodmark.engine.rocks import RocksEngine
from floodmark.feed import ChangeReader
from floodmark.feed.reading.reader import SCAN_RATE_BYTES_MAX
from floodmark.host.embedded import EmbeddedHost
from floodmark.model.limits import MIB
from floodmark.model.stream import ChangesRequest, Way
from floodmark.partition import FAMILIES
from floodmark.partition.commit.commit import tally_one

MILLISECONDS: Final = 1e3

CHANGES_PER_SECOND: Final = {EMBEDDED: 300_000, SERVED: 150_000}
TAIL_MS: Final = {EMBEDDED: 20, SERVED: 50}
FEED_COST_PERCENT: Final = 5

FEED_PAIRS: Final = 10_000
FEED_TURNS: Final = 5
# Warm-up of a turn, after which the lag of a follower of asynchronous writes no longer grows.
FEED_WARM_UP_SECONDS: Final = 0.3

YCSB_KEYS_MAX: Final = 100_000
YCSB_STEPS: Final = 50_000
YCSB_SKEW: Final = 0.99
YCSB_READS: Final = {"a": 0.5, "c": 1.0}
# Numbers of threads, with the length of a turn in `--seconds`: one round of hundreds of threads under
# Python's lock takes seconds.
YCSB_THREADS: Final = {1: 1, 32: 2, 600: 10}
# The seed's table: the ratios of capture on to capture off, with 600 threads.
SEED: Final = {
    ("put", "mean"): 5.9 / 5.2,
    ("put", "p99"): 15.3 / 14.9,
    ("get", "mean"): 0.0996 / 0.108,
    ("get", "p99"): 0.6778 / 0.7007,
}


def main() -> None:
    sections = {"catch-up": catch_up, "ways": ways, "tail": tail, "open-feed": open_feed, "capture": capture}
    parser = base_parser(__doc__, sections)
    parser.add_argument("--seconds", type=float, help="of each turn of writes; 1, with --quick 0.3")
    parser.add_argument("--tail-seconds", type=float, help="of the live tail; 5, with --quick 1")
    options = parse(parser)
    options.seconds = options.seconds or (0.3 if options.quick else 1.0)
    options.tail_seconds = options.tail_seconds or (1.0 if options.quick else 5.0)
    run_sections(options, sections)


# Catching up


def catch_up(directory: Path, options: argparse.Namespace) -> Iterator[Line]:
    """All changes from the first one on, read by one reader."""
    number = options.records
    records = make_pairs(number, seed=42)
    # Python's garbage collector stays on, as for users, but must not traverse the records of the benchmark.
    gc.collect()
    gc.freeze()
    with running([Embedded(), Served(), *installed_peers()], directory) as servers:
        sides: dict[str, Callable[[], float]] = {}
        for name, server in servers.items():
            tell(f"catch up: loading {name}")
            with within(MEASUREMENT_SECONDS_MAX, f"loading {name}"):
                server.load(records, BATCH)
            sides[name] = partial(measure_catch_up, server, number)
            if isinstance(server, SiteServer):
                sides[f"{name}, columns"] = partial(measure_columns, server, number)
        samples = in_turns("catch up", sides, options.repetitions)
        facts = {name: ", ".join(map(" ".join, server.facts().items())) for name, server in servers.items()}
    best = best_peer(samples)
    for name, rates in samples.items():
        limit = CHANGES_PER_SECOND.get(name)
        yield line(
            f"catch up on {number:,} changes",
            name,
            "changes/s",
            rates,
            target=None if limit is None else Target(limit=limit, unit="changes/s", at_least=True),
            against=best,
            remark=facts.get(name, "keys and values as stored, without an object for each change"),
        )
    for name in CHANGES_PER_SECOND:
        yield from ahead(name, samples)


# Three ways


class Past(NamedTuple):
    """A site, and for each of some numbers n the version after which exactly n changes were written."""

    site: Site
    since: dict[int, Version]


def ways(directory: Path, options: argparse.Namespace) -> Iterator[Line]:
    """The same changes from the log and by a scan, at a small and a large site; and changes from memory."""
    numbers = [options.records // part for part in (1_000, 100, 10)]
    yield from by_tail(directory / "tail", numbers[:2], options.repetitions)
    for keys in (options.records // 10, options.records):
        tell(f"ways: building two sites of {keys:,} keys")
        folder = directory / str(keys)
        with past(folder / "log", keys, numbers) as logged, past(folder / "scan", keys, numbers) as trimmed:
            trimmed.site.collect_garbage()
            host = host_of(trimmed.site)
            unlimited = ChangeReader(
                host.node, host.safe_points, host.catalog.is_live, scan_rate_bytes_max=None
            )
            for changes in numbers:
                sides: dict[str, Callable[[], float]] = {
                    Way.LOG: partial(catch_up_ms, host_of(logged.site).reader, logged, Way.LOG, changes),
                    Way.SCAN: partial(catch_up_ms, unlimited, trimmed, Way.SCAN, changes),
                }
                samples = in_turns(f"{changes:,} changes of {keys:,} keys", sides, options.repetitions)
                log = Measure.of(samples[Way.LOG])
                work = f"catch up on {changes:,} changes, {keys:,} keys"
                yield line(work, "by the log", "ms", samples[Way.LOG])
                yield line(work, "by a scan, unlimited", "ms", samples[Way.SCAN], against=("the log", log))
            samples = in_turns(
                f"limited scan of {keys:,} keys",
                {Way.SCAN: partial(catch_up_ms, host.reader, trimmed, Way.SCAN, changes)},
                1,
            )
            name = f"by a scan of {SCAN_RATE_BYTES_MAX // MIB} MiB/s"
            remark = "the default rate limit; the first second's worth of bytes is not delayed"
            yield line(work, name, "ms", samples[Way.SCAN], remark=remark)


@contextmanager
def past(path: Path, keys: int, numbers: Sequence[int]) -> Iterator[Past]:
    """Make a site of `keys` keys, wait for its flushes and compactions, and open it again."""
    # No background work: this benchmark calls `collect_garbage` itself.
    with floodmark.open(path, site=SITE, background=False) as site:
        since = write_past(site, make_pairs(keys, seed=42), numbers)
    with Database(path / "engine", FAMILIES) as engine:
        engine.settle()
    with floodmark.open(path, site=SITE, background=False, log_retention=timedelta(0)) as site:
        yield Past(site, since)


def write_past(site: Site, pairs: list[Pair], numbers: Sequence[int]) -> dict[int, Version]:
    """Write every pair, and some again; returns, for each n of `numbers`, the version before the last n."""
    namespace = site.create_namespace(NAMESPACE)
    write_all(namespace, pairs)
    random.Random(7).shuffle(pairs)
    changed = pairs[: max(numbers)]
    since: dict[int, Version] = {}
    for number in sorted(numbers, reverse=True):
        write_all(namespace, changed[number:])
        changed = changed[:number]
        site.sync()
        since[number] = site.resolved_version()
    write_all(namespace, changed)
    return since


def write_all(namespace: Namespace, pairs: Sequence[Pair]) -> None:
    for batch in in_batches(pairs):
        namespace.put_many(batch, durability="async")


def host_of(site: Site) -> EmbeddedHost:
    host = site.host
    assert isinstance(host, EmbeddedHost)
    return host


def catch_up_ms(reader: ChangeReader, past: Past, way: Way, changes: int) -> float:
    """The milliseconds to read the changes.  Raises PeerFailed unless the reader used `way` for all."""
    before = reader.statistics().changes[way]
    begun = perf_counter()
    seen = sum(len(batch.keys) for batch in reader.read(ChangesRequest(since=past.since[changes])))
    seconds = perf_counter() - begun
    by_this_way = reader.statistics().changes[way] - before
    if seen != changes or by_this_way != changes:
        raise PeerFailed(f"of {changes:,} changes {seen:,} were seen, and {by_this_way:,} by the {way}")
    return seconds * MILLISECONDS


def by_tail(path: Path, numbers: Sequence[int], repetitions: int) -> Iterator[Line]:
    """A following reader that is paused while the changes are written, and then reads them from memory."""
    with floodmark.open(path, site=SITE) as site:
        namespace = site.create_namespace(NAMESPACE)
        for number in numbers:
            side = {str(Way.TAIL): partial(tail_ms, site, namespace, make_pairs(number, seed=number))}
            samples = in_turns(f"{number:,} changes from memory", side, repetitions)
            yield line(f"catch up on {number:,} changes", "from the tail", "ms", samples[Way.TAIL])


def tail_ms(site: Site, namespace: Namespace, pairs: Sequence[Pair]) -> float:
    reader = host_of(site).reader
    before = reader.statistics().changes[Way.TAIL]
    batches: Any = reader.read(ChangesRequest(since=site.resolved_version(), follow=True))
    with closing(batches):
        next(batches)
        for batch in in_batches(pairs):
            namespace.put_many(batch)
        begun = perf_counter()
        seen = 0
        while seen < len(pairs):
            seen += len(next(batches).keys)
        seconds = perf_counter() - begun
    if reader.statistics().changes[Way.TAIL] - before != len(pairs):
        raise PeerFailed(f"{len(pairs):,} changes did not come from the tail: it holds fewer")
    return seconds * MILLISECONDS


# Live tail


def tail(directory: Path, options: argparse.Namespace) -> Iterator[Line]:
    """The time from the return of a write, and from its begin, until a reader has the change."""
    seeds = count()
    with (
        running([Embedded(), Served(), *installed_peers()], directory) as servers,
        ThreadPoolExecutor(1) as threads,
    ):
        sides = {
            name: partial(tail_of, server, threads if name == EMBEDDED else None, options.tail_seconds, seeds)
            for name, server in servers.items()
        }
        samples = in_turns("live tail", sides, options.repetitions)
    for what in ("p50", "p99"):
        for name, tails in samples.items():
            times = [getattr(each.since_returned, what) * MILLISECONDS for each in tails]
            limit = TAIL_MS.get(name) if what == "p99" else None
            target = None if limit is None else Target(limit=limit, unit="ms", strictly=True)
            yield line(f"write returned to change seen, {what}", name, "ms", times, target=target)
    begun = {name: [each.since_begun.p99 * MILLISECONDS for each in tails] for name, tails in samples.items()}
    for name, times in begun.items():
        best = best_peer(begun, highest=False)
        yield line("write begun to change seen, p99", name, "ms", times, against=best)
    for name, tails in samples.items():
        rates = [each.records_per_second for each in tails]
        yield line(f"  written, of {TAIL_RECORDS_PER_SECOND:,}", name, "records/s", rates)


def tail_of(server: Server, pool: ThreadPoolExecutor | None, seconds: float, seeds: Iterator[int]) -> Tail:
    """Measure a tail of new keys, sorted within each batch, as the changes of a commit are."""
    pairs = make_pairs(int(seconds * TAIL_RECORDS_PER_SECOND), seed=next(seeds))
    records = [pair for batch in in_batches_of(TAIL_BATCH, pairs) for pair in sorted(batch)]
    return measure_tail(server.writer, server.tail, records, writer_pool=pool)


# The cost of an open feed

NO_FEED, FEED, FEED_COLUMNS = "no feed", "feed open", "feed open, columns"

FEEDS: Final[Mapping[str, Callable[[Site], AbstractContextManager[None]]]] = {
    NO_FEED: lambda _: nullcontext(),
    FEED: lambda site: following(site.changes(NAMESPACE, since="now", follow=True, resolved_markers=True)),
    FEED_COLUMNS: lambda site: following(
        site.host.changes(ChangesRequest(since=site.resolved_version(), follow=True))
    ),
}


def open_feed(directory: Path, options: argparse.Namespace) -> Iterator[Line]:
    """Writes to one site, with and without a reader that follows in the same process."""
    pairs = make_pairs(FEED_PAIRS, seed=42)
    with floodmark.open(directory / "site", site=SITE) as site:
        namespace = site.create_namespace(NAMESPACE)
        works: dict[str, Callable[[float], float]] = {
            "put, fsync, 1 thread": partial(puts_per_second, namespace.put, pairs, 1),
            "put, fsync, 8 threads": partial(puts_per_second, namespace.put, pairs, 8),
            f"put_many of {BATCH:,}, async": partial(batches_per_second, namespace, in_batches(pairs)),
        }
        for work, write in works.items():
            sides = {name: partial(write_beside, site, name, write, options.seconds / 2) for name in FEEDS}
            turns = in_turns(f"open feed: {work}", sides, options.repetitions * FEED_TURNS)
            samples = {name: means_of_turns(rates) for name, rates in turns.items()}
            for name, rates in samples.items():
                yield line(work, name, "calls/s", rates)
            for name in (FEED, FEED_COLUMNS):
                both = zip(samples[NO_FEED], samples[name], strict=True)
                costs = [(alone / beside - 1) * 100 for alone, beside in both]
                target = Target(limit=FEED_COST_PERCENT, unit="%", strictly=True) if name == FEED else None
                yield line("  time that the feed adds", name, "%", costs, target=target)


def means_of_turns(rates: Sequence[float]) -> list[float]:
    """The harmonic mean over the turns of each repetition."""
    return [harmonic_mean(rates[first : first + FEED_TURNS]) for first in range(0, len(rates), FEED_TURNS)]


def write_beside(site: Site, feed: str, write: Callable[[float], float], seconds: float) -> float:
    with FEEDS[feed](site):
        write(FEED_WARM_UP_SECONDS)
        return write(seconds)


def batches_per_second(namespace: Namespace, batches: Sequence[Sequence[Pair]], seconds: float) -> float:
    begun = perf_counter()
    for done, batch in enumerate(cycle(batches), start=1):
        namespace.put_many(batch, durability="async")
        elapsed = perf_counter() - begun
        if elapsed >= seconds:
            return done / elapsed
    raise AssertionError("there were no batches")


# Capture on and off

OFF, ON = "capture off", "capture on"


class Step(NamedTuple):
    """A put, or a get if there is no value."""

    key: bytes
    value: bytes | None


class Latencies(NamedTuple):
    """The seconds of each put and of each get."""

    put: list[float]
    get: list[float]


def capture(directory: Path, options: argparse.Namespace) -> Iterator[Line]:
    """YCSB's workloads A and C on a site, and on one whose engine drops the rows of the change log."""
    pairs = make_pairs(min(options.records, YCSB_KEYS_MAX), seed=42)
    with stored_in(RocksEngine, directory / "on") as on, stored_in(LoglessEngine, directory / "off") as off:
        sites = {OFF: off, ON: on}
        for namespace in sites.values():
            write_all(namespace, pairs)
        for workload, reads in YCSB_READS.items():
            steps = plan(pairs, reads)
            for threads, turn in YCSB_THREADS.items():
                sides = {
                    name: partial(run_steps, namespace, steps, threads, turn * options.seconds)
                    for name, namespace in sites.items()
                }
                name = f"YCSB {workload}, {threads} thread{'s' * (threads > 1)}"
                samples = in_turns(f"capture: {name}", sides, options.repetitions)
                for operation in ("put", "get") if reads < 1 else ("get",):
                    yield from compare_capture(name, operation, threads, samples)
    yield line(
        "  in both: encoding a log row",
        "both",
        "µs",
        [encoding_us(*pairs[0])],
        remark="with capture off, the same code encodes and counts the log row and only its write to RocksDB "
        "is left out, so the ratios above do not include this cost",
    )


def plan(pairs: Sequence[Pair], reads: float) -> list[Step]:
    """Puts and gets of keys with a zipfian distribution; `reads` is the share of gets."""
    randomness = random.Random(7)
    weights = list(accumulate(1 / rank**YCSB_SKEW for rank in range(1, len(pairs) + 1)))
    chosen = randomness.choices(pairs, cum_weights=weights, k=YCSB_STEPS)
    return [Step(key, None if randomness.random() < reads else value) for key, value in chosen]


def run_steps(namespace: Namespace, steps: Sequence[Step], threads: int, seconds: float) -> Latencies:
    """Run threads over the steps for `seconds`, each from another place on; returns the latencies."""
    started: list[float] = []
    barrier = Barrier(threads, action=lambda: started.append(perf_counter()))

    def work(first: int) -> Latencies:
        times = Latencies([], [])
        barrier.wait(ANSWER_SECONDS_MAX)
        deadline = started[0] + seconds
        for number in count(first):
            key, value = steps[number % len(steps)]
            begun = perf_counter()
            if value is None:
                namespace.get(key)
            else:
                namespace.put(key, value)
            ended = perf_counter()
            (times.get if value is None else times.put).append(ended - begun)
            if ended >= deadline:
                break
        return times

    with ThreadPoolExecutor(threads) as pool:
        done = list(pool.map(work, [number * len(steps) // threads for number in range(threads)]))
    return Latencies(*([second for times in each for second in times] for each in zip(*done, strict=True)))


def compare_capture(
    work: str, operation: str, threads: int, samples: Mapping[str, Sequence[Latencies]]
) -> Iterator[Line]:
    latencies = {
        name: [Latency.of(getattr(times, operation)) for times in repetitions]
        for name, repetitions in samples.items()
    }
    for what in ("mean", "p99"):
        times = {
            name: [getattr(latency, what) * MICROSECONDS for latency in each]
            for name, each in latencies.items()
        }
        off = Measure.of(times[OFF])
        yield line(f"{work}: {operation}, {what}", OFF, "µs", times[OFF])
        compared = line(f"{work}: {operation}, {what}", ON, "µs", times[ON], against=("off", off))
        if threads == max(YCSB_THREADS):
            compared = replace(compared, target=f"the seed: {SEED[operation, what]:.3f} x off")
        yield compared


def encoding_us(key: bytes, value: bytes) -> float:
    """The microseconds that a put spends on its change-log row before it writes the row to RocksDB."""
    begun = perf_counter()
    for version in range(1, YCSB_STEPS + 1):
        tally_one(version, 1, key, value)
        encode_log_key(1, version)
        encode_single(key, value)
    return (perf_counter() - begun) / YCSB_STEPS * MICROSECONDS


if __name__ == "__main__":
    main()
