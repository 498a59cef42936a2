"""A process that writes pairs until it is killed, for readers of its directory.

    python support_pairs.py DIRECTORY

In round N it puts N under both keys of the left pair, in one commit, and then under both of the right pair,
which lies in another partition.  A line on standard output says that a round was acknowledged.
"""

import sys
from pathlib import Path
from typing import Final

import floodmark

LEFT: Final = (b"a1", b"a2")
RIGHT: Final = (b"z1", b"z2")
# Large, so that RocksDB flushes its memory and removes old files on the way.
FILLER: Final = bytes(100_000)


def main(directory: Path) -> None:
    """Write for ever."""
    with floodmark.open(directory, site="oslo", site_id=7, background=False) as site:
        users, fillers = site.create_namespace("users"), site.create_namespace("fillers")
        site.split("users", b"m")
        for number in range(1, 10**9):
            value = b"%d" % number
            users.put_many(dict.fromkeys(LEFT, value), durability="async")
            fillers.put(b"%d" % (number % 50), FILLER, durability="async")
            users.put_many(dict.fromkeys(RIGHT, value))
            if number % 3 == 0:
                site.host.versions.heartbeat()
            print(number, flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
