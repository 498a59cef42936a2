"""Changes from a server, as one stream that outlives its connections.

A stream resumes after the last `through`, and within a snapshot after the last key.  A message may end inside
a commit; the stream returns the commit once it is whole.
"""

from collections.abc import Callable, Iterator
from contextlib import closing

import msgspec
import pyarrow

from floodmark.model.errors import FloodmarkError, Unreachable, WireMismatch
from floodmark.model.stream import ChangeBatch, ChangesRequest
from floodmark.wire.cluster import ELSEWHERE, Nodes
from floodmark.wire.columns import decode_changes
from floodmark.wire.messages import TICKET, ChangesTicket


def read_changes(nodes: Nodes, request: ChangesRequest, first: str | None = None) -> Iterator[ChangeBatch]:
    """The changes of a request, from the node at URL `first`, or from any.

    On return, the stream is open at a server.
    """
    batches = _batches(nodes, request, first)
    next(batches)
    return batches


def _batches(nodes: Nodes, request: ChangesRequest, first: str | None) -> Iterator[ChangeBatch]:
    attempts = nodes.stream_attempts()
    near = [first]

    def open_stream(request: ChangesRequest) -> Iterator[ChangeBatch]:
        ticket = TICKET.encode_request(ChangesTicket(request))
        with nodes.visiting(near[0]) as connection, closing(connection.open_reader(ticket)) as reader:
            parts: list[pyarrow.RecordBatch] = []
            for number, (rows, metadata) in enumerate(reader):
                parts.append(rows)
                batch = decode_changes(rows, metadata)
                if batch.snapshot is None and batch.versions and batch.versions[-1] > batch.through:
                    continue
                if len(parts) > 1:
                    batch = decode_changes(pyarrow.concat_batches(parts), metadata)
                parts = []
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
    """Join several streams into one: after an error that another node may not have, the next one continues.

    The first batch of each stream is empty.  `renew` is called when a stream makes progress, and `pause`
    before the next is opened: it waits, or raises the error.
    """
    through, snapshot = request.since, request.snapshot
    primed = False
    while True:
        try:
            batches = open_stream(msgspec.structs.replace(request, since=through, snapshot=snapshot))
            for number, batch in enumerate(batches):
                if number == 0 and primed:
                    continue
                if number > 0:
                    renew()
                    through, snapshot = max(through, batch.through), batch.snapshot
                primed = True
                yield batch
            return
        except ELSEWHERE as error:
            pause(error)
