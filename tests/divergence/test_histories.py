"""The walk through two histories finds what was lost or altered and written over since, and nothing else."""

from itertools import combinations
from random import Random

import pytest
from tests.divergence.worlds import Site, World

from floodmark.divergence import DifferenceKind, History, HistoryChange, walk_histories
from floodmark.model.change import Stamp
from floodmark.model.version import Version

STEPS = 60
SEEDS = 250


def change(version: Version, stamp: Stamp, *, key: bytes = b"ada", digest: int = 1) -> HistoryChange:
    return HistoryChange(version, key, stamp, digest)


def test_a_lost_change_is_found_though_it_was_overwritten() -> None:
    first, second = change(10, Stamp(10, 1)), change(20, Stamp(20, 1), digest=2)
    oslo = History("oslo", 1, [first, second], [(21, {2: 5})])
    rome = History("rome", 2, [second._replace(version=22)], [(15, {1: 12}), (25, {1: 21})])
    (found,) = walk_histories(oslo, rome)
    assert (found.key, found.stamp, found.kind) == (b"ada", Stamp(10, 1), DifferenceKind.LOST)
    assert (found.holder, found.other, found.version) == ("oslo", "rome", 10)
    assert walk_histories(rome, oslo) == [found]


def test_what_was_not_announced_may_still_come() -> None:
    oslo = History("oslo", 1, [change(10, Stamp(10, 1))], [(21, {2: 5})])
    assert walk_histories(oslo, History("rome", 2, [], [(15, {1: 9})])) == []
    assert walk_histories(oslo, History("rome", 2, [], [])) == []


def test_a_loser_is_not_lost() -> None:
    oslo = History("oslo", 1, [change(10, Stamp(10, 1))], [(21, {2: 5})])
    rome = History("rome", 2, [change(11, Stamp(11, 2))], [(15, {1: 12})])
    assert walk_histories(oslo, rome) == []


def test_what_came_after_it_was_announced_had_been_lost() -> None:
    oslo = History("oslo", 1, [change(10, Stamp(10, 1))], [(21, {2: 5})])
    rome = History("rome", 2, [change(30, Stamp(10, 1))], [(15, {1: 12})])
    assert [each.kind for each in walk_histories(oslo, rome)] == [DifferenceKind.LOST]


def test_what_was_there_before_the_history_begins_is_asked_for() -> None:
    oslo = History("oslo", 1, [change(10, Stamp(10, 1))], [(21, {2: 5})])
    asked: list[bytes] = []

    def newest(key: bytes) -> Stamp:
        asked.append(key)
        return Stamp(10, 1)

    assert walk_histories(oslo, History("rome", 2, [], [(15, {1: 12})], newest)) == []
    assert asked == [b"ada"]


@pytest.mark.parametrize(("origin", "holder"), [(1, "oslo"), (2, "rome"), (3, "oslo")])
def test_one_stamp_with_two_digests_was_altered_where_it_was_not_written(origin: int, holder: str) -> None:
    oslo = History("oslo", 1, [change(12, Stamp(10, origin), digest=1)], [])
    rome = History("rome", 2, [change(14, Stamp(10, origin), digest=2)], [])
    (found,) = walk_histories(oslo, rome)
    assert (found.kind, found.holder) == (DifferenceKind.ALTERED, holder)
    assert found.version == (12 if holder == "oslo" else 14)


def test_whole_records_are_not_compared_with_what_was_written_to_them() -> None:
    oslo = History("oslo", 1, [change(12, Stamp(10, 1), digest=1)], [])
    rome = History("rome", 2, [HistoryChange(14, b"ada", Stamp(10, 1), 2, exact=False)], [])
    assert walk_histories(oslo, rome) == []


def history_of(site: Site, since: Version) -> History:
    """What a site's change log and heartbeats say after a version."""
    noted = sorted(version for marks in site.marks.values() for version, _ in marks if version > since)

    def newest_before(key: bytes) -> Stamp | None:
        return max(
            (each.stamp for each in site.journal if each.key == key and each.version <= since), default=None
        )

    return History(
        str(site.id),
        site.id,
        [each for each in site.journal if each.version > since],
        [(version, site.mark(version)) for version in noted],
        newest_before,
    )


def test_nothing_is_found_where_nothing_was_lost_wherever_the_histories_begin() -> None:
    for seed in range(SEEDS):
        world = World(seed)
        world.live(STEPS)
        random = Random(seed)
        for left, right in combinations(world.sites, 2):
            since = [random.choice((0, random.randint(0, site.clock))) for site in (left, right)]
            found = walk_histories(history_of(left, since[0]), history_of(right, since[1]))
            assert found == [], f"seed {seed}"


def truly_lost(source: Site, target: Site) -> set[Stamp]:
    """What never came to a site that has announced it, and would have been stored there."""
    lost: set[Stamp] = set()
    came = {each.stamp for each in target.journal}
    for each in source.log:
        stamp = Stamp(each.version, source.id)
        announced = [version for version, through in target.marks[source.id] if through >= each.version]
        if stamp in came or not announced:
            continue
        known = [
            other.stamp
            for other in target.journal
            if other.key == each.key and other.version <= min(announced)
        ]
        if not known or max(known) < stamp:
            lost.add(stamp)
    return lost


def test_every_loss_that_nothing_newer_hid_is_found() -> None:
    total = 0
    for seed in range(SEEDS):
        world = World(seed, losses=0.2)
        world.live(STEPS)
        world.drain()
        for left, right in combinations(world.sites, 2):
            found = walk_histories(history_of(left, 0), history_of(right, 0))
            expected = truly_lost(left, right) | truly_lost(right, left)
            assert {each.stamp for each in found} == expected, f"seed {seed}"
            total += len(expected)
    assert total > 50
