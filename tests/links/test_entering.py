"""The topology of the links is put in force at all sites: at new ones last, and where one is away, later."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.links.support import Served, ServeSite, SiteProcess, describe
from tests.waiting import wait_until

from floodmark.links.connections import SiteConnections
from floodmark.links.driver import site_addresses
from floodmark.links.entering import Entering
from floodmark.links.planning import LinkOptions, Planner, plan_all
from floodmark.model.errors import InvalidConfiguration, Unreachable
from floodmark.replication.topology import Topology, parse_topology


@pytest.fixture
def rome(tmp_path: Path) -> Iterator[SiteProcess]:
    """A site that can be killed."""
    process = SiteProcess(tmp_path / "rome", 2)
    yield process
    process.kill()


def topology_of(rome: SiteProcess, *served: Served, epoch: int) -> Topology:
    urls = {"rome": rome.url, **{each.site.name: each.url for each in served}}
    ids = {"rome": 2, **{each.site.name: each.site.id for each in served}}
    return parse_topology(describe(urls, ids, epoch))


def enter(topology: Topology) -> Entering:
    return Entering(topology, site_addresses(topology))


def test_a_new_site_takes_part_when_all_others_know_of_it(serve_site: ServeSite, rome: SiteProcess) -> None:
    oslo, bonn = serve_site("oslo"), serve_site("bonn")
    assert enter(topology_of(rome, oslo, epoch=1)).try_all() is None
    rome.kill()
    entering = enter(topology_of(rome, oslo, bonn, epoch=2))
    assert isinstance(entering.try_all(), Unreachable)
    assert oslo.site.topology() == topology_of(rome, oslo, bonn, epoch=2)
    assert bonn.site.topology() is None
    rome.start()

    def has_entered() -> bool:
        entering.go_on()
        return "bonn" in entering.before

    wait_until(has_entered, "bonn did not enter")
    assert bonn.site.topology() is not None
    assert entering.before.keys() == {"oslo", "rome", "bonn"}


@pytest.mark.slow
def test_sites_begin_without_one_that_is_away_if_all_are_new(
    serve_site: ServeSite, rome: SiteProcess
) -> None:
    oslo, bonn = serve_site("oslo"), serve_site("bonn")
    rome.kill()
    entering = enter(topology_of(rome, oslo, bonn, epoch=1))
    assert isinstance(entering.try_all(), Unreachable)
    assert entering.before.keys() == {"oslo", "bonn"}
    rome.start()


def test_a_topology_that_a_site_cannot_follow_is_told(serve_site: ServeSite, rome: SiteProcess) -> None:
    oslo = serve_site("oslo")
    oslo.site.create_namespace("users").put(b"ada", b"countess")
    entering = enter(topology_of(rome, oslo, epoch=1))
    failure = entering.try_all()
    assert isinstance(failure, InvalidConfiguration)
    assert "from before it is shared" in str(failure)
    assert entering.before.keys() == {"rome"}


def test_a_namespace_that_is_not_taken_in_is_told_at_the_target_and_the_others_go_on(
    serve_site: ServeSite, rome: SiteProcess
) -> None:
    oslo = serve_site("oslo")
    topology = topology_of(rome, oslo, epoch=1)
    assert enter(topology).try_all() is None
    addresses = site_addresses(topology)
    assert addresses["rome"].name == "rome"
    link = LinkOptions(
        source_id=2,
        source=addresses["rome"],
        target=addresses["oslo"],
        namespaces=("missing", *topology.namespaces),
    )
    oslo.site.create_namespace("missing")
    planners = [Planner(link, SiteConnections())]
    wait_until(lambda: bool(plan_all(planners)), "no step was planned")
    stalled = {each.namespace: each.stalled for each in oslo.site.replication().links}
    assert stalled == dict.fromkeys(topology.namespaces)
    recent = oslo.site.host.links.recent.of(oslo.site.namespace("missing").id, 2)  # type: ignore[attr-defined]
    assert "does not let this namespace come" in recent.stalled
