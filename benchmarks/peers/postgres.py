"""PostgreSQL: one table, and logical decoding by its own plugin, pgoutput, in binary form.

psycopg has no call for the streaming replication protocol, but exposes libpq, which has: a reader receives
messages from the connection and cuts key and value out of them.  A pipe from pg_recvlogical was no faster,
with or without decoding its output: the server is the bottleneck.  A message about an inserted or updated
row, within the frame of the replication protocol:

    'w' | start 8 | end 8 | clock 8 | 'I' or 'U' | relation 4 | 'N' | columns 2 | column ...
    column: 'b' | length 4 | bytes

Every reader has its own temporary replication slot: a copy of the slot that was made before the first change,
or a new one that begins now.
"""

import os
import shutil
import signal
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from secrets import token_hex
from select import select
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from benchmarks.peers.base import (
    ANSWER_SECONDS_MAX,
    HERE,
    INSTALL_CLIENTS,
    LOOPBACK,
    START_SECONDS_MAX,
    Call,
    Pair,
    PeerFailed,
    Server,
    Write,
    check_others_can_enter,
    count_changes,
    find_program,
    free_port,
    has_modules,
    in_batches_of,
    require,
    server_process,
)

with suppress(ImportError):
    import psycopg
    from psycopg import pq

if TYPE_CHECKING:
    Connection: TypeAlias = psycopg.Connection[tuple[Any, ...]]

ROLE: Final = "bench"
DATABASE: Final = "postgres"
UNPRIVILEGED: Final = "postgres"
DURABLE: Final = {"fsync": "on", "synchronous_commit": "on", "full_page_writes": "on", "wal_level": "logical"}
STATED: Final = ("server_version", *DURABLE)

SET_UP: Final = (
    "CREATE TABLE records (key bytea PRIMARY KEY, value bytea NOT NULL)",
    "CREATE PUBLICATION changes FOR TABLE records",
    "SELECT pg_create_logical_replication_slot('from_the_first', 'pgoutput')",
)
SETTING: Final = "SELECT current_setting(%s)"
SLOT_FROM_THE_FIRST: Final = "SELECT pg_copy_logical_replication_slot('from_the_first', '{slot}', true)"
SLOT_FROM_NOW: Final = "SELECT pg_create_logical_replication_slot('{slot}', 'pgoutput', true)"
START: Final = (
    "START_REPLICATION SLOT {slot} LOGICAL 0/0 "
    "(proto_version '1', publication_names 'changes', binary 'true')"
)

COPY: Final = "COPY records FROM STDIN (FORMAT binary)"
UPDATE: Final = "ON CONFLICT (key) DO UPDATE SET value = excluded.value"
PUT_MANY: Final = f"INSERT INTO records SELECT * FROM unnest(%b::bytea[], %b::bytea[]) {UPDATE}"
PUT: Final = f"INSERT INTO records VALUES (%b, %b) {UPDATE}"
GET: Final = "SELECT value FROM records WHERE key = %b"

DATA, ALIVE = b"wk"
INSERT_AND_UPDATE: Final = b"IU"
KIND_AT: Final = 25
KEY_LENGTH_AT: Final = KIND_AT + 9
KEY_AT: Final = KEY_LENGTH_AT + 4
COLUMN_HEAD_BYTES: Final = 5
REPLY_ASKED_AT: Final = 17
# A status update that confirms no position, so that the slot does not advance.
STILL_HERE: Final = b"r" + bytes(33)
GROUP: Final = 1_000


class Postgres:
    """PostgreSQL as a peer."""

    name = "postgres"

    def is_installed(self) -> bool:
        return find("postgres") is not None and find("initdb") is not None and has_modules("psycopg")

    def how_to_install(self) -> str:
        return f"apt-get install --no-install-recommends postgresql-15 && {INSTALL_CLIENTS}"

    @contextmanager
    def running(self, directory: Path) -> Iterator[Server]:
        postgres, initdb = find("postgres"), find("initdb")
        if postgres is None or initdb is None:
            raise PeerFailed(f"PostgreSQL is not installed: {self.how_to_install()}")
        home = directory / self.name
        home.mkdir()
        # PostgreSQL refuses to be run by root.
        user = UNPRIVILEGED if os.geteuid() == 0 else None
        if user is not None:
            shutil.chown(home, user, user)
            check_others_can_enter(directory)
        initialize(initdb, home / "data", user)
        port = free_port()
        command: list[str | Path] = [postgres, "-D", home / "data", "-p", str(port)]
        # An interrupt is what PostgreSQL calls a fast shutdown: it does not wait for clients.
        with server_process(self.name, command, home, user=user, stop_signal=signal.SIGINT) as process:
            server = PostgresServer(port=port)
            facts = process.wait_until_ready(server.facts, (psycopg.OperationalError,))
            require(self.name, facts, DURABLE)
            server.create_table()
            yield server


@dataclass(frozen=True, kw_only=True)
class PostgresServer:
    """The address of a running PostgreSQL."""

    port: int

    def facts(self) -> Mapping[str, str]:
        with closing(self._connect()) as connection:
            rows = {name: connection.execute(SETTING, (name,)).fetchone() for name in STATED}
        return {name: str(row[0]) for name, row in rows.items() if row is not None}

    def create_table(self) -> None:
        with closing(self._connect()) as connection:
            for statement in SET_UP:
                connection.execute(statement)

    def load(self, records: Sequence[Pair], batch: int) -> None:
        with closing(self._connect()) as connection, connection.cursor() as cursor:
            for part in in_batches_of(batch, records):
                with cursor.copy(COPY) as copy:
                    for record in part:
                        copy.write_row(record)

    def fill(self, records: Sequence[Pair], batch: int) -> None:
        with self.writer() as write:
            for part in in_batches_of(batch, records):
                write(part)

    @contextmanager
    def writer(self) -> Iterator[Write]:
        with closing(self._connect()) as connection, connection.cursor() as cursor:

            def write(records: Sequence[Pair]) -> None:
                keys, values = map(list, zip(*records, strict=True))
                cursor.execute(PUT_MANY, (keys, values), prepare=True)

            yield write

    def catch_up(self, count: int) -> int:
        with self._reading(SLOT_FROM_THE_FIRST) as groups:
            return count_changes(groups, count)

    @contextmanager
    def tail(self) -> Iterator[Iterator[Sequence[Pair]]]:
        with self._reading(SLOT_FROM_NOW) as groups:
            yield groups

    @contextmanager
    def client(self) -> Iterator["PostgresClient"]:
        with closing(self._connect()) as connection:
            yield PostgresClient(connection)

    @contextmanager
    def _reading(self, make_slot: str) -> Iterator[Iterator[Sequence[Pair]]]:
        slot = f"reader_{token_hex(4)}"
        with closing(self._connect(replication="database")) as connection:
            _command(connection.pgconn, make_slot.format(slot=slot), pq.ExecStatus.TUPLES_OK)
            _command(connection.pgconn, START.format(slot=slot), pq.ExecStatus.COPY_BOTH)
            yield _changes(connection.pgconn)

    def _connect(self, replication: str | None = None) -> "Connection":
        return psycopg.connect(
            host=LOOPBACK,
            port=self.port,
            user=ROLE,
            dbname=DATABASE,
            connect_timeout=int(START_SECONDS_MAX),
            options=f"-c statement_timeout={ANSWER_SECONDS_MAX:.0f}s",
            autocommit=True,
            replication=replication,
        )


class PostgresClient:
    """Prepared statements, each a transaction of its own."""

    def __init__(self, connection: "Connection") -> None:
        self._connection = connection
        self._cursor = connection.cursor(binary=True)

    def put(self, key: bytes, value: bytes) -> None:
        self._cursor.execute(PUT, (key, value), prepare=True)

    def get(self, key: bytes) -> bytes | None:
        row = self._cursor.execute(GET, (key,), prepare=True).fetchone()
        value: bytes | None = None if row is None else row[0]
        return value

    def pipeline(self, calls: Sequence[Call]) -> Sequence[bytes | None]:
        cursors = [self._connection.cursor(binary=True) for _ in calls]
        with self._connection.pipeline():
            for cursor, (key, value, is_put) in zip(cursors, calls, strict=True):
                cursor.execute(PUT if is_put else GET, (key, value) if is_put else (key,), prepare=True)
        rows = [cursor.fetchone() for cursor, call in zip(cursors, calls, strict=True) if not call.is_put]
        return [None if row is None else row[0] for row in rows]


def find(program: str) -> Path | None:
    """Find a program of PostgreSQL; Debian installs each version in its own directory, not on the path."""
    return find_program(program, *sorted(Path("/usr/lib/postgresql").glob("*/bin"), reverse=True))


def initialize(initdb: Path, data: Path, user: str | None) -> None:
    """Make a data directory with the role `ROLE` and the configuration beside this file."""
    options = ["--auth=trust", f"--username={ROLE}", "--encoding=UTF8", "--no-locale"]
    make_directory([initdb, *options], data, user)
    shutil.copyfile(HERE / "postgresql.conf", data / "postgresql.conf")


def make_directory(command: Sequence[str | Path], data: Path, user: str | None) -> None:
    """Run a program that makes the data directory `data`.  Raises PeerFailed if it fails."""
    done = subprocess.run(
        [*command, "-D", str(data)],
        cwd=data.parent,
        capture_output=True,
        text=True,
        timeout=START_SECONDS_MAX,
        check=False,
        user=user,
        group=user,
        extra_groups=None if user is None else [],
    )
    if done.returncode != 0:
        raise PeerFailed(f"{command[0]} failed: {done.stderr.strip()}")


def _command(connection: "pq.abc.PGconn", command: str, expected: int) -> None:
    result = connection.exec_(command.encode())
    if result.status != expected:
        raise PeerFailed(f"{command}: {result.error_message.decode(errors='replace').strip()}")


def _changes(connection: "pq.abc.PGconn") -> Iterator[Sequence[Pair]]:
    """Decoded changes in groups as they arrive.  Raises PeerFailed if no message arrives in time."""
    receive = connection.get_copy_data
    group: list[Pair] = []
    while True:
        size, view = receive(1)
        if size > 0:
            message = bytes(view)
            if message[0] == DATA:
                if message[KIND_AT] in INSERT_AND_UPDATE:
                    group.append(decode_change(message))
            elif message[0] == ALIVE and message[REPLY_ASKED_AT]:
                connection.put_copy_data(STILL_HERE)
                connection.flush()
        elif size < 0:
            raise PeerFailed("PostgreSQL ended the stream of changes")
        if group and (size == 0 or len(group) == GROUP):
            yield group
            group = []
        elif size == 0:
            _wait_for_input(connection)


def decode_change(message: bytes) -> Pair:
    """Key and value of the new row."""
    key_end = KEY_AT + int.from_bytes(message[KEY_LENGTH_AT:KEY_AT], "big")
    return message[KEY_AT:key_end], message[key_end + COLUMN_HEAD_BYTES :]


def _wait_for_input(connection: "pq.abc.PGconn") -> None:
    readable, _, _ = select([connection.socket], [], [], ANSWER_SECONDS_MAX)
    if not readable:
        raise PeerFailed(f"no change came from PostgreSQL in {ANSWER_SECONDS_MAX:.0f} s")
    connection.consume_input()
