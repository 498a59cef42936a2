"""Fixtures for the tests of a whole site."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.nodes import cluster
from tests.site.support import START_MS, HookedEngine, open_memory

import floodmark
from floodmark.site import Namespace, Site, open_engine
from floodmark.testing.clock import SimulatedTime

# A fixture for these tests.
__all__ = ["cluster"]


@pytest.fixture
def time() -> SimulatedTime:
    return SimulatedTime(START_MS)


@pytest.fixture
def engine() -> HookedEngine:
    return HookedEngine()


@pytest.fixture
def site(engine: HookedEngine, time: SimulatedTime) -> Iterator[Site]:
    with open_memory(engine, time) as site:
        yield site


@pytest.fixture
def users(site: Site) -> Namespace:
    return site.create_namespace("users")


@pytest.fixture(params=["memory", "rocks"])
def real_site(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Site]:
    """A site under real time, over each engine."""
    if request.param == "memory":
        opened = open_engine(HookedEngine(), site="oslo", site_id=7)
    else:
        opened = floodmark.open(tmp_path / "oslo", site="oslo", site_id=7, background=False)
    with opened as site:
        yield site
