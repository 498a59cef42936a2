"""Links in threads of one process: the contract, kill -9, and a process without Java and without Spark."""

import pytest
from tests.links.contract import RunnerContract
from tests.links.kill_contract import KillContract
from tests.links.support import Run

from floodmark.links.driver import TopologySummary, run_links
from floodmark.links.process import ProcessRunner


def run_in_process(*arguments: object, **options: object) -> TopologySummary:
    topology, addresses = arguments
    return run_links(topology, addresses, ProcessRunner(), **options)  # type: ignore[arg-type]


class TestProcessRunner(RunnerContract):
    """The contract, in this process."""

    @pytest.fixture(name="run_links")
    def fixture_run_links(self) -> Run:
        return run_in_process


@pytest.mark.slow
class TestKilledProcess(KillContract):
    """Drivers and sites that are killed."""

    runner = "process"
