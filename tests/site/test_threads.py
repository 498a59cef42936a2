"""Many threads on one site: nothing is lost, nothing comes twice, and nobody sees time go backwards."""

import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import pairwise
from random import Random
from threading import Event

import pytest
from tests.site.support import HookedEngine, watch_line
from tests.waiting import HANG_SECONDS, run_threads

from floodmark.model.change import Change
from floodmark.model.version import Version
from floodmark.site import Namespace, Site

THREADS = 6


@pytest.fixture(autouse=True)
def restless_interpreter() -> Iterator[None]:
    """Let the interpreter change threads so often that they really meet."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(interval)


def increment(counters: Namespace, key: bytes) -> None:
    while True:
        value = counters.get(key)
        if counters.compare_and_set(key, value, b"%d" % (int(value or 0) + 1)):
            return


def test_counters_by_compare_and_set_end_exact(real_site: Site) -> None:
    counters = real_site.create_namespace("counters")

    def work(seed: int) -> None:
        chance = Random(seed)
        for _ in range(60):
            increment(counters, chance.choice([b"a", b"b", b"c"]))

    run_threads(*(partial(work, seed) for seed in range(THREADS)))
    assert sum(int(value) for _, value in counters.scan()) == THREADS * 60
    for key in (b"a", b"b", b"c"):
        steps = [int(change.value or 0) for change in real_site.changes("counters", prefix=key)]
        assert steps == list(range(1, len(steps) + 1))


class Writers:
    """Threads that write a little of everything, and remember what was acknowledged."""

    def __init__(self, namespace: Namespace) -> None:
        self.namespace = namespace
        self.acknowledged: list[tuple[Version, bytes, bytes | None]] = []
        self.done = Event()

    def run(self, steps: int, *others: Callable[[], object], seconds: float = HANG_SECONDS) -> None:
        """Write from many threads while others do something else, until all is written."""

        def write() -> None:
            try:
                work = [partial(self._work, seed, steps) for seed in range(THREADS)]
                run_threads(*work, seconds=seconds)
            finally:
                self.done.set()

        run_threads(write, *others, seconds=seconds)

    def _work(self, seed: int, steps: int) -> None:
        chance = Random(seed)
        for step in range(steps):
            key, value = b"key-%d" % chance.randrange(8), b"%d/%d" % (seed, step)
            kind = chance.choice(["put", "put", "async", "delete", "many", "create"])
            if kind == "many":
                pairs = {b"key-%d" % index: value for index in range(chance.randrange(1, 8))}
                version = self.namespace.put_many(pairs)
                self.acknowledged += [(version, each, value) for each in pairs]
            elif kind == "delete":
                self.acknowledged.append((self.namespace.delete(key), key, None))
            elif kind == "create":
                own = b"own-%d-%d" % (seed, step)
                assert self.namespace.compare_and_set(own, None, value)
                record = self.namespace.record(own)
                assert record is not None
                self.acknowledged.append((record.version, own, value))
            else:
                durability = "async" if kind == "async" else "fsync"
                version = self.namespace.put(key, value, durability=durability)  # type: ignore[arg-type]
                self.acknowledged.append((version, key, value))


def contents(changes: Iterable[Change]) -> list[tuple[Version, bytes, bytes | None]]:
    return [(change.version, change.key, change.value) for change in changes]


def test_each_acknowledged_write_is_in_the_changes_exactly_once(real_site: Site) -> None:
    writers = Writers(real_site.create_namespace("users"))
    writers.run(60)
    assert sorted(contents(real_site.changes("users")), key=str) == sorted(writers.acknowledged, key=str)


def test_versions_of_a_key_grow_in_the_order_in_which_its_writer_wrote(real_site: Site) -> None:
    users = real_site.create_namespace("users")
    versions: dict[int, list[Version]] = defaultdict(list)

    def work(seed: int) -> None:
        for _ in range(100):
            versions[seed].append(users.put(b"shared", b"%d" % seed))

    run_threads(*(partial(work, seed) for seed in range(THREADS)))
    for own in versions.values():
        assert all(earlier < later for earlier, later in pairwise(own))
    everything = [change.version for change in real_site.changes("users")]
    assert everything == sorted({version for own in versions.values() for version in own})


def test_nothing_at_or_below_a_resolved_version_appears_later(real_site: Site) -> None:
    writers = Writers(real_site.create_namespace("users"))
    collected: list[Change] = []

    def read() -> None:
        position, last = 0, False
        while not last:
            last = writers.done.is_set()
            resolved = real_site.resolved_version()
            assert resolved >= position, "the resolved version went back"
            portion = (
                list(real_site.changes("users", since=position, until=resolved))
                if resolved > position
                else []
            )
            assert all(position < change.version <= resolved for change in portion)
            collected.extend(portion)
            position = resolved

    writers.run(60, read)
    real_site.sync()
    collected += real_site.changes("users", since=collected[-1].version)
    assert contents(collected) == contents(real_site.changes("users"))
    assert len(collected) == len(writers.acknowledged)


def test_single_reads_of_a_key_never_go_back(real_site: Site) -> None:
    users = real_site.create_namespace("users")
    users.put(b"count", b"0")
    done = Event()

    def write() -> None:
        for number in range(1, 300):
            users.put(b"count", b"%d" % number, durability="async" if number % 3 else "fsync")
        done.set()

    def read() -> None:
        seen, version = 0, 0
        while not done.is_set():
            record = users.record(b"count")
            assert record is not None
            assert int(record.value) >= seen
            assert record.version >= version
            version = record.version
            seen = int(users.get(b"count") or 0)
            assert seen >= int(record.value)

    run_threads(write, read, read, read)


def test_scans_and_snapshots_see_a_commit_whole(real_site: Site) -> None:
    users = real_site.create_namespace("users")
    keys = [b"key-%02d" % index for index in range(20)]
    done = Event()

    def write(seed: int) -> None:
        for step in range(60):
            users.put_many(dict.fromkeys(keys, b"%d/%d" % (seed, step)))
        done.set()

    def scan() -> None:
        while not done.is_set():
            assert len({value for _, value in users.scan()}) <= 1
            assert len({value for _, value in users.scan(reverse=True)}) <= 1

    def read() -> None:
        while not done.is_set():
            at = real_site.now()
            values = users.get_many(keys, at=at)
            assert len(set(values)) == 1
            assert values == users.get_many(keys, at=at)

    run_threads(partial(write, 1), partial(write, 2), scan, read)


@pytest.mark.parametrize("writers", [2, 8, 30])
def test_commits_that_come_while_the_disk_is_busy_share_one_round(
    site: Site, users: Namespace, engine: HookedEngine, writers: int
) -> None:
    line, held = watch_line(site), Event()
    before = site.statistics()

    def hold_first_sync(operation: str) -> None:
        if operation == "sync":
            engine.before = count_syncs
            held.set()
            line.wait_length(writers - 1)

    def follow(index: int) -> None:
        assert held.wait(HANG_SECONDS)
        users.put(b"key-%d" % index, b"value")

    syncs: list[str] = []

    def count_syncs(operation: str) -> None:
        if operation == "sync":
            syncs.append(operation)

    users.put(b"warm", b"up")
    engine.before = hold_first_sync
    followers = [partial(follow, index) for index in range(1, writers)]
    run_threads(lambda: users.put(b"key-0", b"value"), *followers)
    engine.before = count_syncs
    after = site.statistics()
    assert after.commits - before.commits == writers + 1
    assert after.rounds - before.rounds == 3
    assert len(syncs) == 1
    assert len(list(site.changes("users", prefix=b"key-"))) == writers


def test_statistics_count_fewer_rounds_than_commits_never_more(real_site: Site) -> None:
    writers = Writers(real_site.create_namespace("users"))
    writers.run(30)
    statistics = real_site.statistics()
    assert statistics.changes == len(writers.acknowledged)
    assert statistics.rounds <= statistics.commits <= statistics.changes
