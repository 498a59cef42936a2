"""The ports of a site's host: what `Site` stands on, in this process or behind a server."""

from floodmark.host.ports.host import PORTS, Host, Port, check_stream_kind
from floodmark.host.ports.membership import MembershipPort
from floodmark.host.ports.namespaces import NamespacePort, NamespaceUpdate
from floodmark.host.ports.partitions import PartitionPort
from floodmark.host.ports.replication import ReplicationPort
from floodmark.host.ports.retention import RetentionPort
from floodmark.host.ports.status import StatusPort
from floodmark.host.ports.verification import VerificationPort
from floodmark.host.ports.versions import VersionPort

__all__ = [
    "PORTS",
    "Host",
    "MembershipPort",
    "NamespacePort",
    "NamespaceUpdate",
    "PartitionPort",
    "Port",
    "ReplicationPort",
    "RetentionPort",
    "StatusPort",
    "VerificationPort",
    "VersionPort",
    "check_stream_kind",
]
