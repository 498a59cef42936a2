"""The examples that follow a store are killed at random, and end up equal to it."""

import json
import random
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from threading import Event, Thread

import pytest
from tests.cli.support import PROCESS_SECONDS_MAX, ROOT
from tests.nodes import LOOPBACK

import floodmark
from floodmark.layers import OrderedLog
from floodmark.server import serve

KILLS = 6


def follow_with_kills(example: str, url: str, path: Path, seed: int) -> None:
    """Start an example again and again, kill it at random, and let it come to its end at last."""
    choose = random.Random(seed)
    command = [sys.executable, str(ROOT / "examples" / example), url, str(path)]
    for _ in range(KILLS):
        with subprocess.Popen(command) as process:
            try:
                process.wait(choose.uniform(0.3, 2))
            except subprocess.TimeoutExpired:
                process.kill()
    subprocess.run(command, check=True, timeout=PROCESS_SECONDS_MAX)


def write_until(stop: Event, write: Callable[[int, random.Random], None], seed: int) -> Thread:
    choose = random.Random(seed)

    def run() -> None:
        number = 0
        while not stop.is_set():
            write(number, choose)
            number += 1

    writer = Thread(target=run)
    writer.start()
    return writer


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2))
def test_a_cache_that_is_killed_ends_up_equal_to_the_store(tmp_path: Path, seed: int) -> None:
    with floodmark.open(tmp_path / "store", site="oslo") as site, serve(site, LOOPBACK) as server:
        prices = site.create_namespace("prices")

        def write(number: int, choose: random.Random) -> None:
            key = b"%d" % choose.randrange(50)
            prices.delete(key) if choose.random() < 0.2 else prices.put(key, b"%d" % number)
            if number % 50 == 0:
                site.generations.publish("prices", {b"%d" % each: b"new %d" % number for each in range(30)})

        stop = Event()
        writer = write_until(stop, write, seed)
        # The last run finds a store that is still.
        killed = Thread(target=follow_with_kills, args=("cache.py", server.url, tmp_path / "cache", seed))
        killed.start()
        stop.wait(5)
        stop.set()
        writer.join()
        killed.join()
        follow_with_kills("cache.py", server.url, tmp_path / "cache", seed)
        held = json.loads((tmp_path / "cache").read_text())["values"]
        assert held == {key.decode(): value.decode() for key, value in prices.scan()}


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2))
def test_a_search_index_that_is_killed_ends_up_equal_to_the_store(tmp_path: Path, seed: int) -> None:
    with floodmark.open(tmp_path / "store", site="oslo") as site, serve(site, LOOPBACK) as server:
        documents, changed = site.create_namespace("documents"), OrderedLog(site, "changed-documents")

        def write(number: int, choose: random.Random) -> None:
            name = b"%d" % choose.randrange(50)
            text = None if choose.random() < 0.2 else b"text %d" % number

            def work(transaction: floodmark.Transaction) -> None:
                if text is None:
                    transaction.delete(documents, name)
                else:
                    transaction.put(documents, name, text)
                changed.append(name, transaction=transaction)

            site.run_transaction(work)
            if number % 50 == 0:
                site.generations.publish(
                    "documents", {b"%d" % each: b"new %d" % number for each in range(30)}
                )

        stop = Event()
        writer = write_until(stop, write, seed)
        killed = Thread(
            target=follow_with_kills, args=("search_index.py", server.url, tmp_path / "index", seed)
        )
        killed.start()
        stop.wait(5)
        stop.set()
        writer.join()
        killed.join()
        follow_with_kills("search_index.py", server.url, tmp_path / "index", seed)
        with closing(sqlite3.connect(tmp_path / "index")) as database:
            held = dict(database.execute("SELECT name, text FROM documents"))
        assert held == {key.decode(): value.decode() for key, value in documents.scan()}
