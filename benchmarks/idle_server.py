"""Serve a site until SIGTERM, with its background work (heartbeats, garbage collection) or without.

python idle_server.py DIRECTORY --listen 127.0.0.1:7100 [--no-heartbeats]
"""

import argparse
import signal
from pathlib import Path

import floodmark
from floodmark.server import serve

ENDING = {signal.SIGTERM, signal.SIGINT}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("directory", type=Path)
    parser.add_argument("--listen", required=True, metavar="HOST:PORT")
    parser.add_argument("--no-heartbeats", action="store_true", help="and no garbage collection")
    options = parser.parse_args()
    # Blocked in all threads, so that `sigwait` receives them and this thread need not poll.
    signal.pthread_sigmask(signal.SIG_BLOCK, ENDING)
    with (
        floodmark.open(options.directory, background=not options.no_heartbeats) as site,
        serve(site, options.listen),
    ):
        signal.sigwait(ENDING)


if __name__ == "__main__":
    main()
