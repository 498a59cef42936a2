"""Readers at a site of several nodes go on over swaps, while others write at all nodes, and miss nothing."""

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from random import Random
from threading import Event
from typing import Any, Final

import pyarrow.dataset
import pytest
from tests.replication.support_links import open_one
from tests.site.support_swaps import KEYS, Row, State, Way, World, link, linked_world, row_of, swapping_world
from tests.site.test_feeds_over_swaps import ending_round
from tests.sizes import only

from floodmark import ChangeType, Resolved, Site
from floodmark.codec.ordered import encode_key
from floodmark.divergence.comparing import Drift, compare_keys
from floodmark.engine import MemoryEngine
from floodmark.feed.named.feeds import FeedState, SinkOptions
from floodmark.feed.named.runner import FeedRunner
from floodmark.feed.subscription.consumer import SubscriptionOptions
from floodmark.model.errors import GenerationSwapped, InvalidArgument
from floodmark.model.version import Version
from floodmark.partition import FAMILIES
from floodmark.partition.families import DATA
from floodmark.testing.clock import SimulatedTime
from floodmark.testing.simulation.faults import plant

PLACES: Final = ("1", "2", "client")
RESTARTS: Final = 20
# Time passes quickly here, and leases are renewed by real time.
LEASE_SECONDS: Final = 3_600
ONCE: Final = SubscriptionOptions(follow=False, background=False, lease_seconds=LEASE_SECONDS)
WAYS = pytest.mark.parametrize("way", ["difference", "snapshot", "fail"])
SEEDS = pytest.mark.parametrize("seed", only([0], range(4), range(4, 10)))


@pytest.fixture
def world(seed: int) -> Iterator[World]:
    with swapping_world(seed) as world:
        yield world


def follow(world: World, site: Site, way: Way, seed: int) -> list[Row]:
    """Follow all changes, and begin again at the last marker now and then; behind a swap, if that fails."""
    random, restarts, got, fresh = Random(seed), RESTARTS, list[Row](), list[Row]()
    place: Any = world.before
    while True:
        stream: Any = site.changes(
            "users", since=place, follow=True, resolved_markers=True, on_generation=way
        )
        try:
            for item in stream:
                if not isinstance(item, Resolved):
                    fresh.append(row_of(item))
                else:
                    got, fresh, place = got + fresh, [], item
                    if item.snapshot is None and world.has_ended(item.version):
                        return got
                if restarts and random.random() < 0.05:
                    restarts, fresh = restarts - 1, []
                    break
        except GenerationSwapped as error:
            assert way == "fail"
            got, fresh, place = got + fresh, [], error.details["oldest"]
        finally:
            stream.close()


@WAYS
@SEEDS
def test_streams_at_all_nodes_get_everything_once(world: World, way: Way, seed: int) -> None:
    got: dict[str, list[Row]] = {}

    def read(place: str) -> None:
        got[place] = follow(world, world.site(place), way, seed)

    world.run(*(partial(read, place) for place in PLACES))
    for place in PLACES:
        world.check(got[place], way)


def consume(world: World, site: Site, name: str, way: Way, seed: int) -> list[Row]:
    """Acknowledge everything in sessions that leave some for later ones; over a swap, if it fails there."""
    random, done, positions, present = Random(seed), list[Row](), set(), way
    while True:
        is_last = world.ended.is_set()
        with site.subscribe(name, "users", on_generation=present, options=ONCE, holder="me") as subscription:
            taken, needs_all = [], is_last or present != way
            try:
                for delivery in subscription:
                    taken.append(delivery)
                    if not needs_all and random.random() < 0.05:
                        break
                present = way
            except GenerationSwapped:
                needs_all, present = True, "difference"
            versions = [delivery.change.version for delivery in taken]
            assert versions == sorted(versions), "the order is broken"
            for delivery in taken if needs_all else random.sample(taken, len(taken) // 2):
                delivery.acknowledge()
                assert delivery.position not in positions, "a change that was acknowledged came again"
                positions.add(delivery.position)
                done.append(row_of(delivery.change))
            subscription.flush()
            if is_last and world.last in {row.version for row in done}:
                assert subscription.statistics().backlog == 0
                return sorted(done)
        Event().wait(0.01)


@WAYS
@SEEDS
def test_consumers_at_all_nodes_acknowledge_everything_once(world: World, way: Way, seed: int) -> None:
    got: dict[str, list[Row]] = {}

    def work(place: str) -> None:
        got[place] = consume(world, world.site(place), f"indexer-{place}", way, seed)

    for place in PLACES:
        world.site(place).subscribe(f"indexer-{place}", "users", on_generation=way, options=ONCE).close()
    world.run(*(partial(work, place) for place in PLACES))
    for place in PLACES:
        world.check(got[place], "difference" if way == "fail" else way)


def run_feed(world: World, site: Site, name: str, seed: int) -> None:
    """Run a feed by runners that end after a few steps, until it has everything."""
    random = Random(seed)
    while True:
        target = world.last
        runner = FeedRunner(
            site.host.feeds,
            name,
            ending_round(site, random.randrange(2, 12)),
            holder="me",
            lease_seconds=LEASE_SECONDS,
            time_source=site.host.physical_ms,
            target=target,
            stopping=None if target is not None else world.ended,
        )
        try:
            assert runner.run() is FeedState.NORMAL
            if target is not None:
                return
        except InvalidArgument:
            assert site.feeds.show(name).state is FeedState.ERROR
        except GenerationSwapped:
            site.feeds.update(name, on_generation="difference")
            site.feeds.resume(name)


def rows_of(path: Path) -> list[Row]:
    table: Any = pyarrow.dataset.dataset(path, format="parquet").to_table()
    return sorted(
        Row(row["_commit_version"], row["key"], row["_change_type"], row["value"])
        for row in table.to_pylist()
    )


@WAYS
@SEEDS
def test_feeds_at_all_nodes_deliver_everything_once(
    world: World, way: Way, seed: int, tmp_path: Path
) -> None:
    options = SinkOptions(batch_records=20, concurrency=1)
    ranges = {"1": 1, "2": 2, "client": 1}
    for place in PLACES:
        world.site(place).feeds.create(
            f"lake-{place}",
            "users",
            f"parquet:{tmp_path}/{place}",
            since="beginning",
            ranges=ranges[place],
            options=options,
            on_generation=way,
        )
    world.run(*(partial(run_feed, world, world.site(place), f"lake-{place}", seed) for place in PLACES))
    for place in PLACES:
        rows = rows_of(tmp_path / place)
        if ranges[place] > 1:
            # Each range has a row of its own at a swap.
            swaps = {row for row in rows if row.type == ChangeType.GENERATION}
            rows = sorted([*swaps, *(row for row in rows if row not in swaps)])
        world.check(rows, "difference" if way == "fail" else way)
        checks = world.site(place).feeds.show(f"lake-{place}").checked
        assert (checks.intervals_wrong, checks.intervals_checked > 0) == (0, True)


def find_drifts(world: World, *sites: Site) -> list[bytes]:
    """The keys in which sites differ other than by lag."""
    hosts = [site.host for site in sites]
    written = {row.key for row in world.model.changes}
    keys = {*KEYS, *written, *(key for swap in world.model.swaps for key in swap.rows)}
    return [each.key for each in compare_keys(hosts, "users", sorted(keys)) if isinstance(each, Drift)]


@SEEDS
def test_a_site_of_several_nodes_is_compared_with_a_site_of_one(time: SimulatedTime, seed: int) -> None:
    with open_one(MemoryEngine(FAMILIES), "rome", time) as rome, linked_world(rome, time, seed) as world:
        comparisons = list[str]()

        def compare(place: str) -> None:
            while not world.ended.is_set():
                assert find_drifts(world, world.site(place), rome) == []
                comparisons.append(place)

        world.run(partial(link, world), *(partial(compare, place) for place in PLACES))
        assert {*comparisons} == {*PLACES}
        world.tick()
        for site in (*map(world.site, PLACES), rome):
            assert dict(site.namespace("users").scan()) == world.model.merged(world.client.id)
            assert find_drifts(world, site, rome if site is not rome else world.client) == []
            assert [each.intervals_wrong for each in site.replication().links] == [0]
        # So that it would have been found.
        present = world.client.host.namespaces.find_namespace("users").present
        assert world.last is not None
        world.cluster.engine.write([(DATA, encode_key(present.id, b"last", world.last), None)])
        assert find_drifts(world, world.client, rome) == [b"last"]


@pytest.mark.parametrize("seed", [0])
@pytest.mark.parametrize("fault", ["replay-late", "swap-unannounced"])
def test_the_model_catches_a_planted_fault(world: World, fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    choose = world.data_set

    def data_set(number: int) -> tuple[Version, State]:
        chosen = choose(number)
        # A change above the base that no other one hides.
        world.put_above(b"once")
        world.wait_resolved()
        return chosen

    monkeypatch.setattr(world, "data_set", data_set)
    with plant(fault):
        world.run(turns="p")
        stream = world.client.changes("users", since=world.before, on_generation="difference")
        with pytest.raises(AssertionError):
            world.check([row_of(change) for change in stream], "difference")
