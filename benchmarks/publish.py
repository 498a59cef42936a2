"""A data set that replaces a namespace, beside our own upsert and COPY into PostgreSQL, on two cores.

    make bench-publish                                  a million rows of 100 bytes: some minutes
    make bench-publish ARGS="--rows 5000000 --only load"

Each section has its own directory and servers; Spark is warm.

    load        a DataFrame of Parquet files, by Spark into a server, until readers see it
    meanwhile   puts and gets of another client while a data set is loaded, and on a busy machine without it
    swap        how long one writer waits for the swap
    memory      peak memory of a Python worker, for some rows and for ten times as many
"""

import argparse
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from functools import partial
from itertools import count
from pathlib import Path
from statistics import median
from threading import Event, Thread
from time import perf_counter
from typing import Final

import numpy
import pyarrow.parquet

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.floodmark_peer import Line, Section, ServedSite, best_peer, held, in_turns, line, run_sections
from benchmarks.harness import KEY_BYTES, NAMESPACE, Measure, Target, tell
from benchmarks.peers.base import LOOPBACK
from benchmarks.peers.measure import Latency
from benchmarks.peers.postgres import COPY, DATABASE, ROLE, Postgres, PostgresServer
from benchmarks.spark_data import (
    TABLE,
    VALUE_BYTES,
    Digest,
    Rows,
    digest,
    make_rows,
    read_site,
    require_equal,
    serving,
    write_site,
)
from benchmarks.spark_processes import MASTER, measure_worker_memory
from pyspark.sql import SparkSession

from floodmark.spark import SparkOptions, open_session, publish

PUBLISHED, UPSERTED, COPIED = "floodmark publish", "floodmark upsert", "postgres COPY"
IDLE, BUSY = "idle site", "busy machine"
ROWS: Final = 1_000_000
QUICK_ROWS: Final = 50_000
ROWS_PER_SECOND: Final = 250_000
UPSERTS: Final = 2
P99_RATIO: Final = 2
SWAP_MS: Final = 50
GROWTH: Final = 10
GROWTH_MAX: Final = 1.1
MILLISECONDS: Final = 1e3
# The pause of the other client after a put and a get, and how long it calls an idle site.
PAUSE_SECONDS: Final = 0.005
IDLE_SECONDS: Final = 5.0
WARM_ROWS: Final = 10_000


def main() -> None:
    sections = {"load": load, "meanwhile": meanwhile, "swap": swap, "memory": memory}
    options = parse_options(list(sections))
    with open_session(SparkOptions(master=MASTER)) as spark:
        bound: dict[str, Section] = {name: partial(section, spark) for name, section in sections.items()}
        run_sections(options, bound)


def parse_options(sections: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rows", type=int, help=f"{ROWS:,}; with --quick {QUICK_ROWS:,}")
    parser.add_argument("--repetitions", type=int, default=2)
    parser.add_argument("--quick", action="store_true", help="see that it works; the figures say little")
    parser.add_argument("--only", action="append", choices=sections, help="this section only")
    parser.add_argument("--directory", type=Path, default=Path.cwd(), help="on the disk to measure")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results for machines, too")
    options = parser.parse_args()
    options.rows = options.rows or (QUICK_ROWS if options.quick else ROWS)
    return options


# Loading


def load(spark: SparkSession, directory: Path, options: argparse.Namespace) -> Iterator[Line]:
    """Load rows from Parquet files; every turn begins with a new site or an empty table."""
    rows = make_rows(directory / "rows", options.rows, seed=42)
    expected = digest(rows.frame(spark))
    warm_up(spark, directory)
    paths = (directory / f"site-{number}" for number in count())
    sides: dict[str, Callable[[], float]] = {
        PUBLISHED: partial(measure_site, spark, rows, expected, paths, publish_rows),
        UPSERTED: partial(measure_site, spark, rows, expected, paths, upsert_rows),
    }
    with running_postgres(directory) as server:
        if server is not None:
            sides[COPIED] = partial(measure_copy, server, list(copy_chunks(rows)), rows.count)
        samples = in_turns("load", sides, options.repetitions)
    remarks = {
        PUBLISHED: "the time includes Spark's sort, the files and the swap; on disk when it returns",
        UPSERTED: "mode append, keys in no order; on disk and in the change log",
        COPIED: "one connection, into a table with a primary key; without the time to make the binary rows",
    }
    for name, rates in samples.items():
        is_ours = name == PUBLISHED
        target = Target(limit=ROWS_PER_SECOND, unit="rows/s", at_least=True) if is_ours else None
        work = f"load {rows.count:,} rows"
        yield line(work, name, "rows/s", rates, target=target, remark=remarks[name])
    upserted = (UPSERTED, Measure.of(samples[UPSERTED]))
    for against, limit in ((upserted, UPSERTS), (best_peer(samples), 1)):
        if against is not None:
            each = line("  of it", PUBLISHED, "rows/s", samples[PUBLISHED], against=against)
            yield held(each, Target(limit=limit, unit=f"x {against[0]}", at_least=True))


def warm_up(spark: SparkSession, directory: Path) -> None:
    """Start Spark's workers, and run each way once."""
    rows = make_rows(directory / "warm", WARM_ROWS, seed=1)
    with serving(directory / "warm-site") as served:
        served.create_namespace()
        publish_rows(spark, rows, served.url)
        upsert_rows(spark, rows, served.url)


def measure_site(
    spark: SparkSession,
    rows: Rows,
    expected: Digest,
    paths: Iterator[Path],
    write: Callable[[SparkSession, Rows, str], None],
) -> float:
    """Write into a new site, and check that it has all rows; returns rows a second."""
    with serving(next(paths), temporary=True) as served:
        served.create_namespace()
        begun = perf_counter()
        write(spark, rows, served.url)
        seconds = perf_counter() - begun
        require_equal(digest(read_site(spark, served.url)), expected)
    return rows.count / seconds


def publish_rows(spark: SparkSession, rows: Rows, url: str) -> None:
    publish(rows.frame(spark), url, NAMESPACE)


def upsert_rows(spark: SparkSession, rows: Rows, url: str) -> None:
    write_site(rows.frame(spark), url, NAMESPACE)


@contextmanager
def running_postgres(directory: Path) -> Iterator[PostgresServer | None]:
    peer = Postgres()
    if not peer.is_installed():
        print(f"SKIPPED {COPIED}: {peer.how_to_install()}", file=sys.stderr, flush=True)
        yield None
        return
    tell(f"starting {peer.name}")
    with peer.running(directory) as server:
        assert isinstance(server, PostgresServer)
        yield server


def copy_chunks(rows: Rows) -> Iterator[bytes]:
    """The rows in PostgreSQL's binary COPY format, encoded with numpy, as the fastest client would."""
    kind = numpy.dtype(
        [
            ("columns", ">i2"),
            ("key_bytes", ">i4"),
            ("key", f"V{KEY_BYTES}"),
            ("value_bytes", ">i4"),
            ("value", f"V{VALUE_BYTES}"),
        ]
    )
    yield b"PGCOPY\n\xff\r\n\0" + bytes(8)
    for file in sorted(rows.path.iterdir()):
        for batch in pyarrow.parquet.ParquetFile(file).iter_batches(WARM_ROWS):
            chunk = numpy.zeros(batch.num_rows, kind)
            chunk["columns"], chunk["key_bytes"], chunk["value_bytes"] = 2, KEY_BYTES, VALUE_BYTES
            for name, column in zip(("key", "value"), batch.columns, strict=True):
                data = b"".join(column.to_pylist())
                chunk[name] = numpy.frombuffer(data, kind[name])
            yield chunk.tobytes()
    yield b"\xff\xff"


def measure_copy(server: PostgresServer, chunks: Sequence[bytes], number: int) -> float:
    """COPY into an empty table; returns rows a second."""
    import psycopg  # noqa: PLC0415

    with (
        closing(
            psycopg.connect(host=LOOPBACK, port=server.port, user=ROLE, dbname=DATABASE, autocommit=True)
        ) as connection,
        connection.cursor() as cursor,
    ):
        cursor.execute(f"TRUNCATE {TABLE}")
        begun = perf_counter()
        with cursor.copy(COPY) as copy:
            for chunk in chunks:
                copy.write(chunk)
        seconds = perf_counter() - begun
        (found,) = cursor.execute(f"SELECT count(*) FROM {TABLE}").fetchone() or (0,)
    assert found == number
    return number / seconds


# Other clients


class Caller:
    """A thread that puts and gets one key after the other, with pauses, and records each call's times."""

    def __init__(self, served: ServedSite, pause_seconds: float) -> None:
        self.puts: list[tuple[float, float]] = []
        self.gets: list[tuple[float, float]] = []
        self._served = served
        self._pause_seconds = pause_seconds
        self._ended = Event()
        self._thread = Thread(target=self._call)

    def __enter__(self) -> "Caller":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def _call(self) -> None:
        with self._served.client() as client:
            for number in count():
                key = b"caller-%d" % (number % 1_000)
                begun = perf_counter()
                client.put(key, b"x" * VALUE_BYTES)
                put = perf_counter()
                client.get(key)
                self.puts.append((begun, put))
                self.gets.append((put, perf_counter()))
                if self._ended.wait(self._pause_seconds):
                    return


def p99_ms(calls: Sequence[tuple[float, float]]) -> float:
    return Latency.of([end - begun for begun, end in calls]).p99 * MILLISECONDS


@contextmanager
def busy_processors() -> Iterator[None]:
    """Keep all processors busy with work that makes no call to the site."""
    command = [sys.executable, "-c", "while True: pass"]
    workers = [subprocess.Popen(command) for _ in range(os.cpu_count() or 1)]
    try:
        yield
    finally:
        for worker in workers:
            worker.kill()
            worker.wait()


def meanwhile(spark: SparkSession, directory: Path, options: argparse.Namespace) -> Iterator[Line]:
    """Puts and gets of another client: idle site, busy machine, and while a data set is published."""
    rows = make_rows(directory / "rows", options.rows, seed=42)
    warm_up(spark, directory)
    samples: dict[str, dict[str, list[float]]] = {"put": {}, "get": {}}
    with serving(directory / "site") as served:
        served.create_namespace()

        def rest() -> None:
            Event().wait(IDLE_SECONDS)

        def compute() -> None:
            with busy_processors():
                rest()

        work: dict[str, Callable[[], object]] = {
            IDLE: rest,
            BUSY: compute,
            PUBLISHED: partial(publish_rows, spark, rows, served.url),
        }
        for number in range(options.repetitions):
            tell(f"meanwhile: {number + 1} of {options.repetitions}")
            for name, do in work.items():
                with Caller(served, PAUSE_SECONDS) as caller:
                    do()
                samples["put"].setdefault(name, []).append(p99_ms(caller.puts))
                samples["get"].setdefault(name, []).append(p99_ms(caller.gets))
    for call, taken in samples.items():
        idle = (IDLE, Measure.of(taken[IDLE]))
        yield line(f"p99 of a {call}", IDLE, "ms", taken[IDLE])
        yield line(
            f"p99 of a {call}",
            BUSY,
            "ms",
            taken[BUSY],
            against=idle,
            remark="other work on all cores, none for the site",
        )
        each = line(f"p99 of a {call}", PUBLISHED, "ms", taken[PUBLISHED], against=idle)
        yield held(each, Target(limit=P99_RATIO, unit="x idle site"))


def swap(_: SparkSession, directory: Path, options: argparse.Namespace) -> Iterator[Line]:
    """The slowest put that was in flight during the swap, of a client that calls without a pause."""
    rows = make_rows(directory / "rows", options.rows, seed=42)
    longest = []
    table = pyarrow.parquet.read_table(rows.path)
    with serving(directory / "site") as served, served.opened() as site:
        served.create_namespace()
        for number in range(options.repetitions):
            tell(f"swap: {number + 1} of {options.repetitions}")
            moments: list[float] = []

            def report(phase: str, _done: int, moments: list[float] = moments) -> None:
                if phase == "swapping":
                    moments.append(perf_counter())

            with Caller(served, 0) as caller:
                site.generations.publish(NAMESPACE, table, report=report)
                moments.append(perf_counter())
                usual = median(end - begun for begun, end in caller.puts)
            begun_at, ended_at = moments
            waited = [end - begun for begun, end in caller.puts if end >= begun_at and begun <= ended_at]
            longest.append(max(waited, default=usual) * MILLISECONDS)
    target = Target(limit=SWAP_MS, unit="ms")
    yield line("a put during the swap", PUBLISHED, "ms", longest, target=target, remark="the slowest of all")


# Memory


def memory(_: SparkSession, directory: Path, options: argparse.Namespace) -> Iterator[Line]:
    """The peak memory of a Python worker, for some rows and for ten times as many."""
    sizes = {"few": options.rows, "many": options.rows * GROWTH}
    rows = {name: make_rows(directory / name, number, seed=42) for name, number in sizes.items()}
    samples: dict[str, list[float]] = {}
    for name, each in rows.items():
        tell(f"memory: {each.count:,} rows")
        with serving(directory / f"site-{name}", temporary=True) as served:
            served.create_namespace()
            work = partial(publish_rows, rows=each, url=served.url)
            samples[name] = [measure_worker_memory(work)]
    few = ("the few", Measure.of(samples["few"]))
    yield line(f"publish {sizes['few']:,} rows", "a worker's peak", "MiB", samples["few"])
    many = line(f"publish {sizes['many']:,} rows", "a worker's peak", "MiB", samples["many"], against=few)
    yield held(many, Target(limit=GROWTH_MAX, unit="x the few"))


if __name__ == "__main__":
    main()
