"""Fixtures for the tests of a server: a site in memory, its server, and a client of it."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.nodes import cluster
from tests.server.certificates import Certificates, make_certificates
from tests.server.support import connected, serving

from floodmark.server import Server
from floodmark.site import Namespace, Site

# A fixture for these tests.
__all__ = ["cluster"]


@pytest.fixture
def served(request: pytest.FixtureRequest) -> Iterator[tuple[Site, Server]]:
    """A site and its server, whose options a test may give as the parameter."""
    with serving(getattr(request, "param", None)) as pair:
        yield pair


@pytest.fixture
def site(served: tuple[Site, Server]) -> Site:
    """The site in the server's process."""
    return served[0]


@pytest.fixture
def server(served: tuple[Site, Server]) -> Server:
    return served[1]


@pytest.fixture
def remote(server: Server) -> Iterator[Site]:
    """The same site, over the wire."""
    with connected(server) as site:
        yield site


@pytest.fixture
def users(remote: Site) -> Namespace:
    return remote.create_namespace("users")


@pytest.fixture(scope="session")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return make_certificates(Path(tmp_path_factory.mktemp("certificates")))
