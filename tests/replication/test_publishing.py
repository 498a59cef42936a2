"""Data sets that are published at several sites, held against a plain model of what all of them must hold."""

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from random import Random
from typing import Any

import pytest
from tests.replication.support_links import IDS, Mesh
from tests.sizes import only

from floodmark.codec.ordered import NAMESPACE_BYTES, encode_namespace
from floodmark.codec.values import encode_value
from floodmark.divergence.comparing import Lag, compare_keys
from floodmark.divergence.rules import Side
from floodmark.host.ports import Host
from floodmark.links.bringing import bring_data_sets
from floodmark.links.steps import run_step
from floodmark.model.errors import LinkStalled, PublicationConflict, VersionCollected
from floodmark.model.partition import GenerationStream
from floodmark.model.version import VERSION_MAX
from floodmark.site.earlier import Arrived, earlier_rows, wait_arrived

KEYS = [b"%02d" % number for number in range(10)]
Stamp = tuple[int, int]
Pairs = dict[bytes, bytes]


@dataclass
class Era:
    """The time of one data set at a site; when it has ended, what had come by then, by site."""

    base: Stamp
    rows: Pairs
    number: int
    known: dict[int, int] = field(default_factory=dict)


class World:
    """Three sites with links between them, and a plain account of all changes and data sets."""

    def __init__(self, seed: int) -> None:
        self.random = Random(seed)
        self.mesh = Mesh(*IDS)
        # By key, the stamp and the value of each change; and each data set with the stamp of its rows.
        self.changes: dict[bytes, list[tuple[Stamp, bytes | None]]] = {key: [] for key in KEYS}
        self.published: list[tuple[Stamp, Pairs]] = [((0, 0), {})]
        self.eras: dict[str, list[Era]] = {name: [Era((0, 0), {}, 1)] for name in IDS}
        self.census: Counter[str] = Counter()

    def state(self, name: str) -> Pairs:
        """What a site must hold: its last data set, and all changes since of which it knows."""
        host = self.mesh[name].host
        known = {IDS[name]: VERSION_MAX, **self.mesh.watermark(name)}
        present = host.namespaces.find_namespace("users").present
        newest, rows = next(each for each in self.published if each[0] == (present.base, present.origin))
        state = dict(rows)
        for key, changes in self.changes.items():
            found = [each for each in changes if each[0][0] <= known.get(each[0][1], 0)]
            stamp, value = max(found, key=lambda each: each[0], default=((0, 0), None))
            if stamp[0] > newest[0]:
                state.pop(key, None)
                if value is not None:
                    state[key] = value
        return state

    # Steps

    def write(self) -> None:
        name, key = self.random.choice(list(IDS)), self.random.choice(KEYS)
        value = None if self.random.random() < 0.3 else b"%d" % self.random.randrange(1_000)
        version = self.mesh.put(name, key, value)
        if version:
            self.changes[key].append(((version, IDS[name]), value))

    def step(self) -> None:
        source, target = self.random.sample(list(IDS), 2)
        if self.random.random() < 0.5:
            self.mesh.beat(source)
        self.copy(source, target)

    def copy(self, source: str, target: str) -> None:
        """A step of a link, as its planner takes it."""
        step = self.mesh.plan(source, target)
        bring_data_sets(self.mesh[source].host, self.mesh[target].host, step)
        run_step(self.mesh[source].host, self.mesh[target].host, step)
        self.note_swap(target)

    def copy_all(self, names: Sequence[str]) -> None:
        """A heartbeat at some sites, and a step of every link between them."""
        self.mesh.beat(*names)
        for source in names:
            for target in names:
                if source != target:
                    self.copy(source, target)

    def note_swap(self, name: str) -> None:
        """Take note of the data set that a site reads now."""
        present, last = self.mesh[name].host.namespaces.find_namespace("users").present, self.eras[name][-1]
        if present.number != last.number:
            assert present.since is not None
            last.known = {IDS[name]: present.since - 1, **self.mesh.watermark(name, present.since - 1)}
            stamp = present.base, present.origin
            rows = next(rows for each, rows in self.published if each == stamp)
            self.eras[name].append(Era(stamp, rows, present.number))

    def publish(self) -> None:
        """Publish at all sites, or at all but some that are away."""
        names = self.random.sample(list(IDS), self.random.choice([3, 3, 2, 1]))
        base = self.mesh[names[0]].host.versions.now()
        base -= self.random.choice([0, 0, self.random.randrange(3 << 18)])
        rows = dict.fromkeys(self.random.sample(KEYS, self.random.randrange(len(KEYS))), b"set %d" % base)
        self.publish_at(names, base, lambda: rows)

    def rollback(self) -> None:
        """Go back at all sites, or at all but some that are away."""
        names = self.random.sample(list(IDS), self.random.choice([3, 3, 2]))
        first, away = names[0], IDS.keys() - names
        kept = self.eras[first][:-1]
        if not kept:
            return
        number = self.random.choice(kept[-2:]).number
        if self.random.random() < 0.7:
            self.copy_all(names)
            self.copy_all(names)
        try:
            arrived = wait_arrived([self.mesh[name].host for name in names], "users", timedelta(0), away)
        except LinkStalled:
            self.census["waits"] += 1
            return

        def read_rows() -> Pairs:
            expected = self.go_back(first, number, arrived, away)
            found: Pairs = {}
            for pairs in earlier_rows(self.mesh[first].host, arrived, number, lambda *_: None):
                found |= {key[NAMESPACE_BYTES:]: stored for key, stored in pairs.items()}
            assert found == {key: encode_value(value) for key, value in expected.items()}
            self.census["rolled back"] += 1
            return expected

        self.publish_at(names, arrived.base, read_rows)

    def go_back(self, name: str, number: int, arrived: Arrived, away: Collection[str]) -> Pairs:
        """What a data set must hold that takes an earlier one and all changes since."""
        eras = self.eras[name]
        place = next(place for place, era in enumerate(eras) if era.number == number)
        # Of sites that are away only what has come; of the others, all that they have written up to the base.
        has = self.mesh.watermark(name, arrived.resolved)
        near = {IDS[each]: max(has.get(IDS[each], 0), arrived.base) for each in IDS if each not in away}
        known = has | near | {IDS[name]: arrived.resolved}
        state, stamps, had = dict(eras[place].rows), dict.fromkeys(KEYS, (0, 0)), dict[int, int]()
        for era in eras[place:]:
            until = known if era is eras[-1] else era.known
            for key, changes in self.changes.items():
                for stamp, value in changes:
                    comes = had.get(stamp[1], 0) < stamp[0] <= until.get(stamp[1], 0)
                    if comes and stamp[0] > era.base[0] and stamp > stamps[key]:
                        stamps[key] = stamp
                        state.pop(key, None)
                        if value is not None:
                            state[key] = value
            had = until
        return state

    def publish_at(self, names: list[str], base: int, read_rows: Callable[[], Pairs]) -> None:
        """Publish rows at some sites; the publisher may die between two swaps."""
        first, *_ = names
        loading: dict[str, int] = {}
        try:
            for name in names:
                generations = self.mesh[name].host.generations
                loading[name] = generations.begin_generation("users", base, "model", IDS[first]).number
            rows = read_rows()
        except (VersionCollected, PublicationConflict) as error:
            self.census[type(error).__name__] += 1
            self.drop_left()
            return
        if self.random.random() < 0.3:
            # It dies before everything is loaded, and may go on without the site at which it was.
            self.load(names[-1], loading.pop(names[-1]), dict(list(rows.items())[::2]))
            if self.random.random() < 0.5 or not loading:
                return
        for name, number in loading.items():
            self.load(name, number, rows)
            if self.random.random() < 0.5:
                self.write()
        self.published.append(((base, IDS[first]), rows))
        for name, number in loading.items():
            self.mesh[name].host.generations.swap_generation("users", number, self.random.choice([1, 1, 2]))
            self.note_swap(name)
            if self.random.random() < 0.2:
                return
            if self.random.random() < 0.5:
                self.step()
                self.check()

    def drop_left(self) -> None:
        """Drop what publishers have left, as garbage collection does after an hour."""
        for site in self.mesh.sites.values():
            left = site.host.namespaces.find_namespace("users").loading
            if left is not None:
                site.host.generations.drop_generation("users", left.number)

    def load(self, name: str, number: int, rows: Pairs) -> None:
        host = self.mesh[name].host
        namespace = host.namespaces.find_namespace("users").id
        prefix, stream = encode_namespace(namespace), host.write_stream(GenerationStream(namespace, number))
        for key, value in rows.items():
            stream.send({prefix + key: encode_value(value)}).result()

    def collect(self) -> None:
        self.mesh.time.advance(self.random.choice([1_000, 60_000]))
        self.mesh[self.random.choice(list(IDS))].host.retention.collect_garbage()

    # Checks

    def check(self) -> None:
        """Look at all sites, each of which may lag."""
        for name in IDS:
            assert dict(self.mesh[name].namespace("users").scan()) == self.state(name), name
        assert all(isinstance(each, Lag) for each in self.compare())

    def compare(self) -> list[object]:
        """What a comparison of all sites finds."""
        return list(compare_keys([site.host for site in self.mesh.sites.values()], "users", KEYS))

    def finish(self) -> None:
        """Let the links run until all is copied, and look at all sites."""
        for number in range(6):
            if number == 2:
                self.drop_left()
            self.copy_all(list(IDS))
        self.check()
        assert not self.compare()
        newest = max(stamp for stamp, _ in self.published)
        for name in IDS:
            present = self.mesh[name].host.namespaces.find_namespace("users").present
            assert (present.base, present.origin) == newest
            # All that there is has come.
            assert self.state(name) == self.state("oslo")

    def run(self, steps: int) -> None:
        moves: Mapping[Callable[[], None], int] = {
            self.write: 10,
            self.step: 10,
            self.publish: 2,
            self.rollback: 2,
            self.collect: 1,
        }
        for _ in range(steps):
            self.mesh.time.advance(self.random.randrange(3))
            self.random.choices(list(moves), list(moves.values()))[0]()
            self.check()
        self.finish()


@pytest.mark.parametrize("seed", only([0, 1, 2], range(6)))
def test_all_sites_come_to_hold_the_last_data_set_and_what_was_written_since(seed: int) -> None:
    World(seed).run(60)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(100, 140))
def test_all_sites_come_to_hold_the_same_in_many_runs(seed: int) -> None:
    World(seed).run(120)


def test_the_model_goes_back_and_waits_for_what_has_not_arrived() -> None:
    census: Counter[str] = Counter()
    for seed in range(4):
        (world := World(seed)).run(60)
        census += world.census
    assert census["rolled back"] > 1
    assert census["waits"] > 1


def test_a_second_data_set_of_one_base_is_refused_wherever_sites_could_not_tell_them_apart() -> None:
    """Also to a publisher that goes on after a swap; another publication with another base goes on."""
    mesh = Mesh("oslo", "rome")
    oslo, rome = mesh["oslo"].generations, mesh["rome"]
    base = mesh.put("oslo", b"01", b"old")
    mesh.exchange()
    nightly: dict[str, Any] = {"base": base, "publisher": "nightly"}
    oslo.publish("users", {b"01": b"first"}, **nightly, others=[rome])
    calls: list[tuple[Callable[..., object], dict[str, Any]]] = [
        (oslo.publish, {"without": ["rome"]}),
        (oslo.publish, {"others": [rome]}),
        (rome.generations.publish, {"others": [mesh["oslo"]]}),
    ]
    for publish, rest in calls:
        with pytest.raises(PublicationConflict, match=r"has the base .* publish data of a later moment"):
            publish("users", {b"02": b"second"}, **nightly, **rest)
    oslo.publish("users", {b"02": b"second"}, base=base + 1, publisher="nightly", without=["rome"])
    mesh.exchange()
    bring_data_sets(mesh["oslo"].host, rome.host, mesh.plan("oslo", "rome"))
    assert [dict(site.namespace("users").scan()) for site in mesh.sites.values()] == [{b"02": b"second"}] * 2


def test_a_site_by_itself_publishes_data_sets_of_one_base() -> None:
    site = Mesh("oslo", topology=False)["oslo"]
    base = site.namespace("users").put(b"01", b"old")
    for rows in ({b"01": b"first"}, {b"02": b"second"}):
        site.generations.publish("users", rows, base=base)
        assert dict(site.namespace("users").scan()) == rows


# Canaries


def run_until_it_fails() -> None:
    with pytest.raises(AssertionError):
        run_many()


def run_many() -> None:
    for seed in range(20):
        World(seed).run(60)


def test_the_model_catches_older_changes_that_come_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("floodmark.partition.partition.published_stamps", lambda *_: None)
    run_until_it_fails()


def test_the_model_catches_a_replay_of_what_the_data_set_replaces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("floodmark.host.publishing.is_above", lambda *_: True)
    run_until_it_fails()


def test_the_model_catches_a_data_set_that_is_brought_before_the_changes_above_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("floodmark.links.bringing._find_awaited", lambda *_: None)
    run_until_it_fails()


def test_the_model_catches_a_rollback_that_forgets_newer_writes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("floodmark.site.earlier._changes", lambda *_: iter(()))
    run_until_it_fails()


def test_the_model_catches_a_rollback_to_a_base_above_what_has_arrived(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    wait = wait_arrived

    def wait_for_nobody(hosts: Sequence[Host], name: str, budget: timedelta, _: object) -> Arrived:
        return wait(hosts, name, budget, IDS)._replace(base=hosts[0].versions.resolved_version())

    monkeypatch.setattr(f"{__name__}.wait_arrived", wait_for_nobody)
    run_until_it_fails()


def test_the_model_catches_sites_with_different_data_sets_that_are_compared(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("floodmark.divergence.comparing.Side", lambda *parts: Side(*parts[:-1]))
    run_until_it_fails()


def test_the_model_catches_a_link_that_brings_no_data_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(f"{__name__}.bring_data_sets", lambda *_: None)
    run_until_it_fails()
