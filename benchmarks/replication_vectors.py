"""A vector of positions in every record, as in Venice, for comparison with heartbeats.

A vector holds, for each site, the position up to which the writer had its changes when it wrote.  It follows
the value:

    +------------+------------------------------+------------------+----------+
    | value: 100 | a position a site, in order  | bytes a position | sites: 1 |
    |            | of their ids, big-endian     | : 1              |          |
    +------------+------------------------------+------------------+----------+

A consumer decodes the vector of each record, checks whether its own mark covers it (otherwise the record is
new), and raises the mark.  Venice also merges the vector with that of the replaced record, which takes
another read; that is not counted here, in favour of the vector.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from operator import lt
from pathlib import Path
from random import Random
from struct import Struct
from time import perf_counter
from typing import Any, Final, TypeAlias

import pyarrow
import pyarrow.compute
from benchmarks.harness import VALUE_BYTES, Pair, make_pairs
from benchmarks.peers import PeerFailed
from benchmarks.peers.base import in_batches_of
from benchmarks.replication_sites import COMMIT, embedded, open_site, run_link

from floodmark.codec.ordered import encode_namespace
from floodmark.codec.stamps import STAMP_BYTES
from floodmark.codec.values import PLAIN
from floodmark.links.applying import Applier
from floodmark.links.reading import RowKind, read_step
from floodmark.links.steps import plan_step
from floodmark.model.ranges import KeyRange, prefix_end
from floodmark.replication.topology import MemberSite, SharedNamespace, Topology
from floodmark.site import Site

SITES: Final = range(2, 9)
POSITION_BYTES: Final = (8, 24)

SOURCE, TARGET = "site-1", "site-2"

_TRAILER_BYTES: Final = 2
# The bytes after the vector of a record in a link: its stamp, and the flags.
_BEHIND: Final = STAMP_BYTES + len(PLAIN)

Vector: TypeAlias = tuple[Any, ...]


@dataclass(frozen=True, kw_only=True)
class Positions:
    """How records carry positions: a vector with `position_bytes` for each site, or (0) no vector."""

    sites: int
    position_bytes: int = 0

    @property
    def namespace(self) -> str:
        return f"{self.sites}-sites-{self.position_bytes}-bytes"

    def __str__(self) -> str:
        if not self.position_bytes:
            return "heartbeat"
        return f"vector, {self.sites} sites of {self.position_bytes} bytes"

    def add_to(self, pairs: Sequence[Pair], seed: int) -> list[Pair]:
        """The pairs with vectors in which the writer's own position advances with each, and no other does."""
        if not self.position_bytes:
            return list(pairs)
        randomness = Random(seed)
        begun = [randomness.getrandbits(8 * self.position_bytes - 1) for _ in range(self.sites)]
        return [
            (key, value + encode_vector([begun[0] + number, *begun[1:]], self.position_bytes))
            for number, (key, value) in enumerate(pairs, start=1)
        ]


def encode_vector(positions: Sequence[int], position_bytes: int) -> bytes:
    """A vector as it is appended to a value."""
    encoded = b"".join(position.to_bytes(position_bytes, "big") for position in positions)
    return encoded + bytes([position_bytes, len(positions)])


def decode_vector(record: bytes) -> Vector:
    """The positions of a record in a link: integers if they have 8 bytes, else bytes, which compare alike."""
    end = len(record) - _BEHIND - _TRAILER_BYTES
    layout = _layout(record[end], record[end + 1])
    return layout.unpack_from(record, end - layout.size)


@lru_cache
def _layout(position_bytes: int, sites: int) -> Struct:
    position = "Q" if position_bytes == 8 else f"{position_bytes}s"
    return Struct(">" + position * sites)


class Mark:
    """A consumer's position for each site: the maximum over the vectors of the records that it received."""

    def __init__(self) -> None:
        self._positions: Vector = ()

    def take(self, records: Iterable[bytes]) -> int:
        """Raise the mark to each record's vector; returns the number of records that it did not cover."""
        fresh = 0
        mark = self._positions
        for record in records:
            vector = decode_vector(record)
            if not mark:
                mark, fresh = vector, fresh + 1
            elif any(map(lt, mark, vector)):
                mark, fresh = tuple(map(max, mark, vector)), fresh + 1
        self._positions = mark
        return fresh


# Sites


def share_all(cases: Iterable[Positions]) -> Topology:
    """A topology with a namespace for each case, shared by that case's number of sites."""
    names = [f"site-{number}" for number in range(1, max(SITES) + 1)]
    return Topology(
        epoch=1,
        sites={name: MemberSite(id=number) for number, name in enumerate(names, start=1)},
        namespaces={case.namespace: SharedNamespace(sites=tuple(names[: case.sites])) for case in cases},
    )


@contextmanager
def filled_source(path: Path, cases: Sequence[Positions], records: int) -> Iterator[Site]:
    """A site with the same pairs in the namespace of each case, with that case's vectors."""
    # A site stores the records of a commit in key order, so positions must advance in that order.
    commits = in_batches_of(COMMIT, make_pairs(records, seed=42))
    pairs = [pair for commit in commits for pair in sorted(commit)]
    with open_site(path, site_id=1) as site:
        site.set_topology(share_all(cases))
        for case in cases:
            namespace = site.namespace(case.namespace)
            for batch in in_batches_of(COMMIT, case.add_to(pairs, seed=case.sites)):
                namespace.put_many(batch, durability="async")
        site.heartbeat()
        yield site


@dataclass(frozen=True, kw_only=True)
class Added:
    """Bytes of a stored record beyond its value and its flags, at its origin and at the other site."""

    local: float
    remote: float


def measure_bytes(directory: Path, cases: Sequence[Positions], records: int) -> list[Added]:
    """The bytes that each case adds to a record, read back from the engines of two sites."""
    with (
        filled_source(directory / SOURCE, cases, records) as source,
        open_site(directory / TARGET, site_id=2) as target,
    ):
        target.set_topology(share_all(cases))
        names = [case.namespace for case in cases]
        if (applied := run_link(source, target, names)) != records * len(cases):
            raise PeerFailed(f"{applied:,} changes came over, and there are {records * len(cases):,}")
        return [
            Added(local=_added(source, name, records), remote=_added(target, name, records)) for name in names
        ]


def _added(site: Site, namespace: str, records: int) -> float:
    prefix = encode_namespace(site.host.namespaces.find_namespace(namespace).id)
    pages = embedded(site).node.scan_versions(KeyRange(prefix, prefix_end(prefix)), 0, site.now())
    sizes = [len(stored) for page in pages for _, _, stored in page.rows]
    if len(sizes) != records:
        raise PeerFailed(f"{site.name} holds {len(sizes):,} records of {records:,} in {namespace}")
    return sum(sizes) / records - VALUE_BYTES - len(PLAIN)


# Ingestion


class Ingestion:
    """Reads the rows of one case from the source once, and applies them to a new site at each call."""

    def __init__(self, source: Site, topology: Topology, case: Positions, scratch: Iterator[Path]) -> None:
        self._source = source
        self._topology = topology
        self._case = case
        self._scratch = scratch
        self._rows: list[pyarrow.RecordBatch] = []

    def per_second(self) -> float:
        """Records a second that a new site applies, durably, and with the link's position stored."""
        with open_site(next(self._scratch) / TARGET, site_id=2) as target:
            target.set_topology(self._topology)
            step = plan_step(self._source.host, target.host, [self._case.namespace], changes_max=None)
            if not self._rows:
                self._rows = list(read_step(self._source.host, step))
            mark = Mark() if self._case.position_bytes else None
            begun = perf_counter()
            fresh = 0
            with Applier(target.host, step) as applier:
                for rows in self._rows:
                    fresh += rows.num_rows if mark is None else mark.take(_records(rows))
                    applier.add(rows)
                applied = applier.finish()
            target.host.replication.advance_link(step, applied)
            seconds = perf_counter() - begun
        if mark is not None and fresh != applied.changes:
            raise PeerFailed(f"{fresh:,} vectors were new of {applied.changes:,}, and all of them are")
        return applied.changes / seconds


def _records(rows: pyarrow.RecordBatch) -> list[bytes]:
    """The records of a batch that are changes."""
    changes = pyarrow.compute.equal(
        rows.column("kind"), pyarrow.scalar(RowKind.CHANGE.value, pyarrow.uint8())
    )
    records: list[bytes] = rows.column("record").filter(changes).to_pylist()
    return records
