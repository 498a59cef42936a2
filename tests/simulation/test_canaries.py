"""The simulation finds every fault that is planted in it, within 200 seeds."""

from collections.abc import Callable

import pytest

from floodmark.testing.simulation import FAULTS, Success, World, first_failure, run_seed

SEEDS_MAX = 200
# Where faults were found that only few worlds bring to light.  There they are looked for first.
SEEDS_OF_SELDOM = {
    "fence-left-out": 12,
    "removed-unshared": 5,
    "stale-step": 15,
    "tombstone-early": 14,
}


def seeds_for(fault: str) -> list[int]:
    """All seeds, and first the one that is most likely to find a fault."""
    likely = SEEDS_OF_SELDOM.get(fault, 0)
    return [likely, *(seed for seed in range(SEEDS_MAX) if seed != likely)]


@pytest.mark.parametrize("fault", FAULTS)
def test_the_simulation_finds_a_planted_fault(
    fault: str, record_property: Callable[[str, object], None]
) -> None:
    failure = first_failure(seeds_for(fault), fault=fault)
    assert failure is not None, f"{FAULTS[fault].what}: not found in {SEEDS_MAX} seeds"
    print(f"{FAULTS[fault].what}: found by seed {failure.seed}: {failure.violation}")
    record_property("seed", failure.seed)


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


def test_an_error_that_nobody_expects_is_a_failure_too_and_says_where_it_came_from(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def break_down(*_: object) -> None:
        raise KeyError("broken")

    monkeypatch.setattr(World, "_collect_garbage", break_down)
    failure = first_failure(range(3))
    assert failure is not None
    told = str(failure)
    for words in ("nobody is ready for KeyError('broken')", "in break_down", f"--seed {failure.seed}"):
        assert words in told
