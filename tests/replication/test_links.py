"""Links as stored: positions move with their accounts, once, in order, and only for those who may."""

from typing import Any

import msgspec
import pytest
from tests.replication.support_links import IDS, Mesh, embedded, open_one, topology_of

from floodmark.clock.hybrid import SKEW_MS_MAX
from floodmark.codec.ordered import encode_namespace
from floodmark.codec.values import encode_value
from floodmark.engine import MemoryEngine
from floodmark.host.statistics import AlarmKind
from floodmark.links.steps import run_step
from floodmark.model.change import Tally
from floodmark.model.errors import (
    ClockSkew,
    Corruption,
    Fenced,
    FloodmarkError,
    InvalidArgument,
    NamespaceNotFound,
    StaleLink,
    VersionCollected,
)
from floodmark.model.partition import Decision, Fate
from floodmark.model.version import compose
from floodmark.partition import FAMILIES
from floodmark.replication.applied import Applied
from floodmark.replication.links import FINDINGS_KEPT, LinkRow
from floodmark.replication.step import LinkStep, NamespaceStep
from floodmark.replication.topology import MemberSite, SharedNamespace, SiteState
from floodmark.site import Site
from floodmark.testing.clock import SimulatedTime

OSLO, ROME, BONN = IDS["oslo"], IDS["rome"], IDS["bonn"]
HOUR_MS = 3_600_000


@pytest.fixture
def mesh() -> Mesh:
    return Mesh("oslo", "rome")


def row_of(site: Site, source: int = OSLO) -> LinkRow:
    """The link as stored."""
    namespace = site.host.namespaces.find_namespace("users").id
    return embedded(site).links.rows[namespace, source]


def changed(step: LinkStep, **fields: Any) -> LinkStep:
    """A step whose one namespace is different."""
    (part,) = step.namespaces
    return msgspec.structs.replace(step, namespaces=(msgspec.structs.replace(part, **fields),))


def unshare(site: Site) -> None:
    """Let a site share nothing any more."""
    site.set_topology(msgspec.structs.replace(topology_of("oslo", "rome", epoch=2), namespaces={}))


# Positions


def test_step_moves_the_position_to_its_end_with_everything_below_in_place(mesh: Mesh) -> None:
    version = mesh.put("oslo", b"ada")
    mesh.beat()
    step = mesh.plan("oslo", "rome")
    run_step(mesh["oslo"].host, mesh["rome"].host, step)
    (part,) = step.namespaces
    assert part.until > version
    assert mesh.watermark("rome") == {OSLO: part.until}
    (link,) = mesh["rome"].host.replication.links()
    assert (link.source_id, link.namespace, link.through, link.incarnation) == (OSLO, "users", part.until, 1)
    assert mesh["rome"].namespace("users").get(b"ada") == b"value"
    assert mesh.watermark("oslo") == {}


def test_step_that_was_noted_does_nothing_when_it_comes_again(mesh: Mesh) -> None:
    mesh.put("oslo", b"ada")
    mesh.beat()
    step = mesh.plan("oslo", "rome")
    applied = run_step(mesh["oslo"].host, mesh["rome"].host, step)
    before = row_of(mesh["rome"])
    mesh["rome"].host.replication.advance_link(step, applied)
    assert row_of(mesh["rome"]) == before


@pytest.mark.parametrize("moved", [-1, 1])
def test_step_from_another_position_is_refused_and_nothing_moves(mesh: Mesh, moved: int) -> None:
    mesh.exchange()
    mesh.put("oslo", b"ada")
    before = row_of(mesh["rome"])
    (part,) = mesh.plan("oslo", "rome").namespaces
    step = changed(mesh.plan("oslo", "rome"), since=part.since + moved)
    with pytest.raises(StaleLink, match="Plan it again"):
        mesh["rome"].host.replication.advance_link(step, Applied())
    assert row_of(mesh["rome"]) == before


def test_namespaces_of_a_step_move_together_or_not_at_all(mesh: Mesh) -> None:
    shared = topology_of("oslo", "rome", epoch=2)
    for site in mesh.sites.values():
        namespaces = {**shared.namespaces, "orders": SharedNamespace()}
        site.set_topology(msgspec.structs.replace(shared, namespaces=namespaces))
    mesh.exchange()
    mesh.put("oslo", b"ada")
    step = mesh.plan("oslo", "rome", ("users", "orders"))
    users, orders = step.namespaces
    stale = msgspec.structs.replace(orders, since=orders.since + 1)
    with pytest.raises(StaleLink):
        mesh["rome"].host.replication.advance_link(
            msgspec.structs.replace(step, namespaces=(users, stale)), Applied()
        )
    assert mesh.watermark("rome") == {OSLO: users.since}


def test_namespace_that_was_made_anew_is_not_moved_by_a_step_of_its_predecessor(mesh: Mesh) -> None:
    mesh.put("oslo", b"ada")
    step = mesh.plan("oslo", "rome")
    unshare(mesh["rome"])
    mesh["rome"].drop_namespace("users")
    with pytest.raises(NamespaceNotFound):
        mesh["rome"].host.replication.advance_link(step, Applied())
    mesh["rome"].create_namespace("users")
    with pytest.raises(StaleLink, match="made anew"):
        mesh["rome"].host.replication.advance_link(step, Applied())
    assert mesh.watermark("rome") == {}


@pytest.mark.parametrize(
    ("source", "since", "until"), [(0, 0, 1), (256, 0, 1), (OSLO, 2, 1), (OSLO, -1, 1), (OSLO, 0, 1 << 64)]
)
def test_step_that_no_planner_makes_is_refused(mesh: Mesh, source: int, since: int, until: int) -> None:
    identity = mesh["rome"].host.namespaces.find_namespace("users").id
    part = NamespaceStep(name="users", source_id=1, target_id=identity, since=since, until=until)
    step = LinkStep(source="oslo", source_id=source, namespaces=(part,))
    with pytest.raises(InvalidArgument):
        mesh["rome"].host.replication.advance_link(step, Applied())


def test_links_are_there_again_when_the_site_is_opened_again() -> None:
    mesh = Mesh("oslo", "rome", topology=False)
    engine = MemoryEngine(FAMILIES)
    rome = mesh.sites["rome"] = open_one(engine, "rome", mesh.time)
    rome.create_namespace("users")
    mesh.put("oslo", b"ada")
    mesh.exchange()
    mesh.exchange()
    links = embedded(rome).links
    held = links.rows
    links.load()
    assert held
    assert links.rows == held


def test_damaged_row_is_told(mesh: Mesh) -> None:
    mesh.exchange()
    host = embedded(mesh["rome"])
    (key, _), *_ = host.node.engine.scan("meta", b"links/", b"links0", rows_max=1, bytes_max=100)
    host.node.engine.write([("meta", key, b"\xff")])
    with pytest.raises(Corruption, match="link is damaged"):
        host.links.load()


# The watermark as of a version


def test_watermark_is_what_it_was_at_every_version(mesh: Mesh) -> None:
    seen = []
    for number in range(4):
        mesh.put("oslo", b"%d" % number)
        before = mesh["rome"].now()
        mesh.exchange()
        seen.append((before, mesh["rome"].now(), mesh.watermark("rome")[OSLO]))
    for (before, after, through), (_, _, earlier) in zip(seen, [(0, 0, 0), *seen[:-1]], strict=True):
        assert mesh.watermark("rome", before) == ({OSLO: earlier} if earlier else {})
        assert mesh.watermark("rome", after) == {OSLO: through}


def test_watermark_covers_only_what_a_reader_at_that_version_sees(mesh: Mesh) -> None:
    """Whatever the source committed up to the watermark at a version, a read there finds."""
    versions = {}
    for number in range(10):
        key = b"%d" % number
        versions[key] = mesh.put("oslo", key)
        mesh.exchange()
        at = mesh["rome"].now()
        covered = {key for key, version in versions.items() if version <= mesh.watermark("rome", at)[OSLO]}
        read = dict(mesh["rome"].namespace("users").scan(at=at))
        assert covered == set(read) == set(versions)


def test_old_marks_go_with_garbage_collection_and_the_one_that_is_needed_stays(mesh: Mesh) -> None:
    for _ in range(5):
        mesh.exchange()
    through, old = mesh.watermark("rome"), mesh["rome"].now()
    mesh.time.advance(2 * HOUR_MS)
    mesh["rome"].collect_garbage()
    engine = embedded(mesh["rome"]).node.engine
    assert len(engine.scan("meta", b"marks/", b"marks0", rows_max=10, bytes_max=1000)) == 1
    oldest = mesh["rome"].host.retention.oldest_version("users")
    assert mesh.watermark("rome", oldest) == through
    with pytest.raises(VersionCollected):
        mesh.watermark("rome", old)


def test_links_of_a_dropped_namespace_go_with_it(mesh: Mesh) -> None:
    mesh.exchange()
    rome = mesh["rome"]
    unshare(rome)
    rome.drop_namespace("users")
    assert rome.host.replication.links() == []
    assert embedded(rome).links.watermarks() == {}
    mesh.time.advance(2 * HOUR_MS)
    rome.collect_garbage()
    assert embedded(rome).links.rows == {}
    for prefix in (b"links/", b"marks/"):
        rows = embedded(rome).node.engine.scan("meta", prefix, prefix + b"\xff", rows_max=9, bytes_max=999)
        assert rows == []


# Heartbeats


def test_heartbeat_carries_the_watermark_of_every_namespace(mesh: Mesh) -> None:
    for site in mesh.sites.values():
        site.create_namespace("orders")
    mesh.exchange()
    beat = mesh["rome"].heartbeat()
    users = mesh["rome"].host.namespaces.find_namespace("users").id
    assert beat.watermark == {users: mesh.watermark("rome")}
    assert mesh.watermark("rome", beat.through) == mesh.watermark("rome")


def test_last_heartbeat_says_how_far_the_source_was(mesh: Mesh) -> None:
    mesh.exchange()
    mesh.exchange()
    beat = row_of(mesh["rome"]).beat
    assert beat is not None
    assert beat.wall_ms == mesh.time()
    assert beat.through <= mesh.watermark("rome")[OSLO]
    assert beat.watermark.keys() == {ROME}
    assert 0 < beat.watermark[ROME] <= mesh.watermark("oslo")[ROME]


# Accounts


def test_intervals_are_checked_and_counted_over_many_steps(mesh: Mesh) -> None:
    for number in range(6):
        mesh.put("oslo", b"%d" % number)
        mesh.beat()
        mesh.put("oslo", b"after %d" % number)
        mesh.step("oslo", "rome")
    row = row_of(mesh["rome"])
    assert (row.checked, row.unchecked, row.wrong) == (5, 1, 0)


def test_heartbeats_that_go_through_the_same_version_are_checked_as_one(mesh: Mesh) -> None:
    """While something is prepared, no heartbeat goes past it."""
    mesh.exchange()
    node = embedded(mesh["oslo"]).node
    node.settle_by(lambda _: Fate(Decision.UNDECIDED))
    (partition,) = node.map.partitions
    users = mesh["oslo"].host.namespaces.find_namespace("users").id
    mesh.put("oslo", b"ada")
    version = partition.prepare("t", [encode_namespace(users) + b"bob"], [encode_value(b"builder")])
    for _ in range(3):
        mesh.beat("oslo")
    partition.commit_prepared("t", version)
    mesh.beat("oslo")
    mesh.step("oslo", "rome")
    row = row_of(mesh["rome"])
    assert (row.checked, row.unchecked, row.findings) == (2, 1, ())
    assert dict(mesh["rome"].namespace("users").scan()) == {b"ada": b"value", b"bob": b"builder"}


def test_a_link_that_begins_above_its_first_heartbeat_misses_nothing(mesh: Mesh) -> None:
    """Over several nodes a heartbeat ends where the slowest one is."""
    node = embedded(mesh["oslo"]).node
    node.settle_by(lambda _: Fate(Decision.UNDECIDED))
    (partition,) = node.map.partitions
    users = mesh["oslo"].host.namespaces.find_namespace("users").id
    version = partition.prepare("t", [encode_namespace(users) + b"bob"], [encode_value(b"builder")])
    begin = mesh.put("oslo", b"ada")
    mesh.beat("oslo")
    partition.commit_prepared("t", version)
    mesh.put("oslo", b"kim")
    mesh.beat("oslo")
    mesh.beat("oslo")
    run_step(mesh["oslo"].host, mesh["rome"].host, changed(mesh.plan("oslo", "rome"), start=begin))
    row = row_of(mesh["rome"])
    assert (row.checked, row.unchecked, row.findings) == (1, 2, ())


def lose_one(applied: Applied) -> Applied:
    """One change less than there was."""
    part = applied.namespaces["users"]
    (through, tally), *others = part.tallies
    less = Tally(tally.changes - 1, tally.digest ^ 1)
    return Applied({"users": msgspec.structs.replace(part, tallies=[(through, less), *others])})


def step_losing_one(mesh: Mesh) -> None:
    """A change and a heartbeat, of which the change is not counted at the target."""
    mesh.put("oslo", b"ada")
    mesh.beat()
    step = mesh.plan("oslo", "rome")
    applied = mesh.apply("oslo", "rome", step)
    mesh["rome"].host.replication.advance_link(step, lose_one(applied))


def test_change_lost_on_the_way_is_found_at_the_next_heartbeat_and_remembered(mesh: Mesh) -> None:
    mesh.exchange()
    step_losing_one(mesh)
    row = row_of(mesh["rome"])
    (stored,) = row.findings
    assert (row.wrong, stored.at_ms) == (1, mesh.time())
    got = stored.finding.got
    assert stored.finding.expected == Tally(got.changes + 1, got.digest ^ 1)
    mesh.exchange()
    assert row_of(mesh["rome"]).findings == (stored,)
    assert row_of(mesh["rome"]).checked > row.checked


def test_change_lost_in_an_interval_in_which_its_site_was_started_is_found() -> None:
    mesh, engine = Mesh("oslo", "rome"), MemoryEngine(FAMILIES)
    mesh.sites["oslo"] = open_one(engine, "oslo", mesh.time)
    mesh["oslo"].set_topology(topology_of("oslo", "rome"))
    for _ in range(2):
        mesh.exchange()
    mesh.put("oslo", b"ada")
    mesh.sites["oslo"] = open_one(engine, "oslo", mesh.time)
    mesh.beat()
    step = mesh.plan("oslo", "rome")
    mesh["rome"].host.replication.advance_link(step, lose_one(mesh.apply("oslo", "rome", step)))
    assert row_of(mesh["rome"]).wrong == 1


def test_only_the_last_findings_are_kept(mesh: Mesh) -> None:
    mesh.exchange()
    for _ in range(FINDINGS_KEPT + 3):
        step_losing_one(mesh)
    row = row_of(mesh["rome"])
    assert (row.wrong, len(row.findings)) == (FINDINGS_KEPT + 3, FINDINGS_KEPT)
    assert row.findings[-1].at_ms == mesh.time()


def forged(mesh: Mesh, **changes: int) -> LinkStep:
    """A step past a change that is not applied, as one who may move positions could make it."""
    mesh.put("oslo", b"lost")
    return changed(mesh.plan("oslo", "rome"), **changes)


def test_a_step_past_changes_that_did_not_come_is_found_at_the_next_heartbeat(mesh: Mesh) -> None:
    mesh.exchange()
    mesh.put("oslo", b"ada")
    mesh.beat()
    mesh["rome"].host.replication.advance_link(forged(mesh), Applied())
    mesh.exchange()
    assert row_of(mesh["rome"]).wrong == 1


def test_a_step_that_leaves_out_what_lies_before_its_start_is_found_at_once(mesh: Mesh) -> None:
    mesh.exchange()
    step = forged(mesh)
    (part,) = step.namespaces
    mesh["rome"].host.replication.advance_link(changed(step, start=part.until), Applied())
    row = row_of(mesh["rome"])
    assert (row.wrong, row.findings[-1].finding.since) == (1, part.since)
    (link,) = mesh["rome"].host.status.replication().links
    assert [alarm.kind for alarm in link.alarms] == [AlarmKind.FINDING]


def test_a_step_into_the_future_is_refused(mesh: Mesh) -> None:
    mesh.exchange()
    before = row_of(mesh["rome"])
    step = forged(mesh, until=compose(mesh.time() + SKEW_MS_MAX + 1, 0))
    with pytest.raises(ClockSkew):
        mesh["rome"].host.replication.advance_link(step, Applied())
    assert row_of(mesh["rome"]) == before


def test_an_incarnation_that_the_topology_does_not_name_is_refused(mesh: Mesh) -> None:
    """An account begins anew with it, and what was left out before would not be noticed."""
    mesh.exchange()
    step = msgspec.structs.replace(forged(mesh), incarnation=2)
    assert "incarnation 1" in refused(mesh, step)


# Who may


def refused(mesh: Mesh, step: LinkStep) -> str:
    """What a step is refused with; it moves nothing, and the link is shown as stalled."""
    before = mesh.watermark("rome")
    with pytest.raises(Fenced) as refusal:
        mesh["rome"].host.replication.advance_link(step, Applied())
    assert mesh.watermark("rome") == before
    (part,) = step.namespaces
    assert embedded(mesh["rome"]).links.recent.of(part.target_id, step.source_id).stalled
    return str(refusal.value)


def test_earlier_incarnation_is_refused_and_a_later_one_goes_on_from_there(mesh: Mesh) -> None:
    mesh.exchange()
    mesh.put("oslo", b"ada")
    step = mesh.plan("oslo", "rome")
    restored = MemberSite(id=OSLO, incarnation=2)
    mesh["rome"].set_topology(topology_of("oslo", "rome", epoch=2, oslo=restored))
    assert "incarnation 2" in refused(mesh, step)
    mesh["rome"].host.replication.advance_link(msgspec.structs.replace(step, incarnation=2), Applied())
    (part,) = step.namespaces
    assert mesh.watermark("rome") == {OSLO: part.until}


def test_incarnation_that_was_seen_is_remembered_without_a_topology() -> None:
    mesh = Mesh("oslo", "rome", topology=False)
    mesh.exchange()
    mesh.put("oslo", b"ada")
    step = mesh.plan("oslo", "rome")
    later = msgspec.structs.replace(step, incarnation=3)
    mesh["rome"].host.replication.advance_link(later, Applied())
    mesh.put("oslo", b"grace")
    assert "incarnation 3" in refused(mesh, mesh.plan("oslo", "rome"))


def test_removed_site_is_heard_up_to_its_end_and_not_beyond() -> None:
    mesh = Mesh("oslo", "rome", "bonn")
    mesh.exchange()
    mesh.put("oslo", b"ada")
    step = mesh.plan("oslo", "rome")
    (part,) = step.namespaces
    gone = MemberSite(id=OSLO, state=SiteState.REMOVED, final=part.until)
    mesh["rome"].set_topology(topology_of("oslo", "rome", "bonn", epoch=2, oslo=gone))
    assert "removed" in refused(mesh, changed(step, until=part.until + 1))
    with pytest.raises(Fenced, match="removed"):
        mesh.apply("oslo", "rome", step)
    exchanged = msgspec.structs.replace(step, incarnation=step.incarnation + 1)
    mesh["rome"].host.replication.advance_link(exchanged, mesh.apply("oslo", "rome", exchanged))
    assert mesh.watermark("rome")[OSLO] == part.until


def test_site_that_does_not_share_the_namespace_is_refused(mesh: Mesh) -> None:
    step = msgspec.structs.replace(mesh.plan("oslo", "rome"), source_id=BONN)
    assert "does not let this namespace come" in refused(mesh, step)


def test_site_is_no_source_of_its_own(mesh: Mesh) -> None:
    step = msgspec.structs.replace(mesh.plan("oslo", "rome"), source_id=ROME)
    assert "this site itself" in refused(mesh, step)


# The topology at a site


def test_topology_is_there_again_after_a_restart() -> None:
    engine, time = MemoryEngine(FAMILIES), SimulatedTime()
    site = open_one(engine, "oslo", time)
    topology = topology_of("oslo", "rome")
    site.set_topology(topology)
    assert site.namespaces() == ["users"]
    members = embedded(site).members
    members.load()
    assert members.topology == site.topology() == topology


def test_same_topology_again_does_nothing_and_another_needs_a_higher_epoch(mesh: Mesh) -> None:
    oslo = mesh["oslo"]
    mesh.time.advance(1_000)
    set_at_ms = embedded(oslo).members.set_at_ms
    oslo.set_topology(topology_of("oslo", "rome"))
    assert embedded(oslo).members.set_at_ms == set_at_ms
    with pytest.raises(FloodmarkError, match="set epoch = 2"):
        oslo.set_topology(topology_of("oslo", "rome", "bonn"))
    oslo.set_topology(topology_of("oslo", "rome", "bonn", epoch=2))


@pytest.mark.parametrize(
    "sites",
    [
        {"rome": MemberSite(id=1), "bonn": MemberSite(id=3)},
        {"oslo": MemberSite(id=9), "rome": MemberSite(id=2)},
    ],
)
def test_topology_must_name_the_site_as_it_was_made(sites: dict[str, MemberSite]) -> None:
    site = open_one(MemoryEngine(FAMILIES), "oslo", SimulatedTime())
    topology = msgspec.structs.replace(topology_of("oslo", "rome"), sites=sites)
    with pytest.raises(FloodmarkError, match="cannot be used at site 'oslo'"):
        site.set_topology(topology)
    assert site.topology() is None


def test_namespace_with_older_data_joins_only_after_it_was_rewritten() -> None:
    site = open_one(MemoryEngine(FAMILIES), "oslo", SimulatedTime())
    site.create_namespace("users").put(b"ada", b"countess")
    topology = topology_of("oslo", "rome")
    with pytest.raises(FloodmarkError, match="floodmark namespace rewrite LOCATION users"):
        site.set_topology(topology)
    assert site.topology() is None
    site.host.membership.note_rewritten("users", site.now())
    site.set_topology(topology)
    assert site.topology() == topology


def test_namespace_whose_every_key_is_gone_is_not_taken_for_an_empty_one() -> None:
    time = SimulatedTime()
    site = open_one(MemoryEngine(FAMILIES), "oslo", time)
    users = site.create_namespace("users")
    users.put(b"ada", b"countess")
    users.delete(b"ada")
    time.advance(30 * HOUR_MS)
    site.collect_garbage()
    assert list(users.scan()) == []
    with pytest.raises(FloodmarkError, match="from before it is shared"):
        site.set_topology(topology_of("oslo", "rome"))


def test_namespace_of_another_policy_is_refused() -> None:
    site = open_one(MemoryEngine(FAMILIES), "oslo", SimulatedTime())
    site.create_namespace("users", merge="counter")
    with pytest.raises(FloodmarkError, match="merges by 'counter' here"):
        site.set_topology(topology_of("oslo", "rome"))
