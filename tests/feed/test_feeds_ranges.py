"""Ranges of feeds along partitions: cutting them anew neither skips a change nor moves the checkpoint."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.feed.support_feeds import World, moved


@pytest.fixture
def world() -> World:
    return World()


def test_ranges_follow_the_partitions(world: World) -> None:
    assert [part.id for part in world.create("one").ranges] == [1]
    world.split(b"m")
    low, high = world.create("two").ranges
    assert low.keys.end == high.keys.start == b"\x00\x00\x01m"
    only = world.create("part", prefix=b"x").ranges
    assert [part.keys for part in only] == [(b"\x00\x00\x01x", b"\x00\x00\x01y")]


def test_rebalancing_follows_the_partitions_of_now(world: World) -> None:
    feed = world.create(ranges=3)
    world.split(b"m")
    world.split(b"t")
    balanced = world.store.rebalance("copy")
    assert [part.id for part in balanced.ranges] == [2, 3, 4]
    assert balanced.checkpoint == feed.checkpoint
    assert world.store.rebalance("copy") == balanced, "nothing has changed, so nothing is cut"


@given(data=st.data())
def test_the_checkpoint_does_not_jump_while_ranges_are_cut_anew(data: st.DataObject) -> None:
    """Splits, merges, reports and rebalancing in any order: it never goes back, and never passes a range."""
    world = World()
    world.create(ranges=3)
    world.store.acquire("copy", "runner", 30)
    # What has certainly been delivered, by key; the model that the checkpoint is held against.
    keys = [bytes([letter]) for letter in range(ord("a"), ord("z"))]
    delivered = dict.fromkeys(keys, world.store.find("copy").checkpoint)
    for _ in range(data.draw(st.integers(1, 12))):
        before = world.store.find("copy").checkpoint
        match data.draw(st.sampled_from(["split", "merge", "report", "rebalance"])):
            case "split":
                split_somewhere(world, data.draw(st.sampled_from(keys)))
            case "merge":
                merge_somewhere(world)
            case "report":
                version = world.put(b"a")
                part = data.draw(st.sampled_from(world.store.find("copy").ranges))
                world.store.report("copy", "runner", [moved(part, version)], None)
                for key in keys:
                    if part.keys.contains(b"\x00\x00\x01" + key):
                        delivered[key] = version
            case "rebalance":
                world.store.rebalance("copy")
                assert world.store.find("copy").checkpoint == before
        feed = world.store.find("copy")
        assert feed.checkpoint >= before
        for part in feed.ranges:
            inside = [delivered[key] for key in keys if part.keys.contains(b"\x00\x00\x01" + key)]
            assert part.checkpoint <= min(inside, default=part.checkpoint), "changes would be skipped"


def split_somewhere(world: World, key: bytes) -> None:
    qualified = b"\x00\x00\x01" + key
    if all(partition.range.start != qualified for partition in world.node.map.partitions):
        world.split(key)


def merge_somewhere(world: World) -> None:
    partitions = world.node.map.partitions
    if len(partitions) > 1:
        world.node.reshaping.merge(partitions[0].id, partitions[1].id)


def test_a_rebalance_is_told_to_the_runner_and_what_it_still_reports_of_the_old_ranges_is_void(
    world: World,
) -> None:
    world.create(ranges=2)
    held = world.store.acquire("copy", "runner", 30)
    world.split(b"m")
    balanced = world.store.rebalance("copy")
    late = [moved(part, world.put(b"a")) for part in held.ranges]
    assert world.store.report("copy", "runner", late, None).ranges == balanced.ranges
