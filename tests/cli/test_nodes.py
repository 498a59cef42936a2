"""The commands about nodes, over the servers of a site of several."""

from collections.abc import Iterator
from threading import Event

import pytest
from tests.cli.support import run
from tests.nodes import NodeCluster, node_cluster
from tests.waiting import HANG_SECONDS

from floodmark.cli.commands import serving
from floodmark.cli.failures import UNREACHABLE, report
from floodmark.host.examination import Severity, check_nodes
from floodmark.host.nodes import NodeHost
from floodmark.host.ports import Balance
from floodmark.model.errors import SiteLocked, Unreachable
from floodmark.partition.membership import claim


@pytest.fixture
def cluster() -> Iterator[NodeCluster]:
    with node_cluster(2) as cluster:
        yield cluster


@pytest.fixture
def url(cluster: NodeCluster) -> str:
    with cluster.connect(1) as site:
        site.create_namespace("users").put(b"m", b"1")
        site.split("users", b"m")
        site.host.node_port.rebalance(Balance.COUNT)
    return cluster.servers[1].url


def test_nodes_are_listed_drained_and_removed(cluster: NodeCluster, url: str) -> None:
    listed = run("node", "list", url, "--json").json_lines
    assert [(each["node"], len(each["partitions"])) for each in listed] == [(1, 1), (2, 1)]
    assert [each["keeper"] for each in listed] == [True, False]
    (move,) = run("node", "drain", url, "2", "--json").json_lines
    assert (move["from"], move["to"]) == (2, 1)
    assert "drained" in run("node", "list", url).text
    cluster.kill(2)
    cluster.take_over()
    assert "no longer listed" in run("node", "remove", url, "2").text
    assert [each["node"] for each in run("node", "list", url, "--json").json_lines] == [1]


def test_partitions_are_moved_and_their_nodes_shown(url: str) -> None:
    first = run("partition", "list", url, "--json").json_lines[0]
    target = 3 - first["node"]
    moved = run("partition", "move", url, str(first["id"]), str(target), "--json").json
    rows = run("partition", "list", url, "--json").json_lines
    assert {each["id"]: each["node"] for each in rows}[moved["partition"]] == target
    assert run("partition", "rebalance", url, "--by", "count", "--json").json_lines
    even = run("partition", "rebalance", url, "--by", "count")
    assert (even.code, even.text, even.errors) == (0, "", "no partition was moved\n")
    assert run("partition", "rebalance", url, "--by", "colour").code == 64


def test_a_number_in_use_is_refused_with_words_about_numbers(
    cluster: NodeCluster, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SiteLocked) as refused:
        claim(cluster.engine, 2, lambda _: cluster.tick())
    assert report(refused.value, debug=False, json=False) == UNREACHABLE
    assert "leave out --node" in capsys.readouterr().err


def test_status_and_doctor_tell_of_nodes(cluster: NodeCluster, url: str) -> None:
    assert "1 keeper" in run("status", url).text
    with cluster.connect(1) as site:
        assert [each.severity for each in check_nodes(site.host.node_port.nodes())] == [Severity.OK]
        cluster.kill(2)
        cluster.take_over()
        (finding,) = check_nodes(site.host.node_port.nodes())
    assert finding.severity is Severity.WARNING
    assert "node 2" in finding.message
    assert check_nodes([]) == []


def test_a_server_goes_on_rebalancing_after_a_failure_until_it_stops(
    cluster: NodeCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    stopping, ended, looked = Event(), Event(), list[NodeHost]()

    def look(host: NodeHost) -> None:
        looked.append(host)
        if len(looked) == 1:
            raise Unreachable("node 2 does not answer")
        stopping.set()

    def run_to_the_end(*arguments: object) -> None:
        loop(*arguments)  # type: ignore[arg-type]
        ended.set()

    loop = serving._rebalance
    monkeypatch.setattr(serving, "_REBALANCE_SECONDS", 0.001)
    monkeypatch.setattr(serving, "rebalance", look)
    monkeypatch.setattr(serving, "_rebalance", run_to_the_end)
    serving._start_rebalancing(cluster.sites[1], serving.NodeOptions(), stopping)
    serving._start_rebalancing(cluster.sites[1], serving.NodeOptions(rebalance=True), stopping)
    assert ended.wait(HANG_SECONDS)
    assert looked == [cluster.host(1)] * 2
