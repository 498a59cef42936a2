"""Two sites that hold the same records: filled, served, and written to while they are compared.

Each site is the origin of half of the records, which came to the other over a link.  So at both sites half of
the records carry their origin, as they do at sites that replicate in both directions.
"""

import random
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import permutations
from pathlib import Path
from shutil import copytree
from time import monotonic
from typing import Final

import pyarrow.parquet
from benchmarks.floodmark_peer import ServedSite
from benchmarks.harness import BATCH, NAMESPACE, Database, Pair
from benchmarks.peers import PeerFailed, Write
from benchmarks.peers.base import ANSWER_SECONDS_MAX
from benchmarks.peers.measure import Span, client_processes, write_at_rate
from benchmarks.replication_processes import SITES, WARM_UP, WRITES_PER_SECOND, linking, share_served
from benchmarks.replication_sites import COMMIT, open_site, run_link, share
from benchmarks.spark_data import VALUE_BYTES, Rows, serving

from floodmark.partition import FAMILIES
from floodmark.replication.topology import default_site_id
from floodmark.site.address import SiteAddress

# The writers stop at the latest after this time.
WRITING_SECONDS_MAX: Final = 3_600.0
# Before the first comparison, until links and writers run steadily.
WARM_UP_SECONDS: Final = 10.0


@dataclass(frozen=True, kw_only=True)
class Filled:
    """The directories of two sites that agree, closed, and the rows that both hold."""

    directory: Path
    rows: Rows

    @contextmanager
    def served(self, home: Path) -> Iterator[dict[str, ServedSite]]:
        """Serve copies of the sites."""
        with ExitStack() as stack:
            servers = {}
            for name in SITES:
                copytree(self.directory / name, home / name)
                servers[name] = stack.enter_context(serving(home / name))
            yield servers

    def keys(self, count: int) -> list[bytes]:
        """The first `count` keys of the rows, which are in no order."""
        keys: list[bytes] = []
        for file in sorted(self.rows.path.iterdir()):
            for batch in pyarrow.parquet.ParquetFile(file).iter_batches(BATCH, columns=["key"]):
                keys += batch.column(0).to_pylist()
                if len(keys) >= count:
                    return keys[:count]
        return keys


def fill_sites(directory: Path, rows: Rows) -> Filled:
    """Make two sites, write half of the rows to each, and replicate them to the other."""
    ids = {name: default_site_id(name) for name in SITES}
    with ExitStack() as stack:
        sites = [stack.enter_context(open_site(directory / name, site_id=ids[name])) for name in SITES]
        for site in sites:
            site.set_topology(share(ids, [NAMESPACE]))
        namespaces = [site.namespace(NAMESPACE) for site in sites]
        for number, batch in enumerate(rows.batches()):
            namespaces[number % len(namespaces)].put_many(batch, durability="async")
        for source, target in permutations(sites, 2):
            run_link(source, target, [NAMESPACE])
        for site in sites:
            site.sync()
    for name in SITES:
        with Database(directory / name / "engine", FAMILIES) as engine:
            engine.settle()
    return Filled(directory=directory, rows=rows)


def addresses_of(servers: Mapping[str, ServedSite]) -> list[SiteAddress]:
    return [SiteAddress(location=server.url) for server in servers.values()]


def change_keys(servers: Mapping[str, ServedSite], keys: Sequence[bytes], seed: int) -> None:
    """Give keys new values at the first site, and replicate them to the second."""
    randomness = random.Random(seed)
    pairs = [(key, randomness.randbytes(VALUE_BYTES)) for key in keys]
    first, second = (servers[name] for name in SITES)
    first.load(pairs, BATCH)
    with first.opened() as source, second.opened() as target:
        source.heartbeat()
        run_link(source, target, [NAMESPACE])


# Writing without end


class Writing:
    """The writers at all sites, which write until `end` is called."""

    def __init__(self, stop: Path, writers: Sequence["Future[list[Span]]"]) -> None:
        self._stop = stop
        self._writers = writers

    def end(self) -> float:
        """Stop the writers; returns the records a second that they wrote together."""
        self._stop.touch()
        return sum(_records_per_second(each.result(ANSWER_SECONDS_MAX)) for each in self._writers)

    def require_running(self) -> None:
        """Raise if a writer has already ended: the comparisons would then have run without writes."""
        for each in self._writers:
            if each.done():
                each.result()
                raise PeerFailed("a writer has ended before the comparisons did")


@contextmanager
def writing_to(servers: Mapping[str, ServedSite], keys: Sequence[bytes], home: Path) -> Iterator[Writing]:
    """Run links between all sites on Spark, and for each site a process that keeps writing to `keys`."""
    urls = {name: server.url for name, server in servers.items()}
    topology = share_served(servers, urls, [NAMESPACE, WARM_UP], epoch=2)
    stop = home / "stop"
    with linking(topology, servers, home / "links"), client_processes(len(servers)) as pool:
        writers = [
            pool.submit(_write_until_stopped, server, keys, stop, seed)
            for seed, server in enumerate(servers.values())
        ]
        try:
            time.sleep(WARM_UP_SECONDS)
            yield Writing(stop, writers)
        finally:
            stop.touch()


def _write_until_stopped(server: ServedSite, keys: Sequence[bytes], stop: Path, seed: int) -> list[Span]:
    batches = _endless_batches(keys, stop, seed)
    return write_at_rate(partial(_changing_writer, server), batches, COMMIT / WRITES_PER_SECOND)


def _endless_batches(keys: Sequence[bytes], stop: Path, seed: int) -> Iterator[list[Pair]]:
    """New values for random keys, until `stop` exists.  All sites draw from the same keys."""
    randomness = random.Random(seed)
    deadline = monotonic() + WRITING_SECONDS_MAX
    while not stop.exists() and monotonic() < deadline:
        yield [(key, randomness.randbytes(VALUE_BYTES)) for key in randomness.sample(keys, COMMIT)]


@contextmanager
def _changing_writer(server: ServedSite) -> Iterator[Write]:
    """A writer that deletes the first key of a batch, and puts the other records."""
    with server.opened() as site:
        namespace = site.namespace(NAMESPACE)

        def write(records: Sequence[Pair]) -> None:
            namespace.delete(records[0][0])
            namespace.put_many(records[1:])

        yield write


def _records_per_second(spans: Sequence[Span]) -> float:
    return COMMIT * len(spans) / (spans[-1].returned - spans[0].begun)
