"""Changes from a server, as one stream that outlives its connections.

A stream resumes behind the last `through` and drops changes that came twice: they are ordered by version and
key.  Within a snapshot it resumes behind the last key.
"""

from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from typing import TypeAlias

import msgspec

from floodmark.model.errors import FloodmarkError, Unreachable, WireMismatch
from floodmark.model.stream import ChangeBatch, ChangesRequest
from floodmark.model.version import Version
from floodmark.wire.cluster import ELSEWHERE, Nodes
from floodmark.wire.columns import decode_changes
from floodmark.wire.messages import TICKET, ChangesTicket

Position: TypeAlias = tuple[Version, bytes]


def read_changes(nodes: Nodes, request: ChangesRequest, first: str | None = None) -> Iterator[ChangeBatch]:
    """The changes of a request, from the node `first`, or any; it holds all that the stream needs."""
    batches = _batches(nodes, request, first)
    next(batches)
    return batches


def _batches(nodes: Nodes, request: ChangesRequest, first: str | None) -> Iterator[ChangeBatch]:
    attempts = nodes.stream_attempts()
    near = [first]

    def open_stream(request: ChangesRequest) -> Iterator[ChangeBatch]:
        ticket = TICKET.encode_request(ChangesTicket(request))
        with nodes.visiting(near[0]) as connection, closing(connection.open_reader(ticket)) as reader:
            for number, (rows, metadata) in enumerate(reader):
                batch = decode_changes(rows, metadata)
                if number == 0 and batch.snapshot != request.snapshot:
                    raise WireMismatch(
                        "the server does not know snapshots in streams of changes; use the same release "
                        "on both sides"
                    )
                yield batch

    def pause(error: FloodmarkError) -> None:
        if not nodes.are_several and not isinstance(error, Unreachable):
            raise error
        near[0] = None
        attempts.pause(error)

    return resume_changes(request, open_stream, attempts.renew, pause)


def resume_changes(
    request: ChangesRequest,
    open_stream: Callable[[ChangesRequest], Iterator[ChangeBatch]],
    renew: Callable[[], object],
    pause: Callable[[FloodmarkError], object],
) -> Iterator[ChangeBatch]:
    """One stream over several: after an error that another node may not have, the next one goes on.

    The first batch of each stream is empty.  `renew` is called when a stream got on, and `pause` before the
    next is opened: it waits, or raises the error.
    """
    through, snapshot, last = request.since, request.snapshot, (request.since, b"")
    primed = False
    while True:
        try:
            batches = open_stream(msgspec.structs.replace(request, since=through, snapshot=snapshot))
            for number, told in enumerate(batches):
                batch = told
                if number == 0 and primed:
                    continue
                if number > 0:
                    renew()
                    through, snapshot = max(through, batch.through), batch.snapshot
                    if snapshot is None:
                        batch = _drop_seen(batch, last)
                        if batch.keys:
                            last = batch.versions[-1], batch.keys[-1]
                primed = True
                yield batch
            return
        except ELSEWHERE as error:
            pause(error)


def _drop_seen(batch: ChangeBatch, last: Position) -> ChangeBatch:
    """A batch without the changes up to the last one that was handed on."""
    if not batch.versions or (batch.versions[0], batch.keys[0]) > last:
        return batch
    positions = zip(batch.versions, batch.keys, strict=True)
    seen = sum(position <= last for position in positions)
    return replace(
        batch,
        versions=batch.versions[seen:],
        partitions=batch.partitions[seen:],
        keys=batch.keys[seen:],
        values=batch.values[seen:],
        befores=None if batch.befores is None else batch.befores[seen:],
    )
