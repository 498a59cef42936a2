"""A site on PostgreSQL beside a plain psycopg program that writes the same to a table and a log table.

    make bench-nodes                                      all of it, on a quiet machine: some minutes
    make bench-nodes ARGS="--quick --only embedded"       a look

All sides use one PostgreSQL, which is durable (peers/postgresql.conf), and take turns.

    embedded   put and get by the threads of one process: `floodmark.open("postgresql://…")`
    nodes      put and get over the wire, through 1, 2 and 3 nodes, by clients in processes of their own
"""

import argparse
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from time import perf_counter, sleep
from typing import Any, Final

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import psycopg
from benchmarks.floodmark_peer import (
    EMBEDDED,
    SITE,
    EmbeddedServer,
    Line,
    ServedSite,
    SiteServer,
    base_parser,
    in_turns,
    line,
    parse,
    run_sections,
)
from benchmarks.harness import BATCH, MICROSECONDS, NAMESPACE, Measure, Pair, Target, make_pairs
from benchmarks.peers.base import (
    LOOPBACK,
    PeerFailed,
    find_program,
    free_port,
    in_batches_of,
    server_process,
)
from benchmarks.peers.measure import OpenClient, Operation, Points, measure_points, points_of, run_clients
from benchmarks.peers.postgres import DATABASE, ROLE, Postgres, PostgresServer

import floodmark
from floodmark.host.ports import Balance
from floodmark.model.errors import Retryable, Unreachable

PAUSE_SECONDS: Final = 0.2
CLIENTS: Final = (1, 32)
NODES: Final = (1, 2, 3)
OPERATIONS: Final[tuple[Operation, ...]] = ("put", "get")
RECORDS_MAX: Final = 100_000
PUT_RATIO_MIN: Final = 0.5
HELD: Final = "put, 32 clients"
TRANSACTION: Final = "psycopg, two statements"
STATEMENT: Final = "psycopg, one statement"

SET_UP: Final = (
    "CREATE TABLE plain_records (key bytea PRIMARY KEY, value bytea NOT NULL)",
    "CREATE TABLE plain_log (number bigserial PRIMARY KEY, key bytea NOT NULL, value bytea NOT NULL)",
)
UPDATE: Final = "ON CONFLICT (key) DO UPDATE SET value = excluded.value"
PUT: Final = f"INSERT INTO plain_records VALUES (%b, %b) {UPDATE}"
LOG: Final = "INSERT INTO plain_log (key, value) VALUES (%b, %b)"
# A program that was tuned: both statements and the commit in one round trip.
PUT_AND_LOG: Final = f"""
    WITH entered AS (INSERT INTO plain_records VALUES (%b, %b) {UPDATE} RETURNING key, value)
    INSERT INTO plain_log (key, value) SELECT key, value FROM entered"""
FILL: Final = f"INSERT INTO plain_records SELECT * FROM unnest(%b::bytea[], %b::bytea[]) {UPDATE}"
GET: Final = "SELECT value FROM plain_records WHERE key = %b"


def main() -> None:
    sections = {"embedded": embedded, "nodes": nodes}
    parser = base_parser(__doc__, sections)
    parser.add_argument("--seconds", type=float, help="of point operations in a turn; 5, with --quick 2")
    options = parse(parser)
    options.seconds = options.seconds or (2.0 if options.quick else 5.0)
    run_sections(options, sections)


# The plain program


@dataclass(frozen=True, kw_only=True)
class Plain:
    """The program that a user would write instead: a table, and a log table in the same transaction."""

    url: str
    is_one_statement: bool

    @contextmanager
    def client(self) -> Iterator["PlainClient"]:
        with closing(psycopg.connect(self.url, autocommit=True)) as connection:
            yield PlainClient(connection, is_one_statement=self.is_one_statement)


class PlainClient:
    """Prepared statements and binary values on a connection of its own."""

    def __init__(self, connection: "psycopg.Connection[tuple[Any, ...]]", *, is_one_statement: bool) -> None:
        self._connection = connection
        self._cursor = connection.cursor(binary=True)
        self._is_one_statement = is_one_statement

    def put(self, key: bytes, value: bytes) -> None:
        if self._is_one_statement:
            self._cursor.execute(PUT_AND_LOG, (key, value), prepare=True)
            return
        with self._connection.transaction():
            self._cursor.execute(PUT, (key, value), prepare=True)
            self._cursor.execute(LOG, (key, value), prepare=True)

    def get(self, key: bytes) -> bytes | None:
        row = self._cursor.execute(GET, (key,), prepare=True).fetchone()
        return None if row is None else row[0]


def make_plain(url: str, pairs: Sequence[Pair]) -> dict[str, Plain]:
    """Make the tables of the plain program, and fill them."""
    with closing(psycopg.connect(url, autocommit=True)) as connection:
        for statement in SET_UP:
            connection.execute(statement)
        for part in in_batches_of(BATCH, pairs):
            keys, values = map(list, zip(*part, strict=True))
            connection.execute(FILL, (keys, values))
    return {
        TRANSACTION: Plain(url=url, is_one_statement=False),
        STATEMENT: Plain(url=url, is_one_statement=True),
    }


@contextmanager
def database(directory: Path) -> Iterator[str]:
    """Run a PostgreSQL; yields its URL."""
    with Postgres().running(directory) as server:
        assert isinstance(server, PostgresServer)
        yield f"postgresql://{ROLE}@{LOOPBACK}:{server.port}/{DATABASE}"


# Measurements


def embedded(directory: Path, options: argparse.Namespace) -> Iterator[Line]:
    """Clients are threads of one process, which share Python's lock on every side."""
    pairs = make_pairs(min(options.records, RECORDS_MAX), seed=42)
    with database(directory) as url, floodmark.open(url, site=SITE) as site:
        site.create_namespace(NAMESPACE)
        ours = EmbeddedServer(site)
        ours.fill(pairs, BATCH)
        yield from compare_points({**make_plain(url, pairs), EMBEDDED: ours}, in_threads, pairs, options)


def in_threads(
    open_client: OpenClient, operation: Operation, pairs: Sequence[Pair], clients: int, seconds: float
) -> Points:
    shares = [pairs[first::clients] for first in range(clients)]
    return points_of(run_clients(open_client, operation, shares, perf_counter() + seconds))


def nodes(directory: Path, options: argparse.Namespace) -> Iterator[Line]:
    """Clients in four processes.  Each number of nodes serves its own site, and all nodes run at once."""
    pairs = make_pairs(min(options.records, RECORDS_MAX), seed=42)
    with database(directory) as url, ExitStack() as stack:
        sides: dict[str, Plain | SiteServer] = {**make_plain(url, pairs)}
        for count in NODES:
            server = stack.enter_context(served_by(url, count, directory))
            server.fill(pairs, BATCH)
            sides[f"floodmark, {count} node{'s' * (count > 1)}"] = server
        yield from compare_points(sides, measure_points, pairs, options)


@contextmanager
def served_by(url: str, count: int, directory: Path) -> Iterator[ServedSite]:
    """Serve a site by `count` nodes, each with a partition of its namespace."""
    program = find_program("floodmark")
    if program is None:
        raise PeerFailed(f"the floodmark command is not beside {sys.executable}: make setup")
    site_name = f"{SITE}-{count}"
    with ExitStack() as stack:
        urls: list[str] = []
        for number in range(1, count + 1):
            home = directory / f"{site_name}-{number}"
            home.mkdir()
            listen = f"{LOOPBACK}:{free_port()}"
            serve = ["serve", url, "--site", site_name, "--node", str(number), "--listen", listen]
            process = stack.enter_context(server_process(site_name, [program, *serve], home))
            urls.append(listen)
            process.wait_until_ready(ServedSite(url=f"grpc://{listen}").facts, (Unreachable, Retryable))
        server = ServedSite(url=f"grpc://{','.join(urls)}")
        server.create_namespace()
        with server.opened() as site:
            for part in range(1, count):
                site.split(NAMESPACE, bytes([256 * part // count]))
            maps = site.host.router.maps
            while len({partition.place for partition in maps.map.partitions}) < count:
                # A node that has just started may not be known to the keeper yet.
                sleep(PAUSE_SECONDS)
                site.host.node_port.rebalance(Balance.COUNT)
                maps.refresh()
        yield server


def compare_points(
    sides: Mapping[str, Plain | SiteServer],
    measure: Callable[..., Points],
    pairs: Sequence[Pair],
    options: argparse.Namespace,
) -> Iterator[Line]:
    """Measure each operation with each number of clients; ratios are to the faster plain program."""
    for clients in CLIENTS:
        for operation in OPERATIONS:
            measures = {
                name: partial(
                    measure, side.client, operation, pairs, clients=clients, seconds=options.seconds
                )
                for name, side in sides.items()
            }
            work = f"{operation}, {clients} client{'s' * (clients > 1)}"
            yield from lines_of(work, in_turns(work, measures, options.repetitions))


def lines_of(work: str, samples: Mapping[str, Sequence[Points]]) -> Iterator[Line]:
    rates = {name: [each.per_second for each in points] for name, points in samples.items()}
    best = max((TRANSACTION, STATEMENT), key=lambda name: Measure.of(rates[name]).median)
    against = best, Measure.of(rates[best])
    for name, numbers in rates.items():
        each = line(f"{work}: together", name, "calls/s", numbers, against=against)
        if name.startswith("floodmark") and work == HELD:
            assert each.ratio is not None
            target = Target(limit=PUT_RATIO_MIN, unit="x psycopg", at_least=True)
            each = replace(each, target=str(target), verdict=target.verdict(each.ratio))
        yield each
    for name, points in samples.items():
        yield line(f"{work}: p99", name, "µs", [each.latency.p99 * MICROSECONDS for each in points])


if __name__ == "__main__":
    main()
