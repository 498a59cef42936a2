"""Publishers and servers that are killed in each phase: the old data set is read or the new one, wholly.

What is killed is a real process, at the same place each time (`tests/spark/killed_command.py`).
"""

import json
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
from tests.cli.support import PROCESS_SECONDS_MAX, ROOT, run, run_process

ROWS = 2_000
NEW = {f"key-{number}": f"new-{number}" for number in range(ROWS)}
OLD = {"key-1": "old", "kiwi": "old"}

# Where a process dies, and whether the new data set is read afterwards.
PLACES = [
    ("before", "LocalGenerations.load_generation", False),
    ("after", "LocalGenerations.load_generation", False),
    ("after", "LocalGenerations.rewind_generation", False),
    ("before", "LocalGenerations._swap", False),
    ("after", "LocalGenerations._swap", True),
]
# `make test` kills around the swap.
QUICK_PLACES = [*(pytest.param(*place, marks=pytest.mark.slow) for place in PLACES[:-1]), PLACES[-1]]


@pytest.fixture
def site(tmp_path: Path) -> Path:
    path = tmp_path / "oslo"
    assert run("init", path, "--site", "oslo").code == 0
    assert run("namespace", "create", path, "prices").code == 0
    for key, value in OLD.items():
        assert run("put", path, "prices", key, value).code == 0
    return path


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "prices.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"key": [*NEW], "value": [*NEW.values()]}), path)
    return path


def killed(when: str, name: str, *arguments: str | Path) -> Sequence[str]:
    """The command in a process that kills itself at a place."""
    place = ["-m", "tests.spark.killed_command", when, "floodmark.host.publishing", name]
    return [sys.executable, *place, *map(str, arguments)]


def check(site: Path, file: Path, *, is_new: bool) -> None:
    """One data set is there, and the publication can be brought to its end."""
    assert read(site) == (NEW if is_new else OLD)
    assert run("doctor", site).code == 0
    states = [row["state"] for row in run("generation", "list", site, "prices", "--json").json_lines]
    assert states == (["kept", "current"] if is_new else ["current", "loading"])
    assert run("publish", file, site, "prices", "--resume", "nightly", "--json").json["rows"] == ROWS
    assert read(site) == NEW
    assert run("generation", "list", site, "prices", "--json").json_lines[-1]["state"] == "current"


def read(site: Path) -> dict[str, str]:
    return dict(line.split("\t") for line in run("scan", site, "prices").lines)


@pytest.mark.slow
@pytest.mark.parametrize(("when", "name", "is_new"), PLACES)
def test_a_publisher_that_is_killed_leaves_one_data_set_and_goes_on(
    site: Path, file: Path, when: str, name: str, is_new: bool
) -> None:
    command = killed(when, name, "publish", file, site, "prices", "--resume", "nightly")
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, timeout=PROCESS_SECONDS_MAX, check=False)
    assert ended.returncode == -signal.SIGKILL, ended.stderr.decode()
    check(site, file, is_new=is_new)


@pytest.mark.parametrize(("when", "name", "is_new"), QUICK_PLACES)
def test_a_server_that_is_killed_leaves_one_data_set_and_the_publisher_goes_on(
    site: Path, file: Path, when: str, name: str, is_new: bool
) -> None:
    command = killed(when, name, "serve", site, "--listen", "127.0.0.1:0", "--json")
    with subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, stdin=subprocess.DEVNULL
    ) as server:
        try:
            assert server.stdout is not None
            url = json.loads(server.stdout.readline())["url"]
            failed = run_process("publish", file, url, "prices", "--resume", "nightly")
            assert failed.code not in (0, 70), failed.errors
            assert server.wait(PROCESS_SECONDS_MAX) == -signal.SIGKILL
        finally:
            server.kill()
    check(site, file, is_new=is_new)
