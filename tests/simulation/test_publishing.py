"""Data sets are published at simulated sites while everything goes wrong, and every promise holds."""

from collections import Counter

import pytest
from tests.sizes import only

from floodmark.testing.simulation import PUBLISHING_FAULTS, World, first_failure

SEEDS = 20
SOAK_SEEDS = 1_000
GROUP = 2
SOAK_GROUP = 100
SEEDS_MAX = 50
# The first seeds that find faults which seed 1 does not find.
KNOWN_SEEDS = {
    "swap-unloaded": 5,
    "brought-early": 6,
    "brought-uncovered": 461,
    "rollback-forgets": 3,
    "rollback-early": 4,
}


def assert_promises_hold(seeds: range) -> None:
    failure = first_failure(seeds, publishes=True)
    assert failure is None, f"\n{failure}"


@pytest.mark.parametrize("first", only([2], range(0, SEEDS, GROUP)))
def test_every_promise_holds_across_swaps(first: int) -> None:
    assert_promises_hold(range(first, first + GROUP))


@pytest.mark.soak
@pytest.mark.parametrize("first", range(0, SOAK_SEEDS, SOAK_GROUP))
def test_every_promise_holds_across_swaps_in_a_hundred_worlds(first: int) -> None:
    assert_promises_hold(range(first, first + SOAK_GROUP))


@pytest.mark.parametrize(
    "fault", only(("replay-late", "brought-early", "brought-uncovered"), PUBLISHING_FAULTS)
)
def test_the_simulation_finds_a_planted_fault_of_publishing(fault: str) -> None:
    """The known seed is replayed first.  If a change has made it another history, a search follows."""
    failure = first_failure([KNOWN_SEEDS.get(fault, 1), *range(SEEDS_MAX)], fault=fault, publishes=True)
    assert failure is not None, f"{PUBLISHING_FAULTS[fault].what}: not found in {SEEDS_MAX} seeds"
    assert failure.violation.__cause__ is None, "the planted fault itself is broken"
    assert "--publishes" in str(failure)


@pytest.mark.slow
def test_publishers_die_and_leave_sites_out_and_links_bring_what_they_lack() -> None:
    census: Counter[str] = Counter()
    told = ""
    # In the last one some sites have swapped when another fails.
    for seed in (*range(12), 24):
        world = World(seed, publishes=True)
        world.run()
        census += world.census()
        told += "\n".join(event.what for event in world.history.events)
    for what in (
        "published",
        "publishers died",
        "rolled back",
        "data sets read",
        "not published: Down",
        "not published: PartlyDone",
        "not published: Unreachable",
        "snapshot",
    ):
        assert census[what] > 0, f"there was no {what}: {census}"
    assert "without []" in told
    assert "without ['" in told
