"""Loaded before any test: how assertions are explained, and what tests need to be divided among processes."""

import os
import signal
from collections.abc import Generator
from typing import Any

import pytest
from hypothesis import settings
from xdist.scheduler import LoadScopeScheduling

pytest.register_assert_rewrite("floodmark.testing")

# How long an example takes says nothing where processes share a machine.
settings.register_profile("shared", deadline=None)
settings.load_profile("shared")

# What a shell starts in the background ignores Ctrl-C, and so would every process that tests press it for.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Where one of these is set pytest writes whole differences, which takes it hours for thousands of rows.
for name in ("CI", "BUILD_NUMBER"):
    os.environ.pop(name, None)

# Spark's Java runs for seconds here: to start quickly is worth more than to become fast.
os.environ.setdefault("SPARK_SUBMIT_OPTS", "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC")

SLOW_SECONDS = 60

# Tests that one process takes: those that share a Spark session, those that start Spark in processes of their
# own and would crowd each other, those of stalled clients that share much data.  The first that fits counts.
TOGETHER = {
    "tests/spark/test_backup_kill.py": "spark processes",
    "tests/spark/test_cli.py": "spark processes",
    "tests/spark/test_examples.py": "spark processes",
    "tests/spark/test_java.py": "spark processes",
    "tests/spark/test_jobs_kill.py": "spark processes",
    "tests/spark/test_links_kill.py": "spark processes",
    "tests/spark/test_secrets.py": "spark processes",
    "tests/spark/test_operations.py": "spark processes",
    "tests/spark/test_returning.py": "spark processes",
    # About half of the rest, so that two processes share it.
    "tests/spark/test_s": "another spark session",
    "tests/spark/test_v": "another spark session",
    "tests/spark/test_w": "another spark session",
    "tests/spark": "spark session",
    "tests/server/test_stalled.py": "stalled",
}


class Scheduling(LoadScopeScheduling):
    """Gives tests away one by one, except for those that stay together."""

    def _split_scope(self, nodeid: str) -> str:
        return next((group for place, group in TOGETHER.items() if nodeid.startswith(place)), nodeid)


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Scheduling:
    """How tests are divided among processes; the largest group is begun first."""
    return Scheduling(config, log)


class SlowTests:
    """Names tests that took long as soon as they end: a run that is cut off has told by then what it did."""

    def __init__(self, terminal: pytest.TerminalReporter) -> None:
        self._terminal = terminal

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.duration >= SLOW_SECONDS:
            self._terminal.write_line(f"{report.duration:.0f} s {report.when} {report.nodeid}")


def pytest_configure(config: pytest.Config) -> None:
    """Where tests are divided among processes, only the one that shows results tells of slow ones."""
    terminal = config.pluginmanager.get_plugin("terminalreporter")
    if terminal is not None and not hasattr(config, "workerinput"):
        config.pluginmanager.register(SlowTests(terminal))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Reports travel between processes as UTF-8, and some tests log what UTF-8 cannot hold."""
    report = yield
    report.sections = [
        (name, text.encode("utf-8", "backslashreplace").decode()) for name, text in report.sections
    ]
    return report
