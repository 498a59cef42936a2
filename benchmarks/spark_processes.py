"""Measurements that need processes of their own: the memory of Spark's workers, and the lag of replication.

A worker's memory is measured in a Spark that has done nothing else, so each measurement starts its own Java.
A lag is measured from end to end: a process writes to one site and puts the time into every value, Spark
replicates, and a follower of the other site compares that time with its clock.  All use one machine's clock.
"""

import struct
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from signal import SIGINT
from threading import Event, Thread
from time import monotonic
from typing import Final, TypeAlias

import psutil
from benchmarks.floodmark_peer import ServedSite
from benchmarks.harness import NAMESPACE, Pair, make_pairs
from benchmarks.peers import Latency, PeerFailed, Write
from benchmarks.peers.base import (
    ANSWER_SECONDS_MAX,
    POLL_SECONDS,
    ServerProcess,
    find_program,
    in_batches_of,
    server_process,
)
from benchmarks.peers.measure import (
    TAIL_BATCH,
    TAIL_RECORDS_PER_SECOND,
    client_processes,
    write_at_rate,
)
from benchmarks.spark_data import VALUE_BYTES, Digest, Rows, digest, read_site, require_equal, write_site
from pyspark.sql import SparkSession

from floodmark.model.limits import MIB
from floodmark.spark import SparkOptions, open_session

MASTER: Final = "local[2]"

SparkWork: TypeAlias = Callable[[SparkSession], object]


# Memory

SAMPLE_SECONDS: Final = 0.01
MEMORY_SECONDS_MAX: Final = 900.0


def measure_worker_memory(work: SparkWork) -> float:
    """The peak memory, in MiB, of a Python worker of a new Spark during `work`, which must be picklable."""
    with client_processes(1) as pool:
        return pool.submit(_peak_of_workers, work).result(MEMORY_SECONDS_MAX)


def read_all(spark: SparkSession, *, location: str, namespace: str, expected: Digest) -> None:
    """Read a namespace into an aggregate."""
    require_equal(digest(read_site(spark, location, namespace)), expected)


def write_again(spark: SparkSession, *, rows: Rows, url: str, namespace: str) -> None:
    """Upsert rows that a namespace holds already."""
    write_site(rows.frame(spark), url, namespace)


def _peak_of_workers(work: SparkWork) -> float:
    peak = 0
    ended = Event()

    def sample() -> None:
        nonlocal peak
        while not ended.wait(SAMPLE_SECONDS):
            peak = max([peak, *_worker_memory()])

    with open_session(SparkOptions(master=MASTER)) as spark:
        watcher = Thread(target=sample, daemon=True)
        watcher.start()
        try:
            work(spark)
        finally:
            ended.set()
            watcher.join()
    if not peak:
        raise PeerFailed("Spark had no Python worker, so that no memory was measured")
    return peak / MIB


def _worker_memory() -> Iterator[int]:
    """The resident bytes of each Python process below this one: Spark's workers, and their daemon."""
    for process in psutil.Process().children(recursive=True):
        try:
            if process.name().startswith("python"):
                yield process.memory_info().rss
        except psutil.NoSuchProcess:
            continue


# Lag

# Not counted: the first batches of a Spark that has just started are slower.
WARM_UP_SECONDS: Final = 10.0
# Limit for Spark to start and to replicate a first change.
COPY_SECONDS_MAX: Final = 180.0

_PROBE: Final = b"probe"
_STAMP: Final = struct.Struct(">d")


@dataclass(frozen=True, kw_only=True)
class Lag:
    """The time from before a commit at the source until a follower of the target has it; the write rate."""

    latency: Latency
    records_per_second: float


@contextmanager
def replicating(source: ServedSite, target: ServedSite, home: Path) -> Iterator[None]:
    """Run `floodmark replicate` from one site to the other; entered when a first change has arrived."""
    program = find_program("floodmark")
    if program is None:
        raise PeerFailed("the floodmark command is not beside this Python: make setup")
    home.mkdir()
    command: list[str | Path] = [program, "replicate", source.url, target.url, "--namespace", NAMESPACE]
    command += ["--master", MASTER]
    with source.opened() as site:
        site.namespace(NAMESPACE).put(_PROBE, b"")
    with server_process("replicate", command, home, stop_signal=SIGINT) as process:
        _wait_for_probe(target, process)
        yield


def _wait_for_probe(target: ServedSite, process: ServerProcess) -> None:
    deadline = monotonic() + COPY_SECONDS_MAX
    with target.opened() as site:
        while site.namespace(NAMESPACE).get(_PROBE) is None:
            if process.process.poll() is not None or monotonic() > deadline:
                log = process.log.read_text("utf-8", errors="replace")
                raise PeerFailed(f"floodmark replicate has copied nothing:\n{log}")
            time.sleep(POLL_SECONDS)


def measure_lag(source: ServedSite, target: ServedSite, seconds: float, seed: int) -> Lag:
    """Write commits at a fixed rate to one site, and measure when they arrive at the other."""
    number = int((WARM_UP_SECONDS + seconds) * TAIL_RECORDS_PER_SECOND)
    batches = list(in_batches_of(TAIL_BATCH, make_pairs(number, seed)))
    interval = TAIL_BATCH / TAIL_RECORDS_PER_SECOND
    with client_processes(1) as pool, target.tail() as arrivals:
        writing = pool.submit(write_at_rate, partial(stamping_writer, source), batches, interval)
        try:
            seen = _follow(arrivals, number)
        except PeerFailed:
            # If the writer failed, its error is the cause: raise that one.
            if writing.done():
                writing.result()
            raise
        spans = writing.result(ANSWER_SECONDS_MAX)
    begun = min(stamp for stamp, _ in seen) + WARM_UP_SECONDS
    counted = [moment - stamp for stamp, moment in seen if stamp >= begun]
    return Lag(
        latency=Latency.of(counted),
        records_per_second=number / (spans[-1].returned - spans[0].begun),
    )


@contextmanager
def stamping_writer(server: ServedSite) -> Iterator[Write]:
    """A writer that puts the time at which a batch begins into the first bytes of its values."""
    with server.writer() as write:

        def write_stamped(records: Sequence[Pair]) -> None:
            stamp = _STAMP.pack(time.time())
            write([(key, stamp + value[_STAMP.size : VALUE_BYTES]) for key, value in records])

        yield write_stamped


def _follow(arrivals: Iterable[Sequence[Pair]], number: int) -> list[tuple[float, float]]:
    """For each of `number` changes, the time at which it was written, and at which it arrived."""
    seen: list[tuple[float, float]] = []
    for group in arrivals:
        moment = time.time()
        seen += [(_STAMP.unpack_from(value)[0], moment) for _, value in group]
        if len(seen) >= number:
            break
    return seen
