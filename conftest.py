"""Loaded before any test: how assertions are explained, and what tests need to be divided among processes."""

from collections.abc import Generator
from pathlib import Path

import pytest
from hypothesis import settings

pytest.register_assert_rewrite("floodmark.testing")

# How long an example takes says nothing where processes share a machine.
settings.register_profile("shared", deadline=None)
settings.load_profile("shared")

# Tests that one process takes: those of Spark share a session, those of stalled clients much data.
TOGETHER = {"tests/spark": "spark", "tests/server/test_stalled.py": "stalled"}


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Say which tests stay together."""
    for item in items:
        for place, group in TOGETHER.items():
            if item.path.is_relative_to(Path(__file__).parent / place):
                item.add_marker(pytest.mark.xdist_group(group))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Reports travel between processes as UTF-8, and some tests log what UTF-8 cannot hold."""
    report = yield
    report.sections = [
        (name, text.encode("utf-8", "backslashreplace").decode()) for name, text in report.sections
    ]
    return report
