"""Fixtures for the tests of links: sites to link."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.links.support import ServeSite, serving_sites


@pytest.fixture
def serve_site(tmp_path: Path) -> Iterator[ServeSite]:
    """Serves as many sites as a test needs."""
    with serving_sites(tmp_path) as start:
        yield start
