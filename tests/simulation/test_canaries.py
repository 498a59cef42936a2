"""The simulation finds every fault that is planted in it, within 200 seeds."""

import pytest

from floodmark.testing.simulation import FAULTS, Success, first_failure, run_seed
from floodmark.testing.simulation.world import Actions

SEEDS_MAX = 200
# What a planted function raises that does not fit its callers any more.
BROKEN = (AttributeError, NameError, TypeError)
# The first seeds that find faults which seed 0 does not find.
KNOWN_SEEDS = {
    "clock-not-moved": 2,
    "commit-split": 1,
    "copy-split": 1,
    "fence-left-out": 26,
    "merged-batch-forgotten": 23,
    "put-many-split": 1,
    "removed-unshared": 21,
    "sealed-forgotten": 1,
    "second-round-newest": 6,
    "stale-step": 10,
    "uncounted-start": 1,
    "unknown-batch-harmless": 3,
    "version-reissued": 2,
    "watermark-early": 5,
}


@pytest.mark.parametrize("fault", FAULTS)
def test_the_simulation_finds_a_planted_fault(fault: str) -> None:
    """The known seed is replayed first.  If a change has made it another history, a search follows."""
    known = KNOWN_SEEDS.get(fault, 0)
    failure = first_failure([known, *(seed for seed in range(SEEDS_MAX) if seed != known)], fault=fault)
    assert failure is not None, f"{FAULTS[fault].what}: not found in {SEEDS_MAX} seeds"
    assert not isinstance(failure.violation.__cause__, BROKEN), "the planted fault itself is broken"


@pytest.mark.soak
@pytest.mark.parametrize("fault", FAULTS)
def test_the_known_seed_is_the_first_that_finds_the_fault(fault: str) -> None:
    """Otherwise the search above takes long: note the seed that this test finds."""
    failure = first_failure(range(SEEDS_MAX), fault=fault)
    assert failure is not None
    assert failure.seed == KNOWN_SEEDS.get(fault, 0)


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

    monkeypatch.setattr(Actions, "collect_garbage", break_down)
    failure = first_failure(range(3))
    assert failure is not None
    told = str(failure)
    for words in ("no rule expects KeyError('broken')", "in break_down", f"--seed {failure.seed}"):
        assert words in told
