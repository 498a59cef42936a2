"""Nodes as processes on a real PostgreSQL, and clients that note all that they are told.

A writer puts growing numbers under keys of its own, so what a key may hold is known at any time: the last
number that was acknowledged, or a later one whose outcome is unknown.
"""

import json
import os
import signal
import subprocess
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from threading import Event, Lock, Thread
from typing import Final

from benchmarks.node_processes import NodeProcess, connect, url_of
from tests.cli.support import FLOODMARK, run, run_process
from tests.waiting import HANG_SECONDS, wait_until

import floodmark
from floodmark.cli.failures import DONE
from floodmark.model.errors import OutcomeUnknown, Retryable

NAMESPACE: Final = "counts"
KEYS_PER_WRITER: Final = 8


@dataclass
class Told:
    """What clients were told."""

    acknowledged: dict[bytes, int] = field(default_factory=dict)
    versions: dict[tuple[bytes, int], int] = field(default_factory=dict)
    attempted: dict[bytes, int] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    unknown: int = 0
    lock: Lock = field(default_factory=Lock)


class Clients:
    """Writers, readers and followers, each a thread with a connection of its own."""

    def __init__(self, nodes: list[NodeProcess], *, writers: int, readers: int, followers: int) -> None:
        self.told = Told()
        self._nodes = nodes
        self._stopping = Event()
        self._ending = Event()
        self.keys = [
            b"%02d-%d" % (writer, key) for writer in range(writers) for key in range(KEYS_PER_WRITER)
        ]
        self.followed: list[list[tuple[int, bytes, int]]] = [[] for _ in range(followers)]
        callers = [(self._write, number) for number in range(writers)]
        callers += [(self._read, number) for number in range(readers)]
        self._callers = [self._start(*each) for each in callers]
        self._followers = [self._start(self._follow, number) for number in range(followers)]

    def _start(self, work: Callable[[floodmark.Site, int], None], number: int) -> Thread:
        thread = Thread(target=self._run, args=(work, number), daemon=True)
        thread.start()
        return thread

    def _run(self, work: Callable[[floodmark.Site, int], None], number: int) -> None:
        try:
            with connect(self._nodes) as site:
                work(site, number)
        except BaseException as error:
            self.told.problems.append(f"{work.__name__} {number} failed: {error!r}")

    def _write(self, site: floodmark.Site, number: int) -> None:
        counts, told = site.namespace(NAMESPACE), self.told
        keys = [key for key in self.keys if key.startswith(b"%02d-" % number)]
        value = 0
        while not self._stopping.is_set():
            value += 1
            key = keys[value % len(keys)]
            told.attempted[key] = value
            try:
                version = counts.put(key, b"%d" % value)
            except (OutcomeUnknown, Retryable):
                told.unknown += 1
                continue
            with told.lock:
                told.acknowledged[key] = value
                told.versions[key, value] = version

    def _read(self, site: floodmark.Site, number: int) -> None:
        counts, random = site.namespace(NAMESPACE), Random(number)
        while not self._stopping.is_set():
            key = random.choice(self.keys)
            before = self.told.acknowledged.get(key, 0)
            try:
                found = int(counts.get(key) or 0)
            except Retryable:
                continue
            if not before <= found <= self.told.attempted.get(key, 0):
                self.told.problems.append(f"{key!r} was {found}, after {before} was acknowledged")

    def _follow(self, site: floodmark.Site, number: int) -> None:
        seen = self.followed[number]
        for change in site.changes(NAMESPACE, since="beginning", follow=True, resolved_markers=True):
            if isinstance(change, floodmark.Change):
                assert change.value is not None
                seen.append((change.version, change.key, int(change.value)))
            elif self._ending.is_set() and change.version >= self._last_version():
                return

    def _last_version(self) -> int:
        return max(self.told.versions.values(), default=0)

    def wait_for_writes(self, count: int = 20) -> None:
        """Return when so many more writes were acknowledged."""
        target = len(self.told.versions) + count
        wait_until(lambda: self.told.problems or len(self.told.versions) >= target, "writes do not go on")
        assert not self.told.problems, "\n".join(self.told.problems[:20])

    def finish(self, site: floodmark.Site) -> None:
        """End all clients and check what they were told."""
        # Followers end at the last version that a writer was told.
        for ended, threads in ((self._stopping, self._callers), (self._ending, self._followers)):
            ended.set()
            for thread in threads:
                thread.join(HANG_SECONDS)
                assert not thread.is_alive(), f"a client is stuck; {self.told.problems}"
        assert not self.told.problems, "\n".join(self.told.problems[:20])
        counts = site.namespace(NAMESPACE)
        for key, value in self.told.acknowledged.items():
            found = int(counts.get(key) or 0)
            assert value <= found <= self.told.attempted[key], f"{key!r} holds {found}, not {value}"
        written = {(version, key, value) for (key, value), version in self.told.versions.items()}
        read = _changes_of(site)
        for name, seen in [("log", read), *(("feed", each) for each in self.followed)]:
            assert [each[:2] for each in seen] == sorted({each[:2] for each in seen}), f"a {name} went back"
            missed = written - set(seen)
            assert not missed, f"a {name} has skipped {len(missed)} changes, such as {min(missed)}"
            assert set(seen) <= set(read), f"a {name} has shown what the log does not hold"


def _changes_of(site: floodmark.Site) -> list[tuple[int, bytes, int]]:
    """Versions, keys and values of all changes."""
    changes = site.changes(NAMESPACE, since="beginning")
    return [(each.version, each.key, int(each.value or b"0")) for each in changes]


class Mirror:
    """A second site, in a directory, that a link in a process of its own brings up to date."""

    def __init__(self, nodes: list[NodeProcess], directory: Path) -> None:
        self._between = (url_of(nodes), directory)
        made = run("init", directory, "--site", directory.name)
        assert made.code == DONE, made.errors
        self._process = subprocess.Popen(
            [FLOODMARK, "replicate", *map(str, self._between), "--runner", "process", "--json"],
            stdout=subprocess.PIPE,
        )
        with connect(nodes) as site:
            wait_until(lambda: site.topology() is not None, "the link does not start")

    def finish(self) -> None:
        """Let the rest arrive, and check that the link has lost nothing and the sites agree."""
        self.catch_up()
        verified = run_process("verify", *self._between, "--json")
        assert verified.code == DONE, verified.text + verified.errors
        (pair,) = verified.json["pairs"]
        assert pair["agree"] == pair["compared"] > 0, pair

    def catch_up(self) -> None:
        """Let the rest arrive, and check that the link has lost nothing."""
        self._process.send_signal(signal.SIGTERM)
        output, _ = self._process.communicate(timeout=HANG_SECONDS)
        assert self._process.returncode == DONE, (self._process.returncode, output)
        copied = run_process("replicate", *self._between, "--once", "--runner", "process", "--json")
        assert copied.code == DONE, copied.errors
        assert [json.loads(output)["wrong"], copied.json["wrong"]] == [0, 0]

    def end(self) -> None:
        """End the link, whatever it does."""
        with self._process:
            self._process.kill()


def suspend(node: NodeProcess, seconds: float) -> None:
    """Suspend a node for some time."""
    node.signal(signal.SIGSTOP)
    Event().wait(seconds)
    node.signal(signal.SIGCONT)


def prepare(nodes: list[NodeProcess], partitions: int = 6) -> None:
    """Make the namespace, cut into partitions."""
    with connect(nodes) as site:
        site.create_namespace(NAMESPACE)
        for number in range(1, partitions):
            site.split(
                NAMESPACE, b"%02d-%d" % divmod(number * KEYS_PER_WRITER * 3 // partitions, KEYS_PER_WRITER)
            )


def terminate(node: NodeProcess) -> None:
    """Ask a node to stop, and return when it has."""
    node.signal(signal.SIGTERM)
    assert node.wait() == os.EX_OK
