"""The history machine for minutes, with fresh histories in each run.

A failure prints the steps that lead to it, and hypothesis keeps them for the next run.
"""

import pytest
from hypothesis.stateful import run_state_machine_as_test
from tests.site.test_history import MemoryMachine, RocksMachine, SiteMachine
from tests.sizes import scaled

pytestmark = pytest.mark.soak


@pytest.mark.parametrize(
    ("machine", "times"), [(MemoryMachine, 3), (RocksMachine, 0.3)], ids=["memory", "rocks"]
)
def test_site_equals_its_model(machine: type[SiteMachine], times: float) -> None:
    run_state_machine_as_test(machine, settings=scaled(times, stateful_step_count=100))
