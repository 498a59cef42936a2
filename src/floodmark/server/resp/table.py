"""The table of commands: what the server dispatches by, and what `docs/resp.md` is made from.

A command of data gets `CommandRecords`, and runs on the event loop if it only reads, or inside a round of
group commit if it writes.  Both may run in a transaction.  A command of a session gets the session, and runs
on the event loop, or in a worker thread if it may wait.
"""

import logging
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final, TypeAlias, TypeVar

from floodmark.model.access import Role
from floodmark.model.errors import (
    FloodmarkError,
    GenerationSwapped,
    NotAllowed,
    NotAuthenticated,
    OutcomeUnknown,
    Retryable,
    WrongPolicy,
)
from floodmark.wire.resp import ErrorReply

Arguments: TypeAlias = Sequence[bytes]
Handler: TypeAlias = Callable[..., Any]
Member = TypeVar("Member", bound=Handler)

SAME: Final = "same as Redis"

_log = logging.getLogger("floodmark.server")


class Kind(StrEnum):
    """Where a command runs."""

    READ = "reads records"
    WRITE = "writes records"
    SESSION = "about the connection"
    SLOW = "may wait"
    CALL = "of our own clients"


class CommandError(Exception):
    """An error reply, with its code."""

    def reply(self) -> ErrorReply:
        """The error as a reply."""
        return ErrorReply(str(self))


SYNTAX: Final = "ERR syntax error"
NOT_AN_INTEGER: Final = "ERR value is not an integer or out of range"
SHOWN_BYTES_MAX: Final = 128
WRONG_TYPE: Final = "WRONGTYPE Operation against a key holding the wrong kind of value"


def describe(error: BaseException) -> ErrorReply:
    """The error reply for an exception; its code shows what a client may do about it."""
    match error:
        case CommandError():
            return error.reply()
        case NotAuthenticated():
            code = "NOAUTH"
        case NotAllowed():
            code = "NOPERM"
        case WrongPolicy():
            code = "WRONGTYPE"
        case GenerationSwapped():
            return ErrorReply(f"ERR {error}; a connection chooses with FM.GENERATION")
        case OutcomeUnknown():
            code = "UNKNOWN"
        case Retryable():
            code = "TRYAGAIN"
        case FloodmarkError():
            code = "ERR"
        case _:
            return ErrorReply("ERR the server failed unexpectedly; its log says more")
    return ErrorReply(f"{code} {error}")


def attempt(name: str, run: Callable[[], object]) -> object:
    """The reply of a command, or the error reply for what it raises."""
    try:
        return run()
    except (CommandError, FloodmarkError) as error:
        return describe(error)
    except Exception as error:
        _log.exception("the command %s failed unexpectedly", name)
        return describe(error)


@dataclass(frozen=True, kw_only=True)
class Command:
    """One command.

    arity     the number of arguments, with the name; a negative one is a minimum, as in Redis
    role      the role that it needs: on the namespaces of its keys, or of its session
    keys      the first and the last argument that is a key, and the step between them; -1 is the last
    verdict   "same as Redis", "differs: …", "ours: …" or "refused: …"
    is_open   whether a client may send it before it has authenticated
    is_quick  whether it runs at once inside a transaction, like EXEC
    is_queued whether a transaction may contain it though it is a command of the session
    """

    name: str
    arity: int
    kind: Kind
    verdict: str
    handler: Handler
    role: Role | None = None
    keys: tuple[int, int, int] = (0, 0, 0)
    is_open: bool = False
    is_quick: bool = False
    is_queued: bool = False

    def fits(self, count: int) -> bool:
        """Whether a request may have `count` arguments, with the name."""
        return count == self.arity if self.arity >= 0 else count >= -self.arity

    def keys_of(self, arguments: Arguments) -> Arguments:
        """The arguments that are keys."""
        first, last, step = self.keys
        if not first:
            return ()
        return arguments[first : (len(arguments) + last if last < 0 else last) + 1 : step]


class CommandTable:
    """Commands by their names in capitals."""

    def __init__(self) -> None:
        self.commands: dict[bytes, Command] = {}

    def read(
        self, name: str, arity: int, verdict: str = SAME, *, keys: tuple[int, int, int] = (1, 1, 1)
    ) -> Callable[[Member], Member]:
        """Add a command that reads records: `handler(records, arguments)`."""
        return self._add(name, arity, Kind.READ, verdict, Role.READ, keys=keys)

    def write(
        self, name: str, arity: int, verdict: str = SAME, *, keys: tuple[int, int, int] = (1, 1, 1)
    ) -> Callable[[Member], Member]:
        """Add a command that writes records: `handler(records, arguments)`, inside the commit."""
        return self._add(name, arity, Kind.WRITE, verdict, Role.WRITE, keys=keys)

    def session(
        self, name: str, arity: int, verdict: str = SAME, **options: Any
    ) -> Callable[[Member], Member]:
        """Add a command of a session: `handler(session, arguments)`, on the event loop."""
        return self._add(name, arity, Kind.SESSION, verdict, options.pop("role", None), **options)

    def slow(self, name: str, arity: int, verdict: str = SAME, **options: Any) -> Callable[[Member], Member]:
        """Add a command that may wait: `handler(session, arguments)`, in a worker thread."""
        return self._add(name, arity, Kind.SLOW, verdict, options.pop("role", Role.READ), **options)

    def call(self, name: str, arity: int, verdict: str) -> Callable[[Member], Member]:
        """Add the command of Floodmark's own clients; connections run its calls without the handler."""
        return self._add(name, arity, Kind.CALL, verdict, None)

    def refuse(self, names: Iterable[str], why: str) -> None:
        """Add commands that are refused."""
        for name in names:

            def refuse(*_: object, name: str = name) -> None:
                raise CommandError(f"ERR {name} is refused: {why}")

            self._add(name, -1, Kind.SESSION, f"refused: {why}", None)(refuse)

    def _add(
        self, name: str, arity: int, kind: Kind, verdict: str, role: Role | None, **options: Any
    ) -> Callable[[Member], Member]:
        def add(handler: Member) -> Member:
            command = Command(
                name=name, arity=arity, kind=kind, verdict=verdict, handler=handler, role=role, **options
            )
            # Most clients write names in capitals, and many in small letters.
            self.commands[name.encode()] = self.commands[name.lower().encode()] = command
            return handler

        return add

    def find(self, name: bytes) -> Command | None:
        """The command with a name, in any case; None if there is none."""
        return self.commands.get(name) or self.commands.get(name.upper())

    def __iter__(self) -> Iterator[Command]:
        return iter({command.name: command for command in self.commands.values()}.values())


TABLE: Final = CommandTable()


def unknown_command(arguments: Arguments) -> ErrorReply:
    """The error for a command that is not in the table, as Redis words it: an argument ends at a NUL."""
    shown = b""
    for argument in arguments[1:]:
        if len(shown) >= SHOWN_BYTES_MAX:
            break
        shown += b"'%b' " % argument.partition(b"\0")[0][: SHOWN_BYTES_MAX - len(shown)]
    name = arguments[0].partition(b"\0")[0][:SHOWN_BYTES_MAX].decode(errors="replace")
    return ErrorReply(
        f"ERR unknown command '{name}', with args beginning with: {shown.decode(errors='replace')}"
    )


def wrong_arity(command: Command) -> ErrorReply:
    """The error for too many or too few arguments, as Redis words it."""
    return ErrorReply(f"ERR wrong number of arguments for '{command.name.lower()}' command")


def integer(argument: bytes, error: str = NOT_AN_INTEGER) -> int:
    """An argument as a signed number of 64 bits; CommandError unless it is written as Redis requires."""
    try:
        number = int(argument)
    except ValueError:
        raise CommandError(error) from None
    if not -(1 << 63) <= number < 1 << 63 or argument != b"%d" % number:
        raise CommandError(error)
    return number


def read_options(
    arguments: Arguments, values: Collection[bytes], flags: Collection[bytes] = ()
) -> dict[bytes, bytes]:
    """Options by their names in capitals: those in `values` are followed by a value, `flags` are not.

    >>> read_options([b"count", b"7", b"JUSTID"], [b"COUNT"], [b"JUSTID"])
    {b'COUNT': b'7', b'JUSTID': b''}
    """
    found: dict[bytes, bytes] = {}
    rest = iter(arguments)
    for argument in rest:
        name = word(argument)
        value = b"" if name in flags else next(rest, None) if name in values else None
        if value is None:
            raise CommandError(SYNTAX)
        found[name] = value
    return found


def word(argument: bytes) -> bytes:
    """An option's name in capitals."""
    return argument.upper()


def text(argument: bytes, what: str) -> str:
    """An argument as text; CommandError if it is not UTF-8."""
    try:
        return argument.decode()
    except UnicodeDecodeError:
        raise CommandError(f"ERR {what} must be UTF-8 text") from None
