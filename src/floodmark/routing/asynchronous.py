"""The calls of a router for asyncio: over a line if all keys are in one partition of a server with RESP.

The router itself makes all other calls, in a worker thread: keys of several partitions, partitions that move,
nodes that do not answer, and servers without RESP.
"""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import Any, Protocol, TypeVar

from floodmark.model.record import Versioned
from floodmark.model.version import Version
from floodmark.routing.router import Router
from floodmark.wire.async_lines import AsyncLines, NothingDone
from floodmark.wire.connection import Connection
from floodmark.wire.messages import COMPARE_AND_SET, FIND, GET, GET_MANY, MERGE, PUT, Method
from floodmark.wire.partition import RemotePartition, RemotePartitionMaps

KEYS_MAX = 256

Result = TypeVar("Result")
Rows = Mapping[bytes, bytes]


class InThread(Protocol):
    """Runs a function in a worker thread."""

    def __call__(self, function: Callable[[], Result]) -> Awaitable[Result]: ...


class AsyncRouter:
    """A router whose calls return awaitables."""

    def __init__(self, router: Router, in_thread: InThread) -> None:
        assert isinstance(router.maps, RemotePartitionMaps)
        self._router = router
        self._maps = router.maps
        self._in_thread = in_thread
        self._lines: dict[Connection, AsyncLines] = {}

    async def get(self, key: bytes, at: Version | None) -> bytes | None:
        return await self._call(GET, (key,), (key, at), partial(self._router.get, key, at))

    async def find(self, key: bytes, at: Version | None) -> Versioned | None:
        return await self._call(FIND, (key,), (key, at), partial(self._router.find, key, at))

    async def get_many(self, keys: Sequence[bytes], at: Version | None) -> list[bytes | None]:
        blocking = partial(self._router.get_many, keys, at)
        found = await self._call(GET_MANY, keys, (list(keys), at), blocking)
        # An answer may have fewer values than keys, if they are large.
        return found if len(found) == len(keys) else await self._in_thread(blocking)

    async def put_one(self, key: bytes, stored: bytes, *, durable: bool) -> Version:
        return await self.put({key: stored}, durable=durable)

    async def merge_one(self, key: bytes, state: bytes, *, durable: bool) -> Version:
        return await self.merge({key: state}, durable=durable)

    async def put(self, rows: Rows, *, durable: bool) -> Version:
        return await self._write(PUT, self._router.put, rows, durable=durable)

    async def merge(self, rows: Rows, *, durable: bool) -> Version:
        return await self._write(MERGE, self._router.merge, rows, durable=durable)

    async def compare_and_set(
        self, key: bytes, expected: bytes | None, stored: bytes, *, durable: bool
    ) -> bool:
        blocking = partial(self._router.compare_and_set, key, expected, stored, durable=durable)
        return bool(await self._call(COMPARE_AND_SET, (key,), (key, expected, stored, durable), blocking))

    def close(self) -> None:
        """Close all lines."""
        for lines in self._lines.values():
            lines.close()

    async def _write(
        self, method: Method[Version], write: Callable[..., Version], rows: Rows, *, durable: bool
    ) -> Version:
        blocking = partial(write, rows, durable=durable)
        return await self._call(method, [*rows], ([*rows], [*rows.values()], durable), blocking)

    async def _call(
        self,
        method: Method[Any],
        keys: Sequence[bytes],
        arguments: tuple[object, ...],
        blocking: Callable[[], Result],
    ) -> Result:
        """Call the partition of all keys, or leave it to the router."""
        partition = self._find_partition(keys)
        if partition is not None:
            lines = self._lines.get(partition.connection)
            if lines is None:
                lines = self._lines[partition.connection] = AsyncLines(partition.connection)
            try:
                return await lines.call(method, partition.id, *arguments)
            except NothingDone:
                pass
        return await self._in_thread(blocking)

    def _find_partition(self, keys: Sequence[bytes]) -> RemotePartition | None:
        """The partition of all keys; None if they are in several, or the router has to find it."""
        known = self._maps.known
        if known is None or not 0 < len(keys) <= KEYS_MAX or len(set(keys)) < len(keys):
            return None
        partition = known.route(min(keys))
        is_one = len(keys) == 1 or partition.range.contains(max(keys))
        return partition if is_one and isinstance(partition, RemotePartition) else None
