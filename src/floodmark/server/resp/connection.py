"""One client's connection: dispatches its requests, in order, to the parts of the server that run them.

A pipeline may have many writes on their way.  Small reads after them run in the same rounds, and any other
request waits until these are answered, so that replies come in the order of requests and a read sees the
writes before it.  While a client does not read its answers, or has a request that waits, the server reads no
more from it.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Final, Protocol

from floodmark.clock import monotonic_ms, monotonic_seconds
from floodmark.model.access import Role
from floodmark.model.errors import FloodmarkError
from floodmark.model.limits import (
    KIB,
    NEWCOMER_TIME_MAX,
    RESP_ARGUMENTS_MAX,
    RESP_NEWCOMER_ARGUMENTS_MAX,
    RESP_NEWCOMER_BULK_BYTES_MAX,
    RESP_UNREAD_BYTES_MAX,
)
from floodmark.partition.node import Node
from floodmark.server.counters import OTHER
from floodmark.server.data import WRITE_BYTES_MAX
from floodmark.server.resp.calls import (
    CallCommand,
    CallJob,
    refuse_stopping,
    unknown_call,
)
from floodmark.server.resp.commands import GET, SET
from floodmark.server.resp.committing import RoundLeader, WriteJob
from floodmark.server.resp.session import DoorParts, Later, QueuedCommands, Session
from floodmark.server.resp.table import (
    TABLE,
    Arguments,
    Command,
    CommandError,
    Kind,
    attempt,
    describe,
    unknown_command,
    wrong_arity,
)
from floodmark.server.visits import RENEW_MS
from floodmark.wire.resp import OK, QUEUED, ErrorReply, RequestParser, encode_reply, match_get

# Poll interval of a request that waits for changes; it reads only if something was committed since.
LOOK_SECONDS: Final = 0.02
# Poll interval in a site of several nodes: it reads each time, as commits of others are not counted here.
LOOK_MS: Final = 100
# With this many bytes, answers are sent without waiting for the end of the event loop's turn.
FLUSH_BYTES: Final = 64 * KIB
# A read of more keys runs in a worker thread.
READ_ARGUMENTS_MAX: Final = 256
NO_AUTH: Final = ErrorReply("NOAUTH Authentication required.")
_OK: Final = encode_reply(OK)

_log = logging.getLogger("floodmark.server")


class ConnectionParts(DoorParts, Protocol):
    """The server, as far as a connection needs it."""

    committing: RoundLeader
    stall_seconds: float
    is_stopping: bool
    received_bytes: int
    sent_bytes: int
    calls: Mapping[bytes, CallCommand]

    def new_session(self, address: str, certificate: str | None) -> Session: ...

    def admit(self, connection: "RespConnection") -> str | None: ...

    def forget(self, connection: "RespConnection") -> None: ...

    def work(self, function: Callable[..., object], *arguments: object) -> None: ...

    def count(self, name: str, seconds: float, reply: object) -> None: ...

    def call_later(self, seconds: float, function: Callable[..., object]) -> asyncio.TimerHandle: ...

    def call(self, function: Callable[..., object], *arguments: object) -> None: ...

    def get_later(self, connection: "RespConnection", qualified: bytes) -> None: ...

    def answer_gets(self) -> None: ...

    def flush_later(self, connection: "RespConnection") -> None: ...


class RespConnection(asyncio.Protocol):
    """The connection of one session."""

    session: Session
    transport: Any

    def __init__(self, door: ConnectionParts, name_of: Callable[[Any], str | None]) -> None:
        self._door = door
        self._name_of = name_of
        self._parser = RequestParser(
            arguments_max=RESP_NEWCOMER_ARGUMENTS_MAX,
            bulk_bytes_max=RESP_NEWCOMER_BULK_BYTES_MAX,
            request_bytes_max=RESP_NEWCOMER_ARGUMENTS_MAX * RESP_NEWCOMER_BULK_BYTES_MAX,
        )
        self._requests: deque[list[bytes]] = deque()
        # Answers that were not handed to the transport yet.
        self._out: list[bytes] = []
        self._out_bytes = 0
        # Qualifies the key of a GET, if one that comes while no write is pending can be answered together
        # with those of other connections.
        self.qualify: Callable[[bytes], bytes] | None = None
        # Whether such a GET was not answered yet.
        self.has_gets = False
        node = door.spaces.host.node
        # A read may be a call to another node.
        self._reads_wait = node.engine.limits.reads_wait or node.number > 0
        # The number of unanswered writes, and of those that are decided in their round: writes after such a
        # one must be decided in a round, too.
        self._pending = self._decided = 0
        # While the connection is halted, a worker runs the writes that are blocked.
        self.is_halted = False
        self.is_settling = False
        self.blocked: deque[WriteJob] = deque()
        # Whether a worker runs a request, and whether the client does not read its answers.
        self._is_waiting = False
        self._is_full = False
        self._is_reading = True
        # Whether the client has shut down its side: it is answered, then closed.
        self._is_ended = False
        # The site's count of commits when a request that waits for changes last read.
        self._commits = 0
        self._stall: asyncio.TimerHandle | None = None
        self._renewed_at_ms = door.now_ms

    # From the transport

    def connection_made(self, transport: Any) -> None:
        self.transport = transport
        transport.set_write_buffer_limits(high=RESP_UNREAD_BYTES_MAX)
        peer = transport.get_extra_info("peername") or ("", 0)
        certificate = self._name_of(transport.get_extra_info("peercert"))
        self.session = self._door.new_session(f"{peer[0]}:{peer[1]}", certificate)
        refusal = self._door.admit(self)
        if refusal is not None:
            transport.write(encode_reply(ErrorReply(refusal)))
            transport.close()
            return
        if self.session.caller is not None:
            self.widen()
        else:
            seconds = NEWCOMER_TIME_MAX.total_seconds()
            self._stall = self._door.call_later(seconds, self._cut)

    def widen(self) -> None:
        """Raise the limits on requests to those for authenticated clients."""
        self._parser.set_limits(RESP_ARGUMENTS_MAX, WRITE_BYTES_MAX, WRITE_BYTES_MAX)

    def data_received(self, data: bytes) -> None:
        self._door.received_bytes += len(data)
        # The most frequent request: `run` has checked all that it depends on after the last other request.
        if not self._pending and (key := match_get(data)) is not None and self._get_later(key):
            return
        self._requests += self._parser.feed(data)
        self.run()

    def eof_received(self) -> bool:
        """Run the complete requests that have arrived, and close after the last answer.

        True keeps the connection open until then.  With TLS no connection can be half open: it closes now.
        """
        self._is_ended = True
        self.run()
        return self.transport.get_extra_info("sslcontext") is None

    def connection_lost(self, error: Exception | None) -> None:
        self._requests.clear()
        self.qualify = None
        if self._stall is not None:
            self._stall.cancel()
        self.session.is_leaving = True
        self._door.forget(self)

    def pause_writing(self) -> None:
        """Begin to wait for a client that does not read its answers."""
        self._is_full = True
        self.qualify = None
        if self._stall is not None:
            self._stall.cancel()
        self._stall = self._door.call_later(self._door.stall_seconds, self._cut)

    def resume_writing(self) -> None:
        """Go on with a client that reads again."""
        self._is_full = False
        if self._stall is not None:
            self._stall.cancel()
            self._stall = None
        self.run()

    def _cut(self) -> None:
        """Cut off a client that does not read its answers, or has not shown who it is in time."""
        self._stall = None
        if self._is_full or self.session.caller is None:
            _log.warning("cut off %s, which does not read its answers or authenticate", self.session.address)
            self._door.metrics.connection_cut()
            self.transport.abort()

    def leave(self) -> None:
        """Run nothing more; close when the writes that were begun are answered."""
        self._requests.clear()
        self.session.is_leaving = True
        self.run()

    # Requests

    def run(self) -> None:
        """Run requests until one has to wait."""
        requests, session = self._requests, self.session
        now_ms = session.active_at_ms = self._door.now_ms
        if now_ms - self._renewed_at_ms >= RENEW_MS:
            self._renewed_at_ms = now_ms
            session.renew()
        while requests and not (self._is_waiting or self._is_full or session.is_leaving):
            if not self._begin(requests[0]):
                break
            requests.popleft()
        self.qualify = None
        if self._parser.error is not None and not (requests or self._pending or session.is_leaving):
            self.say(ErrorReply(f"ERR {self._parser.error}"))
            session.is_leaving = True
        if self._is_ended and not requests and self._parser.error is None:
            session.is_leaving = True
        if session.is_leaving:
            if not self._pending and not self._is_waiting:
                self.flush()
                self.transport.close()
            return
        if self._is_reading == bool(requests):
            # Requests that have arrived are run before more are read.
            self._is_reading = not requests
            if not self.transport.is_closing():
                (self.transport.resume_reading if self._is_reading else self.transport.pause_reading)()
        if not (requests or self._is_waiting or self._is_full) and self._parser.is_between:
            self.qualify = None if self._reads_wait else self.session.qualify

    def say(self, reply: object) -> None:
        """Send a reply at the end of the turn of the event loop.

        The answers of all connections then go out together: the first wakes the client program up, and
        the others find it awake.
        """
        if self.has_gets:
            self._door.answer_gets()
        if type(reply) is bytes:
            answer = b"$%d\r\n%b\r\n" % (len(reply), reply)
        elif reply is OK:
            answer = _OK
        else:
            answer = encode_reply(reply, self.session.protocol)
        if not self._out:
            self._door.flush_later(self)
        self._out.append(answer)
        self._out_bytes += len(answer)
        if self._out_bytes >= FLUSH_BYTES:
            self.flush()

    def flush(self) -> None:
        """Hand the answers to the transport."""
        if self.has_gets:
            self._door.answer_gets()
        if self._out:
            self._door.sent_bytes += self._out_bytes
            self._out_bytes = 0
            data = self._out[0] if len(self._out) == 1 else b"".join(self._out)
            self._out.clear()
            if not self.transport.is_closing():
                self.transport.write(data)

    def _get_later(self, key: bytes) -> bool:
        """Queue a GET, to be answered together with those of other connections; False if it cannot be."""
        if self.qualify is None:
            return False
        try:
            qualified = self.qualify(key)
        except FloodmarkError:
            # It is run alone, for its error.
            return False
        self.has_gets = True
        self._door.get_later(self, qualified)
        return True

    def _begin(self, request: list[bytes]) -> bool:
        """Run or start a request; False if it has to wait for the writes before it."""
        session = self.session
        command = TABLE.find(request[0])
        if command is GET and len(request) == 2 and not self._pending:
            self.qualify = None if self._reads_wait else self.session.qualify
            if self._get_later(request[1]):
                return True
        if self.has_gets:
            # This request must not read or write before them.
            self._door.answer_gets()
        # A small read after a write runs in a round, too, so that a pipeline of both needs one sync.
        reads_in_round = self._pending and not self._reads_wait and len(request) <= READ_ARGUMENTS_MAX
        kinds = (Kind.WRITE, Kind.READ) if reads_in_round else (Kind.WRITE,)
        if command is not None and session.queued is None and command.kind in kinds:
            if self.is_halted:
                return False
            if session.caller is not None and command.fits(len(request)):
                self._submit(command, request)
                return True
        if self._pending:
            return False
        started = monotonic_seconds()
        refusal = may_run(session, command, request)
        if command is None or refusal is not None:
            self._tell(command, refusal, started)
            return True
        if command.kind is Kind.CALL:
            return self._call(request[1], request[2], started)
        session.last_command = command.name
        if command.kind is Kind.READ:
            run = partial(command.handler, session.records, request)
            waits = self._reads_wait or len(request) > READ_ARGUMENTS_MAX
        else:
            run = partial(command.handler, session, request)
            waits = command.kind is Kind.SLOW
        if waits:
            return self._begin_slow(command, run, started)
        was_known = session.caller is not None
        reply = attempt(command.name, run)
        if not was_known and session.caller is not None:
            self.widen()
        if isinstance(reply, QueuedCommands):
            job = WriteJob(self, "EXEC", lambda records, batch: batch.run(records), reply, started)
            self._decide(job, reply.on)
        else:
            self._tell(command, reply, started)
        return True

    def _tell(self, command: Command | None, reply: object, started: float) -> None:
        self.say(reply)
        self._door.count(OTHER if command is None else command.name, monotonic_seconds() - started, reply)

    # Requests that wait

    def _begin_slow(self, command: Command, run: Callable[[], object], started: float) -> bool:
        self._is_waiting = True
        self._commits = count_activity(self._door.committing.node)
        self._door.work(self._run_slow, command, run, started)
        return True

    def _run_slow(self, command: Command, run: Callable[[], object], started: float) -> None:
        """Run a request in a worker thread."""
        self._door.call(self._end_slow, command, attempt(command.name, run), started)

    def _end_slow(self, command: Command, reply: object, started: float) -> None:
        if isinstance(reply, Later):
            self._look_later(command, reply, started)
            return
        self._is_waiting = False
        self._tell(command, reply, started)
        self.run()

    def _look_later(self, command: Command, later: Later, started: float) -> None:
        """Read again once something was committed, until there is a reply or the request times out."""
        is_late = later.until_ms is not None and monotonic_ms() >= later.until_ms
        if is_late or self.session.is_leaving:
            self._end_slow(command, None, started)
            return
        commits = count_activity(self._door.committing.node)
        if commits == self._commits:
            self._door.call_later(LOOK_SECONDS, partial(self._look_later, command, later, started))
            return
        self._commits = commits
        self._door.work(self._run_slow, command, lambda: later.read() or later, started)

    # Calls of our own clients

    def _call(self, name: bytes, body: bytes, started: float) -> bool:
        """Answer a call, or start it."""
        caller = self.session.caller
        assert caller is not None
        call = self._door.calls.get(name)
        if call is None or self._door.is_stopping:
            self._tell(None, unknown_call(name) if call is None else refuse_stopping(), started)
            return True
        self.session.last_command = call.command.name
        reply = call.begin(self, caller, body, started, reads_wait=self._reads_wait)
        if reply is None:
            return self._begin_slow(call.command, partial(call.answer, caller, body), started)
        if isinstance(reply, CallJob):
            self._send(reply)
        else:
            self._tell(call.command, reply, started)
        return True

    # Writes

    def _submit(self, command: Command, request: list[bytes]) -> None:
        """Start a write, or a small read after one, which runs inside a round."""
        session = self.session
        records = session.records
        assert records is not None
        session.last_command = command.name
        job = WriteJob(self, command.name, command.handler, request, monotonic_seconds())
        try:
            if command is SET and len(request) == 3 and not self._decided:
                row = records.encode_put(request[1], request[2])
                if row is not None:
                    job.key, job.value = row
                    job.reply = OK
                    self._send(job)
                    return
            # A read sees what is committed, and does not wait for prepared writes.
            keys = command.keys_of(request) if command.kind is Kind.WRITE else ()
            on = [records.locate(key, Role.READ).qualified for key in keys]
        except (CommandError, FloodmarkError) as error:
            job.reply = describe(error)
            self._send(job)
            return
        self._decide(job, on)

    def _decide(self, job: WriteJob, on: Sequence[bytes]) -> None:
        self._decided += 1
        job.decide_on(self._door.committing.node, on)
        self._send(job)

    def _send(self, job: WriteJob) -> None:
        self._pending += 1
        self._door.committing.submit(job)

    def finish(self, job: WriteJob, now: float) -> None:
        """Answer a write; after the last one on its way, run the requests that waited for it."""
        reply, commit = job.outcome(), job.commit
        if commit is not None and commit.error is None and commit.version:
            self.session.version = commit.version
        self.say(reply)
        self._door.count(job.name, now - job.started, reply)
        self._pending -= 1
        if not self._pending:
            self._decided = 0
            if self._requests or self.session.is_leaving or self._parser.error is not None:
                self.run()


def count_activity(node: Node) -> int:
    """A number that changes when something may have been committed."""
    return monotonic_ms() // LOOK_MS if node.number else node.committer.counting.commits


def may_run(session: Session, command: Command | None, request: Arguments) -> object:
    """None if a request may run now, otherwise its reply: an error, or QUEUED in a transaction."""
    if session.caller is None and (command is None or not command.is_open):
        return NO_AUTH
    if command is None:
        session.is_spoiled = True
        return unknown_command(request)
    if not command.fits(len(request)):
        session.is_spoiled = True
        if command.name == "EXEC":
            session.discard()
            return ErrorReply(f"EXECABORT Transaction discarded because of: {wrong_arity(command)[4:]}")
        return wrong_arity(command)
    if session.queued is None or command.is_quick:
        return None
    if command.kind not in (Kind.READ, Kind.WRITE) and not command.is_queued:
        session.is_spoiled = True
        return ErrorReply(f"ERR {command.name} is not allowed in a transaction")
    if len(session.queued) >= RESP_ARGUMENTS_MAX:
        session.is_spoiled = True
        return ErrorReply("ERR the transaction has too many commands; EXEC or DISCARD it")
    session.queued.append((command, request))
    return QUEUED
