"""How `make test`, `make test-all` and `make soak` differ, and how xdist spreads the tests over processes.

| | tests | hypothesis profile |
|---|---|---|
| `make test` | each promise and each command once | `test` |
| `make test-all` | also those marked `slow` | `test-all` |
| `make soak` | those marked `soak` | `soak`, with fresh examples in each run |
"""

import gc
import os
import signal
from collections.abc import Generator, Iterator
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Final

import pytest
from hypothesis import HealthCheck, settings
from tests.postgres import PostgresServer, postgres_server
from xdist.scheduler import LoadScopeScheduling

pytest.register_assert_rewrite("floodmark.testing")

# How long an example takes depends on the load of the machine: no test fails by it.
settings.register_profile(
    "test",
    max_examples=10,
    derandomize=True,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.register_profile("test-all", settings.get_profile("test"), max_examples=100)
settings.register_profile("soak", settings.get_profile("test"), max_examples=1_000, derandomize=False)
settings.load_profile("test")

# A background job of a shell ignores SIGINT, and so would every process that a test interrupts.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Where one of these is set, pytest prints whole differences, which takes hours for thousands of rows.
for variable in ("CI", "BUILD_NUMBER"):
    os.environ.pop(variable, None)

# Spark's Java runs for seconds: a quick start is worth more than quick code.
os.environ.setdefault("SPARK_SUBMIT_OPTS", "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC")

SLOW_SECONDS: Final = 60

# Of the tests of Spark, those that start a Java of their own.  The others share one session.
SPARK_PROCESSES: Final = (
    "tests/spark/test_backup_kill.py",
    "tests/spark/test_examples.py",
    "tests/spark/test_java.py",
    "tests/spark/test_jobs_elsewhere.py",
    "tests/spark/test_jobs_kill.py",
    "tests/spark/test_links_kill.py",
    "tests/spark/test_python.py",
    "tests/spark/test_stopping.py",
)
# Each of these has a process of its own: the pages take minutes, and the other tests only wait for minutes.
APART: Final = ("tests/spark/test_operations.py", "tests/spark/test_no_answer.py")


class Scheduling(LoadScopeScheduling):  # type: ignore[misc]
    """A module's tests run in one process; most of those that need Spark share two, begun first."""

    def _split_scope(self, nodeid: str) -> str:
        if nodeid.startswith(SPARK_PROCESSES):
            return "spark processes"
        shares = nodeid.startswith("tests/spark/") and not nodeid.startswith(APART)
        return "spark session" if shares else super()._split_scope(nodeid)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> Scheduling | None:
    return Scheduling(config, log) if config.getoption("dist") == "loadscope" else None


@pytest.hookimpl(tryfirst=True)
def pytest_collection(session: pytest.Session) -> None:
    """Import a share of the test modules first.

    Each process of a whole run collects all tests.  The first import of a module rewrites its assertions and
    stores the result, so that the other processes only load it.
    """
    config = session.config
    worker = getattr(config, "workerinput", None)
    if worker is not None and config.args_source is pytest.Config.ArgsSource.TESTPATHS:
        tests = Path(__file__).parent
        number, count = int(worker["workerid"].removeprefix("gw")), worker["workercount"]
        for path in sorted(tests.rglob("test_*.py"))[number::count]:
            # The collection imports the module again and reports the error.
            with suppress(Exception):
                import_module(".".join(path.relative_to(tests.parent).with_suffix("").parts))


def pytest_collection_finish() -> None:
    """Let the garbage collector leave out all that was imported and collected: it stays to the end."""
    gc.collect()
    gc.freeze()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with the tests of Spark, the longest groups."""
    items.sort(key=lambda item: not item.nodeid.startswith("tests/spark/"))


class SlowTests:
    """Names a slow test as soon as it ends, also for a run that is cut off later."""

    def __init__(self, terminal: pytest.TerminalReporter) -> None:
        self._terminal = terminal

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.duration >= SLOW_SECONDS:
            self._terminal.write_line(f"{report.duration:.0f} s {report.when} {report.nodeid}")


def pytest_configure(config: pytest.Config) -> None:
    terminal = config.pluginmanager.get_plugin("terminalreporter")
    if terminal is not None and not hasattr(config, "workerinput"):
        config.pluginmanager.register(SlowTests(terminal))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Escape the text of a report that UTF-8 cannot hold: reports travel between processes as UTF-8."""
    report = yield
    report.sections = [
        (name, text.encode("utf-8", "backslashreplace").decode()) for name, text in report.sections
    ]
    return report


@pytest.fixture(scope="session")
def postgres() -> Iterator[PostgresServer]:
    """A PostgreSQL that the tests of this process share."""
    with postgres_server() as server:
        yield server
