"""Streams of writes: each batch is committed and answered, in the order of arrival.

An error of a batch is sent as its answer, and the stream continues.  An error of the stream has the number
of batches that were `answered` before it, so that a client knows which of its batches were not committed.
"""

import logging
from collections.abc import Iterator, Mapping
from contextlib import closing
from typing import Any, Final

import pyarrow

from floodmark.columns.pairs import PAIRS, Pairs
from floodmark.host.ports import Host
from floodmark.model.actions import declared
from floodmark.model.errors import FloodmarkError, InvalidArgument, OutcomeUnknown, Unreachable
from floodmark.model.partition import ApplyStream, GenerationStream, LoadStream, StreamCommand, WriteStream
from floodmark.partition.commit.entering import check_keys
from floodmark.server.calls import require_role
from floodmark.server.counters import ServerMetrics
from floodmark.server.data import WRITE_BYTES_MAX
from floodmark.server.guard import AccessGuard, check_size
from floodmark.server.logs import auditing
from floodmark.server.visits import ClientGone, Visit, unexpected, waiting
from floodmark.wire.columns import decode_columns, require_pairs
from floodmark.wire.errors import describe_error
from floodmark.wire.messages import encode
from floodmark.wire.write_stream import BatchAcknowledgement

_log: Final = logging.getLogger("floodmark.server")


class WriteService:
    """Commits the batches of write streams."""

    def __init__(self, host: Host, guard: AccessGuard, metrics: ServerMetrics) -> None:
        self._host = host
        self._guard = guard
        self._metrics = metrics

    def serve(self, visit: Visit, command: StreamCommand, reader: Any, writer: Any) -> None:
        """Commit and answer batches until the client sends no more."""
        if not reader.schema.equals(PAIRS):
            raise InvalidArgument("a stream of writes has two columns of bytes without nulls, key and value")
        action, name = declared(type(command)), f"stream.{type(command).__struct_config__.tag}"
        with auditing(visit.caller, name, action, {}, lasts=True):
            require_role(visit.caller, action.role)
            self._serve(visit, command, reader, writer)

    def _serve(self, visit: Visit, command: StreamCommand, reader: Any, writer: Any) -> None:
        answered = 0
        try:
            with closing(self._host.write_stream(command)) as stream:
                for batch in _received(visit, reader):
                    answer = encode(self._answer(visit, command, stream, batch))
                    answered += 1
                    _tell(visit, writer, answer)
        except ClientGone:
            raise Unreachable("the client has gone", answered=answered) from None
        except FloodmarkError as error:
            raise type(error)(str(error), **{**error.details, "answered": answered}) from None

    def _answer(
        self, visit: Visit, command: StreamCommand, stream: WriteStream, batch: pyarrow.RecordBatch | None
    ) -> BatchAcknowledgement:
        try:
            return BatchAcknowledgement(self._commit(visit, command, stream, batch))
        except FloodmarkError as error:
            return BatchAcknowledgement(error=describe_error(error))
        except Exception:
            _log.exception("a batch of a write stream failed unexpectedly")
            return BatchAcknowledgement(error=describe_error(unexpected(writes=True)))

    def _commit(
        self, visit: Visit, command: StreamCommand, stream: WriteStream, batch: pyarrow.RecordBatch | None
    ) -> int:
        if batch is None:
            raise InvalidArgument("a message of a write stream holds no rows")
        require_pairs(batch)
        self._metrics.received(batch.nbytes)
        check_size("a batch of writes", batch.nbytes, WRITE_BYTES_MAX)
        rows: Mapping[bytes, bytes]
        if isinstance(command, ApplyStream | LoadStream | GenerationStream):
            # These streams keep their rows as Arrow columns.
            rows = Pairs(batch.column(0), batch.column(1))
            keys, _ = rows.columns()
        else:
            keys, values = decode_columns(batch)
            rows = dict(zip(keys, values, strict=True))
        check_keys(keys)
        self._guard.require_keys(visit.caller, declared(type(command)).role, keys)
        return stream.send(rows).result()


def _tell(visit: Visit, writer: Any, answer: bytes) -> None:
    try:
        with waiting(visit):
            writer.write(pyarrow.py_buffer(answer))
    except ClientGone as gone:
        raise OutcomeUnknown("the answer to a batch of writes was lost; read before you repeat it") from gone


def _received(visit: Visit, reader: Any) -> Iterator[pyarrow.RecordBatch | None]:
    """The batches in order of arrival, until the client ends or cancels the stream."""
    while True:
        with waiting(visit):
            try:
                chunk = reader.read_chunk()
            except StopIteration:
                return
        if visit.is_over():
            return
        yield chunk.data
