"""Kill -9 of a site under load, again and again, with a reader whose checkpoint is kept outside.

A child writes with several threads and follows its own changes.  What it says goes through a pipe, so
the kill cannot take it back.  The next child goes on at the last marker that was heard.  At the end, what
the reader got is exactly the site's history, with everything in it that was ever acknowledged.
"""

import os
import subprocess
import sys
from pathlib import Path
from random import Random
from typing import Final

import pytest
from tests.sizes import only

import floodmark
from floodmark.model.version import Version

ROOT: Final = Path(__file__).parents[2]

Fact = tuple[Version, str, str]


class Account:
    """All that was heard: acknowledged writes, and the reader's changes up to its last marker."""

    def __init__(self) -> None:
        self.acknowledged: set[Fact] = set()
        self.received: list[Fact] = []
        self.checkpoint: Version = 0
        self.redelivered = 0

    def hear(self, lines: list[str]) -> None:
        """Take in what one child has said.  What came behind its last marker will come again."""
        ahead: list[Fact] = []
        for line in lines:
            kind, version, *words = line.split()
            if kind == "written":
                self.acknowledged |= {(int(version), key, words[0]) for key in words[1:]}
            elif kind == "change":
                assert int(version) > self.checkpoint, "a change came below the checkpoint"
                ahead.append((int(version), words[0], words[1]))
            else:
                assert kind == "resolved"
                self.received += ahead
                self.checkpoint, ahead = int(version), []
        self.redelivered += len(ahead)

    def check(self, path: Path) -> None:
        """Read the rest as one more reader would, and compare with the whole."""
        with floodmark.open(path, background=False) as site:
            rest, whole = [
                [
                    (
                        change.version,
                        change.key.decode(),
                        "-" if change.value is None else change.value.decode(),
                    )
                    for change in site.changes("users", since=since)
                ]
                for since in (self.checkpoint, 0)
            ]
        assert self.received + rest == whole
        missing = self.acknowledged - set(whole)
        assert not missing, f"{len(missing)} acknowledged writes were lost"


def run_until_killed(path: Path, seed: str, checkpoint: Version, lines_wanted: int) -> list[str]:
    """Run a child, kill it after some lines, and return all that it has said."""
    with subprocess.Popen(
        [sys.executable, "-m", "tests.feed.support", str(path), seed, str(checkpoint)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    ) as child:
        assert child.stdout is not None
        said = [line for _, line in zip(range(lines_wanted), child.stdout, strict=False)]
        child.kill()
        said += child.stdout
        assert child.stderr is not None
        errors = child.stderr.read()
    assert len(said) >= lines_wanted, errors
    # The kill may cut the last line.
    return [line for line in said if line.endswith("\n")]


@pytest.mark.parametrize("kills", only([3], [3, 12]))
def test_reader_that_resumes_over_kills_gets_every_acknowledged_write_once(
    tmp_path: Path, kills: int
) -> None:
    path, chance, account = tmp_path / "oslo", Random(1), Account()
    with floodmark.open(path, site="oslo", background=False) as site:
        site.create_namespace("users")
    for number in range(kills):
        account.hear(run_until_killed(path, f"{number}", account.checkpoint, chance.randrange(50, 2000)))
        account.check(path)
    assert len(account.received) > 100 * kills
    assert account.acknowledged


@pytest.mark.parametrize("fault", ["loss", "double", "early marker"])
def test_account_finds_a_broken_promise(tmp_path: Path, fault: str) -> None:
    """The canary: a reader that loses, doubles or runs ahead is found out."""
    path, account = tmp_path / "oslo", Account()
    with floodmark.open(path, site="oslo", background=False) as site:
        users = site.create_namespace("users")
        versions = [users.put(b"key", b"%d" % index) for index in range(4)]
    said = [f"change {version} key {index}\n" for index, version in enumerate(versions[:2])]
    if fault == "loss":
        said.append(f"written {versions[-1] + 1} lost key\n")
    elif fault == "double":
        said.append(said[-1])
    else:
        said.append(f"resolved {versions[2]}\n")
    account.hear([*said, f"resolved {versions[1 if fault != 'early marker' else 2]}\n"])
    with pytest.raises(AssertionError):
        account.check(path)
