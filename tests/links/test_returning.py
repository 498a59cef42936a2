"""A site that is half-way back: what operators read and can do meanwhile, and a return without a backup."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec
import pytest
from tests.cli.support import run
from tests.links.support import POLICIES, Served, ServeSite, require_equal, share, write_everywhere
from tests.links.test_process import run_in_process
from tests.server.support import LOOPBACK
from tests.sizes import only

import floodmark
from floodmark.host.examination import Severity
from floodmark.links import returning
from floodmark.links.driver import TopologySummary, site_addresses
from floodmark.links.exchange import HeldSnapshot
from floodmark.links.removing import Removed, remove_site
from floodmark.links.returning import PeerReturn, return_from_peers
from floodmark.model.errors import InvalidArgument, Rejoining
from floodmark.replication.topology import Topology
from floodmark.replication.topology_file import render_topology
from floodmark.server import serve

ROUNDS = 6


@dataclass
class HalfBack:
    """Three sites, of which oslo has lost its data and is served again, empty."""

    sites: dict[str, Served]
    topology: Topology

    def replicate(self) -> TopologySummary:
        summary: TopologySummary = run_in_process(self.topology, site_addresses(self.topology), once=True)
        return summary

    def bring_back(self, namespace: str) -> PeerReturn:
        addresses = site_addresses(self.topology)
        return return_from_peers(addresses["oslo"], namespace, topology=self.topology, addresses=addresses)

    def remove(self, name: str) -> Removed:
        hosts = {each: served.site.host for each, served in self.sites.items() if each != name}

        def publish(topology: Topology) -> None:
            self.topology = topology

        return remove_site(self.topology, name, hosts, publish)


@pytest.fixture
def half_back(serve_site: ServeSite, tmp_path: Path) -> Iterator[HalfBack]:
    sites, topology = share(serve_site)
    write_everywhere([served.site for served in sites.values()], ROUNDS)
    run_in_process(topology, site_addresses(topology), once=True)
    write_everywhere([sites["bonn"].site], ROUNDS, ROUNDS)
    lost = sites.pop("oslo").site.id
    directory = tmp_path / "again" / "oslo"
    site = floodmark.open(directory, site="oslo", site_id=lost)
    with serve(site, LOOPBACK) as server:
        sites["oslo"] = Served(site=site, server=server, directory=directory)
        entry = msgspec.structs.replace(topology.sites["oslo"], incarnation=2, url=server.url)
        topology = msgspec.structs.replace(
            topology, epoch=topology.epoch + 1, sites={**topology.sites, "oslo": entry}
        )
        for served in sites.values():
            served.site.set_topology(topology)
        yield HalfBack(sites, topology)


def test_status_and_doctor_and_errors_say_what_is_missing_and_the_command(half_back: HalfBack) -> None:
    oslo = half_back.sites["oslo"]
    assert half_back.bring_back("users").missing == ["counts", "profiles"]
    [alarm] = oslo.site.replication().alarms
    assert "lacks 'counts', 'profiles'" in alarm
    assert "--from-peers" in alarm
    assert "one of 'bonn', 'rome'" in alarm
    outcome = run("status", oslo.url)
    assert alarm in outcome.text
    found = {each.check: each for each in oslo.site.host.verification.examine(True)}
    assert found["replication"].severity is Severity.PROBLEM
    assert "lacks 'counts', 'profiles'" in found["replication"].message
    with pytest.raises(Rejoining, match="floodmark status"):
        oslo.site.namespace("users").put(b"a", b"b")
    [alarm] = [
        each.alarms[0].text
        for each in half_back.sites["rome"].site.replication().links
        if (each.source, each.namespace) == ("oslo", "users")
    ]
    assert "comes back as incarnation 2" in alarm


def test_site_comes_back_with_the_present_state_of_a_peer(half_back: HalfBack) -> None:
    for namespace in POLICIES:
        summary = half_back.bring_back(namespace)
        assert summary.records
    assert summary.missing == []
    with pytest.raises(InvalidArgument, match="increment its `incarnation`"):
        half_back.bring_back("users")
    write_everywhere([half_back.sites["oslo"].site], 1)
    assert all(link.stalled is None for link in half_back.replicate().links)
    require_equal([served.site for served in half_back.sites.values()])
    for served in half_back.sites.values():
        assert all(link.intervals_wrong == 0 for link in served.site.replication().links)
        points = [point.name for point in served.site.safe_points()]
        assert not [name for name in points if name.startswith("return-")]


@pytest.mark.parametrize("step", only(["bring_back"], ["prepare_return", "bring_back", "finish_return"]))
def test_return_from_a_peer_that_was_cut_off_is_taken_up_again(
    half_back: HalfBack, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    """The peer goes on writing; the second run loads what the first one did."""

    class CutOff(Exception):
        pass

    def cut_off(*_: object) -> None:
        raise CutOff

    for namespace in POLICIES:
        with monkeypatch.context() as patched:
            patched.setattr(returning, step, cut_off)
            with pytest.raises(CutOff):
                half_back.bring_back(namespace)
        write_everywhere([half_back.sites["bonn"].site], 1, 40)
        half_back.bring_back(namespace)
    half_back.replicate()
    require_equal([served.site for served in half_back.sites.values()])


def test_records_of_another_restore_are_refused(half_back: HalfBack, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(returning, "finish_return", lambda *_: ["users"])
        patched.setattr(returning, "bring_back", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            half_back.bring_back("users")
    for name in ("rome", "bonn"):
        HeldSnapshot(half_back.sites[name].site.host, "users", "return-oslo-users").release()
    with pytest.raises(InvalidArgument, match="holds other records"):
        half_back.bring_back("users")


def test_links_of_the_others_run_meanwhile_and_nothing_waits(half_back: HalfBack, tmp_path: Path) -> None:
    file = tmp_path / "topology.toml"
    file.write_text(render_topology(half_back.topology), "utf-8")
    outcome = run("replicate", "--topology", file, "--once")
    assert outcome.code == 69
    first, waiting = outcome.text.splitlines()
    assert first.startswith("copied 26 changes in ")
    assert waiting.startswith(
        "waiting bonn to oslo, oslo to bonn, oslo to rome, rome to oslo: oslo was restored"
    )
    require_equal([half_back.sites[name].site for name in ("rome", "bonn")])


@pytest.mark.slow
def test_another_site_can_be_removed_meanwhile(half_back: HalfBack) -> None:
    removed = half_back.remove("bonn")
    assert removed.waiting == ["oslo"]
    del half_back.sites["bonn"]
    for namespace in POLICIES:
        half_back.bring_back(namespace)
    assert all(link.stalled is None for link in half_back.replicate().links)
    require_equal([served.site for served in half_back.sites.values()])
    assert half_back.sites["oslo"].site.replication().alarms == []
