"""Runners in processes of their own, over a server: killed in the middle, another takes over."""

import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random

import pyarrow.dataset
import pytest
from tests.server.support import serving
from tests.waiting import wait_until

from floodmark.feed.named.feeds import FeedState, SinkOptions
from floodmark.server import Server
from floodmark.site import Site

SCRIPT = Path(__file__).with_name("support_runner_process.py")
KILLS = 3


@contextmanager
def runner_process(server: Server, holder: str) -> Iterator["subprocess.Popen[str]"]:
    command = [sys.executable, str(SCRIPT), server.url, "export", holder]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


@pytest.mark.slow
def test_runners_that_are_killed_lose_nothing_and_write_nothing_twice(tmp_path: Path) -> None:
    """The directory holds each change exactly once, although every runner but the last died at work."""
    random = Random(1)
    target = tmp_path / "changes"
    with serving() as (site, server):
        users = site.create_namespace("users")
        site.split("users", b"m")
        feed = site.feeds.create("export", "users", f"parquet:{target}", options=SinkOptions(batch_records=7))
        for number in range(KILLS):
            with runner_process(server, f"runner-{number}") as process:
                write_until_it_has_moved(site, random)
                process.send_signal(signal.SIGKILL)
                process.wait()
        until = users.put(b"last", b"last")
        site.feeds.pause("export")
        site.feeds.update("export", until=until)
        site.feeds.resume("export")
        with runner_process(server, "the-last-runner") as process:
            assert process.stdout is not None
            assert process.stdout.read().strip() == "finished"
        assert site.feeds.show("export").state is FeedState.FINISHED
        assert site.feeds.show("export").checkpoint > feed.checkpoint
        table = pyarrow.dataset.dataset(target, format="parquet").to_table()
        columns = (table[name].to_pylist() for name in ("_commit_version", "key", "value"))
        wanted = [(change.version, change.key, change.value) for change in site.changes("users")]
        assert sorted(zip(*columns, strict=True)) == wanted
        assert len(wanted) > KILLS * 50


def write_until_it_has_moved(site: Site, random: Random) -> None:
    """Write, and go on writing until the runner has delivered some of it."""
    users = site.namespace("users")
    goal = 0
    for number in range(50):
        goal = users.put(b"%c%d" % (random.choice(b"adgjmpsvy"), random.randrange(9)), b"%d" % number)

    def has_moved() -> bool:
        users.put(b"%c" % random.choice(b"az"), b"more")
        return site.feeds.show("export").checkpoint >= goal

    wait_until(has_moved, "the runner does not deliver")
