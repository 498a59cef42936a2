"""Rounds of writes over RESP: what one round could not write comes before what the next one holds."""

from collections import deque
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from tests.server.support import open_memory
from tests.waiting import wait_until

from floodmark.host.embedded import EmbeddedHost
from floodmark.model.access import Role
from floodmark.partition.node import Node
from floodmark.server.access import Caller
from floodmark.server.resp.commands import SET
from floodmark.server.resp.committing import RoundLeader, WriteJob
from floodmark.server.resp.records import CommandRecords, Spaces
from floodmark.wire.resp import OK


class Loop:
    """An event loop that runs what other threads ask for only when the test does."""

    def __init__(self) -> None:
        self.asked: deque[tuple[Callable[..., object], tuple[object, ...]]] = deque()

    def call_soon(self, function: Callable[..., object], *arguments: object) -> None:
        function(*arguments)

    def call_soon_threadsafe(self, function: Callable[..., object], *arguments: object) -> None:
        self.asked.append((function, arguments))

    def wait_asked(self, number: int) -> None:
        wait_until(lambda: len(self.asked) >= number or None, f"{number} rounds to end")

    def run_next(self) -> None:
        self.wait_asked(1)
        function, arguments = self.asked.popleft()
        function(*arguments)


class Connection:
    """A connection that keeps the replies of its jobs."""

    def __init__(self, records: Callable[[], CommandRecords]) -> None:
        self.session: Any = SimpleNamespace(durable=True, new_records=records)
        self.is_halted = self.is_settling = False
        self.blocked: deque[WriteJob] = deque()
        self.replies: list[object] = []

    def finish(self, job: WriteJob, now: float) -> None:
        self.replies.append(job.outcome())

    def run(self) -> None:
        """Nothing more has arrived."""


class StaleNode:
    """A node that shows an old map once, as to a round that was planned while a partition was split."""

    def __init__(self, node: Node) -> None:
        self._node = node
        self._maps = [node.map]

    def __getattr__(self, name: str) -> Any:
        return self._maps.pop() if name == "map" and self._maps else getattr(self._node, name)


def test_write_behind_one_whose_partition_has_moved_stays_behind_it() -> None:
    with open_memory() as site:
        users = site.create_namespace("users")
        assert isinstance(site.host, EmbeddedHost)
        spaces = Spaces(site, default="users", by_prefix=False)
        node: Any = StaleNode(site.host.node)
        site.split("users", b"m")
        loop: Any = Loop()
        caller = Caller("anonymous", Role.ADMIN)
        connection = Connection(lambda: CommandRecords(spaces, spaces.find("users"), caller))
        committing = RoundLeader(lambda: node, loop, lambda function, *arguments: function(*arguments))
        try:
            for number, value in enumerate((b"1", b"2"), 1):
                job = WriteJob(connection, "SET", SET.handler, [b"SET", b"ada", value], 0.0)
                row = connection.session.new_records().encode_put(b"ada", value)
                assert row is not None
                job.key, job.value = row
                job.reply = OK
                committing.submit(job)
                # Its round has ended, and the loop has answered none.
                loop.wait_asked(number)
            assert users.get(b"ada") is None
            while connection.replies != [OK, OK]:
                loop.run_next()
        finally:
            committing.close()
        assert users.get(b"ada") == b"2"
        assert [change.value for change in site.changes("users")] == [b"1", b"2"]
