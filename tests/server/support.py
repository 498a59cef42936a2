"""What the tests of a server share: a site in memory that is served, and threads whose errors count."""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any, Final, TypeVar

import msgspec
from pyarrow import flight
from tests.site.support import HookedEngine
from tests.site.support import open_memory as open_simulated
from tests.waiting import HANG_SECONDS

from floodmark.codec.ordered import encode_namespace
from floodmark.codec.values import encode_value
from floodmark.engine import MemoryEngine
from floodmark.model.access import Role
from floodmark.partition import FAMILIES
from floodmark.server import Server, ServerOptions, hash_token, serve
from floodmark.server.access import Caller
from floodmark.server.resp.calls import CallCommand
from floodmark.server.stalled import cut_connections
from floodmark.site import Namespace, Site, open_engine
from floodmark.site.connecting import connect
from floodmark.testing.clock import SimulatedTime
from floodmark.wire import Connection, Connections, Nodes
from floodmark.wire.messages import TOKEN_HEADER, TOKEN_SCHEME, WIRE_HEADER, WIRE_VERSION

LOOPBACK: Final = "127.0.0.1:0"

Result = TypeVar("Result")


def open_memory(name: str = "oslo") -> Site:
    """A site in memory, under real time and without background work."""
    return open_engine(MemoryEngine(FAMILIES), site=name, site_id=7)


@contextmanager
def serving(
    options: ServerOptions | None = None, *, time: SimulatedTime | None = None
) -> Iterator[tuple[Site, Server]]:
    """A site in memory and its server, on any free port."""
    site = open_memory() if time is None else open_simulated(HookedEngine(), time)
    with serve(site, LOOPBACK, options) as server:
        yield site, server


@contextmanager
def connected(server: Server, **options: Any) -> Iterator[Site]:
    """A client of a server."""
    with connect(server.url, **options) as site:
        yield site


def nodes_at(*urls: str, timeout_seconds: float = 30.0, **options: Any) -> Nodes:
    """The nodes at some URLs; close them."""
    make = partial(Connection, timeout_seconds=timeout_seconds, **options)
    return Nodes(Connections(make), urls, timeout_seconds=timeout_seconds)


def connection_of(site: Site) -> Any:
    """The connection of a client to the node that it asks."""
    nodes: Nodes = site.host._nodes  # type: ignore[attr-defined]
    return nodes.owner(0)


@contextmanager
def restartable() -> Iterator[tuple[Callable[[], str], Callable[[], None]]]:
    """A server that can be stopped and started again, on one port and one engine."""
    engine = HookedEngine()
    running: list[Server] = []
    port: list[int] = []

    def start() -> str:
        engine.reopen()
        listen = f"127.0.0.1:{port[0]}" if port else LOOPBACK
        server = serve(open_engine(engine, site="oslo", site_id=7), listen)
        port[:] = [server.address.port]
        running.append(server)
        return server.url

    def stop() -> None:
        while running:
            running.pop().close()

    try:
        yield start, stop
    finally:
        stop()


def qualify(namespace: Namespace, key: bytes) -> bytes:
    """A key as it travels."""
    return encode_namespace(namespace.id) + key


def stored(value: bytes) -> bytes:
    """A value as it travels."""
    return encode_value(value)


def intercept(server: Server, action: str, answer: Callable[[Callable[[], bytes]], bytes]) -> bool:
    """Let `answer` answer the calls of an action, with a function that does what the server would.

    Returns whether these are the calls over RESP: they are if the server takes the action there.
    """
    service: Any = server.service
    handler = service.handlers[action]

    class Intercepting:
        method = handler.method

        def __call__(self, caller: Caller, body: bytes) -> bytes:
            return answer(partial(handler, caller, body))

    class Intercepted(CallCommand):
        def begin(self, *_: object, **__: object) -> None:
            """Leave it to a worker thread: the event loop must not wait."""

    calls: Any = {} if server._door is None else server._door.calls
    intercepting: Any = Intercepting()
    is_over_resp = action.encode() in calls
    if is_over_resp:
        calls[action.encode()] = Intercepted(intercepting, server.service.admission)
    else:
        service.handlers[action] = intercepting
    return is_over_resp


def in_threads(work: Callable[[int], Result], threads: int) -> list[Result]:
    """Run the same work in many threads at once; what each returns.  The first error is raised."""
    with ThreadPoolExecutor(threads) as pool:
        futures = [pool.submit(work, number) for number in range(threads)]
        return [future.result(HANG_SECONDS) for future in futures]


def write_access(path: Path, *entries: dict[str, object]) -> Path:
    """An access file of some entries; a `token` is hashed."""
    lines: list[str] = []
    for entry in entries:
        table = dict(entry)
        if "token" in table:
            table["token_sha256"] = hash_token(str(table.pop("token")))
        lines += ["[[access]]", *(f"{name} = {_toml(value)}" for name, value in table.items())]
    path.write_text("\n".join(lines), "utf-8")
    return path


def _toml(value: object) -> str:
    # Texts and lists of texts are written alike in JSON and in TOML; a moment has no quotes.
    return value.isoformat() if isinstance(value, datetime) else msgspec.json.encode(value).decode()


def token_of(role: Role, namespace: str | None = None) -> str:
    """The token of a role in the files that `write_roles` makes."""
    return f"token-{role}-{namespace or 'site'}"


def write_roles(path: Path, *namespaces: str) -> Path:
    """An access file with a token for each role, on the site and on each of some namespaces."""
    entries: list[dict[str, object]] = []
    for role in Role:
        entries.append({"name": f"{role}", "role": str(role), "token": token_of(role)})
        for namespace in namespaces:
            entries.append(
                {
                    "name": f"{role}-{namespace}",
                    "role": str(role),
                    "token": token_of(role, namespace),
                    "namespaces": [namespace],
                }
            )
    return write_access(path, *entries)


def raw_client(server: Server) -> Any:
    """A Flight client that knows nothing of Floodmark."""
    return flight.FlightClient(server.url, generic_options=[("grpc.use_local_subchannel_pool", 1)])


def raw_options(
    *, wire: str | None = str(WIRE_VERSION), token: str | None = None, timeout: float = 20.0, **more: Any
) -> Any:
    """The headers of a request, made by hand."""
    headers = []
    if wire is not None:
        headers.append((WIRE_HEADER.encode(), wire.encode()))
    if token is not None:
        headers.append((TOKEN_HEADER.encode(), (TOKEN_SCHEME + token).encode()))
    return flight.FlightCallOptions(headers=headers, timeout=timeout, **more)


def cut_everything(server: Server) -> int:
    """Cut the connections of all requests at work, as a network would; how many."""
    watchdog = server.service.watchdog
    with watchdog._lock:
        peers = {activity.peer for activity in watchdog._activities}
    return cut_connections(peers)


def cut_lines(server: Server) -> int:
    """Cut all connections over RESP, as a network would; how many."""
    assert server._door is not None
    return cut_connections({f"ipv4:{session.address}" for session in server._door.sessions()})


def cut_streams(server: Server) -> int:
    """Cut the connections of streams that wait for their client; how many."""
    return server.service.watchdog.cut_waiting()
