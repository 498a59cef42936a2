"""Clocks that are 499 ms apart, just within the guard, break no promise.

Promise 2: the versions of a key grow in commit order.  Promise 8: all sites come to hold the same.  Both are
checked in every world, at all times and in the end (`witness.py`, `chronicle.py`, `convergence.py`).
"""

import pytest
from tests.sizes import only

from floodmark.clock.hybrid import SKEW_MS_MAX
from floodmark.testing.simulation import World

APART_MS = SKEW_MS_MAX - 1
SEEDS = 6
STEPS = 60
SOAK_SEEDS = 500


def skewed_world(seed: int) -> World:
    """A world with one clock that is far ahead of another all the time, and a third in between."""
    world = World(seed, changes=False)
    offsets = [0, APART_MS, world.random.randint(0, APART_MS)]
    world.random.shuffle(offsets)
    for site, offset_ms in zip(world.sites, offsets, strict=True):
        site.time.offset_ms, site.time.is_steady = offset_ms, True
    return world


@pytest.mark.parametrize("seed", only([0, 1], range(SEEDS)))
def test_every_promise_holds_though_clocks_are_499_ms_apart(seed: int) -> None:
    skewed_world(seed).run(STEPS)


@pytest.mark.soak
def test_every_promise_holds_in_many_worlds_whose_clocks_are_499_ms_apart() -> None:
    for seed in range(SOAK_SEEDS):
        skewed_world(seed).run()
