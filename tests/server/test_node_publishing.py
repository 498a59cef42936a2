"""Publishing to a site of several nodes, real processes on PostgreSQL, of which some are killed meanwhile."""

import signal
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from threading import Event

import pytest
from benchmarks.node_processes import NodeProcess, connect, node_processes
from tests.node_processes import suspend
from tests.postgres import PostgresServer
from tests.waiting import HANG_SECONDS, wait_until

import floodmark
from floodmark.host.statistics import PartitionStatistics
from floodmark.model.errors import FloodmarkError, OutcomeUnknown, Retryable
from floodmark.site.generations import Published

# One in each partition, and keys of writers beside them.
SET = [b"%d-set" % number for number in range(6)]
OWN = [b"%d-own" % number for number in range(6)]


class Work:
    """A writer of keys that no data set has, and readers of all that data sets have."""

    def __init__(self, nodes: list[NodeProcess]) -> None:
        self.acknowledged: dict[bytes, tuple[int, bytes]] = {}
        self.attempted: dict[bytes, set[bytes]] = {key: set() for key in OWN}
        self.reads = 0
        self._nodes = nodes
        self._stopping = Event()
        self._pool = ThreadPoolExecutor(3)
        self._running = [self._pool.submit(work) for work in (self._write, self._read_at, self._read_atomic)]

    def _rounds(self) -> Iterator[tuple[int, floodmark.Site]]:
        with connect(self._nodes) as site:
            number = 0
            while not self._stopping.is_set():
                number += 1
                yield number, site

    def _write(self) -> None:
        for number, site in self._rounds():
            key, value = OWN[number % len(OWN)], b"%d" % number
            self.attempted[key].add(value)
            try:
                self.acknowledged[key] = site.namespace("rows").put(key, value), value
            except (OutcomeUnknown, Retryable):
                continue

    def _look(self, read: Callable[[floodmark.Site], list[bytes | None]]) -> None:
        for _, site in self._rounds():
            try:
                found = read(site)
            except Retryable:
                continue
            assert len({*found}) == 1, found
            self.reads += 1

    def _read_at(self) -> None:
        def read(site: floodmark.Site) -> list[bytes | None]:
            found = dict(site.namespace("rows").scan())
            return [found.get(key) for key in SET]

        self._look(read)

    def _read_atomic(self) -> None:
        self._look(lambda site: site.read_atomic([(site.namespace("rows"), key) for key in SET]))

    def finish(self) -> None:
        """End all, and raise what one of them has found."""
        self._stopping.set()
        for running in self._running:
            running.result(HANG_SECONDS)
        self._pool.shutdown()

    def wait_for_more(self) -> None:
        """Return when more was read and written."""
        reads, writes = self.reads + 10, len(self.attempted[OWN[0]]) + 3
        wait_until(
            lambda: (
                any(each.done() for each in self._running)
                or (self.reads >= reads and len(self.attempted[OWN[0]]) >= writes)
            ),
            "reads and writes do not go on",
        )


def publish(nodes: list[NodeProcess], number: int) -> Published:
    """Publish a data set, again until it is there; nodes are killed meanwhile."""
    with connect(nodes) as site:
        while True:
            try:
                rows = dict.fromkeys(SET, b"%d" % number)
                return site.generations.publish("rows", rows, publisher=f"set {number}")
            except (OutcomeUnknown, Retryable):
                continue


def check(nodes: list[NodeProcess], work: Work, published: Published, number: int) -> None:
    """The data set is there at each node, with all that was written since its base, and nothing else."""
    for node in nodes:
        with connect([node]) as site:
            found = dict(site.namespace("rows").scan())
            assert {key: found.pop(key, None) for key in SET} == dict.fromkeys(SET, b"%d" % number)
            for key, (version, value) in work.acknowledged.items():
                if version > published.base:
                    assert found[key] == value or found[key] in work.attempted[key]
            before = site.namespace("rows").get_many(SET, at=published.version - 1)
            assert {*before} == {None if number == 1 else b"%d" % (number - 1)}


def prepare(nodes: list[NodeProcess]) -> None:
    with connect(nodes) as site:
        site.create_namespace("rows")
        for number in range(1, 6):
            site.split("rows", b"%d" % number)
        wait_until(
            lambda: len({partition.node for partition in _moved(site)}) == len(nodes), "nodes share nothing"
        )


def _moved(site: floodmark.Site) -> list[PartitionStatistics]:
    """The partitions, after one was given to a node that has none."""
    partitions = site.partitions()
    free = {1, 2, 3} - {partition.node for partition in partitions}
    for node in free:
        try:
            site.host.node_port.move(partitions[node].id, node)
        except FloodmarkError:
            break
    return site.partitions()


@pytest.fixture
def nodes(postgres: PostgresServer, tmp_path: Path) -> Iterator[list[NodeProcess]]:
    postgres.execute("DROP SCHEMA IF EXISTS floodmark_oslo CASCADE")
    with node_processes(postgres.url, tmp_path) as nodes:
        prepare(nodes)
        yield nodes


@pytest.mark.slow
def test_readers_at_all_nodes_find_one_data_set_while_an_owner_is_killed(nodes: list[NodeProcess]) -> None:
    work = Work(nodes)
    with ThreadPoolExecutor(1) as pool:
        for number, kill in enumerate([None, nodes[2], None], 1):
            publishing = pool.submit(publish, nodes, number)
            if kill is not None:
                kill.kill()
            published = publishing.result(HANG_SECONDS)
            if kill is not None:
                kill.start()
            work.wait_for_more()
            check(nodes, work, published, number)
    work.finish()


@pytest.mark.slow
def test_readers_find_one_data_set_while_a_node_is_suspended(nodes: list[NodeProcess]) -> None:
    work = Work(nodes)
    with ThreadPoolExecutor(1) as pool:
        for number, node in enumerate(nodes, 1):
            suspending = pool.submit(suspend, node, 7)
            published = publish(nodes, number)
            suspending.result(HANG_SECONDS)
            work.wait_for_more()
            check(nodes, work, published, number)
    work.finish()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("when", "name"),
    [
        ("after", "load_generation"),
        ("before", "_join"),
        ("after", "_join"),
        ("before", "_swap"),
        ("after", "_swap"),
    ],
)
def test_a_keeper_that_is_killed_leaves_one_data_set_and_the_publisher_goes_on(
    postgres: PostgresServer, tmp_path: Path, when: str, name: str
) -> None:
    postgres.execute("DROP SCHEMA IF EXISTS floodmark_oslo CASCADE")
    nodes = [NodeProcess(postgres.url, number, tmp_path) for number in (1, 2, 3)]
    # The first to start keeps the site.
    keeper, command = nodes[0], [*nodes[0].command]
    place = ["tests.spark.killed_command", when, "floodmark.host.publishing", f"LocalGenerations.{name}"]
    keeper.command[2:3] = place
    with ExitStack() as ending:
        for node in nodes:
            ending.callback(node.end)
            node.start()
        prepare(nodes)
        work = Work(nodes)
        published = publish(nodes, 1)
        assert keeper.wait() == -signal.SIGKILL
        keeper.command[:] = command
        keeper.start()
        work.wait_for_more()
        check(nodes, work, published, 1)
        work.finish()
