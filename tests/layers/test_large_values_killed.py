"""A process that puts, deletes and sweeps large values is killed at random, and leaves nothing behind."""

import random
import subprocess
import sys
from datetime import timedelta
from itertools import count
from pathlib import Path

import pytest
from tests.cli.support import PROCESS_SECONDS_MAX, ROOT

import floodmark
from floodmark.layers import LargeValues
from floodmark.layers.large_values import CHUNK_BYTES
from floodmark.layers.ports import LAYER

KILLS = 6
KEYS = 3
NOW = timedelta(milliseconds=-1)


def content(number: int) -> bytes:
    """A value of 8 bytes to 6 MiB."""
    return number.to_bytes(8, "big") * (1 + number * 7_919 % (12 * CHUNK_BYTES // 8))


def write_for_ever(directory: Path, first: int) -> None:
    with floodmark.open(directory, site="oslo") as site:
        values = LargeValues(site, "configs")
        print("ready", flush=True)
        for number in count(first):
            values.put(b"%d" % (number % KEYS), content(number))
            if number % 4 == 0:
                values.delete(b"%d" % ((number + 1) % KEYS))
            if number % 3 == 0:
                values.sweep(older_than=NOW)


@pytest.mark.slow
def test_a_kill_at_any_moment_leaves_whole_values_and_after_a_sweep_nothing_else(tmp_path: Path) -> None:
    choose = random.Random(7)
    for first in range(0, KILLS * 1_000, 1_000):
        command = [sys.executable, "-m", __name__, str(tmp_path / "store"), str(first)]
        with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE) as process:
            assert process.stdout is not None
            assert process.stdout.readline() == b"ready\n"
            try:
                process.wait(choose.uniform(0, 1.5))
            except subprocess.TimeoutExpired:
                process.kill()
            process.wait(PROCESS_SECONDS_MAX)
        with floodmark.open(tmp_path / "store", site="oslo") as site:
            values = LargeValues(site, "configs")
            found = dict(values.scan())
            assert all(value == content(int.from_bytes(value[:8], "big")) for value in found.values())
            values.sweep(older_than=NOW)
            assert dict(values.scan()) == found
            owned = [-(-len(value) // CHUNK_BYTES) for value in found.values()]
            chunks = sum(number for number in owned if number > 1)
            assert sum(1 for key, _ in values.stored.scan() if key != LAYER) == len(found) + chunks


if __name__ == "__main__":
    write_for_ever(Path(sys.argv[1]), int(sys.argv[2]))
