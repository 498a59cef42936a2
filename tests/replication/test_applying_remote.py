"""A link between two servers: the same steps, over the wire."""

from collections.abc import Iterator
from contextlib import ExitStack

import pytest
from tests.replication.support_applying import commits_of, state_of, stored_link

from floodmark.engine import MemoryEngine
from floodmark.links.steps import plan_step, run_step
from floodmark.model.errors import StaleLink
from floodmark.model.limits import MIB
from floodmark.partition import FAMILIES
from floodmark.server import serve
from floodmark.site import Site, open_engine
from floodmark.site.connecting import connect

SITES = {"oslo": 1, "rome": 2}


@pytest.fixture
def served() -> Iterator[dict[str, tuple[Site, Site]]]:
    """Each site as its server has it, and as a client of that."""
    with ExitStack() as stack:
        pairs = {}
        for name, site_id in SITES.items():
            site = open_engine(MemoryEngine(FAMILIES), site=name, site_id=site_id)
            site.create_namespace("users")
            server = stack.enter_context(serve(site, "127.0.0.1:0"))
            pairs[name] = site, stack.enter_context(connect(server.url))
        yield pairs


def step(served: dict[str, tuple[Site, Site]], source: str, target: str) -> int:
    hosts = served[source][1].host, served[target][1].host
    return run_step(*hosts, plan_step(*hosts, ["users"])).changes


def test_sites_behind_servers_exchange_whole_commits_and_agree(served: dict[str, tuple[Site, Site]]) -> None:
    (oslo, oslo_client), (rome, rome_client) = served["oslo"], served["rome"]
    oslo.heartbeat()
    users = oslo_client.namespace("users")
    for number in range(20):
        users.put_many({b"key-%04d" % key: b"%d" % number for key in range(number * 50)} or {b"x": b"1"})
    # A commit that is larger than a message, and larger than a batch.
    users.put_many({b"large-%04d" % key: bytes(100_000) for key in range(8 * MIB // 100_000)})
    rome_client.namespace("users").put(b"x", b"from rome")
    oslo.heartbeat()
    changes = step(served, "oslo", "rome")
    assert changes == sum(len(commit) for commit in commits_of(oslo))
    assert step(served, "rome", "oslo") == 1
    assert state_of(oslo) == state_of(rome)
    applied = [commit for commit in commits_of(rome) if commit[0].stamp.site == SITES["oslo"]]
    assert len({change.stamp.version for change in applied[-1]}) == 1
    assert len(applied[-1]) == 8 * MIB // 100_000
    row = stored_link(rome, SITES["oslo"])
    assert (row.checked, row.unchecked, row.wrong) == (1, 1, 0)


def test_a_step_that_is_repeated_over_the_wire_does_nothing(served: dict[str, tuple[Site, Site]]) -> None:
    (oslo, oslo_client), (rome, rome_client) = served["oslo"], served["rome"]
    oslo_client.namespace("users").put(b"a", b"1")
    planned = plan_step(oslo_client.host, rome_client.host, ["users"])
    run_step(oslo_client.host, rome_client.host, planned)
    with pytest.raises(StaleLink):
        run_step(oslo_client.host, rome_client.host, planned)
    assert len(commits_of(rome)) == 1
    assert stored_link(rome, oslo.id).through == planned.namespaces[0].until
