"""Two sites of several nodes each, with links between them, in one thread under a seed.

Nodes stop and are taken over, partitions and the keeper's lease move, and steps of links are interrupted by
all that.  In the end the sites have exchanged all changes and hold equal values (promise 8), and the accounts
of the links have found nothing.
"""

from collections.abc import Callable
from contextlib import suppress
from itertools import count
from random import Random
from typing import Final

import pytest
from tests.cluster import SiteCluster

from floodmark.host.embedded import EmbeddedHost
from floodmark.links.steps import plan_step, run_step
from floodmark.model.errors import FloodmarkError
from floodmark.partition.fencing import load_keeper
from floodmark.partition.membership import BEAT_MS, DEAD_MS
from floodmark.replication.step import LinkStep
from floodmark.replication.topology import MemberSite, SharedNamespace, Topology
from floodmark.testing.clock import SimulatedTime
from floodmark.testing.simulation.chronicle import NAMESPACES, POLICIES, qualified
from floodmark.testing.simulation.faults import plant
from floodmark.testing.simulation.history import Key, Violation
from floodmark.testing.simulation.workload import KEYS, choose_write

STEPS: Final = 80
PARTITIONS_MAX: Final = 4
SITES: Final = {"oslo": 1, "rome": 2}
CHANGES_MAX: Final = 3


class NodeSite(SiteCluster):
    """A site of one to three nodes.  A node that is stopped does nothing until it is started again."""

    def __init__(self, name: str, time: SimulatedTime, random: Random) -> None:
        super().__init__(random.randint(1, 3), name, SITES[name], time)
        self.random = random
        self.stopped: set[int] = set()
        for namespace, merge in POLICIES.items():
            self.sites[0].create_namespace(namespace, merge=merge)
        self.sites[0].set_topology(
            Topology(
                epoch=1,
                sites={each: MemberSite(id=number) for each, number in SITES.items()},
                namespaces={each: SharedNamespace(merge=merge) for each, merge in POLICIES.items()},
            )
        )

    def beat(self) -> None:
        """Let all nodes that run beat, watch each other and write heartbeats."""
        for shared in self.cluster.nodes:
            if shared.number not in self.stopped:
                shared.tick()
                self.renew()
                with suppress(FloodmarkError):
                    shared.node.heartbeat()
        for host in self.hosts:
            if not host.keeps:
                host.refresh()

    @property
    def holder(self) -> EmbeddedHost:
        """The host of the node that holds the keeper's lease, as the engine has it."""
        keeper = load_keeper(self.cluster.engine)
        assert keeper is not None
        return self.hosts[keeper.node - 1]

    def any_host(self) -> EmbeddedHost:
        """The host of a node that runs."""
        numbers = [each.number for each in self.cluster.nodes if each.number not in self.stopped]
        return self.hosts[self.random.choice(numbers) - 1]

    def stop_or_start(self) -> None:
        """Stop a node, with at least one left, or start one again, as a new process or where it stood."""
        number = self.random.randint(1, len(self.cluster.nodes))
        if number not in self.stopped and len(self.stopped) < len(self.cluster.nodes) - 1:
            self.stopped.add(number)
        elif number in self.stopped:
            self.stopped.remove(number)
            if self.random.random() < 0.5:
                self.cluster.nodes[number - 1] = self.cluster.start(number)
                self.renew()

    def reshape(self) -> None:
        """Split or move a partition, by a node that may not own it."""
        node = self.any_host().node
        key = qualified(Key(self.random.choice(NAMESPACES), self.random.choice(KEYS)))
        if len(node.map.partitions) < PARTITIONS_MAX:
            node.reshaping.split(key)
        else:
            number = self.random.randint(1, len(self.cluster.nodes))
            node.reshaping.move(node.map.route(key).id, number)
            self.cluster.nodes[number - 1].node.refresh()

    def give_keeper(self) -> None:
        """Let another node keep the site."""
        shared = self.random.choice(self.cluster.nodes)
        if shared.number not in self.stopped and not shared.is_keeper:
            shared.take_keeper()
            self.renew()


class Pair:
    """Two sites that copy each other."""

    def __init__(self, seed: int) -> None:
        self.random = Random(f"node links {seed}")
        self.time = SimulatedTime()
        self.sites = [NodeSite(name, self.time, self.random) for name in SITES]
        self._numbers = count(1)
        self._planned: list[tuple[NodeSite, NodeSite, LinkStep]] = []

    def run(self) -> None:
        """Live through some steps, then let everything heal and compare the sites."""
        actions: dict[Callable[[], None], float] = {
            self._write: 10,
            self._plan: 4,
            self._step: 4,
            self._pass_time: 4,
            lambda: self._any_site().reshape(): 2,
            lambda: self._any_site().stop_or_start(): 1,
            lambda: self._any_site().give_keeper(): 0.5,
        }
        for _ in range(STEPS):
            action = self.random.choices(list(actions), list(actions.values()))[0]
            with suppress(FloodmarkError):
                action()
        self._heal()
        self._judge()

    def _any_site(self) -> NodeSite:
        return self.random.choice(self.sites)

    def _write(self) -> None:
        target = self._any_site()
        write = choose_write(self.random, next(self._numbers), target.cluster.site_id, POLICIES)
        write.run(target.sites[target.hosts.index(target.any_host())])

    def _plan(self) -> None:
        """Plan a step now; it is taken when much may have changed."""
        source, target = self.random.sample(self.sites, 2)
        step = plan_step(source.any_host(), target.holder, NAMESPACES, changes_max=CHANGES_MAX)
        self._planned.append((source, target, step))

    def _step(self) -> None:
        if self._planned:
            source, target, step = self._planned.pop(self.random.randrange(len(self._planned)))
            # One that keeps the site no more does not know it yet.
            run_step(
                source.any_host(), self.random.choice((target.holder, target.keeper or target.holder)), step
            )

    def _pass_time(self) -> None:
        for _ in range(self.random.choice((1, 1, DEAD_MS // BEAT_MS + 2))):
            self._beat()

    def _beat(self) -> None:
        self.time.advance(BEAT_MS)
        for site in self.sites:
            site.beat()

    def _heal(self) -> None:
        for site in self.sites:
            site.stopped.clear()
        for _ in range(DEAD_MS // BEAT_MS + 2):
            self._beat()
        for _ in range(3):
            self._beat()
            for source, target in (self.sites, self.sites[::-1]):
                step = plan_step(source.any_host(), target.holder, NAMESPACES)
                run_step(source.any_host(), target.holder, step)

    def _judge(self) -> None:
        for namespace in NAMESPACES:
            held = [dict(site.sites[0].namespace(namespace).scan()) for site in self.sites]
            if held[0] != held[1]:
                raise Violation("8", "both sites", f"{namespace} holds {held[0]} and {held[1]}")
        for site in self.sites:
            for row in site.holder.links.rows.values():
                if row.findings:
                    raise Violation("heartbeats", site.name, f"{row.findings[0].finding}")


def run_pair(seed: int, fault: str | None = None) -> Violation | None:
    """Run one seed, perhaps with a planted fault: the promise that it breaks."""
    try:
        if fault is None:
            Pair(seed).run()
        else:
            with plant(fault):
                Pair(seed).run()
    except Violation as violation:
        return violation
    return None


def test_sites_of_several_nodes_that_have_exchanged_all_changes_hold_equal_values() -> None:
    assert [found for seed in range(8) if (found := run_pair(seed))] == []


@pytest.mark.slow
@pytest.mark.parametrize("first", range(8, 48, 10))
def test_sites_of_several_nodes_hold_equal_values_in_many_histories(first: int) -> None:
    assert [found for seed in range(first, first + 10) if (found := run_pair(seed))] == []


@pytest.mark.parametrize("fault", ["loser-stored", "last-to-arrive", "added-again"])
def test_the_simulation_of_linked_nodes_finds_a_planted_fault(fault: str) -> None:
    assert any(run_pair(seed, fault) for seed in range(40))
