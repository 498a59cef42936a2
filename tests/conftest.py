"""What `make test`, `make test-all` and `make soak` differ in, and how the tests are spread over processes.

| | tests | hypothesis profile |
|---|---|---|
| `make test` | each promise and each command once | `test` |
| `make test-all` | also those marked `slow` | `test-all` |
| `make soak` | those marked `soak` | `soak`, with fresh examples in each run |
"""

import pytest
from hypothesis import HealthCheck, settings
from xdist.scheduler import LoadScopeScheduling

pytest.register_assert_rewrite("floodmark.testing")

# How long an example takes depends on the load of the machine: no test fails by it.
settings.register_profile(
    "test",
    max_examples=20,
    derandomize=True,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.register_profile("test-all", settings.get_profile("test"), max_examples=100)
settings.register_profile("soak", settings.get_profile("test"), max_examples=1_000, derandomize=False)
settings.load_profile("test")


class Scheduling(LoadScopeScheduling):  # type: ignore[misc]
    """A module's tests run in one process, and so do all tests of Spark: they share one session."""

    def _split_scope(self, nodeid: str) -> str:
        return "tests/spark" if nodeid.startswith("tests/spark/") else super()._split_scope(nodeid)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> Scheduling:
    return Scheduling(config, log)
