"""Nodes show each other certificates, and believe none that their root does not vouch for."""

from dataclasses import replace

import pytest
from tests.nodes import PLAIN, NodeCluster, node_cluster
from tests.server.certificates import Certificates

from floodmark.model.errors import Unreachable
from floodmark.server import ServerOptions
from floodmark.site.connecting import connect


@pytest.fixture
def mutual(certificates: Certificates) -> ServerOptions:
    """A server that verifies its clients, and other nodes, by the root of the certificates."""
    return replace(
        PLAIN,
        tls_certificate=certificates.server.certificate_path,
        tls_key=certificates.server.key_path,
        tls_client_root=certificates.root_path,
        tls_root=certificates.root_path,
    )


def give_second(cluster: NodeCluster) -> None:
    """Make the namespace `users`, and give the keys from `m` on to the second node."""
    cluster.sites[1].create_namespace("users")
    _, right = cluster.sites[1].split("users", b"m")
    cluster.host(1).shared.node.reshaping.move(right, 2)
    cluster.tick()


def test_nodes_call_each_other_with_their_certificates(
    certificates: Certificates, mutual: ServerOptions
) -> None:
    with node_cluster(2, {1: mutual, 2: mutual}) as cluster:
        give_second(cluster)
        for site in cluster.sites.values():
            users = site.namespace("users")
            users.put_many({b"ada": b"1", b"zoe": b"2"})
            assert list(users.scan()) == [(b"ada", b"1"), (b"zoe", b"2")]
        with pytest.raises(Unreachable):
            connect(cluster.servers[1].url, tls_root=certificates.root_path)


def test_a_node_with_a_wrong_root_believes_no_other(
    certificates: Certificates, mutual: ServerOptions
) -> None:
    wrong = replace(mutual, tls_root=certificates.foreign_root_path)
    with node_cluster(2, {1: mutual, 2: wrong}) as cluster:
        give_second(cluster)
        zoe = cluster.sites[1].namespace("users").put(b"zoe", b"1")
        ada = cluster.sites[1].namespace("users").put(b"ada", b"1")
        with pytest.raises(Unreachable, match="certificate"):
            cluster.host(2)._peers.versions(1)
        # The first node knows what both have resolved.  The second does not hear of the first's partition.
        cluster.tick()
        assert cluster.sites[1].resolved_version() > max(ada, zoe)
        assert cluster.host(2).others.resolved_version() < ada
