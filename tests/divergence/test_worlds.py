"""In thousands of small worlds: no lag is called drift, and every loss that shows is found.

The rules are those of the product; a copy of them (`rules_copy.py`) says the same, and no rule can go.
"""

from itertools import combinations

import pytest
from tests.divergence.rules_copy import Rule, is_drift
from tests.divergence.worlds import KEYS, Look, World, visible
from tests.sizes import only

from floodmark.divergence.rules import Verdict, verdict

WORLDS = 1_000
STEPS = 25


def looks_of(seed: int, losses: float = 0.0) -> list[Look]:
    world = World(seed, losses)
    looks: list[Look] = []
    for _ in range(3):
        world.live(STEPS)
        looks += world.looks()
    return looks


@pytest.mark.parametrize("first", only([0], range(0, WORLDS, WORLDS // 4)))
def test_lag_is_never_called_drift(first: int) -> None:
    verdicts = dict.fromkeys(Verdict, 0)
    for seed in range(first, first + WORLDS // 4):
        for key, left, right, _ in looks_of(seed):
            found = verdict(left, right)
            assert not found.is_drift, f"seed {seed}, {key!r}: {found} of {left} and {right}"
            assert not is_drift(left, right)
            verdicts[found] += 1
    # Otherwise there would be nothing to be wrong about.
    assert verdicts[Verdict.LAG] > 100
    assert verdicts[Verdict.AGREE] > 100


@pytest.mark.parametrize("rule", only([Rule.LEFT_HAS_HEARD, Rule.PART_HORIZON], Rule))
def test_no_rule_can_be_left_out(rule: Rule) -> None:
    for seed in range(20 * WORLDS):
        for look in looks_of(seed):
            left, right = look.left, look.right
            if rule is Rule.HORIZON_LAST:
                left = type(left)(left.record, left.mark, look.hasty[0], left.at)
                right = type(right)(right.record, right.mark, look.hasty[1], right.at)
            if is_drift(left, right, rule):
                print(f"without it, seed {seed} has a false report: {rule}")
                return
    pytest.fail(f"no false report without it: {rule}")


@pytest.mark.parametrize("first", [0, 150, 300])
def test_every_loss_that_shows_is_found_when_all_has_arrived(first: int) -> None:
    found = 0
    for seed in range(first, first + 150):
        world = World(seed, losses=0.2)
        world.live(3 * STEPS)
        world.drain()
        for key in KEYS:
            found += check_all_pairs(world, key, f"seed {seed}, {key!r}")
    assert found > 20


def check_all_pairs(world: World, key: bytes, place: str) -> int:
    """Compare every two sites at the end, when nothing is lag any more; how many have drifted apart."""
    found = 0
    now_ms = max(site.clock for site in world.sites) >> 18
    for left, right in combinations(world.sites, 2):
        sides = [site.side(key, site.clock, site.horizon) for site in (left, right)]
        told = verdict(*sides)
        held = [visible(site, key, now_ms) for site in (left, right)]
        assert told.is_drift == (held[0] != held[1]), f"{place}: {told}, and they hold {held}"
        assert told is not Verdict.LAG, place
        assert (told is Verdict.MISSING_LEFT) == (held[0] is None and held[1] is not None), place
        assert (told is Verdict.MISSING_RIGHT) == (held[1] is None and held[0] is not None), place
        found += told.is_drift
    return found


@pytest.mark.soak
@pytest.mark.parametrize("first", range(0, 10 * WORLDS, WORLDS))
def test_lag_is_never_called_drift_in_many_worlds(first: int) -> None:
    for seed in range(first, first + WORLDS):
        for key, left, right, _ in looks_of(seed):
            found = verdict(left, right)
            assert not found.is_drift, f"seed {seed}, {key!r}: {found} of {left} and {right}"
