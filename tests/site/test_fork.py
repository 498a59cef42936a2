"""A process that was forked has no part in the site: it is refused at once, and the parent goes on."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import floodmark

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="this machine does not fork")

# Both sides write after the fork, and the parent closes and reopens the site while the child lives.
BOTH = """
import json, os, sys, time, floodmark
path, background = sys.argv[1], sys.argv[2] == "background"
site = floodmark.open(path, site="oslo", background=background)
users = site.create_namespace("users")
users.put(b"before", b"1")
scan = iter(users.scan())
told, tell = os.pipe()
leave, let_leave = os.pipe()
child = os.fork()
if not child:
    calls = {
        "put": lambda: users.put(b"child", b"1"),
        "async": lambda: users.put(b"child", b"1", durability="async"),
        "put_many": lambda: users.put_many({b"child": b"1"}),
        "get": lambda: users.get(b"before"),
        "scan": lambda: list(users.scan()),
        "a scan from before": lambda: list(scan),
        "namespace": lambda: site.create_namespace("child"),
        "now": site.now,
        "sync": site.sync,
        "heartbeat": site.heartbeat,
        "changes": lambda: list(site.changes("users")),
        "collect": site.collect_garbage,
        "transaction": lambda: site.run_transaction(lambda t: t.put(users, b"child", b"1")),
        "statistics": site.statistics,
    }
    outcomes = {}
    for name, call in calls.items():
        try:
            outcomes[name] = f"returned {call()!r}"
        except floodmark.FloodmarkError as error:
            outcomes[name] = f"{type(error).__name__}: {error}"
        except BaseException as error:
            outcomes[name] = repr(error)
    site.close()
    os.write(tell, json.dumps(outcomes).encode())
    os.close(let_leave)
    os.read(leave, 1)
    os._exit(0)
os.close(tell)
for number in range(200):
    users.put(b"parent-%d" % number, b"1")
outcomes = b""
while part := os.read(told, 65536):
    outcomes += part
    if outcomes.endswith(b"}"):
        break
site.close()
with floodmark.open(path, background=False) as again:
    kept = sum(1 for _ in again.namespace("users").scan())
os.close(let_leave)
_, status = os.waitpid(child, 0)
with floodmark.open(path, background=False) as again:
    finally_kept = sum(1 for _ in again.namespace("users").scan())
print(json.dumps({"child": json.loads(outcomes), "kept": [kept, finally_kept], "status": status}))
"""


@pytest.mark.parametrize("background", ["background", "no background"])
def test_forked_process_is_refused_and_the_parent_writes_closes_and_opens_again(
    tmp_path: Path, background: str
) -> None:
    ran = subprocess.run(
        [sys.executable, "-W", "ignore::DeprecationWarning", "-c", BOTH, str(tmp_path / "oslo"), background],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    told = json.loads(ran.stdout)
    for call, outcome in told["child"].items():
        assert outcome.startswith("Closed: "), (call, outcome)
        assert "forked" in outcome, (call, outcome)
    assert told["kept"] == [201, 201]
    assert told["status"] == 0


def test_forked_process_cannot_open_any_site_and_is_told_at_once(tmp_path: Path) -> None:
    """RocksDB's threads are shared by all databases of a process, and the child has none of them."""
    script = """
import os, sys, floodmark
site = floodmark.open(sys.argv[1], site="oslo", background=False)
child = os.fork()
if not child:
    try:
        floodmark.open(sys.argv[2], site="rome", background=False)
    except floodmark.FloodmarkError as error:
        print(type(error).__name__, error, flush=True)
    os._exit(0)
os.waitpid(child, 0)
"""
    ran = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path / "oslo"), str(tmp_path / "rome")],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert ran.stdout.startswith("CannotOpen this process was forked"), ran.stderr
    assert "spawn" in ran.stdout
    with floodmark.open(tmp_path / "rome", background=False) as rome:
        assert rome.name == "rome"
