"""Serializable transactions beside plain puts, and beside PostgreSQL.

    make bench-transactions                              all of it, on a quiet machine: some minutes
    make bench-transactions ARGS="--quick --only one-node"    a look

    one-node    one RocksDB: read a key and write it, durably, beside a plain put, by 1 and by 32 threads
    wire        the same over the wire by 32 clients, beside psycopg with SERIALIZABLE; and a transaction of
                two reads whose read version takes a call of its own, comes with the first read (the default
                at one node), or is cached
    contention  32 clients that read and write one of 10 keys: commits, conflicts, the slowest client
    nodes       3 nodes on an engine in memory: the round trips of a commit, and of two reads at a fresh and
                at a cached version, computed from the time: each message takes 1 ms, and nothing else takes
                time (a millisecond lasts 100)

Clients are threads of this process.
"""

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from itertools import count
from pathlib import Path
from random import Random
from statistics import median, quantiles
from threading import Barrier
from time import perf_counter, sleep
from typing import Any, Final
from unittest.mock import patch

import psycopg

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.floodmark_peer import Line, Served, held, in_turns, line, run_timed
from benchmarks.harness import NAMESPACE, Measure, Target, make_pairs
from benchmarks.nodes import database

import floodmark
from floodmark import Namespace, Site, Transaction
from floodmark.engine import MemoryEngine
from floodmark.host.nodes import NodeHost, make_node
from floodmark.partition import FAMILIES
from floodmark.server import ServerOptions, serve
from floodmark.site import open_engine
from floodmark.site.connecting import connect
from floodmark.wire import Connection

THREADS: Final = (1, 32)
CLIENTS: Final = 32
HOT_KEYS: Final = 10
RECORDS_MAX: Final = 20_000
NODES: Final = 3
DELAY_SECONDS: Final = 0.001
# Real seconds in a second of `nodes`.
SLOWNESS: Final = 100
# The slowest client's share of the median client's commits, at least.
FAIR_SHARE: Final = 0.2

Call = Callable[[int], object]


@dataclass(frozen=True)
class Run:
    """The result of a turn: the calls of each client, and the seconds of each call."""

    calls: Sequence[int]
    seconds: float
    latencies: Sequence[float]

    @property
    def rate(self) -> float:
        """Calls a second, of all clients."""
        return sum(self.calls) / self.seconds


def main() -> None:
    run_timed(__doc__, {"one-node": one_node, "wire": wire, "contention": contention, "nodes": nodes})


def run_clients(clients: int, make_call: Callable[[], Call], seconds: float) -> Run:
    """Run clients for `seconds`; each repeats a call that it gets from `make_call`, with a new number."""
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
    """Embedded: the rate of transactions beside that of puts."""
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
            yield from round_trips(site, pairs[0][0])
            yield from two_reads(site, pairs, options)


def round_trips(site: Site, key: bytes) -> Iterator[Line]:
    """Count the calls of a transaction that reads a key and writes it."""
    users, called = site.namespace(NAMESPACE), count()
    # Fetch the partition map first: a client does so once.
    users.get(key)
    with before_calls(partial(next, called)):
        site.run_transaction(partial(write_over, users=users, key=key))
    target = Target(limit=2, unit="round trips")
    yield line("read and write a key", "floodmark", "round trips", [next(called)], target=target)


def two_reads(
    site: Site, pairs: Sequence[tuple[bytes, bytes]], options: argparse.Namespace
) -> Iterator[Line]:
    """The mean time of a transaction that reads two keys, by how it gets its read version."""
    users = site.namespace(NAMESPACE)

    def read(kind: Any, number: int) -> None:
        with site.transaction(read_version="cached" if kind == "cached" else "fresh") as transaction:
            if kind == "alone":
                assert transaction.read_version
            for offset in range(2):
                transaction.get(users, pairs[(number + offset) % len(pairs)][0])

    def mean_us(kind: str) -> float:
        return 1e6 / run_clients(1, lambda: partial(read, kind), options.seconds).rate

    sides = {kind: partial(mean_us, kind) for kind in ("alone", "fresh", "cached")}
    samples = in_turns("two reads", sides, options.repetitions)
    yield line("two reads", "version asked for alone", "us", samples["alone"])
    against = "alone", Measure.of(samples["alone"])
    yield line("two reads", "with the first read", "us", samples["fresh"], against=against)
    yield held(
        line("two reads", "cached version", "us", samples["cached"], against=against),
        Target(limit=0.75, unit="x alone"),
    )


def transact_at(opened: Callable[[], Any], pairs: Sequence[tuple[bytes, bytes]]) -> Call:
    """The call of a new client, which reads and writes a key; its connection ends with the process."""
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
    """A call that reads a row and writes it, in a serializable transaction that is retried on conflict."""
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
        attempts, clients = count(), count()

        def add(transaction: Transaction, key: bytes) -> None:
            next(attempts)
            transaction.put(users, key, b"%d" % (int(transaction.get(users, key)) + 1))

        def make_call() -> Call:
            random = Random(next(clients))
            return lambda _: site.run_transaction(partial(add, key=b"%d" % random.randrange(HOT_KEYS)))

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


# Several nodes


def nodes(_: Path, options: argparse.Namespace) -> Iterator[Line]:
    """The round trips of commits, beside the protocol's minimum: to a node, lock, validate, apply."""
    with (
        node_sites() as (url, keys),
        before_calls(partial(sleep, SLOWNESS * DELAY_SECONDS)),
        connect(url, slow_read_version=timedelta(minutes=1)) as site,
    ):
        users = site.namespace(NAMESPACE)

        def trips_since(begun: float) -> float:
            return round((perf_counter() - begun) / (SLOWNESS * DELAY_SECONDS))

        def commit(written: Sequence[bytes], read: Sequence[bytes] = ()) -> float:
            with site.transaction() as transaction:
                transaction.get_many(users, read)
                for key in written:
                    transaction.put(users, key, b"1")
                begun = perf_counter()
                transaction.commit()
                return trips_since(begun)

        def read(kind: Any) -> float:
            begun = perf_counter()
            with site.transaction(read_version=kind, max_staleness=timedelta(minutes=1)) as transaction:
                for key in keys[:2]:
                    transaction.get(users, key)
            return trips_since(begun)

        works = {
            "write one partition": (partial(commit, keys[:1]), 1, None),
            "write two partitions": (partial(commit, keys[:2]), 3, Target(limit=3, unit="round trips")),
            "write three partitions": (partial(commit, keys), 3, None),
            "read and write two partitions": (partial(commit, keys[:2], keys[:2]), 4, None),
            "read and write three partitions": (partial(commit, keys, keys), 4, None),
        }
        for work, (measure, least, target) in works.items():
            measure()
            samples = [measure() for _ in range(options.repetitions)]
            yield line(work, "protocol's minimum", "round trips", [least])
            yield line(work, "commit", "round trips", samples, target=target)
        for kind in ("fresh", "cached"):
            samples = [read(kind) for _ in range(options.repetitions)]
            yield line("read two partitions", f"{kind} version", "round trips", samples)


class LastingEngine(MemoryEngine):
    """An engine that ignores `close`, because the other nodes still use it."""

    def close(self) -> None:
        pass


@contextmanager
def node_sites() -> Iterator[tuple[str, list[bytes]]]:
    """Run nodes of a site in this process, each with a server; yields their URL, and a key of each node."""
    engine = LastingEngine(FAMILIES)
    keys = [bytes([number * 80]) for number in range(NODES)]
    with ExitStack() as stack:
        hosts: list[NodeHost] = []
        urls: list[str] = []
        for number in range(1, NODES + 1):
            make_host: Any = partial(make_node, node=number)
            site = open_engine(engine, site="bench", make_host=make_host)
            server = stack.enter_context(serve(site, "127.0.0.1:0", ServerOptions(resp_listen="127.0.0.1:0")))
            assert isinstance(site.host, NodeHost)
            hosts.append(site.host)
            urls.append(server.url.removeprefix("grpc://"))
            if number == 1:
                site.create_namespace(NAMESPACE)
                for key in keys[1:]:
                    site.split(NAMESPACE, key)
        for host in hosts * 2:
            host.beat()
            host.watch()
        first = hosts[0].shared.node
        for number, partition in enumerate(list(first.map.partitions)[1:], 2):
            first.reshaping.move(partition.id, number)
        for host in hosts:
            host.watch()
        yield f"grpc://{','.join(urls)}", keys


@contextmanager
def before_calls(act: Callable[[], object]) -> Iterator[None]:
    """Call `act` before each call to a server."""
    invoke = Connection.invoke

    def invoke_after(connection: Connection, method: Any, request: object) -> Any:
        act()
        return invoke(connection, method, request)

    with patch.object(Connection, "invoke", invoke_after):
        yield


if __name__ == "__main__":
    main()
