"""A client as a process of its own, which begins something and then does nothing any more.

    python support_client.py URL scan|changes|write|get

It prints "stalled" when it has read, or written, a little.  What it does then is up to whoever sends it a
signal; left alone, it waits.
"""

import sys
from threading import Event

from floodmark.model.partition import PutStream
from floodmark.site.connecting import connect


def main(url: str, kind: str) -> None:
    """Begin, and stop."""
    site = connect(url)
    big = site.namespace("big")
    held: object = None
    if kind == "scan":
        held = big.scan()
        next(held)
    elif kind == "changes":
        held = site.changes("big", follow=True)
        next(held)
    elif kind == "write":
        held = site.host.write_stream(PutStream(False))
        held.send({b"\x00\x00\x01stalled": b"x\x00"}).result()
    else:
        big.get(b"0")
    print("stalled", flush=True)
    Event().wait()
    print(held)


if __name__ == "__main__":
    main(*sys.argv[1:])
