"""Links between sites behind servers: everything that a driver needs travels."""

import http.client

import msgspec
import pytest
from tests.feed.support_losing import lose_changes
from tests.replication.support_links import topology_of
from tests.server.support import LOOPBACK, connected

from floodmark.engine import MemoryEngine
from floodmark.host.linking import HEARTBEAT_MS_MAX
from floodmark.host.statistics import AlarmKind
from floodmark.links.steps import plan_step, run_step
from floodmark.model.errors import Fenced, InvalidConfiguration, StaleLink
from floodmark.partition import FAMILIES
from floodmark.replication.applied import Applied
from floodmark.replication.topology import MemberSite, SiteState
from floodmark.server import Server, ServerOptions, serve
from floodmark.site import open_engine
from floodmark.site.rewriting import rewrite
from floodmark.testing.clock import SimulatedTime


def serve_one(name: str, site_id: int, options: ServerOptions | None = None) -> Server:
    return serve(open_engine(MemoryEngine(FAMILIES), site=name, site_id=site_id), LOOPBACK, options)


def test_step_is_planned_applied_and_noted_through_two_servers() -> None:
    with (
        serve_one("oslo", 1) as first,
        serve_one("rome", 2) as second,
        connected(first) as oslo,
        connected(second) as rome,
    ):
        topology = topology_of("oslo", "rome")
        for site in (oslo, rome):
            assert site.topology() is None
            site.set_topology(topology)
            assert site.topology() == topology
        oslo.namespace("users").put(b"ada", b"countess")
        oslo.heartbeat()
        step = plan_step(oslo.host, rome.host, ["users"])
        run_step(oslo.host, rome.host, step)
        assert rome.namespace("users").get(b"ada") == b"countess"
        (part,) = step.namespaces
        host = rome.host
        assert [link.through for link in host.replication.links()] == [part.until]
        assert host.replication.watermark("users", None) == {1: part.until}
        assert host.replication.watermark("users", rome.now()) == {1: part.until}
        host.replication.advance_link(step, Applied())
        (link,) = rome.replication().links
        assert (link.source, link.changes, link.alarms) == ("oslo", 1, [])
        host.replication.stall_link(1, ["users"], "the disk is full")
        (link,) = rome.replication().links
        assert [alarm.kind for alarm in link.alarms] == [AlarmKind.STALLED]


def test_step_over_many_heartbeats_is_noted_at_once() -> None:
    """A site that was away for hours while nobody wrote has thousands of them to catch up on."""
    time = SimulatedTime()
    with (
        serve(
            open_engine(MemoryEngine(FAMILIES), site="oslo", site_id=1, time_source=time), LOOPBACK
        ) as first,
        serve(
            open_engine(MemoryEngine(FAMILIES), site="rome", site_id=2, time_source=time), LOOPBACK
        ) as second,
        connected(first) as oslo,
        connected(second) as rome,
    ):
        for site in (oslo, rome):
            site.set_topology(topology_of("oslo", "rome"))
        for _ in range(8_000):
            time.advance(1_000)
            first._site.heartbeat()
        applied = run_step(oslo.host, rome.host, plan_step(oslo.host, rome.host, ["users"]))
        assert len(applied.namespaces["users"].beats) == 8_000
        (link,) = rome.replication().links
        assert (link.intervals_checked, link.intervals_unchecked) == (7_999, 1)


def test_refusals_come_back_as_what_they_are() -> None:
    with (
        serve_one("oslo", 1) as first,
        serve_one("rome", 2) as second,
        connected(first) as oslo,
        connected(second) as rome,
    ):
        for site in (oslo, rome):
            site.set_topology(topology_of("oslo", "rome", "bonn"))
        with pytest.raises(InvalidConfiguration, match="set epoch = 2"):
            rome.set_topology(topology_of("oslo", "rome"))
        oslo.namespace("users").put(b"ada", b"countess")
        run_step(oslo.host, rome.host, plan_step(oslo.host, rome.host, ["users"]))
        oslo.namespace("users").put(b"ada", b"programmer")
        last = plan_step(oslo.host, rome.host, ["users"])
        (part,) = last.namespaces
        behind_a_gap = msgspec.structs.replace(part, since=part.since + 1)
        gap = msgspec.structs.replace(last, namespaces=(behind_a_gap,))
        with pytest.raises(StaleLink):
            rome.host.replication.advance_link(gap, Applied())
        gone = MemberSite(id=1, state=SiteState.REMOVED)
        rome.set_topology(topology_of("rome", "bonn", epoch=2, oslo=gone))
        with pytest.raises(Fenced):
            rome.host.replication.advance_link(last, Applied())


def test_namespace_is_rewritten_through_a_server() -> None:
    with serve_one("oslo", 1) as server, connected(server) as oslo:
        users = oslo.create_namespace("users")
        users.put_many({b"%04d" % number: b"x" for number in range(100)})
        with pytest.raises(InvalidConfiguration, match="namespace rewrite"):
            oslo.set_topology(topology_of("oslo", "rome"))
        rewritten = rewrite(oslo.host, "users")
        assert (rewritten.records_read, rewritten.records_written) == (100, 100)
        oslo.set_topology(topology_of("oslo", "rome"))


def test_health_page_of_a_server_names_the_link_that_is_silent() -> None:
    time_ms = [1_700_000_000_000]
    site = open_engine(MemoryEngine(FAMILIES), site="oslo", site_id=1, time_source=lambda: time_ms[0])
    with serve(site, LOOPBACK, ServerOptions(metrics_listen=LOOPBACK)) as server:
        site.set_topology(topology_of("oslo", "rome"))
        assert ask(server, "/health") == (200, "ok\n")
        time_ms[0] += HEARTBEAT_MS_MAX + 1
        status, text = ask(server, "/health")
        assert (status, text.startswith("rome to oslo, users: no heartbeat for 10 s")) == (503, True)
        assert ask(server, "/healthz")[0] == ask(server, "/readyz")[0] == 200
        assert 'kind="overdue",namespace="users",site="oslo",source="rome"} 1.0' in ask(server, "/metrics")[1]


def test_health_page_of_a_server_names_the_feed_that_has_lost_changes() -> None:
    site = open_engine(MemoryEngine(FAMILIES), site="oslo", site_id=1)
    with serve(site, LOOPBACK, ServerOptions(metrics_listen=LOOPBACK)) as server:
        site.create_namespace("users")
        site.feeds.create("lake", "users", "blackhole:")
        assert ask(server, "/health") == (200, "ok\n")
        assert 'floodmark_feed_alarm{feed="lake",site="oslo"} 0.0' in ask(server, "/metrics")[1]
        alarm = lose_changes(site, "lake").alarm
        assert ask(server, "/health") == (503, f"feed lake: {alarm}\n")
        assert ask(server, "/healthz")[0] == ask(server, "/readyz")[0] == 200
        assert 'floodmark_feed_alarm{feed="lake",site="oslo"} 1.0' in ask(server, "/metrics")[1]


def ask(server: Server, page: str) -> tuple[int, str]:
    assert server.metrics_address is not None
    connection = http.client.HTTPConnection(*server.metrics_address, timeout=20)
    try:
        connection.request("GET", page)
        answer = connection.getresponse()
        return answer.status, answer.read().decode()
    finally:
        connection.close()
