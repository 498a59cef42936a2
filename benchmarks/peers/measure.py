"""The measurements of every peer and of Floodmark, through the protocols of `base.py`.

Clients run in several processes, because thirty-two threads of one Python process measure its lock and not
the server: they made a third as many gets from Redis as in four processes.  All processes of a machine share
the clock that `perf_counter` reads, so their times can be compared.
"""

import multiprocessing
import os
import statistics
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, Future, ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from itertools import cycle, islice
from math import inf
from time import perf_counter
from typing import Final, Literal, NamedTuple, Self, TypeAlias

from benchmarks.peers.base import (
    ANSWER_SECONDS_MAX,
    Call,
    Client,
    Pair,
    PeerFailed,
    PipelinedClient,
    Server,
    Write,
    in_batches_of,
)

PROCESSES: Final = 4
# Time for clients to connect: once, and for each client.
STARTING_SECONDS: Final = 2.0
CONNECTING_SECONDS: Final = 0.02
TAIL_BATCH: Final = 50
TAIL_RECORDS_PER_SECOND: Final = 5_000
TAIL_WARM_UP_BATCHES: Final = 10

Operation: TypeAlias = Literal["put", "get", "mix"]
# One of this many calls is a put.
PUT_EVERY: Final[Mapping[Operation, float]] = {"put": 1, "mix": 5, "get": inf}
OpenClient: TypeAlias = Callable[[], AbstractContextManager[Client]]
OpenWriter: TypeAlias = Callable[[], AbstractContextManager[Write]]
OpenTail: TypeAlias = Callable[[], AbstractContextManager[Iterator[Sequence[Pair]]]]


class Span(NamedTuple):
    """When a call began and when it returned."""

    begun: float
    returned: float


@dataclass(frozen=True, kw_only=True)
class Latency:
    """Mean and percentiles, in seconds."""

    mean: float
    p50: float
    p99: float

    @classmethod
    def of(cls, samples: Sequence[float]) -> Self:
        percentiles = statistics.quantiles(samples, n=100)
        return cls(mean=statistics.fmean(samples), p50=percentiles[49], p99=percentiles[98])


@dataclass(frozen=True, kw_only=True)
class Tail:
    """The time until a reader sees a change, from the begin and from the return of the write.

    From the return, it is negative if the reader had the change before the write returned.
    """

    since_begun: Latency
    since_returned: Latency
    records_per_second: float


@dataclass(frozen=True, kw_only=True)
class Points:
    """The latency and rate of point operations, over all clients."""

    latency: Latency
    per_second: float


def measure_load(server: Server, records: Sequence[Pair], batch: int) -> float:
    """Load the records; returns records a second."""
    begun = perf_counter()
    server.load(records, batch)
    return len(records) / (perf_counter() - begun)


def measure_catch_up(server: Server, count: int) -> float:
    """Catch up on `count` changes; returns changes a second."""
    begun = perf_counter()
    seen = server.catch_up(count)
    seconds = perf_counter() - begun
    if seen < count:
        raise PeerFailed(f"the reader saw {seen:,} changes of {count:,}")
    return seen / seconds


# Live tail


def measure_tail(
    open_writer: OpenWriter,
    open_tail: OpenTail,
    records: Sequence[Pair],
    *,
    batch: int = TAIL_BATCH,
    records_per_second: float = TAIL_RECORDS_PER_SECOND,
    writer_pool: Executor | None = None,
) -> Tail:
    """Write batches at a fixed rate, and record when a reader in this process sees each change.

    The writer runs in its own process, so `open_writer` must be picklable; for a site of this process, pass
    a thread pool as `writer_pool`.  The first batches are a warm-up and are not counted.
    """
    batches = list(in_batches_of(batch, records))
    if len(batches) <= TAIL_WARM_UP_BATCHES:
        raise PeerFailed(f"a tail needs more than {TAIL_WARM_UP_BATCHES} batches, and got {len(batches)}")
    interval = batch / records_per_second
    with ExitStack() as stack:
        pool = stack.enter_context(client_processes(1)) if writer_pool is None else writer_pool
        arrivals = stack.enter_context(open_tail())
        writing = pool.submit(write_at_rate, open_writer, batches, interval)
        seen = _moments_seen(arrivals, records, writing)
        spans = writing.result(timeout=ANSWER_SECONDS_MAX)
    first = TAIL_WARM_UP_BATCHES * batch
    counted = [(spans[number // batch], seen[number]) for number in range(first, len(records))]
    return Tail(
        since_begun=Latency.of([moment - span.begun for span, moment in counted]),
        since_returned=Latency.of([moment - span.returned for span, moment in counted]),
        records_per_second=len(counted) / (spans[-1].returned - spans[TAIL_WARM_UP_BATCHES].begun),
    )


def write_at_rate(open_writer: OpenWriter, batches: Iterable[Sequence[Pair]], interval: float) -> list[Span]:
    """Begin a batch each interval, or when the previous one has returned, if that is later."""
    spans = []
    with open_writer() as write:
        start = perf_counter()
        for number, batch in enumerate(batches):
            time.sleep(max(0.0, start + number * interval - perf_counter()))
            begun = perf_counter()
            write(batch)
            spans.append(Span(begun, perf_counter()))
    return spans


def _moments_seen(
    arrivals: Iterator[Sequence[Pair]], records: Sequence[Pair], writing: Future[list[Span]]
) -> list[float]:
    moments: list[float] = []
    try:
        for group in arrivals:
            moment = perf_counter()
            expected = records[len(moments) : len(moments) + len(group)]
            if list(group) != list(expected):
                raise PeerFailed(f"after {len(moments):,} changes the reader saw others than were written")
            moments += [moment] * len(group)
            if len(moments) == len(records):
                break
    except PeerFailed:
        # If the writer failed, its error is the cause: raise that one.
        if writing.done():
            writing.result()
        raise
    return moments


# Point operations


def measure_points(
    open_client: OpenClient,
    operation: Operation,
    pairs: Sequence[Pair],
    *,
    clients: int,
    seconds: float,
    pipeline: int = 1,
    processes: int = PROCESSES,
    pool: Executor | None = None,
) -> Points:
    """Run clients over the pairs for `seconds`; a get must return the value of its pair.

    Only calls while all clients were running are counted: after the last client began, and before the first
    one ended.  All clients stop at the same time.  A latency is that of a whole pipeline.  A `pool`, if
    given, must have at least `processes` processes.
    """
    if len(pairs) < clients:
        raise PeerFailed(f"{clients} clients need as many pairs to work on, and got {len(pairs)}")
    shares = [pairs[first::clients] for first in range(clients)]
    processes = min(processes, clients)
    with client_processes(processes) if pool is None else nullcontext(pool) as workers:
        wait_started(workers, processes)
        until = perf_counter() + STARTING_SECONDS + clients * CONNECTING_SECONDS + seconds
        pending = [
            workers.submit(run_clients, open_client, operation, shares[first::processes], until, pipeline)
            for first in range(processes)
        ]
        spans = [spans for each in pending for spans in each.result(seconds + ANSWER_SECONDS_MAX * 2)]
    return points_of(spans, pipeline)


def points_of(clients_spans: Sequence[Sequence[Span]], pipeline: int = 1) -> Points:
    """The result over the calls that were made while all clients were running."""
    low = max(spans[0].begun for spans in clients_spans)
    high = min(spans[-1].returned for spans in clients_spans)
    counted = [
        span.returned - span.begun
        for spans in clients_spans
        for span in spans
        if span.begun >= low and span.returned <= high
    ]
    clients = len(clients_spans)
    if len(counted) < clients:
        raise PeerFailed(f"{clients} clients were hardly at work together: give them more seconds")
    return Points(latency=Latency.of(counted), per_second=pipeline * len(counted) / (high - low))


def run_clients(
    open_client: OpenClient,
    operation: Operation,
    shares: Sequence[Sequence[Pair]],
    until: float,
    pipeline: int = 1,
) -> list[list[Span]]:
    """Run each client in a thread of this process until `perf_counter()` reaches `until`."""
    with ThreadPoolExecutor(len(shares)) as pool:
        pending = [pool.submit(_work, open_client, operation, share, until, pipeline) for share in shares]
        return [each.result() for each in pending]


def _work(
    open_client: OpenClient, operation: Operation, pairs: Sequence[Pair], until: float, pipeline: int
) -> list[Span]:
    """Run one client: a put that is not counted, then calls until `until`."""
    numbered = enumerate(cycle(pairs), 1)
    calls = (Call(*pair, is_put=number % PUT_EVERY[operation] == 0) for number, pair in numbered)
    spans: list[Span] = []
    with open_client() as client:
        client.put(*pairs[0])
        while not spans or spans[-1].returned < until:
            batch = [*islice(calls, pipeline)]
            begun = perf_counter()
            found = _call(client, batch)
            spans.append(Span(begun, perf_counter()))
            if [*found] != [call.value for call in batch if not call.is_put]:
                raise PeerFailed(f"a get near {batch[0].key.hex()} did not find what was put")
    return spans


def _call(client: Client, calls: Sequence[Call]) -> Sequence[bytes | None]:
    if len(calls) > 1:
        if not isinstance(client, PipelinedClient):
            raise PeerFailed(f"{type(client).__name__} has no pipelines")
        return client.pipeline(calls)
    call = calls[0]
    if not call.is_put:
        return (client.get(call.key),)
    client.put(call.key, call.value)
    return ()


# Processes


def client_processes(count: int) -> ProcessPoolExecutor:
    """A pool of processes for clients, which end with this process, even if it is killed."""
    context = multiprocessing.get_context("spawn")
    return ProcessPoolExecutor(count, mp_context=context, initializer=_end_with_parent)


def wait_started(pool: Executor, count: int) -> None:
    """Wait until `count` processes of a pool have started, which takes seconds on a busy machine."""
    seen: set[int] = set()
    while len(seen) < count:
        seen |= {*pool.map(_tell_process, range(count))}


def _tell_process(_: int) -> int:
    # Keep this process busy, so that the other tasks go to other processes.
    time.sleep(0.05)
    return os.getpid()


def _end_with_parent() -> None:
    threading.Thread(target=_wait_for_parent, daemon=True).start()


def _wait_for_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)
