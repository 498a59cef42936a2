"""Commands over RESP do what they do in Redis, as clients see it that others wrote.

The facts are those that redis-py's own tests check of the same commands.
"""

import re
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import redis
from tests.server.support import in_threads
from tests.server.support_resp import DIALECTS, resp_client, serving_resp
from tests.site.support import HookedEngine, nothing, open_memory
from tests.waiting import wait_until

import floodmark
from floodmark.model.errors import LeaseHeld
from floodmark.server import Server
from floodmark.server.resp.scans import translate_pattern
from floodmark.site import Site
from floodmark.testing.clock import SimulatedTime


@pytest.fixture(scope="module")
def served() -> Iterator[tuple[Site, Server]]:
    with serving_resp() as pair:
        yield pair


@pytest.fixture
def site(served: tuple[Site, Server]) -> Site:
    return served[0]


@pytest.fixture
def client(served: tuple[Site, Server]) -> Iterator[Any]:
    """A client in an empty namespace."""
    for name in ("users", "records", "counts"):
        served[0].namespace(name).delete_range()
    with resp_client(served[1]) as client:
        yield client


def refused(error: str, call: Any) -> None:
    with pytest.raises(redis.ResponseError, match=error):
        call()


@pytest.mark.parametrize("dialect", DIALECTS)
def test_session_in_every_dialect(served: tuple[Site, Server], dialect: str) -> None:
    served[0].namespace("users").delete_range()
    with resp_client(served[1], dialect=dialect) as client:
        assert client.ping() is True
        assert client.set("ada", b"\x00\r\n\xff") is True
        assert client.get("ada") == b"\x00\r\n\xff"
        assert client.get("bob") is None
        assert client.mset({"a": "1", "b": "2"}) is True
        assert client.mget("a", "none", "b") == [b"1", None, b"2"]
        assert client.exists("a", "b", "a", "none") == 3
        assert client.incr("a", 41) == 42
        assert client.delete("a", "b", "none") == 2
        with client.pipeline(transaction=True) as pipe:
            assert pipe.set("x", "1").incr("x").get("x").execute() == [True, 2, b"2"]
        with client.pipeline(transaction=False) as pipe:
            pipe.set("y", "1").get("y").incr("y").get("y").delete("y").get("y")
            assert pipe.execute() == [True, b"1", 2, b"2", 1, None]
        refused("unknown command 'FOO'", lambda: client.execute_command("FOO", "bar"))
    assert served[0].namespace("users").get(b"x") == b"2"


def test_convenience_of_redis_py(client: Any) -> None:
    """What its users write instead of commands: items, periods, moments, functions over transactions."""
    client["ada"] = "1"
    assert client["ada"] == b"1"
    assert "ada" in client
    del client["ada"]
    assert "ada" not in client
    with pytest.raises(KeyError):
        client["ada"]
    moment = datetime.now(tz=UTC) + timedelta(minutes=1)
    assert client.set("ada", 1.5, ex=timedelta(minutes=1)) is True
    assert client.get("ada") == b"1.5"
    client.set("ada", "1")
    assert client.expireat("ada", moment) is True
    assert client.expiretime("ada") == int(moment.timestamp())
    assert client.getex("ada", px=timedelta(minutes=2)) == b"1"
    assert 60 < client.ttl("ada") <= 120

    def double(pipe: Any) -> None:
        value = int(pipe.get("ada"))
        pipe.multi()
        pipe.set("ada", 2 * value)

    assert client.transaction(double, "ada") == [True]
    assert client.get("ada") == b"2"
    assert client.pipeline().execute() == []
    with client.pipeline() as pipe:
        pipe.set("a", "1").execute_command("INCRBY", "a", "x").set("b", "2")
        refused(r"Command # 2 \(INCRBY a x\) of pipeline caused error: value is not an", pipe.execute)


def test_text_beyond_ascii(served: tuple[Site, Server], client: Any) -> None:
    with resp_client(served[1], decode_responses=True) as own:
        assert own.set("ключ", "wörter\u2028\r\n") is True
        assert own.get("ключ") == "wörter\u2028\r\n"
        assert own.strlen("ключ") == len("wörter\u2028\r\n".encode())
        assert [*own.scan_iter(match="кл*")] == ["ключ"]
    assert client.get("ключ".encode()) == "wörter\u2028\r\n".encode()


def test_clients_are_killed_by_what_is_known_of_them(served: tuple[Site, Server], client: Any) -> None:
    client.ping()
    refused("syntax error", lambda: client.execute_command("CLIENT", "KILL", "ID", "1", "x"))
    assert client.client_kill_filter(_id="1000000") == 0
    own = client.client_info()["addr"]
    assert client.client_kill_filter(addr=own) == 0
    with resp_client(served[1]) as victim:
        victim.client_setname("victim")
        address = next(each["addr"] for each in client.client_list() if each["name"] == "victim")
        assert client.client_kill(address) is True
        wait_until(lambda: address not in {each["addr"] for each in client.client_list()}, "it is gone")
        # A client connects again.
        assert victim.ping() is True


def test_writes_are_captured_and_versioned(site: Site, client: Any) -> None:
    since = site.resolved_version()
    client.set("ada", "1")
    first = client.execute_command("FM.VERSION")
    client.set("ada", "2")
    changes = list(site.changes("users", since=since))
    assert [(change.key, change.value) for change in changes] == [(b"ada", b"1"), (b"ada", b"2")]
    assert changes[0].version == first
    assert site.namespace("users").get(b"ada", at=first) == b"1"


# SET and its options


def test_set_options(client: Any) -> None:
    assert client.set("a", "1", nx=True) is True
    assert client.set("a", "2", nx=True) is None
    assert client.set("b", "1", xx=True) is None
    assert client.set("a", "2", xx=True) is True
    assert client.set("a", "3", get=True) == b"2"
    assert client.set("new", "3", get=True) is None
    assert client.set("a", "4", ex=10) is True
    assert 0 < client.ttl("a") <= 10
    assert client.set("a", "5", px=10_000) is True
    assert 0 < client.ttl("a") <= 10
    assert client.set("a", "6", keepttl=True) is True
    assert 0 < client.ttl("a") <= 10
    assert client.set("a", "7") is True
    assert client.ttl("a") == -1
    assert client.set("a", "8", exat=client.time()[0] + 10)
    assert 0 < client.ttl("a") <= 10
    assert client.set("a", "9", pxat=(client.time()[0] + 10) * 1000)
    assert 0 < client.ttl("a") <= 10
    assert client.get("a") == b"9"


@pytest.mark.parametrize(
    ("request_", "error"),
    [
        (("SET", "a", "1", "NX", "XX"), "syntax error"),
        (("SET", "a", "1", "EX"), "syntax error"),
        (("SET", "a", "1", "EX", "10", "PX", "10"), "syntax error"),
        (("SET", "a", "1", "KEEPTTL", "EX", "10"), "syntax error"),
        (("SET", "a", "1", "EX", "ten"), "value is not an integer or out of range"),
        (("SET", "a", "1", "EX", "0"), "invalid expire time in 'set' command"),
        (("SET", "a", "1", "PX", "-1"), "invalid expire time in 'set' command"),
        (("SET", "a"), "wrong number of arguments for 'set' command"),
        (("GET", "a", "b"), "wrong number of arguments for 'get' command"),
        (("MSET", "a", "1", "b"), "wrong number of arguments for 'mset' command"),
        (("GET", ""), "key"),
        (("SELECT", "nowhere"), "nowhere"),
        (("KEYS", "*"), "SCAN"),
        (("CONFIG", "SET", "save", ""), "CONFIG GET"),
        (("EXPIRE", "a", "10", "FAST"), "Unsupported option"),
    ],
)
def test_requests_that_are_refused(client: Any, request_: tuple[str, ...], error: str) -> None:
    refused(error, lambda: client.execute_command(*request_))
    assert client.exists("a", "b") == 0


def test_values_and_keys_have_the_limits_of_the_site(client: Any) -> None:
    refused("1,048,577 bytes", lambda: client.set("a", b"x" * (1024 * 1024 + 1)))
    refused("key", lambda: client.set(b"x" * 5000, "1"))
    assert client.set("a", b"x" * 1024 * 1024) is True
    assert len(client.get("a")) == client.strlen("a") == 1024 * 1024


# Other values


def test_legacy_sets(client: Any) -> None:
    assert client.setnx("a", "1") is True
    assert client.setnx("a", "2") is False
    assert client.execute_command("SETEX", "a", 10, "3") is True
    assert 0 < client.ttl("a") <= 10
    assert client.execute_command("PSETEX", "a", 10_000, "4") is True
    assert client.execute_command("GETSET", "a", "5") == b"4"
    refused("invalid expire time in 'setex' command", lambda: client.execute_command("SETEX", "a", 0, "3"))


def test_msetnx_is_all_or_nothing(client: Any) -> None:
    assert client.msetnx({"a": "1", "b": "2"}) is True
    assert client.msetnx({"a": "3", "c": "4"}) is False
    assert client.mget("a", "b", "c") == [b"1", b"2", None]


def test_mset_is_one_commit(site: Site, client: Any) -> None:
    since = site.resolved_version()
    client.mset({"a": "1", "b": "2", "c": "3"})
    assert len({change.version for change in site.changes("users", since=since)}) == 1


def test_mset_over_partitions_is_whole_for_readers_of_changes(site: Site, client: Any) -> None:
    site.split("users", b"m")
    since = site.resolved_version()
    client.mset({"a": "1", "z": "2"})
    changes = list(site.changes("users", since=since))
    assert [change.key for change in changes] == [b"a", b"z"]
    with client.pipeline(transaction=True) as pipe:
        assert pipe.incr("a").incr("z").execute() == [2, 3]
    heartbeat = site.heartbeat()
    assert heartbeat.version > changes[-1].version


def test_getdel_and_getex(client: Any) -> None:
    assert client.getdel("a") is None
    client.set("a", "1")
    assert client.getex("a") == b"1"
    assert client.getex("a", ex=10) == b"1"
    assert 0 < client.ttl("a") <= 10
    assert client.getex("a", persist=True) == b"1"
    assert client.ttl("a") == -1
    assert client.getdel("a") == b"1"
    assert client.getex("a", ex=10) is None
    assert client.exists("a") == 0


def test_append(client: Any) -> None:
    assert client.append("a", "ab") == 2
    client.expire("a", 100)
    assert client.append("a", "cd") == 4
    assert client.get("a") == b"abcd"
    assert client.ttl("a") > 0


def test_type(client: Any) -> None:
    assert client.type("a") == b"none"
    client.set("a", "1")
    assert client.type("a") == b"string"


# Times to live


def test_expire_and_persist(client: Any) -> None:
    assert client.expire("a", 10) is False
    assert client.ttl("a") == client.pttl("a") == -2
    client.set("a", "1")
    assert client.ttl("a") == client.pttl("a") == -1
    assert client.expire("a", 10) is True
    assert 0 < client.ttl("a") <= 10
    assert 0 < client.pttl("a") <= 11_000
    assert client.persist("a") is True
    assert client.persist("a") is False
    assert client.pexpire("a", 10_000) is True
    assert client.expireat("a", client.time()[0] + 100) is True
    assert 10 < client.ttl("a") <= 100
    assert client.pexpireat("a", (client.time()[0] + 50) * 1000) is True
    assert client.ttl("a") <= 50
    assert client.expire("a", -1) is True
    assert client.exists("a") == 0


def test_expire_conditions(client: Any) -> None:
    client.set("a", "1")
    assert client.expire("a", 10, xx=True) is False
    assert client.expire("a", 10, gt=True) is False
    assert client.expire("a", 100, lt=True) is True
    assert client.expire("a", 200, nx=True) is False
    assert client.expire("a", 50, gt=True) is False
    assert client.expire("a", 150, gt=True) is True
    assert client.expire("a", 200, lt=True) is False
    assert client.expire("a", 100, xx=True) is True


# Counters


def test_counting_a_value(client: Any) -> None:
    assert client.incr("a") == 1
    assert client.incrby("a", 4) == 5
    assert client.decr("a") == 4
    assert client.decrby("a", 14) == -10
    client.set("a", "text")
    refused("value is not an integer or out of range", lambda: client.incr("a"))
    client.set("a", str((1 << 63) - 1))
    refused("increment or decrement would overflow", lambda: client.incr("a"))
    client.set("a", "1", ex=100)
    client.incr("a")
    assert client.ttl("a") > 0


def test_counting_is_exact_under_many_clients(served: tuple[Site, Server], client: Any) -> None:
    def count(_: int) -> None:
        with resp_client(served[1]) as own:
            for _ in range(10):
                own.incr("hits")

    in_threads(count, 20)
    assert client.get("hits") == b"200"


def test_counter_namespace_adds(site: Site, client: Any) -> None:
    with client.pipeline(transaction=False) as pipe:
        pipe.execute_command("SELECT", "counts")
        pipe.incr("a").incrby("a", 4).get("a").decr("a").delete("a").get("a").incr("a")
        assert pipe.execute()[1:] == [1, 5, b"5", 4, 1, None, 1]
    assert site.namespace("counts").get(b"a") == 1


# Records of fields


@pytest.mark.usefixtures("client")
def test_fields(served: tuple[Site, Server]) -> None:
    with resp_client(served[1]) as own:
        pipe = own.pipeline(transaction=False)
        pipe.execute_command("SELECT", "records")
        pipe.hset("ada", mapping={"name": "Ada", "city": "London"})
        pipe.hset("ada", "city", "Paris")
        pipe.hget("ada", "city").hget("ada", "none").hmget("ada", "name", "none").hgetall("ada")
        pipe.hexists("ada", "name").hexists("ada", "none").hlen("ada").hincrby("ada", "age", 36)
        pipe.hincrby("ada", "age", -1).hdel("ada", "city", "none").get("ada").type("ada")
        pipe.hdel("ada", "name", "age").exists("ada")
        assert pipe.execute()[1:] == [
            2, 0, b"Paris", None, [b"Ada", None], {b"name": b"Ada", b"city": b"Paris"},
            True, False, 2, 36, 35, 1, b'{"age":35,"name":"Ada"}', b"hash", 2, 0,
        ]  # fmt: skip


@pytest.mark.parametrize(
    ("namespace", "request_"),
    [
        ("users", ("HSET", "a", "f", "v")),
        ("users", ("HGET", "a", "f")),
        ("counts", ("SET", "a", "1")),
        ("counts", ("HSET", "a", "f", "v")),
        ("counts", ("EXPIRE", "a", "10")),
        ("records", ("INCR", "a")),
        ("records", ("APPEND", "a", "b")),
    ],
)
def test_wrong_kind_of_namespace(client: Any, namespace: str, request_: tuple[str, ...]) -> None:
    pipe = client.pipeline(transaction=False)
    pipe.execute_command("SELECT", namespace).execute_command(*request_)
    refused("WRONGTYPE|wrong kind of value", pipe.execute)


# Transactions


def test_transaction_is_one_commit_and_sees_its_own_writes(site: Site, client: Any) -> None:
    since = site.resolved_version()
    with client.pipeline(transaction=True) as pipe:
        pipe.set("a", "1").incr("a").append("a", "0").get("a").delete("none").set("b", "x").delete("b").get(
            "b"
        )
        assert pipe.execute() == [True, 2, 2, b"20", 0, True, 1, None]
    changes = list(site.changes("users", since=since))
    assert {change.key: change.value for change in changes} == {b"a": b"20", b"b": None}
    assert len({change.version for change in changes}) == 1


def test_error_of_one_command_leaves_the_others(client: Any) -> None:
    client.set("text", "x")
    with client.pipeline(transaction=True) as pipe:
        pipe.set("a", "1").incr("text").set("b", "2")
        first, error, last = pipe.execute(raise_on_error=False)
    assert (first, last) == (True, True)
    assert "not an integer" in str(error)
    assert client.mget("a", "text", "b") == [b"1", b"x", b"2"]


def test_refused_command_spoils_the_transaction(client: Any) -> None:
    with client.pipeline(transaction=True) as pipe:
        pipe.set("a", "1").execute_command("GET")
        refused("EXECABORT|wrong number", pipe.execute)
    assert client.get("a") is None


def test_transaction_commands_out_of_place(client: Any) -> None:
    refused("EXEC without MULTI", lambda: client.execute_command("EXEC"))
    refused("DISCARD without MULTI", lambda: client.execute_command("DISCARD"))


@pytest.mark.parametrize("meanwhile", [1, 2, 33, 69, 70, 71, 100])
def test_keys_are_read_together_though_they_are_written_meanwhile(meanwhile: int) -> None:
    engine, keys = HookedEngine(), [f"key-{number:02}" for number in range(70)]
    site = open_memory(engine, SimulatedTime())
    with serving_resp(site) as (_, server), resp_client(server) as client:
        users, looked_up = site.namespace("users"), 0
        site.split("users", b"key-50")
        users.put_many({key.encode(): b"before" for key in keys})

        def write(operation: str) -> None:
            """Write all keys in one commit before a look-up, and before the two that follow."""
            nonlocal looked_up
            looked_up += operation == "ceiling"
            if operation == "ceiling" and meanwhile <= looked_up < meanwhile + 3:
                engine.before = nothing
                users.put_many({key.encode(): b"%d" % looked_up for key in keys})
                engine.before = write

        engine.before = write
        found = client.mget(keys)
        engine.before = nothing
        assert len(set(found)) == 1


def test_watched_key_that_expires_ends_the_transaction() -> None:
    time = SimulatedTime()
    with (
        serving_resp(open_memory(HookedEngine(), time)) as (_, server),
        resp_client(server) as client,
        client.pipeline() as pipe,
    ):
        for lives_ms, is_changed in ((3_000, False), (2_000, True), (1_000, False)):
            client.set("lock", "me", px=lives_ms)
            time.advance(1_000)
            pipe.watch("lock")
            time.advance(1_000)
            pipe.multi()
            pipe.set("resource", lives_ms)
            if is_changed:
                with pytest.raises(redis.WatchError):
                    pipe.execute()
            else:
                assert pipe.execute() == [True]
                assert client.get("resource") == b"%d" % lives_ms


def test_watched_key_that_changes_ends_the_transaction(client: Any) -> None:
    client.set("a", "1")
    with client.pipeline() as pipe:
        pipe.watch("a", "absent")
        assert pipe.get("a") == b"1"
        pipe.multi()
        pipe.set("a", "2")
        assert pipe.execute() == [True]
        pipe.watch("a")
        client.set("a", "1")
        pipe.multi()
        pipe.set("a", "3")
        with pytest.raises(redis.WatchError):
            pipe.execute()
        pipe.watch("absent")
        client.set("absent", "1")
        client.delete("absent")
        pipe.multi()
        pipe.set("a", "3")
        with pytest.raises(redis.WatchError):
            pipe.execute()
        pipe.watch("a")
        client.set("a", "5")
        pipe.unwatch()
        pipe.multi()
        pipe.set("a", "4")
        assert pipe.execute() == [True]


def test_discarded_transaction_writes_nothing(client: Any) -> None:
    pipe = client.pipeline(transaction=False)
    pipe.execute_command("MULTI").execute_command("SET", "a", "1").execute_command("DISCARD").get("a")
    assert pipe.execute()[-1] is None


def test_the_time_can_be_asked_for_in_a_transaction(client: Any) -> None:
    pipe = client.pipeline(transaction=True)
    before = client.time()[0]
    pipe.set("a", "1")
    pipe.time()
    _, (seconds, _) = pipe.execute()
    assert before <= seconds <= client.time()[0]


def test_compare_and_set(client: Any) -> None:
    client.set("a", "1")
    assert client.execute_command("FM.CAS", "a", "2", "3") == 0
    assert client.execute_command("FM.CAS", "a", "1", "3") == 1
    assert client.execute_command("FM.CAS", "none", "", "3") == 0
    assert client.get("a") == b"3"


def test_asynchronous_durability(client: Any) -> None:
    pipe = client.pipeline(transaction=False)
    pipe.execute_command("FM.DURABILITY", "async").set("a", "1").incr("a").get("a")
    assert pipe.execute()[1:] == [True, 2, b"2"]
    refused("fsync or async", lambda: client.execute_command("FM.DURABILITY", "never"))


# The connection and the server


def test_client_names_lists_and_kills(served: tuple[Site, Server], client: Any) -> None:
    assert client.client_getname() is None
    assert client.client_setname("tester") is True
    assert client.client_getname() in ("tester", b"tester")
    refused("Client names cannot contain", lambda: client.client_setname("a b"))
    number = client.client_id()
    assert {each["id"] for each in client.client_list()} >= {str(number)}
    assert client.client_info()["name"] == "tester"
    with resp_client(served[1]) as other:
        victim = other.client_id()
        assert client.client_kill_filter(_id=str(victim)) == 1
        wait_until(
            lambda: str(victim) not in {each["id"] for each in client.client_list()}, "the client is gone"
        )
    refused("No such client", lambda: client.client_kill("127.0.0.1:1"))


def test_server_tells_about_itself(site: Site, client: Any) -> None:
    assert client.echo("text") == b"text"
    assert client.info("server")["site"] == site.name
    assert client.info()["role"] == "master"
    assert client.config_get("append*") == {"appendonly": "yes", "appendfsync": "always"}
    seconds, microseconds = client.time()
    assert seconds > 1_600_000_000
    assert 0 <= microseconds < 1_000_000
    assert client.command_count() == len(client.command_list())
    assert client.execute_command("HELLO", "3")[b"proto"] == 3
    refused("NOPROTO", lambda: client.execute_command("HELLO", "4"))


def test_reset_forgets_selection_and_name(client: Any) -> None:
    pipe = client.pipeline(transaction=False)
    pipe.execute_command("SELECT", "counts").execute_command("CLIENT", "SETNAME", "x").execute_command(
        "RESET"
    )
    pipe.execute_command("CLIENT", "GETNAME").execute_command("SET", "a", "1")
    assert pipe.execute()[-2:] == [None, True]


# Scans, the past, and changes


def test_scan_finds_every_key_once(client: Any) -> None:
    keys = {b"user:%03d" % number for number in range(50)} | {b"other"}
    client.mset(dict.fromkeys(keys, "1"))
    assert sorted(client.scan_iter(count=7)) == sorted(keys)
    assert sorted(client.scan_iter(match="user:04?", count=3)) == [
        b"user:04%d" % number for number in range(10)
    ]
    assert [*client.scan_iter(match="*0[12]5")] == [b"user:015", b"user:025"]
    assert [*client.scan_iter(_type="hash")] == []
    assert client.dbsize() == 51
    refused("invalid cursor", lambda: client.scan(cursor=123456))


@pytest.mark.parametrize(
    ("pattern", "matches", "others"),
    [
        (b"*", [b"", b"a\n"], []),
        (b"h?llo", [b"hello"], [b"hllo"]),
        (b"h[ae]llo", [b"hallo"], [b"hillo"]),
        (b"h[^e]llo", [b"hallo"], [b"hello"]),
        (b"h[a-b]llo", [b"hbllo"], [b"hcllo"]),
        (b"h[b-a]llo", [b"hallo"], [b"hcllo"]),
        (rb"h\*", [b"h*"], [b"hello"]),
        (b"a.c", [b"a.c"], [b"abc"]),
        (b"[", [], [b"[", b"a", b""]),
        (b"a[.+", [b"a.", b"a+"], [b"a[.+"]),
        (b"[]a", [], [b"a", b"]a"]),
        (b"[^]a", [b"xa", b"\na"], [b"a"]),
        (rb"[\]x]", [b"]", b"x"], [b"\\"]),
        (b"[a-", [b"a", b"-"], [b"b"]),
    ],
)
def test_patterns_of_redis(pattern: bytes, matches: list[bytes], others: list[bytes]) -> None:
    found = re.compile(translate_pattern(pattern), re.DOTALL).fullmatch
    assert all(map(found, matches))
    assert not any(map(found, others))


def test_past_of_a_key(client: Any) -> None:
    client.set("ada", "1")
    first = client.execute_command("FM.VERSION")
    client.set("ada", "2")
    client.delete("ada")
    assert client.execute_command("FM.GET", "ada", "AT", str(first)) == b"1"
    past = client.execute_command("FM.HISTORY", "ada")
    assert [entry[1:] for entry in past[-3:]] == [[b"upsert", b"1"], [b"upsert", b"2"], [b"delete", None]]
    assert past[-3][0] == first
    assert client.execute_command("FM.RESOLVED") >= past[-1][0]
    refused("neither a version nor a time", lambda: client.execute_command("FM.GET", "ada", "AT", "soon"))


def test_entries_of_an_atomic_batch_carry_its_id(served: tuple[Site, Server], client: Any) -> None:
    site = served[0]
    start, users = site.resolved_version(), site.namespace("users")
    with site.atomic() as batch:
        batch.put(users, b"a", b"1")
        batch.delete(users, b"b")
    client.set("c", "3")
    number = str(batch.version).encode()
    entries = [entry for _, entry in client.xrange("changes:users", min=f"({start}-0")]
    assert entries == [
        {b"type": b"upsert", b"key": b"a", b"value": b"1", b"batch": number},
        {b"type": b"delete", b"key": b"b", b"batch": number},
        {b"type": b"upsert", b"key": b"c", b"value": b"3"},
    ]


@pytest.mark.parametrize("protocol", [2, 3])
def test_changes_as_a_stream(served: tuple[Site, Server], client: Any, protocol: int) -> None:
    site = served[0]
    with resp_client(served[1], protocol=protocol) as reader:
        start = f"{site.resolved_version()}-0"
        client.mset({"a": "1", "b": "2"})
        client.delete("a")
        changes = [*site.changes("users", since=int(start[:-2]))]
        ids = [f"{changes[0].version}-0", f"{changes[0].version}-1", f"{changes[2].version}-0"]
        expected = [
            (ids[0].encode(), {b"type": b"upsert", b"key": b"a", b"value": b"1"}),
            (ids[1].encode(), {b"type": b"upsert", b"key": b"b", b"value": b"2"}),
            (ids[2].encode(), {b"type": b"delete", b"key": b"a"}),
        ]
        assert stream_entries(reader.xread({"changes:users": start})) == expected
        assert stream_entries(reader.xread({"changes:users": ids[0]}, count=1)) == expected[1:2]
        assert stream_entries(reader.xread({"changes:users": ids[2]})) == []
        got = reader.xrange("changes:users", min=ids[0], max=ids[1])
        assert [(entry[0], entry[1]) for entry in got] == expected[:2]
        got = reader.xrange("changes:users", min=f"({ids[0]}", max="+", count=1)
        assert [(entry[0], entry[1]) for entry in got] == expected[1:2]
        assert reader.execute_command("XINFO", "STREAM", "changes:users")
        refused("Invalid stream ID", lambda: reader.xread({"changes:users": "soon"}))
        refused("changes:<namespace>", lambda: reader.xread({"users": "0"}))
        refused("nowhere", lambda: reader.xread({"changes:nowhere": "0"}))


@pytest.mark.parametrize("way", ["difference", "snapshot"])
def test_streams_and_groups_go_on_where_a_data_set_was_published(
    served: tuple[Site, Server], client: Any, way: str
) -> None:
    site, stream = served[0], "changes:users"
    users, group = site.namespace("users"), f"over-{way}"
    start = users.put_many({b"%02d" % number: b"1" for number in range(20)})
    copy = dict(users.scan())
    client.xgroup_create(stream, group, id=f"{start}-0")
    client.set("mine", "1")
    # Some batches of the stream, with more than one entry each.
    rows = {b"%02d" % number: bytes(300_000) for number in range(10, 40)}
    base = site.now()
    client.set("mine", "2")
    swap = site.generations.publish("users", rows, base=base).version
    client.set("last", "3")
    refused("FM.GENERATION", lambda: client.xread({stream: f"{swap - 1}-0"}))
    assert len(stream_entries(client.xread({stream: f"{start}-99"}))) == 2
    assert client.execute_command("XINFO", "STREAM", stream)
    refused("one of fail, difference", lambda: client.execute_command("FM.GENERATION", "ignore"))
    for _ in range(2):
        assert len(stream_entries(client.xreadgroup(group, "ada", {stream: ">"}))) == 2
        refused("FM.GENERATION", lambda: client.xreadgroup(group, "ada", {stream: ">"}))

    def apply(entries: list[Any]) -> None:
        for _, entry in entries:
            match entry[b"type"]:
                case b"generation":
                    copy.clear() if way == "snapshot" else None
                case b"upsert":
                    copy[entry[b"key"]] = entry[b"value"]
                case _:
                    copy.pop(entry[b"key"], None)

    with resp_client(served[1]) as own:
        own.execute_command("FM.GENERATION", way)
        last, seen = f"{start}-99", []
        while entries := stream_entries(own.xread({stream: last}, count=7)):
            apply(entries)
            last = entries[-1][0].decode()
            seen += entries
        assert copy == dict(users.scan())
        assert [entry[1][b"type"] for entry in seen].count(b"generation") == 1
        assert own.xrange(stream, min=f"{start + 1}-0") == seen
        # The group goes on, and what it holds is read again with the same ids.
        delivered = []
        while entries := stream_entries(own.xreadgroup(group, "ada", {stream: ">"}, count=7)):
            delivered += entries
        assert delivered == seen
        assert stream_entries(own.xreadgroup(group, "ada", {stream: seen[1][0]})) == seen[2:]
        assert own.xack(stream, group, *(entry[0] for entry in delivered)) == len(delivered)
    own_history = client.execute_command("FM.HISTORY", "05")
    assert [each[1:] for each in own_history][-1] == [b"delete", None]
    # It keeps its choice, whatever another connection says.
    swap = site.generations.publish("users", {b"a": b"1"}).version
    [first] = stream_entries(client.xreadgroup(group, "ada", {stream: ">"}, count=1))
    assert first == (b"%d-0" % swap, {b"type": b"generation", b"key": b""})


def stream_entries(reply: Any) -> list[Any]:
    """The entries of the one stream of a reply, which redis-py shows in several ways."""
    if not reply:
        return []
    [entries] = reply.values() if isinstance(reply, dict) else [pair[1] for pair in reply]
    while entries and isinstance(entries[0], list):
        entries = entries[0]
    return [(entry[0], entry[1]) for entry in entries]


def test_reader_waits_for_changes(served: tuple[Site, Server], client: Any) -> None:
    assert not client.xread({"changes:users": "$"}, block=30)

    def read(_: int) -> Any:
        with resp_client(served[1]) as own:
            return stream_entries(own.xread({"changes:users": "$"}, block=0))

    def write(number: int) -> Any:
        if number:
            return read(number)
        wait_until(
            lambda: [each["cmd"] for each in client.client_list()].count("xread") == 2, "two readers wait"
        )
        client.set("ada", "1")
        return []

    _, first, second = in_threads(write, 3)
    assert first[0][1] == second[0][1] == {b"type": b"upsert", b"key": b"ada", b"value": b"1"}


@pytest.mark.parametrize("protocol", [2, 3])
def test_subscription_as_a_consumer_group(served: tuple[Site, Server], protocol: int) -> None:
    site, stream, group = served[0], "changes:users", f"indexers{protocol}"
    with resp_client(served[1], protocol=protocol) as client:
        refused("NOGROUP", lambda: client.xreadgroup(group, "ada", {stream: ">"}))
        assert client.xgroup_create(stream, group, id="$")
        refused("BUSYGROUP", lambda: client.xgroup_create(stream, group))
        assert not client.xreadgroup(group, "ada", {stream: ">"})
        for number in range(4):
            client.set(f"grouped{number}", "x")
        first = stream_entries(client.xreadgroup(group, "ada", {stream: ">"}, count=1))
        others = stream_entries(client.xreadgroup(group, "bob", {stream: ">"}, block=1))
        assert [entry[1][b"key"] for entry in first + others] == [b"grouped%d" % n for n in range(4)]
        ids = [entry[0] for entry in first + others]
        assert client.xack(stream, group, ids[1]) == 1
        assert client.xack(stream, group, ids[1]) == 0
        assert site.subscriptions.statistics(group).unacked == 3
        pending = client.xpending(stream, group)
        assert (pending["pending"], pending["min"], pending["max"]) == (3, ids[0], ids[3])
        rows = client.xpending_range(stream, group, "-", "+", 10, consumername="bob")
        assert [(row["message_id"], row["times_delivered"]) for row in rows] == [(ids[2], 1), (ids[3], 1)]
        # What a consumer holds can be read again, and be claimed by another.
        assert stream_entries(client.xreadgroup(group, "bob", {stream: "0"})) == others[1:]
        following, claimed, _ = client.xautoclaim(stream, group, "ada", 0, start_id=ids[2], count=1)
        assert (following, [entry[0] for entry in claimed]) == (ids[3], [ids[2]])
        rows = client.xpending_range(stream, group, "-", "+", 10, consumername="ada")
        assert [(row["message_id"], row["times_delivered"]) for row in rows] == [(ids[0], 1), (ids[2], 3)]
        assert client.xack(stream, group, *ids) == 3
        assert client.xpending(stream, group)["pending"] == 0
        assert site.subscriptions.statistics(group).backlog == 0


def test_groups_of_one_name_belong_to_their_streams(site: Site, client: Any) -> None:
    """A caller does not learn which groups other namespaces have."""
    users, counts = "changes:users", "changes:counts"
    assert client.xgroup_create(users, "workers", id="$")
    refused("NOGROUP", lambda: client.xreadgroup("workers", "ada", {counts: ">"}))
    assert client.xgroup_create(counts, "workers", id="$")
    refused("BUSYGROUP", lambda: client.xgroup_create(counts, "workers"))
    client.set("a", "1")
    site.namespace("counts").add(b"b", 1)
    for stream, key in ((users, b"a"), (counts, b"b")):
        [entry] = stream_entries(client.xreadgroup("workers", "ada", {stream: ">"}))
        assert entry[1][b"key"] == key
        assert client.xack(stream, "workers", entry[0]) == 1
    assert {row.name for row in site.host.subscriptions.list()} >= {"workers", "counts.workers"}


@pytest.mark.parametrize("options", [{"prefix": b"a", "start": "end"}, {"start": "snapshot"}])
def test_subscription_with_positions_of_its_own_is_no_group(
    site: Site, client: Any, options: dict[str, Any]
) -> None:
    name = str(options["start"])
    client.set("a", "1")
    site.subscribe(name, "users", **options).close()
    refused("consume it with floodmark", lambda: client.xreadgroup(name, "ada", {"changes:users": ">"}))


def test_unacknowledged_entries_of_a_group_come_again_after_a_restart(tmp_path: Path) -> None:
    stream = "changes:users"
    with serving_resp(floodmark.open(tmp_path, site="oslo")) as (_, server), resp_client(server) as client:
        client.xgroup_create(stream, "indexers", id="0")
        client.mset({"a": "1", "b": "2"})
        entries = stream_entries(client.xreadgroup("indexers", "ada", {stream: ">"}))
        client.xack(stream, "indexers", entries[0][0])
    with serving_resp(floodmark.open(tmp_path, site="oslo")) as (site, server), resp_client(server) as client:
        assert stream_entries(client.xreadgroup("indexers", "bob", {stream: ">"})) == entries[1:]
        with pytest.raises(LeaseHeld):
            site.subscribe("indexers", "users", holder="other")
        client.set("c", "3")
        [entry] = stream_entries(client.xreadgroup("indexers", "ada", {stream: ">"}, noack=True))
        assert entry[1][b"key"] == b"c"
        assert [row["consumer"] for row in client.xpending_range(stream, "indexers", "-", "+", 9)] == [b"bob"]
