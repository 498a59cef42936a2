"""The worked example: unread counts are right, however often their worker is killed."""

import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from random import Random

import pytest
from tests.sizes import only
from tests.waiting import wait_until

import floodmark
from floodmark.server import serve

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "unread_counts.py"
RECIPIENTS = [b"ada", b"bob", b"carl"]
MESSAGES = 150
SEED = 11
# The example as it is, but for a shorter wait for those who were killed.
WORKER = """
import runpy, sys
from contextlib import suppress
from datetime import timedelta
example = runpy.run_path(sys.argv[1])
example["run"].__globals__["TIMEOUT"] = timedelta(seconds=2)
import floodmark
with floodmark.connect(sys.argv[2]) as site:
    while True:
        # On a machine under load the time may be over before a message is counted.
        with suppress(floodmark.FloodmarkError):
            example["run"](site)
"""


@contextmanager
def worker(url: str) -> Iterator[None]:
    """A worker that is killed at the end of the block."""
    process = subprocess.Popen([sys.executable, "-c", WORKER, str(EXAMPLE), url])
    try:
        yield
    finally:
        process.kill()
        process.wait()


def counted(site: floodmark.Site) -> int:
    return sum(value for _, value in site.namespace("unread").scan())


@pytest.mark.slow
@pytest.mark.parametrize("kills", only([2], [2, 6]))
def test_each_message_is_counted_once_though_workers_are_killed(tmp_path: Path, kills: int) -> None:
    random = Random(SEED)
    truth = Counter(random.choice(RECIPIENTS) for _ in range(MESSAGES))
    with floodmark.open(tmp_path / "oslo", site="oslo") as site, serve(site, "127.0.0.1:0") as server:
        messages = site.create_namespace("messages")
        site.create_namespace("unread", merge="counter")
        number = 0
        for recipient, count in truth.items():
            for _ in range(count):
                number += 1
                messages.put(recipient + b"/%d" % number, b"hello")
        for threshold in sorted(random.sample(range(1, MESSAGES - 1), kills)):
            with worker(server.url):
                wait_until(lambda at=threshold: counted(site) >= at, "messages are counted")  # type: ignore[misc]
        with worker(server.url):
            wait_until(lambda: counted(site) >= MESSAGES, "all messages are counted")
            wait_until(
                lambda: not site.subscriptions.statistics("unread-counts").backlog, "all are acknowledged"
            )
        assert dict(site.namespace("unread").scan()) == truth
        assert [each for each in site.transactions.list(timedelta(0)) if each.participants] == []
