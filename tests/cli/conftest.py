"""Fixtures for the tests of the command."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.cli.support import Server, serving

import floodmark


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """A site with a namespace of three users."""
    return make_site(tmp_path / "oslo")


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same, for all tests of a module that only read."""
    return make_site(tmp_path_factory.mktemp("shared") / "oslo")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server of such a site, for all tests of a module."""
    with serving(make_site(tmp_path_factory.mktemp("served") / "oslo")) as ready:
        yield ready


def make_site(path: Path) -> Path:
    with floodmark.open(path, site="oslo", background=False) as site:
        users = site.create_namespace("users")
        users.put(b"ada", b"countess")
        users.put(b"alan", b"logician")
        users.put(b"grace", b"admiral")
    return path
