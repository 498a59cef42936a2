"""Sites, links and writers as processes: two sites that replicate in both directions, and an idle one.

The lags are those that a target reports (`site.replication()`): from a commit at the source until it is on
disk at the target, for each namespace, over the last minutes.  So the warm-up writes to a namespace of its
own, and does not count.
"""

import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import permutations
from pathlib import Path
from signal import SIGINT
from time import monotonic, perf_counter
from typing import Final

import psutil
from benchmarks.floodmark_peer import ServedSite
from benchmarks.harness import NAMESPACE, Pair, make_pairs
from benchmarks.peers import PeerFailed, Write
from benchmarks.peers.base import (
    ANSWER_SECONDS_MAX,
    LOOPBACK,
    POLL_SECONDS,
    ServerProcess,
    find_program,
    free_port,
    in_batches_of,
    server_process,
)
from benchmarks.peers.measure import client_processes, write_at_rate
from benchmarks.replication_sites import COMMIT, heartbeat_bytes, share
from benchmarks.spark_data import serving
from benchmarks.spark_processes import COPY_SECONDS_MAX, MASTER

from floodmark.host.statistics import LinkStatistics
from floodmark.model.errors import Unreachable
from floodmark.model.version import Version
from floodmark.replication.topology import Topology
from floodmark.replication.topology_file import render_topology

SITES: Final = ("oslo", "rome")
WARM_UP: Final = "warm-up"
WRITES_PER_SECOND: Final = 2_500

_HERE: Final = Path(__file__).resolve().parent
_PROXY: Final = _HERE / "delaying_proxy.py"
_IDLE_SERVER: Final = _HERE / "idle_server.py"
_PROBE: Final = b"probe of "


# Two-way


@dataclass(frozen=True, kw_only=True)
class Lag:
    """The lag of one direction, in milliseconds, and the rate of its writer."""

    p50: float
    p99: float
    records_per_second: float


def measure_two_way(
    home: Path, *, seconds: float, warm_up_seconds: float, delay_ms: float, runner: str
) -> dict[tuple[str, str], Lag]:
    """Write to two new sites at once, with links in both directions; returns the lag of each direction."""
    home.mkdir()
    with ExitStack() as stack:
        servers = {name: stack.enter_context(serving(home / name)) for name in SITES}
        urls = {name: server.url for name, server in servers.items()}
        if delay_ms:
            urls = {
                name: stack.enter_context(delaying(server, home / f"{name}-proxy", delay_ms))
                for name, server in servers.items()
            }
        topology = share_served(servers, urls, [NAMESPACE, WARM_UP])
        stack.enter_context(linking(topology, servers, home / "links", runner))
        _write_everywhere(servers, WARM_UP, warm_up_seconds)
        rates = _write_everywhere(servers, NAMESPACE, seconds)
        links = {
            (source, target): _wait_for_changes(source, servers[target], _number(seconds))
            for source, target in permutations(servers, 2)
        }
        _require_equal(servers)
    return {
        (source, target): Lag(
            p50=_known(link.lag_ms_p50),
            p99=_known(link.lag_ms_p99),
            records_per_second=rates[source],
        )
        for (source, target), link in links.items()
    }


def share_served(
    servers: Mapping[str, ServedSite], urls: Mapping[str, str], namespaces: Sequence[str], *, epoch: int = 1
) -> Topology:
    """Put a topology in force at all served sites, and return it."""
    ids = {}
    for name, server in servers.items():
        with server.opened() as site:
            ids[name] = site.id
    topology = share(ids, namespaces, urls, epoch=epoch)
    for server in servers.values():
        with server.opened() as site:
            site.set_topology(topology)
    return topology


@contextmanager
def delaying(server: ServedSite, home: Path, delay_ms: float) -> Iterator[str]:
    """Run a proxy before a server that delays all bytes, in both directions; yields its URL."""
    home.mkdir()
    listen = f"{LOOPBACK}:{free_port()}"
    command: list[str | Path] = [sys.executable, _PROXY, "--listen", listen]
    command += ["--to", server.url.removeprefix("grpc://"), "--delay-ms", f"{delay_ms:g}"]
    with server_process("proxy", command, home) as process:
        url = f"grpc://{listen}"
        process.wait_until_ready(ServedSite(url=url).facts, (Unreachable,))
        yield url


@contextmanager
def linking(
    topology: Topology, servers: Mapping[str, ServedSite], home: Path, runner: str = "spark"
) -> Iterator[None]:
    """Run `floodmark replicate` for all links; entered when a first change of each has arrived."""
    program = find_program("floodmark")
    if program is None:
        raise PeerFailed("the floodmark command is not beside this Python: make setup")
    home.mkdir()
    file = home / "topology.toml"
    file.write_text(render_topology(topology), "utf-8")
    for name, server in servers.items():
        with server.opened() as site:
            site.namespace(WARM_UP).put(_PROBE + name.encode(), b"")
    command: list[str | Path] = [program, "replicate", "--topology", file, "--runner", runner]
    if runner == "spark":
        command += ["--master", MASTER]
    with server_process("replicate", command, home, stop_signal=SIGINT) as process:
        for source, target in permutations(servers, 2):
            _wait_for_probe(source, servers[target], process)
        yield


def _wait_for_probe(source: str, target: ServedSite, process: ServerProcess) -> None:
    deadline = monotonic() + COPY_SECONDS_MAX
    with target.opened() as site:
        while site.namespace(WARM_UP).get(_PROBE + source.encode()) is None:
            if process.process.poll() is not None or monotonic() > deadline:
                log = process.log.read_text("utf-8", errors="replace")
                alarms = "\n".join(site.replication().alarms)
                raise PeerFailed(f"floodmark replicate has copied nothing from {source}:\n{log}{alarms}")
            time.sleep(POLL_SECONDS)


def _write_everywhere(servers: Mapping[str, ServedSite], namespace: str, seconds: float) -> dict[str, float]:
    """Write commits at a fixed rate to all sites at once; returns the records a second at each."""
    with client_processes(len(servers)) as pool:
        writing = {
            name: pool.submit(write_steadily, server, namespace, seconds, seed)
            for seed, (name, server) in enumerate(servers.items())
        }
        return {name: each.result(seconds * 10 + ANSWER_SECONDS_MAX) for name, each in writing.items()}


def write_steadily(server: ServedSite, namespace: str, seconds: float, seed: int) -> float:
    """Write commits to one site at a fixed rate; returns the records a second that it reached."""
    number = _number(seconds)
    batches = list(in_batches_of(COMMIT, make_pairs(number, seed)))
    spans = write_at_rate(partial(_writer, server, namespace), batches, COMMIT / WRITES_PER_SECOND)
    return number / (spans[-1].returned - spans[0].begun)


@contextmanager
def _writer(server: ServedSite, name: str) -> Iterator[Write]:
    with server.opened() as site:
        namespace = site.namespace(name)

        def write(records: Sequence[Pair]) -> None:
            namespace.put_many(records)

        yield write


def _number(seconds: float) -> int:
    """The number of records that are written in `seconds`."""
    return int(seconds * WRITES_PER_SECOND)


def _wait_for_changes(source: str, target: ServedSite, number: int) -> LinkStatistics:
    """Wait until a target has `number` changes of a link; returns its statistics of the link.

    Raises PeerFailed if the target has findings, which are checks that failed, or if it takes too long.
    """
    deadline = monotonic() + COPY_SECONDS_MAX
    with target.opened() as site:
        while True:
            [link] = [
                each
                for each in site.replication().links
                if (each.source, each.namespace) == (source, NAMESPACE)
            ]
            if link.findings:
                raise PeerFailed(f"from {source} not all came as it was sent: {link.findings}")
            if link.changes >= number:
                return link
            if monotonic() > deadline:
                raise PeerFailed(f"from {source} only {link.changes:,} changes came of {number:,}: {link}")
            time.sleep(POLL_SECONDS)


def _require_equal(servers: Mapping[str, ServedSite]) -> None:
    held = []
    for server in servers.values():
        with server.opened() as site:
            held.append(dict(site.namespace(NAMESPACE).scan()))
    if any(each != held[0] for each in held):
        raise PeerFailed(f"{' and '.join(servers)} have exchanged all changes and hold different records")


def _known(lag_ms: int | None) -> float:
    assert lag_ms is not None, "changes have come, so they had a lag"
    return lag_ms


# Idle

# Not counted: the work of a server that has just started.
SETTLE_SECONDS: Final = 3.0


@dataclass(frozen=True, kw_only=True)
class Idleness:
    """The cost of a served site without calls: percent of a core, and heartbeats in its change log."""

    cpu_percent: float
    heartbeats_per_second: float
    bytes_per_second: float


def measure_idleness(path: Path, home: Path, *, seconds: float, heartbeats: bool) -> Idleness:
    """Serve a site from its own process, with or without heartbeats, and measure it without calls."""
    home.mkdir()
    listen = f"{LOOPBACK}:{free_port()}"
    command: list[str | Path] = [sys.executable, _IDLE_SERVER, path, "--listen", listen]
    command += [] if heartbeats else ["--no-heartbeats"]
    server = ServedSite(url=f"grpc://{listen}")
    with server_process(path.name, command, home) as process:
        process.wait_until_ready(server.facts, (Unreachable,))
        time.sleep(SETTLE_SECONDS)
        since = _version(server)
        served = psutil.Process(process.process.pid)
        begun, before = perf_counter(), _cpu_seconds(served)
        time.sleep(seconds)
        used, elapsed = _cpu_seconds(served) - before, perf_counter() - begun
        until = _version(server)
    beats, in_log = heartbeat_bytes(path, since, until)
    if bool(beats) != heartbeats:
        raise PeerFailed(f"{beats} heartbeats were written while there should be {'some' * heartbeats or 0}")
    return Idleness(
        cpu_percent=100 * used / elapsed,
        heartbeats_per_second=beats / elapsed,
        bytes_per_second=in_log / elapsed,
    )


def _version(server: ServedSite) -> Version:
    with server.opened() as site:
        return site.now()


def _cpu_seconds(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)
