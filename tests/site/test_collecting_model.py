"""Garbage collection that data sets and rollbacks overtake, held against a plain account of the records."""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from random import Random

import pytest
from tests.replication.support_links import embedded

from floodmark.engine import MemoryEngine
from floodmark.engine.base import scan_pages
from floodmark.model.errors import VersionCollected
from floodmark.partition import FAMILIES
from floodmark.site.embedding import open_engine
from floodmark.testing.clock import SimulatedTime

KEYS = [b"%02d" % number for number in range(12)]
KEEP = 2
STEPS = 60
SEEDS_MAX = 200
Pairs = dict[bytes, bytes]


@pytest.fixture(autouse=True)
def small_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each pass takes several pages, and what it removes several writes."""
    pages = partial(scan_pages, rows_max=3)
    monkeypatch.setattr("floodmark.partition.retention.collect.scan_pages", pages)
    monkeypatch.setattr("floodmark.partition.retention.collect.BATCH_ROWS", 2)


@dataclass
class Ended:
    """A generation that is not read any more: what it held in the end, and all changes since."""

    number: int
    rows: Pairs
    changes: list[tuple[bytes, bytes | None]] = field(default_factory=list)


class World:
    """A site with one namespace, whose garbage is collected while others write, publish and go back."""

    def __init__(self, seed: int) -> None:
        self.random = Random(seed)
        self.time = SimulatedTime()
        self.site = open_engine(MemoryEngine(FAMILIES), site="oslo", time_source=self.time)
        retention = timedelta(seconds=self.random.choice([0, 1, 5]))
        self.users = self.site.create_namespace("users", retention=retention)
        self.rows: Pairs = {}
        self.ended: list[Ended] = []
        self.written = 0
        self.is_collecting = False
        self.census: Counter[str] = Counter()

    def write(self) -> None:
        key = self.random.choice(KEYS)
        value = None if self.random.random() < 0.35 else b"%d" % self.random.randrange(1_000)
        self.written = self.users.delete(key) if value is None else self.users.put(key, value)
        _change(self.rows, key, value)
        for each in self.ended:
            each.changes.append((key, value))

    def publish(self) -> None:
        keys = self.random.sample(KEYS, self.random.randrange(len(KEYS) + 1))
        rows = {key: b"set %d" % self.random.randrange(1_000) for key in keys}
        base = self.written if self.written and self.random.random() < 0.6 else None
        self.swap(rows, lambda: self.site.generations.publish("users", rows, base=base, keep=KEEP))

    def rollback(self) -> None:
        kept = {each.number for each in self.site.generations.list("users") if each.state.value == "kept"}
        ended = [each for each in self.ended if each.number in kept][-KEEP:]
        if ended:
            chosen = self.random.choice(ended)
            rows = dict(chosen.rows)
            for key, value in chosen.changes:
                _change(rows, key, value)
            self.swap(rows, lambda: self.site.generations.rollback("users", chosen.number, keep=KEEP))

    def swap(self, rows: Pairs, action: Callable[[], object]) -> None:
        present = self.site.host.namespaces.find_namespace("users").present.number
        try:
            action()
        except VersionCollected:
            return
        self.ended.append(Ended(present, self.rows))
        self.rows = dict(rows)
        self.census["overtaken" if self.is_collecting else "swapped"] += 1

    def collect(self) -> None:
        self.is_collecting = True
        embedded(self.site).garbage.run(self.pause)
        self.is_collecting = False

    def pause(self) -> bool:
        if self.random.random() < 0.5:
            self.random.choice([self.write, self.publish, self.rollback])()
            self.check()
        return True

    def check(self) -> None:
        assert dict(self.users.scan()) == self.rows

    def run(self) -> Counter[str]:
        for _ in range(STEPS):
            self.time.advance(self.random.choice([0, 1, 100, 2_000]))
            steps = [self.write, self.publish, self.rollback, self.collect]
            self.random.choices(steps, [10, 2, 3, 3])[0]()
            self.check()
        return self.census


def _change(rows: Pairs, key: bytes, value: bytes | None) -> None:
    rows.pop(key, None)
    if value is not None:
        rows[key] = value


def run_many(first: int, end: int) -> Counter[str]:
    census: Counter[str] = Counter()
    for seed in range(first, end):
        census += World(seed).run()
    return census


def test_collection_removes_nothing_that_a_swap_has_brought_meanwhile() -> None:
    census = run_many(0, 10)
    assert census["overtaken"] > 1
    assert census["swapped"] > 1


@pytest.mark.slow
@pytest.mark.parametrize("first", range(10, 210, 20))
def test_collection_removes_nothing_that_a_swap_has_brought_in_many_runs(first: int) -> None:
    run_many(first, first + 20)


def test_the_model_catches_a_collection_that_goes_on_in_the_next_generation(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("floodmark.partition.retention.collect.pinned", lambda engine: engine)
    with pytest.raises(AssertionError):
        run_many(0, SEEDS_MAX)
