"""Group commit over connections: the writes that arrive while a round is committed become the next one.

The event loop gathers jobs, and one thread leads a round for all of them; meanwhile the loop answers reads
and gathers the next round.  A job is answered when its round is durable.

Puts that need no decision come first: those of a round in one partition are one commit, with one version and
one row of the change log; a second put of the same key begins another commit.  A connection never has such a
put after a job that is decided in its round, so its order is kept.

A job that meets the prepared write of a transaction, or a partition that has moved, is not run.  Nor are the
later jobs of its connection, so that a pipeline stays in order.  A worker thread waits until the prepared
write has ended, and runs them one by one.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from queue import Empty, SimpleQueue
from threading import Lock, Thread
from typing import Final, Protocol

from floodmark.clock import monotonic_seconds
from floodmark.engine import WriteRow
from floodmark.model.errors import FloodmarkError, OutcomeUnknown, PartitionMoved
from floodmark.partition.commit.commit import Commit, Mint
from floodmark.partition.committer import commit_together
from floodmark.partition.deciding import Decided
from floodmark.partition.node import Node
from floodmark.partition.partition import LocalPartition, plan_put
from floodmark.partition.prepared.settling import SETTLES_MAX
from floodmark.server.resp.session import QueuedCommands, Session
from floodmark.server.resp.table import Arguments, Handler, attempt, describe
from floodmark.wire.resp import ErrorReply

# The most jobs of one round, so that a flood of writes does not become one long wait.
ROUND_JOBS_MAX: Final = 4_096
# How long a round waits for the clients of the last one, as a multiple of that round's time; and how many
# rounds begin without a wait after one that timed out.
WAIT_FACTOR: Final = 1.5
HASTY_ROUNDS: Final = 16

_log = logging.getLogger("floodmark.server")


class WritingConnection(Protocol):
    """A connection with jobs on their way.  While it is halted, a worker runs those that are `blocked`."""

    session: Session
    is_halted: bool
    is_settling: bool
    blocked: "deque[WriteJob]"

    def finish(self, job: "WriteJob", now: float) -> None:
        """Answer a job.  Called on the event loop."""

    def run(self) -> None:
        """Run the next requests."""


class WriteJob:
    """A write on its way: the command that runs inside a round, and its reply.

    With a `value` it is a put to its only `key`, which needs no decision.
    """

    __slots__ = (
        "commit", "connection", "handler", "key", "name", "on", "reply", "request", "started", "value",
    )  # fmt: skip

    on: Sequence[bytes]

    def __init__(
        self,
        connection: WritingConnection,
        name: str,
        handler: Handler,
        request: Arguments | QueuedCommands,
        started: float,
    ) -> None:
        self.connection = connection
        self.name = name
        self.handler = handler
        self.request = request
        self.started = started
        self.key = b""
        self.value: bytes | None = None
        self.commit: Commit | None = None
        self.reply: object = None

    def decide_on(self, node: Node, on: Sequence[bytes], *, is_alone: bool = False) -> "Step":
        """Decide inside the next round; `is_alone` if no job of the connection is before it."""
        self.on = on
        self.commit = step = Step(node, self, is_alone=is_alone)
        return step

    def decide(self) -> Mapping[bytes, bytes]:
        """Run the command over the present records, and set the reply; returns the rows to write."""
        records = self.connection.session.new_records()
        self.reply = attempt(self.name, lambda: self.handler(records, self.request))
        return {} if isinstance(self.reply, ErrorReply) else records.rows

    def plan(self) -> Commit | None:
        """The job's own commit, for the round that begins; None if it has none or shares one."""
        return self.commit if isinstance(self.commit, Step) else None

    @property
    def durable(self) -> bool:
        """Whether it is answered only when it is on disk."""
        return self.connection.session.durable

    def outcome(self) -> object:
        """The reply, when the round has ended."""
        commit = self.commit
        return self.reply if commit is None or commit.error is None else describe(commit.error)

    def refuse(self, error: FloodmarkError) -> None:
        """End before the round, with an error."""
        self.reply = describe(error)

    @property
    def is_blocked(self) -> bool:
        """Whether the job was not run in its round, and has to run again."""
        commit = self.commit
        if commit is None:
            return False
        if commit.error is not None:
            return isinstance(commit.error, PartitionMoved)
        return isinstance(commit, Step) and commit.is_blocked


class Step(Decided):
    """The commit of a job that is decided inside its round."""

    def __init__(self, node: Node, job: WriteJob, *, is_alone: bool) -> None:
        super().__init__(node.committer, lambda: node.map, job.on, job.decide, durable=job.durable)
        self._connection = job.connection
        self._is_alone = is_alone
        self.is_blocked = False

    def take(self, mint: Mint) -> Sequence[WriteRow]:
        if self._connection.is_halted and not self._is_alone:
            self.is_blocked = True
            return ()
        rows = super().take(mint)
        if self.blocking:
            self.is_blocked = self._connection.is_halted = True
        return rows


class RoundLeader:
    """The thread that leads the rounds for all connections."""

    def __init__(
        self, find_node: Callable[[], Node], loop: asyncio.AbstractEventLoop, work: Callable[..., object]
    ) -> None:
        self._find_node = find_node
        # Runs a job at another node if that owns its keys.
        self.forward: Callable[[WriteJob, Sequence[bytes]], bool] = lambda *_: False
        self._loop = loop
        self._work = work
        # Jobs for the next round, and whether the thread will take them without a message in its inbox.
        self._gathered: list[WriteJob] = []
        self._is_busy = False
        # The number of jobs that the thread waits for (0 if it does not wait), and how many of the next
        # rounds begin without such a wait.
        self._wanted = 0
        self._hasty = 0
        self._lock = Lock()
        self._inbox: SimpleQueue[bool] = SimpleQueue()
        self._thread = Thread(target=self._run, name="floodmark-resp-commit", daemon=True)
        self._thread.start()

    @property
    def node(self) -> Node:
        """The node that commits; a fenced node is replaced by another."""
        return self._find_node()

    def queued(self) -> int:
        """How many jobs wait for the next round."""
        return len(self._gathered)

    def submit(self, job: WriteJob) -> None:
        """Add a job to the next round.  Called on the event loop."""
        with self._lock:
            self._gathered.append(job)
            if self._is_busy:
                if len(self._gathered) == self._wanted:
                    self._inbox.put(True)
                return
            self._is_busy = True
        # After all connections with requests in this turn of the event loop have been read.
        self._loop.call_soon(self._inbox.put, True)

    def close(self) -> None:
        """End the thread when its round has ended; the event loop must still run."""
        self._inbox.put(False)
        self._thread.join()

    def _run(self) -> None:
        while self._inbox.get():
            while jobs := self._take():
                started = monotonic_seconds()
                self._commit(jobs)
                self._loop.call_soon_threadsafe(self._answer, jobs)
                if self._hasty:
                    self._hasty -= 1
                else:
                    self._wait_for(len(jobs), (monotonic_seconds() - started) * WAIT_FACTOR)

    def _wait_for(self, number: int, seconds: float) -> None:
        """Wait for more jobs from the clients that are answered now.

        If they come in time, one round serves all clients.  Without the wait, clients would fall into two
        halves, each of which waits for the sync of the other half, and more rounds would compete with the
        event loop for the interpreter.
        """
        with self._lock:
            self._wanted = len(self._gathered) + number
        try:
            if not self._inbox.get(timeout=seconds):
                self._inbox.put(False)
        except Empty:
            self._hasty = HASTY_ROUNDS
        self._wanted = 0

    def _take(self) -> list[WriteJob]:
        """The jobs of the next round, which came while the last one was committed."""
        with self._lock:
            jobs, self._gathered = self._gathered[:ROUND_JOBS_MAX], self._gathered[ROUND_JOBS_MAX:]
            self._is_busy = bool(jobs)
            return jobs

    def _commit(self, jobs: Sequence[WriteJob]) -> None:
        try:
            node = self.node
            commits = plan_puts(node, jobs)
            commits += [commit for job in jobs if (commit := job.plan()) is not None]
            if commits:
                node.require_open()
                commit_together(node.committer, commits)
        except FloodmarkError as error:
            _fail(jobs, error)
        except BaseException:
            _log.exception("a round of group commit failed unexpectedly")
            _fail(
                jobs,
                OutcomeUnknown(
                    "the server failed unexpectedly, and whether the write happened is not known; read "
                    "before you repeat it"
                ),
            )
        # At once: the next round may hold later writes of the same connections.
        for job in jobs:
            if job.is_blocked:
                job.connection.is_halted = True

    def _answer(self, jobs: Sequence[WriteJob]) -> None:
        now = monotonic_seconds()
        halted: set[WritingConnection] = set()
        for job in jobs:
            connection = job.connection
            if connection.blocked or job.is_blocked:
                connection.blocked.append(job)
                halted.add(connection)
            else:
                connection.finish(job, now)
        for connection in halted:
            self._look_after(connection)

    def _look_after(self, connection: WritingConnection) -> None:
        """Start a worker that runs the connection's blocked jobs, unless one is running."""
        if not connection.is_settling:
            connection.is_settling = True
            self._work(self._settle, connection, [*connection.blocked])

    def _settle(self, connection: WritingConnection, jobs: Sequence[WriteJob]) -> None:
        """Run jobs one by one, each after the transaction that blocks it.  Runs in a worker thread."""
        for job in jobs:
            if job.is_blocked:
                self._settle_one(job)
        self._loop.call_soon_threadsafe(self._settled, connection, jobs)

    def _settle_one(self, job: WriteJob) -> None:
        on = (job.key,) if job.value is not None else job.on
        job.value = None
        for _ in range(SETTLES_MAX):
            if self.forward(job, on):
                return
            step = job.decide_on(self.node, on, is_alone=True)
            self._commit([job])
            if not job.is_blocked:
                return
            try:
                step.settle()
                self.node.refresh()
            except FloodmarkError as error:
                step.error, step.is_blocked = error, False
                return

    def _settled(self, connection: WritingConnection, jobs: Sequence[WriteJob]) -> None:
        for _ in jobs:
            connection.blocked.popleft()
        connection.is_settling = False
        connection.is_halted = bool(connection.blocked)
        now = monotonic_seconds()
        for job in jobs:
            connection.finish(job, now)
        if connection.is_halted:
            self._look_after(connection)
        else:
            connection.run()


def _fail(jobs: Sequence[WriteJob], error: FloodmarkError) -> None:
    """End the jobs of a round that failed as a whole, also those for which no commit was planned."""
    for job in jobs:
        if job.commit is not None:
            job.commit.error = job.commit.error or error
        elif job.value is not None:
            job.refuse(error)


def plan_puts(node: Node, jobs: Sequence[WriteJob]) -> list[Commit]:
    """The commits of jobs that need no decision.  A put that is refused has its reply afterwards."""
    groups: list[tuple[LocalPartition, dict[bytes, WriteJob]]] = []
    latest: dict[tuple[LocalPartition, bool], dict[bytes, WriteJob]] = {}
    route = node.map.route
    for job in jobs:
        if job.value is None:
            continue
        key = job.key
        if job.connection.is_halted:
            # An earlier job of its connection has to run again, and this one after it.
            job.value = None
            job.decide_on(node, (key,))
            continue
        place = route(key), job.durable
        group = latest.get(place)
        if group is None or key in group:
            group = latest[place] = {}
            groups.append((place[0], group))
        group[key] = job
    return [commit for partition, group in groups for commit in _plan_group(partition, group)]


def _plan_group(partition: LocalPartition, group: Mapping[bytes, WriteJob]) -> list[Commit]:
    jobs = [*group.values()]
    values = [job.value for job in jobs if job.value is not None]
    try:
        commit = plan_put(partition, [*group], values, durable=jobs[0].durable)
    except FloodmarkError as error:
        if len(jobs) == 1:
            jobs[0].refuse(error)
            return []
        # One of them is refused, or together they are too large: plan each alone.
        return [commit for key, job in group.items() for commit in _plan_group(partition, {key: job})]
    for job in jobs:
        job.commit = commit
    return [commit]
