"""What a site says about its links: how they are doing, and when somebody should look at them."""

from dataclasses import replace

import pytest
from tests.replication.support_links import IDS, Mesh, topology_of

from floodmark.clock.hybrid import SKEW_MS_MAX
from floodmark.host.examination import Severity
from floodmark.host.linking import FINDING_MS_MAX, HEARTBEAT_MS_MAX
from floodmark.host.statistics import AlarmKind, LinkStatistics
from floodmark.model.change import Tally
from floodmark.model.errors import ClockSkew
from floodmark.replication.applied import Applied
from floodmark.replication.topology import MemberSite, SiteState


@pytest.fixture
def mesh() -> Mesh:
    return Mesh("oslo", "rome")


def link(mesh: Mesh) -> LinkStatistics:
    """What rome says about its one link."""
    (found,) = mesh["rome"].replication().links
    return found


def alarms(mesh: Mesh) -> list[AlarmKind]:
    return [alarm.kind for alarm in link(mesh).alarms]


def test_site_that_shares_nothing_has_nothing_to_say() -> None:
    statistics = Mesh("oslo", topology=False)["oslo"].replication()
    assert (statistics.site, statistics.epoch, statistics.links, statistics.alarms) == ("oslo", None, [], [])


def test_link_that_runs_tells_how_old_changes_were_and_raises_no_alarm(mesh: Mesh) -> None:
    mesh.exchange()
    for number in range(200):
        mesh.put("oslo", b"%d" % number)
        mesh.time.advance(10)
    mesh.beat("oslo")
    mesh.time.advance(300)
    mesh.step("oslo", "rome")
    mesh.time.advance(100)
    found = link(mesh)
    assert (found.source, found.source_id, found.namespace) == ("oslo", IDS["oslo"], "users")
    assert (found.heartbeat_age_ms, found.backlog_ms, found.changes) == (400, 100, 200)
    assert found.lag_ms_p50 == pytest.approx(1_300 + 1_000, abs=20)
    assert found.lag_ms_p99 == pytest.approx(1_300 + 1_980, abs=30)
    assert (found.intervals_checked, found.intervals_wrong, found.stalled) == (1, 0, None)
    assert found.alarms == []


def test_lags_are_those_of_the_last_minutes(mesh: Mesh) -> None:
    mesh.put("oslo", b"ada")
    mesh.exchange()
    assert link(mesh).changes == 1
    mesh.time.advance(6 * 60_000)
    assert (link(mesh).changes, link(mesh).lag_ms_p50) == (0, None)


def test_silent_source_raises_an_alarm_although_nobody_writes(mesh: Mesh) -> None:
    mesh.exchange()
    mesh.time.advance(HEARTBEAT_MS_MAX)
    assert alarms(mesh) == []
    mesh.time.advance(1)
    assert alarms(mesh) == [AlarmKind.OVERDUE]
    found = mesh["rome"].replication()
    silent = "no heartbeat for 10 s; check that the source and replication run"
    assert found.alarms == [f"oslo to rome, users: {silent}"]
    links = [replace(found.links[0], namespace=name) for name in ("orders", "users")]
    assert replace(found, links=links).alarms == [f"oslo to rome, orders, users: {silent}"]
    checks = mesh["rome"].host.verification.examine(True)
    assert [each.message for each in checks if each.severity is Severity.WARNING] == found.alarms
    mesh.exchange()
    assert alarms(mesh) == []


def test_source_that_was_never_heard_of_is_expected_from_the_topology_on(mesh: Mesh) -> None:
    assert (link(mesh).heartbeat_age_ms, link(mesh).through, alarms(mesh)) == (None, 0, [])
    mesh.time.advance(HEARTBEAT_MS_MAX + 1)
    assert alarms(mesh) == [AlarmKind.OVERDUE]


def test_stalled_link_says_why_until_it_goes_on(mesh: Mesh) -> None:
    mesh.exchange()
    mesh["rome"].host.replication.stall_link(IDS["oslo"], ["users"], "the clocks are 2 s apart")
    assert alarms(mesh) == [AlarmKind.STALLED]
    assert link(mesh).stalled == "the clocks are 2 s apart"
    assert "the clocks are 2 s apart" in mesh["rome"].replication().alarms[0]
    mesh.exchange()
    assert (link(mesh).stalled, alarms(mesh)) == (None, [])


def test_finding_is_an_alarm_for_a_day_and_remembered_after_it(mesh: Mesh) -> None:
    mesh.exchange()
    mesh.put("oslo", b"ada")
    mesh.beat()
    step = mesh.plan("oslo", "rome")
    applied = mesh.apply("oslo", "rome", step)
    users = applied.namespaces["users"]
    users.tallies = [(through, Tally()) for through, _ in users.tallies]
    mesh["rome"].host.replication.advance_link(step, applied)
    assert alarms(mesh) == [AlarmKind.FINDING]
    assert "1 of 1 changes" in mesh["rome"].replication().alarms[0]
    mesh.time.advance(FINDING_MS_MAX + 1)
    assert AlarmKind.FINDING not in alarms(mesh)
    assert (len(link(mesh).findings), link(mesh).intervals_wrong) == (1, 1)


def test_step_of_a_source_whose_clock_runs_far_ahead_is_refused(mesh: Mesh) -> None:
    mesh.exchange()
    mesh.beat()
    step = mesh.plan("oslo", "rome")
    applied = mesh.apply("oslo", "rome", step)
    mesh.time.advance(-SKEW_MS_MAX - 1)
    with pytest.raises(ClockSkew, match="Check the time on both machines"):
        mesh["rome"].host.replication.advance_link(step, applied)
    mesh.time.advance(1)
    mesh["rome"].host.replication.advance_link(step, applied)
    assert alarms(mesh) == []


def test_source_far_ahead_of_a_clock_that_was_set_back_raises_an_alarm(mesh: Mesh) -> None:
    mesh.exchange()
    mesh.beat()
    step = mesh.plan("oslo", "rome")
    applied = mesh.apply("oslo", "rome", step)
    mesh.time.advance(1)
    mesh["rome"].now()
    mesh.time.advance(-SKEW_MS_MAX - 2)
    mesh["rome"].host.replication.advance_link(step, applied)
    assert alarms(mesh) == [AlarmKind.SKEW]


def test_removed_site_is_not_expected_any_more() -> None:
    mesh = Mesh("oslo", "rome", "bonn")
    mesh.exchange()
    assert [found.source for found in mesh["rome"].replication().links] == ["bonn", "oslo"]
    final = mesh.watermark("rome")[IDS["bonn"]]
    gone = MemberSite(id=IDS["bonn"], state=SiteState.REMOVED, final=final)
    mesh["rome"].set_topology(topology_of("oslo", "rome", epoch=2, bonn=gone))
    assert [found.source for found in mesh["rome"].replication().links] == ["oslo"]


def test_links_without_a_topology_are_shown_by_their_ids() -> None:
    mesh = Mesh("oslo", "rome", topology=False)
    mesh.exchange()
    mesh["rome"].host.replication.advance_link(mesh.plan("oslo", "rome"), Applied())
    assert [found.source for found in mesh["rome"].replication().links] == ["1"]
