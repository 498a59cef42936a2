"""Two hundred kills on one directory, for each way of writing."""

from pathlib import Path

import pytest
from tests.site.test_kill import kill_rounds

pytestmark = pytest.mark.soak

ROUNDS = 200


@pytest.mark.parametrize("mode", ["fsync", "async", "mixed"])
def test_promises_hold_over_two_hundred_kills(tmp_path: Path, mode: str) -> None:
    witness = kill_rounds(tmp_path / "oslo", mode, seed=3, rounds=ROUNDS, lines_max=60)
    assert len(witness.seen) > 10 * ROUNDS
