"""The history machine for minutes, with fresh histories in each run.

A failure prints the steps that lead to it, and hypothesis keeps them for the next run.
"""

import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import run_state_machine_as_test
from tests.site.test_history import MemoryMachine, RocksMachine, SiteMachine

pytestmark = pytest.mark.soak


@pytest.mark.parametrize(
    ("machine", "examples", "steps"),
    [(MemoryMachine, 3000, 100), (RocksMachine, 300, 100)],
    ids=["memory", "rocks"],
)
def test_site_equals_its_model(machine: type[SiteMachine], examples: int, steps: int) -> None:
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=examples,
            stateful_step_count=steps,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
