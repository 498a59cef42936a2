"""Loaded before any test: how assertions are explained, and what tests need to be divided among processes."""

from collections.abc import Generator
from typing import Any

import pytest
from hypothesis import settings
from xdist.scheduler import LoadScopeScheduling

pytest.register_assert_rewrite("floodmark.testing")

# How long an example takes says nothing where processes share a machine.
settings.register_profile("shared", deadline=None)
settings.load_profile("shared")

# Tests that one process takes: those of Spark share a session, those of stalled clients much data.
TOGETHER = {"tests/spark": "spark", "tests/server/test_stalled.py": "stalled"}


class Scheduling(LoadScopeScheduling):
    """Gives tests away one by one, except for those that stay together."""

    def _split_scope(self, nodeid: str) -> str:
        return next((group for place, group in TOGETHER.items() if nodeid.startswith(place)), nodeid)


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Scheduling:
    """How tests are divided among processes; the largest group is begun first."""
    return Scheduling(config, log)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Reports travel between processes as UTF-8, and some tests log what UTF-8 cannot hold."""
    report = yield
    report.sections = [
        (name, text.encode("utf-8", "backslashreplace").decode()) for name, text in report.sections
    ]
    return report
