"""What readers count adds up, wherever their reports end, and however many heartbeats they leave out."""

from bisect import bisect_right
from collections.abc import Callable, Sequence
from functools import cache
from itertools import pairwise
from random import Random
from typing import Final, NamedTuple

import pytest
from msgspec.structs import replace
from tests.feed.support_feeds import SITE_ID, USERS, World
from tests.sizes import only

from floodmark.accounting.account import Doubt
from floodmark.accounting.checks import Checks
from floodmark.accounting.counting import BEATS_MAX, Counting, go_on_with
from floodmark.feed.named.feeds import Feed, RangeProgress, check
from floodmark.model.change import NamespaceBeat, Tally
from floodmark.model.stream import ChangesRequest
from floodmark.model.version import Version

SECONDS: Final = 150

# From the versions that a range was to deliver to those that it did.
Deliver = Callable[[list[Version]], list[Version]]


class Past(NamedTuple):
    """A feed that has delivered nothing yet of what was written."""

    world: World
    feed: Feed
    # Of all commits and heartbeats.
    versions: list[Version]


@cache
def past() -> Past:
    """Some minutes of a site, in which its partitions were reshaped and not every second saw a write."""
    world, random = World(), Random(5)
    for key in (b"g", b"m", b"t"):
        world.split(key)
    feed = world.create(ranges=4)
    versions: list[Version] = []
    for second in range(SECONDS):
        for _ in range(random.choice((0, 0, 1, 3))):
            keys = [b"%c%d" % (letter, second) for letter in random.sample(b"ahnz", random.randrange(1, 5))]
            versions.append(world.put_many(keys))
        if second % 40 == 30:
            world.split(b"p%d" % second)
        world.time.advance(1_000)
        versions.append(world.node.heartbeat().version)
    return Past(world, feed, versions)


def deliver_all(versions: list[Version]) -> list[Version]:
    return versions


def report(world: World, part: RangeProgress, through: Version, deliver: Deliver) -> RangeProgress:
    """What a runner says that has delivered a range up to a version."""
    counting = Counting(part.checkpoint, site_id=SITE_ID, namespace=USERS)
    request = ChangesRequest(
        keys=part.keys, namespace=USERS, since=part.checkpoint, until=through, heartbeats=True
    )
    versions: list[Version] = []
    for batch in world.read(request):
        counting.read(batch)
        versions += batch.versions
    counting.deliver(deliver(versions), through)
    return replace(part, checkpoint=through, counted=counting.report()[1])


def go(feed: Feed, random: Random, deliver: Deliver = deliver_all) -> Checks:
    """Let the ranges of a feed go on, each as it likes, until all of them are at the end."""
    world, _, versions = past()
    stride = random.choice((10, 60, len(versions)))
    while feed.checkpoint < versions[-1]:
        reports: list[RangeProgress] = []
        for part in random.sample(feed.ranges, random.randrange(1, 5)):
            place = bisect_right(versions, part.checkpoint) + random.randrange(stride)
            through = versions[min(place, len(versions) - 1)]
            if through > part.checkpoint:
                reports.append(report(world, part, through, deliver))
        feed = check(feed, reports, 0)
        assert feed.checks is not None
        assert len([beat for beat in feed.checks.beats if beat.log is None]) <= BEATS_MAX
        assert all(len(part.counted.entries) <= BEATS_MAX + 1 for part in feed.ranges if part.counted)
    assert feed.checks is not None
    return feed.checks


@pytest.mark.parametrize("seed", only(range(5), range(20)))
def test_wherever_reports_end_they_add_up(seed: int) -> None:
    checks = go(past().feed, Random(seed))
    assert (checks.wrong, checks.unchecked, checks.reason) == (0, 1, Doubt.FIRST)
    assert checks.checked > BEATS_MAX // 4


@pytest.mark.parametrize("times", [0, 2])
@pytest.mark.parametrize("seed", only(range(5), range(10)))
def test_wherever_reports_end_what_goes_astray_is_named(seed: int, times: int) -> None:
    random = Random(seed)
    astray = random.choice(past().versions[20:-1])
    missed = False

    def deliver(versions: list[Version]) -> list[Version]:
        nonlocal missed
        missed = missed or astray in versions
        return [version for version in versions for _ in range(times if version == astray else 1)]

    checks = go(past().feed, random, deliver)
    assert [finding.since < astray <= finding.through for finding in checks.findings] == [True] * missed


def test_what_was_counted_of_ranges_that_are_gone_leaves_intervals_unchecked() -> None:
    world = World()
    for key in (b"g", b"m", b"s"):
        world.split(key)
    slow, _, fast, _ = world.create(ranges=4).ranges
    ends: list[Version] = []
    for _ in range(8):
        world.put_many([b"a", b"h", b"n", b"z"])
        world.time.advance(1_000)
        ends.append(world.node.heartbeat().version)
    world.store.acquire("copy", "runner", 10)

    def reach(through: dict[int, Version]) -> Checks:
        parts = [part for part in world.store.find("copy").ranges if part.id in through]
        reports = [report(world, part, through[part.id], deliver_all) for part in parts]
        checks = world.store.report("copy", "runner", reports, None).checks
        assert checks is not None
        return checks

    reach({slow.id: ends[1], slow.id + 1: ends[1], fast.id: ends[5], fast.id + 1: ends[5]})
    *_, left, right = world.node.map.partitions
    world.node.reshaping.merge(left.id, right.id)
    feed = world.store.rebalance("copy")
    assert [part.checkpoint for part in feed.ranges] == [ends[1], ends[1], ends[5]]
    checks = reach({part.id: ends[-1] for part in feed.ranges})
    assert (checks.wrong, checks.reason) == (0, Doubt.RECUT)
    # What came behind the new range's beginning is checked again.
    assert checks.account.counted_since > ends[5]
    assert checks.checked == 2


def beats(*ends: Version) -> list[NamespaceBeat]:
    """Heartbeats that say how many versions there are from one end to the next."""
    return [
        NamespaceBeat(
            site=1,
            node=0,
            version=through,
            wall_ms=0,
            since=since,
            through=through,
            all=Tally(through - since),
        )
        for since, through in pairwise(ends)
    ]


@pytest.mark.parametrize(
    ("known", "told", "expected"),
    [
        ((1, 2, 3), (3, 4), (1, 2, 3, 4)),
        ((1, 2, 3), (1, 2, 3, 4), (1, 2, 3, 4)),
        ((1, 2, 3), (1, 3, 5), (1, 2, 3, 5)),
        ((1, 2, 3, 4), (1, 2, 5), (1, 2, 5)),
        ((1, 2, 3, 4), (2, 6), (1, 2, 6)),
        ((1, 4), (1, 2), (1, 4)),
    ],
)
def test_readers_who_have_joined_different_heartbeats_agree(
    known: Sequence[Version], told: Sequence[Version], expected: Sequence[Version]
) -> None:
    assert go_on_with(beats(*known), beats(*told), known[0]) == beats(*expected)


def test_where_readers_share_no_end_nothing_is_proven() -> None:
    *_, last = go_on_with(beats(1, 5), beats(3, 7), 1)
    assert (last.since, last.through) == (0, 7)
