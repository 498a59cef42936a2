"""Streams from the server: scans, records and changes.

gRPC requests the next batch when the client has room, so a client that does not read costs one batch of
memory, until the watchdog cuts its connection (`stalled.py`).
"""

from collections.abc import Generator
from contextlib import closing
from functools import partial
from typing import Any, Final, TypeAlias

import pyarrow

from floodmark.clock import TimeSource
from floodmark.codec.columns import records_schema
from floodmark.codec.ordered import NAMESPACE_BYTES, encode_namespace
from floodmark.columns.pairs import PAIRS
from floodmark.host.ports import Host
from floodmark.model.actions import declared
from floodmark.model.errors import InvalidArgument, InvalidRange, PartitionMoved
from floodmark.model.partition import Partition
from floodmark.model.ranges import KeyRange
from floodmark.model.stream import ChangeBatch, ChangesRequest
from floodmark.server.guard import (
    AccessGuard,
    check_namespace_range,
    check_position,
    check_snapshot,
    check_version,
)
from floodmark.server.visits import Visit
from floodmark.wire.columns import changes_schema, cut_batch, encode_changes, encode_pairs
from floodmark.wire.messages import ChangesTicket, RecordsTicket, ScanTicket, Ticket

# How often an idle stream of changes sends an empty batch, with its position and as a sign of life.
IDLE_MS: Final = 1_000

Rows: TypeAlias = pyarrow.RecordBatch | tuple[pyarrow.RecordBatch, bytes]
Batches: TypeAlias = Generator[Rows, None, None]


class Streams:
    """Makes the batches of streams."""

    def __init__(self, host: Host, guard: AccessGuard, *, monotonic_ms: TimeSource) -> None:
        self._host = host
        self._guard = guard
        self._monotonic_ms = monotonic_ms

    def schema(self, ticket: Ticket) -> pyarrow.Schema:
        """The columns of a ticket's stream."""
        if isinstance(ticket, ScanTicket):
            return PAIRS
        if isinstance(ticket, RecordsTicket):
            return records_schema(ticket.content)
        return changes_schema(before_images=ticket.request.before_images)

    def batches(self, visit: Visit, ticket: Ticket) -> Batches:
        """The batches of a ticket's stream, until it ends or its client cancels it."""
        if isinstance(ticket, ScanTicket):
            return self._scan(visit, ticket)
        if isinstance(ticket, RecordsTicket):
            return self._records(visit, ticket)
        return self._changes(visit, ticket.request)

    def _scan(self, visit: Visit, ticket: ScanTicket) -> Batches:
        keys = ticket.keys
        if ticket.rows_max is not None and ticket.rows_max < 0:
            raise InvalidArgument(f"a number of rows is not negative, as {ticket.rows_max} is")
        partition = self._check_scan(visit, ticket)
        if keys.start == keys.end or ticket.rows_max == 0:
            return
        _require_held(partition, keys)
        with self._host.reading(ticket.at, _namespace_of(keys)):
            pages = partition.scan(keys, ticket.at, rows_max=ticket.rows_max, reverse=ticket.reverse)
            for rows in pages:
                messages = encode_pairs(rows)
                # Neither is held while the next page is read.
                del rows
                yield from messages
                del messages
                if visit.is_over():
                    return

    def _records(self, visit: Visit, ticket: RecordsTicket) -> Batches:
        keys = ticket.keys
        partition = self._check_scan(visit, ticket)
        if keys.start == keys.end:
            return
        _require_held(partition, keys)
        with self._host.reading(ticket.at, _namespace_of(keys)):
            pages = partition.scan_records(keys, ticket.at, dead=ticket.dead, content=ticket.content)
            for page in pages:
                yield from cut_batch(page)
                if visit.is_over():
                    return

    def _check_scan(self, visit: Visit, ticket: ScanTicket | RecordsTicket) -> Partition:
        """The partition to scan; raises if the ticket is invalid or the caller lacks the right."""
        keys = ticket.keys
        check_namespace_range(keys.start[:NAMESPACE_BYTES], keys)
        check_version(ticket.at)
        role = declared(type(ticket)).role
        visit.require(lambda caller: self._guard.require_keys(caller, role, (keys.start,)))
        return self._guard.partition(ticket.partition)

    def _changes(self, visit: Visit, request: ChangesRequest) -> Batches:
        self._check_changes(visit, request)
        batches: Any = self._host.serve_changes(request)
        with closing(batches):
            # An empty batch, sent once the safe point is held: the client waits for it.
            encode = partial(encode_changes, before_images=request.before_images)
            yield from encode(ChangeBatch(through=request.since, snapshot=request.snapshot), request.since)
            position, sent_at_ms = request.since, self._monotonic_ms()
            skipped: ChangeBatch | None = None
            for batch in batches:
                if visit.is_over():
                    return
                is_idle = request.follow and not batch.keys and not batch.heartbeats
                if is_idle and self._monotonic_ms() - sent_at_ms < IDLE_MS:
                    skipped = batch
                    continue
                messages, skipped = encode(batch, position), None
                position = batch.through
                # While a slow client is waited for, memory holds the batch only once, as messages.
                del batch
                while messages:
                    yield messages.pop(0)
                sent_at_ms = self._monotonic_ms()
            if skipped is not None:
                yield from encode(skipped, position)

    def _check_changes(self, visit: Visit, request: ChangesRequest) -> None:
        check_position(request.since)
        check_position(request.until)
        check_snapshot(request.snapshot)
        role = declared(ChangesTicket).role
        visit.require(lambda caller: self._guard.require_namespace(caller, role, request.namespace))
        if request.namespace is not None:
            check_namespace_range(encode_namespace(request.namespace), request.keys)
        elif request.keys != KeyRange():
            raise InvalidRange("a range of keys needs a namespace; name the one that it is in")


def _require_held(partition: Partition, keys: KeyRange) -> None:
    if partition.range.intersect(keys) != keys:
        raise PartitionMoved(
            f"partition {partition.id} does not hold all of the range; ask for the map again",
            partition=partition.id,
        )


def _namespace_of(keys: KeyRange) -> int:
    return int.from_bytes(keys.start[:NAMESPACE_BYTES], "big")
