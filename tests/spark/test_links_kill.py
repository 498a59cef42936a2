"""kill -9 of sites and of drivers while Spark runs the links."""

import pytest
from tests.links.kill_contract import KillContract


@pytest.mark.soak
class TestKilledSpark(KillContract):
    """Drivers on Spark, and sites, that are killed."""

    runner = "spark"
