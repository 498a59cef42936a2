"""A stream of writes to a server: many batches in flight at once, acknowledged in order.

Any thread may send, one at a time; the stream's own thread receives acknowledgements and completes the
futures.  Batches and bytes in flight are bounded, and `send` waits for room.  If the connection is lost, all
batches without an acknowledgement have an unknown outcome, and the next one opens a new connection.  An idle
stream closes its connection.

Batches that are decided by stamp may be sent twice, and in any order.  If a node does not acknowledge them,
they are sent to another (`RepeatingWriteStream`).
"""

from collections import deque
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from threading import Condition, Lock, Thread
from typing import Any, Final

import msgspec
import pyarrow

from floodmark.columns.pairs import PAIRS
from floodmark.model.errors import (
    Closed,
    FloodmarkError,
    OutcomeUnknown,
    Unreachable,
    WireMismatch,
)
from floodmark.model.limits import MIB
from floodmark.model.partition import StreamCommand
from floodmark.wire.cluster import ELSEWHERE, Attempts, Nodes
from floodmark.wire.columns import encode_rows
from floodmark.wire.connection import Connection
from floodmark.wire.errors import TRANSPORT_ERRORS, ErrorMessage, is_lost, restore_error
from floodmark.wire.messages import COMMAND

BATCHES_IN_FLIGHT_MAX: Final = 64
BYTES_IN_FLIGHT_MAX: Final = 32 * MIB
IDLE_SECONDS: Final = 5.0
_REPEATED: Final = (*ELSEWHERE, OutcomeUnknown)


class BatchAcknowledgement(msgspec.Struct, frozen=True, array_like=True):
    """The outcome of one batch: its version or the number of stored records, or an error."""

    result: int = 0
    error: ErrorMessage | None = None


_acknowledgements: Final = msgspec.msgpack.Decoder(BatchAcknowledgement)


class _Sent(msgspec.Struct):
    """A batch that was not acknowledged yet."""

    future: "Future[int]"
    size: int


class RemoteWriteStream:
    """Sends batches of writes.  Safe to use from many threads; batches go in the order of the calls."""

    def __init__(
        self,
        nodes: Nodes,
        command: StreamCommand,
        *,
        batches_max: int = BATCHES_IN_FLIGHT_MAX,
        bytes_max: int = BYTES_IN_FLIGHT_MAX,
        idle_seconds: float = IDLE_SECONDS,
    ) -> None:
        self._nodes = nodes
        self._command = COMMAND.encode_request(command)
        self._batches_max = batches_max
        self._bytes_max = bytes_max
        self._idle_seconds = idle_seconds
        self._closed = False
        # Held while a batch is sent, so that batches are sent in the order in which they wait for their
        # acknowledgements.  Never taken by the thread that receives these.
        self._sending = Lock()
        self._changed = Condition()
        self._line: _Line | None = None

    def send(self, rows: Mapping[bytes, bytes]) -> "Future[int]":
        """Send encoded values under qualified keys.  Waits while too much is in flight."""
        future: Future[int] = Future()
        future.set_running_or_notify_cancel()
        if not rows:
            future.set_result(0)
            return future
        batch = encode_rows(rows)
        sent = _Sent(future, batch.nbytes)
        with self._sending:
            line = self._take_place(sent)
            failure: Exception | None = None
            try:
                line.writer.write_batch(batch)
            except TRANSPORT_ERRORS as error:
                # Reading fails as well then, and fails the futures; but Flight raises the reason only once.
                failure = error
            with self._changed:
                line.failure, line.is_sending = line.failure or failure, False
                self._changed.notify_all()
        return future

    def close(self) -> None:
        """Return when every batch was answered, or at the latest after the timeout of a call."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
            line = self._line
        if line is None:
            return
        line.thread.join(self._nodes.timeout_seconds)
        if line.thread.is_alive():
            self._give_up(
                line,
                OutcomeUnknown(
                    f"no answer from {line.connection.url} to a batch of writes within "
                    f"{self._nodes.timeout_seconds:.0f} s; read before you repeat it"
                ),
            )

    def _take_place(self, sent: _Sent) -> "_Line":
        """Wait for room, and add a batch to those that wait for an answer; opens a connection if needed."""
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closed or self._has_room(sent.size))
                if self._closed:
                    raise Closed("the stream of writes was closed; open another")
                if self._line is not None:
                    self._line.waiting.append(sent)
                    self._line.is_sending = True
                    self._changed.notify_all()
                    return self._line
            line = self._open_line()
            with self._changed:
                self._line = line
            line.thread.start()

    def _has_room(self, size: int) -> bool:
        line = self._line
        if line is None or not line.waiting:
            return True
        on_their_way = sum(sent.size for sent in line.waiting)
        return len(line.waiting) < self._batches_max and on_their_way + size <= self._bytes_max

    def _open_line(self) -> "_Line":
        def open_writer(connection: Connection) -> _Line:
            # Raises before anything is sent if the server does not answer, or refuses the token.
            connection.hello()
            return _Line(self, connection, *connection.open_writer(self._command, PAIRS))

        return self._nodes.run(open_writer)

    # The thread that receives acknowledgements

    def receive(self, line: "_Line") -> None:
        """Complete futures until the line is idle, closed or broken."""
        try:
            while self._wait_for_batch(line):
                self._settle(line, line.reader.read())
            line.writer.done_writing()
            while line.reader.read() is not None:
                pass
        except TRANSPORT_ERRORS as error:
            self._give_up(line, self._translate(line, error))
        except FloodmarkError as error:
            self._give_up(line, error)
        finally:
            with suppress(*TRANSPORT_ERRORS):
                line.writer.close()

    def _wait_for_batch(self, line: "_Line") -> bool:
        """Wait until a batch waits for an answer; after an idle time or `close`, drop the line: False."""
        with self._changed:
            self._changed.wait_for(lambda: line.waiting or self._closed, self._idle_seconds)
            if line.waiting:
                return True
            self._forget(line)
            return False

    def _settle(self, line: "_Line", answer: pyarrow.Buffer | None) -> None:
        if answer is None:
            # The stream has ended; `close` raises the reason.
            line.writer.close()
            with self._changed:
                # Unless a sender got the reason, and is about to store it.
                self._changed.wait_for(lambda: not line.is_sending, self._nodes.timeout_seconds)
            if line.failure is not None:
                raise line.failure
            raise OutcomeUnknown(
                f"{line.connection.url} ended a stream of writes without an answer; read before you repeat"
            )
        try:
            acknowledgement = _acknowledgements.decode(answer)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise WireMismatch(f"an acknowledgement of {line.connection.url} cannot be read") from error
        with self._changed:
            # No thread waits any more if `close` has given up.
            sent = line.waiting.popleft() if line.waiting else None
            line.answers += 1
            self._changed.notify_all()
        if sent is None:
            return
        if acknowledgement.error is None:
            sent.future.set_result(acknowledgement.result)
        else:
            sent.future.set_exception(restore_error(acknowledgement.error))

    def _translate(self, line: "_Line", error: BaseException) -> FloodmarkError:
        """The error for batches that were sent over a lost connection: they may have arrived."""
        translated = line.connection.translate(error, writes=True)
        if isinstance(translated, Unreachable) and is_lost(error):
            return OutcomeUnknown(f"{translated}; what was sent may or may not have happened")
        return translated

    def _give_up(self, line: "_Line", error: FloodmarkError) -> None:
        """Fail all waiting batches; the next one opens a new connection.

        Flight may lose answers, so the server's error contains how many batches it has answered: the outcome
        of these is unknown, and later batches were not committed.
        """
        answered = error.details.get("answered", 0)
        details = {name: detail for name, detail in error.details.items() if name != "answered"}
        reason = type(error)(str(error), **details)
        with self._changed:
            lost, line.waiting = list(line.waiting), deque()
            unread = max(0, answered - line.answers) if isinstance(answered, int) else 0
            self._forget(line)
        for place, sent in enumerate(lost):
            if place < unread:
                lost_answer = (
                    f"the answer to a batch of writes was lost ({reason}); read before you repeat it"
                )
                sent.future.set_exception(OutcomeUnknown(lost_answer))
            else:
                sent.future.set_exception(reason.again())

    def _forget(self, line: "_Line") -> None:
        if self._line is line:
            self._line = None
        self._changed.notify_all()


class RepeatingWriteStream:
    """A stream of repeatable writes: a batch that a node did not acknowledge is sent to another node."""

    def __init__(self, nodes: Nodes, stream: RemoteWriteStream) -> None:
        self._nodes = nodes
        self._stream = stream
        self._open: set[Future[int]] = set()
        self._is_closed = False
        # Not the thread that receives acknowledgements: `send` may wait for that one.
        self._repeater = ThreadPoolExecutor(1, "floodmark-repeater")

    def send(self, rows: Mapping[bytes, bytes]) -> "Future[int]":
        """Send a batch; the future completes when it is stored, or fails after the timeout of a call."""
        future: Future[int] = Future()
        future.set_running_or_notify_cancel()
        self._send(rows, future, self._nodes.attempts())
        self._open.add(future)
        future.add_done_callback(self._open.discard)
        return future

    def close(self) -> None:
        """Return when every batch was answered, or at the latest after the timeout of a call."""
        wait(list(self._open), self._nodes.timeout_seconds)
        self._is_closed = True
        self._stream.close()
        self._repeater.shutdown(cancel_futures=True)

    def _send(self, rows: Mapping[bytes, bytes], future: "Future[int]", attempts: Attempts) -> None:
        def settle(sent: "Future[int]") -> None:
            error = sent.exception()
            if error is None:
                future.set_result(sent.result())
            elif self._is_closed or not self._nodes.are_several or not isinstance(error, _REPEATED):
                future.set_exception(error)
            else:
                self._repeater.submit(repeat, error)

        def repeat(error: FloodmarkError) -> None:
            try:
                attempts.pause(error)
                self._send(rows, future, attempts)
            except FloodmarkError as failure:
                future.set_exception(failure)

        self._stream.send(rows).add_done_callback(settle)


class _Line:
    """One connection of a write stream, and the batches that wait for an answer over it."""

    def __init__(self, stream: RemoteWriteStream, connection: Connection, writer: Any, reader: Any) -> None:
        self.connection = connection
        self.writer = writer
        self.reader = reader
        self.waiting: deque[_Sent] = deque()
        # How many batches were answered.
        self.answers = 0
        # Whether a batch is being sent, and the error of sending, if it failed before reading did.
        self.is_sending = False
        self.failure: Exception | None = None
        self.thread = Thread(
            target=stream.receive, args=(self,), name="floodmark-acknowledgements", daemon=True
        )
