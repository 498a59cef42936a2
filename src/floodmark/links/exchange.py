"""Copies the records of a site to another, where no change log holds what the other site lacks.

If a site has lost its log, or is gone for good, the others hold different parts of its writes: `copy_origin`
copies the parts of records that this site wrote.  If a namespace holds data from before it was shared,
`copy_records` copies all of its records.

The target applies by stamp, so copying a record again, or beginning again, has no effect.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from typing import NamedTuple, TypeAlias

import numpy
import pyarrow

from floodmark.codec.ordered import encode_namespace
from floodmark.codec.records import add_origins, qualify_keys
from floodmark.codec.values import decode_value
from floodmark.feed import at_present
from floodmark.host.ports import Host
from floodmark.links.applying import Batch, Batches, Sender
from floodmark.merge.parts import split_record
from floodmark.model.partition import LinkGuard
from floodmark.model.ranges import KeyRange, prefix_end
from floodmark.model.version import Version

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
        return Copied(_copy(pages, target, namespace, guard, part_of), newest)


def copy_records(source: Host, target: Host, namespace: str, guard: LinkGuard) -> Copied:
    """Copy all records of a namespace as of one version, deleted ones included; `newest` is that version.

    Returns when they are applied and durable.  The target refuses them once the guard no longer holds.
    """
    with _snapshot(source, namespace) as (at, pages):
        return Copied(_copy(pages, target, namespace, guard, lambda record: record), at)


def _copy(
    pages: Pages,
    target: Host,
    namespace: str,
    guard: LinkGuard,
    part_of: Callable[[bytes], bytes | None],
) -> int:
    """Apply a part of each record at a target; the number of records that have one."""
    target_id = target.namespaces.find_namespace(namespace).id
    copied = 0
    with closing(Sender(target, guard)) as sender:
        batches = Batches(sender)
        for keys, records in pages:
            parts = {key: part for key, each in zip(keys, records, strict=True) if (part := part_of(each))}
            # Each record is a commit of its own: a batch may end anywhere.
            numbers = numpy.arange(copied, copied + len(parts), dtype=numpy.uint64)
            columns = (pyarrow.array(column, pyarrow.binary()) for column in (parts.keys(), parts.values()))
            copied_keys, copied_records = columns
            batches.add(Batch(numbers, qualify_keys(target_id, copied_keys), copied_records))
            copied += len(parts)
        batches.finish()
        sender.settle(0)
    return copied


@contextmanager
def _snapshot(site: Host, namespace: str) -> Iterator[tuple[Version, Pages]]:
    """A version, and all records of a namespace as of it, deleted ones included, each with its origin."""
    row = site.namespaces.find_namespace(namespace)
    prefix = encode_namespace(row.id)

    def read(at: Version) -> Pages:
        for batch in site.router.scan_records(KeyRange(prefix, prefix_end(prefix)), at, dead=True):
            versions = batch.column("version").to_numpy()
            stored = add_origins(batch.column("value"), versions, site.identity.site_id)
            yield batch.column("key").to_pylist(), stored.to_pylist()

    with ExitStack() as stack:
        at, _ = at_present(
            site.versions.read_version,
            lambda version: (version, stack.enter_context(site.reading(version, row.id))),
        )
        yield at, read(at)
