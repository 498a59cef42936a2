"""A session of each command group by two clients for Node.js that others wrote, in RESP2 and RESP3."""

import json
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.server.support_resp import serving_resp
from tests.waiting import HANG_SECONDS

from floodmark.server import Server
from floodmark.site import Site

HERE = Path(__file__).parent / "clients"
INSTALL_NODE = "apt-get install --no-install-recommends nodejs npm"
INSTALL = f"npm install --prefix {HERE.relative_to(Path(__file__).parents[2])} --no-package-lock"

# Kinds of steps and what they are, with the reply; a callable checks a reply that is not always the same.
STEPS: list[tuple[str, list[Any], Any]] = [
    ("send", ["PING"], "PONG"),
    ("send", ["SET", "ada", "1", "EX", 100], "OK"),
    ("send", ["SET", "ada", "2", "NX"], None),
    ("send", ["SET", "ada", "wörter", "XX", "GET"], "1"),
    ("send", ["GET", "ada"], "wörter"),
    ("send", ["TTL", "ada"], -1),
    ("send", ["EXPIRE", "ada", 100], 1),
    ("send", ["TTL", "ada"], lambda reply: 98 <= reply <= 100),
    ("send", ["PERSIST", "ada"], 1),
    ("send", ["STRLEN", "ada"], 7),
    ("send", ["APPEND", "ada", "!"], 8),
    ("send", ["MSET", "a", "1", "b", "2"], "OK"),
    ("send", ["MGET", "a", "none", "b"], ["1", None, "2"]),
    ("send", ["EXISTS", "a", "b", "none"], 2),
    ("send", ["INCRBY", "a", 41], 42),
    ("send", ["DECR", "a"], 41),
    ("send", ["INCR", "ada"], {"error": "ERR value is not an integer or out of range"}),
    ("send", ["TYPE", "a"], "string"),
    ("send", ["GETDEL", "b"], "2"),
    ("send", ["GETEX", "a", "PX", 100_000], "41"),
    ("pipeline", [["SET", "p", 1], ["INCR", "p"], ["GET"], ["GET", "p"], ["DEL", "p", "none"]],
     ["OK", 2, {"error": "ERR wrong number of arguments for 'get' command"}, "2", 1]),
    ("transaction", [["SET", "t", 1], ["INCR", "t"], ["GET", "t"], ["EXISTS", "none"]], ["OK", 2, "2", 0]),
    ("send", ["WATCH", "t"], "OK"),
    ("other", ["INCR", "t"], 3),
    ("transaction", [["SET", "t", "never"]], None),
    ("send", ["GET", "t"], "3"),
    ("send", ["SCAN", 0, "COUNT", 100], ["0", ["a", "ada", "t"]]),
    ("send", ["DBSIZE"], 3),
    ("send", ["FM.CAS", "t", "3", "4"], 1),
    ("send", ["FM.HISTORY", "t"], lambda reply: reply[-1][1:] == ["upsert", "4"]),
    ("send", ["XREAD", "COUNT", 100, "STREAMS", "changes:users", "0"],
     lambda reply: stream(reply)[-1][1] == ["type", "upsert", "key", "t", "value", "4"]),
    ("send", ["XGROUP", "CREATE", "changes:users", "GROUP", "$"], "OK"),
    ("other", ["SET", "last", "1"], "OK"),
    ("send", ["XREADGROUP", "GROUP", "GROUP", "ada", "STREAMS", "changes:users", ">"],
     lambda reply: [entry[1][3] for entry in stream(reply)] == ["last"]),
    ("send", ["XPENDING", "changes:users", "GROUP"], lambda reply: reply[0] == 1),
    ("send", ["SELECT", "records"], "OK"),
    ("send", ["HSET", "ada", "name", "Ada", "age", 35], 2),
    ("send", ["HINCRBY", "ada", "age", 1], 36),
    ("send", ["HMGET", "ada", "name", "none"], ["Ada", None]),
    ("send", ["HGETALL", "ada"],
     lambda reply: reply in ({"age": "36", "name": "Ada"}, ["age", "36", "name", "Ada"])),
    ("send", ["HDEL", "ada", "age"], 1),
    ("send", ["SELECT", "counts"], "OK"),
    ("send", ["INCRBY", "visits", 5], 5),
    ("send", ["CLIENT", "SETNAME", "tester"], "OK"),
    ("send", ["CLIENT", "GETNAME"], "tester"),
    ("send", ["NOSUCH", "x"], {"error": "ERR unknown command 'NOSUCH', with args beginning with: 'x' "}),
]  # fmt: skip


def stream(reply: Any) -> Any:
    """The entries of the one stream of a reply: pairs, or a map as an object or in a row."""
    if isinstance(reply, dict):
        [entries] = reply.values()
        return entries
    return reply[1] if isinstance(reply[0], str) else reply[0][1]


@pytest.fixture(scope="module")
def served() -> Iterator[tuple[Site, Server]]:
    with serving_resp() as pair:
        yield pair


@pytest.mark.parametrize("protocol", [2, 3])
@pytest.mark.parametrize("library", ["ioredis", "node-redis"])
def test_session(served: tuple[Site, Server], library: str, protocol: int) -> None:
    node = shutil.which("node")
    if node is None:
        pytest.skip(f"Node.js is not installed, so this is NOT TESTED; install it: {INSTALL_NODE}")
    if not (HERE / "node_modules").exists():
        pytest.skip(f"the clients for Node.js are missing, so this is NOT TESTED; install them: {INSTALL}")
    site, server = served
    assert server.resp_address is not None
    for name in ("users", "records", "counts"):
        site.namespace(name).delete_range()
    group = f"{library}{protocol}"
    lines = [
        json.dumps([kind, step]).replace('"GROUP", "ada"', f'"{group}", "ada"') for kind, step, _ in STEPS
    ]
    lines = [line.replace('"changes:users", "GROUP"', f'"changes:users", "{group}"') for line in lines]
    done = subprocess.run(
        [node, HERE / "session.mjs", library, str(server.resp_address.port), str(protocol)],
        input="\n".join(lines), capture_output=True, text=True, timeout=HANG_SECONDS, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    replies = [json.loads(line) for line in done.stdout.splitlines()]
    for (_, step, expected), reply in zip(STEPS, replies, strict=True):
        assert expected(reply) if callable(expected) else reply == expected, (step, reply)
