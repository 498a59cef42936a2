"""Feeds of a site that several nodes serve: nothing is lost unnoticed, and nothing is reported that came."""

from collections.abc import Callable, Iterator, Set
from typing import Protocol

import pytest
from tests.cluster import SiteCluster
from tests.feed.support import impatient_followers
from tests.replication.support_links import open_one, topology_of

from floodmark.accounting.checks import Checks, check_step
from floodmark.accounting.counting import Counting
from floodmark.codec.changelog import encode_log_range
from floodmark.codec.ordered import NAMESPACE_BYTES, qualify_range
from floodmark.codec.values import encode_value
from floodmark.divergence.comparing import compare_keys, take_vantage
from floodmark.engine import MemoryEngine
from floodmark.host.embedded import EmbeddedHost
from floodmark.host.ports import Host
from floodmark.links.steps import plan_step, run_step
from floodmark.model.partition import Decision, Fate
from floodmark.model.stream import ChangeBatch, ChangesRequest
from floodmark.model.version import VERSION_MAX, Version
from floodmark.partition import FAMILIES
from floodmark.partition.beating import NODE
from floodmark.partition.families import LOG
from floodmark.partition.recounting import last_beat
from floodmark.replication.links import LinkRow
from floodmark.testing.simulation.nodes import tick

# One in each of three partitions, which the nodes with these numbers own.
KEYS = {b"ada": 1, b"ken": 2, b"zoe": 3}
BEAT_MS = 1_100


class Oslo:
    """A site of three nodes, each with a third of the keys.  A node that is dead does nothing."""

    def __init__(self) -> None:
        self.cluster = SiteCluster(3)
        self.dead: set[int] = set()
        first = self.cluster.sites[0]
        self.users = first.create_namespace("users")
        self.namespace = self.cluster.hosts[0].catalog.get("users").id
        for key in (b"h", b"p"):
            first.split("users", key)
        for key, number in KEYS.items():
            if number != 1:
                self.cluster.give(number, self.qualify(key))
        self.beat(times=2)

    def qualify(self, key: bytes) -> bytes:
        return self.namespace.to_bytes(NAMESPACE_BYTES, "big") + key

    def put(self, key: bytes, value: bytes = b"value") -> Version:
        """Write at the owner."""
        qualified = self.qualify(key)
        partition = self.cluster.nodes[0].map.route(qualified)
        return partition.put([qualified], [encode_value(value)], durable=True)

    def beat(self, times: int = 1) -> None:
        """Let all nodes that live beat, one after the other."""
        for _ in range(times):
            self.cluster.cluster.time.advance(BEAT_MS)
            for shared in self.cluster.cluster.nodes:
                if shared.number not in self.dead:
                    tick(shared)
                    shared.node.heartbeat()

    def kill(self, number: int) -> None:
        """Let a node do nothing any more, until others have taken over."""
        self.dead.add(number)
        self.beat(times=8)

    def restart(self, number: int) -> None:
        """Start the process of a node anew."""
        self.dead.discard(number)
        self.cluster.cluster.nodes[number - 1] = self.cluster.cluster.start(number)

    def join(self, ahead_ms: int = 0) -> None:
        """Start one more node, whose clock may be ahead."""
        nodes = self.cluster.cluster.nodes
        self.cluster.cluster.offsets[len(nodes) + 1] = ahead_ms
        nodes.append(self.cluster.cluster.start(len(nodes) + 1))

    def move(self, key: bytes, owner: int) -> None:
        """Give a partition to another node."""
        owners = self.cluster.cluster.nodes
        partition = self.cluster.nodes[0].map.route(self.qualify(key))
        holder = next(each for each in owners if partition in each.node.map.partitions)
        holder.node.reshaping.move(partition.id, owner)
        owners[owner - 1].node.refresh()

    def changes(
        self, node: int, since: Version, *, heartbeats: bool = False, follow: bool = False
    ) -> Iterator[ChangeBatch]:
        """The changes as a node tells them."""
        request = ChangesRequest(
            keys=qualify_range(self.namespace),
            namespace=self.namespace,
            since=since,
            heartbeats=heartbeats,
            follow=follow,
        )
        return self.cluster.hosts[node - 1].changes(request)


class CountedSite(Protocol):
    """A site with id 1 and the namespace whose changes are counted."""

    namespace: int

    def changes(self, node: int, since: Version, /, *, heartbeats: bool) -> Iterator[ChangeBatch]: ...


class Stage:
    """A stage that delivers all changes except some that it loses, and its checks."""

    def __init__(self, oslo: CountedSite) -> None:
        self.checks = Checks()
        self.delivered: list[tuple[Version, bytes]] = []
        self._oslo = oslo
        self._through: Version = 0

    def read(self, node: int = 1, *, losing: Set[Version] = frozenset()) -> Checks:
        """Deliver up to the present, read at a node; the checks after it."""
        counting = Counting(self._through, site_id=1, namespace=self._oslo.namespace)
        for batch in self._oslo.changes(node, self._through, heartbeats=True):
            counting.read(batch)
            rows = zip(batch.versions, (key[NAMESPACE_BYTES:] for key in batch.keys), strict=True)
            came = [(version, key) for version, key in rows if version not in losing]
            counting.deliver([version for version, _ in came], batch.through)
            self.delivered += came
            self._through = max(self._through, batch.through)
        _, counted = counting.report()
        self.checks = check_step(self.checks, counted, self._through, 0)
        return self.checks


@pytest.fixture
def oslo() -> Oslo:
    return Oslo()


def nothing(_: Oslo) -> None:
    """Change nothing."""


def kill_owner_of_zoe(oslo: Oslo) -> None:
    oslo.kill(3)


def kill_owner_of_first_partition(oslo: Oslo) -> None:
    oslo.move(b"ada", 2)
    oslo.put(b"ada")
    oslo.kill(2)


def take_over_and_return(oslo: Oslo) -> None:
    oslo.kill(3)
    oslo.restart(3)
    oslo.beat(2)
    oslo.move(b"ken", 3)


def restart(oslo: Oslo) -> None:
    oslo.restart(2)


def move(oslo: Oslo) -> None:
    oslo.move(b"zoe", 1)


def move_all(oslo: Oslo) -> None:
    for key in (b"ada", b"zoe"):
        oslo.move(key, 2)


def split(oslo: Oslo) -> None:
    oslo.cluster.cluster.nodes[2].node.reshaping.split(oslo.qualify(b"t"))


EVENTS = [
    nothing,
    kill_owner_of_zoe,
    kill_owner_of_first_partition,
    take_over_and_return,
    restart,
    move,
    move_all,
    split,
]


@pytest.mark.parametrize("event", EVENTS)
@pytest.mark.parametrize("lost", [None, *KEYS])
def test_a_lost_change_is_noticed_whatever_becomes_of_its_node(
    oslo: Oslo, event: Callable[[Oslo], None], lost: bytes | None
) -> None:
    stage = Stage(oslo)
    oslo.beat(3)
    stage.read()
    before = stage.checks
    # Written behind the last heartbeats of all nodes, and before the event.
    written = [(oslo.put(key), key) for key in KEYS]
    event(oslo)
    written += [(oslo.put(key), key) for key in KEYS]
    oslo.beat(3)
    checks = stage.read(losing={version for version, key in written[: len(KEYS)] if key == lost})
    assert checks.wrong == (lost is not None)
    assert checks.unchecked == before.unchecked
    assert checks.checked > before.checked
    if lost is None:
        assert set(stage.delivered) >= set(written)


def test_a_doubled_change_is_noticed(oslo: Oslo) -> None:
    stage = Stage(oslo)
    oslo.beat(3)
    stage.read()
    oslo.put(b"ken")
    counting = Counting(stage._through, site_id=1, namespace=oslo.namespace)
    oslo.beat(3)
    through = stage._through
    for batch in oslo.changes(1, stage._through, heartbeats=True):
        counting.read(batch)
        counting.deliver([version for version in batch.versions for _ in range(2)], batch.through)
        through = batch.through
    assert check_step(stage.checks, counting.report()[1], through, 0).wrong == 1


def test_each_node_tells_the_same_heartbeats_and_only_those_of_the_site(oslo: Oslo) -> None:
    oslo.put(b"ken")
    oslo.beat(3)
    told = [
        [beat for batch in oslo.changes(node, 0, heartbeats=True) for beat in batch.heartbeats]
        for node in (1, 2, 3)
    ]
    assert told[0] == told[1] == told[2]
    assert {beat.node for beat in told[0]} == {NODE}
    assert [beat.since for beat in told[0][1:]] == [beat.through for beat in told[0][:-1]]


def test_a_missing_heartbeat_of_a_node_is_told(oslo: Oslo) -> None:
    stage = Stage(oslo)
    oslo.beat(3)
    stage.read()
    # The others beat, so that the row is not summed up before it is lost.
    oslo.dead = {1, 3}
    oslo.put(b"ken")
    oslo.beat()
    start, end = encode_log_range(2, 0, VERSION_MAX)
    rows = oslo.cluster.cluster.engine.scan(LOG, start, end, rows_max=1, bytes_max=1 << 20, reverse=True)
    oslo.cluster.cluster.engine.write([(LOG, key, None) for key, _ in rows])
    oslo.dead = set()
    oslo.beat(3)
    checks = stage.read()
    assert checks.wrong == 1
    assert "a heartbeat" in checks.findings[0].text


def test_a_node_that_starts_above_the_logs_it_is_given_misses_no_heartbeat(oslo: Oslo) -> None:
    """The new node's heartbeats begin at its own clock, above the version at which its log was opened."""
    stage = Stage(oslo)
    oslo.beat(3)
    before = stage.read()
    oslo.join(ahead_ms=100)
    oslo.move(b"ken", 4)
    oslo.put(b"ken")
    oslo.beat(3)
    checks = stage.read()
    assert (checks.findings, checks.unchecked) == ((), before.unchecked)
    assert checks.checked > before.checked


def test_the_heartbeats_of_a_node_that_joined_and_left_unseen_are_counted(oslo: Oslo) -> None:
    """The node that writes the site's heartbeats has last loaded the logs before the new node started."""
    stage = Stage(oslo)
    oslo.beat(3)
    before = stage.read()
    oslo.join()
    oslo.move(b"ken", 4)
    oslo.put(b"ken")
    oslo.dead = {1, 2, 3}
    oslo.beat()
    oslo.move(b"ken", 2)
    oslo.dead = {1}
    oslo.beat()
    oslo.cluster.cluster.nodes[0].node.heartbeat()
    checks = stage.read()
    assert (checks.findings, checks.unchecked) == ((), before.unchecked)
    assert checks.checked > before.checked


def test_seals_by_clocks_that_are_ahead_hold_no_heartbeat_back(oslo: Oslo) -> None:
    behind = oslo.cluster.cluster.nodes[2]
    oslo.cluster.cluster.offsets[behind.number] = -100
    oslo.dead = {behind.number}
    written = oslo.put(b"zoe")
    for _ in range(4):
        oslo.beat()
        oslo.move(b"ada", 1)
        tick(behind)
        behind.node.heartbeat()
    last = last_beat(oslo.cluster.cluster.engine, NODE)
    assert last is not None
    assert last.through > written


def test_a_restart_below_the_seal_of_a_log_loses_no_count(oslo: Oslo) -> None:
    """The seal has counted its log, and a write that is prepared beside it holds the heartbeats back."""
    owner = oslo.cluster.cluster.nodes[1]
    for shared in oslo.cluster.cluster.nodes:
        shared.node.settle_by(lambda _: Fate(Decision.UNDECIDED))
    stage = Stage(oslo)
    oslo.beat(3)
    before = stage.read()
    key = oslo.qualify(b"ken")
    owner.node.reshaping.split(oslo.qualify(b"m"))
    oslo.beat()
    oslo.cluster.cluster.time.advance(BEAT_MS)
    version = owner.node.map.route(key).prepare("t1", [key], [encode_value(b"prepared")])
    oslo.cluster.cluster.time.advance(BEAT_MS)
    oslo.put(b"nat")
    owner.node.reshaping.split(oslo.qualify(b"n"))
    oslo.beat()
    oslo.restart(2)
    assert oslo.cluster.nodes[0].map.route(key).commit_prepared("t1", version)
    oslo.beat(3)
    checks = stage.read()
    assert (checks.findings, checks.unchecked) == ((), before.unchecked)
    assert checks.checked > before.checked


def test_heartbeats_do_not_go_back_when_the_last_was_trimmed(oslo: Oslo) -> None:
    """A single node's heartbeats end at any version, those of several at common ones, which may be lower."""
    nodes = [shared.node for shared in oslo.cluster.cluster.nodes]
    for key in KEYS:
        oslo.move(key, 1)
    last = nodes[0].heartbeat()
    nodes[0].trim_logs(oslo.cluster.sites[0].resolved_version())
    for key, owner in ((b"ada", 2), (b"ken", 3), (b"zoe", 3)):
        oslo.move(key, owner)
    nodes[2].heartbeat()
    assert nodes[1].heartbeat().node != NODE
    oslo.beat(2)
    following = last_beat(oslo.cluster.cluster.engine, NODE)
    assert following is not None
    assert (last.node, following.since) == (NODE, 0)
    assert following.through > last.through


def test_changes_of_a_transaction_that_outlives_its_node_are_counted(oslo: Oslo) -> None:
    for shared in oslo.cluster.cluster.nodes:
        shared.node.settle_by(lambda _: Fate(Decision.UNDECIDED))
    stage = Stage(oslo)
    oslo.beat(3)
    stage.read()
    key = oslo.qualify(b"zoe")
    owner = oslo.cluster.nodes[0].map.route(key)
    version = owner.prepare("t1", [key], [encode_value(b"prepared")])
    oslo.put(b"zed")
    oslo.kill(3)
    # Its log is kept, and so is the interval of the site.
    before = stage.read(2)
    assert oslo.cluster.nodes[0].map.route(key).commit_prepared("t1", version)
    oslo.put(b"zoe")
    oslo.beat(4)
    checks = stage.read(2)
    assert (checks.wrong, checks.unchecked) == (0, before.unchecked)
    assert checks.checked > before.checked
    assert {key for _, key in stage.delivered} >= {b"zed", b"zoe"}
    assert (version, b"zoe") in stage.delivered


@pytest.mark.parametrize("event", EVENTS)
def test_a_follower_at_any_node_gets_each_change_once_and_in_order(
    oslo: Oslo, event: Callable[[Oslo], None]
) -> None:
    with impatient_followers():
        following = oslo.changes(1, 0, follow=True)
        got: list[tuple[Version, bytes]] = []

        def follow(until: Version) -> None:
            for batch in following:
                got.extend(zip(batch.versions, (key[NAMESPACE_BYTES:] for key in batch.keys), strict=True))
                if batch.through >= until:
                    return

        written = [(oslo.put(key), key) for key in KEYS]
        oslo.beat()
        follow(max(version for version, _ in written))
        written += [(oslo.put(key), key) for key in KEYS]
        event(oslo)
        written += [(oslo.put(key), key) for key in KEYS]
        oslo.beat()
        follow(max(version for version, _ in written))
        assert got == sorted(got)
        assert set(written) <= set(got)
        assert len(got) == len(set(got))


def test_a_lost_node_holds_the_site_back_no_longer_than_its_takeover(oslo: Oslo) -> None:
    oslo.put(b"zoe")
    oslo.kill(3)
    version = oslo.put(b"zoe")
    oslo.beat(2)
    assert oslo.cluster.sites[0].resolved_version() > version
    last = [beat for batch in oslo.changes(1, 0, heartbeats=True) for beat in batch.heartbeats][-1]
    assert last.through > version


def test_steps_end_at_the_heartbeats_of_the_site(oslo: Oslo) -> None:
    oslo.put(b"ken")
    oslo.beat(3)
    oslo.put(b"zoe")
    versions = oslo.cluster.hosts[1].versions
    cut = versions.cut_changes("users", 0, None, None, True)
    last = [beat for batch in oslo.changes(1, 0, heartbeats=True) for beat in batch.heartbeats][-1]
    assert cut.version == last.through


@pytest.mark.parametrize("event", EVENTS)
def test_a_site_of_several_nodes_and_one_of_a_single_process_replicate_and_agree(
    oslo: Oslo, event: Callable[[Oslo], None]
) -> None:
    source, rome = oslo.cluster.hosts[0], open_one(MemoryEngine(FAMILIES), "rome", oslo.cluster.cluster.time)
    rome.create_namespace("users")
    for site in (oslo.cluster.sites[0], rome):
        site.set_topology(topology_of("oslo", "rome"))

    def exchange() -> None:
        oslo.beat(2)
        rome.heartbeat()
        for one, other in ((source, rome.host), (rome.host, source)):
            run_step(one, other, plan_step(one, other, ["users"]))

    def links() -> list[LinkRow]:
        return [row for site in (rome.host, source) for row in embedded_links(site)]

    exchange()
    for key in KEYS:
        oslo.put(key, b"from oslo")
        rome.namespace("users").put(key + b"2", b"from rome")
    exchange()
    for key in KEYS:
        oslo.put(key, b"again")
    event(oslo)
    oslo.put(b"zoe", b"at last")
    oslo.beat()
    rome.namespace("users").put(b"ken", b"wins")
    for _ in range(3):
        exchange()
    assert [(row.wrong, row.findings) for row in links()] == [(0, ()), (0, ())]
    assert all(row.checked > 1 for row in links())
    stored = dict(rome.namespace("users").scan())
    assert stored == dict(oslo.users.scan())
    assert stored[b"zoe"] == b"at last"
    assert stored[b"ken"] == b"wins"
    vantages = [take_vantage(host, "users") for host in (source, rome.host)]
    oslo.beat()
    assert list(compare_keys([source, rome.host], "users", stored, vantages)) == []


def embedded_links(host: Host) -> list[LinkRow]:
    """The links that end at a site."""
    assert isinstance(host, EmbeddedHost)
    return list(host.links.rows.values())
