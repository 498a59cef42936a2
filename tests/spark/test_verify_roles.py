"""What somebody must be allowed to do in order to compare sites, as docs/operations/verify.md has it."""

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
from tests.links.support import ServeSite
from tests.server.support import write_roles
from tests.spark.support_verify import World

from floodmark.model.access import Role
from floodmark.model.errors import NotAllowed
from floodmark.server import ServerOptions
from floodmark.spark import SiteAddress
from floodmark.spark.jobs.verifying.verify import ComparedSites, Look

PAGE = Path(__file__).parents[2] / "docs" / "operations" / "verify.md"
TokenFile = Callable[..., Path]


@pytest.fixture
def world(serve_site: ServeSite, tmp_path: Path) -> World:
    options = ServerOptions(access=write_roles(tmp_path / "access.toml", "users"))
    return World(partial(serve_site, options=options))


def look(world: World, token_file: Path) -> Look | None:
    addresses = [SiteAddress(location=url, token_file=str(token_file)) for url in world.urls]
    with ComparedSites(addresses) as sites:
        found = sites.look("users", sites.sites)
        for vantage in found.vantages if found is not None else ():
            vantage.horizon_of()
        return found


def test_to_compare_needs_the_role_read_on_the_whole_site(world: World, token_file: TokenFile) -> None:
    said = " ".join(PAGE.read_text("utf-8").split())
    assert "to compare, `read`. Both are needed on the whole site, though a single namespace is named" in said
    assert look(world, token_file(Role.READ)) is not None
    for role in Role:
        with pytest.raises(NotAllowed):
            look(world, token_file(role, "users"))
