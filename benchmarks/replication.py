"""Replication between sites: the cost of positions, the lag, catching up, and the cost of an idle site.

    make bench-replication                                       all of it, on a quiet machine: half an hour
    make bench-replication ARGS="--quick --only positions"       a look
    make bench-replication ARGS="--only two-way --delay-ms 30"   with a long line between the sites
    make bench-replication ARGS="--only two-way --runner process"   without Spark

Each section has its own directories and servers.  Links run on Spark, on two cores, unless a row or an option
says otherwise.

    positions   bytes in a record, and records applied a second: heartbeats, or a vector in each record
    two-way     2,500 writes a second at each of two sites: the lag in both directions
    catch-up    changes that were written while no link ran
    idle        the cost of heartbeats at a site without calls
"""

import argparse
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import count, permutations
from pathlib import Path
from shutil import copytree, rmtree
from threading import Event, Thread
from time import perf_counter
from typing import Final

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.floodmark_peer import Line, ServedSite, base_parser, in_turns, line, parse, run_sections
from benchmarks.harness import NAMESPACE, Measure, Target, tell
from benchmarks.peers import PeerFailed
from benchmarks.replication_processes import (
    SITES,
    WRITES_PER_SECOND,
    Lag,
    measure_idleness,
    measure_two_way,
    share_served,
)
from benchmarks.replication_sites import (
    COMMIT,
    fill_shared_site,
    make_neighbours,
    open_site,
    run_link,
    share,
)
from benchmarks.replication_vectors import (
    POSITION_BYTES,
    SOURCE,
    Added,
    Ingestion,
    Positions,
    filled_source,
    measure_bytes,
    share_all,
)
from benchmarks.replication_vectors import SITES as SITE_COUNTS
from benchmarks.spark_data import serving
from benchmarks.spark_processes import MASTER

from floodmark.links.driver import TopologySummary, run_links, site_addresses
from floodmark.links.process import ProcessRunner
from floodmark.replication.topology import Topology, default_site_id
from floodmark.site.address import SiteAddress
from floodmark.spark import SparkOptions, open_session
from floodmark.spark.jobs import replicate_topology

ON_SPARK: Final = "floodmark replicate"
BY_PROCESS: Final = "floodmark replicate --runner process"
IN_PROCESS: Final = "in one process, no server"

LOCAL_BYTES: Final = 0
REMOTE_BYTES: Final = 9
# Few are enough to measure the bytes of a record.
BYTES_RECORDS: Final = 1_000
INGESTED_SHARE: Final = 5
LAG_MS: Final = {"p50": 1_000, "p99": 2_000}
CHANGES_PER_SECOND: Final = 100_000
WATCH_SECONDS: Final = 0.1
IDLE_CPU_PERCENT: Final = 1
IDLE_BYTES_PER_SECOND: Final = 100
NEIGHBOURS: Final = {"oslo": 1, "rome": 2, "bonn": 3}
NAMESPACES: Final = ("users", "settings", "sessions")


def main() -> None:
    sections = {"positions": positions, "two-way": two_way, "catch-up": catch_up, "idle": idle}
    parser = base_parser(__doc__, sections)
    parser.add_argument("--seconds", type=float, help="of two-way writing; 40, with --quick 5")
    parser.add_argument("--warm-up", type=float, metavar="SECONDS", help="before it; 15, with --quick 3")
    parser.add_argument(
        "--delay-ms",
        type=float,
        default=0.0,
        help="measure two-way also with this delay before each site, in each direction",
    )
    parser.add_argument("--runner", choices=("spark", "process"), default="spark", help="of two-way")
    options = parse(parser)
    options.seconds = options.seconds or (5.0 if options.quick else 40.0)
    options.warm_up = options.warm_up or (3.0 if options.quick else 15.0)
    options.idle_seconds = 4.0 if options.quick else 20.0
    run_sections(options, sections)


# Positions


def positions(directory: Path, options: argparse.Namespace) -> Iterator[Line]:
    """Positions in heartbeats, or in a vector in every record."""
    yield from added_bytes(directory)
    yield from ingestion(directory, options)


def added_bytes(directory: Path) -> Iterator[Line]:
    """The bytes of a record beyond its value, for each number of sites."""
    home = directory / "bytes"
    tell("positions: bytes")
    cases = [
        Positions(sites=sites, position_bytes=size) for size in (0, *POSITION_BYTES) for sites in SITE_COUNTS
    ]
    added = dict(zip(cases, measure_bytes(home, cases, BYTES_RECORDS), strict=True))
    print(f"\n{render_bytes(added)}", flush=True)
    few, many = min(SITE_COUNTS), max(SITE_COUNTS)
    limits = {"local": LOCAL_BYTES, "remote": REMOTE_BYTES}
    for where, limit in limits.items():
        for size in (0, *POSITION_BYTES):
            samples = [getattr(each, where) for case, each in added.items() if case.position_bytes == size]
            yield line(
                f"added to a {where} write, {few} to {many} sites",
                f"vector of {size}-byte positions" if size else "heartbeat",
                "bytes/record",
                samples,
                target=None if size else Target(limit=limit, unit="bytes"),
                remark=f"read back from the engines; min-max is over the numbers of sites; "
                f"{REMOTE_BYTES} bytes of a remote write are its stamp, by which it wins or loses"
                if size and where == "remote"
                else "",
            )


def render_bytes(added: Mapping[Positions, Added]) -> str:
    """A table of the bytes by the number of sites."""
    kinds = {0: "heartbeat", **{size: f"vector of {size}" for size in POSITION_BYTES}}
    head = ["sites", *(f"{kind}, {where}" for kind in kinds.values() for where in ("local", "remote"))]
    rows = [head]
    for sites in SITE_COUNTS:
        cells = [added[Positions(sites=sites, position_bytes=size)] for size in kinds]
        rows.append([str(sites), *(f"{number:g}" for each in cells for number in (each.local, each.remote))])
    widths = [max(len(row[column]) for row in rows) for column in range(len(head))]
    lines = ("  ".join(map(str.rjust, row, widths)) for row in rows)
    return "\n".join(["bytes added to a record", *lines])


def ingestion(directory: Path, options: argparse.Namespace) -> Iterator[Line]:
    """How fast a new site applies the changes of another one."""
    records = options.records // INGESTED_SHARE
    cases = [Positions(sites=min(SITE_COUNTS))]
    cases += [
        Positions(sites=sites, position_bytes=size)
        for sites in (min(SITE_COUNTS), max(SITE_COUNTS))
        for size in POSITION_BYTES
    ]
    scratch = (directory / f"ingestion-{number}" for number in count())
    tell("positions: filling the source")
    with filled_source(next(scratch) / SOURCE, cases, records) as source:
        sides = {str(case): Ingestion(source, share_all(cases), case, scratch).per_second for case in cases}
        in_turns("positions: ingestion, to warm up", sides, 1)
        samples = in_turns("positions: ingestion", sides, options.repetitions)
    heartbeat = str(cases[0])
    ours = (heartbeat, Measure.of(samples[heartbeat]))
    for name, rates in samples.items():
        yield line(
            f"applying {records:,} changes",
            name,
            "changes/s",
            rates,
            against=None if name == heartbeat else ours,
            remark="durable, captured, sums counted"
            if name == heartbeat
            else "the same, and each vector is decoded, compared with the mark, and raises it",
        )


# Two-way


def two_way(directory: Path, options: argparse.Namespace) -> Iterator[Line]:
    """Writes at two sites at once, replicated in both directions."""
    homes = (directory / f"two-way-{number}" for number in count())

    def measure(delay_ms: float) -> dict[tuple[str, str], Lag]:
        home = next(homes)
        try:
            return measure_two_way(
                home,
                seconds=options.seconds,
                warm_up_seconds=options.warm_up,
                delay_ms=delay_ms,
                runner=options.runner,
            )
        finally:
            rmtree(home, ignore_errors=True)

    delays = {0.0: "", options.delay_ms: f", {options.delay_ms:g} ms away"} if options.delay_ms else {0.0: ""}
    sides = {text: partial(measure, delay_ms) for delay_ms, text in delays.items()}
    samples = in_turns("two-way", sides, options.repetitions)
    for text, runs in samples.items():
        for what, limit in LAG_MS.items():
            for source, target in permutations(SITES, 2):
                yield line(
                    f"lag at {WRITES_PER_SECOND:,} writes/s at each site, {what}",
                    f"{source} to {target}{text}",
                    "ms",
                    [getattr(run[source, target], what) for run in runs],
                    # The target is about sites that are close to each other.
                    target=None if text else Target(limit=limit, unit="ms", strictly=True),
                )
        for name in SITES:
            rates = [
                lag.records_per_second for run in runs for (source, _), lag in run.items() if source == name
            ]
            yield line(f"  written, of {WRITES_PER_SECOND:,}", f"{name}{text}", "records/s", rates)


# Catching up


@dataclass(frozen=True, kw_only=True)
class CaughtUp:
    """Changes a second over the whole run, and from the last poll without a change to the one with all."""

    whole: float
    flowing: float


def catch_up(directory: Path, options: argparse.Namespace) -> Iterator[Line]:
    """A link that begins after all changes were written."""
    ids = {name: default_site_id(name) for name in SITES}
    filled = directory / "filled" / SITES[0]
    tell("catch-up: filling the source")
    fill_shared_site(filled, ids, options.records)
    homes = (directory / f"catch-up-{number}" for number in count())
    with open_session(SparkOptions(master=MASTER)) as spark:
        sides = {
            ON_SPARK: partial(
                catch_up_served, partial(replicate_topology, spark=spark), filled, homes, options.records
            ),
            BY_PROCESS: partial(catch_up_served, run_in_process, filled, homes, options.records),
            IN_PROCESS: partial(catch_up_in_process, filled, homes, ids, options.records),
        }
        in_turns("catch-up, to warm up", sides, 1)
        samples = in_turns("catch-up", sides, options.repetitions)
    bound = (IN_PROCESS, Measure.of([each.whole for each in samples[IN_PROCESS]]))
    work = f"catching up on {options.records:,} changes"
    yield line(
        work,
        ON_SPARK,
        "changes/s",
        [each.whole for each in samples[ON_SPARK]],
        target=Target(limit=CHANGES_PER_SECOND, unit="changes/s", at_least=True),
        against=bound,
        remark=f"commits of {COMMIT}; applied, captured and durable; from starting the queries to their end",
    )
    yield line(
        "  from the first change to the last",
        ON_SPARK,
        "changes/s",
        [each.flowing for each in samples[ON_SPARK]],
        against=bound,
        remark="without starting and ending the queries, as the target sees it",
    )
    yield line(work, BY_PROCESS, "changes/s", [each.whole for each in samples[BY_PROCESS]], against=bound)
    yield line(work, IN_PROCESS, "changes/s", [each.whole for each in samples[IN_PROCESS]])


def run_in_process(
    topology: Topology, addresses: Mapping[str, SiteAddress], *, once: bool
) -> TopologySummary:
    """Run links in threads of this process."""
    return run_links(topology, addresses, ProcessRunner(), once=once)


def catch_up_served(
    run: Callable[..., TopologySummary], filled: Path, homes: Iterator[Path], changes: int
) -> CaughtUp:
    """Measure a new site that catches up with a copy of the filled one; both are served."""
    home = next(homes)
    copytree(filled, home / SITES[0])
    with serving(home / SITES[0]) as source, serving(home / SITES[1]) as target:
        servers = dict(zip(SITES, (source, target), strict=True))
        urls = {name: server.url for name, server in servers.items()}
        topology = share_served(servers, urls, [NAMESPACE], epoch=2)
        with watching(target, changes) as flowing:
            begun = perf_counter()
            run(topology, site_addresses(topology), once=True)
            seconds = perf_counter() - begun
        require_captured(target, changes)
    rmtree(home)
    return CaughtUp(whole=changes / seconds, flowing=changes / flowing[0])


@contextmanager
def watching(target: ServedSite, changes: int) -> Iterator[Sequence[float]]:
    """Poll the changes of a new site; at the end, the yielded list has the seconds from none to all."""
    seconds: list[float] = []
    ended = Event()

    def watch() -> None:
        empty_at = perf_counter()
        with target.opened() as site:
            while not seconds and not ended.wait(WATCH_SECONDS):
                seen = site.statistics().changes
                if not seen:
                    empty_at = perf_counter()
                elif seen >= changes:
                    seconds.append(perf_counter() - empty_at)

    watcher = Thread(target=watch, daemon=True)
    watcher.start()
    try:
        yield seconds
        watcher.join(10 * WATCH_SECONDS)
    finally:
        ended.set()
        watcher.join()


def require_captured(target: ServedSite, changes: int) -> None:
    """Raise PeerFailed unless all changes are in the target's own change log."""
    if (captured := target.catch_up_columns(changes)) != changes:
        raise PeerFailed(f"the change log of the target holds {captured:,} changes of {changes:,}")


def catch_up_in_process(
    filled: Path, homes: Iterator[Path], ids: Mapping[str, int], changes: int
) -> CaughtUp:
    """Measure the same steps, one after the other, between two sites of this process."""
    home = next(homes)
    copytree(filled, home / SITES[0])
    with (
        open_site(home / SITES[0]) as source,
        open_site(home / SITES[1], site_id=ids[SITES[1]]) as target,
    ):
        target.set_topology(share(ids, [NAMESPACE]))
        begun = perf_counter()
        applied = run_link(source, target, [NAMESPACE])
        seconds = perf_counter() - begun
    if applied != changes:
        raise PeerFailed(f"{applied:,} changes were applied of {changes:,}")
    rmtree(home)
    return CaughtUp(whole=changes / seconds, flowing=changes / seconds)


# Idle


def idle(directory: Path, options: argparse.Namespace) -> Iterator[Line]:
    """A served site without calls, which shares three namespaces with two others."""
    make_neighbours(directory, NEIGHBOURS, NAMESPACES)
    path = directory / next(iter(NEIGHBOURS))
    homes = (directory / f"idle-{number}" for number in count())
    sides = {
        name: lambda heartbeats=heartbeats: measure_idleness(
            path, next(homes), seconds=options.idle_seconds, heartbeats=heartbeats
        )
        for name, heartbeats in {"with heartbeats": True, "without": False}.items()
    }
    samples = in_turns("idle", sides, options.repetitions)
    for name, runs in samples.items():
        yield line("idle: CPU time", name, "% of a core", [run.cpu_percent for run in runs])
    with_them, without = samples.values()
    yield line(
        "  of heartbeats",
        "the difference",
        "% of a core",
        [one.cpu_percent - other.cpu_percent for one, other in zip(with_them, without, strict=True)],
        target=Target(limit=IDLE_CPU_PERCENT, unit="% of a core", strictly=True),
        remark=f"{options.idle_seconds:g} s in each repetition; without them there is no garbage collection, "
        "either",
    )
    yield line(
        "idle: heartbeats in the change log",
        "with heartbeats",
        "bytes/s",
        [run.bytes_per_second for run in with_them],
        target=Target(limit=IDLE_BYTES_PER_SECOND, unit="bytes/s", strictly=True),
        remark=f"keys and rows; {len(NAMESPACES)} namespaces, {len(NEIGHBOURS)} sites",
    )
    yield line("  written", "with heartbeats", "rows/s", [run.heartbeats_per_second for run in with_them])


if __name__ == "__main__":
    main()
