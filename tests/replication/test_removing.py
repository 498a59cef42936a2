"""A site that is removed leaves what anybody got of it to all others, and nobody waits for it any more."""

from typing import Any
from unittest.mock import patch

import pytest
from tests.replication.support_return import IDS, POLICIES, World

from floodmark.codec.values import encode_value
from floodmark.host.embedded import EmbeddedHost
from floodmark.links.removing import Removed, remove_site
from floodmark.links.steps import plan_step, run_step
from floodmark.model.change import Stamp
from floodmark.model.errors import Fenced, InvalidConfiguration, StaleLink
from floodmark.model.partition import ApplyStream, LinkGuard
from floodmark.replication.applied import Applied
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
    assert world["oslo"].namespace("counts").get(b"all") == 4


def test_its_entry_stays_and_ends_at_the_same_version_everywhere(world: World) -> None:
    rome = world["rome"].host.replication.watermark("users", None)[BONN]
    removed = remove(world)
    assert removed.final == rome
    entry = world.topology.sites["bonn"]
    assert (entry.id, entry.state, entry.final) == (BONN, SiteState.REMOVED, rome)
    for name in world.sites:
        assert world[name].topology() == world.topology
        for namespace in POLICIES:
            assert world[name].host.replication.watermark(namespace, None)[BONN] == rome


def test_its_links_are_shut_out_before_anything_is_exchanged(world: World) -> None:
    bonn = world["bonn"]
    world.write("bonn", "too late")
    step = plan_step(bonn.host, world["oslo"].host, tuple(POLICIES))
    world.change("bonn", state=SiteState.REMOVED)
    with pytest.raises(Fenced, match="removed from the topology"):
        run_step(bonn.host, world["oslo"].host, step)
    assert b"bonn too late" not in world.records("oslo", "users")
    remove(world)
    with pytest.raises(Fenced):
        run_step(bonn.host, world["oslo"].host, step)
    with pytest.raises(Fenced, match="removed from the topology"):
        world["oslo"].host.replication.advance_link(step, Applied())
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
    world["oslo"].host.retention.collect_garbage()
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
    assert world["oslo"].namespace("counts").get(b"all") == 2


def test_site_that_is_not_there_cannot_be_removed(world: World) -> None:
    with pytest.raises(InvalidConfiguration, match="no site 'lund'"):
        remove_site(world.topology, "lund", {}, lambda _: None)


# Those that come later


def missing(world: World, name: str) -> list[str]:
    return [alarm for alarm in world[name].replication().alarms if "something is missing" in alarm]


def join_empty(world: World, name: str = "lund") -> None:
    world.change(name)
    world.open(name)
    for _ in range(2):
        world.link_all()


def test_a_site_that_joins_empty_says_what_it_lacks_until_the_others_have_handed_it_over(
    world: World,
) -> None:
    remove(world)
    assert not missing(world, "oslo")
    join_empty(world)
    assert world["lund"].namespace("users").get(b"bonn everywhere") is None
    (alarm,) = missing(world, "lund")
    assert alarm.startswith(f"bonn to lund, {', '.join(sorted(POLICIES))}: ")
    for words in ("docs/operations/join.md", "floodmark topology remove bonn"):
        assert words in alarm
    assert all(not missing(world, name) for name in ("oslo", "rome"))
    final = world.topology.sites["bonn"].final
    handed_over = remove(world)
    assert (handed_over.final, handed_over.epoch) == (final, world.topology.epoch)
    assert handed_over.records_copied > 0
    assert not missing(world, "lund")
    world.require_equal()
    assert world["lund"].namespace("counts").get(b"all") == 4


def test_nobody_collects_what_hides_something_that_is_not_handed_over_yet(world: World) -> None:
    remove(world)
    join_empty(world)
    world["lund"].namespace("users").delete(b"bonn everywhere")
    world.link_all()
    world.time.advance(DAYS_MS)
    for _ in range(2):
        world.link_all()
    for name in world.sites:
        world[name].host.retention.collect_garbage()
        assert b"bonn everywhere" in world.records(name, "users")
    remove(world)
    for _ in range(3):
        world.link_all()
    for name in world.sites:
        world[name].host.retention.collect_garbage()
        assert b"bonn everywhere" not in world.records(name, "users")


def test_a_site_that_joins_from_a_backup_lacks_nothing(world: World) -> None:
    remove(world)
    world.change("lund")
    world.open("lund")
    world.join("lund", world.backup("rome"))
    assert not missing(world, "lund")


def test_a_removal_that_was_not_finished_is_an_alarm(world: World) -> None:
    world.sites.pop("bonn")
    world.change("bonn", state=SiteState.REMOVED)
    assert "docs/operations/remove.md" in " ".join(missing(world, "oslo"))
    remove(world)
    assert not missing(world, "oslo")


def test_what_is_exchanged_too_late_is_refused(world: World) -> None:
    """A process that was stopped in the middle of a removal, and wakes up when all is over."""
    held: list[LinkGuard] = []
    original = EmbeddedHost.write_stream

    def hold(host: EmbeddedHost, command: ApplyStream) -> Any:
        assert command.link is not None
        held.append(command.link)
        return original(host, command)

    with patch.object(EmbeddedHost, "write_stream", hold):
        removed = remove(world)
    guard = next(guard for guard in held if 0 < min(guard.positions.values()) < removed.final)
    stored = encode_value(b"old", origin=Stamp(min(guard.positions.values()) + 1, BONN))
    for name in world.sites:
        stream = world[name].host.write_stream(ApplyStream(True, guard))
        with pytest.raises(StaleLink):
            stream.send({b"\x00\x00\x01key": stored}).result()


def test_a_link_of_it_that_runs_on_after_its_end_is_shut_out(world: World) -> None:
    """Between the moment when its end is known and the one at which the links reach it."""
    bonn, oslo = world["bonn"], world["oslo"]
    world.write("bonn", "too late")
    step = plan_step(bonn.host, oslo.host, tuple(POLICIES))

    def publish(topology: Topology) -> None:
        world.topology = topology
        with pytest.raises(Fenced, match="removed from the topology"):
            run_step(bonn.host, oslo.host, step)

    world.sites.pop("bonn")
    remove_site(world.topology, "bonn", world.others("bonn"), publish)
    assert world.topology.sites["bonn"].final is not None
    world.link_all()
    world.require_equal()
