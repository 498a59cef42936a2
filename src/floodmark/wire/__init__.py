"""The Arrow Flight protocol between a site's server and its clients."""

from floodmark.wire.calls import CallSpec, RemoteCalls, call_specs
from floodmark.wire.changes import read_changes
from floodmark.wire.connection import Connection
from floodmark.wire.partition import RemotePartition, RemotePartitionMaps
from floodmark.wire.write_stream import RemoteWriteStream

__all__ = [
    "CallSpec",
    "Connection",
    "RemoteCalls",
    "RemotePartition",
    "RemotePartitionMaps",
    "RemoteWriteStream",
    "call_specs",
    "read_changes",
]
