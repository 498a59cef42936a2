"""Calls of Floodmark's own clients: the requests and answers of Flight, over RESP.

    FM.CALL method body      a bulk string: the answer; or an array of one bulk string: an encoded error

The event loop answers reads of a few keys, and a put of one key joins the next round of group commit.  A
worker thread runs every other call.
"""

import logging
from collections.abc import Iterable, Mapping
from typing import Any, Final, NamedTuple, NoReturn

from floodmark.model.errors import FloodmarkError, WireMismatch
from floodmark.model.limits import KIB
from floodmark.server.access import Caller
from floodmark.server.counters import outcome_of
from floodmark.server.data import POINT_CALLS, Handler
from floodmark.server.resp.committing import WriteJob, WritingConnection
from floodmark.server.resp.session import Session
from floodmark.server.resp.table import TABLE, Arguments, Command, CommandError, Kind
from floodmark.server.visits import stopping, unexpected
from floodmark.wire.errors import encode_error
from floodmark.wire.messages import FIND, GET, GET_MANY, HELLO, HOLD, PUT, READ_BATCHES, RELEASE, Method

# A larger request is decoded in a worker thread.
QUICK_BYTES_MAX: Final = 64 * KIB
QUICK_KEYS_MAX: Final = 256
SERVED: Final[frozenset[Method[Any]]] = frozenset((HELLO, HOLD, RELEASE, GET_MANY, *POINT_CALLS))

_log: Final = logging.getLogger("floodmark.server")


class CallFailure(list[bytes]):
    """The reply for an error of a call."""

    def __init__(self, error: FloodmarkError) -> None:
        super().__init__([encode_error(error)])
        self.outcome = outcome_of(error)


class CheckedPut(NamedTuple):
    """A put of one key, checked, that is still to be committed."""

    key: bytes
    stored: bytes
    durable: bool


class PutJob(WriteJob):
    """A put of one key in its round; the reply is its version."""

    __slots__ = ("_durable",)

    def __init__(self, connection: WritingConnection, put: CheckedPut, started: float) -> None:
        super().__init__(connection, PUT.name, _never, (), started)
        self.key, self.value, self._durable = put

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


class CallCommand:
    """One kind of request."""

    def __init__(self, handler: Handler) -> None:
        method = handler.method
        self._handler = handler
        self._is_put = method is PUT
        self._is_read = method in (GET, FIND, GET_MANY, READ_BATCHES)
        self._is_quick = method is HELLO
        # As which its requests are counted and logged.
        self.command = Command(name=method.name, arity=3, kind=Kind.CALL, verdict="", handler=self.answer)

    def begin(
        self, caller: Caller, body: bytes, *, reads_wait: bool
    ) -> "bytes | CallFailure | CheckedPut | None":
        """Do what needs no wait: the reply, or a put to be committed; None if a worker must run it."""
        if self._is_quick:
            return self.answer(caller, body)
        if len(body) > QUICK_BYTES_MAX or not (self._is_put or (self._is_read and not reads_wait)):
            return None
        handler = self._handler
        try:
            request = handler.decode(body)
            if self._is_put:
                if len(request.keys) != 1 or len(request.values) != 1:
                    return None
                assert handler.enter is not None
                handler.enter(caller, request)
                return CheckedPut(request.keys[0], request.values[0], request.durable)
            if request.at is not None or len(getattr(request, "keys", ())) > QUICK_KEYS_MAX:
                return None
            return handler.method.encode_reply(handler.handle(caller, request))
        except FloodmarkError as error:
            return CallFailure(error)
        except Exception:
            return self._failed()

    def answer(self, caller: Caller, body: bytes) -> "bytes | CallFailure":
        """The reply, when all is done."""
        try:
            return self._handler(caller, body)
        except FloodmarkError as error:
            return CallFailure(error)
        except Exception:
            return self._failed()

    def _failed(self) -> CallFailure:
        method = self._handler.method
        _log.exception("the request %r failed unexpectedly", method.name)
        return CallFailure(unexpected(writes=method.writes))


def _never(*_: object) -> NoReturn:
    raise AssertionError("a put needs no decision")


def find_calls(handlers: Iterable[Handler]) -> Mapping[bytes, CallCommand]:
    """The calls that are served over RESP, by name."""
    return {
        handler.method.name.encode(): CallCommand(handler) for handler in handlers if handler.method in SERVED
    }


def refuse_stopping() -> CallFailure:
    """The reply of a server that stops."""
    return CallFailure(stopping())


def unknown_call(name: bytes) -> CallFailure:
    """The reply for a call that is not served."""
    shown = name.decode(errors="replace")
    return CallFailure(WireMismatch(f"this server has no {shown!r:.100} over RESP; it may be too old for it"))


@TABLE.call(
    "FM.CALL", 3, "ours: `FM.CALL method body`, a point call of a client of Floodmark (`floodmark.connect`)"
)
def refuse_call(session: Session, arguments: Arguments) -> object:
    """Reached only where no call can run."""
    raise CommandError("ERR FM.CALL is not allowed in a transaction")
