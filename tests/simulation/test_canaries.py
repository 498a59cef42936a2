"""The simulation finds every fault that is planted in it, within 200 seeds, and says in how many."""

from collections.abc import Callable

import pytest

from floodmark.testing.simulation import FAULTS, Success, first_failure, run_seed

SEEDS_MAX = 200


# Tombstones are seldom collected, so this one takes many worlds.
SELDOM = "tombstone-early"


@pytest.mark.parametrize(
    "fault", [pytest.param(name, marks=pytest.mark.soak if name == SELDOM else ()) for name in FAULTS]
)
def test_the_simulation_finds_a_planted_fault(
    fault: str, record_property: Callable[[str, object], None]
) -> None:
    failure = first_failure(range(SEEDS_MAX), fault=fault)
    assert failure is not None, f"{FAULTS[fault].what}: not found in {SEEDS_MAX} seeds"
    print(f"{FAULTS[fault].what}: found in {failure.seed + 1} seeds: {failure.violation}")
    record_property("seeds", failure.seed + 1)


def test_a_failure_says_how_to_replay_it_and_what_led_to_it() -> None:
    failure = first_failure(range(SEEDS_MAX), fault="loser-stored")
    assert failure is not None
    told = str(failure)
    key = next(iter(failure.violation.keys))
    assert f"python -m floodmark.testing.simulation --seed {failure.seed} --fault loser-stored" in told
    assert any(str(key) in event for event in failure.events)
    assert any("started, life 1" in event for event in failure.events)
    assert str(run_seed(failure.seed, fault="loser-stored")) == told
    assert isinstance(run_seed(failure.seed), Success)
