"""Writes to keys of another node: the command runs at the node that owns them, inside a round there.

The node of the client sends the command with the rights of its caller, and passes the reply on.  What runs in
one round runs at one node: a command or a transaction whose keys belong to several nodes is refused.  Only
MSET, which depends on no key, is then an atomic batch.
"""

from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Final

from floodmark.host.nodes import NodeHost
from floodmark.host.ports import PeerCommands, PeerReply
from floodmark.model.errors import PartitionMoved
from floodmark.partition.commit.entering import namespaces_of
from floodmark.partition.committer import commit_together
from floodmark.partition.deciding import Decided
from floodmark.partition.prepared.settling import SETTLES_MAX
from floodmark.server.access import Caller
from floodmark.server.resp.commands import COMMANDS
from floodmark.server.resp.committing import WriteJob
from floodmark.server.resp.records import CommandRecords, Spaces, Watched
from floodmark.server.resp.session import QueuedCommands, Session
from floodmark.server.resp.table import CommandError, attempt
from floodmark.site.site import Site
from floodmark.wire.resp import Encoded, ErrorReply, encode_reply

CROSSING: Final = (
    "CROSSSLOT the keys belong to several nodes of the site, and one command or transaction writes at one; "
    "write each on its own"
)


class Forwarding:
    """Runs commands at the nodes that own their keys: for clients of this one and of others."""

    def __init__(self, site: Site) -> None:
        assert isinstance(site.host, NodeHost)
        self._site = site
        self._host = site.host
        site.host.serve_commands(self.run)

    def forward(self, job: WriteJob, on: Sequence[bytes]) -> bool:
        """Run a job at the node that owns its keys and set its reply, unless this node owns them all."""
        if not on or self._owners(on) == {self._host.shared.number}:
            return False
        job.commit = None
        job.reply = attempt(job.name, lambda: self._ask(job, on))
        return True

    def _ask(self, job: WriteJob, on: Sequence[bytes]) -> object:
        """The reply of the node that owns the keys."""
        commands = _pack(job, on)
        answer = self._host.router.call(on[0], lambda _: self._send(commands))
        if answer.version:
            job.connection.session.version = answer.version
        reply = answer.reply
        return ErrorReply(reply[1:-2].decode(errors="replace")) if reply[:1] == b"-" else Encoded(reply)

    def _owners(self, keys: Sequence[bytes]) -> set[int]:
        """The numbers of the nodes that own keys."""
        node = self._host.shared.node
        owners = {row.id: row.node for row in node.rows}
        return {owners.get(node.map.route(key).id, 0) for key in keys}

    def _send(self, commands: PeerCommands) -> PeerReply:
        """Run commands at the node that owns all their keys; over several nodes, only as an atomic batch."""
        owners = self._owners(commands.on)
        if len(owners) > 1:
            return self._write_batch(commands)
        return self._host.peer(owners.pop()).run_commands(commands)

    def _write_batch(self, commands: PeerCommands) -> PeerReply:
        """Run a command that depends on no key over several nodes: its writes are an atomic batch."""
        if commands.watched is not None or commands.requests[0][0].upper() != b"MSET":
            raise CommandError(CROSSING)
        visit = _Visit(self._site, commands)
        rows = visit.decide()
        version = self._host.router.write_batch(rows, durable=commands.durable) if rows else 0
        return PeerReply(reply=encode_reply(visit.reply, commands.protocol), version=version)

    def run(self, commands: PeerCommands) -> PeerReply:
        """Run commands here; PartitionMoved if this node does not own all of their keys."""
        node = self._host.current.node
        # Before the round, which must not wait for the catalog.
        node.storage.entrance.meet(namespaces_of(commands.on))
        visit = _Visit(self._site, commands)
        for _ in range(SETTLES_MAX):
            step = Decided(
                node.committer, lambda: node.map, commands.on, visit.decide, durable=commands.durable
            )
            commit_together(node.committer, [step])
            if step.error is not None:
                raise step.error
            if not step.blocking:
                return PeerReply(reply=encode_reply(visit.reply, commands.protocol), version=step.version)
            step.settle()
        raise PartitionMoved("the keys are written by transactions again and again; nothing was done")


class _Visit:
    """Commands of another node's client in a round."""

    def __init__(self, site: Site, commands: PeerCommands) -> None:
        namespaces = commands.namespaces
        self._caller = Caller(
            commands.caller, commands.role, None if namespaces is None else frozenset(namespaces)
        )
        self._spaces = Spaces(site, default=None, by_prefix=commands.by_prefix)
        self._space = None if commands.space is None else self._spaces.find(commands.space)
        # Look up all namespaces now: inside the round, a look-up would wait for the turn that the round has.
        for namespace in namespaces_of(commands.on):
            name = self._spaces.host.catalog.name_of(int.from_bytes(namespace, "big"))
            if name is not None:
                self._spaces.find(name)
        self._commands = commands
        self.reply: object = None

    def decide(self) -> Mapping[bytes, bytes]:
        records = CommandRecords(self._spaces, self._space, self._caller)
        self.reply = attempt("EXEC", lambda: self._run(records))
        return {} if isinstance(self.reply, ErrorReply) else records.rows

    def _run(self, records: CommandRecords) -> object:
        commands = self._commands
        found = [(COMMANDS.commands[request[0].upper()], request) for request in commands.requests]
        if commands.watched is None:
            [(command, request)] = found
            return command.handler(records, request)
        now_ms = records.now_ms()
        watched = {
            key: Watched(version, commands.watched_ms.get(key, now_ms))
            for key, version in commands.watched.items()
        }
        return QueuedCommands(commands.on, found, watched, SimpleNamespace()).run(records)


def _pack(job: WriteJob, on: Sequence[bytes]) -> PeerCommands:
    session: Session = job.connection.session
    caller, request = session.caller, job.request
    if caller is None:
        raise CommandError("NOAUTH Authentication required.")
    batch = request if isinstance(request, QueuedCommands) else None
    requests = [job.request] if batch is None else [each for _, each in batch.queued]
    return PeerCommands(
        requests=[[*request] for request in requests],
        watched=None if batch is None else {key: each.version for key, each in batch.watched.items()},
        watched_ms={} if batch is None else {key: each.at_ms for key, each in batch.watched.items()},
        on=[*on],
        space=None if session.space is None else session.space.name,
        by_prefix=session.door.spaces.by_prefix,
        caller=caller.name,
        role=caller.role,
        namespaces=None if caller.namespaces is None else sorted(caller.namespaces),
        durable=session.durable,
        protocol=session.protocol,
    )
