"""The badge example: no badge is wrong though writers and nodes are killed; without batches some are."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from tests.postgres import PostgresServer
from tests.waiting import HANG_SECONDS

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "badges.py"
REPORT = re.compile(
    r"([\d,]+) messages sent; (\d) writers and \2 nodes killed\n([\d,]+) badges looked at; ([\d,]+) wrong\n"
)


def run(postgres: PostgresServer, *options: str) -> list[int]:
    """The numbers of messages, kills, looks and wrong badges."""
    postgres.execute("DROP SCHEMA IF EXISTS floodmark_badges CASCADE")
    finished = subprocess.run(
        [sys.executable, EXAMPLE, postgres.url, "--pause", "6", *options],
        capture_output=True,
        text=True,
        timeout=HANG_SECONDS,
        check=False,
    )
    found = REPORT.fullmatch(finished.stdout)
    assert found is not None, (finished.stdout, finished.stderr)
    assert finished.returncode == 0
    return [int(number.replace(",", "")) for number in found.groups()]


@pytest.mark.slow
def test_no_badge_is_wrong_though_writers_and_nodes_are_killed(postgres: PostgresServer) -> None:
    messages, kills, looks, wrong = run(postgres, "--kills", "1")
    assert messages > 0
    assert kills == 1
    assert looks > 0
    assert wrong == 0


@pytest.mark.slow
def test_plain_puts_and_gets_show_wrong_badges(postgres: PostgresServer) -> None:
    _, _, _, wrong = run(postgres, "--no-atomic", "--kills", "0")
    assert wrong > 0
