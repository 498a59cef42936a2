"""Who calls: what each request shows about its sender, and the caller that it stands for."""

from collections.abc import Mapping, Sequence
from threading import get_ident
from typing import Any, Final, TypeAlias

from pyarrow import flight

from floodmark.model.errors import NotAuthenticated
from floodmark.server.access import Access, Caller
from floodmark.server.relay import Relay
from floodmark.wire.messages import TOKEN_HEADER, TOKEN_SCHEME, WIRE_HEADER, require_version

MIDDLEWARE: Final = "floodmark"

HeaderValues: TypeAlias = Mapping[str, Sequence[str | bytes]]


class Headers(flight.ServerMiddlewareFactory):
    """Takes in the headers of each request; what they are worth is judged where errors can travel.

    Flight calls `start_call` and then the handler, one after the other in one thread, so a handler finds
    its headers by its thread.  (A middleware object for each request would hold them as well, at a fifth of
    the cost of a request: it is called twice more, and each time waits for the interpreter.  What Python
    calls thread-local does not last from one call of a foreign thread to the next.)
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
    """The other end of a request, which can be authenticated again."""

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
        """The caller with the rights of this moment.  A stream asks now and then: rights may end."""
        return self._access.authenticate(self._token, self._certificate)


def _first(headers: HeaderValues, name: str) -> str | None:
    values = headers.get(name)
    if not values:
        return None
    value = values[0]
    return value.decode(errors="replace") if isinstance(value, bytes) else value


def _bearer(authorization: str) -> str:
    """The token of an authorization header.  Another scheme is no token of ours, and refused as one."""
    scheme = authorization[: len(TOKEN_SCHEME)]
    return authorization[len(TOKEN_SCHEME) :].strip() if scheme.lower() == TOKEN_SCHEME.lower() else ""
