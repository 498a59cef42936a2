"""`floodmark verify` of two sites, beside the ways in which users of Spark compare tables, on two cores.

    make bench-verify                                        all of it, on a quiet machine: about half an hour
    make bench-verify ARGS="--quick --only agree"            a look

Two sites with the same records are made once; each section serves its own copies of them.  All sides read
from these servers, unless a row names Parquet files.  `verify` reads everything that decides whether records
agree: keys, stamps, tombstones and hashes.  Its peers (`verify_peers.py`) read keys and hashes, and cannot
tell a change in flight from a difference.

    agree    compare sites that agree, without writes
    live     compare them while both are written to and replicate: every difference that is reported is false
    watch    compare again after 1 % of the keys have changed
"""

import argparse
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from itertools import count
from pathlib import Path
from time import monotonic, perf_counter
from typing import Final

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.floodmark_peer import (
    QUICK_REPETITIONS,
    Line,
    Section,
    ServedSite,
    in_turns,
    line,
    run_sections,
)
from benchmarks.harness import NAMESPACE, Measure, Target, tell
from benchmarks.peers import PeerFailed
from benchmarks.peers.base import scratch_directory
from benchmarks.replication_processes import SITES, WRITES_PER_SECOND
from benchmarks.spark import held_against, warm_turns
from benchmarks.spark_data import make_rows, read_site
from benchmarks.spark_processes import COPY_SECONDS_MAX, MASTER
from benchmarks.verify_peers import (
    DATACOMPY,
    EXCEPT_ALL,
    OUTER_JOIN,
    Compare,
    Table,
    compare_by_join,
    hash_values,
    installed_peers,
    read_hashes,
)
from benchmarks.verify_sites import Filled, addresses_of, change_keys, fill_sites, writing_to
from pyspark.sql import DataFrame, SparkSession

from floodmark.spark import SparkOptions, open_session
from floodmark.spark.jobs import VerifySummary, verify, watch

VERIFY, WATCH = "floodmark verify", "floodmark verify --watch"
FROM_FILES: Final = "from Parquet files"
HASHED_BY_SPARK: Final = f"{OUTER_JOIN}, hashes made by Spark"

RECORDS: Final = 2_000_000
QUICK_RECORDS: Final = 50_000
# The share of the keys that change between two passes of a watch.
CHANGED: Final = 0.01
# The number of keys that are written to while the sites are compared.
KEYS_WRITTEN: Final = 200_000

OF_A_JOIN: Final = 0.9
OF_A_FULL_PASS: Final = 10
# Enough for the peers that cache tables in memory.
MEMORY: Final = "4g"


def main() -> None:
    sections = {"agree": agree, "live": live, "watch": watch_changes}
    options = parse_options(sections)
    conf = {"spark.driver.memory": MEMORY}
    with (
        scratch_directory(options.directory) as directory,
        open_session(SparkOptions(master=MASTER, conf=conf)) as spark,
    ):
        rows = make_rows(directory / "rows", options.records, seed=42)
        tell("filling two sites")
        filled = fill_sites(directory, rows)
        bound: dict[str, Section] = {
            name: partial(section, spark, filled) for name, section in sections.items()
        }
        run_sections(options, bound)


def parse_options(sections: Mapping[str, object]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--records", type=int, help=f"{RECORDS:,}; with --quick {QUICK_RECORDS:,}")
    parser.add_argument("--repetitions", type=int, help=f"5; with --quick {QUICK_REPETITIONS}")
    parser.add_argument("--quick", action="store_true", help="see that it works; the figures say little")
    parser.add_argument("--only", action="append", choices=list(sections), help="this section only")
    parser.add_argument("--directory", type=Path, default=Path.cwd(), help="on the disk to measure")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results for machines, too")
    options = parser.parse_args()
    options.records = options.records or (QUICK_RECORDS if options.quick else RECORDS)
    options.repetitions = options.repetitions or (QUICK_REPETITIONS if options.quick else 5)
    return options


def run_verify(spark: SparkSession, servers: Mapping[str, ServedSite]) -> VerifySummary:
    return verify(addresses_of(servers), [NAMESPACE], spark=spark)


def records_per_second(records: int, compare: Callable[[], int]) -> float:
    """Keys compared a second.  Raises PeerFailed if `compare` counts a difference."""
    begun = perf_counter()
    found = compare()
    seconds = perf_counter() - begun
    if found:
        raise PeerFailed(f"{found:,} differences were found between sites that agree")
    return records / seconds


# Agreeing


def agree(
    spark: SparkSession, filled: Filled, directory: Path, options: argparse.Namespace
) -> Iterator[Line]:
    """Both sites hold the same records, and there are no writes."""
    with filled.served(directory) as servers:
        tell("agree: exporting to Parquet")
        files = export(spark, servers, directory)
        ways = compare_served(spark, servers, options.records)
        ways |= {
            f"{name}, {FROM_FILES}": partial(compare_tables, way, files)
            for name, way in installed_peers().items()
        }
        samples = warm_turns("agree", timed(ways, options.records), options.repetitions)
    join = (OUTER_JOIN, Measure.of(samples[OUTER_JOIN]))
    for name, rates in samples.items():
        remark = "without the time of the export" if name.endswith(FROM_FILES) else ""
        work = f"compare 2 x {options.records:,} records"
        yield line(work, name, "records/s", rates, against=join, remark=remark)
    yield from held_against("  of the outer join's rate", samples, VERIFY, OUTER_JOIN, OF_A_JOIN)
    for peer in (DATACOMPY, EXCEPT_ALL):
        yield from held_against("  ahead of", samples, VERIFY, peer, 1)


def compare_served(
    spark: SparkSession, servers: Mapping[str, ServedSite], records: int
) -> dict[str, Callable[[], int]]:
    """For each side, a function that counts the differences between two served sites."""

    def count_drift() -> int:
        summary = run_verify(spark, servers)
        [pair] = summary.pairs
        if summary.doubts or pair.compared != records:
            raise PeerFailed(f"verify has not compared {records:,} records: {summary}")
        return pair.drift + pair.lag

    hashes = [partial(read_hashes, spark, servers[name].url, NAMESPACE) for name in SITES]
    whole = [partial(read_hashed, spark, servers[name].url) for name in SITES]
    peers: dict[str, Callable[[], int]] = {
        name: partial(compare_tables, way, hashes) for name, way in installed_peers().items()
    }
    return {VERIFY: count_drift, **peers, HASHED_BY_SPARK: partial(compare_tables, compare_by_join, whole)}


def read_hashed(spark: SparkSession, url: str) -> DataFrame:
    """The keys and hashes of a site, hashed by Spark from values that the server sends."""
    return hash_values(read_site(spark, url))


def compare_tables(way: Compare, tables: Sequence[Table]) -> int:
    left, right = (table() for table in tables)
    return way(left, right)


def timed(ways: Mapping[str, Callable[[], int]], records: int) -> dict[str, Callable[[], float]]:
    return {name: partial(records_per_second, records, way) for name, way in ways.items()}


def export(spark: SparkSession, servers: Mapping[str, ServedSite], directory: Path) -> list[Table]:
    """Export both sites to Parquet files."""
    tables: list[Table] = []
    for name in SITES:
        path = str(directory / f"{name}.parquet")
        read_site(spark, servers[name].url).write.parquet(path)
        tables.append(partial(read_files, spark, path))
    return tables


def read_files(spark: SparkSession, path: str) -> DataFrame:
    return hash_values(spark.read.parquet(path))


# While sites are written to


def live(spark: SparkSession, filled: Filled, directory: Path, options: argparse.Namespace) -> Iterator[Line]:
    """Compare sites that are written to and replicate; after the writers have stopped, they must agree."""
    keys = filled.keys(KEYS_WRITTEN)
    with filled.served(directory) as servers, writing_to(servers, keys, directory) as writing:
        tables = [partial(read_hashes, spark, servers[name].url, NAMESPACE) for name in SITES]
        sides: dict[str, Callable[[], Pass]] = {VERIFY: partial(pass_of_verify, spark, servers)}
        peers = installed_peers()
        if DATACOMPY in peers:
            sides[DATACOMPY] = partial(pass_of_peer, peers[DATACOMPY], tables)
        samples = in_turns("live", sides, options.repetitions)
        writing.require_running()
        rate = writing.end()
        tell("live: waiting until everything has arrived")
        wait_until_equal(spark, servers, tables)
    written = len(SITES) * WRITES_PER_SECOND
    work = f"compare at {written:,} writes/s"
    for name, passes in samples.items():
        yield line(work, name, "s", [each.seconds for each in passes], remark=lag_remark(passes))
    for name, passes in samples.items():
        yield line(
            "  false differences, in all",
            name,
            "keys",
            [sum(each.reported for each in passes)],
            target=Target(limit=0, unit="keys") if name == VERIFY else None,
            remark=f"{len(passes)} passes; after the last write all arrived, and both sites hold the same",
        )
    yield line(f"  written, of {written:,}", "both sites", "records/s", [rate])


@dataclass(frozen=True, kw_only=True)
class Pass:
    """A comparison of sites that are written to: its time, the keys it reports, those it counts as lag."""

    seconds: float
    reported: int
    lag: int | None = None
    doubts: Sequence[str] = ()


def pass_of_verify(spark: SparkSession, servers: Mapping[str, ServedSite]) -> Pass:
    begun = perf_counter()
    summary = run_verify(spark, servers)
    seconds = perf_counter() - begun
    if not summary.pairs:
        raise PeerFailed(f"verify has compared nothing: {summary.doubts}")
    return Pass(seconds=seconds, reported=summary.drift, lag=summary.lag, doubts=summary.doubts)


def pass_of_peer(way: Compare, tables: Sequence[Table]) -> Pass:
    begun = perf_counter()
    found = compare_tables(way, tables)
    return Pass(seconds=perf_counter() - begun, reported=found)


def lag_remark(passes: Sequence[Pass]) -> str:
    lags = [each.lag for each in passes if each.lag is not None]
    if not lags:
        return ""
    doubts = dict.fromkeys(doubt for each in passes for doubt in each.doubts)
    return f"{min(lags):,} to {max(lags):,} keys were under way; " + ("; ".join(doubts) or "no doubts")


def wait_until_equal(spark: SparkSession, servers: Mapping[str, ServedSite], tables: Sequence[Table]) -> None:
    """Wait until `verify` reports no lag, then check by a join that the sites are equal."""
    deadline = monotonic() + COPY_SECONDS_MAX
    while (summary := run_verify(spark, servers)).lag:
        if monotonic() > deadline:
            raise PeerFailed(f"not everything has arrived: {summary}")
    if different := compare_tables(compare_by_join, tables):
        raise PeerFailed(f"{different:,} keys differ for good, so that reports were not false: {summary}")


# Watching


def watch_changes(
    spark: SparkSession, filled: Filled, directory: Path, options: argparse.Namespace
) -> Iterator[Line]:
    """A pass over the keys that changed, beside a full pass."""
    changed = int(options.records * CHANGED)
    keys, seeds = filled.keys(changed * (options.repetitions + 1)), count()
    with filled.served(directory) as servers:
        passes = watch(addresses_of(servers), [NAMESPACE], every=timedelta(0), spark=spark)
        with closing(passes):
            next(passes)

            def full_pass() -> float:
                return checked_seconds(lambda: run_verify(spark, servers), options.records)

            def next_pass() -> float:
                seed = next(seeds)
                change_keys(servers, keys[seed * changed : (seed + 1) * changed], seed)
                return checked_seconds(lambda: next(passes), changed)

            sides = {VERIFY: full_pass, WATCH: next_pass}
            samples = warm_turns("watch", sides, options.repetitions)
    full = (VERIFY, Measure.of(samples[VERIFY]))
    yield line(f"a full pass over {options.records:,} records", VERIFY, "s", samples[VERIFY])
    yield line(f"a pass after {changed:,} have changed", WATCH, "s", samples[WATCH], against=full)
    ratio = full[1].median / Measure.of(samples[WATCH]).median
    target = Target(limit=OF_A_FULL_PASS, unit="x a full pass", at_least=True)
    yield line("  faster than a full pass", WATCH, "x a full pass", [ratio], target=target)


def checked_seconds(take_pass: Callable[[], VerifySummary], compared: int) -> float:
    """The seconds of a pass.  Raises PeerFailed unless it compared `compared` keys and all agree."""
    begun = perf_counter()
    summary = take_pass()
    seconds = perf_counter() - begun
    if summary.doubts or [(each.compared, each.agree) for each in summary.pairs] != [(compared, compared)]:
        raise PeerFailed(f"of {compared:,} keys not all were compared and agree: {summary}")
    return seconds


if __name__ == "__main__":
    main()
