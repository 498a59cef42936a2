"""Kill -9, again and again, on one directory: what was promised before the kill holds after it.

A child writes and says what was acknowledged; the parent kills it after a number of lines, opens the
site, and compares.  Every other child's clock is an hour behind.
"""

import subprocess
import sys
from collections import Counter, defaultdict
from pathlib import Path
from random import Random

import pytest
from tests.site import support_writer
from tests.site.support import state_after, stored_versions
from tests.sizes import only

import floodmark
from floodmark.model.change import Change
from floodmark.model.version import Version
from floodmark.site import Namespace, Site

Fact = tuple[Version, bytes, bytes | None]


class Witness:
    """Remembers everything that children have said, and checks a site against it."""

    def __init__(self) -> None:
        self.acknowledged: set[Fact] = set()
        self.batches: list[tuple[Version, bytes, list[bytes]]] = []
        self.resolved: dict[Version, int] = {}
        self.highest: Version = 0
        self.seen: list[Change] = []

    def hear(self, lines: list[str]) -> None:
        """Take in what one child has said.  All its versions lie above all earlier ones."""
        heard: list[Version] = []
        for line in lines:
            kind, *words = line.split()
            if kind == "open":
                continue
            version = int(words[0])
            assert version > self.highest or kind == "resolved", "versions went back over a restart"
            heard.append(version)
            if kind == "put":
                self.acknowledged.add((version, words[1].encode(), words[2].encode()))
            elif kind == "delete":
                self.acknowledged.add((version, words[1].encode(), None))
            elif kind == "many":
                keys = [word.encode() for word in words[2:]]
                self.acknowledged |= {(version, key, words[1].encode()) for key in keys}
                self.batches.append((version, words[1].encode(), keys))
            else:
                assert kind == "resolved"
                assert self.resolved.setdefault(version, int(words[1])) == int(words[1])
        assert all(version >= self.highest for version in heard), "the resolved version went back"
        self.highest = max([self.highest, *heard])

    def check(self, site: Site) -> None:
        """Compare a site that was opened after a kill."""
        users = site.namespace("users")
        changes = list(site.changes("users"))
        self._check_acknowledged(users, changes)
        self._check_whole(site, users, changes)
        self._check_resolved(changes)
        assert changes[: len(self.seen)] == self.seen, "history has changed"
        self.seen = changes
        self.highest = max(self.highest, site.now(), *(change.version for change in changes))

    def _check_acknowledged(self, users: Namespace, changes: list[Change]) -> None:
        facts = {(change.version, change.key, change.value) for change in changes}
        assert len(facts) == len(changes), "a change came twice"
        assert self.acknowledged <= facts, f"lost: {sorted(self.acknowledged - facts)[:3]}"
        known = {change.version for change in self.seen}
        for version, key, value in self.acknowledged:
            if version not in known:
                assert users.get(key, at=version) == value

    def _check_whole(self, site: Site, users: Namespace, changes: list[Change]) -> None:
        in_log = {(change.key, change.version) for change in changes}
        assert in_log == stored_versions(site, "users"), "data and change log disagree"
        assert state_after(changes) == dict(users.scan())
        batches: dict[Version, list[Change]] = defaultdict(list)
        for change in changes:
            if change.key.startswith(b"batch-"):
                batches[change.version].append(change)
        for batch in batches.values():
            assert len(batch) == support_writer.BATCH, "a commit was split"
            assert len({change.value for change in batch}) == 1

    def _check_resolved(self, changes: list[Change]) -> None:
        for resolved, count in self.resolved.items():
            below = sum(1 for change in changes if change.version <= resolved)
            assert below == count, f"{below - count} changes came below {resolved} after it was resolved"


def write_until_killed(path: Path, mode: str, number: int, chance: Random, lines_max: int) -> list[str]:
    """Run a child, kill it after some lines, and return all that it has said."""
    minutes_back = 60 if number % 2 else 0
    arguments = [str(path), mode, str(number), str(chance.random()), str(minutes_back)]
    with subprocess.Popen(
        [sys.executable, support_writer.__file__, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as child:
        assert child.stdout is not None
        wanted = chance.randrange(1, lines_max)
        said = [line for _, line in zip(range(wanted), child.stdout, strict=False)]
        child.kill()
        said += child.stdout
        assert child.stderr is not None
        errors = child.stderr.read()
    assert len(said) >= wanted, errors
    # The kill may cut the last line.
    return [line for line in said if line.endswith("\n")]


def kill_rounds(path: Path, mode: str, seed: int, rounds: int, lines_max: int = 150) -> Witness:
    """Write, kill, open and check, over and over."""
    chance, witness = Random(seed), Witness()
    with floodmark.open(path, site="oslo", background=False) as site:
        site.create_namespace("users", retention=floodmark.host.catalog.RETENTION * 100)
    for number in range(rounds):
        witness.hear(write_until_killed(path, mode, number, chance, lines_max))
        with floodmark.open(path, background=False) as site:
            witness.check(site)
    return witness


@pytest.mark.parametrize("rounds", only([4], [4, 20]))
def test_promises_hold_over_kills(tmp_path: Path, rounds: int) -> None:
    witness = kill_rounds(tmp_path / "oslo", "mixed", seed=1, rounds=rounds)
    assert len(witness.seen) > 10 * rounds
    assert Counter(bool(count) for count in witness.resolved.values())[True] > rounds


@pytest.mark.parametrize("fault", only(["loss"], ["loss", "half", "late", "twice"]))
def test_witness_finds_a_broken_promise(tmp_path: Path, fault: str) -> None:
    """The canary: each kind of damage, done to a healthy site, is found."""
    path = tmp_path / "oslo"
    witness = kill_rounds(path, "mixed", seed=2, rounds=1, lines_max=151)
    with floodmark.open(path, background=False) as site:
        witness.check(site)
        users = site.namespace("users")
        last = witness.seen[-1]
        if fault == "loss":
            witness.acknowledged.add((last.version + 1, b"key-0", b"lost"))
        elif fault == "half":
            users.put(b"batch-0-0", b"half")
        elif fault == "late":
            witness.resolved[users.put(b"key-0", b"late")] = len(witness.seen)
        else:
            witness.seen.insert(0, last)
        with pytest.raises(AssertionError):
            witness.check(site)
