"""One client's connection: its requests in order, each to the part of the server that runs it.

A pipeline may have many writes on their way; anything else waits until these are answered, so that replies
come in the order of requests and a read sees the writes before it.  While a client does not read its answers,
or has a request that waits, nothing more is read from it.
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
from floodmark.server.data import WRITE_BYTES_MAX
from floodmark.server.metrics import OTHER, Tally
from floodmark.server.resp.committing import Committing, Job, Step, Waiting
from floodmark.server.resp.records import Records
from floodmark.server.resp.session import Batch, DoorParts, Later, Session
from floodmark.server.resp.strings import set_value
from floodmark.server.resp.table import (
    TABLE,
    Arguments,
    Command,
    CommandError,
    Kind,
    describe,
    unknown_command,
    wrong_arity,
)
from floodmark.server.visits import RENEW_MS
from floodmark.wire.resp import OK, QUEUED, Failure, RequestParser, encode_reply

# Poll interval of a request that waits for changes; it reads only if something was committed since.
LOOK_SECONDS: Final = 0.02
# Answers that wait for the end of the turn.
FLUSH_BYTES: Final = 64 * KIB
# A read of more keys runs in a worker thread.
READ_ARGUMENTS_MAX: Final = 256
NO_AUTH: Final = Failure("NOAUTH Authentication required.")
_OK: Final = encode_reply(OK)

_log = logging.getLogger("floodmark.server")


class ConnectionParts(DoorParts, Protocol):
    """The server, as far as a connection needs it."""

    committing: Committing
    stall_seconds: float
    is_stopping: bool
    received_bytes: int
    sent_bytes: int
    tallies: Mapping[str, Tally]

    def new_session(self, address: str, certificate: str | None) -> Session: ...

    def admit(self, connection: "Connection") -> str | None: ...

    def forget(self, connection: "Connection") -> None: ...

    def work(self, function: Callable[..., object], *arguments: object) -> None: ...

    def count(self, name: str, seconds: float, reply: object) -> None: ...

    def call_later(self, seconds: float, function: Callable[..., object]) -> asyncio.TimerHandle: ...

    def call(self, function: Callable[..., object], *arguments: object) -> None: ...

    def flush_later(self, connection: "Connection") -> None: ...


class Connection(asyncio.Protocol, Waiting):
    """The connection of one session."""

    session: Session
    transport: Any

    def __init__(self, door: ConnectionParts, name_of: Callable[[Any], str | None]) -> None:
        Waiting.__init__(self)
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
        self._reads_wait = door.spaces.host.node.engine.limits.reads_wait
        # Writes that were not answered yet, and whether a worker has a request.
        self._pending = 0
        # Commits of the site when a request that waits for changes was last looked at.
        self._commits = 0
        # Those of them that are decided in their round: what follows them must be, too.
        self._decided = 0
        self._gets = door.tallies["GET"]
        self._is_waiting = False
        self._is_full = False
        self._is_reading = True
        # Whether the client has shut down its side: it is answered, then closed.
        self._is_ended = False
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
            transport.write(encode_reply(Failure(refusal)))
            transport.close()
            return
        if self.session.caller is not None:
            self.widen()
        else:
            seconds = NEWCOMER_TIME_MAX.total_seconds()
            self._stall = self._door.call_later(seconds, self._cut)

    def widen(self) -> None:
        """Take as much from the client as one may send that is known."""
        parser = self._parser
        parser.arguments_max = RESP_ARGUMENTS_MAX
        parser.bulk_bytes_max = parser.request_bytes_max = WRITE_BYTES_MAX

    def data_received(self, data: bytes) -> None:
        self._door.received_bytes += len(data)
        key = self._parser.match_get(data)
        if key is not None and self._get(key):
            return
        self._requests += self._parser.feed(data)
        self.run()

    def _get(self, key: bytes) -> bool:
        """Answer one GET, the hottest request, if nothing else is to be looked at; whether it was so."""
        session, records = self.session, self.session.records
        if (
            self._requests
            or self._pending
            or self._is_waiting
            or self._is_full
            or session.is_leaving
            or session.queued is not None
            or records is None
            or self._reads_wait
            or self._door.now_ms - self._renewed_at_ms >= RENEW_MS
        ):
            return False
        started = monotonic_seconds()
        try:
            value = records.get(key)
        except (CommandError, FloodmarkError):
            # Once more, the usual way: it has the words for it.
            return False
        session.active_at_ms = self._door.now_ms
        session.last_command = "GET"
        if value is None:
            self._say(encode_reply(None, session.protocol))
        else:
            self._say(b"$%d\r\n%b\r\n" % (len(value), value))
        self._gets.add(monotonic_seconds() - started)
        return True

    def eof_received(self) -> bool:
        """Run what has arrived whole, and close behind the last answer.

        True keeps the connection open until then.  TLS here has no half-open connections: it is closed.
        """
        self._is_ended = True
        self.run()
        return self.transport.get_extra_info("sslcontext") is None

    def connection_lost(self, error: Exception | None) -> None:
        self._requests.clear()
        if self._stall is not None:
            self._stall.cancel()
        self.session.is_leaving = True
        self._door.forget(self)

    def pause_writing(self) -> None:
        """Begin to wait for a client that does not read its answers."""
        self._is_full = True
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
        if self._parser.error is not None and not (requests or self._pending or session.is_leaving):
            self._say(encode_reply(Failure(f"ERR {self._parser.error}")))
            session.is_leaving = True
        if self._is_ended and not requests and self._parser.error is None:
            session.is_leaving = True
        if session.is_leaving and not self._pending and not self._is_waiting:
            self.flush()
            self.transport.close()
        elif not session.is_leaving and self._is_reading == bool(requests):
            # What has arrived is run first.
            self._is_reading = not requests
            if not self.transport.is_closing():
                (self.transport.resume_reading if self._is_reading else self.transport.pause_reading)()

    def _say(self, answer: bytes) -> None:
        """Send an answer at the end of the turn of the event loop.

        The answers of all connections then go out together: the first wakes the client program up, and
        the others find it awake.  One by one they took half of the time of a GET.
        """
        if not self._out:
            self._door.flush_later(self)
        self._out.append(answer)
        self._out_bytes += len(answer)
        if self._out_bytes >= FLUSH_BYTES:
            self.flush()

    def flush(self) -> None:
        """Hand the answers to the transport."""
        if self._out:
            self._door.sent_bytes += self._out_bytes
            self._out_bytes = 0
            data = self._out[0] if len(self._out) == 1 else b"".join(self._out)
            self._out.clear()
            if not self.transport.is_closing():
                self.transport.write(data)

    def _begin(self, request: list[bytes]) -> bool:
        """Run a request, or send it on its way; False if it has to wait for the writes before it."""
        session = self.session
        command = TABLE.find(request[0])
        if command is not None and command.is_read and not self._pending and session.is_simple:
            if not self._reads_wait and len(request) <= READ_ARGUMENTS_MAX:
                return self._read(command, request)
            if command.fits(len(request)):
                return self._begin_slow(command, partial(command.handler, session.records, request))
        if command is not None and command.kind is Kind.WRITE and session.queued is None:
            if self.is_halted:
                return False
            if session.caller is not None and command.fits(len(request)):
                self._pending += 1
                self._submit(command, request)
                return True
        if self._pending:
            return False
        if command is not None and command.kind is Kind.SLOW and may_run(session, command, request) is None:
            return self._begin_slow(command, partial(command.handler, session, request))
        started = monotonic_seconds()
        reply = self._answer(command, request)
        if isinstance(reply, Batch):
            self._pending += 1
            job = self._job("EXEC", reply.run)
            job.on = reply.on
            self._decide(job)
            return True
        self._tell(command, reply, started)
        return True

    def _read(self, command: Command, request: list[bytes]) -> bool:
        """Answer a read of a client that is known and in no transaction."""
        started = monotonic_seconds()
        if not command.fits(len(request)):
            reply: object = wrong_arity(command)
        else:
            try:
                reply = command.handler(self.session.records, request)
            except (CommandError, FloodmarkError) as error:
                reply = describe(error)
            except Exception as error:
                _log.exception("the command %s failed unexpectedly", command.name)
                reply = describe(error)
        self._tell(command, reply, started)
        return True

    def _tell(self, command: Command | None, reply: object, started: float) -> None:
        self._say(encode_reply(reply, self.session.protocol))
        self._door.count(OTHER if command is None else command.name, monotonic_seconds() - started, reply)

    def _answer(self, command: Command | None, request: list[bytes]) -> object:
        """The reply to a request that does not wait."""
        session = self.session
        if command is None:
            if session.caller is None:
                return NO_AUTH
            session.is_spoiled = True
            return unknown_command(request)
        refusal = may_run(session, command, request)
        if refusal is not None:
            return refusal
        session.last_command = command.name
        was_known = session.caller is not None
        try:
            reply = command.handler(session.records if command.kind is Kind.READ else session, request)
        except (CommandError, FloodmarkError) as error:
            return describe(error)
        except Exception as error:
            _log.exception("the command %s failed unexpectedly", command.name)
            return describe(error)
        if not was_known and session.caller is not None:
            self.widen()
        return reply

    # Requests that wait

    def _begin_slow(self, command: Command, handler: Callable[[], object]) -> bool:
        self._is_waiting = True
        self.session.last_command = command.name
        self._commits = self._door.committing.node.committer.counters.commits
        self._door.work(self._run_slow, command, handler, monotonic_seconds())
        return True

    def _run_slow(self, command: Command, read: Callable[[], object], started: float) -> None:
        """Run a request in a worker thread."""
        try:
            reply = read()
        except (CommandError, FloodmarkError) as error:
            reply = describe(error)
        except Exception as error:
            _log.exception("the command %s failed unexpectedly", command.name)
            reply = describe(error)
        self._door.call(self._end_slow, command, reply, started)

    def _end_slow(self, command: Command, reply: object, started: float) -> None:
        if isinstance(reply, Later):
            self._look_later(command, reply, started)
            return
        self._is_waiting = False
        self._tell(command, reply, started)
        self.run()

    def _look_later(self, command: Command, later: Later, started: float) -> None:
        """Look again when something was committed, until the reply is there or its time is over."""
        if self.session.is_leaving:
            self._end_slow(command, None, started)
            return
        if later.until_ms is not None and monotonic_ms() >= later.until_ms:
            self._end_slow(command, None, started)
            return
        commits = self._door.committing.node.committer.counters.commits
        if commits == self._commits:
            self._door.call_later(LOOK_SECONDS, partial(self._look_later, command, later, started))
            return
        self._commits = commits
        self._door.work(self._run_slow, command, lambda: later.read() or later, started)

    # Writes

    def _submit(self, command: Command, request: list[bytes]) -> None:
        """Send a write on its way, which runs inside a round."""
        session = self.session
        records = session.records
        assert records is not None
        session.last_command = command.name
        handler = command.handler
        job = self._job(command.name, lambda records: handler(records, request))
        try:
            if handler is set_value and len(request) == 3 and not self._decided:
                row = records.encode_put(request[1], request[2])
                if row is not None:
                    job.on, job.value, job.reply = row[:1], row[1], OK
                    self._door.committing.submit(job)
                    return
            job.on = [records.locate(key, Role.READ).qualified for key in command.keys_of(request)]
            self._decide(job)
        except (CommandError, FloodmarkError) as error:
            job.reply = describe(error)
            self._door.committing.submit(job)

    def _job(self, name: str, run: Callable[[Records], object]) -> Job:
        session = self.session
        return Job(
            self, name, run, session.new_records, (), durable=session.durable, started=monotonic_seconds()
        )

    def _decide(self, job: Job) -> None:
        self._decided += 1
        job.plan(self._door.committing.node)
        self._door.committing.submit(job)

    def finish(self, jobs: Sequence[Job]) -> None:
        """Answer writes."""
        session, now = self.session, monotonic_seconds()
        for job in jobs:
            reply, commit = job.reply, job.commit
            if commit is not None:
                self._decided -= isinstance(commit, Step)
                if commit.error is not None:
                    reply = describe(commit.error)
                elif commit.version:
                    session.version = commit.version
            self._say(_OK if reply is OK else encode_reply(reply, session.protocol))
            self._door.count(job.name, now - job.started, reply)
        self._pending -= len(jobs)
        if not self._pending:
            self._decided = 0
        if self._requests or session.is_leaving or self._parser.error is not None:
            self.run()


def may_run(session: Session, command: Command, request: Arguments) -> object:
    """Why a request is not run now: its reply, or None if it is."""
    if session.caller is None and not command.is_open:
        return NO_AUTH
    if not command.fits(len(request)):
        session.is_spoiled = True
        return wrong_arity(command)
    if session.queued is not None and not command.is_quick:
        return _queue(session, command, request)
    return None


def _queue(session: Session, command: Command, request: Arguments) -> object:
    assert session.queued is not None
    if command.kind not in (Kind.READ, Kind.WRITE):
        session.is_spoiled = True
        return Failure(f"ERR {command.name} is not allowed in a transaction")
    if len(session.queued) >= RESP_ARGUMENTS_MAX:
        session.is_spoiled = True
        return Failure("ERR the transaction has too many commands; EXEC or DISCARD it")
    session.queued.append((command, request))
    return QUEUED
