"""Writers, splits, merges and followers all at once: every follower sees every commit, in order, once.

What was written is known from the writers themselves, by the versions that they were given; the log is
compared as well, but it is not believed.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import closing
from datetime import timedelta
from pathlib import Path
from random import Random
from threading import Barrier, Event
from typing import Any

import pytest
from tests.feed.support import reshape
from tests.site.support import HookedEngine, host_of
from tests.waiting import HANG_SECONDS, run_threads

import floodmark
from floodmark.model.change import Change, Resolved
from floodmark.model.stream import Way
from floodmark.model.version import Version
from floodmark.site import Namespace, Site, open_engine

WRITERS = 4
COMMITS = 250

Fact = tuple[Version, bytes, bytes | None]


def fact(change: Change) -> Fact:
    return change.version, change.key, change.value


class Ledger:
    """What the writers were told, and when all of them are done."""

    def __init__(self, site: Site, users: Namespace) -> None:
        self.site = site
        self.users = users
        self.facts: set[Fact] = set()
        self.done = Event()
        self.end: Version = 0
        # No thread writes before every follower has caught up, so that all of them take part in the race.
        self.start = Barrier(WRITERS)
        self._finish = Barrier(WRITERS)

    def write(self, name: int) -> None:
        """Commit in every way that there is, from one thread."""
        chance = Random(name)
        users = self.users
        self.start.wait(HANG_SECONDS)
        for step in range(COMMITS):
            value = b"%d/%d" % (name, step)
            durability = chance.choice(["fsync", "async"])
            kind = chance.choice(["put", "put", "many", "delete", "large"])
            key = b"key-%02d" % chance.randrange(40)
            if kind == "delete":
                self.facts.add((users.delete(key, durability=durability), key, None))  # type: ignore[arg-type]
            elif kind == "many":
                keys = [b"batch-%d-%d" % (name, index) for index in range(5)]
                version = users.put_many(dict.fromkeys(keys, value), durability=durability)  # type: ignore[arg-type]
                self.facts |= {(version, key, value) for key in keys}
            else:
                value *= 1000 if kind == "large" else 1
                version = users.put(key, value, durability=durability)  # type: ignore[arg-type]
                self.facts.add((version, key, value))
        if self._finish.wait(HANG_SECONDS) == 0:
            self.site.sync()
            self.end = self.site.resolved_version()
            self.done.set()

    def reshape(self) -> None:
        """Split and merge until all is written, with a moment for the writers in between."""
        chance = Random(0)
        while not self.done.wait(0.002):
            reshape(self.site, chance.choice(["split", "split", "merge"]), chance)

    def is_over(self, version: Version) -> bool:
        """Whether a reader who has everything up to a version has everything."""
        return self.done.is_set() and version >= self.end


def follow(
    ledger: Ledger, since: Any, seed: int, *, resumes: bool, prefix: bytes | None = None
) -> list[Fact]:
    """Read to the end; one that `resumes` leaves its stream at random markers and comes back."""
    chance = Random(seed)
    seen: list[Fact] = []
    checkpoint: Any = since
    started = False
    while True:
        stream: Any = ledger.site.changes(
            "users",
            since=checkpoint,
            follow=True,
            resolved_markers=True,
            prefix=prefix,
        )
        with closing(stream):
            for item in stream:
                if isinstance(item, Change):
                    seen.append(fact(item))
                    continue
                assert isinstance(item, Resolved)
                checkpoint = item.version
                if not started:
                    ledger.start.wait(HANG_SECONDS)
                    started = True
                if ledger.is_over(item.version):
                    return seen
                if resumes and chance.random() < 0.2:
                    break


def check(ledger: Ledger, seen: list[Fact], since: Version = 0, prefix: bytes = b"") -> None:
    wanted = {each for each in ledger.facts if each[0] > since and each[1].startswith(prefix)}
    assert len(seen) == len(set(seen)), "a change came twice"
    assert set(seen) == wanted, f"lost {len(wanted - set(seen))}, too many {len(set(seen) - wanted)}"
    order = [(version, key) for version, key, _ in seen]
    assert order == sorted(order), "out of commit order"


def run_all(ledger: Ledger, readers: dict[str, Callable[[], list[Fact]]]) -> dict[str, list[Fact]]:
    found: dict[str, list[Fact]] = defaultdict(list)
    ledger.start = Barrier(WRITERS + len(readers))

    def read(name: str) -> None:
        found[name] = readers[name]()

    writers = [lambda name=name: ledger.write(name) for name in range(1, WRITERS + 1)]
    run_threads(*writers, ledger.reshape, *(lambda name=name: read(name) for name in readers))
    return found


@pytest.fixture(params=["memory", "rocks"])
def busy(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Ledger]:
    if request.param == "memory":
        site = open_engine(HookedEngine(), site="oslo", site_id=7, log_retention=timedelta(0))
    else:
        site = floodmark.open(
            tmp_path / "oslo", site="oslo", site_id=7, background=False, log_retention=timedelta(0)
        )
    with site:
        yield Ledger(site, site.create_namespace("users"))


def test_every_follower_sees_every_commit_under_splits_and_merges(busy: Ledger) -> None:
    ledger = busy
    first = ledger.users.put(b"key-00", b"first")
    ledger.facts.add((first, b"key-00", b"first"))
    found = run_all(
        ledger,
        {
            "from the beginning": lambda: follow(ledger, "beginning", 1, resumes=False),
            "from a version": lambda: follow(ledger, first, 2, resumes=False),
            "by a prefix": lambda: follow(ledger, 0, 3, resumes=False, prefix=b"batch"),
            "with interruptions": lambda: follow(ledger, 0, 4, resumes=True),
            "with interruptions, by a prefix": lambda: follow(ledger, 0, 5, resumes=True, prefix=b"key-1"),
        },
    )
    check(ledger, found["from the beginning"])
    check(ledger, found["from a version"], since=first)
    check(ledger, found["by a prefix"], prefix=b"batch")
    check(ledger, found["with interruptions"])
    check(ledger, found["with interruptions, by a prefix"], prefix=b"key-1")
    assert [fact(change) for change in ledger.site.changes("users")] == found["from the beginning"]
    assert ledger.site.statistics().readers.changes[Way.TAIL] > 0
    assert not host_of(ledger.site).node.committer.tail.is_open


def test_followers_in_a_tiny_window_see_every_commit(busy: Ledger) -> None:
    """A large commit exceeds the whole tail, so that every follower changes between tail and log."""
    host_of(busy.site).node.committer.tail._bytes_max = 2_000
    found = run_all(
        busy,
        {f"follower {number}": lambda: follow(busy, 0, 1, resumes=False) for number in range(3)},
    )
    for seen in found.values():
        check(busy, seen)
    ways = busy.site.statistics().readers.changes
    assert ways[Way.LOG] > 0


def test_followers_whose_log_is_trimmed_all_the_time_see_every_commit(busy: Ledger) -> None:
    """Tail, log and scan take over from each other at any moment, while everything else goes on."""
    node = host_of(busy.site).node
    node.committer.tail._bytes_max = 2_000

    def collect() -> list[Fact]:
        busy.start.wait(HANG_SECONDS)
        while not busy.done.wait(0.001):
            busy.site.collect_garbage()
        return []

    found = run_all(
        busy,
        {
            "steady": lambda: follow(busy, 0, 1, resumes=False),
            "with interruptions": lambda: follow(busy, 0, 2, resumes=True),
            "by a prefix": lambda: follow(busy, 0, 3, resumes=True, prefix=b"batch"),
            "collector": collect,
        },
    )
    check(busy, found["steady"])
    check(busy, found["with interruptions"])
    check(busy, found["by a prefix"], prefix=b"batch")
    assert busy.site.statistics().readers.changes[Way.SCAN] > 0


def test_checkpoints_of_a_stream_are_valid_for_every_other(busy: Ledger) -> None:
    """Resume at each marker that one follower saw, by another stream, when all is over."""
    markers: list[tuple[Version, int]] = []

    def watch() -> list[Fact]:
        seen: list[Fact] = []
        for item in busy.site.changes("users", follow=True, resolved_markers=True):
            if isinstance(item, Change):
                seen.append(fact(item))
            else:
                assert isinstance(item, Resolved)
                if not markers:
                    busy.start.wait(HANG_SECONDS)
                markers.append((item.version, len(seen)))
                if busy.is_over(item.version):
                    break
        return seen

    seen = run_all(busy, {"watch": watch})["watch"]
    check(busy, seen)
    assert markers == sorted(markers)
    for version, count in Random(1).sample(markers, min(40, len(markers))):
        later = [fact(change) for change in busy.site.changes("users", since=version)]
        assert seen[:count] + later == seen
