"""A bank at nodes that are processes: tellers and nodes are killed, and the history is serializable."""

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from itertools import count, groupby
from operator import attrgetter
from pathlib import Path
from random import Random
from threading import Event
from time import monotonic
from typing import Any, Final

from benchmarks.node_processes import NodeProcess, connect, node_processes, url_of
from tests.cli.support import run_process
from tests.node_processes import Mirror
from tests.teller import ACCOUNTS, BALANCE, LISTS

import floodmark
from floodmark.cli.failures import DONE
from floodmark.model.ranges import KeyRange
from floodmark.testing.serializability import Observed, check_serializable

TELLERS: Final = 4
# Longer than it takes to declare a node dead.
PAUSE_SECONDS: Final = 6.0
ACCOUNT_RANGE: Final = KeyRange(b"account-", b"account.")


class TellerProcess:
    """A teller whose lines are kept; it is killed, and another one takes its place."""

    def __init__(self, url: str, directory: Path, name: str) -> None:
        self._output = directory / f"teller-{name}.txt"
        script = Path(__file__).with_name("teller.py")
        with self._output.open("wb") as output:
            self._process = subprocess.Popen([sys.executable, script, url, name], stdout=output)

    def kill(self) -> None:
        """End it with kill -9; it has not ended before."""
        code = self._process.poll()
        self._process.kill()
        self._process.wait()
        assert code is None, f"a teller ended by itself with {code}"

    def lines(self) -> Iterator[dict[str, Any]]:
        """What it has printed; the last line may be cut off."""
        for line in self._output.read_text().splitlines(keepends=True):
            if line.endswith("\n"):
                yield json.loads(line)


class Bank:
    """Tellers at some nodes."""

    def __init__(self, nodes: list[NodeProcess], directory: Path) -> None:
        self._nodes = nodes
        self._url = url_of(nodes)
        self._directory = directory
        self._numbers = count()
        self._all: list[TellerProcess] = []
        with connect(nodes) as site:
            bank = site.create_namespace("bank")
            bank.put_many(dict.fromkeys(ACCOUNTS, b"%d open" % BALANCE))
            for key in (*ACCOUNTS[1::2], LISTS[0]):
                site.split("bank", key)
        self._rebalance()
        self._tellers: list[TellerProcess] = []

    def _rebalance(self) -> None:
        moved = run_process("partition", "rebalance", self._url, "--by", "count")
        assert moved.code == DONE, moved.errors

    def _start(self) -> TellerProcess:
        teller = TellerProcess(self._url, self._directory, f"t{next(self._numbers)}")
        self._all.append(teller)
        return teller

    def run(self, seconds: float, random: Random) -> None:
        """Kill tellers and nodes, and start others, for some time."""
        self._tellers = [self._start() for _ in range(TELLERS)]
        until, pause = monotonic() + seconds, Event()
        while monotonic() < until:
            pause.wait(PAUSE_SECONDS / 2)
            place, node = random.randrange(TELLERS), random.choice(self._nodes)
            self._tellers[place].kill()
            node.kill()
            self._tellers[place] = self._start()
            pause.wait(PAUSE_SECONDS)
            node.start()
            self._rebalance()

    def end(self) -> None:
        """Kill all tellers, also when one has ended before."""
        with ExitStack() as stack:
            for teller in self._tellers:
                stack.callback(teller.kill)
            self._tellers = []

    def history(self) -> list[Observed]:
        """The transactions as the tellers have seen them."""
        seen: dict[str, dict[str, Any]] = {}
        for line in (line for teller in self._all for line in teller.lines()):
            seen.setdefault(line["name"], {"ended": None}).update(line)
        return [_observed(**each) for each in seen.values()]


def _observed(
    name: str,
    began: float,
    ended: float | None,
    reads: dict[str, str | None],
    writes: dict[str, str],
    scanned: bool = False,
) -> Observed:
    read = {key.encode(): None if value is None else value.encode() for key, value in reads.items()}
    written = {key.encode(): value.encode() for key, value in writes.items()}
    if not scanned:
        return Observed(name, began, ended, read, writes=written)
    found = {key: value for key, value in read.items() if value is not None}
    return Observed(name, began, ended, ranges=[(ACCOUNT_RANGE, found)])


def check_sums(site: floodmark.Site) -> int:
    """Check that the accounts hold the same sum at every version of a site; how many versions there are."""
    balances: dict[bytes, int] = {}
    commits = groupby(site.changes("bank", since="beginning"), attrgetter("version"))
    checked = 0
    for version, changes in commits:
        for change in changes:
            if ACCOUNT_RANGE.contains(change.key):
                assert change.value is not None
                balances[change.key] = int(change.value.split()[0])
        if len(balances) == len(ACCOUNTS):
            assert sum(balances.values()) == BALANCE * len(ACCOUNTS), (version, balances)
            checked += 1
    return checked


def check_history(site: floodmark.Site, history: list[Observed]) -> None:
    """Check that a history is serializable, by the values that the keys of a site have held."""
    orders: dict[bytes, list[bytes]] = {}
    for change in site.changes("bank", since="beginning"):
        assert change.value is not None
        orders.setdefault(change.key, []).append(change.value)
    check_serializable(history, orders)


@contextmanager
def bank_at(database: str, directory: Path) -> Iterator[tuple[list[NodeProcess], Bank, Mirror]]:
    """A bank at three nodes, and a site that a link keeps up to date."""
    with node_processes(database, directory) as nodes, ExitStack() as stack:
        bank = Bank(nodes, directory)
        stack.callback(bank.end)
        mirror = Mirror(nodes, directory / "rome")
        stack.callback(mirror.end)
        yield nodes, bank, mirror


def run_bank(database: str, directory: Path, seconds: float, seed: int) -> int:
    """Let a bank work while processes are killed, and check all of it; how many transactions have ended."""
    with bank_at(database, directory) as (nodes, bank, mirror):
        bank.run(seconds, Random(seed))
        bank.end()
        history = bank.history()
        with connect(nodes) as site:
            assert check_sums(site) > 0
            check_history(site, history)
            mirror.catch_up()
            with floodmark.open(directory / "rome", site="rome") as copy:
                assert check_sums(copy) > 0
                assert dict(copy.namespace("bank").scan()) == dict(site.namespace("bank").scan())
    return sum(each.ended is not None for each in history)
