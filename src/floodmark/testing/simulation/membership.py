"""Sites that join, are lost and return, or are removed, while everything else runs and fails.

A world has up to two such changes, one after the other.  Each is a sequence of stages that an operator or a
job takes, with time in between; after an error it is repeated from the first stage, as documented for
operators.  The rules are those of `floodmark.links`, and the actions and their order are those of the jobs
(`spark/jobs/backups/restore.py`, `cli/commands/topology.py`).
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from random import Random
from typing import Final, Protocol

import msgspec

from floodmark.host.ports import Host
from floodmark.links.removing import remove_site
from floodmark.links.returning import join_namespace, return_namespace
from floodmark.model.errors import ClockSkew, SafePointNotFound, VersionCollected
from floodmark.model.version import Version
from floodmark.replication.topology import MemberSite, Topology
from floodmark.testing.simulation.chronicle import NAMESPACES, SeenChange, unqualified
from floodmark.testing.simulation.clocks import Schedule
from floodmark.testing.simulation.copies import (
    DistantMember,
    Nearby,
    SiteCopy,
    keep_for,
    keys_of,
    take_copy,
    writer_of,
)
from floodmark.testing.simulation.drivers import Link
from floodmark.testing.simulation.history import Violation
from floodmark.testing.simulation.network import Network
from floodmark.testing.simulation.sites import TROUBLE, SimulatedSite

NEWCOMER: Final = "lund", 4
CHANGES_MAX: Final = 2
# The share of worlds with such changes.
SHARE: Final = 0.35
# The share of given-up sites that keep running, and still send their changes.
GHOSTS: Final = 0.5
BEGIN_MS_MAX: Final = 3_000
STAGE_MS_MAX: Final = 150
AGAIN_MS_MAX: Final = 400
RELEASE_MS: Final = 500
# A change that fails this often after all faults are repaired will never succeed.
ATTEMPTS_MAX: Final = 40
# The network name of operators and jobs, whose calls can be lost, but which are never cut off from a site.
OFFICE: Final = "office"


class SimulatedWorld(Protocol):
    """The parts of the world that a change uses."""

    network: Network
    schedule: Schedule
    sites: list[SimulatedSite]
    links: list[Link]
    topology: Topology
    copies: dict[str, SiteCopy]

    def make_site(self, name: str, site_id: int) -> SimulatedSite: ...

    def start_site(self, site: SimulatedSite) -> None: ...

    def enter(self, site: SimulatedSite) -> None: ...

    def leave(self, site: SimulatedSite) -> None: ...

    def haunt(self, ghost: SimulatedSite) -> None: ...


class MembershipChange:
    """One change of the membership.  Repeating it from the beginning has the same result."""

    def __init__(self, world: SimulatedWorld, random: Random) -> None:
        self.world = world
        self._random = random
        self._topology: Topology | None = None

    def run(self) -> Iterator[None]:
        """The stages."""
        raise NotImplementedError

    @property
    def absent(self) -> SimulatedSite | None:
        """The site that is being added or brought back at the moment, or None."""
        return None

    def member(self, site: SimulatedSite) -> DistantMember:
        """A site as reached by operators."""
        return DistantMember(self.world.network, OFFICE, site)

    def members(self) -> list[DistantMember]:
        """All sites that take part, as reached by operators."""
        return [self.member(site) for site in self.world.sites]

    def announce(self, site: str, entry: MemberSite) -> Iterator[None]:
        """Put a topology with a new entry for a site in force at all sites that take part."""
        world = self.world
        if self._topology is None:
            self._topology = _changed(world.topology, site, entry)
        for member in self.members():
            member.membership.set_topology(self._topology)
            yield
        world.topology = self._topology

    def prepare(self, site: SimulatedSite) -> DistantMember:
        """Start an empty site with its entry in the topology."""
        self.world.start_site(site)
        near = DistantMember(Nearby(), site.name, site)
        near.membership.set_topology(self.world.topology)
        near.shorten_retention()
        return near

    def copy_any(self, name: str) -> SiteCopy:
        """A copy of one of the sites; all sites keep the changes that it lacks."""
        holder, *others = self._random.sample(self.members(), len(self.world.sites))
        return self.copy_one(name, holder, others)

    def copy_one(self, name: str, holder: DistantMember, others: Sequence[DistantMember]) -> SiteCopy:
        """A copy of a site."""
        holder.hold_safe_points(name, dict.fromkeys(NAMESPACES, holder.versions.read_version()))
        keep_for(name, holder, others)
        return take_copy(holder)

    def enter(self, site: SimulatedSite, copy: SiteCopy, point: str) -> None:
        """Let a restored site take part, and release the changes held for it when it has them."""
        near = DistantMember(Nearby(), site.name, site)
        begun = {namespace: near.membership.declare_loaded(namespace) for namespace in NAMESPACES}
        for other in self.world.sites:
            near.hold_safe_points(f"link-{other.name}", begun)
        _begin_chronicle(site, copy)
        self.world.enter(site)
        others = [each for each in self.world.sites if each is not site]
        present: dict[int, Version] = {}

        def release() -> None:
            with suppress(*TROUBLE):
                peers = [each for each in others if each in self.world.sites]
                for each in peers:
                    present.setdefault(each.id, each.call(lambda open_site: open_site.resolved_version()))
                marks = [_watermark(site, namespace) for namespace in NAMESPACES]
                if all(mark.get(each.id, 0) >= present[each.id] for mark in marks for each in peers):
                    for each in peers:
                        _release(each, point)
                    return
            self.world.schedule.after(RELEASE_MS, release)

        self.world.schedule.after(RELEASE_MS, release)


class SiteJoining(MembershipChange):
    """A new site is loaded from a copy of another, after all sites know it."""

    def __init__(self, world: SimulatedWorld, random: Random) -> None:
        super().__init__(world, random)
        self._site = world.make_site(*NEWCOMER)
        self._point = f"copy-{self._site.name}"
        self._copy: SiteCopy | None = None

    @property
    def absent(self) -> SimulatedSite | None:
        return None if self._site in self.world.sites else self._site

    def run(self) -> Iterator[None]:
        yield from self.be_announced()
        if self._copy is None:
            self._copy = self.copy_any(self._point)
            yield
        near = self.prepare(self._site)
        for namespace in NAMESPACES:
            write = writer_of(self._site, namespace, self._copy, self._random)
            join_namespace(near.host, namespace, self._copy.facts[namespace], write)
            yield
        self.enter(self._site, self._copy, self._point)

    def be_announced(self) -> Iterator[None]:
        """Let all sites know of the site before it writes anything."""
        return self.announce(self._site.name, MemberSite(id=self._site.id))


class Returning(MembershipChange):
    """A site loses all its data, and returns as a new incarnation from an older copy.

    Or it is only believed to be lost, and changes of its earlier incarnation still arrive.
    """

    def __init__(self, world: SimulatedWorld, random: Random) -> None:
        super().__init__(world, random)
        self._site = random.choice(world.sites)
        self._point = f"copy-{self._site.name}"
        self._copy: SiteCopy | None = None
        self._is_lost = False

    @property
    def absent(self) -> SimulatedSite | None:
        return None if self._site in self.world.sites else self._site

    def run(self) -> Iterator[None]:
        if not self._is_lost:
            if self._copy is None and self._random.random() < 0.7:
                self._copy = self._copy_itself()
                yield
            self._is_lost = True
            self.world.leave(self._site)
            if self._random.random() < GHOSTS:
                self.world.haunt(self._site.split_off())
            self._site.lose()
            yield
        yield from self._be_fenced()
        near = self.prepare(self._site)
        # Perhaps only the answer to the last call was lost.
        if near.is_rejoining():
            yield from self._get_back(near)
        assert self._copy is not None
        self.world.copies[self._site.name] = self._copy
        self.enter(self._site, self._copy, self._point)

    def _get_back(self, near: DistantMember) -> Iterator[None]:
        """Restore the site's own writes, and the records of other sites in its copy."""
        peers = {member.identity.site: member.host for member in self.members()}
        for namespace in NAMESPACES:
            if self._copy is None:
                self._copy = self.copy_any(self._point)
            write = writer_of(self._site, namespace, self._copy, self._random)
            try:
                return_namespace(near.host, peers, namespace, self._copy.facts[namespace], write)
            except VersionCollected:
                # The copy is too old: take another one and begin again.
                self._copy = None
                self._site.lose()
                self._site.past.pop()
                raise
            yield
        missing = near.membership.finish_rejoining()
        if missing:
            raise Violation("none", self._site.name, f"all was restored, and {missing} is said to be missing")

    def _copy_itself(self) -> SiteCopy:
        """A copy of the site itself, before it is lost."""
        others = [member for member in self.members() if member.site is not self._site]
        return self.copy_one(self._point, self.member(self._site), others)

    def _be_fenced(self) -> Iterator[None]:
        """Make all sites refuse changes of the earlier incarnation that are still in flight."""
        name = self._site.name
        entry = self.world.topology.sites[name]
        if self._topology is None or self._topology.epoch > self.world.topology.epoch:
            entry = msgspec.structs.replace(entry, incarnation=entry.incarnation + 1)
        yield from self.announce(name, entry)
        for link in self.world.links:
            if link.source is self._site:
                link.incarnation = entry.incarnation


class Removing(MembershipChange):
    """A site is removed for good.  It has stopped, or keeps running without knowing that."""

    def __init__(self, world: SimulatedWorld, random: Random) -> None:
        super().__init__(world, random)
        self._site = random.choice(world.sites)
        self._has_left = False

    def run(self) -> Iterator[None]:
        if not self._has_left:
            self._has_left = True
            self.world.leave(self._site)
            # What it had from a copy, and had told no site, goes with it.
            self.world.copies.pop(self._site.name, None)
            if self._random.random() < 0.5:
                self._site.crash()
            yield
        name = self._site.name
        survivors = {member.identity.site: member.host for member in self.members()}
        removed = remove_site(self.world.topology, name, survivors, self._publish)
        self._site.note(f"removed, and ended at {removed.final}")
        for link in self.world.links:
            if link.target is self._site:
                link.is_closed = True
        for site in self.world.sites:
            _release(site, f"link-{name}")
        self.world.links[:] = [link for link in self.world.links if self._site not in link.sites]

    def _publish(self, topology: Topology) -> None:
        self.world.topology = topology


class MembershipChanges:
    """Runs the membership changes of a world at their times."""

    def __init__(self, world: SimulatedWorld, random: Random, wanted: bool | None) -> None:
        self._world = world
        self._random = random
        self._kinds = _draw_kinds(random, wanted)
        self._change: MembershipChange | None = None
        self._stages: Iterator[None] = iter(())
        self.loses_data = Returning in self._kinds or Removing in self._kinds

    def begin(self) -> None:
        """Schedule the first change, which schedules the next."""
        if self._kinds:
            self._world.schedule.after(self._random.randint(0, BEGIN_MS_MAX), self._go_on)

    def finish(self, heal: Callable[[SimulatedSite], None]) -> None:
        """Complete the change in progress, after all other faults are repaired."""
        attempts = 0
        while self._change is not None:
            absent = self._change.absent
            if absent is not None:
                heal(absent)
            attempts += not self._take_stage()
            if attempts > ATTEMPTS_MAX:
                what = type(self._change).__name__
                raise Violation("none", "all sites", f"{what} does not succeed, and nothing is wrong")

    def _go_on(self) -> None:
        if self._change is None:
            if not self._kinds:
                return
            self._change = self._kinds.pop(0)(self._world, self._random)
            self._stages = self._change.run()
        delay_ms_max = STAGE_MS_MAX if self._take_stage() else AGAIN_MS_MAX
        if self._change is None:
            delay_ms_max = BEGIN_MS_MAX
        self._world.schedule.after(self._random.randint(0, delay_ms_max), self._go_on)

    def _take_stage(self) -> bool:
        """Take the next stage; return False if it failed and the change must be repeated."""
        assert self._change is not None
        try:
            next(self._stages)
        except StopIteration:
            self._change = None
        except (*TROUBLE, ClockSkew, VersionCollected):
            self._stages = self._change.run()
            return False
        return True


def _draw_kinds(random: Random, wanted: bool | None) -> list[type[MembershipChange]]:
    drawn = random.random() < SHARE
    if not (drawn if wanted is None else wanted):
        return []
    kinds: Sequence[type[MembershipChange]] = (SiteJoining, Returning, Removing)
    return random.sample(kinds, random.randint(1, CHANGES_MAX))


def _changed(topology: Topology, name: str, entry: MemberSite) -> Topology:
    return msgspec.structs.replace(topology, epoch=topology.epoch + 1, sites={**topology.sites, name: entry})


def _release(site: SimulatedSite, point: str) -> None:
    for namespace in NAMESPACES:
        with suppress(SafePointNotFound):
            site.call_host(
                lambda host, name=f"{point}-{namespace}": (  # type: ignore[misc]
                    host.retention.release_safe_point(name)
                )
            )


def _watermark(site: SimulatedSite, namespace: str) -> Mapping[int, Version]:
    return site.call_host(lambda host: host.replication.watermark(namespace, None))


def _begin_chronicle(site: SimulatedSite, copy: SiteCopy) -> None:
    """Begin the chronicle of a restored site with the records that it has."""

    def read(host: Host) -> tuple[list[SeenChange], Version]:
        loaded, at = [], host.versions.read_version()
        for namespace in NAMESPACES:
            keys = keys_of(namespace)
            for batch in host.router.scan_records(keys, at, dead=True):
                columns = [batch.column(name).to_pylist() for name in ("version", "key", "value")]
                for version, key, stored in zip(*columns, strict=True):
                    loaded.append(
                        SeenChange(version, unqualified(keys.start + key), stored, None, exact=False)
                    )
        return loaded, at

    loaded, at = site.call_host(read)
    horizon = max(facts.collected_horizon for facts in copy.facts.values())
    site.chronicle.begin_with(loaded, at, horizon)
