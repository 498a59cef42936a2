"""Point reads and writes: each request checked, allowed, and handed to its partition."""

from collections.abc import Callable, Sequence
from typing import Any, Final

from floodmark.host.ports import Host
from floodmark.model.errors import LimitExceeded
from floodmark.model.limits import COMMIT_BYTES_MAX, MIB, REQUEST_BYTES_MAX
from floodmark.model.partition import CommitLimits, Partition
from floodmark.model.ranges import KeyRange, prefix_end
from floodmark.model.record import Versioned
from floodmark.model.version import Version
from floodmark.partition.commit.entering import check_keys
from floodmark.server.access import Caller
from floodmark.server.checks import (
    check_inside,
    check_position,
    check_size,
    check_version,
)
from floodmark.server.guard import AccessGuard
from floodmark.server.leases import Leases
from floodmark.server.logs import log_action
from floodmark.wire.messages import (
    APPLY,
    COMPARE_AND_SET,
    DELETE_UNCHANGED,
    FIND,
    GET,
    GET_MANY,
    GET_MANY_KEYS_MAX,
    HELLO,
    HOLD,
    LOAD,
    MAP,
    MERGE,
    PUT,
    PUT_UNCHANGED,
    RELEASE,
    REQUEST_MARGIN_BYTES,
    RESOLVED,
    CompareAndSetRequest,
    DeleteUnchangedRequest,
    GetManyRequest,
    GetRequest,
    Hello,
    HoldRequest,
    MapReply,
    Method,
    Nothing,
    PartitionEntry,
    PutRequest,
    PutUnchangedRequest,
    ReleaseRequest,
    Reply,
    Request,
    ResolvedRequest,
)

# A write may hold a whole commit.
WRITE_BYTES_MAX: Final = COMMIT_BYTES_MAX + REQUEST_MARGIN_BYTES
# Values beyond this are left out of an answer to get_many, and asked for again.
GET_MANY_BYTES_MAX: Final = 4 * MIB


class Handler:
    """Reads a request, does what it says, and writes the answer."""

    def __init__(
        self,
        method: Method[Request, Reply],
        handle: Callable[[Caller, Request], Reply],
        *,
        bytes_max: int = REQUEST_BYTES_MAX,
    ) -> None:
        self.method: Method[Any, Any] = method
        self._handle: Callable[[Caller, Any], Any] = handle
        self._bytes_max = bytes_max

    def __call__(self, caller: Caller, body: Any) -> bytes:
        """The answer to a request; `body` is a buffer that was received."""
        check_size(f"the request {self.method.name!r}", body.size, self._bytes_max)
        request = self.method.decode_request(body.to_pybytes())
        return self.method.encode_reply(self._handle(caller, request))


def map_for(partitions: Sequence[Partition], namespaces: Sequence[bytes]) -> list[PartitionEntry]:
    """The map for a caller of some namespaces: true for their keys, and without the split keys of others.

    What lies between two namespaces of the caller goes to the neighbour: a request about it is refused.
    """
    pieces: list[tuple[int, bytes]] = []
    for namespace in sorted(namespaces):
        keys = KeyRange(namespace, prefix_end(namespace))
        for partition in partitions:
            within = partition.range.intersect(keys)
            if within is not None and (not pieces or pieces[-1][0] != partition.id):
                pieces.append((partition.id, within.start))
    if not pieces:
        return [PartitionEntry(partition.id, KeyRange()) for partition in partitions[:1]]
    starts = [b"", *(start for _, start in pieces[1:])]
    ends = [*starts[1:], None]
    return [
        PartitionEntry(number, KeyRange(start, end))
        for (number, _), start, end in zip(pieces, starts, ends, strict=True)
    ]


class DataPlane:
    """Answers what is asked all the time."""

    def __init__(self, host: Host, guard: AccessGuard, leases: Leases) -> None:
        self._host = host
        self._guard = guard
        self._leases = leases

    def handlers(self) -> list[Handler]:
        """What can be asked."""
        return [
            Handler(HELLO, self._hello),
            Handler(MAP, self._map),
            Handler(GET, self._get),
            Handler(FIND, self._find),
            Handler(GET_MANY, self._get_many),
            Handler(RESOLVED, self._resolved),
            Handler(HOLD, self._hold),
            Handler(RELEASE, self._release),
            Handler(PUT, self._put, bytes_max=WRITE_BYTES_MAX),
            Handler(MERGE, self._merge, bytes_max=WRITE_BYTES_MAX),
            Handler(APPLY, self._apply, bytes_max=WRITE_BYTES_MAX),
            Handler(LOAD, self._load, bytes_max=WRITE_BYTES_MAX),
            Handler(PUT_UNCHANGED, self._put_unchanged, bytes_max=WRITE_BYTES_MAX),
            Handler(COMPARE_AND_SET, self._compare_and_set, bytes_max=REQUEST_MARGIN_BYTES),
            Handler(DELETE_UNCHANGED, self._delete_unchanged, bytes_max=WRITE_BYTES_MAX),
        ]

    # A caller with a right to some keys may know where they are.

    def _hello(self, caller: Caller, request: Nothing) -> Hello:
        identity = self._host.identity
        return Hello(identity.site, identity.site_id, identity.format, self._host.physical_ms())

    def _map(self, caller: Caller, request: Nothing) -> MapReply:
        partitions = self._host.router.maps.map.partitions
        limits = partitions[0].limits if partitions else CommitLimits(0, 0)
        if caller.namespaces is not None:
            return MapReply(map_for(partitions, self._guard.readable(caller)), limits)
        return MapReply([PartitionEntry(partition.id, partition.range) for partition in partitions], limits)

    def _resolved(self, caller: Caller, request: ResolvedRequest) -> Version:
        return self._guard.partition(request.partition).resolved_version()

    # Reads

    def _get(self, caller: Caller, request: GetRequest) -> bytes | None:
        partition = self._readable(caller, GET, request.partition, (request.key,), request.at)
        return partition.get(request.key, request.at)

    def _find(self, caller: Caller, request: GetRequest) -> Versioned | None:
        partition = self._readable(caller, FIND, request.partition, (request.key,), request.at)
        return partition.find(request.key, request.at)

    def _get_many(self, caller: Caller, request: GetManyRequest) -> list[bytes | None]:
        if len(request.keys) > GET_MANY_KEYS_MAX:
            raise LimitExceeded(f"one request may ask for at most {GET_MANY_KEYS_MAX:,} keys")
        partition = self._readable(caller, GET_MANY, request.partition, request.keys, request.at)
        values: list[bytes | None] = []
        size = 0
        for key in request.keys:
            value = partition.get(key, request.at)
            values.append(value)
            size += 0 if value is None else len(value)
            if size > GET_MANY_BYTES_MAX:
                break
        return values

    def _hold(self, caller: Caller, request: HoldRequest) -> int:
        check_version(request.version)
        self._guard.require_namespace(caller, HOLD.action.role, request.namespace)
        return self._leases.hold(caller.name, request.version, request.namespace, request.lease)

    def _release(self, caller: Caller, request: ReleaseRequest) -> None:
        self._leases.release(caller.name, request.lease)

    def _readable(
        self,
        caller: Caller,
        method: Method[Any, Any],
        partition_id: int,
        keys: Sequence[bytes],
        at: Version | None,
    ) -> Partition:
        check_keys(keys)
        check_version(at)
        self._guard.require_keys(caller, method.action.role, keys)
        partition = self._guard.partition(partition_id)
        check_inside(partition, keys)
        return partition

    # Writes

    def _put(self, caller: Caller, request: PutRequest) -> Version:
        partition = self._writable(caller, PUT, request.partition, request.keys)
        return partition.put(request.keys, request.values, durable=request.durable)

    def _merge(self, caller: Caller, request: PutRequest) -> Version:
        partition = self._writable(caller, MERGE, request.partition, request.keys)
        return partition.merge(request.keys, request.values, durable=request.durable)

    def _apply(self, caller: Caller, request: PutRequest) -> Version:
        partition = self._writable(caller, APPLY, request.partition, request.keys)
        return partition.apply(request.keys, request.values, durable=request.durable)

    def _load(self, caller: Caller, request: PutRequest) -> Version:
        partition = self._writable(caller, LOAD, request.partition, request.keys)
        return partition.load(request.keys, request.values, durable=request.durable)

    def _put_unchanged(self, caller: Caller, request: PutUnchangedRequest) -> int:
        partition = self._writable(caller, PUT_UNCHANGED, request.partition, request.keys)
        check_position(request.since)
        return partition.put_unchanged(request.keys, request.values, request.since, durable=request.durable)

    def _compare_and_set(self, caller: Caller, request: CompareAndSetRequest) -> Version:
        partition = self._writable(caller, COMPARE_AND_SET, request.partition, (request.key,))
        return partition.compare_and_set(
            request.key, request.expected, request.value, durable=request.durable
        )

    def _delete_unchanged(self, caller: Caller, request: DeleteUnchangedRequest) -> int:
        partition = self._writable(caller, DELETE_UNCHANGED, request.partition, request.keys)
        check_position(request.since)
        return partition.delete_unchanged(request.keys, request.since, durable=request.durable)

    def _writable(
        self, caller: Caller, method: Method[Any, Any], partition_id: int, keys: Sequence[bytes]
    ) -> Partition:
        check_keys(keys)
        self._guard.require_keys(caller, method.action.role, keys)
        partition = self._guard.partition(partition_id)
        check_inside(partition, keys)
        if method.action.audited:
            log_action(caller, method.name, method.action, {"partition": partition_id, "keys": len(keys)})
        return partition
