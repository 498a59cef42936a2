"""Runners of feeds in tests: a real store and a real reader, a sink in memory, and simulated time."""

from collections.abc import Callable, Sequence
from dataclasses import fields
from functools import partial
from threading import Condition, Event, Lock
from typing import Any

from tests.feed.support_feeds import SITE_ID, Task, World
from tests.waiting import HANG_SECONDS

from floodmark.feed.named.feeds import Feed, FeedError, FeedSpec, FeedStatistics, FeedUpdate, RangeProgress
from floodmark.feed.named.round import Surroundings, ThreadRound
from floodmark.feed.named.runner import FeedRunner
from floodmark.feed.named.store import FeedStore
from floodmark.model.change import Change
from floodmark.model.version import Version
from floodmark.testing import SimulatedTime
from floodmark.testing.sinks import MemorySinks


class WatchedStore:
    """A store whose calls a test can watch, delay or make fail: `before` is called with each one's name."""

    def __init__(self, store: FeedStore, before: Callable[[str], None] = lambda _: None) -> None:
        self.before = before
        self.on_report: Callable[[list[RangeProgress]], None] = lambda _: None
        self.reports: list[list[RangeProgress]] = []
        self.answers: list[Feed] = []
        self._is_broken = False
        self._store = store
        self._changed = Condition()

    def wait_until(self, condition: Callable[[Feed], bool]) -> None:
        """Return when a condition holds of what the store answered to some report."""
        with self._changed:
            held = self._changed.wait_for(lambda: any(map(condition, self.answers)), HANG_SECONDS)
            assert held, "it never came to that"

    def wait_reported(self, checkpoint: Version) -> None:
        """Return when a report with this checkpoint, or a higher one, was looked at."""
        with self._changed:
            held = self._changed.wait_for(
                lambda: any(part.checkpoint >= checkpoint for parts in self.reports for part in parts),
                HANG_SECONDS,
            )
            assert held, "it was never reported"

    def wait_reports(self, count: int) -> None:
        """Return when so many more reports were looked at, or one was found to be wrong."""
        with self._changed:
            enough = len(self.reports) + count
            held = self._changed.wait_for(
                lambda: self._is_broken or len(self.reports) >= enough, HANG_SECONDS
            )
            assert held, "no more reports came"

    def create(self, spec: FeedSpec) -> Feed:
        return self._store.create(spec)

    def find(self, name: str) -> Feed:
        return self._store.find(name)

    def pause(self, name: str) -> Feed:
        return self._store.pause(name)

    def resume(self, name: str, since: Version | None = None, snapshot: bool = False) -> Feed:
        return self._store.resume(name, since, snapshot)

    def update(self, name: str, update: FeedUpdate) -> Feed:
        return self._store.update(name, update)

    def remove(self, name: str) -> None:
        self._store.remove(name)

    def rebalance(self, name: str) -> Feed:
        return self._store.rebalance(name)

    def statistics(self, name: str) -> FeedStatistics:
        return self._store.statistics(name)

    def acquire(self, name: str, holder: str, seconds: float) -> Feed:
        self.before("acquire")
        return self._store.acquire(name, holder, seconds)

    def report(self, name: str, holder: str, progress: list[RangeProgress], error: FeedError | None) -> Feed:
        self.before("report")
        try:
            self.on_report(progress)
        except BaseException:
            self._is_broken = True
            raise
        finally:
            with self._changed:
                self.reports.append(progress)
                self._changed.notify_all()
        feed = self._store.report(name, holder, progress, error)
        with self._changed:
            self.answers.append(feed)
            self._changed.notify_all()
        return feed

    def release(self, name: str, holder: str) -> None:
        self.before("release")
        self._store.release(name, holder)

    def list(self) -> list[Feed]:
        return self._store.list()


class Waiting:
    """A wait that does not sleep, and writes down for how long it should have."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self._lock = Lock()

    def __call__(self, event: Event, seconds: float) -> bool:
        with self._lock:
            self.seconds.append(seconds)
        return event.is_set()


class Stage:
    """A world, a watched store, a sink in memory and runners between them.

    `elapsed` is the time by which runners measure how long their lease holds.
    """

    def __init__(self, world: World | None = None) -> None:
        self.world = world or World()
        self.store = WatchedStore(self.world.store)
        self.sinks = MemorySinks()
        self.waiting = Waiting()
        self.elapsed = SimulatedTime()

    def runner(self, holder: str = "runner", **settings: object) -> FeedRunner:
        given: dict[str, Any] = {
            "site": "oslo",
            "site_id": SITE_ID,
            "open_changes": self.world.read,
            "decode": self.world.decoder.decode,
            "open_sink": self.sinks.open_uri,
            "elapsed_ms": self.elapsed,
            "wait": self.waiting,
            "holder": holder,
            "report_seconds": 0.01,
            "time_source": self.world.time,
            **settings,
        }
        places = {field.name for field in fields(Surroundings)}
        surroundings = Surroundings(**{name: given[name] for name in given.keys() & places})
        times = {name: given[name] for name in ("elapsed_ms", "wait")}
        own = {name: value for name, value in given.items() if name not in places}
        store = own.pop("store", self.store)
        return FeedRunner(store, "copy", partial(ThreadRound, surroundings), **own, **times)

    def wait_delivered(self, version: Version) -> None:
        """Return when the sink has a change of this version."""
        self.sinks.wait_until(lambda sinks: any(change.version == version for change in sinks.changes))

    def run_to_present(self) -> None:
        """Run a feed that has no target until the sink has everything that is there now."""
        runner = self.runner()
        task = Task(runner.run)
        wanted = self.world.changes()
        self.sinks.wait_until(lambda sinks: versions(wanted) <= versions(sinks.changes))
        runner.request_stop()
        task.result()


def versions(changes: Sequence[Change]) -> set[tuple[bytes, Version]]:
    """Changes by key and version."""
    return {(change.key, change.version) for change in changes}


def by_key(changes: Sequence[Change]) -> dict[bytes, list[tuple[Version, bytes | None]]]:
    """The changes of each key in their order."""
    keys: dict[bytes, list[tuple[Version, bytes | None]]] = {}
    for change in changes:
        keys.setdefault(change.key, []).append((change.version, change.value))
    return keys
