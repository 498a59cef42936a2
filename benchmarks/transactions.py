"""Serializable transactions beside plain puts, and beside PostgreSQL.

    make bench-transactions                              all of it, on a quiet machine: some minutes
    make bench-transactions ARGS="--quick --only one-node"    a look

    one-node    one RocksDB: read a key and write it, durably, beside a plain put, by 1 and by 32 threads
    wire        the same over the wire by 32 clients, beside psycopg with SERIALIZABLE; and a transaction of
                two reads at a fresh and at a cached read version
    contention  32 clients that read and write one of 10 keys: commits, conflicts, the slowest client

Clients are threads of this process.
"""

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from itertools import count
from pathlib import Path
from random import Random
from statistics import median, quantiles
from threading import Barrier
from time import perf_counter
from typing import Any, Final

import psycopg

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.atomic import held
from benchmarks.floodmark_peer import Line, Served, base_parser, in_turns, line, parse, run_sections
from benchmarks.harness import NAMESPACE, Measure, Target, make_pairs
from benchmarks.nodes import database

import floodmark
from floodmark import Namespace, Site, Transaction

THREADS: Final = (1, 32)
CLIENTS: Final = 32
HOT_KEYS: Final = 10
RECORDS_MAX: Final = 20_000
# The slowest client's share of the median client's commits, at least.
FAIR_SHARE: Final = 0.2

Call = Callable[[int], object]


@dataclass(frozen=True)
class Run:
    """What some clients did in a turn: calls of each, and the time of each call."""

    calls: Sequence[int]
    seconds: float
    latencies: Sequence[float]

    @property
    def rate(self) -> float:
        """Calls a second, of all clients."""
        return sum(self.calls) / self.seconds


def main() -> None:
    sections = {"one-node": one_node, "wire": wire, "contention": contention}
    parser = base_parser(__doc__, sections)
    parser.add_argument("--seconds", type=float, help="of calls in a turn; 5, with --quick 1")
    options = parse(parser)
    options.seconds = options.seconds or (1.0 if options.quick else 5.0)
    run_sections(options, sections)


def run_clients(clients: int, make_call: Callable[[], Call], seconds: float) -> Run:
    """Let clients call for some seconds; each makes its call, and gets a number for each."""
    numbers, barrier = count(), Barrier(clients)

    def work(_: int) -> tuple[int, list[float]]:
        call, latencies = make_call(), []
        barrier.wait()
        end = perf_counter() + seconds
        while (begun := perf_counter()) < end:
            call(next(numbers))
            latencies.append(perf_counter() - begun)
        return len(latencies), latencies

    with ThreadPoolExecutor(clients) as pool:
        done = list(pool.map(work, range(clients)))
    return Run([calls for calls, _ in done], seconds, [each for _, some in done for each in some])


def write_over(transaction: Transaction, users: Namespace, key: bytes) -> None:
    """Read a key and write it."""
    value = transaction.get(users, key) or b""
    transaction.put(users, key, value[::-1])


# Sections


def one_node(directory: Path, options: argparse.Namespace) -> Iterator[Line]:
    """Embedded: the time and the rate of a transaction beside a put's."""
    pairs = make_pairs(min(options.records, RECORDS_MAX), seed=42)
    with floodmark.open(directory / "site", site="bench") as site:
        users = site.create_namespace(NAMESPACE)
        users.put_many(pairs)

        def put(number: int) -> None:
            key, value = pairs[number % len(pairs)]
            users.put(key, value)

        def transact(number: int) -> None:
            site.run_transaction(partial(write_over, users=users, key=pairs[number % len(pairs)][0]))

        for threads in THREADS:
            sides: dict[str, Callable[[], float]] = {
                name: partial(rate_of, threads, call, options.seconds)
                for name, call in (("put", put), ("transaction", transact))
            }
            samples = in_turns(f"{threads} threads", sides, options.repetitions)
            against = "put", Measure.of(samples["put"])
            work = f"read and write a key, {threads} threads"
            yield line(work, "put", "calls/s", samples["put"])
            target = Target(limit=0.6 if threads > 1 else 1 / 1.5, unit="x put", at_least=True)
            yield held(line(work, "transaction", "calls/s", samples["transaction"], against=against), target)


def rate_of(clients: int, call: Call, seconds: float) -> float:
    return run_clients(clients, lambda: call, seconds).rate


def wire(directory: Path, options: argparse.Namespace) -> Iterator[Line]:
    """Over the wire: beside PostgreSQL, and with cached read versions."""
    pairs = make_pairs(min(options.records, RECORDS_MAX), seed=42)
    (directory / "postgres").mkdir()
    (directory / "site").mkdir()
    with database(directory / "postgres") as url, Served().running(directory / "site") as server:
        server.fill(pairs, 1_000)
        fill_table(url, pairs)
        sides: dict[str, Callable[[], float]] = {
            "psycopg, SERIALIZABLE": lambda: (
                run_clients(CLIENTS, lambda: update_in(url, pairs), options.seconds).rate
            ),
            "floodmark": lambda: (
                run_clients(CLIENTS, lambda: transact_at(server.opened, pairs), options.seconds).rate
            ),
        }
        samples = in_turns(f"read and write, {CLIENTS} clients", sides, options.repetitions)
        against = "psycopg", Measure.of(samples["psycopg, SERIALIZABLE"])
        work = f"read and write a key, {CLIENTS} clients"
        yield line(work, "psycopg, SERIALIZABLE", "calls/s", samples["psycopg, SERIALIZABLE"])
        yield held(
            line(work, "floodmark", "calls/s", samples["floodmark"], against=against),
            Target(limit=1.0, unit="x psycopg", at_least=True, strictly=True),
        )
        with server.opened() as site:
            yield from two_reads(site, pairs, options)


def two_reads(
    site: Site, pairs: Sequence[tuple[bytes, bytes]], options: argparse.Namespace
) -> Iterator[Line]:
    """The mean time of a transaction that reads two keys, at fresh and at cached versions."""
    users = site.namespace(NAMESPACE)

    def read(kind: Any, number: int) -> None:
        with site.transaction(read_version=kind) as transaction:
            for offset in range(2):
                transaction.get(users, pairs[(number + offset) % len(pairs)][0])

    def mean_us(kind: str) -> float:
        return 1e6 / run_clients(1, lambda: partial(read, kind), options.seconds).rate

    sides = {kind: partial(mean_us, kind) for kind in ("fresh", "cached")}
    samples = in_turns("two reads", sides, options.repetitions)
    yield line("two reads", "fresh version", "us", samples["fresh"])
    against = "fresh", Measure.of(samples["fresh"])
    yield held(
        line("two reads", "cached version", "us", samples["cached"], against=against),
        Target(limit=0.75, unit="x fresh"),
    )


def transact_at(opened: Callable[[], Any], pairs: Sequence[tuple[bytes, bytes]]) -> Call:
    """A client of its own; its connection ends with the process."""
    site = opened()
    users = site.namespace(NAMESPACE)

    def call(number: int) -> None:
        site.run_transaction(partial(write_over, users=users, key=pairs[number % len(pairs)][0]))

    return call


def fill_table(url: str, pairs: Sequence[tuple[bytes, bytes]]) -> None:
    with closing(psycopg.connect(url, autocommit=True)) as connection, connection.cursor() as cursor:
        cursor.execute("CREATE TABLE users (key bytea PRIMARY KEY, value bytea)")
        cursor.executemany("INSERT INTO users VALUES (%s, %s) ON CONFLICT DO NOTHING", pairs)


def update_in(url: str, pairs: Sequence[tuple[bytes, bytes]]) -> Call:
    """Read a row and write it, in a serializable transaction that is done again after a conflict."""
    connection = psycopg.connect(url)
    connection.isolation_level = psycopg.IsolationLevel.SERIALIZABLE

    def call(number: int) -> None:
        key = pairs[number % len(pairs)][0]
        while True:
            try:
                with connection.transaction():
                    row = connection.execute("SELECT value FROM users WHERE key = %s", [key]).fetchone()
                    assert row is not None
                    connection.execute("UPDATE users SET value = %s WHERE key = %s", [row[0][::-1], key])
            except psycopg.errors.SerializationFailure:
                continue
            return

    return call


def contention(directory: Path, options: argparse.Namespace) -> Iterator[Line]:
    """Many clients on few keys."""
    with floodmark.open(directory / "hot", site="bench") as site:
        users = site.create_namespace(NAMESPACE)
        users.put_many({b"%d" % number: b"0" for number in range(HOT_KEYS)})
        attempts = count()

        def make_call() -> Call:
            random = Random(0)

            def add(transaction: Transaction) -> None:
                next(attempts)
                key = b"%d" % random.randrange(HOT_KEYS)
                transaction.put(users, key, b"%d" % (int(transaction.get(users, key)) + 1))

            return lambda _: site.run_transaction(add)

        runs: list[Run] = []
        shares: list[float] = []
        for _ in range(options.repetitions):
            before = next(attempts)
            runs.append(run_clients(CLIENTS, make_call, options.seconds))
            shares.append(1 - sum(runs[-1].calls) / (next(attempts) - before - 1))
        work = f"{CLIENTS} clients on {HOT_KEYS} keys"
        yield line(work, "commits", "calls/s", [run.rate for run in runs])
        yield line(work, "share of conflicts", "", shares)
        yield line(work, "p99", "ms", [1e3 * quantiles(run.latencies, n=100)[-1] for run in runs])
        slowest = [min(run.calls) / median(run.calls) for run in runs]
        target = Target(limit=FAIR_SHARE, unit="x the median", at_least=True)
        yield line(work, "slowest client", "x", slowest, target=target)
        total = sum(int(value) for _, value in users.scan())
        assert total == sum(sum(run.calls) for run in runs), "an increment was lost"


if __name__ == "__main__":
    main()
