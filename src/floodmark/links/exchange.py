"""Copies the records of a site to another if the changes that the other lacks are in no change log.

If a site has lost its log, or is lost for good, the other sites hold different parts of its writes:
`copy_origin` copies the parts of records that this site wrote.  If a namespace holds data from before it was
shared, `copy_records` copies all of its records.  A site without a usable backup is rebuilt from a
`HeldSnapshot`.

The target applies by stamp, so copying a record again, or beginning again, has no effect.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from datetime import timedelta
from typing import Final, NamedTuple, TypeAlias

import numpy
import pyarrow

from floodmark.codec.ordered import qualify_range
from floodmark.codec.records import add_origins, qualify_keys
from floodmark.codec.values import decode_value
from floodmark.feed import at_present
from floodmark.host.ports import Host
from floodmark.links.applying import Batches, CommitBatch, Sender
from floodmark.merge.parts import split_record
from floodmark.model.errors import SafePointNotFound
from floodmark.model.partition import ApplyStream, LinkGuard, LoadStream
from floodmark.model.version import Version

# How long the source keeps a snapshot for a process that was killed.
HELD: Final = timedelta(hours=24)

# Keys and stored records.
Pages: TypeAlias = Iterator[tuple[list[bytes], list[bytes]]]


class Copied(NamedTuple):
    """The number of copied records, and the highest version among them, or that of the snapshot."""

    records: int
    newest: Version


def copy_origin(source: Host, target: Host, namespace: str, above: Version, guard: LinkGuard) -> Copied:
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

    with _snapshot(source, namespace) as (_, pages):
        return Copied(_copy(pages, target, namespace, ApplyStream(True, guard), part_of), newest)


def copy_records(source: Host, target: Host, namespace: str, guard: LinkGuard) -> Copied:
    """Copy all records of a namespace as of one version, deleted ones included; `newest` is that version.

    Returns when they are applied and durable.  The target refuses them once the guard no longer holds.
    """
    with _snapshot(source, namespace) as (at, pages):
        command = ApplyStream(True, guard)
        return Copied(_copy(pages, target, namespace, command, lambda record: record), at)


class HeldSnapshot:
    """All records of a namespace as of one version, which a named safe point of the source keeps.

    A process that is killed and started again finds the safe point, and reads the same records.
    """

    def __init__(self, source: Host, namespace: str, name: str) -> None:
        self._source = source
        self._namespace = namespace
        self._name = name
        held = {point.name: point.version for point in source.retention.safe_points()}
        self.is_held = name in held
        self.version = held.get(name, 0)

    def hold(self) -> None:
        """Set or renew the safe point for a day; the first time, at the present version."""

        def hold(version: Version) -> Version:
            self._source.retention.hold_safe_point(self._name, version, HELD, self._namespace)
            return version

        self.version = (
            at_present(self._source.versions.read_version, hold) if not self.version else hold(self.version)
        )

    def release(self) -> None:
        """Release the safe point."""
        with suppress(SafePointNotFound):
            self._source.retention.release_safe_point(self._name)

    def copy(
        self, target: Host, command: ApplyStream | LoadStream, part_of: Callable[[bytes], bytes | None]
    ) -> int:
        """Write a part of each record at a target; the number of records that have one."""
        pages = _read_pages(self._source, self._namespace, self.version)
        return _copy(pages, target, self._namespace, command, part_of)


def _copy(
    pages: Pages,
    target: Host,
    namespace: str,
    command: ApplyStream | LoadStream,
    part_of: Callable[[bytes], bytes | None],
) -> int:
    """Write a part of each record at a target; the number of records that have one."""
    target_id = target.namespaces.find_namespace(namespace).id
    copied = 0
    with closing(Sender(target, command)) as sender:
        batches = Batches(sender)
        for keys, records in pages:
            parts = {key: part for key, each in zip(keys, records, strict=True) if (part := part_of(each))}
            # Each record is a commit of its own: a batch may end anywhere.
            numbers = numpy.arange(copied, copied + len(parts), dtype=numpy.uint64)
            columns = (pyarrow.array(column, pyarrow.binary()) for column in (parts.keys(), parts.values()))
            copied_keys, copied_records = columns
            qualified = qualify_keys(target_id, copied_keys)
            batches.add(
                CommitBatch(numbers, qualified, copied_records, numpy.zeros(len(parts), numpy.uint16))
            )
            copied += len(parts)
        batches.finish()
        sender.settle(0)
    return copied


@contextmanager
def _snapshot(site: Host, namespace: str) -> Iterator[tuple[Version, Pages]]:
    """A version, and all records of a namespace as of it, deleted ones included, each with its origin."""
    row = site.namespaces.find_namespace(namespace)
    with ExitStack() as stack:
        at, _ = at_present(
            site.versions.read_version,
            lambda version: (version, stack.enter_context(site.reading(version, row.id))),
        )
        yield at, _read_pages(site, namespace, at)


def _read_pages(site: Host, namespace: str, at: Version) -> Pages:
    keys = qualify_range(site.namespaces.find_namespace(namespace).id)
    for batch in site.router.scan_records(keys, at, dead=True):
        versions = batch.column("version").to_numpy()
        stored = add_origins(batch.column("value"), versions, site.identity.site_id)
        yield batch.column("key").to_pylist(), stored.to_pylist()
