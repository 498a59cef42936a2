"""Every kind of damage at many positions of a site that was killed: nothing is lost in silence."""

import os
from pathlib import Path
from random import Random

import pytest
from tests.site.test_damage import PUTS, Left, count, left, log_of

from floodmark.model.errors import Corruption, FloodmarkError, NamespaceNotFound, StorageFailed

pytestmark = pytest.mark.soak

__all__ = ["left"]

ROUNDS = 400


def read_rows(path: Path) -> int | None:
    """How many rows a site has, or None if it is refused."""
    try:
        return count(path)
    except NamespaceNotFound:
        # It was made after the first witness, and is lost with its rows.
        return 0
    except FloodmarkError as error:
        if isinstance(error, Corruption | StorageFailed):
            return None
        raise


@pytest.mark.parametrize("seed", range(4))
def test_flipped_bits_and_bytes_never_lose_more_than_the_last_block(left: Left, seed: int) -> None:
    chance = Random(seed)
    files = [file.name for file in sorted((left.path / "engine").iterdir()) if file.suffix in (".log", "")]
    for _ in range(ROUNDS):
        path = left.copy("damaged")
        file = path / "engine" / chance.choice([name for name in files if name not in ("LOCK", "LOG")])
        content = bytearray(file.read_bytes())
        if not content:
            continue
        position = chance.randrange(len(content))
        content[position] = chance.choice([content[position] ^ 1 << chance.randrange(8), 0, 255])
        same = content == file.read_bytes()
        file.write_bytes(content)
        in_last_block = file == log_of(path) and position >= len(content) - len(content) % 32768
        rows = read_rows(path)
        assert rows is None or rows == PUTS or in_last_block or same, (file.name, position)


@pytest.mark.parametrize("seed", range(4))
def test_cut_files_are_refused_or_lose_what_was_never_witnessed(left: Left, seed: int) -> None:
    chance = Random(seed)
    for _ in range(ROUNDS):
        path = left.copy("damaged")
        files = sorted((path / "engine").glob("*.log")) + sorted((path / "engine").glob("MANIFEST-*"))
        file = chance.choice([file for file in files if file.stat().st_size])
        os.truncate(file, chance.randrange(file.stat().st_size))
        rows = read_rows(path)
        assert rows is None or file.suffix == ".log"
