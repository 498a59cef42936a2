"""A new site that begins with a backup of another goes on from there: nothing is missed, nothing doubled."""

import pytest
from tests.replication.support_links import embedded
from tests.replication.support_return import IDS, POLICIES, World

from floodmark.model.errors import InvalidConfiguration, StaleLink, VersionCollected

DAYS_MS = 3 * 24 * 3_600_000


@pytest.fixture
def world() -> World:
    """Sites whose change logs no longer reach back to the beginning."""
    world = World("oslo", "rome")
    world.write("oslo", "before")
    world.write("rome", "before")
    world["rome"].namespace("users").delete(b"rome before")
    for _ in range(3):
        world.link_all()
    world.time.advance(DAYS_MS)
    world.link_all()
    for name in ("oslo", "rome"):
        world.write(name, "lately")
        world[name].host.retention.collect_garbage()
    world.change("lund")
    world.open("lund")
    return world


def test_site_without_a_backup_comes_too_late_for_the_logs(world: World) -> None:
    with pytest.raises(VersionCollected):
        world.link("oslo", "lund")


def test_everybody_holds_the_same_afterwards(world: World) -> None:
    backup = world.backup("oslo")
    world.write("oslo", "behind the backup")
    world.write("rome", "behind the backup")
    world.join("lund", backup)
    world.write("lund", "first")
    world.link_all()
    world.link_all()
    world.require_equal()
    assert world["oslo"].namespace("counts").get(b"all") == 7


def test_new_sites_begin_with_one_backup_when_all_others_are_lost(world: World) -> None:
    backup = world.backup("oslo")
    known = {name: dict(world["oslo"].namespace(name).scan()) for name in ("users", "counts")}
    built = World("bonn", "lund")
    built.time.advance(2 * DAYS_MS)
    for name in built.sites:
        built.join(name, backup)
        assert {each: dict(built[name].namespace(each).scan()) for each in known} == known
    for name in built.sites:
        built.write(name, "first")
        built[name].namespace("users").delete(b"oslo lately")
    for _ in range(3):
        built.link_all()
    built.require_equal()
    counts = built["bonn"].namespace("counts")
    assert counts.get(b"all") == int(known["counts"][b"all"]) + 2
    assert b"oslo lately" not in dict(built["lund"].namespace("users").scan())


def test_positions_are_those_of_the_backup_and_nothing_is_read_twice(world: World) -> None:
    world.link("rome", "oslo")
    backup = world.backup("oslo")
    world.join("lund", backup)
    oslo, rome = IDS["oslo"], IDS["rome"]
    for namespace in POLICIES:
        facts = backup.facts[namespace]
        found = world["lund"].host.replication.watermark(namespace, None)
        assert found == {oslo: facts.watermark[oslo], rome: facts.watermark[rome]}
        horizons = {each.name: each.collected_horizon for each in world["lund"].statistics().namespaces}
        assert horizons[namespace] == facts.collected_horizon
    before = embedded(world["lund"]).node.committer.counting.commits
    world.link("oslo", "lund")
    world.link("rome", "lund")
    assert embedded(world["lund"]).node.committer.counting.commits == before


def test_what_was_loaded_is_told_to_nobody(world: World) -> None:
    world.join("lund", world.backup("oslo"))
    for target in ("oslo", "rome"):
        before = embedded(world[target]).node.committer.counting.commits
        world.link("lund", target)
        assert embedded(world[target]).node.committer.counting.commits == before
    world["lund"].heartbeat()
    beat = world["lund"].heartbeat()
    assert not beat.sums


def test_joining_twice_changes_nothing_and_joining_too_late_is_refused(world: World) -> None:
    backup = world.backup("oslo")
    world.join("lund", backup)
    world.join("lund", backup)
    world.write("oslo", "more")
    world.link("oslo", "lund")
    with pytest.raises(StaleLink, match="load into one that is empty"):
        world.join("lund", backup)


def test_backup_that_was_overtaken_by_garbage_collection_is_refused(world: World) -> None:
    backup = world.backup("oslo")
    facts = backup.facts["users"]
    late = facts._replace(collected_horizon=facts.watermark[IDS["rome"]] + 1)
    with pytest.raises(VersionCollected, match="make another one"):
        world.join("lund", backup._replace(facts={**backup.facts, "users": late}))


def test_nobody_collects_what_the_new_site_has_not_got(world: World) -> None:
    world["oslo"].namespace("users").delete(b"all")
    for _ in range(2):
        world.link("oslo", "rome")
        world.link("rome", "oslo")
    world.time.advance(DAYS_MS)
    world["oslo"].host.retention.collect_garbage()
    assert b"all" in world.records("oslo", "users")


def test_namespace_that_is_not_shared_has_no_links_to_begin() -> None:
    world = World("oslo", "rome")
    world["oslo"].create_namespace("local")
    with pytest.raises(InvalidConfiguration, match="set the topology first"):
        world["oslo"].host.membership.adopt_watermark("local", {2: 7}, 0)


def test_a_load_after_the_links_have_begun_is_logged_and_no_loss(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    world["lund"].heartbeat()
    world.link("lund", "oslo")
    world.join("lund", world.backup("oslo"))
    world.write("lund", "first")
    for _ in range(3):
        world.link_all()
    world.require_equal()
    links = [link for link in world["oslo"].host.status.replication().links if link.source == "lund"]
    assert [(link.intervals_wrong, link.alarms) for link in links] == [(0, [])] * len(POLICIES)
    assert all(link.intervals_checked for link in links)
    left_out = [record.message for record in caplog.records if "leaves out versions" in record.message]
    assert len(left_out) == len(POLICIES)


def test_a_write_that_a_load_hides_from_the_links_is_a_loss(world: World) -> None:
    world["lund"].heartbeat()
    world.link("lund", "oslo")
    world["lund"].namespace("users").put(b"hidden", b"x")
    world.join("lund", world.backup("oslo"))
    world.link("lund", "oslo")
    links = [link for link in world["oslo"].host.status.replication().links if link.source == "lund"]
    assert {link.namespace: link.intervals_wrong for link in links} == {
        "users": 1,
        "profiles": 0,
        "counts": 0,
    }


@pytest.mark.parametrize("is_backed_up_before", [True, False])
def test_a_data_set_is_brought_to_a_new_site_with_all_that_it_was_loaded_with(
    world: World, is_backed_up_before: bool
) -> None:
    backups = [world.backup("oslo")]
    world.publish("oslo", "rome", rows={b"rome before": b"set", b"new": b"set"})
    for source, target in (("oslo", "rome"), ("rome", "oslo")):
        world.write(source, "since")
        world.link(source, target)
    backups.append(world.backup("oslo"))
    world.join("lund", backups[not is_backed_up_before])
    world.write("lund", "first")
    world.link_all()
    world.link_all()
    assert set(dict(world["lund"].namespace("users").scan())) == {
        *(b"all", b"new", b"rome before", b"oslo since", b"rome since", b"lund first")
    }
    world.require_equal()
