"""What the tests of the change reader share: a small world, followers pulled by hand, and a child to kill.

Run as a program, it is a site that is written and read at the same time, until it is killed:

    python -m tests.feed.support DIRECTORY SEED CHECKPOINT

Each line on standard output is one fact, printed only when it holds:

    written VERSION VALUE KEY KEY ...       a commit was acknowledged as durable
    change VERSION KEY VALUE                the reader got a change; a deletion has the value "-"
    resolved VERSION                        the reader may go on from here another time
"""

import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from random import Random
from threading import Thread
from typing import Any, Final, NamedTuple

from tests.site.support import START_MS, HookedEngine, host_of, nothing
from tests.site.support_writer import say

import floodmark
from floodmark.codec.ordered import NAMESPACE_BYTES
from floodmark.engine import Engine
from floodmark.feed.reading import reader as reader_module
from floodmark.model.change import Change, Heartbeat, Resolved
from floodmark.model.ranges import KeyRange
from floodmark.model.stream import ChangeBatch, ChangesRequest, Way
from floodmark.model.version import Version
from floodmark.site import Namespace, Site, open_engine
from floodmark.testing.clock import SimulatedTime

SECOND_MS: Final = 1000
HOUR_MS: Final = 60 * 60 * SECOND_MS
DAY_MS: Final = 24 * HOUR_MS
LARGE: Final = b"large" * 2000
# A commit of these is cut into several rows of the change log, over several of its pages.
HUGE: Final = {b"huge-%04d" % index: b"%04d" % index * 1000 for index in range(2600)}


class World(NamedTuple):
    """A site in memory, under simulated time, and a namespace on it."""

    site: Site
    users: Namespace
    engine: HookedEngine
    time: SimulatedTime


@contextmanager
def open_world(log_retention: timedelta | None = None) -> Iterator[World]:
    """Make a world.  Its followers look around at once: nobody but the test writes to it."""
    engine, time = HookedEngine(), SimulatedTime(START_MS)
    with impatient_followers(), open_on(engine, time, log_retention) as site:
        yield World(site, site.create_namespace("users"), engine, time)
        engine.before = engine.after = nothing


def open_on(engine: Engine, time: SimulatedTime, log_retention: timedelta | None = None) -> Site:
    """A site without background work on a given engine."""
    return open_engine(engine, site="oslo", site_id=7, time_source=time, log_retention=log_retention)


@contextmanager
def impatient_followers() -> Iterator[None]:
    """Let streams that follow look for news all the time, for tests that pull them by hand."""
    patience = {name: getattr(reader_module, name) for name in ("FOLLOW_SECONDS", "GATHER_SECONDS")}
    vars(reader_module).update(dict.fromkeys(patience, 0.0))
    try:
        yield
    finally:
        vars(reader_module).update(patience)


@contextmanager
def tiny_pages() -> Iterator[None]:
    """Shrink rows, pages and batches to a few changes, so that small histories have all their borders."""
    sizes = {
        "floodmark.partition.commit.storage.LOG_ROW_BYTES_MAX": 40,
        "floodmark.partition.read.changelog.PAGE_BYTES_MAX": 150,
        "floodmark.partition.read.changelog.PAGE_ROWS_MAX": 3,
        "floodmark.partition.read.records.PAGE_ROWS_MAX": 3,
        "floodmark.feed.reading.columns.BATCH_BYTES_MAX": 60,
        "floodmark.feed.reading.reader.BATCH_BYTES_MAX": 60,
    }
    modules = {name: sys.modules[name.rpartition(".")[0]] for name in sizes}
    saved = {name: getattr(module, name.rpartition(".")[2]) for name, module in modules.items()}
    for name, module in modules.items():
        vars(module)[name.rpartition(".")[2]] = sizes[name]
    try:
        yield
    finally:
        for name, module in modules.items():
            vars(module)[name.rpartition(".")[2]] = saved[name]


class Follower:
    """A stream that follows, pulled by hand.

    `changes` is what was delivered up to `checkpoint`, and `ahead` what came behind it: a reader that
    stops here and resumes at its checkpoint will get that again.
    """

    def __init__(self, site: Site, namespace: str | None = None, **options: Any) -> None:
        self._site = site
        self._namespace = namespace
        self._options = options
        self.checkpoint: Version = 0
        self.changes: list[Change] = []
        self.heartbeats: list[Heartbeat] = []
        self.ahead: list[Change] = []
        self._open(options.pop("since", 0))

    def _open(self, since: Any) -> None:
        self.stream: Any = self._site.changes(
            self._namespace,
            since=since,
            follow=True,
            resolved_markers=True,
            **self._options,
        )

    def take(self) -> None:
        """Take one item."""
        item = next(self.stream)
        if isinstance(item, Resolved):
            assert item.version >= self.checkpoint, "a marker went back"
            self.changes += self.ahead
            self.ahead = []
            assert not self.changes or self.changes[-1].version <= item.version, "a marker came too early"
            self.checkpoint = item.version
        elif isinstance(item, Heartbeat):
            self.heartbeats.append(item)
        else:
            assert item.version > self.checkpoint, "a change came behind its marker"
            self.ahead.append(item)

    def catch_up(self) -> None:
        """Take everything that is resolved now."""
        target = self._site.resolved_version()
        while self.checkpoint < target:
            self.take()

    def resume(self, site: Site | None = None) -> None:
        """Begin anew at the checkpoint, as after a crash of the reader, or of the site."""
        self.close()
        self._site = site or self._site
        self.ahead = []
        self._open(self.checkpoint or "beginning")

    def close(self) -> None:
        """Let go of the stream."""
        self.stream.close()


class RawChange(NamedTuple):
    """A change as it travels, and what was there before if that was asked for."""

    version: Version
    key: bytes
    value: bytes
    before: bytes | None = None


def raw_changes(batches: Iterable[ChangeBatch]) -> list[RawChange]:
    """The changes of batches, without the partitions, which differ from way to way."""
    return [
        RawChange(*change)
        for batch in batches
        for change in zip(
            batch.versions,
            batch.keys,
            batch.values,
            batch.befores or [None] * len(batch.keys),
            strict=True,
        )
    ]


def request_of(site: Site, namespace: str | None, **options: Any) -> ChangesRequest:
    """What `site.changes` asks for, for a whole namespace or all of them."""
    if namespace is None:
        return ChangesRequest(**options)
    identity = next(row.id for row in site.statistics().namespaces if row.name == namespace)
    start, end = (number.to_bytes(NAMESPACE_BYTES, "big") for number in (identity, identity + 1))
    return ChangesRequest(keys=KeyRange(start, end), namespace=identity, **options)


def read_batches(site: Site, namespace: str | None = None, **options: Any) -> list[ChangeBatch]:
    """All batches of a stream that does not follow."""
    return list(host_of(site).changes(request_of(site, namespace, **options)))


def delivered(site: Site) -> dict[Way, int]:
    """How many changes came by each way since the site was opened."""
    return {way: count for way, count in site.statistics().readers.changes.items() if count}


def trim_log(world: World) -> Version:
    """Trim the change log up to the present; the world must have been opened with a `log_retention`."""
    world.time.advance(HOUR_MS)
    return world.site.collect_garbage().log_trimmed_version


# The child


def write_for_ever(site: Site, users: Namespace, name: str, chance: Random) -> None:
    """Commit, split and merge."""
    for step in range(10**9):
        value = f"{name}/{step}".encode()
        kind = chance.choice([*4 * ["put", "many"], "async", "delete", chance.choice(["split", "merge"])])
        key = b"key-%02d" % chance.randrange(40)
        if kind == "put":
            say("written", users.put(key, value), value, key)
        elif kind == "async":
            users.put(key, value, durability="async")
        elif kind == "delete":
            say("written", users.delete(key), "-", key)
        elif kind == "many":
            batch = b"batch-%02d" % chance.randrange(10)
            keys = [batch + b"-%d" % index for index in range(5)]
            say("written", users.put_many(dict.fromkeys(keys, value)), value, *keys)
        else:
            reshape(site, kind, chance)


def reshape(site: Site, kind: str, chance: Random) -> None:
    """Split or merge at random; a batch's keys stay together."""
    partitions = site.partitions()
    try:
        if kind == "split" and len(partitions) < 6:
            site.split("users", chance.choice([b"batch-%02d", b"key-%02d"]) % chance.randrange(40))
        elif kind == "merge" and len(partitions) > 1:
            left = chance.randrange(len(partitions) - 1)
            site.merge(partitions[left].id, partitions[left + 1].id)
    except floodmark.Terminal:
        pass  # Another thread was faster.


def main(directory: str, seed: str, checkpoint: str) -> None:
    """Write with three threads and read with one, until killed."""
    site = floodmark.open(Path(directory), site="oslo")
    users = site.namespace("users")
    for number in range(3):
        name = f"{seed}/{number}"
        Thread(target=write_for_ever, args=(site, users, name, Random(name)), daemon=True).start()
    for item in site.changes("users", since=int(checkpoint), follow=True, resolved_markers=True):
        if isinstance(item, Change):
            say("change", item.version, item.key, "-" if item.value is None else item.value)
        else:
            say("resolved", item.version)


if __name__ == "__main__":
    main(*sys.argv[1:])
