"""Fixtures for the tests of replication: sites to link."""

from collections.abc import Iterator

import pytest
from tests.replication.support_links import Mesh


@pytest.fixture
def mesh() -> Iterator[Mesh]:
    mesh = Mesh("oslo", "rome", topology=False)
    yield mesh
    for site in mesh.sites.values():
        site.close()
