"""The pages of a node say whether it serves, why it does not, and what it has done for others."""

import pytest
from prometheus_client.parser import text_string_to_metric_families
from tests.nodes import NodeCluster
from tests.server.test_links import ask

from floodmark.host.asking import OtherNodes
from floodmark.model.errors import FloodmarkError
from floodmark.partition.membership import LEASE_MS, SKEW_MS_MAX


def metrics(cluster: NodeCluster, number: int) -> dict[tuple[str, int], float]:
    """The samples of nodes on the page of one of them, by name and node."""
    status, page = ask(cluster.servers[number], "/metrics")
    assert status == 200
    return {
        (sample.name.removeprefix("floodmark_node_"), int(sample.labels["node"])): sample.value
        for family in text_string_to_metric_families(page)
        for sample in family.samples
        if sample.name.startswith("floodmark_node_") and "node" in sample.labels
    }


def require_refusal(cluster: NodeCluster, number: int, reason: str) -> None:
    for page in ("/readyz", "/health"):
        status, text = ask(cluster.servers[number], page)
        assert status == 503, page
        assert reason in text, page
    # It need not be restarted for that.
    assert ask(cluster.servers[number], "/healthz") == (200, "ok\n")


def require_ready(cluster: NodeCluster, *numbers: int) -> None:
    for number in numbers:
        for page in ("/readyz", "/health"):
            assert ask(cluster.servers[number], page) == (200, "ok\n")


def test_a_node_that_could_not_beat_is_not_ready(cluster: NodeCluster) -> None:
    require_ready(cluster, 1, 2, 3)
    silent = cluster.silence(3)
    cluster.tick(LEASE_MS // 1_000)
    require_refusal(cluster, 3, "node 3 could not beat for 3 seconds")
    require_ready(cluster, 1, 2)
    cluster.sites[3] = silent
    cluster.tick()
    require_ready(cluster, 3)


def test_a_node_that_was_fenced_is_not_ready_until_it_starts_again(cluster: NodeCluster) -> None:
    silent = cluster.silence(3)
    cluster.take_over()
    cluster.sites[3] = silent
    cluster.host(3).beat()
    require_refusal(cluster, 3, "node 3 was declared dead by another node")
    cluster.tick(2)
    require_ready(cluster, 1, 2, 3)
    assert metrics(cluster, 3)["restarts_total", 3] == 1


def test_a_node_whose_clock_is_away_from_the_others_is_not_ready(cluster: NodeCluster) -> None:
    cluster.offsets[3] = 4 * SKEW_MS_MAX
    cluster.tick(2)
    require_refusal(cluster, 3, "Set it right; the node then serves again by itself")
    cluster.offsets[3] = 0
    cluster.tick(2)
    require_ready(cluster, 3)


def test_a_drained_node_is_not_ready(cluster: NodeCluster) -> None:
    cluster.sites[1].host.node_port.drain(3)
    cluster.tick()
    require_refusal(cluster, 3, "node 3 was drained, and other nodes serve its partitions")
    require_ready(cluster, 1, 2)
    told = metrics(cluster, 1)
    assert [told["drained", number] for number in (1, 2, 3)] == [0, 0, 1]
    assert [told["partitions", number] for number in (1, 2, 3)] == [2, 1, 0]


def test_metrics_tell_of_a_takeover(cluster: NodeCluster) -> None:
    before = metrics(cluster, 1)
    assert [before["up", number] for number in (1, 2, 3)] == [1, 1, 1]
    assert [before["keeps", number] for number in (1, 2, 3)] == [1, 0, 0]
    assert before["takeovers_total", 1] == before["restarts_total", 1] == 0
    cluster.kill(3)
    cluster.take_over()
    after = metrics(cluster, 1)
    assert [after["up", number] for number in (1, 2, 3)] == [1, 1, 0]
    assert after["incarnation", 3] == before["incarnation", 3] + 1
    assert after["partitions", 3] == 0
    takeovers = [metrics(cluster, number)["takeovers_total", number] for number in (1, 2)]
    assert sum(takeovers) == 1


def test_pages_of_a_node_wait_for_no_other(cluster: NodeCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither while the keeper is gone, nor while another node does not tell its versions."""
    assert "floodmark_changes_total" in ask(cluster.servers[1], "/metrics")[1]
    waits: list[FloodmarkError] = []
    monkeypatch.setattr("floodmark.host.nodes._pause", lambda *arguments: waits.append(arguments[-1]))
    monkeypatch.setattr(OtherNodes, "_ask", lambda _self, node: pytest.fail(f"node {node} was asked"))
    cluster.kill(1)
    require_ready(cluster, 2)
    assert metrics(cluster, 2) == {("takeovers_total", 2): 0, ("restarts_total", 2): 0}
    page = ask(cluster.servers[2], "/metrics")[1]
    assert 'floodmark_site_up{site="oslo"} 1' in page
    assert "floodmark_changes_total" not in page
    assert waits == []
