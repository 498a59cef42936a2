"""Data sets that are published at several sites, held against a plain model of what all of them must hold."""

from collections.abc import Callable, Mapping
from random import Random

import pytest
from tests.replication.support_links import IDS, Mesh
from tests.sizes import only

from floodmark.codec.ordered import encode_namespace
from floodmark.codec.values import encode_value
from floodmark.divergence.comparing import Lag, compare_keys
from floodmark.divergence.rules import Side
from floodmark.links.bringing import bring_data_sets
from floodmark.links.steps import run_step
from floodmark.model.errors import PublicationConflict, VersionCollected
from floodmark.model.partition import GenerationStream
from floodmark.model.version import VERSION_MAX

KEYS = [b"%02d" % number for number in range(10)]
Stamp = tuple[int, int]
Pairs = dict[bytes, bytes]


class World:
    """Three sites with links between them, and a plain account of all changes and data sets."""

    def __init__(self, seed: int) -> None:
        self.random = Random(seed)
        self.mesh = Mesh(*IDS)
        # By key, the stamp and the value of each change; and each data set with the stamp of its rows.
        self.changes: dict[bytes, list[tuple[Stamp, bytes | None]]] = {key: [] for key in KEYS}
        self.published: list[tuple[Stamp, Pairs]] = [((0, 0), {})]

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

    def publish(self) -> None:
        """Publish at all sites, or at all but some that are away; the publisher may die between two swaps."""
        names = self.random.sample(list(IDS), self.random.choice([3, 3, 2, 1]))
        first, *_ = names
        base = self.mesh[first].host.versions.now()
        base -= self.random.choice([0, 0, self.random.randrange(3 << 18)])
        rows = dict.fromkeys(self.random.sample(KEYS, self.random.randrange(len(KEYS))), b"set %d" % base)
        loading: dict[str, int] = {}
        try:
            for name in names:
                generations = self.mesh[name].host.generations
                loading[name] = generations.begin_generation("users", base, "model", IDS[first]).number
        except (VersionCollected, PublicationConflict):
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
            self.mesh[name].host.generations.swap_generation("users", number, 1)
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
            self.mesh.beat()
            for source in IDS:
                for target in IDS:
                    if source != target:
                        self.copy(source, target)
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
    monkeypatch.setattr("floodmark.links.bringing._has_all", lambda *_: True)
    run_until_it_fails()


def test_the_model_catches_sites_with_different_data_sets_that_are_compared(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("floodmark.divergence.comparing.Side", lambda *parts: Side(*parts[:-1]))
    run_until_it_fails()


def test_the_model_catches_a_link_that_brings_no_data_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(f"{__name__}.bring_data_sets", lambda *_: None)
    run_until_it_fails()
