"""The PostgreSQL engine keeps the engine's contract on a real server, also when connections are lost."""

from collections.abc import Callable, Iterator
from copy import copy
from itertools import count
from random import Random
from threading import Thread
from typing import Final

import psycopg
import pytest
from tests.postgres import HANG_SECONDS, CuttingProxy, PostgresServer, postgres_server
from tests.sizes import only

from floodmark.engine import Engine, Guard, WriteRow, durable_writes
from floodmark.engine.postgres import APPLICATION, LAYOUT_VERSION, PostgresEngine
from floodmark.model.errors import (
    CannotOpen,
    Closed,
    FormatTooNew,
    InvalidName,
    NotAllowed,
    OutcomeUnknown,
    StorageFailed,
)
from floodmark.testing import EngineContract
from floodmark.testing.contracts import LEFT, RIGHT, Reopen, keys_of, rows_of

POSITIONS_MAX: Final = 400
ROWS: Final[list[WriteRow]] = [(LEFT, b"a", b"new"), (LEFT, b"old", None), (RIGHT, b"a", b"new")]
BEFORE: Final[list[WriteRow]] = [(LEFT, b"fence", b"1"), (LEFT, b"old", b"1")]
PUTS: Final[list[WriteRow]] = [(LEFT, b"a", b"new"), (RIGHT, b"a", b"new")]
FENCE: Final = Guard(LEFT, b"fence", b"1")

_names = count()


@pytest.fixture
def site() -> str:
    return f"site-{next(_names)}"


def open_at(url: str, site: str) -> PostgresEngine:
    return PostgresEngine(url, EngineContract.families, site=site)


@pytest.fixture
def engine(postgres: PostgresServer, site: str) -> Iterator[PostgresEngine]:
    engine = open_at(postgres.url, site)
    yield engine
    engine.close()


class TestPostgresEngine(EngineContract):
    @pytest.fixture
    def reopen(self, engine: Engine, postgres: PostgresServer, site: str) -> Iterator[Reopen]:
        opened: list[Engine] = []

        def reopen() -> Engine:
            engine.close()
            opened.append(open_at(postgres.url, site))
            return opened[-1]

        yield reopen
        for again in opened:
            again.close()


# Lost connections


@pytest.fixture
def proxy(postgres: PostgresServer) -> Iterator[CuttingProxy]:
    proxy = CuttingProxy(postgres.port)
    yield proxy
    proxy.close()


OPERATIONS: Final[dict[str, Callable[[Engine], object]]] = {
    "write": lambda engine: engine.write(ROWS),
    "write_durably": lambda engine: durable_writes(engine)(ROWS),
    "write_durably of puts": lambda engine: durable_writes(engine)(PUTS, [FENCE]),
    "write with guards": lambda engine: engine.write(ROWS, [FENCE, Guard(LEFT, b"z", None)]),
    "write with a broken guard": lambda engine: engine.write(ROWS, [FENCE._replace(expected=b"2")]),
    "delete_range": lambda engine: engine.delete_range(LEFT, b"o", b"p", [FENCE]),
    "sync": lambda engine: engine.sync(),
    "recover": lambda engine: engine.recover(),
    "scan": rows_of,
}
REPEATED: Final = ("recover", "scan")


@pytest.mark.slow
@pytest.mark.parametrize("name", only(("sync",), OPERATIONS))
def test_a_connection_that_is_cut_at_any_message_leaves_all_or_nothing(
    postgres: PostgresServer, proxy: CuttingProxy, site: str, name: str
) -> None:
    engine = open_at(postgres.url_at(proxy.port), site)
    for position in range(POSITIONS_MAX):
        engine.delete_range(LEFT, b"", b"z")
        engine.delete_range(RIGHT, b"", b"z")
        engine.write(BEFORE)
        engine.sync()
        earlier = rows_of(engine), rows_of(engine, RIGHT)
        proxy.cut_after(position)
        done: object = None
        is_unknown = False
        try:
            done = OPERATIONS[name](engine)
        except OutcomeUnknown:
            # Its COMMIT may have been sent.  What only reads, and `recover`, go on by themselves.
            is_unknown = True
            assert name not in REPEATED
        was_cut = proxy.cut_after(None)
        if was_cut:
            engine.recover()
        engine.sync()
        later = rows_of(engine), rows_of(engine, RIGHT)
        expected = expected_after(name)
        if is_unknown:
            assert later in (earlier, expected)
        else:
            assert later == expected
            assert not name.startswith(("write", "delete")) or done is (name != "write with a broken guard")
        if not was_cut:
            break
    else:
        pytest.fail(f"{name} was cut {POSITIONS_MAX} times and never came through")
    assert position > 2
    engine.close()


def expected_after(name: str) -> tuple[list[tuple[bytes, bytes]], list[tuple[bytes, bytes]]]:
    """What an operation leaves of BEFORE."""
    if name == "write_durably of puts":
        return [(b"a", b"new"), (b"fence", b"1"), (b"old", b"1")], [(b"a", b"new")]
    if name in ("write", "write_durably", "write with guards"):
        return [(b"a", b"new"), (b"fence", b"1")], [(b"a", b"new")]
    return [(b"fence", b"1")] + [(b"old", b"1")] * (name != "delete_range"), []


def test_a_write_that_is_still_at_work_is_settled_by_recover(
    postgres: PostgresServer, proxy: CuttingProxy, site: str
) -> None:
    engine = open_at(postgres.url_at(proxy.port), site)
    engine.write([(LEFT, b"a", b"1")])
    with psycopg.connect(postgres.url) as blocker:
        blocker.execute(f'SELECT FROM "floodmark_{site}"."{LEFT}" FOR UPDATE'.encode())
        failures: list[BaseException] = []

        def write() -> None:
            try:
                engine.write([(LEFT, b"a", b"2")])
            except (OutcomeUnknown, StorageFailed) as failure:
                failures.append(failure)

        writer = Thread(target=write)
        writer.start()
        waiting = "SELECT pid FROM pg_stat_activity WHERE wait_event_type = 'Lock'"
        while writer.is_alive() and not postgres.execute(waiting):
            writer.join(0.01)
        proxy.cut_after(0)
        assert engine.get(LEFT, b"a") == b"1"
        writer.join(HANG_SECONDS)
        assert len(failures) == 1
        engine.recover()
        assert engine.get(LEFT, b"a") == b"1"
    assert engine.write([(LEFT, b"b", b"1")]) is True
    assert rows_of(engine) == [(b"a", b"1"), (b"b", b"1")]
    engine.close()


def test_nothing_is_written_and_no_sync_succeeds_before_recover(
    postgres: PostgresServer, engine: PostgresEngine
) -> None:
    end_connections(postgres)
    with pytest.raises(OutcomeUnknown):
        engine.write([(LEFT, b"a", b"1")])
    with pytest.raises(StorageFailed, match="recover"):
        engine.write([(LEFT, b"a", b"1")])
    with pytest.raises(OutcomeUnknown, match="lost"):
        engine.sync()
    assert engine.get(LEFT, b"a") is None
    engine.recover()
    engine.sync()
    assert engine.write([(LEFT, b"a", b"1")]) is True


def end_connections(postgres: PostgresServer) -> None:
    postgres.execute(
        "SELECT pg_terminate_backend(pid, 10000) FROM pg_stat_activity WHERE application_name = %b",
        APPLICATION,
    )


def test_an_error_of_the_server_keeps_the_connection_and_earlier_writes(engine: PostgresEngine) -> None:
    engine.write([(LEFT, b"a", b"1")])
    with pytest.raises(StorageFailed, match="index row"):
        engine.write([(LEFT, b"b", b"1"), (LEFT, Random(1).randbytes(4_000), b"1")])
    engine.sync()
    assert keys_of(engine) == [b"a"]


def test_a_suspended_client_does_not_hold_its_locks(
    postgres: PostgresServer, engine: PostgresEngine, site: str
) -> None:
    engine.write([(LEFT, b"fence", b"1")])
    with psycopg.connect(postgres.url, application_name=APPLICATION) as suspended:
        suspended.execute(f'SELECT FROM "floodmark_{site}"."{LEFT}" FOR SHARE'.encode())
        with pytest.raises(StorageFailed):
            engine.write([(LEFT, b"fence", b"2")])
        assert engine.write([(LEFT, b"fence", b"2")], [FENCE]) is True
        with pytest.raises(psycopg.OperationalError):
            suspended.execute("SELECT 1")


@pytest.mark.parametrize("is_changed", [True, False])
@pytest.mark.parametrize("rows", [PUTS, ROWS], ids=["puts", "removals"])
def test_a_write_that_waits_for_a_guard_sees_what_became_of_it(
    postgres: PostgresServer, engine: PostgresEngine, site: str, rows: list[WriteRow], is_changed: bool
) -> None:
    engine.write(BEFORE)
    done: list[bool] = []
    writer = Thread(target=lambda: done.append(engine.write(rows, [FENCE])))
    with psycopg.connect(postgres.url) as other:
        changing = f"UPDATE \"floodmark_{site}\".\"{LEFT}\" SET value = '2' WHERE key = 'fence'"
        other.execute(changing.encode())
        writer.start()
        waiting = "SELECT pid FROM pg_stat_activity WHERE wait_event_type = 'Lock'"
        while writer.is_alive() and not postgres.execute(waiting):
            writer.join(0.01)
        (other.commit if is_changed else other.rollback)()
    writer.join(HANG_SECONDS)
    assert done == [not is_changed]
    assert (b"a" in keys_of(engine)) is not is_changed


def test_a_session_that_writes_for_long_is_told_alive(
    postgres: PostgresServer, engine: PostgresEngine, site: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("floodmark.engine.postgres._SEEN_EVERY", 2)
    sessions = f'"floodmark_{site}".sessions'
    postgres.execute(f"UPDATE {sessions} SET seen = seen - interval '1 day'")
    old = f"SELECT id FROM {sessions} WHERE seen < now() - interval '1 hour'"
    engine.write_durably(PUTS)
    assert len(postgres.execute(old)) == 1
    engine.write_durably(PUTS)
    assert postgres.execute(old) == []


# Lost servers


@pytest.mark.slow
def test_what_was_synced_survives_the_end_of_the_server() -> None:
    with postgres_server() as server:
        engine = open_at(server.url, "oslo")
        for number, end in enumerate((server.stop, server.kill)):
            engine.write([(LEFT, b"%d" % number, b"1")])
            engine.write_durably([(RIGHT, b"%d" % number, b"1")])
            end()
            # The first write is sent, and gets no answer.  The second is not: the connection is lost.
            with pytest.raises(OutcomeUnknown):
                engine.write([(LEFT, b"lost", b"1")])
            with pytest.raises(StorageFailed, match="recover"):
                engine.write([(LEFT, b"lost", b"1")])
            server.start()
            engine.recover()
            assert keys_of(engine) == [b"%d" % each for each in range(number + 1)]
            assert len(rows_of(engine, RIGHT)) == number + 1
        engine.close()


def test_the_primary_is_found_among_several_hosts(
    postgres: PostgresServer, proxy: CuttingProxy, site: str
) -> None:
    closed = CuttingProxy(postgres.port)
    closed.close()
    hosts = f"127.0.0.1:{closed.port},127.0.0.1:{proxy.port},127.0.0.1:{postgres.port}"
    engine = open_at(f"postgresql://bench@{hosts}/postgres", site)
    engine.write([(LEFT, b"a", b"1")])
    engine.sync()
    proxy.close()
    assert engine.get(LEFT, b"a") == b"1"
    with pytest.raises(OutcomeUnknown):
        engine.write([(LEFT, b"b", b"1")])
    engine.recover()
    assert engine.write([(LEFT, b"b", b"1")]) is True
    engine.close()


# Opening


def test_a_role_with_the_least_privileges_opens_and_writes(postgres: PostgresServer, site: str) -> None:
    role, schema = f"least{next(_names)}", f'"floodmark_{site}"'
    postgres.execute(f"CREATE ROLE {role} LOGIN")
    with pytest.raises(NotAllowed, match="grant"):
        open_at(postgres.url_at(postgres.port, role), site)
    open_at(postgres.url, site).close()
    postgres.execute(f"GRANT USAGE ON SCHEMA {schema} TO {role}")
    postgres.execute(f"GRANT SELECT, INSERT, UPDATE, DELETE ON ALL TABLES IN SCHEMA {schema} TO {role}")
    engine = open_at(postgres.url_at(postgres.port, role), site)
    engine.write(BEFORE)
    assert engine.write(ROWS, [FENCE]) is True
    engine.recover()
    engine.sync()
    assert all(size > 0 for size in engine.sizes().values())
    engine.close()


def test_two_engines_of_a_site_share_its_rows_and_guards(
    postgres: PostgresServer, engine: PostgresEngine, site: str
) -> None:
    other = open_at(postgres.url, site)
    engine.write(BEFORE)
    assert other.write([(LEFT, b"fence", b"2")]) is True
    assert engine.write(ROWS, [FENCE]) is False
    other.close()


def test_a_later_layout_is_refused(postgres: PostgresServer, site: str) -> None:
    open_at(postgres.url, site).close()
    postgres.execute(f'UPDATE "floodmark_{site}".layout SET version = {LAYOUT_VERSION + 1}')
    with pytest.raises(FormatTooNew, match=f"{LAYOUT_VERSION + 1}"):
        open_at(postgres.url, site)


@pytest.mark.parametrize(
    "url", ["postgresql://nobody@127.0.0.1:1/none?connect_timeout=1", "postgresql://[", "port=x"]
)
def test_a_database_that_cannot_be_opened_is_named_without_a_password(url: str, site: str) -> None:
    with pytest.raises(CannotOpen) as raised:
        open_at(url, site)
    assert "secret" not in str(raised.value)


def test_a_site_whose_name_fits_no_schema_is_refused() -> None:
    with pytest.raises(InvalidName, match="too long"):
        open_at("postgresql://127.0.0.1:1/none", "x" * 60)


def test_a_forked_process_uses_no_connection_of_its_parent(engine: PostgresEngine) -> None:
    forked = copy(engine)
    forked.abandon(Closed("forked"))
    with pytest.raises(Closed):
        forked.write([])
    with pytest.raises(Closed):
        forked.get(LEFT, b"a")
    assert engine.get(LEFT, b"a") is None
