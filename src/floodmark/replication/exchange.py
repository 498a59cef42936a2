"""What one site wrote, copied from a second to a third: for when the first cannot tell itself any more.

A link copies what was first written at its source, from the source's change log.  If a site has lost its log,
or is gone for good, the others still hold what they got of it, and not all of them the same.  Then their
records are read, all of them, and what the lost site wrote is applied where it is missing: by stamp, so that
it does no harm to copy what is there already, or to begin again.

Of a state only the part that the site wrote is copied.  So whatever is copied has one origin, and a site that
gets its own changes back tells them from those of others.
"""

from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import AbstractContextManager, ExitStack, closing
from typing import Final, NamedTuple, Protocol

import pyarrow

from floodmark.codec.ordered import encode_namespace
from floodmark.codec.origins import add_origins
from floodmark.codec.values import decode_value
from floodmark.feed import at_present
from floodmark.merge.origins import split_record
from floodmark.model.errors import CommitTooLarge
from floodmark.model.limits import MIB
from floodmark.model.partition import LinkGuard, WriteStream
from floodmark.model.ranges import KeyRange, prefix_end
from floodmark.model.version import Version
from floodmark.replication.ports import NamespaceFacts, SiteIdentity

BATCH_ROWS_MAX: Final = 4_096
BATCH_BYTES_MAX: Final = 4 * MIB
# Batches that were sent and not acknowledged.
UNSETTLED_MAX: Final = 8


class Records(Protocol):
    """The way to the records of a site."""

    def scan_records(
        self, keys: KeyRange, at: Version, *, dead: bool = False
    ) -> Iterator[pyarrow.RecordBatch]: ...


class HolderNamespaces(Protocol):
    """The namespaces of a site."""

    def find_namespace(self, namespace: str) -> NamespaceFacts: ...


class HolderVersions(Protocol):
    """The versions of a site."""

    def read_version(self) -> Version: ...


class HolderSite(Protocol):
    """A site that holds changes of another, and takes them in."""

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
    """How many records had something to copy, and the highest version among what was copied."""

    records: int
    newest: Version


def copy_origin(
    source: HolderSite, target: HolderSite, namespace: str, above: Version, guard: LinkGuard
) -> Copied:
    """Copy what one site, the guard's, wrote above a version, as far as the source holds it, to the target.

    Returns when it is applied and durable.  The target refuses what comes when the guard no longer holds: it
    may have been deleted since, without a trace.
    """
    prefix = encode_namespace(target.namespaces.find_namespace(namespace).id)
    records, newest = 0, 0
    with closing(target.write_stream(durable=True, apply=True, link=guard)) as stream:
        sending = _Sending(stream)
        for key, part in _parts_of(source, namespace, guard.source, above):
            stamp = decode_value(part).origin
            assert stamp is not None
            records, newest = records + 1, max(newest, stamp.version)
            sending.add(prefix + key, part)
        sending.finish()
    return Copied(records, newest)


def _parts_of(site: HolderSite, namespace: str, origin: int, above: Version) -> Iterator[tuple[bytes, bytes]]:
    """The keys under which a site holds something of another, and that; the deleted ones too."""
    row = site.namespaces.find_namespace(namespace)
    prefix = encode_namespace(row.id)
    keys = KeyRange(prefix, prefix_end(prefix))
    with ExitStack() as stack:
        at, _ = at_present(
            site.versions.read_version,
            lambda version: (version, stack.enter_context(site.reading(version, row.id))),
        )
        for batch in site.router.scan_records(keys, at, dead=True):
            versions = batch.column("version").to_numpy()
            stored = add_origins(batch.column("value"), versions, site.identity.site_id)
            for key, record in zip(batch.column("key").to_pylist(), stored.to_pylist(), strict=True):
                part = split_record(record, origin, above).part
                if part is not None:
                    yield key, part


class _Sending:
    """Records on their way to a site, in batches.  What does not fit into a commit there goes in halves."""

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
        """Return when all is applied."""
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
