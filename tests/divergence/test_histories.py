"""The walk through two histories finds what was lost or altered and written over since, and nothing else."""

from collections import Counter
from functools import reduce
from itertools import combinations
from random import Random

import pytest
from tests.divergence.worlds import KEYS, Site, World

from floodmark.divergence.histories import DifferenceKind, History, HistoryChange, walk_histories
from floodmark.divergence.rules import PartName
from floodmark.merge.states import merge_states
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


def merged(version: Version, stamp: Stamp, *parts: PartName) -> HistoryChange:
    """A change that has written some parts of a record; None deletes."""
    return HistoryChange(version, b"ada", stamp, 1, parts=dict.fromkeys(parts, stamp))


@pytest.mark.parametrize(
    ("written", "known", "is_lost"),
    [
        (["city"], ["name"], True),
        (["city"], ["city"], False),
        (["city"], [None], False),
        (["city", "name"], ["name"], True),
        (["city", "name"], ["name", None], False),
        ([None], ["city"], True),
        ([None, "city"], [None, "name"], False),
        ([1], [2], True),
        ([1], [None], False),
        ([None], [2], True),
    ],
)
def test_only_the_same_part_or_a_delete_hides_what_was_lost(
    written: list[PartName], known: list[PartName], is_lost: bool
) -> None:
    lost, newer = merged(9, Stamp(9, 1), *written), merged(10, Stamp(10, 2), *known)
    last = merged(20, Stamp(20, 1), None, "name")
    oslo = History("oslo", 1, [lost, newer._replace(version=11), last], [(30, {2: 30})])
    rome = History("rome", 2, [newer, last._replace(version=21)], [(12, {1: 9}), (31, {1: 29})])
    assert [each.stamp for each in walk_histories(oslo, rome)] == ([Stamp(9, 1)] if is_lost else [])


def test_a_record_that_came_as_a_whole_has_only_written_what_bears_its_stamp() -> None:
    """Rome's own field came to Rome in another way."""
    parts: dict[PartName, Stamp] = {"city": Stamp(9, 1), "name": Stamp(8, 2)}
    whole = HistoryChange(12, b"ada", Stamp(9, 1), 1, exact=False, parts=parts)
    rome = History("rome", 2, [merged(11, Stamp(9, 1), "city")], [(12, {1: 9})])
    assert walk_histories(History("oslo", 1, [whole], []), rome) == []


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


def truly_lost(world: World, source: Site, target: Site) -> set[Stamp]:
    """What never came to a site that has announced it, and would have changed what was stored there."""
    written = {Stamp(each.version, site.id): each.logged for site in world.sites for each in site.log}
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
        if each.key.startswith(b"last"):
            is_lost = not known or max(known) < stamp
        else:
            held = reduce(merge_states, [written[one] for one in known]) if known else None
            is_lost = merge_states(held, each.logged) != held
        if is_lost:
            lost.add(stamp)
    return lost


def test_every_loss_that_nothing_newer_hid_is_found() -> None:
    total = Counter[bytes]()
    for seed in range(SEEDS):
        world = World(seed, losses=0.2)
        world.live(STEPS)
        world.drain()
        for left, right in combinations(world.sites, 2):
            found = walk_histories(history_of(left, 0), history_of(right, 0))
            expected = truly_lost(world, left, right) | truly_lost(world, right, left)
            assert {each.stamp for each in found} == expected, f"seed {seed}"
            total.update(each.key for each in found)
    assert min(total[key] for key in KEYS) > 20
