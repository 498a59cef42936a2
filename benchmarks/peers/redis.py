"""Redis: a stream for the changes, plain keys for the point operations, the append-only file always synced.

redis-py turns every entry of a stream into a dictionary.  This module uses replies as hiredis parses them,
which is nearly twice as fast.  An entry is `[id, ["k", key, "v", value]]`.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from benchmarks.peers.base import (
    ANSWER_SECONDS_MAX,
    HERE,
    INSTALL_CLIENTS,
    LOOPBACK,
    Call,
    Pair,
    PeerFailed,
    Server,
    Write,
    count_changes,
    find_program,
    free_port,
    has_modules,
    in_batches_of,
    require,
    server_process,
)

with suppress(ImportError):
    import redis

if TYPE_CHECKING:
    Entry: TypeAlias = tuple[bytes, tuple[bytes, bytes, bytes, bytes]]

DURABLE: Final = {"appendonly": "yes", "appendfsync": "always"}
STREAM: Final = b"changes"
BEFORE_THE_FIRST: Final = b"0-0"
PAGE: Final = 1_000
BLOCK_SECONDS: Final = ANSWER_SECONDS_MAX / 2


class Redis:
    """Redis as a peer."""

    name = "redis"

    def is_installed(self) -> bool:
        return find_program("redis-server") is not None and has_modules("redis", "hiredis")

    def how_to_install(self) -> str:
        return f"apt-get install --no-install-recommends redis-server && {INSTALL_CLIENTS}"

    @contextmanager
    def running(self, directory: Path) -> Iterator[Server]:
        program = find_program("redis-server")
        if program is None:
            raise PeerFailed(f"Redis is not installed: {self.how_to_install()}")
        home = directory / self.name
        home.mkdir()
        port = free_port()
        command: list[str | Path] = [program, HERE / "redis.conf", "--port", str(port), "--dir", home]
        with server_process(self.name, command, home) as process:
            server = RedisServer(port=port)
            facts = process.wait_until_ready(server.facts, (redis.ConnectionError,))
            require(self.name, facts, DURABLE)
            yield server


@dataclass(frozen=True, kw_only=True)
class RedisServer:
    """The address of a running Redis."""

    port: int

    def facts(self) -> Mapping[str, str]:
        with self._connect() as connection:
            version = connection.info("server")["redis_version"]
            settings = connection.config_get(*DURABLE)
        return {"version": version, **{name: settings[name] for name in DURABLE}}

    def load(self, records: Sequence[Pair], batch: int) -> None:
        with self.writer() as write:
            for part in in_batches_of(batch, records):
                write(part)

    def fill(self, records: Sequence[Pair], batch: int) -> None:
        with self._connect() as connection:
            for part in in_batches_of(batch, records):
                connection.mset(dict(part))

    @contextmanager
    def writer(self) -> Iterator[Write]:
        with self._connect() as connection:

            def write(records: Sequence[Pair]) -> None:
                with connection.pipeline(transaction=True) as pipeline:
                    for key, value in records:
                        pipeline.execute_command("XADD", STREAM, b"*", b"k", key, b"v", value)
                    pipeline.execute()

            yield write

    def catch_up(self, count: int) -> int:
        with self._connect() as connection:
            return count_changes(_changes(connection, BEFORE_THE_FIRST), count)

    @contextmanager
    def tail(self) -> Iterator[Iterator[Sequence[Pair]]]:
        with self._connect() as connection:
            newest = connection.xrevrange(STREAM, count=1)
            yield _changes(connection, newest[0][0] if newest else BEFORE_THE_FIRST)

    @contextmanager
    def client(self) -> Iterator["RedisClient"]:
        with self._connect() as connection:
            yield RedisClient(connection)

    def _connect(self) -> "redis.Redis":
        return redis.Redis(
            host=LOOPBACK,
            port=self.port,
            protocol=2,
            single_connection_client=True,
            socket_timeout=ANSWER_SECONDS_MAX,
        )


class RedisClient:
    """SET and GET on one connection."""

    def __init__(self, connection: "redis.Redis") -> None:
        self._connection = connection

    def put(self, key: bytes, value: bytes) -> None:
        self._connection.set(key, value)

    def get(self, key: bytes) -> bytes | None:
        value: Any = self._connection.get(key)
        found: bytes | None = value
        return found

    def pipeline(self, calls: Sequence[Call]) -> Sequence[bytes | None]:
        with self._connection.pipeline(transaction=False) as pipeline:
            for key, value, is_put in calls:
                pipeline.set(key, value) if is_put else pipeline.get(key)
            answers = pipeline.execute()
        return [answer for answer, call in zip(answers, calls, strict=True) if not call.is_put]


def _changes(connection: "redis.Redis", last: bytes) -> Iterator[Sequence[Pair]]:
    """Pages of the entries after the id `last`.  Raises PeerFailed if none arrives in time."""
    connection.set_response_callback("XREAD", _as_it_is)
    execute: Callable[..., Any] = connection.execute_command
    block_ms = int(BLOCK_SECONDS * 1000)
    while True:
        reply = execute("XREAD", "COUNT", PAGE, "BLOCK", block_ms, "STREAMS", STREAM, last)
        if reply is None:
            raise PeerFailed(f"no change came from Redis in {BLOCK_SECONDS:.0f} s")
        entries: Sequence[Entry] = reply[0][1]
        last = entries[-1][0]
        yield [(fields[1], fields[3]) for _, fields in entries]


def _as_it_is(reply: object, **_: object) -> object:
    return reply
