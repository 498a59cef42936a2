"""A few sites, their writers, readers and faults, in one thread and under one seed.

Every step is drawn from one generator of random numbers, so a seed determines the history.  Each seed also
draws its climate: if everything failed all the time, that would hide bugs that show only when, for example,
clocks jump.
"""

import logging
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from itertools import count
from random import Random
from typing import Final
from unittest.mock import patch

from floodmark.model.errors import PartitionNotFound, VersionCollected
from floodmark.partition.node import STALE_MS
from floodmark.replication.topology import MemberSite, SharedNamespace, Topology
from floodmark.testing.clock import SimulatedTime
from floodmark.testing.engine import Fault
from floodmark.testing.simulation.atomic_readers import AtomicReader
from floodmark.testing.simulation.chronicle import NAMESPACES, POLICIES
from floodmark.testing.simulation.climate import draw_climate
from floodmark.testing.simulation.clocks import Schedule
from floodmark.testing.simulation.convergence import check_convergence
from floodmark.testing.simulation.copies import SiteCopy
from floodmark.testing.simulation.drivers import Driver, Link
from floodmark.testing.simulation.history import RunHistory, Violation
from floodmark.testing.simulation.membership import MembershipChanges
from floodmark.testing.simulation.network import Network
from floodmark.testing.simulation.publishing import ROUNDS, Publisher
from floodmark.testing.simulation.readers import FeedReader, RepeatedReader
from floodmark.testing.simulation.sites import TROUBLE, SimulatedSite
from floodmark.testing.simulation.verifiers import Verifier, check_agreement
from floodmark.testing.simulation.workload import KEYS, choose_write

STEPS: Final = 140
STEP_MS_MAX: Final = 100
HEARTBEAT_MS: Final = 1_000
DOWN_MS_MAX: Final = 2_000
BROKEN_MS_MAX: Final = 500
SITES: Final = {"oslo": 1, "rome": 2, "bonn": 3}
PARTITIONS_MAX: Final = 5
CUT_MS_MAX: Final = 5_000
GHOST_MS_MAX: Final = 150
# The weight of publishing data sets, in a world with publishers.
PUBLISHES: Final = 3
TOPOLOGY: Final = Topology(
    epoch=1,
    sites={name: MemberSite(id=site_id) for name, site_id in SITES.items()},
    namespaces={name: SharedNamespace(merge=merge) for name, merge in POLICIES.items()},
)


class Actions:
    """The actions of a world, by how often each is drawn."""

    def __init__(self, world: "World", numbers: Iterator[int], verifier: Verifier) -> None:
        climate = world.climate
        self.weights: dict[Callable[[], None], float] = {
            self.write: climate.writes,
            self.poll_reader: climate.reads,
            self.collect_garbage: climate.collections,
            self.reshape: climate.reshapes,
            self.jump: climate.jumps,
            self.crash: climate.crashes,
            self.cut: climate.cuts,
            self.drive: climate.drivers,
            self.verify: climate.looks,
        }
        if world.publisher is not None:
            self.weights[world.publisher.poll] = PUBLISHES
        self._world = world
        self._numbers = numbers
        self._verifier = verifier

    def _any_site(self) -> SimulatedSite:
        return self._world.random.choice(self._world.sites)

    def write(self) -> None:
        site = self._any_site()
        write = choose_write(self._world.random, next(self._numbers), site.id, POLICIES)
        if site.is_up:
            site.write(write)

    def poll_reader(self) -> None:
        with suppress(*TROUBLE):
            self._world.random.choice(self._world.readers).poll()

    def verify(self) -> None:
        with suppress(*TROUBLE):
            self._verifier.poll()

    def collect_garbage(self) -> None:
        with suppress(*TROUBLE):
            self._any_site().collect_garbage()

    def reshape(self) -> None:
        site = self._any_site()
        with suppress(PartitionNotFound, *TROUBLE):
            partitions = site.call(lambda open_site: open_site.partitions())
            if len(partitions) < self._world.random.randint(1, PARTITIONS_MAX):
                name, key = self._world.random.choice(NAMESPACES), self._world.random.choice(KEYS)
                site.call(lambda open_site: open_site.split(name, key))
                site.note(f"split before {name}/{key.decode()}")
            elif len(partitions) > 1:
                index = self._world.random.randrange(len(partitions) - 1)
                left, right = partitions[index].id, partitions[index + 1].id
                site.call(lambda open_site: open_site.merge(left, right))
                site.note(f"merged partitions {left} and {right}")

    def jump(self) -> None:
        site = self._any_site()
        site.time.jump(
            self._world.random, far=self._world.climate.clocks_jump_far and self._world.random.random() < 0.5
        )
        site.note(f"clock is off by {site.time.offset_ms} ms")

    def crash(self) -> None:
        site = self._any_site()
        if site.is_up:
            if self._world.random.random() < 0.3:
                site.stop()
            else:
                site.crash()

    def drive(self) -> None:
        """Start another driver of a link: the old one does not know that it has been replaced."""
        Driver(self._world.random.choice(self._world.links), self._world.random, self._world.schedule).go_on()

    def cut(self) -> None:
        world = self._world
        if len(world.sites) < 2:
            return
        caller, target = (site.name for site in world.random.sample(world.sites, 2))
        world.network.cut(caller, target)
        world.history.add(world.time(), caller, f"cannot call {target}")
        world.schedule.after(world.random.randint(1, CUT_MS_MAX), lambda: world.network.mend(caller, target))


class World:
    """A run of one seed."""

    def __init__(self, seed: int, changes: bool | None = None, *, publishes: bool = False) -> None:
        """`changes` is whether sites join, are lost and are removed; if None, this is drawn.

        A world that `publishes` data sets has no such changes.
        """
        self.random = Random(seed)
        self.history = RunHistory()
        self.time = SimulatedTime()
        self.schedule = Schedule(self.time)
        self.sites = [
            SimulatedSite(name, site_id, true_time=self.time, random=self.random, history=self.history)
            for name, site_id in SITES.items()
        ]
        self.network = Network(self.random, self.schedule)
        self.climate = climate = draw_climate(self.random)
        self.topology = TOPOLOGY
        self.copies: dict[str, SiteCopy] = {}
        # Drawn from a generator of its own, so that worlds without such changes keep their histories.
        self._membership = MembershipChanges(
            self, Random(f"membership {seed}"), False if publishes else changes
        )
        self.publisher: Publisher | None = None
        if publishes:
            self.publisher = Publisher(self.sites, self.network, Random(f"publisher {seed}"), self._act)
        for site in self.sites:
            self._adapt(site)
        self.links = [
            Link(source, target, self.network, climate.in_parts)
            for source in self.sites
            for target in self.sites
            if source is not target
        ]
        self._numbers = count(1)
        self._verifier = Verifier(self.sites, self.random)
        self._actions = Actions(self, self._numbers, self._verifier).weights

    def run(self, steps: int = STEPS) -> None:
        """Run some steps, then repair everything and compare the sites."""
        # A follower without changes would wait in real time, although there is no other thread to wait for.
        with patch.multiple("floodmark.feed.reading.reader", GATHER_SECONDS=0, FOLLOW_SECONDS=0), _silence():
            try:
                self._begin()
                self._live(steps)
                self._end()
            except Violation:
                raise
            except Exception as error:
                promise = "5" if isinstance(error, VersionCollected) else "none"
                raise Violation(promise, "some site", f"no rule expects {error!r}") from error

    def census(self) -> Counter[str]:
        """Counts of the events of interest in the run."""
        census = Counter(self._verifier.census)
        for site in self.sites:
            census += site.census()
        return census

    def _live(self, steps: int) -> None:
        actions, weights = list(self._actions), list(self._actions.values())
        for _ in range(steps):
            self._pass_time(self.random.randint(0, STEP_MS_MAX))
            self.random.choices(actions, weights)[0]()

    def _act(self) -> None:
        """Run a random action while a publisher is at work."""
        self._pass_time(self.random.randint(0, STEP_MS_MAX))
        self.random.choices(list(self._actions), list(self._actions.values()))[0]()

    def _begin(self) -> None:
        for site in self.sites:
            site.time.jump(self.random, far=False)
            site.start()
            site.create_namespaces(self.topology)
            site.extend_chronicle()
            self.schedule.after(self.random.randint(1, HEARTBEAT_MS), self._heartbeats_of(site))
        for link in self.links:
            link.hold_safe_points(dict.fromkeys(NAMESPACES, 0))
            Driver(link, self.random, self.schedule).go_on()
        self.network.weather = self.climate.weather
        self.readers: list[FeedReader | RepeatedReader | AtomicReader] = []
        for site in self.sites:
            if self.climate.disks_fail:
                site.disk.disturb(self.random)
            self._add_readers(site)
        self._membership.begin()

    def _add_readers(self, site: SimulatedSite) -> None:
        for name, follows in (("follower", True), ("reader", False)):
            holds = self.random.random() < self.climate.holders
            self.readers.append(FeedReader(site, name, self.random, follows=follows, holds=holds))
        self.readers.append(RepeatedReader(site, self.sites, self.random))
        self.readers.append(AtomicReader(site, self.random, self._numbers, self._pass_time))

    def _adapt(self, site: SimulatedSite) -> None:
        """Apply the climate to a site."""
        site.log_retention = self.climate.log_retention
        site.data_sets = None if self.publisher is None else self.publisher.data_sets
        # Changes copied from a third site arrive key by key.
        site.chronicle.copies_are_whole = not self.climate.in_parts and not self._membership.loses_data

    # Sites that come and go

    def make_site(self, name: str, site_id: int) -> SimulatedSite:
        """A site that does not take part yet."""
        site = SimulatedSite(name, site_id, true_time=self.time, random=self.random, history=self.history)
        self._adapt(site)
        site.time.jump(self.random, far=False)
        self.schedule.after(self.random.randint(1, HEARTBEAT_MS), self._heartbeats_of(site))
        return site

    def start_site(self, site: SimulatedSite) -> None:
        """Start a site that does not take part yet, on a disk that works for a while."""
        if not site.is_up:
            site.start(disturbed=self.climate.disks_fail)
        elif self.climate.disks_fail and site.disk.fired:
            site.disk.disturb(self.random)

    def enter(self, site: SimulatedSite) -> None:
        """Let a site take part, with links in all directions."""
        known = {link.sites for link in self.links}
        for other in self.sites:
            for source, target in ((site, other), (other, site)):
                if (source, target) not in known:
                    incarnation = self.topology.sites[source.name].incarnation
                    link = Link(source, target, self.network, self.climate.in_parts, incarnation)
                    self.links.append(link)
                    Driver(link, self.random, self.schedule).go_on()
        self.sites.append(site)
        self._add_readers(site)
        site.note("takes part")

    def leave(self, site: SimulatedSite) -> None:
        """Remove a site from the world.  The drivers of its links do not know that."""
        self.sites.remove(site)
        self.readers = [reader for reader in self.readers if reader.site is not site]
        self._verifier.begin_anew()
        site.note("takes part no longer")

    def haunt(self, ghost: SimulatedSite) -> None:
        """Keep the links and the writers of a given-up site running as before."""
        incarnation = self.topology.sites[ghost.name].incarnation
        for target in self.sites:
            link = Link(ghost, target, self.network, self.climate.in_parts, incarnation)
            Driver(link, self.random, self.schedule).go_on()

        def write() -> None:
            chosen = choose_write(self.random, next(self._numbers), ghost.id, POLICIES)
            with suppress(*TROUBLE):
                ghost.call(chosen.run)
            if ghost.is_up:
                self.schedule.after(self.random.randint(1, GHOST_MS_MAX), write)

        write()

    def _pass_time(self, milliseconds: int) -> None:
        self.time.advance(milliseconds)
        while (action := self.schedule.next_due()) is not None:
            action()
        for site in self.sites:
            self._mend(site)

    def _mend(self, site: SimulatedSite) -> None:
        """Schedule the repair of a site's faults, and new faults after it."""
        if not site.is_up and not site.is_restarting:
            site.is_restarting = True
            self.schedule.after(self.random.randint(1, DOWN_MS_MAX), lambda: self._restart(site))
        if site.is_up and self.climate.disks_fail and site.disk.fired and not site.disk.is_healing:
            site.disk.is_healing = True
            lasting = site.disk.fired_kind is Fault.PERSISTENT
            delay_ms = self.random.randint(1, BROKEN_MS_MAX) if lasting else 0
            disk = site.disk
            self.schedule.after(delay_ms, lambda: disk.disturb(self.random))

    def _restart(self, site: SimulatedSite) -> None:
        site.is_restarting = False
        if site in self.sites and not site.is_up:
            site.start(disturbed=self.climate.disks_fail)

    def _heartbeats_of(self, site: SimulatedSite) -> Callable[[], None]:
        def beat() -> None:
            self.schedule.after(HEARTBEAT_MS, beat)
            with suppress(*TROUBLE):
                site.call(lambda open_site: open_site.heartbeat())

        return beat

    # The end

    def _end(self) -> None:
        """Repair everything, drain all links, and check everything once more."""
        self.network.heal()
        for site in self.sites:
            self._heal(site)
        self._membership.finish(self._heal)
        # A site that came only now has a disk that may still fail.
        for site in self.sites:
            self._heal(site)
        published = {}
        if self.publisher is not None:
            self.publisher.finish()
            for _ in range(ROUNDS):
                self._drain()
            published = {"published": self.publisher.newest()}
        self._drain()
        for site in self.sites:
            site.extend_chronicle()
            site.check_links()
        if self.publisher is not None:
            self.publisher.check()
        self.time.advance(1)
        check_convergence(
            self.sites, self.time(), self._membership.loses_data, self.copies.values(), **published
        )
        check_agreement(self.sites)
        for reader in self.readers:
            if isinstance(reader, AtomicReader):
                # While it reads, time passes, and disks fail again.
                reader.check()
            else:
                reader.poll()

    def _heal(self, site: SimulatedSite) -> None:
        """Run a site on a working disk with a correct clock."""
        site.time.offset_ms = 0
        site.disk.heal()
        if not site.is_up:
            site.start()
        # The last failure may be noticed, and recovered from, only at the next write.
        with suppress(*TROUBLE):
            site.call(lambda open_site: open_site.heartbeat())
        self._catch_up_with(site)

    def _catch_up_with(self, site: SimulatedSite) -> None:
        """Advance the time until a site's versions are no longer ahead of it."""
        ahead_ms = site.call(lambda open_site: open_site.statistics().clock_ahead_ms)
        self.time.advance(ahead_ms)

    def _drain(self) -> None:
        # What was prepared, and left, is ended by the first heartbeat after a while.
        self.time.advance(STALE_MS)
        for site in self.sites:
            site.call(lambda open_site: open_site.heartbeat())
        for link in self.links:
            link.run_step()


@contextmanager
def _silence() -> Iterator[None]:
    """Switch the logs of sites off, which a simulation would flood."""
    logger = logging.getLogger("floodmark")
    level = logger.level
    logger.setLevel(logging.CRITICAL + 1)
    try:
        yield
    finally:
        logger.setLevel(level)
