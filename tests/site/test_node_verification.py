"""Records are found and repaired at any node of a site, whichever node owns them."""

import pytest
from tests.nodes import NodeCluster
from tests.replication.support_links import open_one

from floodmark.codec.ordered import encode_key
from floodmark.codec.values import encode_value
from floodmark.divergence.comparing import Drift, compare_keys, take_vantage
from floodmark.divergence.repairing import RepairSummary, repair
from floodmark.engine import MemoryEngine
from floodmark.host.ports import VerificationPort
from floodmark.links.applying import Applier
from floodmark.links.reading import read_step
from floodmark.links.steps import plan_step
from floodmark.model.change import Stamp
from floodmark.model.errors import Retryable
from floodmark.model.record import FoundRecord, Repair
from floodmark.model.version import COUNTER_BITS, Version
from floodmark.partition import FAMILIES, LocalPartition
from floodmark.partition.families import DATA
from floodmark.partition.membership import LEASE_MS
from floodmark.replication.topology import MemberSite, SharedNamespace, Topology
from floodmark.site import Site

KEYS = [b"ada", b"ken", b"zoe"]


def verification(cluster: NodeCluster, number: int) -> VerificationPort:
    return cluster.sites[number].host.verification


def versions(found: list[FoundRecord | None]) -> list[Version]:
    return [0 if record is None else record.version for record in found]


@pytest.mark.parametrize("number", [1, 2, 3])
def test_records_above_the_resolved_version_are_found_at_any_node(cluster: NodeCluster, number: int) -> None:
    site = cluster.sites[number]
    written = [site.namespace("users").put(key, b"1") for key in KEYS]
    # As if it had come from a site whose clock is ahead.
    at = site.resolved_version() + (50 << COUNTER_BITS)
    for version in (at, None):
        assert versions(verification(cluster, number).find_records("users", KEYS, version, False)) == written
    later = [site.namespace("users").put(key, b"2") for key in KEYS]
    assert versions(verification(cluster, number).find_records("users", KEYS, at, True)) == written
    assert versions(verification(cluster, number).find_records("users", KEYS, None, True)) == later


def test_no_write_comes_below_a_version_at_which_records_were_found(cluster: NodeCluster) -> None:
    """Node 3's clock is behind: what it writes after the look lies above the version of the look."""
    cluster.offsets[3] = -100
    site = cluster.sites[1]
    at = site.now()
    assert versions(verification(cluster, 1).find_records("users", KEYS, at, True)) == [0, 0, 0]
    assert cluster.sites[3].namespace("users").put(b"zoe", b"1") > at


def test_an_owner_without_a_lease_settles_nothing(cluster: NodeCluster) -> None:
    at = cluster.sites[1].now()
    owner = cluster.host(3)
    prefix = owner.current.catalog.get("users").id.to_bytes(3, "big")
    partition = owner.served.map.route(prefix + b"zoe")
    partition.settle([prefix + b"zoe"], at)
    cluster.kill(3)
    cluster.time.advance(LEASE_MS)
    with pytest.raises(Retryable):
        partition.settle([prefix + b"zoe"], at)
    cluster.take_over()
    with pytest.raises(Retryable):
        partition.settle([prefix + b"zoe"], at)


@pytest.mark.parametrize("number", [1, 2, 3])
def test_records_of_all_owners_are_repaired_at_any_node(cluster: NodeCluster, number: int) -> None:
    site = cluster.sites[number]
    seen = [site.namespace("users").put(key, b"wrong") for key in KEYS]
    cluster.tick()
    right = encode_value(b"right", origin=Stamp(site.now(), 3))
    repairs = [Repair(key, version, right) for key, version in zip(KEYS, seen, strict=True)]
    site.namespace("users").put(b"ken", b"written since")
    assert verification(cluster, number).repair_records("users", repairs) == [True, False, True]
    assert [value for _, value in site.namespace("users").scan()] == [b"right", b"written since", b"right"]


def test_a_repair_follows_a_partition_that_moves(
    cluster: NodeCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = cluster.sites[1]
    seen = site.namespace("users").put(b"zoe", b"wrong")
    cluster.tick()
    original, moves = LocalPartition.repair, [2]

    def late(self: LocalPartition, *arguments: object) -> list[bytes]:
        if moves:
            site.host.node_port.move(self.id, moves.pop())
        return original(self, *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(LocalPartition, "repair", late)
    right = encode_value(b"right", origin=Stamp(site.now(), 3))
    assert verification(cluster, 1).repair_records("users", [Repair(b"zoe", seen, right)]) == [True]
    assert cluster.owner_of("users", b"zoe") == 2
    assert site.namespace("users").get(b"zoe") == b"right"


def test_drift_from_another_site_is_repaired_at_every_owner(cluster: NodeCluster) -> None:
    """What `floodmark verify --repair` does: compare, choose and write."""
    oslo = cluster.sites[2]
    with open_one(MemoryEngine(FAMILIES), "rome", cluster.time) as rome:
        rome.create_namespace("users")
        topology = Topology(
            epoch=1,
            sites={site.name: MemberSite(id=site.id) for site in (oslo, rome)},
            namespaces={"users": SharedNamespace()},
        )
        for site in (oslo, rome):
            site.set_topology(topology)
        written = {key: oslo.namespace("users").put(key, b"right") for key in KEYS}
        link(cluster, oslo, rome)
        namespace = oslo.namespace("users").id
        for key, version in written.items():
            cluster.engine.write([(DATA, encode_key(namespace, key, version), None)])
        drifts = find_drifts(oslo, rome)
        assert {drift.key for drift in drifts} == {*KEYS}
        assert repair([oslo.host, rome.host], "users", drifts) == RepairSummary(repaired=len(KEYS))
        assert find_drifts(oslo, rome) == []
        assert list(oslo.namespace("users").scan()) == [(key, b"right") for key in KEYS]


def link(cluster: NodeCluster, source: Site, target: Site) -> None:
    """Copy all changes up to now."""
    for _ in range(3):
        cluster.tick()
        for number in cluster.sites:
            cluster.host(number).current.node.heartbeat()
    step = plan_step(source.host, target.host, ("users",))
    with Applier(target.host, step) as applier:
        for rows in read_step(source.host, step):
            applier.add(rows)
        applied = applier.finish()
    target.host.replication.advance_link(step, applied)


def find_drifts(*sites: Site) -> list[Drift]:
    vantages = [take_vantage(site.host, "users") for site in sites]
    found = compare_keys([site.host for site in sites], "users", KEYS, vantages)
    return [each for each in found if isinstance(each, Drift)]
