"""The site's contract as a whole: long histories, and many threads.

A history is made of random steps under a seed.  Each is taken on the site under test and on one of this
process that holds everything in memory, and must have the same outcome on both, down to the versions:
every step has a millisecond of its own, so a version does not depend on who asked for one in between.
"""

from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from functools import partial
from random import Random
from threading import Event
from typing import Final, TypeAlias

import pytest
from tests.contracts.site.base import START_MS, SiteContractBase, outcome_of, state_after
from tests.waiting import run_threads, wait_until

from floodmark.model.change import Change
from floodmark.model.version import Version, compose, moment_of
from floodmark.site import Namespace, Site
from floodmark.site.arguments import Since
from floodmark.testing.clock import SimulatedTime

THREADS: Final = 8
STEPS: Final = 200

# Few keys, so that they meet again; some are prefixes of others, some fill groups of eight bytes.
KEYS: Final = [
    b"a",
    b"a\x00",
    b"ab",
    b"abcdefgh",
    b"abcdefghi",
    b"b",
    b"c" * 17,
    b"\xfe",
    b"\xff",
    b"\xff\xff",
]
# The last is too large for the change log, which names it instead.
VALUES: Final = [b"", b"1", b"22", b"\x00" * 9, b"large" * 1_000]
NAMES: Final = ["short", "long"]
RETENTION: Final = {"short": timedelta(seconds=20), "long": timedelta(minutes=5)}

Step: TypeAlias = Callable[[Site], object]


class History:
    """Steps, drawn by chance from everything that can be asked of a site."""

    def __init__(self, seed: int) -> None:
        self._chance = Random(seed)
        self._versions: list[Version] = [compose(START_MS, 0)]
        self._draws: Sequence[Callable[[], Step]] = [
            *[self._put, self._put, self._put_many, self._delete, self._compare_and_set, self._delete_range],
            *[self._write, self._put_many, self._get, self._get_many, self._scan, self._scan, self._scan],
            *[self._changes, self._changes, self._split],
            *[self._merge, self._heartbeat, self._collect, self._hold, self._drop, self._update, self._facts],
        ]

    def draw(self) -> tuple[int, Step]:
        """How much time passes, and what is done then."""
        passes_ms = self._chance.choice([1, 1, 1, 10, 1_000, 2_500])
        return passes_ms, self._chance.choice(self._draws)()

    def note(self, outcome: object) -> None:
        """Remember versions: later steps may ask for them."""
        if type(outcome) is int and outcome > compose(START_MS, 0):
            self._versions.append(outcome)

    # What is drawn before a step is the same for everyone who takes it.

    def _name(self) -> str:
        return self._chance.choice(NAMES)

    def _key(self) -> bytes:
        return self._chance.choice(KEYS)

    def _value(self) -> bytes:
        return self._chance.choice(VALUES)

    def _ttl(self) -> float | None:
        return self._chance.choice([None, None, None, 7.5, 60])

    def _range(self) -> tuple[bytes, bytes | None]:
        start, end = sorted([self._chance.choice([b"", self._key()]), self._key()])
        return start, self._chance.choice([None, end])

    def _pairs(self) -> dict[bytes, bytes]:
        return {self._key(): self._value() for _ in range(self._chance.randrange(14))}

    def _put(self) -> Step:
        name, key, value, ttl = self._name(), self._key(), self._value(), self._ttl()
        return lambda site: site.namespace(name).put(key, value, ttl=ttl)

    def _put_many(self) -> Step:
        name, pairs, ttl = self._name(), self._pairs(), self._ttl()

        def put_many(site: Site) -> object:
            # In which order partitions commit is not promised; it depends on whether a client has an old
            # map of them.  After a read it has the present one.
            return site.namespace(name).get_many(pairs), site.namespace(name).put_many(pairs, ttl=ttl)

        return put_many

    def _delete(self) -> Step:
        name, key = self._name(), self._key()
        return lambda site: site.namespace(name).delete(key)

    def _compare_and_set(self) -> Step:
        name, key, value = self._name(), self._key(), self._chance.choice([None, *VALUES])
        expected = self._chance.choice([None, *VALUES])
        return lambda site: site.namespace(name).compare_and_set(key, expected, value)

    def _delete_range(self) -> Step:
        name, (start, end) = self._name(), sorted([self._key(), self._key()])
        return lambda site: site.namespace(name).delete_range(start, end)

    def _write(self) -> Step:
        name, pairs = self._name(), self._pairs()

        def write(site: Site) -> object:
            with site.namespace(name).writer(batch_records=3) as writer:
                for key, value in pairs.items():
                    writer.put(key, value)
            return writer.acknowledged, len(list(site.changes(name, since="beginning")))

        return write

    def _moment(self) -> Version:
        return self._chance.choice(self._versions[-40:])

    def _get(self) -> Step:
        name, key = self._name(), self._key()
        at = self._chance.choice([None, self._moment(), moment_of(self._moment())])
        return lambda site: (site.namespace(name).get(key, at=at), site.namespace(name).record(key, at=at))

    def _get_many(self) -> Step:
        name, keys = self._name(), [self._key() for _ in range(5)]
        at = self._chance.choice([None, self._moment()])
        return lambda site: site.namespace(name).get_many(keys, at=at)

    def _scan(self) -> Step:
        name, (start, end) = self._name(), self._range()
        prefix = self._chance.choice([None, None, None, b"a", b"\xff"])
        limit, reverse = self._chance.choice([None, None, None, 0, 3]), self._chance.choice([False, True])
        at = self._chance.choice([None, None, self._moment()])
        return lambda site: site.namespace(name).scan(
            start, end, prefix=prefix, limit=limit, reverse=reverse, at=at
        )

    def _changes(self) -> Step:
        name, (start, end) = self._chance.choice([*NAMES, None]), self._range()
        starts: list[Since] = [0, "beginning", "now", self._moment(), moment_of(self._moment())]
        since = self._chance.choice(starts)
        before_images, heartbeats = self._chance.choice([False, True]), self._chance.choice([False, True])
        if name is None:
            return lambda site: site.changes(since=since, before_images=before_images, heartbeats=heartbeats)
        return lambda site: site.changes(
            name,
            since=since,
            start_key=start,
            end_key=end,
            before_images=before_images,
            heartbeats=heartbeats,
        )

    def _split(self) -> Step:
        name, key = self._name(), self._key()
        return lambda site: site.split(name, key)

    def _merge(self) -> Step:
        place = self._chance.random()

        def merge(site: Site) -> object:
            ids = [partition.id for partition in site.partitions()]
            index = int(place * len(ids))
            return site.merge(ids[index - 1], ids[index])

        return merge

    def _heartbeat(self) -> Step:
        return lambda site: site.heartbeat()

    def _collect(self) -> Step:
        return lambda site: site.collect_garbage()

    def _hold(self) -> Step:
        name, version = self._chance.choice(["one", "two"]), self._moment()
        namespace = self._chance.choice([None, *NAMES])
        if self._chance.random() < 0.5:
            return lambda site: site.release_safe_point(name)
        return lambda site: site.hold_safe_point(
            name, version, namespace=namespace, lifetime=timedelta(seconds=30)
        )

    def _drop(self) -> Step:
        name, is_sure = self._name(), self._chance.random() < 0.1

        def drop(site: Site) -> object:
            if is_sure:
                site.drop_namespace(name)
                site.create_namespace(name, retention=RETENTION[name])
            return site.namespaces()

        return drop

    def _update(self) -> Step:
        name, ttl = self._name(), self._chance.choice([None, None, None, timedelta(seconds=20)])
        return lambda site: site.update_namespace(name, ttl=ttl).settings

    def _facts(self) -> Step:
        return lambda site: (
            [(part.id, part.range, part.writes, part.bytes_written) for part in site.partitions()],
            site.safe_points(),
            site.statistics().namespaces,
            site.statistics().garbage,
            site.statistics().changes,
            site.statistics().commits,
        )


class HistoryContract(SiteContractBase):
    """Whatever is done, in whatever order, by however many."""

    @pytest.mark.parametrize("seed", range(3))
    def test_any_history_has_the_outcomes_of_a_site_of_this_process(
        self, site: Site, time: SimulatedTime, seed: int
    ) -> None:
        model_time = SimulatedTime(START_MS)
        with self.open_model(model_time) as model:
            history = History(seed)
            for name in NAMES:
                for each in (site, model):
                    each.create_namespace(name, retention=RETENTION[name])
            for number in range(STEPS):
                passes_ms, step = history.draw()
                time.advance(passes_ms)
                model_time.advance(passes_ms)
                expected, found = outcome_of(partial(step, model)), outcome_of(partial(step, site))
                assert found == expected, f"step {number}: {found}\n    instead of {expected}"
                assert type(found) is type(expected)
                history.note(found)

    # Threads

    def test_threads_read_what_they_write(self, site: Site, users: Namespace) -> None:
        def work(number: int) -> None:
            mine = b"%d/" % number
            for step in range(12):
                users.put(mine + b"one", b"%d" % step)
                assert users.get(mine + b"one") == b"%d" % step
                rows = {mine + b"many-%d" % index: b"%d" % step for index in range(5)}
                users.put_many(rows)
                assert users.get_many(rows) == list(rows.values())
                assert dict(users.scan(prefix=mine)) == {mine + b"one": b"%d" % step, **rows}
                assert users.delete_range(prefix=mine + b"many") == 5
                users.delete(mine + b"one")
                assert list(users.scan(prefix=mine)) == []
            with users.writer(batch_records=7) as writer:
                for step in range(50):
                    writer.put(mine + b"%02d" % step, b"x")
            assert len(list(site.changes("users", prefix=mine))) == 12 * (1 + 5 + 5 + 1) + 50

        run_threads(*(partial(work, number) for number in range(THREADS)))
        assert len(list(users.scan())) == THREADS * 50

    def test_of_threads_that_compare_and_set_one_at_a_time_succeeds(self, users: Namespace) -> None:
        users.put(b"count", b"0")

        def count() -> None:
            for _ in range(10):
                while True:
                    present = users.get(b"count")
                    assert present is not None
                    if users.compare_and_set(b"count", present, b"%d" % (int(present) + 1)):
                        break

        run_threads(*[count] * THREADS)
        assert users.get(b"count") == b"%d" % (THREADS * 10)

    def test_threads_that_write_read_follow_and_reshape_disturb_nobody(
        self, site: Site, users: Namespace
    ) -> None:
        site.split("users", b"m")
        done = Event()
        followed: list[Change] = []

        def write(seed: int) -> None:
            for step in range(40):
                value = b"%d/%d" % (seed, step)
                users.put_many({b"n": value, b"o": value, b"own-%d" % seed: value})

        def write_all() -> None:
            try:
                run_threads(*(partial(write, seed) for seed in range(4)))
            finally:
                users.put(b"last", b"x")
                done.set()

        def scan() -> None:
            while not done.is_set():
                at = site.now()
                rows = dict(users.scan(at=at))
                assert rows.get(b"n") == rows.get(b"o")
                assert dict(users.scan(at=at, reverse=True)) == rows

        def follow() -> None:
            following: Iterator[Change] = site.changes("users", follow=True)
            for change in following:
                followed.append(change)
                if change.key == b"last":
                    return

        def reshape() -> None:
            chance = Random(1)
            while not done.is_set():
                ids = [partition.id for partition in site.partitions()]
                if len(ids) > 2:
                    site.merge(ids[-2], ids[-1])
                else:
                    # Never between the keys that are written and read together.
                    site.split("users", b"own-%d" % chance.randrange(4))
                # A write may be sent on a hundred times, and no more: let some get through.
                seen = len(followed)
                wait_until(lambda seen=seen: done.is_set() or len(followed) > seen, "nobody writes")  # type: ignore[misc]

        run_threads(write_all, scan, scan, follow, reshape)
        assert followed == list(site.changes("users"))
        assert len(followed) == 4 * 40 * 3 + 1
        assert dict(users.scan()) == state_after((change.key, change.value) for change in followed)
