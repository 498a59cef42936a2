"""Requests and answers, derived from the methods of Protocols: their names and types are all that a client
needs to call them and a server to offer them.

The arguments are sent as a structure with the parameters as fields, and the receiver checks their types; so
it is with the result.  The declaration of a method states which right a call needs, and whether it may be
repeated (`model/actions.py`).  A frequent request is an array of its fields, in their order; a new field goes
to the end and has a default, so that an older peer's request can still be read.
"""

import inspect
from collections.abc import Callable, Collection, Mapping
from functools import cache
from typing import Any, Final, Generic, Protocol, TypeAlias, TypeVar, cast, get_type_hints

import msgspec

from floodmark.model.actions import Action, declared
from floodmark.model.errors import FloodmarkError, InvalidArgument, WireMismatch
from floodmark.model.limits import MIB
from floodmark.model.partition import OPEN, READS, WRITES, CommitLimits, Content, Partition, StreamCommand
from floodmark.model.ranges import KeyRange
from floodmark.model.stream import ChangesRequest
from floodmark.model.version import Version
from floodmark.wire.resp import call_head

# The versions of this protocol that this release speaks.
WIRE_VERSION: Final = 1
WIRE_VERSION_MIN: Final = 1

WIRE_HEADER: Final = "floodmark-wire"
TOKEN_HEADER: Final = "authorization"
TOKEN_SCHEME: Final = "Bearer "

_VERSION_DIGITS_MAX: Final = 9

# The bytes that a write's request may have besides its keys and values.
REQUEST_MARGIN_BYTES: Final = 8 * MIB
GET_MANY_KEYS_MAX: Final = 10_000

Reply = TypeVar("Reply")


class Method(Generic[Reply]):
    """A request that a server answers.  Its `action` is the declaration of the method; it `writes` if it is
    not repeatable.

    A `frequent` request goes over RESP if the server offers it.
    """

    def __init__(
        self, name: str, request: Any, reply: Any, action: Action, *, call: str = "", frequent: bool = False
    ) -> None:
        self.name = name
        # The beginning of its calls over RESP.
        self.head = call_head(name)
        # The structure of its arguments, and the method that it calls.
        self.request = request
        self.call = call
        self.action = action
        self.writes = not action.repeatable
        self.frequent = frequent
        self._requests = msgspec.msgpack.Decoder(request)
        self._replies = msgspec.msgpack.Decoder(reply)

    def __repr__(self) -> str:
        return f"Method({self.name!r})"

    def encode_request(self, request: object) -> bytes:
        """Encode a request."""
        return encode(request)

    def decode_request(self, body: bytes | memoryview) -> Any:
        """Decode a request; raises InvalidArgument, or the error of a type that checks itself."""
        try:
            return self._requests.decode(body)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, OverflowError) as error:
            raise _refusal(self.name, error) from error

    def encode_reply(self, reply: Reply) -> bytes:
        """Encode an answer."""
        return encode(reply)

    def decode_reply(self, body: bytes) -> Reply:
        """Decode the answer of a server; raises WireMismatch if it cannot be read."""
        try:
            return cast(Reply, self._replies.decode(body))
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise WireMismatch(
                f"the server's answer to {self.name!r} cannot be read ({error}); "
                "use the same release of Floodmark on both sides"
            ) from error


def _refusal(name: str, error: Exception) -> FloodmarkError:
    # A type that checks itself has refused the value: its error is better than the position in the request.
    if isinstance(error.__cause__, FloodmarkError):
        return error.__cause__.again()
    return InvalidArgument(f"the request {name!r} cannot be read: {error}")


def common_version(refusal: WireMismatch) -> int | None:
    """The highest version that this client and a server which refused it both speak."""
    lowest, highest = refusal.details.get("minimum"), refusal.details.get("maximum")
    if not isinstance(lowest, int) or not isinstance(highest, int):
        return None
    common = min(highest, WIRE_VERSION)
    return common if common >= max(lowest, WIRE_VERSION_MIN) else None


def require_version(shown: str | None) -> None:
    """Raise WireMismatch unless this release speaks the version of the wire that a client has sent."""
    # Longer numbers are no versions, and Python refuses to parse those with thousands of digits.
    is_number = shown is not None and shown.isdecimal() and len(shown) <= _VERSION_DIGITS_MAX
    version = int(shown) if shown is not None and is_number else None
    if version is not None and WIRE_VERSION_MIN <= version <= WIRE_VERSION:
        return
    spoken = f"{WIRE_VERSION_MIN} to {WIRE_VERSION}"
    if version is None:
        said = "the client did not say which version of the wire it speaks; is it a Floodmark client?"
    elif version > WIRE_VERSION:
        said = f"the client speaks version {version} of the wire; upgrade the server"
    else:
        said = f"the client speaks version {version} of the wire; upgrade the client"
    raise WireMismatch(
        f"{said} (this server speaks {spoken})", minimum=WIRE_VERSION_MIN, maximum=WIRE_VERSION
    )


def encode(message: object) -> bytes:
    """Encode any message."""
    return _encoder.encode(message)


# Columns and views of keys are encoded as lists.
_encoder: Final = msgspec.msgpack.Encoder(enc_hook=list)


class Hello(msgspec.Struct, frozen=True):
    """The identity and time of a server, the versions of the wire that it speaks, and its port for RESP.

    `version_ms` is the time of its next version, 0 if the server does not send it.  Without RESP the port is
    0.
    """

    site: str
    site_id: int
    format: int
    physical_ms: int
    wire_version: int = WIRE_VERSION
    wire_version_min: int = WIRE_VERSION_MIN
    resp_port: int = 0
    version_ms: int = 0


class PartitionEntry(msgspec.Struct, frozen=True, array_like=True):
    """One partition of the map, and the number of the node that owns it; 0 for the server that answers."""

    id: int
    range: KeyRange
    node: int = 0


class MapReply(msgspec.Struct, frozen=True, omit_defaults=True):
    """The partitions in order of keys, and the limits of one commit.

    `nodes` has the URLs of the nodes that serve the site, by number, and `keeper` is one of these numbers;
    a site of one process has none.
    """

    partitions: list[PartitionEntry]
    limits: CommitLimits
    nodes: dict[int, str] = {}
    keeper: int = 0


@READS
class ScanTicket(msgspec.Struct, frozen=True, tag="scan"):
    """The live pairs of a range of one namespace in one partition, as of a version."""

    partition: int
    keys: KeyRange
    at: Version
    rows_max: int | None = None
    reverse: bool = False


@READS
class RecordsTicket(msgspec.Struct, frozen=True, tag="records"):
    """The records of a range of one namespace in one partition, as of a version, as they are stored."""

    partition: int
    keys: KeyRange
    at: Version
    dead: bool = False
    content: Content = Content.WHOLE


@READS
class ChangesTicket(msgspec.Struct, frozen=True, tag="changes"):
    """A stream of changes."""

    request: ChangesRequest


class ServerCalls(Protocol):
    """Calls to a server as a whole."""

    @OPEN
    def hello(self) -> Hello:
        """The server's identity and time."""

    @OPEN
    def map(self) -> MapReply:
        """The partitions of the caller's namespaces."""

    @READS
    def hold(self, version: Version, namespace: int, lease: int | None = None) -> int:
        """Hold a version of a namespace that is being read, in the place of an earlier lease; the lease."""

    @OPEN
    def release(self, lease: int) -> None:
        """Release a lease."""


def derive(
    function: Callable[..., Reply],
    name: str,
    *,
    leading: Collection[tuple[str, Any]] = (),
    without: Collection[str] = (),
    array_like: bool = False,
    frequent: bool = False,
) -> Method[Reply]:
    """The request that calls a method; a TypeError if it declares no action, or collects arguments."""
    hints = get_type_hints(function)
    parameters = list(inspect.signature(function).parameters.values())[1:]
    fields = [_field(parameter, hints) for parameter in parameters if parameter.name not in without]
    request = msgspec.defstruct(
        f"{function.__name__}_arguments", [*leading, *fields], frozen=True, array_like=array_like
    )
    return Method(
        name, request, hints["return"], declared(function), call=function.__name__, frequent=frequent
    )


@cache
def port_methods(protocol: type, prefix: str) -> Mapping[str, Method[Any]]:
    """The requests of a port by name.  Derived once: reading type hints takes far longer than connecting."""
    functions = inspect.getmembers(protocol, inspect.isfunction)
    methods = [derive(each, f"{prefix}.{name}") for name, each in functions if not name.startswith("_")]
    return {method.name: method for method in methods}


def _field(parameter: inspect.Parameter, hints: dict[str, Any]) -> tuple[str, Any] | tuple[str, Any, Any]:
    if parameter.kind in (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD):
        raise TypeError(f"{parameter.name} collects arguments; only named ones can travel")
    if parameter.default is inspect.Parameter.empty:
        return parameter.name, hints[parameter.name]
    return parameter.name, hints[parameter.name], parameter.default


def _of_partition(function: Callable[..., Reply], name: str = "", *, frequent: bool = True) -> Method[Reply]:
    """A call of one partition: its id, then the arguments of the method."""
    return derive(
        function,
        name or function.__name__,
        leading=[("partition", int)],
        array_like=True,
        frequent=frequent,
    )


HELLO: Final = derive(ServerCalls.hello, "hello", array_like=True)
MAP: Final = derive(ServerCalls.map, "map", array_like=True)
GET: Final = _of_partition(Partition.get)
GET_FRESH: Final = _of_partition(Partition.get_fresh)
FIND: Final = _of_partition(Partition.find)
GET_MANY: Final = _of_partition(Partition.get_many)
READ_BATCHES: Final = _of_partition(Partition.read_batches)
PUT: Final = _of_partition(Partition.put)
MERGE: Final = _of_partition(Partition.merge)
WRITE: Final = _of_partition(Partition.write)
APPLY: Final = _of_partition(Partition.apply)
LOAD: Final = _of_partition(Partition.load)
COMPARE_AND_SET: Final = _of_partition(Partition.compare_and_set)
DELETE_UNCHANGED: Final = _of_partition(Partition.delete_unchanged)
PUT_UNCHANGED: Final = _of_partition(Partition.put_unchanged)
# Steps may wait for each other, and the server has few threads for calls over RESP.
PREPARE: Final = _of_partition(Partition.prepare, frequent=False)
# The prepares of an atomic batch wait only for their round.
PREPARE_BATCH: Final = _of_partition(Partition.prepare, "prepare_batch")
COMMIT_PREPARED: Final = _of_partition(Partition.commit_prepared)
ABORT_PREPARED: Final = _of_partition(Partition.abort_prepared, frequent=False)
ASK_PREPARED: Final = _of_partition(Partition.ask_prepared, frequent=False)
ENDED_PREPARED: Final = _of_partition(Partition.ended_prepared, frequent=False)
VALIDATE: Final = _of_partition(Partition.validate, frequent=False)
RESERVE: Final = _of_partition(Partition.reserve, frequent=False)
SETTLE: Final = _of_partition(Partition.settle, frequent=False)
REPAIR: Final = _of_partition(Partition.repair, frequent=False)
RESOLVED: Final = _of_partition(Partition.resolved_version, "resolved", frequent=False)
HOLD: Final = derive(ServerCalls.hold, "hold", array_like=True, frequent=True)
RELEASE: Final = derive(ServerCalls.release, "release", array_like=True, frequent=True)

# Tickets and commands differ by their tag, and each declares the right that it needs.
Ticket: TypeAlias = ScanTicket | RecordsTicket | ChangesTicket
TICKET: Final = Method[None]("stream", Ticket, None, OPEN)
COMMAND: Final = Method[None]("write stream", StreamCommand, None, WRITES)
