"""The server against Redis and PostgreSQL, over loopback, each durable.

    make bench-server                                   all of it, on a quiet machine: some ten minutes
    make bench-server ARGS="--quick --only points"      a look

Each section has its own directory and servers.  peers/README.md describes the setup of the peers.

    points     get and synced put of single records, by 1 and by 32 clients in other processes
    resp       get, synced put and a mix of four gets to a put, by 1, 32 and 200 clients, alone and in
               pipelines of 16: redis-py on Redis and on the RESP port of the site, psycopg on PostgreSQL;
               and get and set by redis-benchmark
    streams    loading durably in batches of 1,000, and scanning
    followers  put by 1 client, while 1,000 readers follow a namespace without writes
"""

import argparse
import csv
import gc
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import replace
from functools import partial
from itertools import count, product
from pathlib import Path
from time import perf_counter
from typing import Any, Final

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.floodmark_peer import (
    MEASUREMENT_SECONDS_MAX,
    QUICK_RECORDS,
    SERVED,
    Line,
    Served,
    ServedSite,
    base_parser,
    best_peer,
    in_turns,
    line,
    parse,
    run_sections,
    running,
    within,
)
from benchmarks.harness import BATCH, MICROSECONDS, Measure, Pair, Target, make_pairs, tell
from benchmarks.peers import (
    PEERS,
    KeyServer,
    Peer,
    PeerFailed,
    Points,
    Server,
    installed_peers,
    measure_load,
    measure_points,
)
from benchmarks.peers.base import find_program
from benchmarks.peers.measure import PROCESSES, Operation, client_processes
from benchmarks.peers.redis import RedisServer

from floodmark.site.connecting import connect

STORES: Final = ("postgres", "redis")
CLIENTS: Final = (1, 32)
OPERATIONS: Final[tuple[Operation, ...]] = ("get", "put")
P99_US_MAX: Final = 10_000
FOLLOWERS: Final = 1_000
IDLE_NAMESPACE: Final = "idle"
OVER_RESP: Final = "floodmark over RESP"
# Limit for a turn of `resp`, which has many measurements.
RESP_SECONDS_MAX: Final = 1.0
RESP_CLIENTS: Final = (1, 32, 200)
RESP_PIPELINES: Final = (1, 16)
RESP_OPERATIONS: Final[tuple[Operation, ...]] = ("get", "put", "mix")
# The commands of redis-benchmark, and the least ratio to Redis for each.
RESP_TARGETS: Final = {"get": 0.7, "set": 1.5}
REDIS_BENCHMARK_CLIENTS: Final = 32
REDIS_BENCHMARK_CALLS: Final = 20_000
# Records of the point operations; more would only take longer to fill.
POINT_RECORDS_MAX: Final = 100_000


def main() -> None:
    sections = {"points": points, "resp": resp, "streams": streams, "followers": followers}
    parser = base_parser(__doc__, sections)
    parser.add_argument("--seconds", type=float, help="of point operations in a turn; 5, with --quick 3")
    options = parse(parser)
    options.seconds = options.seconds or (3.0 if options.quick else 5.0)
    run_sections(options, sections)


def sides() -> list[Peer]:
    return [Served(), *installed_peers([peer for peer in PEERS if peer.name in STORES])]


# Point operations


def points(directory: Path, options: argparse.Namespace) -> Iterator[Line]:
    """Single gets and puts; a put returns when it is on disk."""
    pairs = make_pairs(min(options.records, POINT_RECORDS_MAX), seed=42)
    with running(sides(), directory) as servers:
        stores = {name: server for name, server in servers.items() if isinstance(server, KeyServer)}
        for name, server in stores.items():
            tell(f"points: filling {name}")
            with within(MEASUREMENT_SECONDS_MAX, f"filling {name}"):
                server.fill(pairs, BATCH)
        for clients in CLIENTS:
            for operation in OPERATIONS:
                measures = {
                    name: partial(
                        measure_points,
                        server.client,
                        operation,
                        pairs,
                        clients=clients,
                        seconds=options.seconds,
                    )
                    for name, server in stores.items()
                }
                work = f"{operation}, {clients} client{'s' * (clients > 1)}"
                yield from compare_points(work, in_turns(work, measures, options.repetitions))


def compare_points(work: str, samples: Mapping[str, Sequence[Points]]) -> Iterator[Line]:
    for what in ("mean", "p99"):
        times = {
            name: [getattr(each.latency, what) * MICROSECONDS for each in points]
            for name, points in samples.items()
        }
        best = best_peer(times, highest=False)
        for name, numbers in times.items():
            has_target = name == SERVED and what == "p99"
            target = Target(limit=P99_US_MAX, unit="µs", strictly=True) if has_target else None
            yield line(f"{work}: {what}", name, "µs", numbers, target=target, against=best)
    rates = {name: [each.per_second for each in points] for name, points in samples.items()}
    best = best_peer(rates)
    for name, numbers in rates.items():
        yield line(f"{work}: together", name, "calls/s", numbers, against=best)


# RESP


def resp(directory: Path, options: argparse.Namespace) -> Iterator[Line]:
    """Point operations over RESP; a put is answered when it is on disk."""
    pairs = make_pairs(QUICK_RECORDS, seed=42)
    seconds = min(options.seconds, RESP_SECONDS_MAX)
    with running(sides(), directory) as servers, client_processes(PROCESSES) as pool:
        served = servers.pop(SERVED)
        assert isinstance(served, ServedSite)
        stores: dict[str, KeyServer] = {OVER_RESP: RedisServer(port=served.resp_port)}
        stores |= {name: server for name, server in servers.items() if isinstance(server, KeyServer)}
        for name, server in stores.items():
            tell(f"resp: filling {name}")
            server.fill(pairs, BATCH)
        yield from compare_redis_benchmark(stores, options)
        for clients, pipeline, operation in product(RESP_CLIENTS, RESP_PIPELINES, RESP_OPERATIONS):
            measures = {
                name: partial(
                    measure_points,
                    server.client,
                    operation,
                    pairs,
                    clients=clients,
                    seconds=seconds * (1 + clients / 100),
                    pipeline=pipeline,
                    pool=pool,
                )
                for name, server in stores.items()
            }
            work = f"{operation}, {clients} client{'s' * (clients > 1)}, pipeline {pipeline}"
            samples = in_turns(work, measures, options.repetitions)
            rates = {name: [each.per_second for each in points] for name, points in samples.items()}
            yield from compare(f"{work}: together", "calls/s", rates)
            for what in ("p50", "p99"):
                times = {
                    name: [getattr(each.latency, what) * MICROSECONDS for each in points]
                    for name, points in samples.items()
                }
                yield from compare(f"{work}: {what}", "µs", times, highest=False)


def compare(
    work: str, unit: str, samples: Mapping[str, Sequence[float]], *, highest: bool = True
) -> Iterator[Line]:
    best = best_peer(samples, highest=highest)
    for name, numbers in samples.items():
        yield line(work, name, unit, numbers, against=best)


def compare_redis_benchmark(stores: Mapping[str, KeyServer], options: argparse.Namespace) -> Iterator[Line]:
    """The two ratios to Redis that have a target."""
    program = find_program("redis-benchmark")
    if program is None:
        raise PeerFailed(
            "redis-benchmark is not installed: apt-get install --no-install-recommends redis-tools"
        )
    ports = {name: server.port for name, server in stores.items() if isinstance(server, RedisServer)}
    number = REDIS_BENCHMARK_CALLS // 10 if options.quick else REDIS_BENCHMARK_CALLS
    for command, limit in RESP_TARGETS.items():
        measures = {
            name: partial(run_redis_benchmark, program, port, command, number) for name, port in ports.items()
        }
        work = f"redis-benchmark, {command}, {REDIS_BENCHMARK_CLIENTS} clients"
        samples = in_turns(work, measures, options.repetitions)
        target = Target(limit=limit, unit="x Redis", at_least=True)
        for each in compare(work, "calls/s", samples):
            if each.side == OVER_RESP and each.ratio is not None:
                yield replace(each, target=str(target), verdict=target.verdict(each.ratio))
            else:
                yield each


def run_redis_benchmark(program: Path, port: int, command: str, number: int) -> float:
    """Run redis-benchmark; returns calls a second."""
    options = {"-p": port, "-t": command, "-c": REDIS_BENCHMARK_CLIENTS, "-n": number, "-r": QUICK_RECORDS}
    arguments = [str(part) for pair in options.items() for part in pair]
    found = subprocess.run(
        [program, *arguments, "--csv"],
        check=False,
        capture_output=True,
        text=True,
        timeout=MEASUREMENT_SECONDS_MAX,
    )
    rows = [*csv.DictReader(found.stdout.splitlines())]
    if len(rows) != 1:
        raise PeerFailed(f"redis-benchmark failed: {found.stderr[-500:]}")
    return float(rows[0]["rps"])


# Streams


def streams(directory: Path, options: argparse.Namespace) -> Iterator[Line]:
    """Durable loads, pipelined as each client does it best, and ordered scans of the site."""
    seeds = count()
    with running(sides(), directory) as servers:
        loads = {name: partial(load_new, server, options.records, seeds) for name, server in servers.items()}
        rates = in_turns("load", loads, options.repetitions)
        served = servers[SERVED]
        assert isinstance(served, ServedSite)
        expected = options.records * options.repetitions
        scans: dict[str, Callable[[], float]] = {SERVED: partial(rows_per_second, served, expected)}
        scanned = in_turns("scan", scans, options.repetitions)
    best = best_peer(rates)
    how = {
        SERVED: "Namespace.writer, many batches on their way",
        "postgres": "COPY, a transaction a batch",
        "redis": "XADD, a pipelined transaction a batch",
    }
    for name, numbers in rates.items():
        work = f"load {options.records:,} records"
        yield line(work, name, "records/s", numbers, against=best, remark=how[name])
    yield line(f"scan {expected:,} rows", SERVED, "rows/s", scanned[SERVED])


def load_new(server: Server, number: int, seeds: Iterator[int]) -> float:
    """Load new keys; returns records a second."""
    records: list[Pair] = make_pairs(number, seed=next(seeds))
    # Python's garbage collector stays on, as for users, but must not traverse the records of the benchmark.
    gc.collect()
    gc.freeze()
    return measure_load(server, records, BATCH)


def rows_per_second(server: ServedSite, expected: int) -> float:
    begun = perf_counter()
    seen = server.scan()
    seconds = perf_counter() - begun
    if seen != expected:
        raise PeerFailed(f"the scan gave {seen:,} rows of {expected:,}")
    return seen / seconds


# Followers


def followers(directory: Path, options: argparse.Namespace) -> Iterator[Line]:
    """Puts to one namespace, with and without readers that follow another one."""
    pairs = make_pairs(1_000, seed=42)
    # One caller may open only half of the streams that a server allows.
    callers = ("first", "second")
    with Served(callers).running(directory) as server:
        with server.opened() as site:
            site.create_namespace(IDLE_NAMESPACE)
        put = partial(measure_points, server.client, "put", pairs, clients=1, seconds=options.seconds)

        def put_beside() -> Points:
            with ExitStack() as stack:
                for caller in callers:
                    site = stack.enter_context(connect(server.url, token=caller))
                    for _ in range(FOLLOWERS // len(callers)):
                        stream: Any = site.changes(IDLE_NAMESPACE, since="now", follow=True)
                        stack.enter_context(closing(stream))
                return put()

        sides: dict[str, Callable[[], Points]] = {"alone": put, f"beside {FOLLOWERS:,}": put_beside}
        samples = in_turns("put", sides, options.repetitions)
    for what, limit in (("p50", 1.2), ("p99", None)):
        sampled = {
            name: [getattr(each.latency, what) * MICROSECONDS for each in points]
            for name, points in samples.items()
        }
        alone = Measure.of(sampled["alone"])
        for name, times in sampled.items():
            target = None if name == "alone" or limit is None else Target(limit=limit, unit="x alone")
            yield replace(
                line(f"put, 1 client: {what}", name, "µs", times, against=("alone", alone)),
                target="" if target is None else str(target),
                verdict="" if target is None else target.verdict(Measure.of(times).median / alone.median),
            )


if __name__ == "__main__":
    main()
