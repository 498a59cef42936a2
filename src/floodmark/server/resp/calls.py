"""Calls of Floodmark's own clients: the requests and answers of Flight, over RESP.

    FM.CALL method body      a bulk string: the answer; or an array of one bulk string: an encoded error

The event loop answers reads of a few keys that need not wait.  A put of one key, and a write that merges
nothing, joins the next round of group commit.  So do the steps of atomic batches: all workers may be waiting
for steps of other nodes.  A worker thread runs every other call.
"""

import logging
from collections.abc import Iterable, Mapping
from typing import Any, Final, NoReturn

from floodmark.model.errors import FloodmarkError, WireMismatch
from floodmark.model.limits import QUICK_CALL_BYTES_MAX
from floodmark.model.version import Version
from floodmark.partition.commit.commit import Commit
from floodmark.partition.commit.merging import has_states
from floodmark.partition.partition import LocalPartition, may_wait, plan_write
from floodmark.partition.prepared.steps import CommitPrepared, Prepare
from floodmark.partition.prepared.writes import conflict
from floodmark.server.access import Caller
from floodmark.server.admission import Admission
from floodmark.server.counters import outcome_of
from floodmark.server.data import POINT_CALLS, Handler
from floodmark.server.resp.committing import WriteJob, WritingConnection
from floodmark.server.resp.session import Session
from floodmark.server.resp.table import TABLE, Arguments, Command, CommandError, Kind
from floodmark.server.visits import stopping, unexpected
from floodmark.wire.errors import encode_error
from floodmark.wire.messages import (
    COMMIT_PREPARED,
    FIND,
    GET,
    GET_FRESH,
    GET_MANY,
    HELLO,
    HOLD,
    PREPARE_BATCH,
    PUT,
    READ_BATCHES,
    RELEASE,
    WRITE,
    Method,
)

# A read of more keys runs in a worker thread, as does a larger request.
QUICK_KEYS_MAX: Final = 256
# The steps of atomic batches, which join a round.
STEPS: Final = (PREPARE_BATCH, COMMIT_PREPARED)
SERVED: Final[frozenset[Method[Any]]] = frozenset((HELLO, HOLD, RELEASE, GET_MANY, *POINT_CALLS, *STEPS))

_log: Final = logging.getLogger("floodmark.server")


class CallFailure(list[bytes]):
    """The reply for an error of a call."""

    def __init__(self, error: FloodmarkError) -> None:
        super().__init__([encode_error(error)])
        self.outcome = outcome_of(error)


class CallJob(WriteJob):
    """A checked call that runs in a round; the reply is the version of its commit."""

    __slots__ = ("_durable",)

    def __init__(
        self, connection: WritingConnection, method: Method[Version], started: float, *, durable: bool
    ) -> None:
        super().__init__(connection, method.name, _never, (), started)
        self._durable = durable

    @property
    def durable(self) -> bool:
        return self._durable

    @property
    def is_blocked(self) -> bool:
        # The client learns that a partition has moved, and asks for the map.
        return False

    def outcome(self) -> object:
        commit = self.commit
        if commit is None:
            return self.reply
        return PUT.encode_reply(commit.version) if commit.error is None else CallFailure(commit.error)

    def refuse(self, error: FloodmarkError) -> None:
        self.reply = CallFailure(error)


class PutJob(CallJob):
    """A put of one key."""

    __slots__ = ()

    def __init__(self, connection: WritingConnection, request: Any, started: float) -> None:
        super().__init__(connection, PUT, started, durable=request.durable)
        (self.key,), (self.value,) = request.keys, request.values


class WriteCallJob(CallJob):
    """A write without states, which may validate what its caller has read."""

    __slots__ = ("_partition", "_request")

    def __init__(
        self, connection: WritingConnection, partition: LocalPartition, request: Any, started: float
    ) -> None:
        super().__init__(connection, WRITE, started, durable=request.durable)
        self._partition, self._request = partition, request

    def outcome(self) -> object:
        reads = self._request.reads
        if reads is not None and self.commit is not None:
            self.connection.session.door.metrics.transaction(reads, self.commit.error)
        return super().outcome()

    def plan(self) -> Commit | None:
        request = self._request
        try:
            self.commit = plan_write(
                self._partition,
                request.keys,
                request.values,
                request.reads,
                durable=request.durable,
                batch=request.batch,
                transaction=request.transaction,
            )
        except FloodmarkError as error:
            self.refuse(error)
        return self.commit


class StepJob(CallJob):
    """A step of an atomic batch: its part is prepared, or committed."""

    __slots__ = ("_method", "_partition", "_request")

    def __init__(
        self,
        connection: WritingConnection,
        method: Method[Any],
        partition: LocalPartition,
        request: Any,
        started: float,
    ) -> None:
        super().__init__(connection, method, started, durable=True)
        self._method, self._partition, self._request = method, partition, request

    def plan(self) -> Commit | None:
        plan = plan_prepare if self._method is PREPARE_BATCH else plan_commit
        try:
            self.commit = plan(self._partition, self._request)
        except FloodmarkError as error:
            self.refuse(error)
        return self.commit

    def outcome(self) -> object:
        step = self.commit
        if step is None or step.error is not None:
            return super().outcome()
        if isinstance(step, Prepare) and step.blocking:
            return CallFailure(conflict(step.blocking[0]))
        method = self._method
        return method.encode_reply(step.version if method is PREPARE_BATCH else step.version != 0)


class CallCommand:
    """Runs the calls of one method."""

    def __init__(self, handler: Handler, admission: Admission) -> None:
        method = handler.method
        self._admission = admission
        self._is_delayed = method.action.delayed
        self._handler = handler
        self._is_put, self._is_write, self._is_step = method is PUT, method is WRITE, method in STEPS
        self._is_read = method in (GET, GET_FRESH, FIND, GET_MANY, READ_BATCHES)
        self._is_quick = method is HELLO
        # The name under which its requests are counted and logged.
        self.command = Command(name=method.name, arity=3, kind=Kind.CALL, verdict="", handler=self.answer)

    def begin(
        self, connection: WritingConnection, caller: Caller, body: bytes, started: float, *, reads_wait: bool
    ) -> "bytes | CallFailure | CallJob | None":
        """Run a call that need not wait; returns its reply, a job for a round, or None for a worker."""
        if self._is_quick:
            return self.answer(caller, body)
        writes = self._is_put or self._is_write or self._is_step
        if len(body) > QUICK_CALL_BYTES_MAX or not (writes or (self._is_read and not reads_wait)):
            return None
        if self._is_delayed and self._admission.delays:
            return None
        handler = self._handler
        try:
            request = handler.decode(body)
            if writes:
                return self._begin_write(connection, caller, request, started)
            if len(getattr(request, "keys", ())) > QUICK_KEYS_MAX:
                return None
            at = request.since if self._is_delayed else request.at
            if at is None:
                return handler.method.encode_reply(handler.handle(caller, request))
            partition = None if handler.enter is None else handler.enter(caller, request)
            if not isinstance(partition, LocalPartition) or may_wait(partition, at):
                return None
            assert handler.read is not None
            return handler.method.encode_reply(handler.read(partition, request))
        except FloodmarkError as error:
            return CallFailure(error)
        except Exception:
            return self._failed()

    def _begin_write(
        self, connection: WritingConnection, caller: Caller, request: Any, started: float
    ) -> CallJob | None:
        if self._is_put and not len(request.keys) == 1 == len(request.values):
            return None
        if self._is_write and not _may_join(request):
            return None
        assert self._handler.enter is not None
        partition = self._handler.enter(caller, request)
        if self._is_put:
            return PutJob(connection, request, started)
        if not isinstance(partition, LocalPartition):
            return None
        if self._is_write:
            return WriteCallJob(connection, partition, request, started)
        return StepJob(connection, self._handler.method, partition, request, started)

    def answer(self, caller: Caller, body: bytes) -> "bytes | CallFailure":
        """Run a call to its end, which may take a while; returns its reply."""
        try:
            if self._is_delayed:
                self._admission.delay_read_version(queued=True)
            return self._handler(caller, body)
        except FloodmarkError as error:
            return CallFailure(error)
        except Exception:
            return self._failed()

    def _failed(self) -> CallFailure:
        method = self._handler.method
        _log.exception("the request %r failed unexpectedly", method.name)
        return CallFailure(unexpected(writes=method.writes))


def _may_join(write: Any) -> bool:
    """Whether a write may join a round: it is small, merges nothing, and has not read whole ranges."""
    reads = write.reads
    if (reads is None and write.batch) or (reads is not None and reads.ranges):
        return False
    return len(write.keys) <= QUICK_KEYS_MAX and all(write.values) and not has_states(write.values)


def plan_prepare(partition: LocalPartition, request: Any) -> Prepare:
    """The step that prepares a part of a batch."""
    return partition.plan_prepare(
        request.transaction, request.keys, request.values, request.siblings, request.members, request.link
    )


def plan_commit(partition: LocalPartition, request: Any) -> CommitPrepared:
    """The step that commits a prepared part of a batch."""
    return partition.plan_commit(request.transaction, request.version)


def _never(*_: object) -> NoReturn:
    raise AssertionError("a put needs no decision")


def find_calls(handlers: Iterable[Handler], admission: Admission) -> Mapping[bytes, CallCommand]:
    """The calls that are served over RESP, by name."""
    return {
        handler.method.name.encode(): CallCommand(handler, admission)
        for handler in handlers
        if handler.method in SERVED
    }


def refuse_stopping() -> CallFailure:
    """The reply of a server that is stopping."""
    return CallFailure(stopping())


def unknown_call(name: bytes) -> CallFailure:
    """The reply for a call that is not served."""
    shown = name.decode(errors="replace")
    return CallFailure(WireMismatch(f"this server has no {shown!r:.100} over RESP; it may be too old for it"))


@TABLE.call(
    "FM.CALL", 3, "ours: `FM.CALL method body`, a point call of a client of Floodmark (`floodmark.connect`)"
)
def refuse_call(session: Session, arguments: Arguments) -> object:
    """Refuse the command; connections run calls without this handler."""
    raise CommandError("ERR FM.CALL is not allowed in a transaction")
