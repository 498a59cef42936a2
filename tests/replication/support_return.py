"""Sites that share a namespace of each kind, and are lost, restored, joined and removed, in one thread."""

from collections.abc import Callable
from itertools import count
from typing import Any, Final, NamedTuple

import msgspec
from tests.replication.support_links import embedded

from floodmark.codec.ordered import encode_namespace, qualify_range
from floodmark.codec.records import add_origins
from floodmark.codec.values import decode_value, encode_value
from floodmark.engine import MemoryEngine
from floodmark.links.bringing import bring_data_sets
from floodmark.links.exchange import Copied
from floodmark.links.returning import BackupFacts, Portion, join_namespace, return_namespace
from floodmark.links.steps import plan_step, run_step
from floodmark.model.partition import ApplyStream, LoadStream
from floodmark.partition import FAMILIES
from floodmark.replication.topology import MemberSite, SharedNamespace, Topology
from floodmark.site import Site, open_engine
from floodmark.testing.clock import SimulatedTime

IDS: Final = {"oslo": 1, "rome": 2, "bonn": 3, "lund": 4}
POLICIES: Final = {"users": "last_write", "profiles": "fields", "counts": "counter"}


class CutOff(Exception):
    """What the process of a restore was killed by."""


class Backup(NamedTuple):
    """The records of each namespace with their origins, and what else is known of it."""

    records: dict[str, dict[bytes, bytes]]
    facts: dict[str, BackupFacts]


class World:
    """Some sites of one topology."""

    def __init__(self, *names: str) -> None:
        self.time = SimulatedTime()
        self.topology = Topology(
            epoch=1,
            sites={name: MemberSite(id=IDS[name]) for name in names},
            namespaces={name: SharedNamespace(merge=merge) for name, merge in POLICIES.items()},
        )
        self.sites: dict[str, Site] = {}
        for name in names:
            self.open(name)

    def __getitem__(self, name: str) -> Site:
        return self.sites[name]

    def open(self, name: str) -> Site:
        """A site without any data, in the place of one of this name if there is one."""
        site = open_engine(MemoryEngine(FAMILIES), site=name, site_id=IDS[name], time_source=self.time)
        site.set_topology(self.topology)
        self.sites[name] = site
        return site

    def change(self, name: str, **fields: Any) -> None:
        """Change a site's entry in the topology, and set it at all sites."""
        entry = msgspec.structs.replace(self.topology.sites.get(name, MemberSite(id=IDS[name])), **fields)
        self.topology = msgspec.structs.replace(
            self.topology, epoch=self.topology.epoch + 1, sites={**self.topology.sites, name: entry}
        )
        for site in self.sites.values():
            site.set_topology(self.topology)

    def others(self, name: str) -> dict[str, Any]:
        """What the other sites stand on."""
        return {each: site.host for each, site in self.sites.items() if each != name}

    def write(self, name: str, word: str) -> None:
        """Writes at a site, to keys of its own and to keys of all."""
        users, profiles, counts = (self[name].namespace(each) for each in POLICIES)
        users.put_many({b"all": f"{name} {word}".encode(), f"{name} {word}".encode(): b"x"})
        profiles.update(b"all", {name: word, "last": name})
        counts.add(b"all", 1)
        self.time.advance(1)

    def link(self, source: str, target: str) -> None:
        """Copy all that is there in one direction."""
        incarnation = self.topology.sites[source].incarnation
        goal = self[source].resolved_version()
        while True:
            step = plan_step(self[source].host, self[target].host, tuple(POLICIES), incarnation=incarnation)
            if all(part.since >= goal for part in step.namespaces):
                return
            bring_data_sets(self[source].host, self[target].host, step)
            run_step(self[source].host, self[target].host, step)

    def publish(self, *names: str, rows: dict[bytes, bytes]) -> None:
        """Publish users at some sites; the others are away."""
        first, *others = (self[name] for name in names)
        away = self.sites.keys() - set(names)
        first.generations.publish("users", rows, others=others, without=away)

    def link_all(self) -> None:
        """Heartbeats, and all directions."""
        self.time.advance(1_000)
        for site in self.sites.values():
            site.heartbeat()
        for source, target, _ in self.topology.directions():
            self.link(source, target)

    def stored(self, name: str) -> dict[str, dict[bytes, bytes]]:
        """What a site holds of each namespace, tombstones included, wherever it is held."""
        return {
            namespace: {key: _without_origin(record) for key, record in self.records(name, namespace).items()}
            for namespace in POLICIES
        }

    def records(self, name: str, namespace: str) -> dict[bytes, bytes]:
        """The records of a namespace with their origins."""
        site = self[name]
        row = site.host.namespaces.find_namespace(namespace)
        keys = qualify_range(row.id)
        found: dict[bytes, bytes] = {}
        for batch in site.host.router.scan_records(keys, site.now(), dead=True):
            stored = add_origins(batch.column("value"), batch.column("version").to_numpy(), site.id)
            found |= zip(batch.column("key").to_pylist(), stored.to_pylist(), strict=True)
        return found

    def require_equal(self) -> None:
        """All sites hold the same bytes."""
        first, *others = self.sites
        for other in others:
            assert self.stored(other) == self.stored(first), (first, other)

    # Backups

    def backup(self, name: str) -> Backup:
        """All that a site has, as its backups would hold it."""
        host = self[name].host
        version = self[name].resolved_version()
        horizons = {each.name: each.collected_horizon for each in host.status.statistics().namespaces}
        return Backup(
            {namespace: self.records(name, namespace) for namespace in POLICIES},
            {
                namespace: BackupFacts(
                    host.replication.watermark(namespace, version) | {IDS[name]: version},
                    horizons[namespace],
                    self.topology.incarnations(),
                )
                for namespace in POLICIES
            },
        )

    def join(self, name: str, backup: Backup) -> None:
        """Build a new site up from a backup of another."""
        for namespace in POLICIES:
            join_namespace(
                self[name].host, namespace, backup.facts[namespace], self.writer(name, namespace, backup)
            )

    def restore(self, name: str, backup: Backup, namespace: str, rows_max: int | None = None) -> Copied:
        """Build a namespace up again; after so many rows it is cut off."""
        return return_namespace(
            self[name].host,
            self.others(name),
            namespace,
            backup.facts[namespace],
            self.writer(name, namespace, backup, rows_max),
        )

    def writer(
        self, name: str, namespace: str, backup: Backup, rows_max: int | None = None
    ) -> Callable[[Portion], None]:
        """Writes portions of a backup, row by row, until it is cut off."""
        host = embedded(self[name])
        prefix = encode_namespace(host.namespaces.find_namespace(namespace).id)
        written = count()

        def write(portion: Portion) -> None:
            stream = host.write_stream(LoadStream(True) if portion.load else ApplyStream(True))
            for key, record in backup.records[namespace].items():
                part = portion.take(record)
                if part is not None:
                    stream.send({prefix + key: part}).result()
                    if next(written) == rows_max:
                        raise CutOff

        return write


def _without_origin(stored: bytes) -> bytes:
    record = decode_value(stored)
    return encode_value(record.value, record.expires_at, record.deleted, stamps=record.stamps)
