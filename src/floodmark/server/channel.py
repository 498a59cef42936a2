"""Channels: one client's calls, one after the other, on a stream that stays open."""

import logging
from collections.abc import Mapping
from typing import Any, Final

import pyarrow

from floodmark.clock import monotonic_seconds
from floodmark.model.errors import FloodmarkError, NotAuthenticated, WireMismatch
from floodmark.server.data import Handler
from floodmark.server.metrics import ServerMetrics, outcome_of
from floodmark.server.visits import ClientGone, Gate, Visit, unexpected, waiting
from floodmark.wire.channels import CLOSE_AFTER_MS, decode_call, encode_answer, encode_failure
from floodmark.wire.errors import encode_error

# A client closes a channel that it does not use.  One that does not even do that has stalled.
REST_MS_MAX: Final = CLOSE_AFTER_MS + 2_000

_log: Final = logging.getLogger("floodmark.server")


class ChannelService:
    """Answers calls on channels."""

    def __init__(
        self,
        handlers: Mapping[str, Handler],
        gate: Gate,
        metrics: ServerMetrics,
    ) -> None:
        self._handlers = handlers
        self._gate = gate
        self._metrics = metrics

    def serve(self, visit: Visit, reader: Any, writer: Any) -> None:
        """Answer until the client has no more questions, or may not ask any."""
        visit.activity.patience_ms = REST_MS_MAX
        while True:
            try:
                with waiting(visit):
                    chunk = reader.read_chunk()
            except (StopIteration, ClientGone):
                return
            if chunk.data is not None:
                # Let go of at once: rows may have been small on their way, and compressed.
                raise WireMismatch("a channel carries requests, and no rows; connect with Floodmark")
            request = b"" if chunk.app_metadata is None else chunk.app_metadata.to_pybytes()
            with self._gate.passing():
                answer, go_on = self._answer(visit, request)
                with waiting(visit):
                    writer.write_metadata(pyarrow.py_buffer(answer))
            if not go_on:
                return

    def _answer(self, visit: Visit, request: bytes) -> tuple[bytes, bool]:
        """The answer to a request, and whether the channel goes on."""
        name, body = decode_call(request)
        handler = self._handlers.get(name)
        started = monotonic_seconds()
        failure: FloodmarkError | None = None
        try:
            if visit.is_over():
                return encode_answer(b""), False
            if not name:
                return encode_answer(b""), True
            if handler is None:
                raise WireMismatch(f"this server has no {name!r:.100}; it may be too old for it")
            self._metrics.received(len(request))
            answer = encode_answer(handler(visit.caller, pyarrow.py_buffer(body)))
        except FloodmarkError as error:
            failure = error
            answer = encode_failure(encode_error(error))
        except Exception as error:
            failure = unexpected(writes=handler is not None and handler.method.writes)
            _log.exception("the request %r failed unexpectedly", name, exc_info=error)
            answer = encode_failure(encode_error(failure))
        if handler is not None:
            self._metrics.request(name, monotonic_seconds() - started, outcome_of(failure))
        self._metrics.sent(len(answer))
        return answer, not isinstance(failure, NotAuthenticated)
