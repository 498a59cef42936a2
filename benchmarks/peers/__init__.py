"""The alternatives to Floodmark, each durable and on loopback, behind one small protocol."""

from benchmarks.peers.base import Client, KeyServer, Peer, PeerFailed, Server, Write, scratch_directory
from benchmarks.peers.measure import (
    Latency,
    Points,
    Tail,
    measure_catch_up,
    measure_load,
    measure_points,
    measure_tail,
)
from benchmarks.peers.roster import PEERS, installed_peers

__all__ = [
    "PEERS",
    "Client",
    "KeyServer",
    "Latency",
    "Peer",
    "PeerFailed",
    "Points",
    "Server",
    "Tail",
    "Write",
    "installed_peers",
    "measure_catch_up",
    "measure_load",
    "measure_points",
    "measure_tail",
    "scratch_directory",
]
