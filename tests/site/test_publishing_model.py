"""Publications at random moments, with crashes, held against a plain model of what readers must find."""

from collections.abc import Callable, Mapping
from datetime import timedelta
from itertools import islice, pairwise
from random import Random
from typing import Any

import pytest
from tests.sizes import only

from floodmark import ChangeType, Resolved, Site, Stamp
from floodmark.codec.ordered import encode_namespace
from floodmark.codec.values import encode_value
from floodmark.feed.reading.reader import ChangeReader
from floodmark.feed.reading.swaps import Swap
from floodmark.host.catalog import GenerationRow
from floodmark.host.publishing import KEPT_FOR, LocalGenerations
from floodmark.model.errors import GenerationSwapped, VersionCollected
from floodmark.model.partition import GenerationStream
from floodmark.model.ranges import KeyRange
from floodmark.model.stream import ChangesRequest, SwapPlace
from floodmark.model.version import physical_ms
from floodmark.partition import FAMILIES
from floodmark.routing import Router
from floodmark.site.embedding import open_engine
from floodmark.testing import FaultyEngine

KEYS = [b"%02d" % number for number in range(12)]
START_MS = 1_700_000_000_000
Pairs = dict[bytes, bytes]


class World:
    """A site, and what a plain account says that it holds."""

    def __init__(self, seed: int) -> None:
        self.random = Random(seed)
        self.now_ms = START_MS
        self.engine = FaultyEngine(FAMILIES)
        self.open()
        self.site.create_namespace("rows")
        self.start = self.site.host.versions.now()
        # Every change as (version, key, value), every swap as (version, base, generation, data set).
        self.changes: list[tuple[int, bytes, bytes | None]] = []
        self.swaps: list[tuple[int, int, int, Pairs]] = []
        self.rows: Pairs = {}
        self.loading: GenerationRow | None = None

    def open(self) -> None:
        self.site: Site = open_engine(
            self.engine, site="oslo", site_id=7, background=False, time_source=lambda: self.now_ms
        )

    def state_at(self, version: int) -> Pairs:
        """What a reader as of a version must find."""
        _, base, _, rows = max(
            (each for each in self.swaps if each[0] <= version), default=(0, 0, 0, Pairs())
        )
        state = dict(rows)
        for committed, key, value in self.changes:
            if base < committed <= version:
                state.pop(key, None)
                if value is not None:
                    state[key] = value
        return state

    # Steps

    def write(self) -> None:
        namespace, key = self.site.namespace("rows"), self.random.choice(KEYS)
        value = b"%d" % self.random.randrange(1_000)
        match self.random.randrange(4):
            case 0:
                self.changes.append((namespace.delete(key), key, None))
            case 1:
                pairs = dict.fromkeys(self.random.sample(KEYS, 3), value)
                version = namespace.put_many(pairs)
                self.changes += [(version, each, value) for each in sorted(pairs)]
            case _:
                self.changes.append((namespace.put(key, value), key, value))

    def begin(self) -> None:
        if self.loading is not None:
            return
        latest = max([self.start, *(version for version, _, _ in self.changes)])
        lowest = max([self.start, *(base for _, base, _, _ in self.swaps[-1:])])
        base = self.random.choice([0, latest, self.random.randint(lowest, max(latest, lowest))])
        try:
            self.loading = self.site.host.generations.begin_generation("rows", base, "model")
        except VersionCollected:
            return
        self.draw_rows(self.loading.number)
        self.load()

    def draw_rows(self, number: int) -> None:
        count = self.random.randrange(len(KEYS))
        self.rows = dict.fromkeys(self.random.sample(KEYS, count), b"set %d" % number)

    def load(self) -> None:
        """Load the data set, in portions, some of them twice."""
        if self.loading is None:
            return
        namespace = self.site.namespace("rows")
        prefix = encode_namespace(namespace.id)
        stream = self.site.host.write_stream(GenerationStream(namespace.id, self.loading.number))
        keys = list(self.rows) + self.random.choices(list(self.rows), k=2) if self.rows else []
        for key in keys:
            stream.send({prefix + key: encode_value(self.rows[key])}).result()

    def rewind(self) -> None:
        if self.loading is not None:
            self.site.host.generations.rewind_generation("rows", self.loading.number)

    def swap(self) -> None:
        if self.loading is None:
            return
        swapped = self.site.host.generations.swap_generation("rows", self.loading.number, 2)
        assert swapped.since is not None
        self.swaps.append((swapped.since, swapped.base, swapped.number, self.rows))
        self.loading = None

    def rollback(self) -> None:
        if self.loading is not None or not self.swaps:
            return
        kept = [each for each in self.site.generations.list("rows")[:-1] if each.until is not None]
        if not kept:
            return
        back = kept[-1]
        assert back.until is not None
        rows = self.state_at(back.until - 1)
        try:
            again = self.site.generations.rollback("rows", back.number, keep=2)
        except VersionCollected:
            assert self.now_ms - physical_ms(back.until) > KEPT_FOR // timedelta(milliseconds=1)
            return
        assert again.since is not None
        self.swaps.append((again.since, back.until - 1, again.number, rows))

    def crash(self) -> None:
        """Lose power: what was acknowledged stays, what was not may be lost."""
        keep = self.random.randint(0, self.engine.unsynced)
        self.engine = self.engine.crash(keep=keep)
        self.open()
        # The publisher goes on: it sends everything again, or calls again, with other rows.
        if self.loading is not None and self.random.random() < 0.5:
            self.loading = self.site.host.generations.begin_generation("rows", 0, "model")
            self.draw_rows(self.loading.number)
        self.load()

    def collect(self) -> None:
        self.now_ms += self.random.choice([1_000, 30 * 3_600_000])
        self.site.host.retention.collect_garbage()
        if self.loading is not None and self.site.host.namespaces.find_namespace("rows").loading is None:
            self.loading = None

    # Checks

    def check(self) -> None:
        namespace = self.site.namespace("rows")
        now = self.site.host.versions.now()
        state = self.state_at(now)
        assert dict(namespace.scan()) == state
        assert dict(namespace.scan(reverse=True)) == state
        assert {key: value for key in KEYS if (value := namespace.get(key)) is not None} == state
        atomic = self.site.read_atomic([(namespace, key) for key in KEYS])
        assert {key: value for key, value in zip(KEYS, atomic, strict=True) if value is not None} == state
        versions = [version for version, _, _ in self.changes[-3:]]
        versions += [version + step for version, _, _, _ in self.swaps for step in (-1, 0)]
        for version in versions:
            try:
                found = dict(namespace.scan(at=version))
            except VersionCollected:
                continue
            assert found == self.state_at(version), version

    def check_changes(self) -> None:
        """A stream has all changes up to the next swap, and fails there."""
        since = self.random.choice([self.start, *(version for version, _, _, _ in self.swaps)])
        swap = min((version for version, _, _, _ in self.swaps if version > since), default=None)
        got: list[tuple[int, bytes, bytes | None]] = []
        told = None
        try:
            for change in self.site.changes("rows", since=since):
                got.append((change.version, change.key, change.value))
        except GenerationSwapped as error:
            told = error.details["oldest"]
        except VersionCollected:
            return
        assert told == swap, "the stream passed over a swap"
        wanted = [each for each in self.changes if since < each[0] and (swap is None or each[0] < swap)]
        assert got == sorted(wanted)

    def check_copies(self) -> None:
        """A reader that goes on over swaps holds what the site held, also after it began again anywhere."""
        way: Any = self.random.choice(["difference", "snapshot"])
        item: Any
        place, saved = Resolved(self.start), Pairs()
        stamps: dict[tuple[bytes, int], Stamp] = {}
        for left in [*self.random.choices(range(30), k=3), 100_000]:
            copy = dict(saved)
            try:
                items = self.site.changes("rows", since=place, resolved_markers=True, on_generation=way)
                for item in islice(items, left):
                    if isinstance(item, Resolved):
                        place, saved = item, dict(copy)
                        assert item.snapshot is not None or copy == self.state_at(item.version)
                    else:
                        self.apply(copy, item, way)
                        stamps[item.key, item.version] = item.stamp
            except VersionCollected:
                return
        if way == "difference":
            # A target that goes by stamps takes each change.
            in_order = [(key, stamp) for (key, _), stamp in sorted(stamps.items())]
            assert all(one < other for one, other in pairwise(in_order))

    def apply(self, copy: Pairs, item: Any, way: str) -> None:
        if item.type is ChangeType.GENERATION:
            assert item.version in {version for version, _, _, _ in self.swaps}
            assert copy == self.state_at(item.version - 1)
            if way == "snapshot":
                copy.clear()
        elif item.value is None:
            copy.pop(item.key, None)
        else:
            copy[item.key] = item.value

    def run(self, steps: int) -> None:
        moves: Mapping[Callable[[], None], int] = {
            self.write: 12,
            self.begin: 2,
            self.load: 1,
            self.rewind: 2,
            self.swap: 2,
            self.rollback: 1,
            self.crash: 1,
            self.collect: 1,
        }
        for _ in range(steps):
            self.now_ms += self.random.randrange(3)
            self.random.choices(list(moves), list(moves.values()))[0]()
            self.check()
            self.check_changes()
            self.check_copies()


@pytest.mark.parametrize("seed", range(4))
def test_readers_find_a_whole_generation_and_all_changes_above_its_base(seed: int) -> None:
    World(seed).run(60)


@pytest.mark.parametrize("seed", only((), range(100, 120), range(120, 160)))
def test_readers_find_a_whole_generation_in_many_runs(seed: int) -> None:
    World(seed).run(120)


@pytest.fixture(autouse=True)
def small_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("floodmark.feed.reading.swaps._PASSED_MAX", 2)
    monkeypatch.setattr("floodmark.partition.read.records.RECORDS_PAGE_ROWS_MAX", 3)


def run_until_it_fails() -> None:
    with pytest.raises(AssertionError):
        run_many()


def run_many() -> None:
    for seed in range(40):
        World(seed).run(60)


def test_the_model_catches_a_replay_that_starts_after_the_base(monkeypatch: pytest.MonkeyPatch) -> None:
    changes = LocalGenerations._changes
    monkeypatch.setattr(
        LocalGenerations,
        "_changes",
        lambda self, row, since, until: changes(self, row, min(since + (1 << 18), until), until),
    )
    run_until_it_fails()


def test_the_model_catches_a_swap_before_everything_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    load = LocalGenerations.load_generation

    def load_most(self: LocalGenerations, namespace: int, number: int, rows: Pairs) -> int:
        kept = {key: value for key, value in rows.items() if not key.endswith(b"07")}
        return load(self, namespace, number, kept)

    monkeypatch.setattr(LocalGenerations, "load_generation", load_most)
    run_until_it_fails()


def test_the_model_catches_a_rollback_that_forgets_newer_writes(monkeypatch: pytest.MonkeyPatch) -> None:
    rollback = LocalGenerations.rollback_generation

    def forget(self: LocalGenerations, *arguments: object) -> GenerationRow:
        with monkeypatch.context() as patched:
            patched.setattr("floodmark.host.publishing._above_base", lambda *_: ([], [], []))
            return rollback(self, *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(LocalGenerations, "rollback_generation", forget)
    run_until_it_fails()


def test_the_model_catches_a_stream_that_passes_over_a_swap(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("floodmark.feed.reading.reader.end_before_swap", lambda _swap, _position, end: end)
    run_until_it_fails()


def test_the_model_catches_a_difference_at_the_wrong_version(monkeypatch: pytest.MonkeyPatch) -> None:
    scan = Router.scan_records

    def scan_earlier(self: Router, keys: KeyRange, at: int, *, dead: bool = False) -> Any:
        return scan(self, keys, at - (dead << 18), dead=dead)

    monkeypatch.setattr(Router, "scan_records", scan_earlier)
    run_until_it_fails()


def test_the_model_catches_a_difference_that_ends_where_a_reader_stopped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cross = ChangeReader.cross

    def end(self: ChangeReader, request: ChangesRequest, swap: Swap, place: SwapPlace | None) -> Any:
        batches = cross(self, request, swap, place)
        return batches if place is None or not place.key else islice(batches, 1)

    monkeypatch.setattr(ChangeReader, "cross", end)
    run_until_it_fails()
