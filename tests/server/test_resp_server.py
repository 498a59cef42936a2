"""The door over RESP: who may come in, what they may send, and what becomes of them."""

import asyncio
import json
import resource
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from threading import current_thread
from typing import Any

import pytest
import redis
import redis.asyncio
from redis.backoff import NoBackoff
from redis.retry import Retry
from tests.server.certificates import Certificates
from tests.server.support import in_threads, token_of, write_roles
from tests.server.support_resp import raw, resp_client, serving_resp
from tests.waiting import HANG_SECONDS, wait_until

import floodmark
from floodmark.engine import MemoryEngine, Row
from floodmark.model.access import Role
from floodmark.model.errors import CannotOpen, InvalidConfiguration
from floodmark.model.limits import KEY_BYTES_MAX, NEWCOMERS_MAX
from floodmark.partition.families import FAMILIES
from floodmark.server import Server, ServerOptions, serve
from floodmark.server.resp.page import MARK, render_page
from floodmark.site import Site, open_engine
from floodmark.wire.resp import encode_request

PAGE = Path(__file__).resolve().parents[2] / "docs" / "resp.md"
INSTALL = "apt-get install --no-install-recommends redis-tools"


@pytest.fixture(scope="module")
def served() -> Iterator[tuple[Site, Server]]:
    with serving_resp() as pair:
        yield pair


def read_all(connection: socket.socket) -> bytes:
    """What comes until the server closes the connection."""
    parts: list[bytes] = []
    try:
        while part := connection.recv(65_536):
            parts.append(part)
    except ConnectionResetError:
        pass
    return b"".join(parts)


def test_page_lists_the_commands_that_the_server_dispatches_by() -> None:
    page = PAGE.read_text("utf-8")
    assert page.count(MARK) == 1
    assert render_page(page) == page, "run: python -m floodmark.server.resp.page docs/resp.md"


# Clients that others wrote


# A session of each command group, and what redis-cli prints of it.
SESSION = """\
SET cli 1|OK
INCR cli|2
GET cli|2
SET cli x NX|
EXPIRE cli 100|1
PERSIST cli|1
MSET a 1 b 2|OK
MGET a none b|1||2
APPEND a 0|2
DEL b none|1
INCR|ERR wrong number of arguments for 'incr' command|
TYPE a|string
MULTI|OK
SET cli 5|QUEUED
INCR cli|QUEUED
EXEC|OK|6
WATCH cli|OK
MULTI|OK
DISCARD|OK
SCAN 0 MATCH cl*|0|cli
FM.CAS cli 6 7|1
SELECT records|OK
HSET a f v g 1|2
HINCRBY a g 4|5
HGETALL a|f|v|g|5
HDEL a f|1
SELECT counts|OK
INCRBY n 5|5
XGROUP CREATE changes:counts {group} 0|OK
XACK changes:counts {group} 1-0|0
CLIENT SETNAME cli|OK
CLIENT GETNAME|cli
ECHO text|text
KEYS *|ERR KEYS is refused: it would read all keys at once; use SCAN|"""


@pytest.mark.parametrize("protocol", [2, 3])
def test_redis_cli(served: tuple[Site, Server], protocol: int) -> None:
    program = shutil.which("redis-cli")
    if program is None:
        pytest.skip(f"redis-cli is not installed, so this is NOT TESTED; install it: {INSTALL}")
    site, server = served
    assert server.resp_address is not None
    for name in ("users", "records", "counts"):
        site.namespace(name).delete_range()
    lines = [line.split("|") for line in SESSION.format(group=f"cli{protocol}").splitlines()]
    done = subprocess.run(
        [program, f"-{protocol}", "-p", str(server.resp_address.port)],
        input="\n".join(line[0] for line in lines),
        capture_output=True, text=True, timeout=HANG_SECONDS, check=True,
    )  # fmt: skip
    # Absent values are empty lines, and pairs of RESP3 stand in one.
    assert done.stdout.split() == [word for line in lines for shown in line[1:] for word in shown.split()]
    assert site.namespace("users").get(b"cli") == b"7"


@pytest.mark.parametrize("protocol", [2, 3])
def test_asynchronous_client(served: tuple[Site, Server], protocol: int) -> None:
    stream, group = "changes:users", f"async{protocol}"

    async def session() -> None:
        assert served[1].resp_address is not None
        host, port = served[1].resp_address
        connecting: Any = redis.asyncio.Redis(host=host, port=port, protocol=protocol)
        async with connecting as client:
            await client.delete("async", "other")
            await asyncio.gather(*(client.incr("async") for _ in range(50)))
            async with client.pipeline(transaction=True) as pipe:
                assert await pipe.get("async").incr("async").execute() == [b"50", 51]
                await pipe.watch("async")
                await client.incr("async")
                pipe.multi()
                with pytest.raises(redis.WatchError):
                    await pipe.set("async", "never").execute()
            assert await client.set("async", "1", ex=100, xx=True, get=True) == b"52"
            assert 0 < await client.ttl("async") <= 100
            assert [key async for key in client.scan_iter(match="asyn?")] == [b"async"]
            assert await client.xgroup_create(stream, group, id="$")
            waiting = asyncio.create_task(client.xreadgroup(group, "ada", {stream: ">"}, block=0))
            await client.set("other", "1")
            assert b"other" in str(await waiting).encode()
            assert (await client.xpending(stream, group))["pending"] == 1
            async with client.pipeline(transaction=False) as pipe:
                pipe.execute_command("SELECT", "records").delete("ada").hset("ada", "name", "Ada")
                assert (await pipe.hgetall("ada").execute())[2:] == [1, {b"name": b"Ada"}]

    asyncio.run(session())


# Access


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Site, Server]]:
    access = write_roles(tmp_path_factory.mktemp("access") / "access.toml", "users")
    with serving_resp(access=access) as pair:
        yield pair


def test_stranger_may_do_nothing(guarded: tuple[Site, Server]) -> None:
    requests: list[tuple[bytes, list[bytes]]] = [
        *((b"-NOAUTH", [*request.split()]) for request in (b"GET a", b"SET a 1", b"PING", b"MULTI", b"FOO")),
        (b"-NOAUTH", [b"HELLO", b"3"]),
        (b"-WRONGPASS", [b"AUTH", b"wrong"]),
        (b"-WRONGPASS", [b"AUTH", b"admin", token_of(Role.READ).encode()]),
        (b"-NOAUTH", [b"SELECT", b"users"]),
        (b"-NOAUTH", [b"GET", b"a"]),
        (b"+OK", [b"AUTH", b"read", token_of(Role.READ).encode()]),
        (b"+OK", [b"QUIT"]),
    ]
    with raw(guarded[1]) as connection:
        connection.sendall(b"".join(encode_request(request) for _, request in requests))
        answers = read_all(connection).split(b"\r\n")
    assert [answer.split(b" ")[0] for answer in answers if answer] == [code for code, _ in requests]


def test_refused_tokens_are_logged_without_the_token(
    guarded: tuple[Site, Server], caplog: pytest.LogCaptureFixture
) -> None:
    _, server = guarded
    # The log tells of one in a second.
    server.service.refused._logged_at_ms = None
    with raw(server) as connection:
        connection.sendall(encode_request([b"AUTH", b"s3cret"]))
        assert connection.recv(100).startswith(b"-WRONGPASS")
        client = "{}:{}".format(*connection.getsockname())
    (line,) = (record.getMessage() for record in caplog.records if "refused" in record.getMessage())
    assert line.startswith(f"refused a caller from {client} at resp.auth: the token is not in")
    assert "s3cret" not in line


def test_killed_clients_are_audited_with_the_outcome(
    guarded: tuple[Site, Server], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "floodmark.audit")
    _, server = guarded
    with raw(server) as victim, resp_client(server, password=token_of(Role.ADMIN)) as admin:
        assert admin.execute_command("CLIENT", "KILL", "{}:{}".format(*victim.getsockname())) == b"OK"
        with pytest.raises(redis.ResponseError, match="No such client"):
            admin.execute_command("CLIENT", "KILL", "127.0.0.1:1")
    said = [record.getMessage() for record in caplog.records if record.name == "floodmark.audit"]
    assert said == ["admin: resp.client_kill: done", "admin: resp.client_kill: refused"]


def test_roles_hold_as_over_flight(guarded: tuple[Site, Server]) -> None:
    site, server = guarded
    site.namespace("users").put(b"a", b"1")
    with resp_client(server, username="read", password=token_of(Role.READ)) as reader:
        assert reader.get("a") == b"1"
        with pytest.raises(redis.ResponseError, match="role write"):
            reader.set("a", "2")
        with reader.pipeline(transaction=True) as pipe:
            got, error = pipe.get("a").set("a", "2").execute(raise_on_error=False)
        assert got == b"1"
        assert "role write" in str(error)
    with resp_client(server, password=token_of(Role.WRITE, "users")) as writer:
        assert writer.set("a", "2") is True
        for namespace in ("records", "nowhere"):
            with pytest.raises(redis.ResponseError, match="needs role"):
                writer.execute_command("SELECT", namespace)
    assert site.namespace("users").get(b"a") == b"2"


def test_prefix_names_the_namespace(tmp_path: Path) -> None:
    access = write_roles(tmp_path / "access.toml", "users")
    with serving_resp(access=access, resp_prefix=True, resp_namespace=None) as (site, server):
        with resp_client(server, password=token_of(Role.WRITE, "users")) as client:
            assert client.set("users:ada:1", "x") is True
            assert client.get("users:ada:1") == b"x"
            for key in ("counts:a", "records:a"):
                with pytest.raises(redis.ResponseError, match="needs role"):
                    client.get(key)
            with pytest.raises(redis.ResponseError, match="name of its namespace"):
                client.get("ada")
        with resp_client(server, password=token_of(Role.ADMIN)) as client, client.pipeline() as pipe:
            pipe.incr("counts:a").set("users:b", "1").hset("records:c", "f", "v")
            assert pipe.execute() == [1, True, 1]
        assert site.namespace("users").get(b"ada:1") == b"x"
        assert site.namespace("records").get(b"c") == b'{"f":"v"}'


def test_scan_and_size_with_prefixes_cover_the_namespaces_of_the_caller(tmp_path: Path) -> None:
    access = write_roles(tmp_path / "access.toml", "users")
    with serving_resp(access=access, resp_prefix=True, resp_namespace=None) as (site, server):
        for name in ("a", "b", "c"):
            site.namespace("users").put(name.encode(), b"1")
        site.namespace("counts").add(b"a", 1)
        with resp_client(server, password=token_of(Role.READ, "users")) as client:
            assert [*client.scan_iter(count=2)] == [b"users:a", b"users:b", b"users:c"]
            assert [*client.scan_iter(match="users:b*")] == [b"users:b"]
            assert [*client.scan_iter(match="counts:*")] == []
            assert client.dbsize() == 3
            assert client.execute_command("FM.GET", "users:a", "AT", site.resolved_version()) == b"1"
            assert len(client.xrange("changes:users")) == 3
            with pytest.raises(redis.ResponseError, match="needs role"):
                client.xrange("changes:counts")
        with resp_client(server, password=token_of(Role.ADMIN)) as client:
            assert [*client.scan_iter()] == [b"counts:a", b"users:a", b"users:b", b"users:c"]
            assert [*client.scan_iter(match="*:a")] == [b"counts:a", b"users:a"]
            assert client.dbsize() == 4


class RemoteEngine(MemoryEngine):
    """An engine whose reads go over a network; tells which threads read."""

    limits = replace(MemoryEngine.limits, reads_wait=True)

    def __init__(self) -> None:
        super().__init__(FAMILIES)
        self.readers: set[str] = set()

    def ceiling(self, family: str, key: bytes, prefix: bytes = b"") -> Row | None:
        self.readers.add(current_thread().name)
        return super().ceiling(family, key, prefix)


def test_event_loop_reads_nothing_from_an_engine_behind_a_network() -> None:
    engine = RemoteEngine()
    with (
        serving_resp(open_engine(engine, site="oslo", site_id=7)) as (_, server),
        resp_client(server) as client,
    ):
        client.set("a", "1")
        with client.pipeline(transaction=False) as pipe:
            pipe.get("a").mget("a", "b").exists("a").strlen("a").incr("a").get("a")
            assert pipe.execute() == [b"1", [b"1", None], 1, 1, 2, b"2"]
        with client.pipeline() as transaction:
            transaction.watch("a")
            transaction.multi()
            assert transaction.get("a").execute() == [b"2"]
        assert "floodmark-resp" not in engine.readers
        assert any(name.startswith("floodmark-resp-worker") for name in engine.readers)


def test_no_default_namespace_is_an_honest_error() -> None:
    with serving_resp(resp_namespace=None) as (_, server), resp_client(server) as client:
        with pytest.raises(redis.ResponseError, match="SELECT one by its name"):
            client.get("a")
        with pytest.raises(redis.ResponseError, match="SELECT one by its name"):
            client.execute_command("SELECT", "0")


def test_default_namespace_that_is_missing_is_an_honest_error() -> None:
    with serving_resp(resp_namespace="later") as (site, server):
        with resp_client(server) as client:
            assert client.ping() is True
            with pytest.raises(redis.ResponseError, match="no namespace is selected"):
                client.get("a")
            site.create_namespace("later")
            assert client.execute_command("SELECT", "0") is True
            assert client.set("a", "1") is True
            site.drop_namespace("later")
            with pytest.raises(redis.ResponseError, match="later"):
                client.set("a", "2")
        with resp_client(server) as client:
            assert client.ping() is True


def test_door_is_refused_beyond_this_machine_without_protection() -> None:
    with pytest.raises(InvalidConfiguration, match="other machines"), serving_resp(resp_listen="0.0.0.0:0"):
        pass


def test_port_that_is_taken_is_refused_and_the_site_stays_open(served: tuple[Site, Server]) -> None:
    assert served[1].resp_address is not None
    from_other = f"127.0.0.1:{served[1].resp_address.port}"
    with pytest.raises(CannotOpen, match="cannot listen"):
        serve(served[0], "127.0.0.1:0", ServerOptions(resp_listen=from_other))
    assert served[0].namespace("users").get(b"none") is None


def test_tls_with_a_token(certificates: Certificates, tmp_path: Path) -> None:
    access = write_roles(tmp_path / "access.toml", "users")
    options: dict[str, Any] = {
        "tls_certificate": certificates.server.certificate_path,
        "tls_key": certificates.server.key_path,
    }
    with serving_resp(access=access, **options) as (_, server):
        assert server.resp_address is not None
        common: dict[str, Any] = {
            "host": "localhost", "port": server.resp_address.port, "ssl": True,
            # By itself, the client pauses for seconds before it gives up.
            "retry": Retry(NoBackoff(), 0),
        }  # fmt: skip
        with (
            redis.Redis(
                **common, ssl_ca_certs=str(certificates.root_path), password=token_of(Role.WRITE, "users")
            ) as client,
            client.pipeline(transaction=False) as pipe,
        ):
            for number in range(100):
                pipe.set("tls", b"x" * 10_000 * (number % 10)).get("tls")
            assert [len(value) for value in pipe.execute()[1::2]] == [10_000 * (n % 10) for n in range(100)]
        with (
            redis.Redis(**common, ssl_ca_certs=str(certificates.root_path)) as stranger,
            pytest.raises(redis.AuthenticationError),
        ):
            stranger.get("tls")
        with redis.Redis(**common) as doubting, pytest.raises(redis.ConnectionError, match="CERTIFICATE"):
            doubting.ping()


def test_tls_and_client_certificates(certificates: Certificates, tmp_path: Path) -> None:
    access = tmp_path / "access.toml"
    access.write_text('[[access]]\nname = "robot"\nrole = "write"\ncertificate = "robot"\n', "utf-8")
    options: dict[str, Any] = {
        "tls_certificate": certificates.server.certificate_path,
        "tls_key": certificates.server.key_path,
        "tls_client_root": certificates.root_path,
        "access": access,
    }
    robot = certificates.client("robot")
    with serving_resp(**options) as (_, server):
        assert server.resp_address is not None
        with redis.Redis(
            host="localhost", port=server.resp_address.port, ssl=True,
            ssl_ca_certs=str(certificates.root_path),
            ssl_certfile=str(robot.certificate_path), ssl_keyfile=str(robot.key_path),
        ) as client:  # fmt: skip
            assert client.set("tls", "1") is True
            assert client.client_info()["user"] == "robot"
        with raw(server) as plain:
            plain.sendall(encode_request([b"PING"]))
            assert b"PONG" not in read_all(plain)


# What clients send


@pytest.mark.parametrize(
    "frame", [b"*1000000000\r\n", b"*1\r\n$1073741824\r\n", b"GET a\r\n", b"\x16\x03\x01" + b"x" * 60]
)
def test_frame_that_is_none_ends_the_connection_and_no_other(
    served: tuple[Site, Server], frame: bytes
) -> None:
    with resp_client(served[1]) as other, raw(served[1]) as connection:
        other.set("other", "1")
        connection.sendall(encode_request([b"SET", b"first", b"1"]) + frame)
        answer = read_all(connection)
        assert answer.startswith(b"+OK\r\n-ERR Protocol error")
        assert other.get("other") == b"1"


def test_stranger_may_send_little(guarded: tuple[Site, Server]) -> None:
    with raw(guarded[1]) as connection:
        connection.sendall(b"*2\r\n$4\r\nAUTH\r\n$1000000\r\n")
        assert b"Protocol error" in read_all(connection)


def test_many_strangers_are_refused_and_callers_are_not(guarded: tuple[Site, Server]) -> None:
    strangers = [raw(guarded[1]) for _ in range(NEWCOMERS_MAX)]
    try:
        with resp_client(guarded[1], protocol=2) as probe:
            wait_until(lambda: _is_refused(probe), "strangers are refused")
        strangers.pop().close()
        wait_until(lambda: _can_read(guarded[1]), "a caller is let in")
    finally:
        for connection in strangers:
            connection.close()


def _is_refused(client: Any) -> bool:
    try:
        client.ping()
    except redis.RedisError as error:
        return "max number of clients" in str(error) or isinstance(error, redis.ConnectionError)
    return False


def _can_read(server: Server) -> bool:
    try:
        with resp_client(server, password=token_of(Role.READ)) as client:
            return client.get("none") is None
    except redis.RedisError:
        return False


def test_vanishing_client_leaves_whole_requests(served: tuple[Site, Server]) -> None:
    """A pipeline that is cut in the middle: what was whole may happen, what was not does not."""
    site = served[0]
    with raw(served[1]) as connection:
        whole = b"".join(encode_request([b"SET", b"vanish%d" % number, b"1"]) for number in range(50))
        connection.sendall(whole + b"*3\r\n$3\r\nSET\r\n$4\r\nhalf\r\n$10\r\nabc")
    with resp_client(served[1]) as client:
        wait_until(lambda: client.get("vanish49") == b"1", "the last whole request has happened")
    assert site.namespace("users").get(b"half") is None


def test_client_that_shuts_down_its_side_is_answered_and_closed(served: tuple[Site, Server]) -> None:
    requests = [
        [b"SET", b"ended", b"1"],
        [b"INCR", b"ended"],
        [b"GET", b"ended"],
        [b"EXISTS", *[b"ended"] * 300],
        [b"INCR", b"ended"],
        # Nothing can come for a client that is about to go.
        [b"XREAD", b"BLOCK", b"0", b"STREAMS", b"changes:users", b"$"],
    ]
    with raw(served[1]) as connection:
        connection.sendall(b"".join(map(encode_request, requests)) + b"*2\r\n$3\r\nGET\r\n$5\r\nen")
        connection.shutdown(socket.SHUT_WR)
        assert read_all(connection) == b"+OK\r\n:2\r\n$1\r\n2\r\n:300\r\n:3\r\n$-1\r\n"


def test_client_that_shuts_down_its_side_behind_a_wrong_frame_is_told_so(served: tuple[Site, Server]) -> None:
    with raw(served[1]) as connection:
        connection.sendall(encode_request([b"SET", b"ended", b"1"]) + b"what\r\n")
        connection.shutdown(socket.SHUT_WR)
        assert read_all(connection).startswith(b"+OK\r\n-ERR Protocol error")


def test_client_that_does_not_read_is_cut_off() -> None:
    with serving_resp(stall_seconds=0.3) as (site, server), raw(server) as connection:
        site.namespace("users").put(b"big", b"x" * 1_000_000)
        request = encode_request([b"GET", b"big"]) * 200

        def send() -> bool:
            try:
                connection.settimeout(0.05)
                connection.sendall(request)
            except TimeoutError:
                return False
            except OSError:
                return True
            return False

        wait_until(send, "the server has cut the connection")
        with resp_client(server) as client:
            wait_until(lambda: len(client.client_list()) == 1, "the server has forgotten the client")


def test_thousand_connections_are_served(served: tuple[Site, Server]) -> None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    # Each connection is two files of this process.
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(before[0], min(before[1], 4_096)), before[1]))
    connections: list[socket.socket] = []
    try:
        connections += [raw(served[1]) for _ in range(1_000)]
        for number, connection in enumerate(connections):
            connection.sendall(encode_request([b"SET", b"many%d" % number, b"1"]))
        assert {connection.recv(100) for connection in connections} == {b"+OK\r\n"}
    finally:
        for connection in connections:
            connection.close()
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


# Order


def test_pipeline_is_answered_in_order(served: tuple[Site, Server]) -> None:
    def run(number: int) -> None:
        key = f"order{number}"
        with resp_client(served[1]) as client, client.pipeline(transaction=False) as pipe:
            for step in range(100):
                pipe.set(key, step).get(key).incr(key).mget(key, "none").append(key, "x").strlen(key)
            got = pipe.execute()
        for step in range(100):
            text = b"%d" % (step + 1)
            assert got[6 * step : 6 * step + 6] == [
                True, b"%d" % step, step + 1, [text, None], len(text) + 1, len(text) + 1,
            ]  # fmt: skip

    in_threads(run, 4)


def test_gets_of_a_pipeline_see_the_state_at_their_place(served: tuple[Site, Server]) -> None:
    """GETs are looked up together, but not before what precedes them and not after what follows."""
    steps: list[tuple[list[bytes], bytes]] = []
    for step in range(50):
        before = b"$1\r\n%d\r\n" % ((step - 1) % 10) if step else b"$-1\r\n"
        steps += [
            ([b"GET", b"place"], before),
            ([b"STRLEN", b"place"], b":%d\r\n" % bool(step)),
            ([b"GET", b"place"], before),
            ([b"SET", b"place", b"%d" % (step % 10)], b"+OK\r\n"),
            ([b"GET", b"place"], b"$1\r\n%d\r\n" % (step % 10)),
            ([b"PING"], b"+PONG\r\n"),
        ]
    steps.append(([b"QUIT"], b"+OK\r\n"))
    with raw(served[1]) as connection:
        connection.sendall(b"".join(encode_request(request) for request, _ in steps))
        assert read_all(connection) == b"".join(answer for _, answer in steps)


def test_get_of_a_dropped_namespace_is_an_error_and_no_more(served: tuple[Site, Server]) -> None:
    site = served[0]
    site.create_namespace("dropped")
    with resp_client(served[1]) as client:
        client.execute_command("SELECT", "dropped")
        assert client.get("a") is None
        site.drop_namespace("dropped")
        for _ in range(2):
            with pytest.raises(redis.ResponseError, match="was dropped"):
                client.get("a")
        assert client.ping()


def test_value_that_looks_like_a_get_is_none(served: tuple[Site, Server]) -> None:
    frame = encode_request([b"GET", b"looks"])
    with raw(served[1]) as connection:
        connection.sendall(encode_request([b"PING"]) + b"*3\r\n$3\r\nSET\r\n$5\r\nlooks\r\n$22\r\n")
        assert connection.recv(7) == b"+PONG\r\n"
        assert len(frame) == 22 + 2
        connection.sendall(frame)
        assert connection.recv(5) == b"+OK\r\n"
        connection.sendall(frame)
        assert connection.recv(100) == b"$22\r\n" + frame


def test_sets_of_one_round_are_each_kept_and_refused_alone(served: tuple[Site, Server]) -> None:
    site = served[0]
    since = site.resolved_version()
    sets = [(b"round1", b"1"), (b"x" * (KEY_BYTES_MAX + 1), b"2"), (b"round2", b"3"), (b"round1", b"4")]
    with raw(served[1]) as connection:
        # They arrive together, and so go into few rounds.
        requests = [encode_request([b"SET", *pair]) for pair in sets]
        connection.sendall(b"".join([*requests, encode_request([b"QUIT"])]))
        replies = read_all(connection).split(b"\r\n")
    assert [reply[:4] for reply in replies] == [b"+OK", b"-ERR", b"+OK", b"+OK", b"+OK", b""]
    changes = [(change.key, change.value) for change in site.changes("users", since=since)]
    assert [change for change in changes if change[0] == b"round1"] == [sets[0], sets[3]]
    assert sets[2] in changes


def test_sets_that_share_a_version_are_told_apart(served: tuple[Site, Server]) -> None:
    """The plain SETs of one round are one commit; a key that comes again is in another."""
    requests = [
        *([b"SET", key, value] for key, value in [(b"one", b"1"), (b"two", b"2"), (b"one", b"3")]),
        [b"FM.VERSION"],
    ]
    with raw(served[1]) as connection, resp_client(served[1]) as client:
        start = client.execute_command("FM.RESOLVED")
        connection.sendall(b"".join(map(encode_request, requests)))
        connection.shutdown(socket.SHUT_WR)
        *replies, version, _ = read_all(connection).split(b"\r\n")
        assert replies == [b"+OK"] * 3
        first, last = client.execute_command("FM.HISTORY", "one")[-2:]
        [other] = client.execute_command("FM.HISTORY", "two")[-1:]
        assert [first[2], last[2], other[2]] == [b"1", b"3", b"2"]
        assert first[0] == other[0] < last[0] == int(version[1:])
        assert client.execute_command("FM.GET", "one", "AT", str(first[0])) == b"1"
        entries = client.xrange("changes:users", min=f"{start + 1}-0")
        assert [entry[0] for entry in entries] == [
            b"%d-0" % first[0], b"%d-1" % first[0], b"%d-0" % last[0],
        ]  # fmt: skip
        assert [entry[1][b"key"] for entry in entries] == [b"one", b"two", b"one"]


def test_sets_of_many_clients_to_one_key_have_an_order(served: tuple[Site, Server]) -> None:
    """Each value is replaced once, so at most one SET with GET is told of it, and one SET with NX wins."""

    def write(number: int) -> list[Any]:
        with resp_client(served[1]) as client:
            assert client.set("chain", f"plain{number}") is True
            told = [client.set("chain", f"{number}-{step}", get=True) for step in range(20)]
            with client.pipeline(transaction=False) as pipe:
                pipe.set("chain", f"{number}-last").set("chain", "never", nx=True)
                assert pipe.execute() == [True, None]
            return [*told, client.set("only", number, nx=True)]

    served[0].namespace("users").delete_range()
    replies = in_threads(write, 8)
    told = [reply for own in replies for reply in own[:-1]]
    assert None not in told
    assert len({*told}) == len(told)
    assert sorted([own[-1] for own in replies], key=str) == [None] * 7 + [True]
    assert (served[0].namespace("users").get(b"chain") or b"").endswith(b"-last")


def test_writes_wait_for_a_transaction_that_holds_their_key(served: tuple[Site, Server]) -> None:
    """A pipeline behind a prepared write goes on in order when that has ended, and others do not wait."""
    site, server = served
    users = site.namespace("users")
    users.put(b"held", b"0")
    qualified = users.encoding.qualify(b"held")
    partition = site.host.router.maps.map.route(qualified)
    transaction = site.transaction(coordinator=0)
    transaction.put(users, b"other", b"1")
    partition.prepare(transaction.id, [qualified], [b"7\x00"])
    with raw(server) as connection, resp_client(server) as other:
        requests = [[b"INCR", b"held"], [b"SET", b"held", b"20"], [b"INCR", b"held"], [b"GET", b"held"]]
        connection.sendall(b"".join(map(encode_request, requests)))
        assert other.incr("free") == 1
        transaction.abort()
        got = b""
        while got.count(b"\r\n") < 5:
            got += connection.recv(1_000)
        assert got == b":1\r\n+OK\r\n:21\r\n$2\r\n21\r\n"


def test_stopping_server_answers_what_it_has_begun() -> None:
    answered: list[int] = []
    with serving_resp() as (_, server):

        def write(number: int) -> None:
            with resp_client(server) as client:
                for step in range(100_000):
                    try:
                        client.set(f"stop{number}-{step}", "1")
                    except redis.RedisError:
                        return
                    answered.append(step)

        def stop(_: int) -> None:
            wait_until(lambda: len(answered) > 100, "some writes are answered")
            server.close()

        works: list[Callable[[int], None]] = [stop, write, write, write]
        in_threads(lambda number: works[number](number), len(works))
    assert len(answered) > 100


def test_metrics_count_commands(served: tuple[Site, Server]) -> None:
    with resp_client(served[1]) as client:
        client.get("a")
    families = {family.name: family for family in served[1].service.metrics.families("oslo")}
    counts = {sample.labels["action"]: sample.value for sample in families["floodmark_requests"].samples}
    assert counts["resp.get"] >= 1
    assert "resp.set" in counts


@pytest.mark.slow
def test_kill_under_fifty_writers_loses_nothing_that_was_acknowledged(tmp_path: Path) -> None:
    directory = tmp_path / "site"
    with floodmark.open(directory, site="oslo") as site:
        site.create_namespace("users")
    program = [
        sys.executable,
        "-m",
        "floodmark.cli",
        "serve",
        str(directory),
        "--listen",
        "127.0.0.1:0",
        "--json",
    ]
    popen = subprocess.Popen(
        [*program, "--resp", "127.0.0.1:0", "--resp-namespace", "users", "--log-level", "error"],
        stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert popen.stdout is not None
    host, _, port = json.loads(popen.stdout.readline())["resp"].rpartition(":")
    acknowledged: list[bytes] = []

    def write(number: int) -> None:
        with redis.Redis(host=host, port=int(port), retry=Retry(NoBackoff(), 0)) as client:
            for step in range(1_000_000):
                key = b"%d-%d" % (number, step)
                try:
                    client.set(key, key)
                except redis.RedisError:
                    return
                acknowledged.append(key)

    def kill(number: int) -> None:
        if number:
            write(number)
            return
        try:
            wait_until(lambda: len(acknowledged) > 1_000, "writes are acknowledged")
        finally:
            popen.kill()
            popen.communicate()

    in_threads(kill, 51)
    with floodmark.open(directory) as site:
        users = site.namespace("users")
        assert users.get_many(acknowledged) == acknowledged
