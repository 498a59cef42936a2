"""Spark on a site beside Spark on Parquet files and on PostgreSQL, on two cores.

    make bench-spark                                    all of it, on a quiet machine: about half an hour
    make bench-spark ARGS="--quick --only read"         a look

Each section has its own directory and servers.  PostgreSQL is set up as in peers/README.md, and accessed
through its JDBC driver.  Every side is warm, and all must give the same hash over keys and values.

    read        a snapshot into an aggregate: from a directory, from a server, from Parquet, from PostgreSQL
    write       a DataFrame into a site, durable and captured, and into PostgreSQL
    stream      all changes as a stream into Parquet files
    replicate   5,000 writes a second in commits of 50, replicated to another site: its lag
    memory      peak memory of a Python worker, which must not grow with the rows that it reads or writes
"""

import argparse
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import count
from pathlib import Path
from shutil import rmtree
from time import perf_counter
from typing import Any, Final

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.floodmark_peer import (
    QUICK_REPETITIONS,
    Line,
    Section,
    best_peer,
    in_turns,
    line,
    run_sections,
)
from benchmarks.harness import NAMESPACE, Measure, Target, tell
from benchmarks.peers.measure import TAIL_BATCH, TAIL_RECORDS_PER_SECOND
from benchmarks.peers.postgres import Postgres, PostgresServer
from benchmarks.spark_data import (
    DRIVER_JAR,
    INSTALL_DRIVER,
    Digest,
    Jdbc,
    Rows,
    digest,
    fill_site,
    make_rows,
    read_site,
    require_equal,
    rows_per_second,
    serving,
    write_site,
)
from benchmarks.spark_processes import (
    MASTER,
    SparkWork,
    measure_lag,
    measure_worker_memory,
    read_all,
    replicating,
    write_again,
)
from pyspark.sql import DataFrame, SparkSession

from floodmark.spark import SparkOptions, open_session

DIRECTORY, URL, PARQUET, POSTGRES = "floodmark directory", "floodmark server", "parquet", "postgres by jdbc"
SORTED: Final = "floodmark server, sorted first"

ROWS: Final = 2_000_000
QUICK_ROWS: Final = 100_000
MILLISECONDS: Final = 1e3

READ_RATIOS: Final = {DIRECTORY: 0.4, URL: 0.25}
WRITES_PER_SECOND: Final = 100_000
CHANGES_PER_SECOND: Final = 150_000
LAG_MS: Final = {"p50": 1_000, "p99": 2_000}
# The greatest growth of a worker's memory at twenty times the rows that still counts as flat.
GROWTH_MAX: Final = 1.1
CHANGES_PER_TRIGGER: Final = 500_000


def main() -> None:
    sections = {"read": read, "write": write, "stream": stream, "replicate": replicate, "memory": memory}
    options = parse_options(sections)
    conf = {"spark.jars": str(options.jdbc_jar)} if options.jdbc_jar.exists() else {}
    with open_session(SparkOptions(master=MASTER, conf=conf)) as spark:
        bound: dict[str, Section] = {name: partial(section, spark) for name, section in sections.items()}
        run_sections(options, bound)


def parse_options(sections: Mapping[str, Any]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rows", type=int, help=f"{ROWS:,}; with --quick {QUICK_ROWS:,}")
    parser.add_argument("--repetitions", type=int, help=f"5; with --quick {QUICK_REPETITIONS}")
    parser.add_argument("--seconds", type=float, help="of copying in a repetition; 60, with --quick 5")
    parser.add_argument("--quick", action="store_true", help="see that it works; the figures say little")
    parser.add_argument("--only", action="append", choices=list(sections), help="this section only")
    parser.add_argument("--directory", type=Path, default=Path.cwd(), help="on the disk to measure")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results for machines, too")
    parser.add_argument(
        "--jdbc-jar", type=Path, metavar="FILE", default=DRIVER_JAR, help="PostgreSQL's driver for Java"
    )
    options = parser.parse_args()
    quick = options.quick
    options.rows = options.rows or (QUICK_ROWS if quick else ROWS)
    options.repetitions = options.repetitions or (QUICK_REPETITIONS if quick else 5)
    options.seconds = options.seconds or (5.0 if quick else 60.0)
    return options


@contextmanager
def running_postgres(directory: Path, options: argparse.Namespace) -> Iterator[Jdbc | None]:
    """Run PostgreSQL.  If it or its driver is missing, yields None and prints what to install."""
    peer = Postgres()
    missing = [] if peer.is_installed() else [peer.how_to_install()]
    if not options.jdbc_jar.exists():
        missing.append(INSTALL_DRIVER)
    if missing:
        text = f"SKIPPED {POSTGRES}: not installed. To compare with it: {'; '.join(missing)}"
        print(text, file=sys.stderr, flush=True)
        yield None
        return
    tell(f"starting {peer.name}")
    with peer.running(directory) as server:
        assert isinstance(server, PostgresServer)
        yield Jdbc(server=server)


def warm_turns(
    what: str, sides: Mapping[str, Callable[[], float]], repetitions: int
) -> dict[str, list[float]]:
    """The samples of `in_turns`, after a first turn that is not counted."""
    in_turns(f"{what}, to warm up", sides, 1)
    return in_turns(what, sides, repetitions)


def held_against(
    work: str, samples: Mapping[str, Sequence[float]], side: str, peer: str, ratio: float
) -> Iterator[Line]:
    """A line with a side's rate as a multiple of a peer's; none if the peer was not measured."""
    if peer in samples:
        multiple = Measure.of(samples[side]).median / Measure.of(samples[peer]).median
        target = Target(limit=ratio, unit=f"x {peer}", at_least=True)
        yield line(work, side, f"x {peer}", [multiple], target=target)


# Reading


def read(spark: SparkSession, directory: Path, options: argparse.Namespace) -> Iterator[Line]:
    """A snapshot of all rows into one aggregate."""
    rows = make_rows(directory / "rows", options.rows, seed=42)
    expected = digest(rows.frame(spark))
    site = directory / "site"
    tell("read: filling the site")
    fill_site(site, {NAMESPACE: rows})
    with serving(site) as served, running_postgres(directory, options) as jdbc:
        frames: dict[str, Callable[[], DataFrame]] = {
            PARQUET: partial(rows.frame, spark),
            DIRECTORY: partial(read_site, spark, str(site)),
            URL: partial(read_site, spark, served.url),
        }
        if jdbc is not None:
            tell("read: filling PostgreSQL")
            jdbc.write(rows.frame(spark))
            jdbc.settle()
            frames[POSTGRES] = partial(jdbc.read, spark)
        sides = {name: partial(rows_per_second, frame, expected) for name, frame in frames.items()}
        samples = warm_turns("read", sides, options.repetitions)
    parquet = (PARQUET, Measure.of(samples[PARQUET]))
    for name, rates in samples.items():
        yield line(f"snapshot of {options.rows:,} rows", name, "rows/s", rates, against=parquet)
    for name, ratio in READ_RATIOS.items():
        yield from held_against("  of Parquet's rate", samples, name, PARQUET, ratio)
        yield from held_against("  ahead of PostgreSQL", samples, name, POSTGRES, 1)


# Writing


def write(spark: SparkSession, directory: Path, options: argparse.Namespace) -> Iterator[Line]:
    """Write rows from Parquet files; every turn begins with a new site or an empty table."""
    rows = make_rows(directory / "rows", options.rows, seed=42)
    expected = digest(rows.frame(spark))
    paths = (directory / f"site-{number}" for number in count())
    with running_postgres(directory, options) as jdbc:
        sides: dict[str, Callable[[], float]] = {
            URL: partial(write_to_site, spark, rows, expected, paths),
            SORTED: partial(write_to_site, spark, rows, expected, paths, in_order=True),
        }
        if jdbc is not None:
            sides[POSTGRES] = partial(write_to_postgres, spark, rows, expected, jdbc)
        samples = warm_turns("write", sides, options.repetitions)
    best = best_peer(samples)
    remarks = {
        URL: "on disk and in the change log when it returns; keys in no order",
        SORTED: "repartitionByRange and sortWithinPartitions are in the time",
        POSTGRES: "INSERT into an empty table with a primary key, a transaction a task; "
        "batches of 10,000 rows, which the driver rewrites; synchronous_commit on",
    }
    for name, rates in samples.items():
        target = Target(limit=WRITES_PER_SECOND, unit="rows/s", at_least=True) if name == URL else None
        yield line(
            f"upsert of {options.rows:,} rows",
            name,
            "rows/s",
            rates,
            target=target,
            against=best,
            remark=remarks[name],
        )


def write_to_site(
    spark: SparkSession, rows: Rows, expected: Digest, paths: Iterator[Path], *, in_order: bool = False
) -> float:
    """Write into a new site, and check that it has all rows; returns rows a second."""
    with serving(next(paths), temporary=True) as served:
        served.create_namespace()
        begun = perf_counter()
        frame = rows.frame(spark)
        if in_order:
            frame = frame.repartitionByRange(2, "key").sortWithinPartitions("key")
        write_site(frame, served.url, NAMESPACE)
        seconds = perf_counter() - begun
        require_equal(digest(read_site(spark, served.url)), expected)
    return rows.count / seconds


def write_to_postgres(spark: SparkSession, rows: Rows, expected: Digest, jdbc: Jdbc) -> float:
    """Write into an empty table, and check that it has all rows; returns rows a second."""
    jdbc.truncate()
    begun = perf_counter()
    jdbc.write(rows.frame(spark))
    seconds = perf_counter() - begun
    require_equal(digest(jdbc.read(spark)), expected)
    return rows.count / seconds


# Streaming


def stream(spark: SparkSession, directory: Path, options: argparse.Namespace) -> Iterator[Line]:
    """Stream all changes of a site, in commits of a thousand, into Parquet files."""
    rows = make_rows(directory / "rows", options.rows, seed=42)
    expected = digest(rows.frame(spark))
    site = directory / "site"
    tell("stream: filling the site")
    fill_site(site, {NAMESPACE: rows})
    outputs = (directory / f"output-{number}" for number in count())
    with serving(site) as served:
        changes = spark.readStream.format("floodmark").options(namespace=NAMESPACE, readChangeFeed="true")
        frames: dict[str, Callable[[], DataFrame]] = {
            URL: lambda: changes.load(served.url),
            f"{URL}, {CHANGES_PER_TRIGGER:,} a batch": lambda: changes.load(
                served.url, maxChangesPerTrigger=CHANGES_PER_TRIGGER
            ),
            PARQUET: lambda: spark.readStream.schema("key binary, value binary").parquet(str(rows.path)),
        }
        sides = {
            name: partial(stream_to_parquet, spark, frame, expected, outputs)
            for name, frame in frames.items()
        }
        samples = warm_turns("stream", sides, options.repetitions)
    parquet = (PARQUET, Measure.of(samples[PARQUET]))
    for name, rates in samples.items():
        target = Target(limit=CHANGES_PER_SECOND, unit="changes/s", at_least=True) if name == URL else None
        yield line(
            f"stream of {options.rows:,} changes to Parquet",
            name,
            "changes/s",
            rates,
            target=target,
            against=parquet,
            remark="keys and values only, from files" if name == PARQUET else "",
        )


def stream_to_parquet(
    spark: SparkSession, open_stream: Callable[[], DataFrame], expected: Digest, outputs: Iterator[Path]
) -> float:
    """Rows a second from the start of a query to its end; its output must have all rows."""
    output = next(outputs)
    begun = perf_counter()
    writer = open_stream().writeStream.format("parquet").trigger(availableNow=True)
    query = writer.option("checkpointLocation", f"{output}-checkpoint").start(str(output))
    query.awaitTermination()
    seconds = perf_counter() - begun
    require_equal(digest(spark.read.parquet(str(output))), expected)
    rmtree(output)
    return expected.rows / seconds


# Replicating


def replicate(spark: SparkSession, directory: Path, options: argparse.Namespace) -> Iterator[Line]:
    """The lag of a site to which another one is replicated while it is written to."""
    with serving(directory / "oslo") as source, serving(directory / "rome") as target:
        for each in (source, target):
            each.create_namespace()
        with replicating(source, target, directory / "replicate"):
            lags = []
            for number in range(options.repetitions):
                tell(f"replicate: {number + 1} of {options.repetitions}")
                lags.append(measure_lag(source, target, options.seconds, seed=number))
        require_equal(digest(read_site(spark, target.url)), digest(read_site(spark, source.url)))
    for what, limit in LAG_MS.items():
        times = [getattr(lag.latency, what) * MILLISECONDS for lag in lags]
        yield line(
            f"lag at {TAIL_RECORDS_PER_SECOND:,} writes/s, {what}",
            "floodmark replicate",
            "ms",
            times,
            target=Target(limit=limit, unit="ms", strictly=True),
            remark=f"{options.seconds:g} s in each repetition, in commits of {TAIL_BATCH}",
        )
    rates = [lag.records_per_second for lag in lags]
    yield line(f"  written, of {TAIL_RECORDS_PER_SECOND:,}", "floodmark replicate", "records/s", rates)


# Memory


def memory(spark: SparkSession, directory: Path, options: argparse.Namespace) -> Iterator[Line]:
    """The peak memory of a Python worker, for few rows and for twenty times as many."""
    sizes = {"few": options.rows // 10, "many": options.rows * 2}
    rows = {name: make_rows(directory / name, number, seed=number) for name, number in sizes.items()}
    expected = {name: digest(each.frame(spark)) for name, each in rows.items()}
    site = directory / "site"
    tell("memory: filling the site")
    fill_site(site, rows)
    with serving(site) as served:
        works: dict[str, Callable[[str], SparkWork]] = {
            "read from a directory": lambda name: partial(
                read_all, location=str(site), namespace=name, expected=expected[name]
            ),
            "read from a server": lambda name: partial(
                read_all, location=served.url, namespace=name, expected=expected[name]
            ),
            "upsert": lambda name: partial(write_again, rows=rows[name], url=served.url, namespace=name),
        }
        for work, make in works.items():
            sides = {name: partial(measure_worker_memory, make(name)) for name in sizes}
            samples = in_turns(f"memory: {work}", sides, options.repetitions)
            few = ("the few", Measure.of(samples["few"]))
            yield line(f"{work}: {sizes['few']:,} rows", "a worker's peak", "MiB", samples["few"])
            many = line(
                f"{work}: {sizes['many']:,} rows", "a worker's peak", "MiB", samples["many"], against=few
            )
            yield many
            growth = many.measure.median / few[1].median
            yield line(
                "  growth",
                "a worker's peak",
                "x the few",
                [growth],
                target=Target(limit=GROWTH_MAX, unit="x the few"),
            )


if __name__ == "__main__":
    main()
