"""Measure each peer alone: its load, catch-up and live tail, and the latencies of its clients.

    python -m benchmarks.peers --records 100000
    python -m benchmarks.peers --records 20000 --only redis --only nats

Peers that are not installed are skipped, with a line that says how to install them.  Use this to try a peer
and its configuration; to compare peers with Floodmark, use the benchmarks that run all sides in turn.
"""

import argparse
import signal
import statistics
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import FrameType
from typing import Final

from benchmarks.harness import BATCH, MICROSECONDS, describe_machine, make_pairs, tell
from benchmarks.peers.base import KeyServer, Pair, Server, scratch_directory
from benchmarks.peers.measure import (
    TAIL_RECORDS_PER_SECOND,
    Operation,
    measure_catch_up,
    measure_load,
    measure_points,
    measure_tail,
)
from benchmarks.peers.roster import PEERS, installed_peers

CLIENTS: Final = (1, 32)
OPERATIONS: Final[tuple[Operation, ...]] = ("put", "get")


def main() -> None:
    options = parse_arguments()
    # SIGTERM raises SystemExit, so that the servers are stopped too.
    signal.signal(signal.SIGTERM, _exit)
    chosen = [peer for peer in PEERS if not options.only or peer.name in options.only]
    heading = describe_machine()
    columns: dict[str, Mapping[str, str]] = {}
    with scratch_directory(options.directory) as directory:
        for peer in installed_peers(chosen):
            with peer.running(directory) as server:
                heading[peer.name] = ", ".join(f"{fact} {text}" for fact, text in server.facts().items())
                columns[peer.name] = dict(measure(peer.name, server, options))
    print(render(heading, columns))


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.peers", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("--records", type=int, default=100_000)
    parser.add_argument("--batch", type=int, default=BATCH, help="records in a batch of the load")
    parser.add_argument("--repeat", type=int, default=3, help="how often to catch up; the median counts")
    parser.add_argument("--tail-seconds", type=float, default=3.0, help="of writing at a fixed rate")
    parser.add_argument("--seconds", type=float, default=2.0, help="of each kind of point operation")
    parser.add_argument("--only", action="append", choices=[peer.name for peer in PEERS])
    parser.add_argument("--directory", type=Path, default=Path.cwd(), help="on the disk to measure")
    options = parser.parse_args()
    if min(options.records, options.batch, options.repeat) < 1:
        parser.error("--records, --batch and --repeat start at 1")
    if options.tail_seconds < 1 or options.seconds < 1:
        parser.error("--tail-seconds and --seconds start at 1: less says little about a p99")
    return options


def measure(name: str, server: Server, options: argparse.Namespace) -> Iterator[tuple[str, str]]:
    """All measurements of one peer, as pairs of name and text."""
    records = make_pairs(options.records, seed=42)
    tell(f"{name}: load")
    yield "load, records/s", f"{measure_load(server, records, options.batch):,.0f}"
    tell(f"{name}: catch up")
    rates = [measure_catch_up(server, len(records)) for _ in range(options.repeat)]
    yield "catch up, changes/s", f"{statistics.median(rates):,.0f}"
    tell(f"{name}: live tail")
    yield from measure_live(server, options.tail_seconds)
    if isinstance(server, KeyServer):
        tell(f"{name}: put and get")
        server.fill(records, options.batch)
        yield from measure_clients(server, records, options.seconds)


def measure_live(server: Server, seconds: float) -> Iterator[tuple[str, str]]:
    records = make_pairs(int(seconds * TAIL_RECORDS_PER_SECOND), seed=43)
    tail = measure_tail(server.writer, server.tail, records)
    yield "tail: written records/s", f"{tail.records_per_second:,.0f}"
    for moment, latency in (("begin", tail.since_begun), ("return", tail.since_returned)):
        yield f"tail: from {moment} of write, p50 / p99 µs", _two(latency.p50, latency.p99)


def measure_clients(server: KeyServer, pairs: list[Pair], seconds: float) -> Iterator[tuple[str, str]]:
    for clients in CLIENTS:
        for operation in OPERATIONS:
            points = measure_points(server.client, operation, pairs, clients=clients, seconds=seconds)
            what = f"{operation}, {clients} client{'s' * (clients > 1)}"
            yield f"{what}: mean / p99 µs", _two(points.latency.mean, points.latency.p99)
            yield f"{what}: operations/s", f"{points.per_second:,.0f}"


def render(heading: Mapping[str, str], columns: Mapping[str, Mapping[str, str]]) -> str:
    """The table with one column for each peer, below the description of the machine and the servers."""
    works = dict.fromkeys(work for column in columns.values() for work in column)
    lines = [("", *columns)]
    lines += [(work, *(column.get(work, "") for column in columns.values())) for work in works]
    widths = [max(map(len, cells)) for cells in zip(*lines, strict=True)]
    texts = [f"{name}: {text}" for name, text in heading.items()] + [""]
    for work, *cells in lines:
        padded = [cell.rjust(width) for cell, width in zip(cells, widths[1:], strict=True)]
        texts.append("  ".join([work.ljust(widths[0]), *padded]).rstrip())
    return "\n".join(texts)


def _two(first: float, second: float) -> str:
    return f"{first * MICROSECONDS:,.0f} / {second * MICROSECONDS:,.0f}"


def _exit(signal_number: int, _: FrameType | None) -> None:
    sys.exit(128 + signal_number)


if __name__ == "__main__":
    main()
