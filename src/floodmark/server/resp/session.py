"""The state of one client: its caller, the namespace that it has selected, and its transaction."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple, Protocol

from floodmark.model.access import Role
from floodmark.model.errors import NamespaceNotFound, NotAuthenticated
from floodmark.model.stream import OnGeneration
from floodmark.model.version import Version
from floodmark.server.access import Access, Caller
from floodmark.server.counters import ServerMetrics
from floodmark.server.logs import RefusedCallers
from floodmark.server.resp.records import CommandRecords, Space, Spaces, Watched
from floodmark.server.resp.table import Arguments, Command, describe
from floodmark.wire.resp import RESP2


class QueuedCommands(NamedTuple):
    """The commands of a transaction, as one write: its qualified keys, and those of them that are watched."""

    on: Sequence[bytes]
    queued: Sequence[tuple[Command, Arguments]]
    watched: Mapping[bytes, Watched]
    session: object

    def run(self, records: CommandRecords) -> object:
        """Run inside the round; returns the replies, or None if a watched key has changed."""
        if any(records.is_changed(key, watched) for key, watched in self.watched.items()):
            return None
        return [_run_one(self.session, records, command, request) for command, request in self.queued]


def _run_one(session: object, records: CommandRecords, command: Command, request: Arguments) -> object:
    subject = session if command.is_queued else records
    try:
        return records.attempt(lambda: command.handler(subject, request))
    except Exception as error:
        return describe(error)


class Later(NamedTuple):
    """A reply to wait for: `read` polls it, until `until_ms` or, if that is None, for ever."""

    read: Callable[[], object]
    until_ms: int | None


class UseGroup(Protocol):
    """The consumer groups of the server."""

    def use(self, space: Space, name: str, act: Callable[[Any], Any], chosen: OnGeneration | None) -> Any:
        """Act on a group of a namespace."""


class DoorParts(Protocol):
    """The server, as far as commands of sessions need it."""

    spaces: Spaces
    groups: UseGroup
    access: Access
    metrics: ServerMetrics
    refused: RefusedCallers
    port: int
    # The time that ages are measured by.
    now_ms: int

    def sessions(self) -> "Sequence[Session]":
        """The clients that are connected."""

    def end(self, session: "Session") -> None:
        """Cut a client off."""


class Session:
    """One client."""

    def __init__(self, number: int, address: str, certificate: str | None, door: DoorParts) -> None:
        self.id = number
        self.address = address
        self.name = b""
        self.library = [b"", b""]
        self.protocol = RESP2
        self.durable = True
        # How its streams go on where a data set was published; None if the client has not chosen.
        self.chosen: OnGeneration | None = None
        # The version of the last write.
        self.version: Version = 0
        self.door = door
        self.connected_at_ms = self.active_at_ms = door.now_ms
        self.last_command = "NULL"
        self.is_leaving = False
        # Commands of a transaction, None outside of one, and whether one of them was refused.
        self.queued: list[tuple[Command, Arguments]] | None = None
        self.is_spoiled = False
        self.watched: dict[bytes, Watched] = {}
        self._certificate = certificate
        self._token: str | None = None
        self._space: Space | None = None
        self.caller: Caller | None = None
        self.records: CommandRecords | None = None
        try:
            self.authenticate(None)
        except NotAuthenticated:
            return

    @property
    def qualify(self) -> Callable[[bytes], bytes] | None:
        """Qualifies the key of a GET that can run at once; None in a transaction or without a caller."""
        return None if self.queued is not None or self.records is None else self.records.qualify

    @property
    def on_generation(self) -> OnGeneration:
        """How its streams go on where a data set was published."""
        return self.chosen or OnGeneration.FAIL

    # The caller

    def authenticate(self, token: str | None) -> None:
        """Authenticate by a token, or without one by the certificate; raises NotAuthenticated."""
        self.caller = self.door.access.authenticate(token, self._certificate)
        self._token = token
        default = self.door.spaces.default
        if self._space is None and default is not None and self.caller.may(Role.READ, default):
            # It may not have been created yet, or was dropped.
            with suppress(NamespaceNotFound):
                self._space = self.door.spaces.find(default)
        self._begin()

    def revoke(self, caller: Caller | None) -> None:
        """Restore the caller that the client had before."""
        self.caller = caller
        self.records = None if caller is None else self.new_records()

    def renew(self) -> None:
        """Authenticate again, as the caller's rights may have ended."""
        if self.caller is not None:
            try:
                caller = self.door.access.authenticate(self._token, self._certificate)
            except NotAuthenticated as error:
                self.door.refused.note(self.address, "resp", error)
                self.caller = self.records = None
                return
            if caller is not self.caller:
                self.caller = caller
                self._begin()

    # The selected namespace

    @property
    def space(self) -> Space | None:
        """The selected namespace."""
        return self._space

    def select(self, name: str) -> None:
        """Select a namespace that the caller may read."""
        assert self.caller is not None
        # Checked before the look-up, so that a caller does not learn which namespaces exist.
        self.caller.require(Role.READ, self.door.spaces.default if name == "0" else name)
        self._space = self.door.spaces.select(name)
        self._begin()

    def _begin(self) -> None:
        self.records = self.new_records()

    def new_records(self) -> CommandRecords:
        """Records for the commands of one commit."""
        assert self.caller is not None
        return CommandRecords(self.door.spaces, self._space, self.caller)

    # Transactions

    def discard(self) -> None:
        """Forget the transaction and what it watches."""
        self.queued = None
        self.is_spoiled = False
        self.watched = {}

    def reset(self) -> None:
        """Return to the state of a new connection."""
        self.discard()
        self.name = b""
        self.protocol = RESP2
        self.durable = True
        self.chosen = None
        self.version = 0
        self._space = None
        self.caller = self.records = None
        try:
            self.authenticate(None)
        except NotAuthenticated:
            return

    def describe(self) -> str:
        """The session as CLIENT LIST shows it."""
        now_ms = self.door.now_ms
        fields = {
            "id": self.id,
            "addr": self.address,
            "name": self.name.decode(errors="replace"),
            "age": (now_ms - self.connected_at_ms) // 1000,
            "idle": (now_ms - self.active_at_ms) // 1000,
            "db": 0,
            "namespace": "" if self._space is None else self._space.name,
            "multi": -1 if self.queued is None else len(self.queued),
            "watch": len(self.watched),
            "cmd": self.last_command.lower(),
            "user": "" if self.caller is None else self.caller.name,
            "lib-name": self.library[0].decode(errors="replace"),
            "lib-ver": self.library[1].decode(errors="replace"),
            "resp": self.protocol,
        }
        return " ".join(f"{name}={value}" for name, value in fields.items())
