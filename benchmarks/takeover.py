"""How long writes stop when a node is killed, and when a partition moves to another node as planned.

    make bench-takeover                       20 of each: some minutes
    make bench-takeover ARGS="--runs 3"       a look

Three nodes on one PostgreSQL; a client puts to one key without a pause.  A takeover is measured from kill -9
of the key's owner to the end of the first write at its successor, a move by the longest write during it.
"""

import argparse
import statistics
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path
from threading import Event, Thread
from time import perf_counter
from typing import Final

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.harness import NAMESPACE
from benchmarks.node_processes import STOP_SECONDS_MAX, NodeProcess, connect, node_processes
from benchmarks.nodes import database
from benchmarks.peers.base import scratch_directory

import floodmark
from floodmark.model.errors import FloodmarkError
from floodmark.wire import Connection
from floodmark.wire.messages import MAP

KEY: Final = b"key"
TAKEOVER_SECONDS_MAX: Final = 8.0
MOVE_SECONDS_MAX: Final = 0.2


def owner_of(nodes: Sequence[NodeProcess]) -> int:
    """The number of the node that owns the key, as the first node that answers reports it."""
    for node in nodes:
        with closing(Connection(node.url)) as connection:
            try:
                return connection.call(MAP).partitions[-1].node
            except FloodmarkError:
                continue
    raise SystemExit("no node answers")


def wait_for_all(site: floodmark.Site, nodes: Sequence[NodeProcess]) -> None:
    """Wait until the keeper has seen a beat of each node, so that partitions can move to it."""
    deadline = perf_counter() + STOP_SECONDS_MAX
    while sum(each.lives and bool(each.url) for each in site.host.node_port.nodes()) < len(nodes):
        if perf_counter() > deadline:
            raise SystemExit("a node does not beat")
        Event().wait(0.1)
    # The beats were read just now; the keeper uses those of its own last poll, once a second.
    Event().wait(2.0)


def measure_takeover(site: floodmark.Site, nodes: Sequence[NodeProcess]) -> float:
    """Kill the owner, and start it again; returns the seconds until the first write at its successor."""
    counts = site.namespace(NAMESPACE)
    owner = nodes[owner_of(nodes) - 1]
    owner.kill()
    begun = perf_counter()
    while True:
        try:
            counts.put(KEY, b"value")
            break
        except FloodmarkError:
            continue
    seconds = perf_counter() - begun
    owner.start()
    return seconds


def measure_move(site: floodmark.Site, nodes: Sequence[NodeProcess]) -> float:
    """The longest write, in seconds, while the partition of the key moves to the next node."""
    counts, stopping, longest = site.namespace(NAMESPACE), Event(), [0.0]

    def write() -> None:
        while not stopping.is_set():
            begun = perf_counter()
            counts.put(KEY, b"value")
            longest[0] = max(longest[0], perf_counter() - begun)

    writer = Thread(target=write)
    writer.start()
    try:
        partition = site.host.partitions.partitions()[-1].id
        site.host.node_port.move(partition, owner_of(nodes) % len(nodes) + 1)
    finally:
        stopping.set()
        writer.join()
    return longest[0]


def report(name: str, seconds: Sequence[float], seconds_max: float) -> bool:
    """Print the distribution; returns whether its p99 is within the bound."""
    ordered = sorted(seconds)
    slowest = ordered[min(len(ordered) - 1, round(0.99 * len(ordered)))]
    print(
        f"{name}: {len(ordered)} runs, p50 {statistics.median(ordered):.3f} s, p99 {slowest:.3f} s, "
        f"longest {ordered[-1]:.3f} s; the limit of the p99 is {seconds_max:g} s"
    )
    return slowest <= seconds_max


def main() -> int:
    """Measure both, and fail if one takes too long."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--only", choices=["takeover", "move"])
    arguments = parser.parse_args()
    kinds: list[tuple[str, Callable[[floodmark.Site, Sequence[NodeProcess]], float], float]] = [
        ("takeover", measure_takeover, TAKEOVER_SECONDS_MAX),
        ("move", measure_move, MOVE_SECONDS_MAX),
    ]
    with scratch_directory(Path(tempfile.gettempdir())) as home:
        good = True
        with database(home) as url, node_processes(url, home) as nodes, connect(nodes) as site:
            site.create_namespace(NAMESPACE).put(KEY, b"value")
            for name, measure, seconds_max in kinds:
                if arguments.only in (None, name):
                    wait_for_all(site, nodes)
                    seconds = [measure(site, nodes) for _ in range(arguments.runs)]
                    good = report(name, seconds, seconds_max) and good
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
