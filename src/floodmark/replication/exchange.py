"""Copies the records of a site to another, where no change log holds what the other site lacks.

A link copies the changes that were first written at its source, from the source's change log.  Two cases need
the records themselves.  If a site has lost its log, or is gone for good, the others hold different parts of
its writes: `copy_origin` copies the parts of records that this site wrote.  If a namespace holds data from
before it was shared, `copy_records` copies all of its records.

The target applies by stamp, so copying a record again, or beginning again, has no effect.
"""

from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager
from typing import Final, NamedTuple, Protocol

import pyarrow

from floodmark.codec.ordered import encode_namespace
from floodmark.codec.origins import add_origins
from floodmark.codec.values import decode_value
from floodmark.feed import at_present
from floodmark.merge.origins import split_record
from floodmark.model.errors import CommitTooLarge
from floodmark.model.limits import MIB
from floodmark.model.names import SiteIdentity
from floodmark.model.partition import LinkGuard, WriteStream
from floodmark.model.ranges import KeyRange, prefix_end
from floodmark.model.version import Version
from floodmark.replication.ports import NamespaceIdentity

BATCH_ROWS_MAX: Final = 4_096
BATCH_BYTES_MAX: Final = 4 * MIB
# Batches without an acknowledgement.
UNSETTLED_MAX: Final = 8


class Records(Protocol):
    """Access to the records of a site."""

    def scan_records(
        self, keys: KeyRange, at: Version, *, dead: bool = False
    ) -> Iterator[pyarrow.RecordBatch]: ...


class HolderNamespaces(Protocol):
    """The namespaces of a site."""

    def find_namespace(self, namespace: str) -> NamespaceIdentity: ...


class HolderVersions(Protocol):
    """The versions of a site."""

    def read_version(self) -> Version: ...


class HolderSite(Protocol):
    """A site that sends and takes records."""

    @property
    def identity(self) -> SiteIdentity: ...

    @property
    def namespaces(self) -> HolderNamespaces: ...

    @property
    def versions(self) -> HolderVersions: ...

    @property
    def router(self) -> Records: ...

    def reading(self, version: Version, namespace: int) -> AbstractContextManager[object]: ...

    def write_stream(self, *, durable: bool, apply: bool, link: LinkGuard | None) -> WriteStream: ...


class Copied(NamedTuple):
    """The number of copied records, and the highest version among them, or that of the snapshot."""

    records: int
    newest: Version


def copy_origin(
    source: HolderSite, target: HolderSite, namespace: str, above: Version, guard: LinkGuard
) -> Copied:
    """Copy the parts of a source's records that the guard's site wrote above a version.

    Returns when they are applied and durable.  The target refuses them once the guard no longer holds: it may
    have collected their deletion since.
    """
    newest = 0

    def part_of(record: bytes) -> bytes | None:
        nonlocal newest
        part = split_record(record, guard.source, above).part
        stamp = None if part is None else decode_value(part).origin
        newest = newest if stamp is None else max(newest, stamp.version)
        return part

    with _snapshot(source, namespace) as (_, records):
        return Copied(_copy(records, target, namespace, guard, part_of), newest)


def copy_records(source: HolderSite, target: HolderSite, namespace: str, guard: LinkGuard) -> Copied:
    """Copy all records of a namespace as of one version, deleted ones included; `newest` is that version.

    Returns when they are applied and durable.  The target refuses them once the guard no longer holds.
    """
    with _snapshot(source, namespace) as (at, records):
        return Copied(_copy(records, target, namespace, guard, lambda record: record), at)


def _copy(
    records: Iterator[tuple[bytes, bytes]],
    target: HolderSite,
    namespace: str,
    guard: LinkGuard,
    part_of: Callable[[bytes], bytes | None],
) -> int:
    """Apply a part of each record at a target; the number of records that have one."""
    prefix = encode_namespace(target.namespaces.find_namespace(namespace).id)
    copied = 0
    with closing(target.write_stream(durable=True, apply=True, link=guard)) as stream:
        sending = _Sending(stream)
        for key, record in records:
            part = part_of(record)
            if part is not None:
                copied += 1
                sending.add(prefix + key, part)
        sending.finish()
    return copied


@contextmanager
def _snapshot(site: HolderSite, namespace: str) -> Iterator[tuple[Version, Iterator[tuple[bytes, bytes]]]]:
    """A version, and all records of a namespace as of it, deleted ones included, each with its origin."""
    row = site.namespaces.find_namespace(namespace)
    prefix = encode_namespace(row.id)

    def read(at: Version) -> Iterator[tuple[bytes, bytes]]:
        for batch in site.router.scan_records(KeyRange(prefix, prefix_end(prefix)), at, dead=True):
            versions = batch.column("version").to_numpy()
            stored = add_origins(batch.column("value"), versions, site.identity.site_id)
            yield from zip(batch.column("key").to_pylist(), stored.to_pylist(), strict=True)

    with ExitStack() as stack:
        at, _ = at_present(
            site.versions.read_version,
            lambda version: (version, stack.enter_context(site.reading(version, row.id))),
        )
        yield at, read(at)


class _Sending:
    """Sends records to a site in batches.  A batch that does not fit into a commit is sent in halves."""

    def __init__(self, stream: WriteStream) -> None:
        self._stream = stream
        self._rows: dict[bytes, bytes] = {}
        self._bytes = 0
        self._sent: deque[tuple[dict[bytes, bytes], Future[int]]] = deque()

    def add(self, key: bytes, record: bytes) -> None:
        self._rows[key] = record
        self._bytes += len(key) + len(record)
        if len(self._rows) >= BATCH_ROWS_MAX or self._bytes >= BATCH_BYTES_MAX:
            self._send()
            self._settle(UNSETTLED_MAX)

    def finish(self) -> None:
        """Return when all records are applied."""
        if self._rows:
            self._send()
        self._settle(0)

    def _send(self) -> None:
        self._sent.append((self._rows, self._stream.send(self._rows)))
        self._rows, self._bytes = {}, 0

    def _settle(self, unsettled_max: int) -> None:
        while len(self._sent) > unsettled_max:
            rows, answer = self._sent.popleft()
            try:
                answer.result()
            except CommitTooLarge:
                if len(rows) < 2:
                    raise
                keys = list(rows)
                for half in (keys[: len(keys) // 2], keys[len(keys) // 2 :]):
                    part = {key: rows[key] for key in half}
                    self._sent.appendleft((part, self._stream.send(part)))
