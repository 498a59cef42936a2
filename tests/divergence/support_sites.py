"""Sites in one thread that share a namespace of each policy, with links that may lose something."""

from collections.abc import Iterator, Sequence
from datetime import timedelta
from itertools import permutations
from typing import Final

import pyarrow
import pyarrow.compute
from tests.replication.support_links import IDS, embedded, open_one

from floodmark.codec.ordered import encode_key, encode_namespace
from floodmark.divergence.comparing import (
    Comparison,
    Drift,
    Lag,
    Vantage,
    compare,
    compare_keys,
    take_vantage,
)
from floodmark.divergence.repairing import RepairSummary, repair
from floodmark.engine import MemoryEngine
from floodmark.links.applying import Applier
from floodmark.links.reading import RowKind, read_step
from floodmark.links.steps import plan_step
from floodmark.merge.policies import MergePolicy
from floodmark.model.partition import Content
from floodmark.model.ranges import KeyRange, prefix_end
from floodmark.model.record import FoundRecord
from floodmark.model.version import Version
from floodmark.partition import FAMILIES
from floodmark.partition.families import DATA
from floodmark.replication.topology import MemberSite, SharedNamespace, Topology
from floodmark.site import Namespace, Site
from floodmark.testing.clock import SimulatedTime

POLICIES: Final[dict[str, MergePolicy]] = {"users": "last_write", "profiles": "fields", "counts": "counter"}
RETENTION_MS: Final = 3_600_000


class Sites:
    """Sites that copy each other when they are told to."""

    def __init__(self, *names: str) -> None:
        self.time = SimulatedTime()
        self.sites = {name: open_one(MemoryEngine(FAMILIES), name, self.time) for name in names}
        topology = Topology(
            epoch=1,
            sites={name: MemberSite(id=IDS[name]) for name in names},
            namespaces={name: SharedNamespace(merge=policy) for name, policy in POLICIES.items()},
        )
        for site in self.sites.values():
            for name, policy in POLICIES.items():
                site.create_namespace(name, merge=policy, retention=timedelta(milliseconds=RETENTION_MS))
            site.set_topology(topology)

    def __getitem__(self, name: str) -> Site:
        return self.sites[name]

    def users(self, name: str) -> Namespace:
        """The namespace of plain records at a site."""
        return self[name].namespace("users")

    def beat(self) -> None:
        """A second passes, and all sites write a heartbeat."""
        self.time.advance(1_000)
        for site in self.sites.values():
            site.heartbeat()

    def link(self, source: str, target: str, *, lost: bytes | None = None) -> None:
        """Take a step of a link; what was written to one key may get lost on its way."""
        here, there = self[source].host, self[target].host
        step = plan_step(here, there, tuple(POLICIES))
        with Applier(there, step) as applier:
            for rows in read_step(here, step):
                applier.add(rows if lost is None else _without(rows, lost))
            applied = applier.finish()
        there.replication.advance_link(step, applied)

    def link_all(self) -> None:
        """A heartbeat everywhere, and a step of every link."""
        self.beat()
        for source, target in permutations(self.sites, 2):
            self.link(source, target)

    def collect(self) -> None:
        """So much time passes that what is no longer needed is collected everywhere."""
        self.time.advance(2 * RETENTION_MS)
        self.link_all()
        self.link_all()
        for site in self.sites.values():
            site.collect_garbage()

    # What is found

    def vantages(self, namespace: str) -> list[Vantage]:
        """From where the sites are seen now."""
        return [take_vantage(site.host, namespace) for site in self.sites.values()]

    def compare(self, namespace: str, vantages: list[Vantage]) -> Comparison:
        """Compare all sites over all keys."""
        hosts = [embedded(site) for site in self.sites.values()]
        prefixes = [encode_namespace(host.catalog.get(namespace).id) for host in hosts]
        return compare(
            vantages,
            [
                host.router.scan_records(
                    KeyRange(prefix, prefix_end(prefix)), vantage.version, dead=True, content=Content.THIN
                )
                for host, prefix, vantage in zip(hosts, prefixes, vantages, strict=True)
            ],
        )

    def compare_hosts(
        self, names: Sequence[str], vantages: Sequence[Vantage], keys: list[bytes]
    ) -> Comparison:
        """Compare some sites in some keys."""
        return compare_keys([self[name].host for name in names], "users", keys, vantages)

    def horizon(self, name: str) -> Version:
        """The collected horizon of `users` at a site."""
        facts = self[name].statistics().namespaces
        return next(each.collected_horizon for each in facts if each.name == "users")

    def find(self) -> Iterator[tuple[str, Drift | Lag]]:
        """All differences of all namespaces as of now."""
        for namespace in POLICIES:
            for finding in self.compare(namespace, self.vantages(namespace)):
                yield namespace, finding

    def drifts(self) -> list[tuple[str, Drift]]:
        """Those that no waiting mends."""
        return [(namespace, found) for namespace, found in self.find() if isinstance(found, Drift)]

    def lags(self) -> int:
        """How many others there are."""
        return sum(isinstance(found, Lag) for _, found in self.find())

    def repair(self) -> RepairSummary:
        """Mend what is in the one namespace that has drifted."""
        drifts = self.drifts()
        (namespace,) = {name for name, _ in drifts}
        return repair([site.host for site in self.sites.values()], namespace, [drift for _, drift in drifts])

    # What is stored

    def stored(self, name: str, namespace: str, key: bytes) -> FoundRecord:
        """What a site holds of a key."""
        (found,) = self[name].host.verification.find_records(namespace, [key], None, False)
        assert found is not None
        return found

    def overwrite(
        self, name: str, namespace: str, key: bytes, version: Version, stored: bytes | None
    ) -> None:
        """Change what stands on a site's disk, or take it away."""
        host = embedded(self[name])
        host.node.engine.write([(DATA, encode_key(host.catalog.get(namespace).id, key, version), stored)])


def _without(rows: pyarrow.RecordBatch, key: bytes) -> pyarrow.RecordBatch:
    is_lost = pyarrow.compute.and_(
        pyarrow.compute.equal(rows.column("kind"), pyarrow.scalar(RowKind.CHANGE.value, pyarrow.uint8())),
        pyarrow.compute.equal(rows.column("key"), pyarrow.scalar(key, pyarrow.binary())),
    )
    return rows.filter(pyarrow.compute.invert(is_lost))
