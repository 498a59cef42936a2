"""A site that was restored loses nothing that others know, tells them what they lack, and no stamp twice."""

from collections.abc import Callable
from contextlib import suppress
from itertools import count
from typing import Any

import msgspec
import pytest
from tests.replication.support_links import embedded
from tests.replication.support_return import IDS, POLICIES, Backup, CutOff, World

from floodmark.codec.values import decode_value, encode_value
from floodmark.engine import MemoryEngine
from floodmark.host.catalog import Catalog
from floodmark.links import returning
from floodmark.links.removing import remove_site
from floodmark.links.steps import plan_step, run_step
from floodmark.model.change import Stamp
from floodmark.model.errors import (
    ClockSkew,
    Fenced,
    InvalidConfiguration,
    Rejoining,
    StaleLink,
    StorageFailed,
    VersionCollected,
)
from floodmark.model.partition import ApplyStream, LinkGuard
from floodmark.partition import FAMILIES
from floodmark.replication.applied import Applied
from floodmark.site import open_engine

OSLO = IDS["oslo"]
DAYS_MS = 3 * 24 * 3_600_000


@pytest.fixture
def world() -> World:
    return World("oslo", "rome", "bonn")


def lose_and_restore(world: World, backup_of: str = "oslo", *, told: bool = True, beats: int = 0) -> None:
    """Oslo writes on after the backup; some of it may reach Rome, some nobody; then all but that is lost.

    Meanwhile it may have written heartbeats in its new life.
    """
    world.write("oslo", "everywhere")
    world.link_all()
    world.write("oslo", "at Rome")
    world.link("oslo", "rome")
    world.write("oslo", "before the backup")
    backup = world.backup(backup_of)
    world.write("oslo", "behind the backup")
    if told:
        world.link("oslo", "rome")
    world.write("rome", "meanwhile")
    world.write("oslo", "at nobody")
    world.open("oslo")
    world.change("oslo", incarnation=2)
    for _ in range(beats):
        world.time.advance(1_000)
        world["oslo"].heartbeat()
    for namespace in POLICIES:
        assert world["oslo"].host.membership.finish_rejoining()
        world.restore("oslo", backup, namespace)
    assert world["oslo"].host.membership.finish_rejoining() == []


@pytest.mark.parametrize("told", [True, False])
@pytest.mark.parametrize("backup_of", ["oslo", "bonn"])
def test_everything_that_somebody_knows_is_at_all_sites_in_the_end(
    world: World, backup_of: str, told: bool
) -> None:
    lose_and_restore(world, backup_of, told=told)
    world.write("oslo", "in the new life")
    world.link_all()
    world.link_all()
    world.require_equal()
    users = {key for key, _ in world["bonn"].namespace("users").scan()}
    words = ["everywhere", "at Rome", "in the new life"]
    words += ["before the backup"] if told or backup_of == "oslo" else []
    words += ["behind the backup"] if told else []
    assert {key.removeprefix(b"oslo ").decode() for key in users if key.startswith(b"oslo")} == {*words}
    # Each write of Oslo counts once, and the one of Rome.
    assert world["bonn"].namespace("counts").get(b"all") == len(words) + 1


@pytest.mark.parametrize("publisher", ["oslo", "rome"])
@pytest.mark.parametrize("is_backed_up_before", [True, False])
def test_data_set_is_there_again_with_all_that_somebody_knows(
    world: World, publisher: str, is_backed_up_before: bool
) -> None:
    world.write("oslo", "before")
    world.link_all()
    backups = [world.backup("oslo")]
    others = [name for name in ("oslo", "rome", "bonn") if name != publisher]
    world.publish(publisher, *others, rows={b"oslo before": b"set", b"new": b"set"})
    world.write("oslo", "since")
    world.link("oslo", "rome")
    backups.append(world.backup("oslo"))
    world.write("oslo", "behind the backups")
    world.link("oslo", "bonn")
    world.open("oslo")
    world.change("oslo", incarnation=2)
    for namespace in POLICIES:
        world.restore("oslo", backups[not is_backed_up_before], namespace)
    assert world["oslo"].host.membership.finish_rejoining() == []
    world.write("oslo", "in the new life")
    for _ in range(3):
        world.link_all()
    world.require_equal()
    assert {key for key, _ in world["oslo"].namespace("users").scan()} == {
        *(b"all", b"new", b"oslo before", b"oslo since", b"oslo behind the backups", b"oslo in the new life")
    }


@pytest.mark.parametrize("beats", [0, 3])
def test_sums_of_the_heartbeats_agree_after_the_return(world: World, beats: int) -> None:
    lose_and_restore(world, beats=beats)
    for _ in range(4):
        world.write("oslo", "again")
        world.link_all()
    for name in world.sites:
        for link in world[name].replication().links:
            assert link.intervals_wrong == 0, link
            assert link.intervals_checked > 0


@pytest.mark.parametrize("changes_max", [1, None])
def test_what_is_told_again_arrives_in_one_step(world: World, changes_max: int | None) -> None:
    """Else a site would stand above stamps that it lacks, and believe to have them."""
    lose_and_restore(world)
    oslo, bonn, names = world["oslo"].host, world["bonn"].host, tuple(POLICIES)
    step = plan_step(oslo, bonn, names, incarnation=2, changes_max=changes_max)
    run_step(oslo, bonn, step)
    words = ("everywhere", "at Rome", "before the backup", "behind the backup")
    users = {key for key, _ in world["bonn"].namespace("users").scan()}
    assert users >= {f"oslo {word}".encode() for word in words}
    assert world["bonn"].namespace("counts").get(b"all") == 4


def test_steps_are_small_again_behind_what_is_told_again(world: World) -> None:
    lose_and_restore(world)
    world.link("oslo", "bonn")
    world.write("oslo", "one")
    world.write("oslo", "two")
    oslo, bonn = world["oslo"].host, world["bonn"].host
    step = plan_step(oslo, bonn, ["counts"], incarnation=2, changes_max=1)
    run_step(oslo, bonn, step)
    assert step.changes == 1
    assert world["bonn"].namespace("counts").get(b"all") == 5


def test_site_takes_no_writes_and_is_no_source_until_all_its_namespaces_are_back(world: World) -> None:
    world.write("oslo", "a")
    world.link_all()
    backup = world.backup("oslo")
    world.open("oslo")
    world.change("oslo", incarnation=2)
    oslo = world["oslo"]
    writes: list[Callable[[], object]] = [
        lambda: oslo.namespace("users").put(b"a", b"b"),
        lambda: oslo.namespace("users").put_many({b"a": b"b", b"c": b"d"}),
        lambda: oslo.namespace("users").compare_and_set(b"new", None, b"b"),
        lambda: oslo.namespace("counts").add(b"all"),
        oslo.host.replication.links,
        lambda: world.link("oslo", "rome"),
        lambda: world.link("rome", "oslo"),
    ]
    for number, namespace in enumerate(sorted(POLICIES)):
        for write in writes:
            with pytest.raises(Rejoining, match=r"floodmark restore --rejoin"):
                write()
        assert oslo.host.membership.finish_rejoining() == sorted(POLICIES)[number:]
        world.restore("oslo", backup, namespace)
    with pytest.raises(Rejoining):
        oslo.namespace("users").put(b"a", b"b")
    assert oslo.host.membership.finish_rejoining() == []
    oslo.namespace("users").put(b"a", b"b")


def test_site_that_has_its_data_does_not_become_another_incarnation(world: World) -> None:
    world.write("oslo", "a")
    with pytest.raises(InvalidConfiguration, match="as if its data were lost"):
        world.change("oslo", incarnation=2)
    world.write("oslo", "b")


def test_state_outlives_a_recovery_and_a_restart(world: World) -> None:
    world.open("oslo")
    world.change("oslo", incarnation=2)
    host = embedded(world["oslo"])
    host.node.storage.stop()
    for _ in range(2):
        with pytest.raises(Rejoining):
            world["oslo"].namespace("users").put(b"a", b"b")
        assert not host.node.storage.stopped
    again = open_engine(host.node.engine, site="oslo", site_id=OSLO, time_source=world.time)
    with pytest.raises(Rejoining):
        again.namespace("users").put(b"a", b"b")


def test_restore_that_is_done_again_changes_nothing(world: World) -> None:
    world.write("oslo", "a")
    world.link("oslo", "rome")
    world.write("oslo", "b")
    backup = world.backup("oslo")
    world.open("oslo")
    world.change("oslo", incarnation=2)
    for namespace in POLICIES:
        world.restore("oslo", backup, namespace)
    before = embedded(world["oslo"]).node.committer.counting.commits
    for namespace in POLICIES:
        world.restore("oslo", backup, namespace)
    assert embedded(world["oslo"]).node.committer.counting.commits == before
    world["oslo"].host.membership.finish_rejoining()
    world.link_all()
    world.require_equal()


@pytest.mark.parametrize("rows", range(5))
def test_restore_that_was_cut_off_is_taken_up_again(world: World, rows: int) -> None:
    world.write("oslo", "a")
    world.link("oslo", "rome")
    world.write("oslo", "b")
    backup = world.backup("oslo")
    world.write("oslo", "c")
    world.link("oslo", "bonn")
    world.open("oslo")
    world.change("oslo", incarnation=2)
    for namespace in POLICIES:
        with suppress(CutOff):
            world.restore("oslo", backup, namespace, rows)
        world.restore("oslo", backup, namespace)
    world["oslo"].host.membership.finish_rejoining()
    world.link_all()
    world.link_all()
    world.require_equal()
    assert world["rome"].namespace("counts").get(b"all") == 3


def test_a_site_that_joins_later_is_told_that_it_needs_a_backup(world: World) -> None:
    """What was restored is in the data of the site, and not in its log: no link takes it anywhere."""
    lose_and_restore(world)
    for _ in range(2):
        world.link_all()
    world.change("lund")
    world.open("lund")
    with pytest.raises(VersionCollected, match=r"was restored.*docs/operations/join\.md"):
        world.link("oslo", "lund")
    world.open("lund")
    world.join("lund", world.backup("rome"))
    world.link_all()
    world.require_equal()


def test_what_comes_back_too_late_is_refused(world: World) -> None:
    """A process that was stopped in the middle of a restore, and wakes up when all is over."""
    lose_and_restore(world)
    stored = encode_value(b"old", origin=Stamp(1, OSLO))
    for incarnation in (1, 2):
        guard = LinkGuard(source=OSLO, positions={}, incarnation=incarnation)
        stream = world["oslo"].host.write_stream(ApplyStream(True, guard))
        with pytest.raises(StaleLink, match="has got everything back"):
            stream.send({b"\x00\x00\x01key": stored}).result()


# What the others see to


def test_links_of_the_earlier_life_are_shut_out(world: World) -> None:
    world.write("oslo", "a")
    old = plan_step(world["oslo"].host, world["rome"].host, tuple(POLICIES))
    lost = world["oslo"]
    world.sites.pop("oslo")
    world.change("oslo", incarnation=2)
    with pytest.raises(Fenced, match="restored since"):
        run_step(lost.host, world["rome"].host, old)
    assert world["rome"].namespace("users").get(b"all") is None
    with pytest.raises(Fenced, match="restored as incarnation 2"):
        world["rome"].host.replication.advance_link(old, Applied())


@pytest.mark.parametrize("passed", [True, False])
def test_new_versions_lie_above_what_others_have_though_the_clock_was_ahead(
    world: World, monkeypatch: pytest.MonkeyPatch, passed: bool
) -> None:
    if not passed:
        monkeypatch.setattr(returning, "_pass_version", lambda *_: None)
    world.time.advance(400)
    world.write("oslo", "ahead")
    world.time.advance(-1)
    world["oslo"].heartbeat()
    world.time.advance(60)
    world.link("oslo", "rome")
    position = world["rome"].host.replication.watermark("users", None)[OSLO]
    backup = world.backup("oslo")
    world.time.advance(-400)
    world.open("oslo")
    world.change("oslo", incarnation=2)
    for namespace in POLICIES:
        world.restore("oslo", backup, namespace)
    world["oslo"].host.membership.finish_rejoining()
    assert (world["oslo"].namespace("users").put(b"new", b"value") > position) is passed


def test_restore_on_a_machine_whose_clock_is_far_behind_says_so(world: World) -> None:
    world.write("oslo", "everywhere")
    world.link_all()
    backup = world.backup("oslo")
    world.time.advance(-5_000)
    world.open("oslo")
    world.change("oslo", incarnation=2)
    with pytest.raises(ClockSkew, match="set the time on its machine"):
        world.restore("oslo", backup, "users")


def test_tombstones_are_kept_for_a_site_that_is_being_restored(world: World) -> None:
    world["rome"].namespace("users").put(b"gone", b"x")
    backup = world.backup("oslo")
    world["rome"].namespace("users").delete(b"gone")
    for _ in range(3):
        world.link_all()
    world.open("oslo")
    world.change("oslo", incarnation=2)
    world.time.advance(DAYS_MS)
    world["rome"].host.retention.collect_garbage()
    assert b"gone" in world.records("rome", "users")
    assert backup.facts["users"].collected_horizon == 0


def test_backup_from_before_another_site_joined_brings_a_site_back(world: World) -> None:
    """The new site wrote nothing before it joined, so the backup lacks nothing of it."""
    world.write("oslo", "everywhere")
    world.write("rome", "everywhere")
    for _ in range(2):
        world.link_all()
    backup = world.backup("oslo")
    world.change("lund")
    world.open("lund")
    world.join("lund", world.backup("rome"))
    world.write("lund", "first")
    world.link_all()
    world.open("oslo")
    world.change("oslo", incarnation=2)
    for namespace in POLICIES:
        world.restore("oslo", backup, namespace)
    assert world["oslo"].host.membership.finish_rejoining() == []
    world.write("oslo", "in the new life")
    for _ in range(3):
        world.link_all()
    world.require_equal()
    assert world["oslo"].namespace("users").get(b"lund first") == b"x"
    links = [link for site in world.sites.values() for link in site.replication().links]
    assert sum(link.intervals_wrong for link in links) == 0


def lose_twice(world: World) -> tuple[Backup, Backup]:
    """Oslo comes back from a backup, without a write that a later backup holds."""
    good = world.backup("oslo")
    world.write("oslo", "lost")
    tainted = world.backup("oslo")
    bring_back(world, "oslo", good)
    world.write("oslo", "again")
    for _ in range(2):
        world.link_all()
    return tainted, world.backup("rome")


def bring_back(world: World, name: str, backup: Backup) -> None:
    world.open(name)
    world.change(name, incarnation=world.topology.sites[name].incarnation + 1)
    for namespace in POLICIES:
        world.restore(name, backup, namespace)
    assert world[name].host.membership.finish_rejoining() == []


@pytest.mark.parametrize("lost", ["oslo", "rome"])
def test_backup_from_before_a_site_was_restored_is_refused(world: World, lost: str) -> None:
    """It may hold writes that the site has lost, and no link takes them to the others."""
    tainted, good = lose_twice(world)
    with pytest.raises(VersionCollected, match="is from before 'oslo' was restored as incarnation 2"):
        bring_back(world, lost, tainted)
    for namespace in POLICIES:
        world.restore(lost, good, namespace)
    assert world[lost].host.membership.finish_rejoining() == []
    for _ in range(2):
        world.link_all()
    world.require_equal()


def test_new_site_refuses_a_backup_from_before_a_site_was_restored(world: World) -> None:
    tainted, good = lose_twice(world)
    world.change("lund")
    world.open("lund")
    with pytest.raises(VersionCollected, match="is from before 'oslo' was restored"):
        world.join("lund", tainted)
    world.join("lund", good)
    world.link_all()
    world.require_equal()


def test_backup_from_before_deletions_that_others_have_forgotten_is_refused(world: World) -> None:
    world["oslo"].namespace("users").put(b"gone", b"x")
    backup = world.backup("oslo")
    world["oslo"].namespace("users").delete(b"gone")
    for _ in range(3):
        world.link_all()
    world.time.advance(DAYS_MS)
    world.link_all()
    world["rome"].host.retention.collect_garbage()
    assert b"gone" not in world.records("rome", "users")
    world.open("oslo")
    world.change("oslo", incarnation=2)
    with pytest.raises(VersionCollected, match="'rome' has collected deletions"):
        world.restore("oslo", backup, "users")
    fresh = world.backup("bonn")
    world.restore("oslo", fresh, "users")
    assert b"gone" not in {key for key, _ in world["oslo"].namespace("users").scan()}


# What users see


def test_changes_from_before_the_return_are_refused_and_those_behind_it_come(world: World) -> None:
    lose_and_restore(world)
    oslo = world["oslo"]
    with pytest.raises(VersionCollected):
        next(iter(oslo.changes("users", since=1)))
    begin = oslo.host.retention.oldest_version("users")
    with pytest.raises(VersionCollected):
        oslo.namespace("users").get(b"all", at=begin - 1)
    oslo.namespace("users").put(b"later", b"x")
    assert [change.key for change in oslo.changes("users", since=begin)][-1] == b"later"


def test_stamps_stay_what_they_were(world: World) -> None:
    version = world["oslo"].namespace("users").put(b"a", b"b")
    backup = world.backup("oslo")
    world.open("oslo")
    world.change("oslo", incarnation=2)
    world.restore("oslo", backup, "users")
    assert decode_value(world.records("oslo", "users")[b"a"]).origin == Stamp(version, OSLO)


@pytest.mark.parametrize("namespace", range(len(POLICIES)))
def test_topology_that_was_set_in_part_shuts_links_out_and_is_set_by_the_same_call(
    world: World, namespace: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a link that runs on would fill the site, and what is there would be refused as not lost."""
    world.write("rome", "a")
    engine = MemoryEngine(FAMILIES)
    oslo = open_engine(engine, site="oslo", site_id=OSLO, time_source=world.time)
    made = count()

    def create(catalog: Catalog, *arguments: Any) -> object:
        if next(made) == namespace:
            raise StorageFailed("the disk is away")
        return create_namespace(catalog, *arguments)

    create_namespace = Catalog.create
    entry = msgspec.structs.replace(world.topology.sites["oslo"], incarnation=2)
    topology = msgspec.structs.replace(world.topology, epoch=2, sites={**world.topology.sites, "oslo": entry})
    monkeypatch.setattr(Catalog, "create", create)
    with pytest.raises(StorageFailed):
        oslo.set_topology(topology)
    with pytest.raises(Rejoining):
        plan_step(world["rome"].host, oslo.host, tuple(POLICIES))
    assert len(oslo.namespaces()) == namespace
    assert oslo.host.membership.finish_rejoining() == sorted(POLICIES)
    oslo.set_topology(topology)
    assert [row.name for row in oslo.host.namespaces.list_namespaces()] == sorted(POLICIES)
    oslo.set_topology(topology)


def test_site_whose_others_are_all_gone_comes_back_with_what_the_backup_holds() -> None:
    world = World("oslo", "bonn")
    for name in world.sites:
        world.write(name, "first")
    for _ in range(2):
        world.link_all()
    backup = world.backup("oslo")
    survivors = {"oslo": world["oslo"].host}
    remove_site(world.topology, "bonn", survivors, lambda topology: setattr(world, "topology", topology))
    del world.sites["bonn"]
    before = {name: dict(world["oslo"].namespace(name).scan()) for name in POLICIES}
    world.open("oslo")
    world.change("oslo", incarnation=2)
    for namespace in POLICIES:
        world.restore("oslo", backup, namespace)
    assert world["oslo"].host.membership.finish_rejoining() == []
    assert {name: dict(world["oslo"].namespace(name).scan()) for name in POLICIES} == before
    world.write("oslo", "second")
