"""Kill -9 in the middle of transactions, again and again, on one directory.

What a child says goes through a pipe, so the kill cannot take it back.  Afterwards each transaction has
happened once or not at all, as its decision says, and nothing has appeared at or below what was resolved.
"""

import os
import subprocess
import sys
from pathlib import Path
from random import Random
from typing import Final

import pytest
from tests.partition.support_prepared import ABORT, SHARED, history, node_of, open_site

from floodmark.model.version import Version

ROOT: Final = Path(__file__).parents[2]
KILLS: Final = 4


def run_until_killed(path: Path, name: str, lines_wanted: int) -> list[list[str]]:
    """Run a child, kill it after some lines, and return all that it has said."""
    with subprocess.Popen(
        [sys.executable, "-m", "tests.partition.support_prepared", str(path), name],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    ) as child:
        assert child.stdout is not None
        assert child.stderr is not None
        lines = [line for _, line in zip(range(lines_wanted), child.stdout, strict=False)]
        child.kill()
        lines += child.stdout.readlines()
        assert len(lines) >= lines_wanted, child.stderr.read()
    # The last line may have been cut.
    return [line.split() for line in lines if line.endswith("\n")]


class Witness:
    """What was said so far."""

    def __init__(self) -> None:
        self.ended: dict[str, str] = {}
        self.histories: dict[Version, int] = {}
        self.resolved: Version = 0
        self.added = 0

    def hear(self, lines: list[list[str]]) -> None:
        for kind, *words in lines:
            if kind in ("committed", "aborted"):
                self.ended[words[0]] = kind
            elif kind == "added":
                self.added += 1
            elif kind == "resolved":
                assert int(words[0]) >= self.resolved, "what is resolved has gone back"
                self.resolved = int(words[0])
                if words[1] != "-":
                    self.histories[self.resolved] = int(words[1])

    def check(self, path: Path) -> int:
        """Open the directory and compare; how many prepared writes the kill has left."""
        with open_site(str(path)) as site:
            assert site.resolved_version() >= self.resolved
            (partition,) = node_of(site).map.partitions
            prepared = node_of(site).committer.prepared
            left = prepared.all()
            assert all(write.version > self.resolved for write in left)
            partition.settle_prepared()
            assert prepared.all() == []
            decided = dict(site.namespace("decisions").scan())
            committed = {key for key, value in decided.items() if value != ABORT}
            there = {key for key, _ in site.namespace("users").scan()} - {b"plain"}
            assert there == committed
            for transaction, end in self.ended.items():
                assert (transaction.encode() in committed) == (end == "committed")
            total = site.namespace("counts").get(SHARED) or 0
            assert total % 1_000 == len(committed) % 1_000
            # One add may have happened in each life that nobody was told of.
            assert 0 <= total // 1_000 - len(committed) // 1_000 - self.added <= KILLS
            for resolved, number in self.histories.items():
                assert history(site, resolved) == number, f"something appeared at or below {resolved}"
            return len(left)


@pytest.mark.slow
def test_each_transaction_happens_once_or_not_at_all_over_kills(tmp_path: Path) -> None:
    chance, witness, left = Random(5), Witness(), 0
    for kill in range(KILLS):
        witness.hear(run_until_killed(tmp_path / "oslo", f"life{kill}", chance.randint(60, 200)))
        left += witness.check(tmp_path / "oslo")
    assert "committed" in witness.ended.values()
    assert witness.histories
    assert left > 0, "no kill came between a prepare and its end"
