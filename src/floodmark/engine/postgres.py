"""An engine in a PostgreSQL database, which several nodes may share.  The only module that imports psycopg.

Each family is a table in a schema of the site's own, and `bytea` compares byte by byte:

    "floodmark_oslo".data       key bytea PRIMARY KEY, value bytea     and so for each family
    "floodmark_oslo".sessions   id uuid PRIMARY KEY, seen timestamptz  a row for each open engine
    "floodmark_oslo".layout     version int                            of these tables

**Durability.**  All writes of an engine go through one connection.  They commit with `synchronous_commit`
off; `write_durably` and `sync` commit with the setting of the server, which flushes all earlier commits too,
also to a synchronous standby.  If the server crashes in between, the connection is lost; it is replaced only
by `recover`, so a lost write is never taken for a synced one.

**Recovery.**  A transaction first locks its engine's row in `sessions`, for share, and fails without it.
`recover` deletes the row: it waits for a transaction that the server is running, and one that arrives later
fails.  So when it returns, each earlier write has happened or never will.

**Guards** are locked for share in the transaction that they guard: a node that changes a guarded key waits
for the write, or the write fails.  A transaction is sent whole, in one round trip.  Rounds of group commit
only put rows, in one statement.  Other transactions have several statements; in these a guard that does not
hold raises an error in the server, which skips the rest.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from threading import BoundedSemaphore, Event, Lock
from typing import Any, Final, TypeAlias, TypeVar
from uuid import uuid4

import psycopg
from psycopg import errors as postgres
from psycopg import sql
from psycopg.abc import PQGen
from psycopg.conninfo import conninfo_to_dict
from psycopg_pool import ConnectionPool, PoolTimeout

from floodmark.clock import monotonic_seconds
from floodmark.clock.backoff import Backoff
from floodmark.engine.base import EngineLimits, Guard, Row, WriteRow
from floodmark.model.errors import (
    CannotOpen,
    Closed,
    FloodmarkError,
    FormatTooNew,
    InvalidName,
    NotAllowed,
    NotASite,
    OutcomeUnknown,
    StorageFailed,
    StorageFull,
)
from floodmark.model.limits import MIB

LAYOUT_VERSION: Final = 1
CONNECTIONS_MAX: Final = 17
# A node's rounds are quick: a statement that takes this long waits for a standby or reads a cold disk.
STATEMENT_SECONDS_MAX: Final = 30
ANSWER_SECONDS_MAX: Final = STATEMENT_SECONDS_MAX + 5
CONNECT_SECONDS_MAX: Final = 10
PAUSE_MS: Final = 5
PAUSE_MS_MAX: Final = 500
# Longer than PostgreSQL takes to find a deadlock.
LOCK_SECONDS_MAX: Final = 2
# PostgreSQL cuts names to 63 bytes.
SCHEMA_BYTES_MAX: Final = 63

APPLICATION: Final = "floodmark"
_SETTINGS: Final[Mapping[str, Any]] = {
    "application_name": APPLICATION,
    "connect_timeout": CONNECT_SECONDS_MAX,
    "tcp_user_timeout": ANSWER_SECONDS_MAX * 1_000,
    "keepalives_idle": 10,
    "keepalives_interval": 5,
    "keepalives_count": 3,
    # If the URL names several hosts, connect to the primary.
    "target_session_attrs": "read-write",
}
# Each query finds rows by their keys.  Without statistics, the planner would read and sort small tables.
_OPTIONS: Final = " ".join(
    f"-c {setting}"
    for setting in (
        f"statement_timeout={STATEMENT_SECONDS_MAX}s",
        f"lock_timeout={LOCK_SECONDS_MAX}s",
        f"idle_in_transaction_session_timeout={LOCK_SECONDS_MAX}s",
        *(f"enable_{plan}=off" for plan in ("seqscan", "bitmapscan", "hashjoin", "mergejoin")),
        "jit=off",
    )
)

_GET: Final = "SELECT value FROM {table} WHERE key = %b"
_GET_MANY: Final = """
    SELECT t.value FROM unnest(%b::bytea[]) WITH ORDINALITY AS k(key, n)
    LEFT JOIN {table} t USING (key) ORDER BY k.n"""
_CEILING: Final = "SELECT key, value FROM {table} WHERE key >= %b ORDER BY key LIMIT 1"
_CEILINGS: Final = """
    SELECT f.key, f.value FROM unnest(%b::bytea[]) WITH ORDINALITY AS p(key, n)
    LEFT JOIN LATERAL (
        SELECT t.key, t.value FROM {table} t WHERE t.key >= p.key ORDER BY t.key LIMIT 1
    ) f ON true
    ORDER BY p.n"""
# The page ends with the row that reaches the limit: the bytes of the rows before it decide.
_SCAN: Final = """
    SELECT key, value FROM (
        SELECT key, value, sum(length(key) + length(value)) OVER (ORDER BY key ROWS UNBOUNDED PRECEDING)
                           - length(key) - length(value) AS before
        FROM (SELECT key, value FROM {table} WHERE key >= %b AND key < %b ORDER BY key LIMIT %b) page
    ) sums WHERE before < %b ORDER BY key"""
_SCAN_BACK: Final = _SCAN.replace("ORDER BY key", "ORDER BY key DESC")
_UNBOUNDED: Final = " AND key < %b"
_PUT: Final = """
    INSERT INTO {table} (key, value) SELECT * FROM unnest(%b::bytea[], %b::bytea[])
    ON CONFLICT (key) DO UPDATE SET value = excluded.value"""
_DELETE: Final = "DELETE FROM {table} WHERE key = ANY(%b::bytea[])"
_DELETE_RANGE: Final = "DELETE FROM {table} WHERE key >= %b AND key < %b"
_SIZE: Final = "SELECT pg_total_relation_size('{table}')"

# The texts of errors that these queries raise; operators see them in the log of the server.
_ENDED: Final = "floodmark: this session was ended by a recovery"
_BROKEN: Final = "floodmark: a guard does not hold, so nothing is written"
_RAISED: Final = (postgres.InvalidTextRepresentation, postgres.UniqueViolation)
_REQUIRE: Final = (
    "SELECT CASE count(*) WHEN 1 THEN 1 ELSE ('{text}' || left(count(*)::text, 0))::int END FROM "
)
_HOLD_SESSION: Final = (
    _REQUIRE.replace("{text}", _ENDED) + "(SELECT FROM {table} WHERE id = %b FOR KEY SHARE) held"
)
_HOLD: Final = (
    _REQUIRE.replace("{text}", _BROKEN) + "(SELECT FROM {table} WHERE key = %b AND value = %b FOR SHARE) held"
)
# Two transactions that share a lock and then both write would wait for each other.
_HOLD_WRITTEN: Final = _HOLD.replace("FOR SHARE", "FOR NO KEY UPDATE")
# An absent row cannot be locked.  Inserting one keeps other transactions from inserting it.
_HOLD_ABSENT: Final = "INSERT INTO {table} (key, value) VALUES (%b, '')"

# A whole transaction in one statement, if all rows are put and all guards are of rows that are there.  Each
# insert reads `allowed` before its first row, and so waits for the locks.  Rows are removed by statements of
# their own: this one would not see a row that was entered while it waited.
_PUT_GUARDED: Final = """
    WITH session(held) AS MATERIALIZED ({session}), guards AS MATERIALIZED ({guards}),
    allowed(yes) AS MATERIALIZED (
        SELECT (SELECT held FROM session) = 1 AND (SELECT count(*) FROM guards) = %b
    ){puts}
    SELECT yes, set_config('synchronous_commit', %b::text, true) FROM allowed"""
_PUT_ALLOWED: Final = """, {family} AS (
        INSERT INTO {table} (key, value)
        SELECT * FROM unnest(%b::bytea[], %b::bytea[]) WHERE (SELECT yes FROM allowed)
        ON CONFLICT (key) DO UPDATE SET value = excluded.value
    )"""
_HOLD_ALL: Final = """
    SELECT FROM {table} JOIN unnest(%b::bytea[], %b::bytea[]) AS expected(key, value) USING (key, value)
    FOR SHARE OF {family}"""
_HOLD_NONE: Final = "SELECT WHERE false"
# One in this many durable writes also records that the session is alive.
_SEEN_EVERY: Final = 1_024

# Without a timeout: PostgreSQL would report a commit that no standby has confirmed as done, with a warning.
_DURABLY: Final = """
    SELECT set_config('synchronous_commit', %b::text, true), set_config('statement_timeout', '0', true)"""
_ENTER: Final = "INSERT INTO {table} (id, seen) VALUES (%b, now())"
_LEAVE: Final = "DELETE FROM {table} WHERE id = %b"
_SEEN: Final = "UPDATE {table} SET seen = now() WHERE id = %b AND seen < now() - interval '1 hour'"
# Removes the sessions of engines that ended without `close`.  One that was only idle must recover.
_SWEEP: Final = "DELETE FROM {table} WHERE seen < now() - interval '7 days'"
_END: Final = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name = %b AND "
_END_BACKEND: Final = _END + "pid = %b"
# Ends the connections of clients that are suspended in the middle of a transaction: they hold locks.
_END_STALLED: Final = _END + (
    "pid <> pg_backend_pid() AND wait_event = 'ClientRead' "
    f"AND xact_start < now() - interval '{LOCK_SECONDS_MAX} s'"
)

# Classes of SQLSTATE: lost connections, and servers that shut down.
_ENDING: Final = frozenset({"08", "57"})

Result = TypeVar("Result")
Send: TypeAlias = Callable[..., None]
Written: TypeAlias = Mapping[str, Mapping[bytes, bytes | None]]
Cursor: TypeAlias = psycopg.Cursor[tuple[Any, ...]]

NOTHING: Final[Written] = {}


class PostgresConnection(psycopg.Connection[tuple[Any, ...]]):
    """A connection that fails if an answer takes longer than `ANSWER_SECONDS_MAX`."""

    def wait(self, gen: PQGen[Result], interval: float = 0.1, timeout: float | None = None) -> Result:
        try:
            return super().wait(gen, interval, timeout or ANSWER_SECONDS_MAX)
        except postgres._WaitTimeout as error:
            self.pgconn.finish()
            raise psycopg.OperationalError(f"no answer within {ANSWER_SECONDS_MAX} s") from error


class Queries:
    """The texts of queries, with the names of a site's tables."""

    def __init__(self, schema: str, families: Sequence[str]) -> None:
        self._schema = schema
        self._tables = (*families, "sessions", "layout", "")
        self._texts: dict[tuple[str, str], bytes] = {}

    def of(self, text: str, table: str) -> bytes:
        """A query of one table."""
        query = self._texts.get((text, table))
        if query is None:
            query = self._texts[text, table] = self._text(text, table).encode()
        return query

    def _text(self, text: str, table: str) -> str:
        if table not in self._tables:
            raise KeyError(table)
        return text.replace("{table}", sql.Identifier(self._schema, table).as_string()).replace(
            "{family}", sql.Identifier(table).as_string()
        )

    def of_puts(self, guarded: str, *families: str) -> bytes:
        """The query that puts rows into some families, with guards in one, or in none."""
        key = _PUT_GUARDED, ",".join((guarded, *families))
        query = self._texts.get(key)
        if query is None:
            text = (
                _PUT_GUARDED.replace("{session}", self._text(_HOLD_SESSION, "sessions"))
                .replace("{guards}", self._text(_HOLD_ALL, guarded) if guarded else _HOLD_NONE)
                .replace("{puts}", "".join(self._text(_PUT_ALLOWED, family) for family in families))
            )
            query = self._texts[key] = text.encode()
        return query


class Readers:
    """Connections for reads, taken from a pool and kept.  Taking one for each read would cost half as much
    processor time again.
    """

    def __init__(self, pool: "ConnectionPool[PostgresConnection]") -> None:
        self._pool = pool
        # One connection writes.
        self._permits = BoundedSemaphore(CONNECTIONS_MAX - 1)
        self._idle: deque[tuple[PostgresConnection, Cursor]] = deque()

    def fetch(self, query: bytes, values: Sequence[object]) -> list[Any]:
        """The rows of a query."""
        if not self._permits.acquire(timeout=ANSWER_SECONDS_MAX):
            raise PoolTimeout(f"no connection became free within {ANSWER_SECONDS_MAX} s")
        try:
            try:
                connection, cursor = self._idle.pop()
            except IndexError:
                connection = self._pool.getconn()
                cursor = connection.cursor(binary=True)
            try:
                rows = cursor.execute(query, values, prepare=True).fetchall()
            except BaseException:
                # The pool closes it, unless it is idle and intact.
                self._pool.putconn(connection)
                raise
            # A cursor keeps its last result.
            reusable = cursor if len(rows) <= 1 else connection.cursor(binary=True)
            self._idle.append((connection, reusable))
            if self._pool.closed:
                self.give_back()
            return rows
        finally:
            self._permits.release()

    def give_back(self) -> None:
        """Give idle connections back to the pool, which closes lost ones, or all if it is closed."""
        with suppress(IndexError):
            while True:
                self._pool.putconn(self._idle.pop()[0])


class PostgresEngine:
    """The engine of a site in a PostgreSQL database.  With `create`, makes a missing schema and its tables.

    `url` is a connection string of libpq, with one or several hosts.
    """

    limits = EngineLimits(
        value_bytes_max=64 * MIB,
        batch_bytes_max=256 * MIB,
        batch_rows_max=300_000,
        # An entry of an index has at most 2,704 bytes.
        key_bytes_max=2_600,
        range_rows_max=10_000,
        reads_wait=True,
    )

    def __init__(self, url: str, families: Sequence[str], *, site: str, create: bool = True) -> None:
        self._schema = f"floodmark_{site}"
        if len(self._schema.encode()) > SCHEMA_BYTES_MAX:
            raise InvalidName(
                f"the site's name {site!r} is too long for a PostgreSQL schema; "
                f"use at most {SCHEMA_BYTES_MAX - len(APPLICATION) - 1} bytes"
            )
        self._families = tuple(families)
        self._queries = Queries(self._schema, families)
        self._refusal: FloodmarkError | None = None
        # Held over each use of the writing connection, which is None while the engine has to recover.
        self._lock = Lock()
        self._writer: PostgresConnection | None = None
        self._session, self._backend = uuid4(), 0
        self._durability = "on"
        self._durable_writes = 0
        with _opening():
            arguments = _arguments(url)
            with PostgresConnection.connect(**arguments) as connection:
                self._make_schema(connection, create)
            self._pool = ConnectionPool(
                connection_class=PostgresConnection,
                kwargs=arguments,
                min_size=1,
                max_size=CONNECTIONS_MAX,
                open=True,
                timeout=CONNECT_SECONDS_MAX,
                name=self._schema,
            )
            self._readers = Readers(self._pool)
            try:
                self._connect()
            except BaseException:
                self._pool.close()
                raise

    # Reading

    def get(self, family: str, key: bytes) -> bytes | None:
        rows = self._read(_GET, family, [key])
        return rows[0][0] if rows else None

    def get_many(self, family: str, keys: Sequence[bytes]) -> list[bytes | None]:
        if not keys:
            return []
        return [value for (value,) in self._read(_GET_MANY, family, [list(keys)])]

    def ceiling(self, family: str, key: bytes, prefix: bytes = b"") -> Row | None:
        rows = self._read(_CEILING, family, [key])
        return rows[0] if rows and rows[0][0].startswith(prefix) else None

    def ceilings(
        self, family: str, prefixes: Sequence[bytes], starts: Sequence[bytes] | None = None
    ) -> list[Row | None]:
        if not prefixes:
            return []
        rows = self._read(_CEILINGS, family, [list(starts or prefixes)])
        return [
            row if row[0] is not None and row[0].startswith(prefix) else None
            for row, prefix in zip(rows, prefixes, strict=True)
        ]

    def scan(
        self,
        family: str,
        start: bytes,
        end: bytes | None,
        *,
        rows_max: int,
        bytes_max: int,
        reverse: bool = False,
    ) -> list[Row]:
        query = _SCAN_BACK if reverse else _SCAN
        if end is None:
            return self._read(query.replace(_UNBOUNDED, ""), family, [start, rows_max, bytes_max])
        return self._read(query, family, [start, end, rows_max, bytes_max])

    def sizes(self) -> Mapping[str, int]:
        return {family: self._read(_SIZE, family, [])[0][0] for family in self._families}

    def _read(self, text: str, family: str, values: Sequence[object]) -> list[Any]:
        if self._refusal is not None:
            raise self._refusal.again()
        query = self._queries.of(text, family)
        return self._reconnecting(lambda: self._readers.fetch(query, values))

    def _reconnecting(self, operation: Callable[[], Result]) -> Result:
        """Run an operation that is safe to repeat; retry it, at least once, if a connection was lost.

        A pool may hand out several lost connections, also one that it was just opening.
        """
        ends: float | None = None
        backoff = Backoff(PAUSE_MS, longest_ms=PAUSE_MS_MAX, budget_ms=CONNECT_SECONDS_MAX * 1_000)
        with _translating():
            while True:
                try:
                    return operation()
                except psycopg.OperationalError:
                    ends = ends or monotonic_seconds() + CONNECT_SECONDS_MAX
                    pause_ms = backoff.next_ms()
                    if pause_ms is None or monotonic_seconds() > ends:
                        raise
                    self._readers.give_back()
                    self._pool.check()
                    Event().wait(pause_ms / 1_000)

    # Writing

    def write(self, rows: Iterable[WriteRow], guards: Sequence[Guard] = ()) -> bool:
        return self._write(rows, guards, durable=False)

    def write_durably(self, rows: Iterable[WriteRow], guards: Sequence[Guard] = ()) -> bool:
        try:
            return self._write(rows, guards, durable=True)
        except StorageFailed as error:
            if self._writer is not None:
                raise
            raise OutcomeUnknown(f"earlier writes may be lost: {error}") from error

    def delete_range(self, family: str, start: bytes, end: bytes, guards: Sequence[Guard] = ()) -> bool:
        return self._commit(lambda send: send(_DELETE_RANGE, family, start, end), guards)

    def sync(self) -> None:
        self.write_durably(())

    def _write(self, rows: Iterable[WriteRow], guards: Sequence[Guard], *, durable: bool) -> bool:
        written: dict[str, dict[bytes, bytes | None]] = {}
        for family, key, value in rows:
            written.setdefault(family, {})[key] = value
        self._durable_writes += durable
        if _is_plain(written, guards) and not (durable and self._durable_writes % _SEEN_EVERY == 0):
            return self._run(lambda connection: self._put(connection, written, guards, durable=durable))

        def send_all(send: Send) -> None:
            _send_rows(send, written)
            if durable:
                send(_SEEN, "sessions", self._session)
                send(_DURABLY, "", self._durability)

        return self._commit(send_all, guards, written)

    def _put(
        self, connection: PostgresConnection, written: Written, guards: Sequence[Guard], *, durable: bool
    ) -> bool:
        """Run a transaction of one statement.  False if a guard did not hold."""
        values: list[object] = [self._session]
        expected = sorted({guard.key: guard.expected for guard in guards}.items())
        if expected:
            values += map(list, zip(*expected, strict=True))
        values.append(len(expected))
        # In the order of keys: transactions that write the same keys queue up and never lock in circles.
        families = sorted(written)
        for family in families:
            values += map(list, zip(*sorted(written[family].items()), strict=True))
        values.append(self._durability if durable else "off")
        query = self._queries.of_puts(guards[0].family if guards else "", *families)
        ((allowed, _),) = connection.execute(query, values, prepare=True, binary=True).fetchall()
        return bool(allowed)

    def _commit(
        self, body: Callable[[Send], object], guards: Sequence[Guard] = (), written: Written = NOTHING
    ) -> bool:
        """Run a transaction of several statements, in one round trip.  False if a guard did not hold."""

        def run(connection: PostgresConnection) -> bool:
            def send(text: str, family: str, *values: object) -> None:
                connection.execute(self._queries.of(text, family), values, prepare=True)

            with connection.pipeline():
                connection.execute("BEGIN")
                send(_HOLD_SESSION, "sessions", self._session)
                absent = _send_guards(send, guards, written)
                body(send)
                for guard in absent:
                    send(_DELETE, guard.family, [guard.key])
                connection.execute("COMMIT")
            return True

        return self._run(run)

    def _run(self, transaction: Callable[[PostgresConnection], bool]) -> bool:
        with self._lock:
            connection = self._writer
            if connection is None:
                raise self._unavailable()
            try:
                return transaction(connection)
            except psycopg.Error as error:
                failure = self._fail(connection, error)
                if failure is not None:
                    raise failure from error
                return False
            except BaseException:
                self._lose_writer()
                raise

    def _fail(self, connection: PostgresConnection, error: psycopg.Error) -> FloodmarkError | None:
        """The error for a failed transaction; None if a guard did not hold.

        Keeps the connection if possible, because without it, writes that are not synced yet may be lost.
        """
        # An error that PostgreSQL reports is certain, unless the server is about to end the connection.
        certain = error.sqlstate is not None and error.sqlstate[:2] not in _ENDING
        try:
            if connection.info.transaction_status is not psycopg.pq.TransactionStatus.IDLE:
                connection.execute("ROLLBACK")
            if isinstance(error, postgres.LockNotAvailable):
                connection.execute(_END_STALLED, [APPLICATION])
        except psycopg.Error:
            self._lose_writer()
        if not certain:
            self._lose_writer()
            return OutcomeUnknown(
                f"the connection to PostgreSQL was lost in a write ({_first_line(error)}); "
                "the engine has to recover before it is known whether the write happened"
            )
        if isinstance(error, _RAISED):
            if _ENDED not in str(error):
                return None
            self._lose_writer()
        return _translate(error)

    def _lose_writer(self) -> None:
        writer, self._writer = self._writer, None
        if writer is not None:
            with suppress(psycopg.Error):
                writer.close()
            self._pool.putconn(writer)

    # Connecting

    def recover(self) -> None:
        with self._lock:
            if self._refusal is not None:
                raise self._refusal.again()
            self._lose_writer()
            self._reconnecting(self._connect)

    def abandon(self, refusal: FloodmarkError) -> None:
        """Refuse all calls in a forked process; the connections belong to its parent."""
        self._refusal, self._lock, self._writer = refusal, Lock(), None

    def close(self) -> None:
        with self._lock:
            if self._refusal is not None:
                return
            self._refusal = Closed("the site was closed; open it again")
            writer, self._writer = self._writer, None
            try:
                if writer is not None:
                    with _translating(OutcomeUnknown), writer.transaction():
                        writer.execute(_DURABLY, [self._durability])
                        writer.execute(self._queries.of(_LEAVE, "sessions"), [self._session])
            finally:
                if writer is not None:
                    writer.close()
                self._pool.close()
                # A closed pool closes what is returned.
                self._readers.give_back()

    def _connect(self) -> None:
        """Take a connection to write on, once no transaction of the earlier one can still be running."""
        connection = self._pool.getconn()
        try:
            ((shown,),) = connection.execute("SHOW synchronous_commit").fetchall()
            session = uuid4()
            connection.execute(_END_BACKEND, [APPLICATION, self._backend])
            with connection.transaction():
                connection.execute(f"SET LOCAL lock_timeout = '{STATEMENT_SECONDS_MAX}s'")
                connection.execute(self._queries.of(_LEAVE, "sessions"), [self._session])
                connection.execute(self._queries.of(_SWEEP, "sessions"))
                connection.execute(self._queries.of(_ENTER, "sessions"), [session])
            connection.execute("SET synchronous_commit = off")
        except BaseException:
            connection.close()
            self._pool.putconn(connection)
            raise
        self._durability = "on" if shown == "off" else shown
        self._session, self._backend = session, connection.info.backend_pid
        self._writer = connection

    def _make_schema(self, connection: PostgresConnection, create: bool) -> None:
        layout = sql.Identifier(self._schema, "layout").as_string()
        with connection.transaction():
            # Engines that open at the same time create the schema one after the other.
            connection.execute("SELECT pg_advisory_xact_lock(hashtext(%b::text))", [self._schema])
            ((found,),) = connection.execute("SELECT to_regclass(%b::text)::text", [layout]).fetchall()
            if found is not None:
                ((version,),) = connection.execute(self._queries.of("SELECT version FROM {table}", "layout"))
                if version > LAYOUT_VERSION:
                    raise FormatTooNew(
                        f"the schema {self._schema} has layout {version}; this Floodmark knows "
                        f"{LAYOUT_VERSION}. Install a newer Floodmark",
                        format=version,
                    )
                return
            if not create:
                raise NotASite("the database holds no such site; check its name, or create it first")
            connection.execute(sql.SQL("CREATE SCHEMA IF NOT EXISTS {}").format(sql.Identifier(self._schema)))
            rows = "key bytea PRIMARY KEY, value bytea NOT NULL"
            for table, columns in (
                *((family, rows) for family in self._families),
                ("sessions", "id uuid PRIMARY KEY, seen timestamptz NOT NULL"),
                ("layout", "version int NOT NULL"),
            ):
                connection.execute(self._queries.of(f"CREATE TABLE {{table}} ({columns})", table))
            connection.execute(
                self._queries.of("INSERT INTO {table} VALUES (%b)", "layout"), [LAYOUT_VERSION]
            )

    def _unavailable(self) -> FloodmarkError:
        if self._refusal is not None:
            return self._refusal.again()
        return StorageFailed("the database has not recovered from a failed write yet; try again")


def _is_plain(written: Written, guards: Sequence[Guard]) -> bool:
    """Whether one statement is enough: it removes no row, and guards only rows that it does not write."""
    expected = {(guard.family, guard.key): guard.expected for guard in guards}
    return (
        len({guard.family for guard in guards}) <= 1
        and all(expected[guard.family, guard.key] == guard.expected is not None for guard in guards)
        and not any(key in written.get(family, ()) for family, key in expected)
        and not any(None in rows.values() for rows in written.values())
    )


def _send_rows(send: Send, written: Written) -> None:
    # In the order of keys: transactions that write the same keys queue up and never lock in circles.
    for family, rows in sorted(written.items()):
        if gone := sorted(key for key, value in rows.items() if value is None):
            send(_DELETE, family, gone)
        if kept := sorted((key, value) for key, value in rows.items() if value is not None):
            keys, values = map(list, zip(*kept, strict=True))
            send(_PUT, family, keys, values)


def _send_guards(send: Send, guards: Sequence[Guard], written: Written) -> list[Guard]:
    """Lock the guarded rows, in the same order everywhere; returns the guards whose inserted rows must go."""
    entered: dict[tuple[str, bytes], Guard] = {}
    # Those of absent rows last: another guard must not take an inserted row for an earlier one.
    for guard in sorted(guards, key=lambda each: (each.expected is None, each.family, each.key)):
        is_written = guard.key in written.get(guard.family, ())
        if guard.expected is not None:
            send(_HOLD_WRITTEN if is_written else _HOLD, guard.family, guard.key, guard.expected)
        elif (guard.family, guard.key) not in entered:
            send(_HOLD_ABSENT, guard.family, guard.key)
            entered[guard.family, guard.key] = guard
    return [each for each in entered.values() if each.key not in written.get(each.family, ())]


def _arguments(url: str) -> dict[str, Any]:
    """The arguments of a connection: Floodmark's settings, which the URL may override."""
    asked = conninfo_to_dict(url)
    options = f"{_OPTIONS} {asked.pop('options', None) or ''}".strip()
    return {"autocommit": True, **_SETTINGS, **asked, "options": options}


@contextmanager
def _opening() -> Iterator[None]:
    try:
        yield
    except postgres.InsufficientPrivilege as error:
        raise NotAllowed(
            f"PostgreSQL refused: {_first_line(error)}; grant CREATE on the database once, or USAGE on the "
            "site's schema and SELECT, INSERT, UPDATE and DELETE on its tables"
        ) from error
    except (psycopg.Error, PoolTimeout) as error:
        raise CannotOpen(
            f"cannot open the site's database: {_first_line(error)}; check the URL, and that PostgreSQL runs "
            "and accepts this role"
        ) from error


@contextmanager
def _translating(otherwise: type[FloodmarkError] = StorageFailed) -> Iterator[None]:
    try:
        yield
    except (psycopg.Error, PoolTimeout) as error:
        raise _translate(error, otherwise) from error


def _translate(error: Exception, otherwise: type[FloodmarkError] = StorageFailed) -> FloodmarkError:
    if isinstance(error, postgres.DiskFull):
        return StorageFull(f"PostgreSQL has no room left: {_first_line(error)}; make room, then call again")
    return otherwise(f"PostgreSQL failed: {_first_line(error)}; try again")


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0] or type(error).__name__
