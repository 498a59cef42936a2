"""What the tests of links share: a few sites in one thread, under one time, and links between them."""

from collections.abc import Sequence
from datetime import timedelta
from typing import Final

from floodmark.engine import Engine, MemoryEngine
from floodmark.host.embedded import EmbeddedHost
from floodmark.links.applying import Applier
from floodmark.links.reading import read_step
from floodmark.links.steps import plan_step, run_step
from floodmark.partition import FAMILIES
from floodmark.replication.applied import Applied
from floodmark.replication.step import LinkStep
from floodmark.replication.topology import MemberSite, SharedNamespace, Topology
from floodmark.site import Site, open_engine
from floodmark.testing.clock import SimulatedTime

IDS: Final = {"oslo": 1, "rome": 2, "bonn": 3}
RETENTION: Final = timedelta(hours=1)


def topology_of(*names: str, epoch: int = 1, **changed: MemberSite) -> Topology:
    """These sites share `users`; those given by keyword are as given."""
    sites = {name: MemberSite(id=IDS[name]) for name in names} | changed
    return Topology(epoch=epoch, sites=sites, namespaces={"users": SharedNamespace()})


def open_one(engine: Engine, name: str, time: SimulatedTime) -> Site:
    """A site without background work."""
    return open_engine(engine, site=name, site_id=IDS[name], time_source=time)


def embedded(site: Site) -> EmbeddedHost:
    """What an embedded site stands on."""
    assert isinstance(site.host, EmbeddedHost)
    return site.host


class Mesh:
    """Some sites with a namespace `users`, that share it if a topology is set."""

    def __init__(self, *names: str, topology: bool = True) -> None:
        self.time = SimulatedTime()
        self.sites = {name: open_one(MemoryEngine(FAMILIES), name, self.time) for name in names}
        for site in self.sites.values():
            site.create_namespace("users", retention=RETENTION)
            if topology:
                site.set_topology(topology_of(*names))

    def __getitem__(self, name: str) -> Site:
        return self.sites[name]

    def put(self, name: str, key: bytes, value: bytes | None = b"value") -> int:
        """Write a key at a site, or delete it."""
        users = self[name].namespace("users")
        return users.delete(key) if value is None else users.put(key, value)

    def beat(self, *names: str) -> None:
        """A second passes, and some sites, or all of them, write a heartbeat."""
        self.time.advance(1_000)
        for name in names or self.sites:
            self[name].heartbeat()

    def plan(self, source: str, target: str, names: Sequence[str] = ("users",)) -> LinkStep:
        """The next step of a link."""
        return plan_step(self[source].host, self[target].host, names)

    def apply(self, source: str, target: str, step: LinkStep) -> Applied:
        """Apply a step at its target without letting the target take note of it."""
        with Applier(self[target].host, step) as applier:
            for rows in read_step(self[source].host, step):
                applier.add(rows)
            return applier.finish()

    def step(self, source: str, target: str, names: Sequence[str] = ("users",)) -> Applied:
        """Take the next step of a link."""
        return run_step(self[source].host, self[target].host, self.plan(source, target, names))

    def exchange(self) -> None:
        """A heartbeat everywhere, and a step of every link."""
        self.beat()
        for source in self.sites:
            for target in self.sites:
                if source != target:
                    self.step(source, target)

    def watermark(self, name: str, at: int | None = None) -> dict[int, int]:
        """How far a site has the changes of the others."""
        return self[name].host.replication.watermark("users", at)
