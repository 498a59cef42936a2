"""topology remove, and restore for sites of a topology: what is asked for in the wrong way is told."""

from pathlib import Path

import pytest
from tests.cli.support import run

TEXT = """epoch = 1

[sites.oslo]
id = 1
{url}

[sites.rome]
id = 2
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    file = tmp_path / "topology.toml"
    file.write_text(TEXT.format(url='url = "grpc://127.0.0.1:1"'), "utf-8")
    return file


def test_survivors_that_are_not_there_keep_a_site_from_being_removed(file: Path) -> None:
    before = file.read_text("utf-8")
    outcome = run("--timeout", "1s", "topology", "remove", "rome", "--topology", file)
    assert outcome.code == 69, outcome.errors
    assert file.read_text("utf-8") == before


def test_survivor_without_an_address_is_named(file: Path) -> None:
    file.write_text(TEXT.format(url=""), "utf-8")
    outcome = run("topology", "remove", "rome", "--topology", file)
    assert outcome.code == 64
    assert "site 'oslo' has no url in the topology" in outcome.errors


@pytest.mark.parametrize(
    "options",
    [
        ["--join", "--rejoin", "--topology", "topology.toml"],
        ["--join", "--topology", "topology.toml"],
        ["--rejoin"],
        ["--join", "--at", "17"],
        ["--rejoin", "--topology", "topology.toml", "--prefix", "eu/"],
    ],
)
def test_site_is_built_up_from_the_whole_of_a_backup(options: list[str]) -> None:
    outcome = run("restore", "backups/users", "data/oslo", "users", *options)
    assert outcome.code == 64
    assert "from the whole of a backup" in outcome.errors
