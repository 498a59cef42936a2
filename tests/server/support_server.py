"""A server as a process of its own, for tests that kill it.

    python support_server.py DIRECTORY LISTEN STALL_SECONDS

It prints its URL when it serves.  SIGTERM ends it cleanly, and it prints "closed" then.
"""

import signal
import sys
from threading import Event

import floodmark
from floodmark.server import ServerOptions, serve


def main(directory: str, listen: str, stall_seconds: str) -> None:
    """Serve until told to stop."""
    stopping = Event()
    signal.signal(signal.SIGTERM, lambda *_: stopping.set())
    site = floodmark.open(directory, site="oslo")
    with serve(site, listen, ServerOptions(stall_seconds=float(stall_seconds))) as server:
        print(server.url, flush=True)
        # In steps: a signal that another thread of the process takes does not end a wait.
        while not stopping.wait(0.2):
            pass
    print("closed", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
