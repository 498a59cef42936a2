"""Requests while they are served: the caller, its connection, and the outcome.

Every exception of a handler becomes one of Floodmark's errors here: gRPC would send any other to the client,
with the server's traceback.  Every request passes one gate, which a stopping server closes.
"""

import logging
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from threading import Condition, Event, Lock, get_ident
from typing import Any, Final, TypeAlias

import pyarrow
from pyarrow import flight

from floodmark.clock import TimeSource, monotonic_seconds
from floodmark.model.errors import (
    FloodmarkError,
    InvalidArgument,
    NotAuthenticated,
    OutcomeUnknown,
    Retryable,
    Unreachable,
)
from floodmark.server.access import Access, Caller
from floodmark.server.counters import ServerMetrics, outcome_of
from floodmark.server.logs import RefusedCallers
from floodmark.server.relay import Relay
from floodmark.server.stalled import Activity, Watchdog
from floodmark.wire.errors import to_flight_error
from floodmark.wire.messages import TOKEN_HEADER, TOKEN_SCHEME, WIRE_HEADER, require_version

# How often the rights of a caller with an open stream are checked again.
RENEW_MS: Final = 5_000

_log = logging.getLogger("floodmark.server")


MIDDLEWARE: Final = "floodmark"

HeaderValues: TypeAlias = Mapping[str, Sequence[str | bytes]]


class ClientGone(Exception):
    """The client disconnected while the server waited for it, so no answer can reach it."""


class Gate:
    """Counts the requests under way, and refuses new ones once the server is stopping."""

    def __init__(self) -> None:
        self.stopping = Event()
        self._inside = 0
        self._changed = Condition(Lock())

    @contextmanager
    def passing(self) -> Iterator[None]:
        """Count a request as under way within the block; raises Unreachable if the server is stopping."""
        with self._changed:
            self.require_serving()
            self._inside += 1
        try:
            yield
        finally:
            with self._changed:
                self._inside -= 1
                if not self._inside:
                    self._changed.notify_all()

    def require_serving(self) -> None:
        """Raise Unreachable if the server is stopping."""
        if self.stopping.is_set():
            raise stopping()

    def stop(self) -> None:
        """Accept no further requests."""
        with self._changed:
            self.stopping.set()

    def wait_empty(self, timeout_seconds: float) -> bool:
        """Wait until no request is under way; returns whether that happened in time."""
        with self._changed:
            return self._changed.wait_for(lambda: self._inside == 0, timeout_seconds)


class StreamPlaces:
    """Limits the number of open streams, in all and of each caller."""

    def __init__(
        self, streams_max: int, per_caller_max: int, *, on_end: Callable[[], None] = lambda: None
    ) -> None:
        self._on_end = on_end
        self._streams_max = streams_max
        self._per_caller_max = per_caller_max
        self._open: Counter[str] = Counter()
        self._lock = Lock()

    def count(self) -> int:
        """The number of open streams."""
        return self._open.total()

    @contextmanager
    def taking(self, caller: Caller) -> Iterator[None]:
        """Count a stream as open within the block; raises Retryable if too many are open."""
        with self._lock:
            if self.count() >= self._streams_max:
                raise Retryable(
                    f"the server has {self._streams_max:,} open streams, and takes no more; try again later"
                )
            if self._open[caller.name] >= self._per_caller_max:
                raise Retryable(
                    f"{caller.name!r} has {self._per_caller_max:,} open streams, and may have no more; "
                    "close some"
                )
            self._open[caller.name] += 1
        try:
            yield
        finally:
            with self._lock:
                self._open[caller.name] -= 1
                self._open += Counter()
            self._on_end()


class Headers(flight.ServerMiddlewareFactory):
    """Keeps the headers of each request until its handler takes them.

    Flight calls `start_call` and then the handler in one thread, so a handler finds its headers by its
    thread.  A middleware object for each request would cost a fifth more; a thread-local does not last from
    one call of a foreign thread to the next.
    """

    def __init__(self) -> None:
        super().__init__()
        self._by_thread: dict[int, HeaderValues] = {}

    def start_call(self, info: object, headers: HeaderValues) -> None:
        self._by_thread[get_ident()] = headers

    def take(self) -> HeaderValues:
        """The headers of the request that this thread serves.  They can be taken once."""
        return self._by_thread.pop(get_ident(), {})


class CallerIdentity:
    """The credentials of a request, kept so that its caller can be authenticated again."""

    def __init__(
        self, context: Any, headers: HeaderValues, access: Access, relay: Relay | None = None
    ) -> None:
        require_version(_first(headers, WIRE_HEADER))
        authorization = _first(headers, TOKEN_HEADER)
        self._access = access
        self._token = None if authorization is None else _bearer(authorization)
        self.peer: str = context.peer()
        # The name in the client's certificate, which was checked when the connection was made.
        if relay is None:
            self._certificate = context.peer_identity().decode(errors="replace") or None
        else:
            visitor = relay.find(self.peer)
            if visitor is None:
                raise NotAuthenticated(
                    "the server is reached another way; connect to the address that it tells"
                )
            self._certificate = visitor.certificate

    def authenticate(self) -> Caller:
        """The caller with its present rights.  A stream calls this every few seconds: rights may end."""
        return self._access.authenticate(self._token, self._certificate)


class Visit:
    """One request of an authenticated caller."""

    def __init__(
        self, context: Any, identity: CallerIdentity, activity: Activity, gate: Gate, time_source: TimeSource
    ) -> None:
        self.caller = identity.authenticate()
        self.activity = activity
        self._identity = identity
        self._gate = gate
        self._time_source = time_source
        self._known_at_ms = time_source()
        self._right: Callable[[Caller], None] = lambda _: None
        self._is_cancelled: Callable[[], bool] = context.is_cancelled

    def require(self, right: Callable[[Caller], None]) -> None:
        """Call `right`, which raises for a caller without it, now and each time the rights are renewed."""
        right(self.caller)
        self._right = right

    def is_over(self) -> bool:
        """Whether the client cancelled the stream.  Raises if the server is stopping or rights have ended."""
        self._gate.require_serving()
        now_ms = self._time_source()
        if now_ms - self._known_at_ms >= RENEW_MS:
            self.caller = self._identity.authenticate()
            self._right(self.caller)
            self._known_at_ms = now_ms
        return self._is_cancelled()


class Reception:
    """Authenticates, watches and counts each request, and turns its exceptions into errors of Flight."""

    def __init__(
        self,
        headers: Headers,
        access: Access,
        metrics: ServerMetrics,
        watchdog: Watchdog,
        gate: Gate,
        *,
        refused: RefusedCallers,
        monotonic_ms: TimeSource,
        relay: Relay | None = None,
    ) -> None:
        self._relay = relay
        self._refused = refused
        self._headers = headers
        self._access = access
        self._metrics = metrics
        self._watchdog = watchdog
        self._gate = gate
        self._monotonic_ms = monotonic_ms

    @contextmanager
    def receive(self, context: Any, action: str, *, writes: bool) -> Iterator[Visit]:
        """Serve a request in the block.  An exception in it is raised again as an error of Flight."""
        headers = self._headers.take()
        started = monotonic_seconds()
        failure: BaseException | None = None
        try:
            with self._gate.passing():
                identity = CallerIdentity(context, headers, self._access, self._relay)
                with self._watchdog.watching(identity.peer) as activity:
                    visit = Visit(context, identity, activity, self._gate, self._monotonic_ms)
                    if self._relay is not None:
                        self._relay.admit(identity.peer)
                    yield visit
        except FloodmarkError as error:
            failure = error
            if isinstance(error, NotAuthenticated):
                self._refused.note(self._address(context.peer()), action, error)
            raise to_flight_error(error) from None
        except GeneratorExit:
            # The client has gone, or has read as much as it wanted.
            raise
        except ClientGone:
            self._metrics.connection_cut()
            raise to_flight_error(Unreachable("the client has gone")) from None
        except BaseException as error:
            failure = error
            _log.exception("the request %r failed unexpectedly", action)
            raise to_flight_error(unexpected(writes=writes)) from None
        finally:
            self._metrics.request(action, monotonic_seconds() - started, outcome_of(failure))

    def _address(self, peer: str) -> str:
        """The address of a client; gRPC has the relay's address in its place."""
        visitor = None if self._relay is None else self._relay.find(peer)
        return peer if visitor is None else visitor.address


@contextmanager
def waiting(visit: Visit) -> Iterator[None]:
    """Wait for the client in the block; raises ClientGone if its connection fails."""
    visit.activity.leave()
    try:
        yield
    except (flight.FlightError, OSError) as error:
        raise ClientGone from error
    except pyarrow.ArrowException as error:
        raise InvalidArgument(f"a message of a stream cannot be read: {error!s:.200}") from None
    finally:
        visit.activity.come_back()


def stopping() -> Unreachable:
    """The error for a request to a server that stops."""
    return Unreachable("the server is stopping, and nothing was done; try again when it is back")


def unexpected(*, writes: bool) -> FloodmarkError:
    """The error for a client after a bug: its details are in the server's log only."""
    if writes:
        return OutcomeUnknown(
            "the server failed unexpectedly, and whether the write happened is not known; read before you "
            "repeat it. The server's log says more"
        )
    return FloodmarkError("the server failed unexpectedly; its log says more. Please report it as a bug")


def _first(headers: HeaderValues, name: str) -> str | None:
    values = headers.get(name)
    if not values:
        return None
    value = values[0]
    return value.decode(errors="replace") if isinstance(value, bytes) else value


def _bearer(authorization: str) -> str:
    """The token of an authorization header; for another scheme it is empty, which no access file has."""
    scheme = authorization[: len(TOKEN_SCHEME)]
    return authorization[len(TOKEN_SCHEME) :].strip() if scheme.lower() == TOKEN_SCHEME.lower() else ""
