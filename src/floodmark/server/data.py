"""Point reads and writes: checks each request and its caller's rights, then calls the partition."""

from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Any, Final

from floodmark.host.ports import Host
from floodmark.model.batch import require_batch
from floodmark.model.errors import LimitExceeded
from floodmark.model.limits import (
    ATOMIC_READ_KEYS_MAX,
    COMMIT_BYTES_MAX,
    MIB,
    REQUEST_BYTES_MAX,
)
from floodmark.model.partition import Partition
from floodmark.model.ranges import KeyRange, prefix_end
from floodmark.model.version import Version
from floodmark.partition.commit.entering import check_keys, require_paired
from floodmark.server.access import Caller
from floodmark.server.guard import (
    AccessGuard,
    check_inside,
    check_position,
    check_size,
    check_version,
)
from floodmark.server.leases import Leases
from floodmark.server.logs import auditing
from floodmark.wire import messages
from floodmark.wire.messages import (
    COMPARE_AND_SET,
    GET_MANY,
    GET_MANY_KEYS_MAX,
    HELLO,
    HOLD,
    MAP,
    RELEASE,
    REQUEST_MARGIN_BYTES,
    RESOLVED,
    Hello,
    MapReply,
    Method,
    PartitionEntry,
)

# The calls that go to their partition after the checks, without further work.
POINT_CALLS: Final = (
    messages.GET,
    messages.GET_FRESH,
    messages.FIND,
    messages.READ_BATCHES,
    messages.PUT,
    messages.MERGE,
    messages.WRITE,
    messages.APPLY,
    messages.LOAD,
    messages.PUT_UNCHANGED,
    messages.DELETE_UNCHANGED,
    COMPARE_AND_SET,
)
# The calls whose keys may lie in any partitions of the node.
NODE_WIDE: Final = (
    messages.WRITE,
    messages.APPLY,
    messages.PUT_UNCHANGED,
    messages.DELETE_UNCHANGED,
    messages.READ_BATCHES,
)
# The fields that are passed to the partition as keyword arguments.
OPTIONS: Final = ("durable", "link", "batch", "reads", "transaction")
# The steps that other nodes take at a partition.
STEPS: Final = (
    messages.PREPARE,
    messages.PREPARE_BATCH,
    messages.COMMIT_PREPARED,
    messages.ABORT_PREPARED,
    messages.ASK_PREPARED,
    messages.ENDED_PREPARED,
    messages.VALIDATE,
    messages.RESERVE,
    messages.SETTLE,
    messages.REPAIR,
)
# A write may hold a whole commit.
WRITE_BYTES_MAX: Final = COMMIT_BYTES_MAX + REQUEST_MARGIN_BYTES
# An answer to get_many ends once its values exceed this; the client requests the others again.
GET_MANY_BYTES_MAX: Final = 4 * MIB


class Handler:
    """Answers one kind of request."""

    def __init__(
        self,
        method: Method[Any],
        handle: Callable[[Caller, Any], Any],
        enter: Callable[[Caller, Any], Partition] | None = None,
        read: Callable[[Partition, Any], Any] | None = None,
    ) -> None:
        self.method = method
        # `handle` does it all.  For a request to one partition, `enter` runs the checks and returns the
        # partition; for a read, `read` then reads there.
        self.handle = handle
        self.enter = enter
        self.read = read
        self._bytes_max = WRITE_BYTES_MAX if method.action.large else REQUEST_BYTES_MAX
        if method is COMPARE_AND_SET:
            # Two values, and no more.
            self._bytes_max = REQUEST_MARGIN_BYTES

    def __call__(self, caller: Caller, body: bytes | memoryview) -> bytes:
        """The encoded answer to an encoded request."""
        return self.method.encode_reply(self.handle(caller, self.decode(body)))

    def decode(self, body: bytes | memoryview) -> Any:
        """Decode a request; LimitExceeded if it is too large."""
        if len(body) > self._bytes_max:
            check_size(f"the request {self.method.name!r}", len(body), self._bytes_max)
        return self.method.decode_request(body)


def map_for(partitions: Sequence[Partition], namespaces: Sequence[bytes]) -> list[tuple[int, KeyRange]]:
    """The ids and ranges of partitions for a caller of some namespaces, without the split keys of others."""
    pieces: list[tuple[int, bytes]] = []
    for namespace in sorted(namespaces):
        keys = KeyRange(namespace, prefix_end(namespace))
        for partition in partitions:
            within = partition.range.intersect(keys)
            if within is not None and (not pieces or pieces[-1][0] != partition.id):
                pieces.append((partition.id, within.start))
    if not pieces:
        return [(partition.id, KeyRange()) for partition in partitions[:1]]
    starts = [b"", *(start for _, start in pieces[1:])]
    ends = [*starts[1:], None]
    return [
        (number, KeyRange(start, end)) for (number, _), start, end in zip(pieces, starts, ends, strict=True)
    ]


def check_read_set(keys: Sequence[bytes], among: Sequence[bytes]) -> list[bytes]:
    """All keys that the caller of an atomic read must have the right to read."""
    if len(keys) + len(among) > ATOMIC_READ_KEYS_MAX:
        raise LimitExceeded(f"an atomic read may name at most {ATOMIC_READ_KEYS_MAX:,} keys")
    return [*keys, *among] if keys else []


class DataPlane:
    """Answers the frequent requests: point calls, the map, leases, and the steps of other nodes."""

    def __init__(self, host: Host, guard: AccessGuard, leases: Leases) -> None:
        self._host = host
        self._guard = guard
        self._leases = leases
        # The port at which clients of this server reach RESP; 0 if there is none.
        self.resp_port = 0

    def handlers(self) -> list[Handler]:
        """The handlers of these requests."""
        return [
            Handler(HELLO, self._hello),
            Handler(MAP, self._map),
            Handler(RESOLVED, self._resolved),
            Handler(HOLD, self._hold),
            Handler(RELEASE, self._release),
            Handler(GET_MANY, self._get_many),
            *(Handler(method, *self._point_call(method)) for method in POINT_CALLS),
            *(Handler(method, *self._step(method)) for method in STEPS),
        ]

    # A caller with a right to some keys may know where they are.

    def _hello(self, caller: Caller, request: object) -> Hello:
        identity = self._host.identity
        return Hello(
            identity.site,
            identity.site_id,
            identity.format,
            self._host.physical_ms(),
            resp_port=self.resp_port,
            version_ms=self._host.version_ms(),
        )

    def _map(self, caller: Caller, request: object) -> MapReply:
        # Raises if this node was fenced: its map is then a `ClosedMap`.
        partitions = self._host.router.maps.map.overlapping(KeyRange())
        limits = partitions[0].limits
        owners = self._host.owners()
        if caller.namespaces is None:
            shown = [(partition.id, partition.range) for partition in partitions]
        else:
            shown = map_for(partitions, self._guard.readable(caller))
        entries = [PartitionEntry(number, keys, owners.partitions.get(number, 0)) for number, keys in shown]
        return MapReply(entries, limits, dict(owners.nodes), owners.keeper)

    def _resolved(self, caller: Caller, request: Any) -> Version:
        return self._guard.partition(request.partition).resolved_version()

    def _hold(self, caller: Caller, request: Any) -> int:
        check_version(request.version)
        self._guard.require_namespace(caller, HOLD.action.role, request.namespace)
        return self._leases.hold(caller.name, request.version, request.namespace, request.lease)

    def _release(self, caller: Caller, request: Any) -> None:
        self._leases.release(caller.name, request.lease)

    # Calls of one partition

    def _point_call(
        self, method: Method[Any]
    ) -> tuple[
        Callable[[Caller, Any], Any],
        Callable[[Caller, Any], Partition],
        Callable[[Partition, Any], Any] | None,
    ]:
        """The functions `handle`, `enter` and, for a read, `read` of a call's `Handler`."""
        fields = method.request.__struct_fields__
        has_at, has_since, has_reads = "at" in fields, "since" in fields, "reads" in fields
        name, has_one_key, names_others = method.call, "key" in fields, "among" in fields
        named = tuple(field for field in fields if field in OPTIONS)
        arguments = attrgetter(*(field for field in fields if field not in ("partition", *named)))

        def enter(caller: Caller, request: Any) -> Partition:
            if has_at:
                check_version(request.at)
            keys = (request.key,) if has_one_key else request.keys
            if names_others:
                keys = check_read_set(keys, request.among)
            partition = self._partition_of(caller, method, request.partition, keys)
            if has_since:
                check_position(request.since)
            if has_reads and request.reads is not None:
                self._guard.check_reads(caller, request.reads)
            return partition

        def read_at(partition: Partition, request: Any) -> Any:
            return getattr(partition, name)(*arguments(request))

        def read(caller: Caller, request: Any) -> Any:
            return read_at(enter(caller, request), request)

        def write(caller: Caller, request: Any) -> Any:
            options = {field: getattr(request, field) for field in named}
            partition = enter(caller, request)
            if options.get("batch") and options["reads"] is None and not caller.is_node:
                # Its keys may belong to several nodes, and nodes alone take the steps of such a batch.
                require_paired(request.keys, request.values)
                rows = dict(zip(request.keys, request.values, strict=True))
                return self._host.router.write_batch(
                    rows, durable=request.durable, transaction=request.transaction
                )
            return getattr(partition, name)(*arguments(request), **options)

        def write_audited(caller: Caller, request: Any) -> Any:
            said = {"partition": request.partition, "keys": len(request.keys)}
            with auditing(caller, method.name, method.action, said):
                return write(caller, request)

        if "durable" not in fields:
            return read, enter, read_at
        return (write_audited if method.action.audited else write), enter, None

    def _step(
        self, method: Method[Any]
    ) -> tuple[Callable[[Caller, Any], Any], Callable[[Caller, Any], Partition]]:
        """The functions `handle` and `enter` of a step's `Handler`."""
        fields = method.request.__struct_fields__[1:]
        arguments, has_keys = attrgetter(*fields), "keys" in fields

        def enter(caller: Caller, request: Any) -> Partition:
            if caller.is_node or method is not messages.ASK_PREPARED:
                caller.require_node()
            else:
                # A client asks for its own commit.
                require_batch(request.transaction)
                check_keys((request.key,))
                self._guard.require_keys(caller, method.action.role, (request.key,))
            partition = self._guard.partition(request.partition)
            if has_keys:
                check_keys(request.keys)
                check_inside(partition, request.keys)
            return partition

        def take(caller: Caller, request: Any) -> Any:
            values = arguments(request)
            return getattr(enter(caller, request), method.call)(*(values if len(fields) > 1 else (values,)))

        return take, enter

    def _get_many(self, caller: Caller, request: Any) -> list[bytes | None]:
        if len(request.keys) > GET_MANY_KEYS_MAX:
            raise LimitExceeded(f"one request may ask for at most {GET_MANY_KEYS_MAX:,} keys")
        check_version(request.at)
        partition = self._partition_of(caller, GET_MANY, request.partition, request.keys)
        values: list[bytes | None] = []
        size = 0
        for key in request.keys:
            value = partition.get(key, request.at)
            values.append(value)
            size += 0 if value is None else len(value)
            if size > GET_MANY_BYTES_MAX:
                break
        return values

    def _partition_of(
        self, caller: Caller, method: Method[Any], partition_id: int, keys: Sequence[bytes]
    ) -> Partition:
        """The partition of a request, if it holds the keys and the caller may touch them."""
        check_keys(keys)
        self._guard.require_keys(caller, method.action.role, keys)
        partition = self._guard.partition(partition_id)
        if method not in NODE_WIDE:
            check_inside(partition, keys)
        return partition
