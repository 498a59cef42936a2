"""Transactions at nodes that come and go are serializable, and the simulation finds every planted fault."""

import pytest
from tests.sizes import only

from floodmark.testing.simulation.node_faults import TRANSACTION_FAULTS
from floodmark.testing.simulation.nodes import run_nodes

STEPS = 100
SEEDS = 100
GROUP = 2
SOAK_SEEDS = 10_000
SOAK_GROUP = 500
SEEDS_MAX = 200
# Seeds that find faults which seed 0 does not find.
KNOWN_SEEDS = {"phantom": 1, "validated-before-locked": 111}


def assert_serializable(seeds: range, *, harsh: bool = False) -> None:
    found = {seed: run_nodes(seed, steps=STEPS, harsh=harsh, transactions=True) for seed in seeds}
    assert {seed: violation for seed, violation in found.items() if violation is not None} == {}


@pytest.mark.parametrize("first", only([0], range(0, SEEDS, GROUP)))
def test_transactions_are_serializable_while_nodes_come_and_go(first: int) -> None:
    assert_serializable(range(first, first + GROUP))


@pytest.mark.slow
def test_transactions_are_serializable_with_failing_disks_and_long_interruptions() -> None:
    assert_serializable(range(20), harsh=True)


@pytest.mark.soak
@pytest.mark.parametrize("first", range(0, SOAK_SEEDS, SOAK_GROUP))
def test_transactions_are_serializable_in_many_histories(first: int) -> None:
    assert_serializable(range(first, first + SOAK_GROUP))


@pytest.mark.parametrize("fault", only(("lost-update", "read-skew"), TRANSACTION_FAULTS))
def test_the_history_of_transactions_shows_a_planted_fault(fault: str) -> None:
    for seed in (KNOWN_SEEDS.get(fault, 0), *range(SEEDS_MAX)):
        violation = run_nodes(seed, steps=STEPS, fault=fault, transactions=True)
        if violation is not None and violation.promise == "7":
            return
    pytest.fail(f"{TRANSACTION_FAULTS[fault].what}: not found in {SEEDS_MAX} seeds")
