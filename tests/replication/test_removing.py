"""A site that is removed leaves what anybody got of it to all others, and nobody waits for it any more."""

import pytest
from tests.replication.support_return import IDS, POLICIES, World

from floodmark.model.errors import Fenced, InvalidConfiguration, StaleLink
from floodmark.replication.applied import Applied
from floodmark.replication.applying import run_step
from floodmark.replication.planning import plan_step
from floodmark.replication.removing import Removed, remove_site
from floodmark.replication.topology import SiteState, Topology

BONN = IDS["bonn"]
DAYS_MS = 3 * 24 * 3_600_000


def remove(world: World, name: str = "bonn") -> Removed:
    """Remove a site, which is gone already."""
    world.sites.pop(name, None)
    published: list[Topology] = []
    removed = remove_site(world.topology, name, world.others(name), published.append)
    world.topology = published[-1]
    return removed


@pytest.fixture
def world() -> World:
    """Rome has more of Bonn than Oslo, and each has something newer of its own."""
    world = World("oslo", "rome", "bonn")
    world.write("bonn", "everywhere")
    world.link_all()
    world.write("bonn", "at Rome")
    world.link("bonn", "rome")
    world.write("rome", "later")
    world.write("oslo", "later")
    return world


def test_all_others_have_what_any_had_of_it(world: World) -> None:
    removed = remove(world)
    assert removed.records_copied > 0
    world.link_all()
    world.require_equal()
    assert world["oslo"].namespace("users").get(b"bonn at Rome") == b"x"
    assert world["oslo"].namespace("counts").get(b"all") == b"4"


def test_its_entry_stays_and_ends_at_the_same_version_everywhere(world: World) -> None:
    rome = world["rome"].host.administration.watermark("users", None)[BONN]
    removed = remove(world)
    assert removed.final == rome
    entry = world.topology.sites["bonn"]
    assert (entry.id, entry.state, entry.final) == (BONN, SiteState.REMOVED, rome)
    for name in world.sites:
        assert world[name].topology() == world.topology
        for namespace in POLICIES:
            assert world[name].host.administration.watermark(namespace, None)[BONN] == rome


def test_its_links_are_shut_out_before_anything_is_exchanged(world: World) -> None:
    bonn = world["bonn"]
    world.write("bonn", "too late")
    step = plan_step(bonn.host, world["oslo"].host, tuple(POLICIES))
    world.change("bonn", state=SiteState.REMOVED)
    with pytest.raises(Fenced, match="removed from the topology"):
        run_step(bonn.host, world["oslo"].host, step)
    assert b"bonn too late" not in world.records("oslo", "users")
    remove(world)
    with pytest.raises(StaleLink):
        run_step(bonn.host, world["oslo"].host, step)
    with pytest.raises(Fenced, match="removed from the topology"):
        world["oslo"].host.administration.advance_link(step, Applied())
    world.link_all()
    world.require_equal()


def test_garbage_collection_waits_for_it_no_longer(world: World) -> None:
    world["oslo"].namespace("users").delete(b"all")
    world.sites.pop("bonn")
    remove(world)
    for _ in range(3):
        world.link_all()
    world.time.advance(DAYS_MS)
    world.link_all()
    world["oslo"].host.administration.collect_garbage()
    assert b"all" not in world.records("oslo", "users")


@pytest.mark.parametrize("published_max", [0, 1])
def test_removal_that_was_cut_off_is_taken_up_again(world: World, published_max: int) -> None:
    class Killed(Exception):
        pass

    published: list[Topology] = [world.topology]

    def publish(topology: Topology) -> None:
        # What is in force was not written down.
        if len(published) > published_max:
            raise Killed
        published.append(topology)

    world.sites.pop("bonn")
    with pytest.raises(Killed):
        remove_site(world.topology, "bonn", world.others("bonn"), publish)
    world.topology = published[-1]
    removed = remove(world)
    assert remove(world) == Removed(site="bonn", final=removed.final, epoch=removed.epoch, records_copied=0)
    world.link_all()
    world.require_equal()


def test_last_of_two_sites_goes_on_alone() -> None:
    world = World("oslo", "bonn")
    world.write("bonn", "a")
    world.link_all()
    remove(world)
    world.write("oslo", "b")
    assert world["oslo"].namespace("counts").get(b"all") == b"2"


def test_site_that_is_not_there_cannot_be_removed(world: World) -> None:
    with pytest.raises(InvalidConfiguration, match="no site 'lund'"):
        remove_site(world.topology, "lund", {}, lambda _: None)
