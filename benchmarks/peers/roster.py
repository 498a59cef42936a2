"""The list of all peers, and which of them are installed."""

import sys
from collections.abc import Sequence
from typing import Final

from benchmarks.peers.base import Peer
from benchmarks.peers.nats import Nats
from benchmarks.peers.postgres import Postgres
from benchmarks.peers.redis import Redis

PEERS: Final[tuple[Peer, ...]] = (Postgres(), Redis(), Nats())


def installed_peers(peers: Sequence[Peer] = PEERS) -> list[Peer]:
    """The installed peers; for each other one, prints to stderr how to install it."""
    present = []
    for peer in peers:
        if peer.is_installed():
            present.append(peer)
        else:
            text = f"SKIPPED {peer.name}: not installed. To compare with it: {peer.how_to_install()}"
            print(text, file=sys.stderr, flush=True)
    return present
