"""A namespace of another site in a batch or transaction: its number stands for another namespace here."""

from collections.abc import Callable
from typing import Any

import pytest
from tests.server.support import open_memory

from floodmark.model.errors import InvalidArgument
from floodmark.site import Namespace, Site

USES: dict[str, Callable[[Site, Namespace], Any]] = {
    "batch": lambda site, other: site.atomic().put(other, b"a", b"1"),
    "read": lambda site, other: site.read_atomic([(other, b"a")]),
    "transaction put": lambda site, other: site.transaction().put(other, b"a", b"1"),
    "transaction get": lambda site, other: site.transaction().get(other, b"a"),
    "transaction scan": lambda site, other: site.transaction().scan(other),
    "conflict": lambda site, other: site.transaction().add_read_conflict(other, b"a"),
}


@pytest.mark.parametrize("use", USES)
def test_namespace_of_another_site_is_refused(use: str) -> None:
    with open_memory() as site, open_memory() as stranger:
        site.create_namespace("users")
        other = stranger.create_namespace("accounts")
        assert other.id == site.namespace("users").id
        with pytest.raises(InvalidArgument, match="another site"):
            USES[use](site, other)
        USES[use](site, site.namespace("users"))
