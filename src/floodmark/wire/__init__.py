"""The protocols between a site's server and its clients: Arrow Flight, and RESP for point calls."""

from floodmark.wire.changes import read_changes
from floodmark.wire.cluster import Connections, Nodes, RemoteCalls
from floodmark.wire.connection import Connection
from floodmark.wire.messages import port_methods
from floodmark.wire.partition import RemotePartition, RemotePartitionMaps
from floodmark.wire.write_stream import RemoteWriteStream, RepeatingWriteStream

__all__ = [
    "Connection",
    "Connections",
    "Nodes",
    "RemoteCalls",
    "RemotePartition",
    "RemotePartitionMaps",
    "RemoteWriteStream",
    "RepeatingWriteStream",
    "port_methods",
    "read_changes",
]
