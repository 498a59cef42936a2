"""Sites for asyncio: the methods of `Site` and `Namespace` as coroutines.

Calls for single keys are sent by the event loop (`wire/async_lines.py`).  Each scan and each stream of
changes has a thread that reads ahead of the task by a limited number of rows.
"""

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Coroutine, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, closing
from copy import copy
from datetime import timedelta
from functools import partial, wraps
from inspect import signature
from threading import Semaphore, Thread
from types import TracebackType
from typing import (
    Any,
    BinaryIO,
    Concatenate,
    Generic,
    Literal,
    ParamSpec,
    Self,
    TypeAlias,
    TypeVar,
    cast,
    overload,
)

from floodmark.feed import Item
from floodmark.host.ports import Host
from floodmark.layers import LargeValues
from floodmark.layers.large_values import CHUNK_BYTES
from floodmark.model.change import Change, Resolved
from floodmark.model.limits import ASYNC_THREADS_MAX, PAGE_ROWS_MAX
from floodmark.model.version import Version
from floodmark.routing.asynchronous import AsyncRouter
from floodmark.site.arguments import At, Durability
from floodmark.site.batch import Batch
from floodmark.site.connecting import connect
from floodmark.site.namespace import CounterNamespace, Held, Namespace, to_number
from floodmark.site.site import Site
from floodmark.site.writer import Encoding

Row = TypeVar("Row")
Result = TypeVar("Result")
Parameters = ParamSpec("Parameters")


async def connect_async(url: str, **options: Any) -> "AsyncSite":
    """Connect to a site from asyncio.  Takes the options of `connect`."""
    return AsyncSite(await asyncio.to_thread(partial(connect, url, **options)))


class AsyncSite:
    """A connection to a site's server for the tasks of one event loop.  Close it, or use `async with`."""

    def __init__(self, site: Site) -> None:
        self._site = site
        self._threads = ThreadPoolExecutor(ASYNC_THREADS_MAX, thread_name_prefix="floodmark-async")
        self._router = AsyncRouter(site.host.router, self._run)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    def __repr__(self) -> str:
        return f"AsyncSite({self.name!r})"

    @property
    def name(self) -> str:
        """The site's name."""
        return self._site.name

    async def close(self) -> None:
        """End all streams and close the connections.  Closing twice is harmless."""
        self._router.close()
        await asyncio.to_thread(self._site.close)
        self._threads.shutdown(wait=False)

    @overload
    async def namespace(self, name: str) -> "AsyncNamespace[Any]": ...

    @overload
    async def namespace(self, name: str, *, large_values: Literal[True]) -> "AsyncLargeValues": ...

    async def namespace(
        self, name: str, *, large_values: bool = False
    ) -> "AsyncNamespace[Any] | AsyncLargeValues":
        """A handle to an existing namespace.  Raises NamespaceNotFound."""
        if large_values:
            found = await self._run(lambda: self._site.namespace(name, large_values=True))
            return AsyncLargeValues(found, self._run)
        return self._wrap(await self._run(partial(self._site.namespace, name)))

    @overload
    async def create_namespace(
        self, name: str, *, large_values: Literal[True], **settings: Any
    ) -> "AsyncLargeValues": ...

    @overload
    async def create_namespace(self, name: str, **settings: Any) -> "AsyncNamespace[Any]": ...

    async def create_namespace(self, name: str, **settings: Any) -> "AsyncNamespace[Any] | AsyncLargeValues":
        """Create a namespace.  Takes the settings of `Site.create_namespace`."""
        make: Callable[..., Any] = self._site.create_namespace
        found = await self._run(partial(make, name, **settings))
        return AsyncLargeValues(found, self._run) if isinstance(found, LargeValues) else self._wrap(found)

    @overload
    def changes(
        self, namespace: str | None = None, *, resolved_markers: Literal[False] = False, **options: Any
    ) -> AsyncIterator[Change]: ...

    @overload
    def changes(
        self, namespace: str | None = None, *, resolved_markers: bool, **options: Any
    ) -> AsyncIterator[Item]: ...

    def changes(
        self, namespace: str | None = None, *, resolved_markers: bool = False, **options: Any
    ) -> AsyncIterator[Any]:
        """The changes of one namespace, or of all.  Takes the options of `Site.changes`."""

        def read() -> Iterator[Item]:
            # Markers arrive on an idle site, too, so the thread notices that its reader has stopped.
            return self._site.changes(namespace, resolved_markers=True, **options)

        return AsyncRows(read, lambda item: resolved_markers or not isinstance(item, Resolved))

    @asynccontextmanager
    async def atomic(self, *, durability: Durability | None = None) -> AsyncGenerator[Batch]:
        """See `Site.atomic`.  Use `async with site.atomic() as batch`; do not await the batch's methods."""
        # Fetch the site's time here, so that writes with a time to live need no call inside the block.
        await self._run(self._site.host.physical_ms)
        batch = self._site.atomic(durability=durability)
        yield batch
        await self._run(partial(batch.__exit__, None, None, None))

    async def read_atomic(self, pairs: "Iterable[AsyncPair]") -> list[Any]:
        """See `Site.read_atomic`."""
        known = [(namespace._namespace, key) for namespace, key in pairs]
        return await self._run(partial(self._site.read_atomic, known))

    async def read_atomic_many(self, pairs: "Iterable[AsyncPair]") -> "dict[AsyncPair, Any]":
        """See `Site.read_atomic_many`."""
        listed = list(pairs)
        return dict(zip(listed, await self.read_atomic(listed), strict=True))

    async def watch(self, namespace: "AsyncNamespace[Any]", key: bytes) -> "asyncio.Future[Version]":
        """See `Site.watch`.  The watch is in place when this returns; await the future for the change."""
        watched = await self._run(partial(self._site.watch, namespace._namespace, key))
        return asyncio.wrap_future(watched)

    def _wrap(self, namespace: Namespace[Any]) -> "AsyncNamespace[Any]":
        kind: type[AsyncNamespace[Any]]
        kind = AsyncCounterNamespace if isinstance(namespace, CounterNamespace) else AsyncNamespace
        return kind(namespace, self._router, self._run)

    def _run(self, function: Callable[[], Result]) -> Awaitable[Result]:
        return asyncio.get_running_loop().run_in_executor(self._threads, function)


def awaited(
    method: "Callable[Concatenate[Namespace[Any], Parameters], Result]",
) -> "Callable[Concatenate[AsyncNamespace[Any], Parameters], Coroutine[Any, Any, Result]]":
    """The coroutine method of `AsyncNamespace` for a method of `Namespace`."""
    name, takes_ttl = method.__name__, "ttl" in signature(method).parameters

    @wraps(method)
    async def call(own: Any, /, *args: Any, **options: Any) -> Any:
        if takes_ttl:
            await own._know_time(options.get("ttl"))
        found = getattr(own._calls, name)(*args, **options)
        # `compare_and_set` returns without a call if no stored value can equal the expected one.
        return found if isinstance(found, bool) else await found

    return call


class AsyncNamespace(Generic[Held]):
    """A namespace of an `AsyncSite`, with the arguments and results of `Namespace`.

    If a task is cancelled during a write, the write may or may not happen.
    """

    def __init__(
        self,
        namespace: Namespace[Any],
        router: AsyncRouter,
        run: Callable[[Callable[[], Any]], Awaitable[Any]],
    ) -> None:
        self._namespace = namespace
        # The same namespace over the asynchronous router, so that its calls return awaitables.
        self._calls: Any = copy(cast(Any, namespace.stored))
        self._calls._router = router
        self._run = run

    def __repr__(self) -> str:
        return f"AsyncNamespace({self.name!r})"

    @property
    def name(self) -> str:
        """The name of the namespace."""
        return self._namespace.name

    @property
    def id(self) -> int:
        """The id of the namespace, which is part of each stored key."""
        return self._namespace.id

    @property
    def host(self) -> Host:
        """The host of the namespace's site."""
        return self._namespace.host

    @property
    def encoding(self) -> Encoding:
        """The encoding of writes as rows, for batches, which gather rows before they send them."""
        return self._namespace.encoding

    get = awaited(Namespace[Held].get)
    get_many = awaited(Namespace[Held].get_many)
    record = awaited(Namespace[Held].record)
    put = awaited(Namespace[Held].put)
    put_many = awaited(Namespace[Held].put_many)
    delete = awaited(Namespace[Held].delete)
    compare_and_set = awaited(Namespace[Held].compare_and_set)
    update = awaited(Namespace[Held].update)
    delete_field = awaited(Namespace[Held].delete_field)
    add = awaited(Namespace[Held].add)

    def scan(
        self,
        start: bytes = b"",
        end: bytes | None = None,
        *,
        prefix: bytes | None = None,
        limit: int | None = None,
        reverse: bool = False,
        at: At | None = None,
    ) -> AsyncIterator[tuple[bytes, Held]]:
        """See `Namespace.scan`."""
        return AsyncRows(
            partial(self._namespace.scan, start, end, prefix=prefix, limit=limit, reverse=reverse, at=at)
        )

    async def _know_time(self, ttl: timedelta | float | None) -> None:
        """Fetch the site's time in a thread, as this may call the server, if the write has a time to live."""
        if ttl is not None or self._namespace.settings.ttl is not None:
            await self._run(self._namespace.host.physical_ms)


class AsyncCounterNamespace(AsyncNamespace[int]):
    """A namespace of counters.  Reads return int."""

    async def get(self, key: bytes, *, at: At | None = None) -> int | None:
        return to_number(await super().get(key, at=at))

    async def get_many(self, keys: Iterable[bytes], *, at: At | None = None) -> list[int | None]:
        return [to_number(value) for value in await super().get_many(keys, at=at)]


AsyncPair: TypeAlias = tuple[AsyncNamespace[Any], bytes]


class AsyncLargeValues:
    """`LargeValues` of an `AsyncSite`.  All calls and streams run in threads."""

    def __init__(self, values: LargeValues, run: Callable[[Callable[[], Any]], Awaitable[Any]]) -> None:
        self._values = values
        self._run = run

    def __repr__(self) -> str:
        return f"AsyncLargeValues({self.name!r})"

    @property
    def name(self) -> str:
        """The name of the namespace."""
        return self._values.name

    async def get(self, key: bytes, *, at: At | None = None) -> bytes | None:
        """The whole value of a key; None if the key is absent."""
        found: bytes | None = await self._run(partial(self._values.get, key, at=at))
        return found

    def chunks(self, key: bytes, *, at: At | None = None) -> AsyncIterator[bytes]:
        """The value of a key in pieces, at most two of them in memory.  Raises KeyNotFound."""

        def read() -> Iterator[bytes]:
            with self._values.open(key, at=at) as stream:
                while chunk := stream.read(CHUNK_BYTES):
                    yield chunk

        return AsyncRows(read, ahead=1)

    def sizes(
        self,
        start: bytes = b"",
        end: bytes | None = None,
        *,
        prefix: bytes | None = None,
        limit: int | None = None,
        reverse: bool = False,
        at: At | None = None,
    ) -> AsyncIterator[tuple[bytes, int]]:
        """See `LargeValues.sizes`."""
        return AsyncRows(
            partial(self._values.sizes, start, end, prefix=prefix, limit=limit, reverse=reverse, at=at)
        )

    async def put(self, key: bytes, value: bytes | bytearray | memoryview | BinaryIO) -> Version:
        """See `LargeValues.put`.  It runs in a thread, which finishes it even if the task is cancelled."""
        version: Version = await self._run(partial(self._values.put, key, value))
        return version

    async def delete(self, key: bytes) -> Version:
        """Delete a key, present or not, and return the version of the deletion."""
        version: Version = await self._run(partial(self._values.delete, key))
        return version

    async def sweep(self, **options: Any) -> int:
        """See `LargeValues.sweep`."""
        swept: int = await self._run(partial(self._values.sweep, **options))
        return swept


class AsyncRows(Generic[Row]):
    """An asynchronous iterator over a stream.  The first `__anext__` starts the thread that reads it."""

    def __init__(
        self,
        read: Callable[[], Iterator[Row]],
        keep: Callable[[Row], bool] = lambda _: True,
        ahead: int = PAGE_ROWS_MAX,
    ) -> None:
        self._read = partial(_ReadAhead, read, keep, ahead)
        self._ahead: _ReadAhead | None = None
        self._is_over = False

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Row:
        if self._is_over:
            raise StopAsyncIteration
        if self._ahead is None:
            self._ahead = self._read()
        row = await self._ahead.take()
        if isinstance(row, _End):
            self._is_over = True
            raise StopAsyncIteration if row.error is None else row.error
        return cast(Row, row)

    async def aclose(self) -> None:
        """Stop reading.  The thread ends at its next row, within a second or so."""
        self._stop()

    def _stop(self) -> None:
        self._is_over = True
        if self._ahead is not None:
            self._ahead.stop()

    __del__ = _stop


class _End:
    """Marks the end of a stream, with the error that ended it, if any."""

    def __init__(self, error: BaseException | None) -> None:
        self.error = error


class _ReadAhead:
    """A thread that reads a stream into a queue, at most `ahead` rows before the task takes them."""

    def __init__(self, read: Callable[[], Iterator[Any]], keep: Callable[[Any], bool], ahead: int) -> None:
        self._rows: deque[Any] = deque()
        self._room = Semaphore(ahead)
        self._arrived = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._is_stopped = False
        Thread(target=self._run, args=(read, keep), name="floodmark-async-rows", daemon=True).start()

    async def take(self) -> object:
        """Wait for the next row, or for the `_End`, and remove it from the queue."""
        while not self._rows:
            self._arrived.clear()
            if not self._rows:
                await self._arrived.wait()
        self._room.release()
        return self._rows.popleft()

    def stop(self) -> None:
        """Tell the thread to end at its next row."""
        self._is_stopped = True
        self._room.release()

    def _run(self, read: Callable[[], Iterator[Any]], keep: Callable[[Any], bool]) -> None:
        error: BaseException | None = None
        try:
            rows: Any = read()
            with closing(rows):
                for row in rows:
                    if keep(row):
                        self._room.acquire()
                        self._hand_over(row)
                    if self._is_stopped:
                        break
        except BaseException as raised:
            # Raised in the task that reads the rows.
            error = raised
        self._hand_over(_End(error))

    def _hand_over(self, row: object) -> None:
        self._rows.append(row)
        # A closed loop accepts no callbacks, and no task waits on it.
        if not self._arrived.is_set() and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._arrived.set)
