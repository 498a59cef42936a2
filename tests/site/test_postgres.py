"""A site in a PostgreSQL database keeps the site's contract, and survives lost connections."""

from collections.abc import Iterator
from functools import partial
from itertools import count
from pathlib import Path

import pytest
from tests.contracts.site.base import SITE, SITE_ID
from tests.contracts.site.contract import SiteContract
from tests.postgres import CuttingProxy, PostgresServer

import floodmark
from floodmark.engine import MemoryEngine
from floodmark.engine.postgres import PostgresEngine
from floodmark.host.nodes import make_node
from floodmark.model.errors import (
    FloodmarkError,
    FormatTooNew,
    InvalidArgument,
    NotASite,
    SiteLocked,
    SiteMismatch,
)
from floodmark.model.format import FORMAT
from floodmark.partition import FAMILIES, META
from floodmark.partition.families import STORED_FORMAT
from floodmark.site import Site
from floodmark.site.embedding import open_engine
from floodmark.testing.clock import SimulatedTime

_names = count()


@pytest.fixture
def name() -> str:
    return f"place-{next(_names)}"


@pytest.mark.slow
class TestSiteInPostgres(SiteContract):
    # An entry of PostgreSQL's index has at most 2,704 bytes.
    key_bytes_max = 2_267

    @pytest.fixture(autouse=True)
    def server(self, postgres: PostgresServer) -> Iterator[None]:
        self.postgres = postgres
        # Other tests may have left a site of this name.
        postgres.execute(f"DROP SCHEMA IF EXISTS floodmark_{SITE} CASCADE")
        yield
        postgres.execute(f"DROP SCHEMA IF EXISTS floodmark_{SITE} CASCADE")

    def open_site(self, time: SimulatedTime, directory: Path) -> Site:
        return floodmark.open(
            self.postgres.url, site=SITE, site_id=SITE_ID, background=False, time_source=time
        )

    def open_model(self, time: SimulatedTime) -> Site:
        return open_engine(
            MemoryEngine(FAMILIES),
            site=SITE,
            site_id=SITE_ID,
            time_source=time,
            make_host=partial(make_node, node=1),
        )


def test_a_site_in_a_database_is_there_when_it_is_opened_again(postgres: PostgresServer, name: str) -> None:
    with floodmark.open(postgres.url, site=name, site_id=9) as site:
        users = site.create_namespace("users")
        users.put(b"ada", b"1")
        users.put_many({b"%d" % number: b"x" for number in range(100)})
        users.delete(b"5")
    with floodmark.open(postgres.url, site=name, create=False) as site:
        assert site.statistics().site_id == 9
        users = site.namespace("users")
        assert users.get(b"ada") == b"1"
        assert len(list(users.scan())) == 100
        assert len(list(site.changes("users"))) == 102


def test_a_site_in_a_database_is_refused_as_one_in_a_directory_is(
    postgres: PostgresServer, name: str
) -> None:
    with pytest.raises(InvalidArgument, match="name"):
        floodmark.open(postgres.url)
    with pytest.raises(NotASite):
        floodmark.open(postgres.url, site=name, create=False)
    with (
        floodmark.open(postgres.url, site=name, site_id=3, node=1),
        pytest.raises(SiteLocked, match="node 1"),
    ):
        floodmark.open(postgres.url, site=name, node=1)
    with pytest.raises(SiteMismatch, match="id 3"):
        floodmark.open(postgres.url, site=name, site_id=4)
    engine = PostgresEngine(postgres.url, FAMILIES, site=name)
    engine.write([(META, STORED_FORMAT, b"%d" % (FORMAT + 1))])
    engine.close()
    with pytest.raises(FormatTooNew):
        floodmark.open(postgres.url, site=name)


@pytest.mark.slow
def test_acknowledged_writes_survive_a_connection_that_is_cut_anywhere(
    postgres: PostgresServer, name: str
) -> None:
    proxy = CuttingProxy(postgres.port)
    acknowledged: dict[bytes, bytes] = {}
    with floodmark.open(postgres.url_at(proxy.port), site=name, background=False) as site:
        users = site.create_namespace("users")
        for number in range(40):
            key = b"%d" % number
            proxy.cut_after(3 * number)
            try:
                users.put(key, b"1")
                acknowledged[key] = b"1"
            except FloodmarkError:
                pass
        proxy.cut_after(None)
        site.heartbeat()
        held = dict(users.scan())
        assert acknowledged.items() <= held.items()
        assert {change.key for change in site.changes("users")} == held.keys()
    with floodmark.open(postgres.url, site=name, background=False) as site:
        assert dict(site.namespace("users").scan()) == held
    proxy.close()
