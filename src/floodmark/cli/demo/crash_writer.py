"""A process that writes until it is killed, and names each write after it was acknowledged.

Run by the demo as `python -m floodmark.cli.demo.crash_writer DIRECTORY`.  It ends by itself when nobody
reads its output any more.
"""

import sys
from contextlib import suppress
from itertools import count
from pathlib import Path

import floodmark
from floodmark.cli.demo.stage import ORDERS, crash_key


def write_until_killed(directory: Path) -> None:
    """Put after put, each followed by its number on stdout."""
    with floodmark.open(directory) as site:
        orders = site.namespace(ORDERS)
        for number in count():
            orders.put(crash_key(number), str(number).encode())
            print(number, flush=True)


if __name__ == "__main__":
    with suppress(BrokenPipeError):
        write_until_killed(Path(sys.argv[1]))
