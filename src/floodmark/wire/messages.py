"""What client and server say to each other, besides streams of rows.

A request that is made all the time is an array of its fields, in their order; a new field goes to the
end and has a default, so that an older peer's request can still be read.  Keys are qualified and values
as stored (see `model/partition.py`) unless said otherwise.
"""

from typing import Any, Final, Generic, TypeAlias, TypeVar, cast

import msgspec

from floodmark.model.access import Role
from floodmark.model.actions import Action, Scope
from floodmark.model.errors import FloodmarkError, InvalidArgument, WireMismatch
from floodmark.model.limits import MIB
from floodmark.model.partition import CommitLimits, Content, LinkGuard
from floodmark.model.ranges import KeyRange
from floodmark.model.record import Versioned
from floodmark.model.stream import ChangesRequest
from floodmark.model.version import Version

# The versions of this protocol that this release speaks.
WIRE_VERSION: Final = 1
WIRE_VERSION_MIN: Final = 1

WIRE_HEADER: Final = "floodmark-wire"
TOKEN_HEADER: Final = "authorization"
TOKEN_SCHEME: Final = "Bearer "

_VERSION_DIGITS_MAX: Final = 9

# What a write's request may hold besides its keys and values.
REQUEST_MARGIN_BYTES: Final = 8 * MIB
GET_MANY_KEYS_MAX: Final = 10_000

# What the requests of the data plane need.  The first is for what tells nothing.
OPEN: Final = Action(Role.READ, repeatable=True)
READS: Final = Action(Role.READ, Scope.NAMESPACE, repeatable=True)
WRITES: Final = Action(Role.WRITE, Scope.NAMESPACE)
LOADS: Final = Action(Role.ADMIN, Scope.NAMESPACE, audited=True)

Request = TypeVar("Request")
Reply = TypeVar("Reply")


class Method(Generic[Request, Reply]):
    """Something that can be asked of a server.

    `action` says what it needs, and whether it may be repeated when no answer came; if not, it `writes`.
    What is `frequent` goes over a channel that stays open.
    """

    def __init__(
        self, name: str, request: Any, reply: Any, action: Action, *, frequent: bool = False
    ) -> None:
        self.name = name
        self.action = action
        self.writes = not action.repeatable
        self.frequent = frequent
        self._requests = msgspec.msgpack.Decoder(request)
        self._replies = msgspec.msgpack.Decoder(reply)

    def __repr__(self) -> str:
        return f"Method({self.name!r})"

    def encode_request(self, request: Request) -> bytes:
        """The request as it travels."""
        return encode(request)

    def decode_request(self, body: bytes) -> Request:
        """A request from a caller that may have sent anything."""
        try:
            return cast(Request, self._requests.decode(body))
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, OverflowError) as error:
            raise _refusal(self.name, error) from error

    def encode_reply(self, reply: Reply) -> bytes:
        """The answer as it travels."""
        return encode(reply)

    def decode_reply(self, body: bytes) -> Reply:
        """An answer of a server."""
        try:
            return cast(Reply, self._replies.decode(body))
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise WireMismatch(
                f"the server's answer to {self.name!r} cannot be read ({error}); "
                "use the same release of Floodmark on both sides"
            ) from error


def _refusal(name: str, error: Exception) -> FloodmarkError:
    # A type that checks itself has refused: what it says is better than where in the request it stood.
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
    """Refuse a peer whose version of the wire is not spoken here."""
    # Longer numbers are no versions, and Python refuses to read those of thousands of digits.
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
    """Any message as it travels."""
    return _encoder.encode(message)


_encoder: Final = msgspec.msgpack.Encoder()


class Hello(msgspec.Struct, frozen=True):
    """Who a server is, what time it is there, and which versions of the wire it speaks."""

    site: str
    site_id: int
    format: int
    physical_ms: int
    wire_version: int = WIRE_VERSION
    wire_version_min: int = WIRE_VERSION_MIN


class PartitionEntry(msgspec.Struct, frozen=True, array_like=True):
    """One partition of the map."""

    id: int
    range: KeyRange


class MapReply(msgspec.Struct, frozen=True):
    """The partitions in order of keys, and what one commit of any of them may hold."""

    partitions: list[PartitionEntry]
    limits: CommitLimits


class Nothing(msgspec.Struct, frozen=True, array_like=True):
    """A request without arguments."""


class GetRequest(msgspec.Struct, frozen=True, array_like=True):
    """One key of a partition, now or as of a version."""

    partition: int
    key: bytes
    at: Version | None = None


class GetManyRequest(msgspec.Struct, frozen=True, array_like=True):
    """Several keys of a partition."""

    partition: int
    keys: list[bytes]
    at: Version | None = None


class PutRequest(msgspec.Struct, frozen=True, array_like=True):
    """Distinct keys and as many values, as one commit."""

    partition: int
    keys: list[bytes]
    values: list[bytes]
    durable: bool


class CompareAndSetRequest(msgspec.Struct, frozen=True, array_like=True):
    """A value for a key if the present one, as users see it, is as expected."""

    partition: int
    key: bytes
    expected: bytes | None
    value: bytes
    durable: bool


class DeleteUnchangedRequest(msgspec.Struct, frozen=True, array_like=True):
    """Keys to delete unless they were written after a version."""

    partition: int
    keys: list[bytes]
    since: Version
    durable: bool


class PutUnchangedRequest(msgspec.Struct, frozen=True, array_like=True):
    """Distinct keys and as many values, for those keys that were not changed since a version."""

    partition: int
    keys: list[bytes]
    values: list[bytes]
    since: Version
    durable: bool


class ResolvedRequest(msgspec.Struct, frozen=True, array_like=True):
    """A partition whose resolved version is asked for."""

    partition: int


class HoldRequest(msgspec.Struct, frozen=True, array_like=True):
    """A version of a namespace that is being read.  `lease` names a hold that this one takes the place of."""

    version: Version
    namespace: int
    lease: int | None = None


class ReleaseRequest(msgspec.Struct, frozen=True, array_like=True):
    """A hold that is no longer needed."""

    lease: int


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


@WRITES
class WriteStreamCommand(msgspec.Struct, frozen=True, tag="write"):
    """A stream of writes."""

    durable: bool


@WRITES
class MergeStreamCommand(msgspec.Struct, frozen=True, tag="merge"):
    """A stream of unstamped states, each to be merged into what its key holds."""

    durable: bool


@WRITES
class ApplyStreamCommand(msgspec.Struct, frozen=True, tag="apply"):
    """A stream of changes that carry their origin, and maybe of what a link supposes."""

    durable: bool
    link: LinkGuard | None = None


@LOADS
class LoadStreamCommand(msgspec.Struct, frozen=True, tag="load"):
    """A stream of records that carry their origin, and are no changes here."""

    durable: bool


@WRITES
class PutUnchangedStreamCommand(msgspec.Struct, frozen=True, tag="put_unchanged"):
    """A stream of writes of keys that were not changed since a version."""

    durable: bool
    since: Version


HELLO: Final = Method[Nothing, Hello]("hello", Nothing, Hello, OPEN)
MAP: Final = Method[Nothing, MapReply]("map", Nothing, MapReply, OPEN)
GET: Final = Method[GetRequest, bytes | None]("get", GetRequest, bytes | None, READS, frequent=True)
FIND: Final = Method[GetRequest, Versioned | None]("find", GetRequest, Versioned | None, READS, frequent=True)
GET_MANY: Final = Method[GetManyRequest, list[bytes | None]](
    "get_many", GetManyRequest, list[bytes | None], READS, frequent=True
)
PUT: Final = Method[PutRequest, Version]("put", PutRequest, Version, WRITES, frequent=True)
MERGE: Final = Method[PutRequest, Version]("merge", PutRequest, Version, WRITES, frequent=True)
APPLY: Final = Method[PutRequest, Version]("apply", PutRequest, Version, WRITES, frequent=True)
LOAD: Final = Method[PutRequest, Version]("load", PutRequest, Version, LOADS, frequent=True)
COMPARE_AND_SET: Final = Method[CompareAndSetRequest, Version](
    "compare_and_set", CompareAndSetRequest, Version, WRITES, frequent=True
)
DELETE_UNCHANGED: Final = Method[DeleteUnchangedRequest, int](
    "delete_unchanged", DeleteUnchangedRequest, int, WRITES, frequent=True
)
PUT_UNCHANGED: Final = Method[PutUnchangedRequest, int](
    "put_unchanged", PutUnchangedRequest, int, WRITES, frequent=True
)
RESOLVED: Final = Method[ResolvedRequest, Version]("resolved", ResolvedRequest, Version, OPEN)
HOLD: Final = Method[HoldRequest, int]("hold", HoldRequest, int, READS, frequent=True)
# A client that pauses for long asks again now and then, and needs no open channel for that.
HOLD_ON: Final = Method[HoldRequest, int]("hold", HoldRequest, int, READS)
RELEASE: Final = Method[ReleaseRequest, None]("release", ReleaseRequest, None, OPEN, frequent=True)

# Tickets and commands are told apart by their tag, and declare what they need each for itself.
Ticket: TypeAlias = ScanTicket | RecordsTicket | ChangesTicket
TICKET: Final = Method[Ticket, None]("stream", Ticket, None, OPEN)
StreamCommand: TypeAlias = (
    WriteStreamCommand
    | MergeStreamCommand
    | ApplyStreamCommand
    | LoadStreamCommand
    | PutUnchangedStreamCommand
)
COMMAND: Final = Method[StreamCommand, None]("write stream", StreamCommand, None, WRITES)
