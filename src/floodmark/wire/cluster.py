"""The nodes of a site, as a client sees them.

A client begins with one or more URLs and learns the others from the partition map.  Calls of partitions go to
their owners (`wire/partition.py`).  Calls that concern the whole site go to the keeper, which is found by
asking: another node refuses with `NotKeeper` and names it.  All other calls go to any node that answers.

A site of one process has one URL.  Then this module does not retry: its connection repeats reads.
"""

from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from secrets import SystemRandom
from threading import Event, Lock
from typing import Any, Final, TypeVar
from weakref import WeakSet

from floodmark.clock import monotonic_seconds
from floodmark.clock.backoff import NO_BUDGET_MS, Backoff
from floodmark.model.errors import (
    Closed,
    FloodmarkError,
    InvalidArgument,
    NotKeeper,
    OutcomeUnknown,
    PartitionMoved,
    PartitionStopped,
    SiteMismatch,
    Unreachable,
)
from floodmark.wire.address import parse_address
from floodmark.wire.connection import LENGTHY_SECONDS, Connection
from floodmark.wire.messages import MapReply, Method, Reply

# After these errors the call had no effect, and may succeed at another node, or later at the same one.
ELSEWHERE: Final = (NotKeeper, PartitionMoved, PartitionStopped, Unreachable)

# A planned move takes milliseconds, a takeover 5 to 8 seconds.
PAUSE_MS: Final = 10
PAUSE_MS_MAX: Final = 250
# How long a stream is retried before its first progress, and after it: that outlives a server's restart.
BEGIN_SECONDS: Final = 1.0
STREAM_SECONDS: Final = 32.0

_random: Final = SystemRandom().random

Result = TypeVar("Result")


class Connections:
    """Connections by URL, made when first used, and closed together.  Safe to use from many threads."""

    def __init__(self, connect: Callable[[str], Connection]) -> None:
        self._connect = connect
        self._lock = Lock()
        self._by_url: dict[str, Connection] = {}
        self._made: WeakSet[Connection] = WeakSet()
        self._closed = False

    def at(self, url: str) -> Connection:
        """The connection to a server.  Raises Closed after `close`."""
        found = self._by_url.get(url)
        if found is not None:
            return found
        with self._lock:
            if self._closed:
                raise Closed("the connections to the site were closed; connect again")
            if url not in self._by_url:
                self._by_url[url] = self._connect(url)
                self._made.add(self._by_url[url])
            return self._by_url[url]

    def keep(self, urls: Collection[str]) -> None:
        """Forget all other servers.  Calls and streams in progress there continue."""
        with self._lock:
            self._by_url = {url: found for url, found in self._by_url.items() if url in urls}

    def close(self) -> None:
        """Close all connections.  Closing twice is harmless."""
        with self._lock:
            self._closed = True
            made = list(self._made)
        for connection in made:
            connection.close()


class Nodes:
    """Calls the nodes of a site.  Safe to use from many threads.

    `timeout_seconds` limits how long a call is repeated.  `random` spreads the pauses of many clients.
    """

    def __init__(
        self,
        connections: Connections,
        urls: Iterable[str],
        *,
        timeout_seconds: float,
        seconds: Callable[[], float] = monotonic_seconds,
        random: Callable[[], float] = _random,
    ) -> None:
        self._connections = connections
        self._given = list(urls)
        self.timeout_seconds = timeout_seconds
        self.seconds = seconds
        self.random = random
        self._closing = Event()
        # The URLs that the map named, by the numbers of nodes.
        self._learned: dict[int, str] = {}
        self._near = self._given[0]
        self._keeper: str | None = None
        # The site, and the URLs of the servers that are known to serve it.
        self._site: tuple[str, int] | None = None
        self._known: set[str] = set()

    def __repr__(self) -> str:
        return f"Nodes({self.urls})"

    # The known nodes

    @property
    def urls(self) -> list[str]:
        """The URLs of all known nodes, beginning with the near one."""
        return list(dict.fromkeys([self._near, *self._learned.values(), *self._given]))

    @property
    def are_several(self) -> bool:
        """Whether the site may have several nodes, so that another can answer."""
        return len(self.urls) > 1

    @property
    def near(self) -> str:
        """The URL of the node for calls that any node answers: the last that answered."""
        return self._near

    def learn(self, reply: MapReply) -> None:
        """Learn the URLs of all nodes, and the keeper, from a map."""
        urls: dict[int, str] = {}
        for number, url in reply.nodes.items():
            # A node without a listener has none.
            with suppress(InvalidArgument):
                urls[number] = parse_address(url).url
        if urls != self._learned:
            self._learned = urls
            self._connections.keep(self.urls)
        self._keeper = urls.get(reply.keeper, self._keeper)

    def owner(self, number: int) -> Connection:
        """The connection to a node; for one without a known URL, to the near one."""
        return self._at(self._learned.get(number, self._near))

    def leave(self, url: str) -> None:
        """Use another node from now on, because this one did not answer."""
        others = [other for other in self.urls if other != url]
        if url == self._near and others:
            self._near = others[0]
        if url == self._keeper:
            self._keeper = None

    # Calls

    def call(self, method: Method[Reply], *args: object, **kwargs: object) -> Reply:
        """Call a method at the keeper, or at any node if its action is declared `anywhere`."""
        request, action = method.request(*args, **kwargs), method.action

        def invoke(connection: Connection) -> Reply:
            return connection.invoke(method, request)

        return self.run(invoke, at_keeper=not action.anywhere, lengthy=action.lengthy)

    def run(
        self, work: Callable[[Connection], Result], *, at_keeper: bool = False, lengthy: bool = False
    ) -> Result:
        """Call a function with a connection; retry until the timeout, after errors without effect."""
        return self.patiently(lambda: self.run_once(work, at_keeper=at_keeper), lengthy=lengthy)

    def patiently(self, work: Callable[[], Result], *, lengthy: bool = False) -> Result:
        """Retry a function that asks each node once, until the timeout, after errors without effect."""
        attempts = Attempts(self, max(self.timeout_seconds, LENGTHY_SECONDS if lengthy else 0))
        attempts.start()
        while True:
            try:
                return work()
            except ELSEWHERE as error:
                if not self.are_several or _has_waited(error):
                    raise
                attempts.pause(error)

    def run_once(
        self, work: Callable[[Connection], Result], *, at_keeper: bool = False, first: str | None = None
    ) -> Result:
        """`run` with one attempt at each node."""
        url: str | None = first or (self._keeper if at_keeper else None) or self._near
        tried: set[str] = set()
        failure: FloodmarkError | None = None
        while url is not None:
            tried.add(url)
            hint: str | None = None
            try:
                result = work(self._met(url))
            except NotKeeper as error:
                failure, hint = error, self._keeper_of(error)
            except ELSEWHERE as error:
                if _has_waited(error):
                    raise
                failure = error
                self.leave(url)
            except OutcomeUnknown:
                self.leave(url)
                raise
            else:
                if at_keeper:
                    self._keeper = url
                else:
                    self._near = url
                return result
            left = [other for other in (hint, *self.urls) if other is not None and other not in tried]
            url = next(iter(left), None)
        assert failure is not None
        raise failure

    @contextmanager
    def visiting(self, url: str | None = None) -> Iterator[Connection]:
        """The connection to a node, or to the near one.  After a failure in the block, leaves that node."""
        url = url or self._near
        try:
            yield self._met(url)
        except ELSEWHERE:
            self.leave(url)
            raise

    def attempts(self) -> "Attempts":
        """The attempts of one call."""
        return Attempts(self, self.timeout_seconds)

    def stream_attempts(self) -> "Attempts":
        """The attempts of a stream, whose time starts again when it makes progress."""
        begin = self.timeout_seconds if self.are_several else BEGIN_SECONDS
        return Attempts(self, begin, max(begin, STREAM_SECONDS))

    def wait(self, seconds: float) -> None:
        """Pause between two attempts.  Raises Closed after `close`."""
        if self._closing.wait(seconds):
            raise Closed("the connection to the site was closed; connect again")

    def close(self) -> None:
        """Close all connections.  Closing twice is harmless."""
        self._closing.set()
        self._connections.close()

    def _at(self, url: str) -> Connection:
        connection = self._connections.at(url)
        connection.is_alone = not self.are_several
        return connection

    def _met(self, url: str) -> Connection:
        """The connection to a server; raises SiteMismatch if it serves another site."""
        connection = self._at(url)
        if url not in self._known:
            hello = connection.hello()
            site = (hello.site, hello.site_id)
            self._site = self._site or site
            if site != self._site:
                raise SiteMismatch(
                    f"{url} serves site {hello.site!r}, and another of the URLs site {self._site[0]!r}; "
                    "name only nodes of one site",
                    site=hello.site,
                )
            self._known.add(url)
        return connection

    def _keeper_of(self, error: NotKeeper) -> str | None:
        """The URL of the keeper that a refusal names."""
        url, number = error.details.get("url"), error.details.get("node")
        if isinstance(url, str):
            with suppress(InvalidArgument):
                return parse_address(url).url
        return self._learned.get(number) if isinstance(number, int) else None


def _has_waited(error: FloodmarkError) -> bool:
    """Whether the keeper has waited for the full timeout of the caller: then no node is asked again."""
    return bool(error.details.get("waited"))


class RemoteCalls:
    """The methods of a port as remote calls."""

    def __init__(self, call: Callable[..., Any], methods: Iterable[Method[Any]]) -> None:
        for method in methods:
            setattr(self, method.call, partial(call, method))


class Attempts:
    """The attempts of one call, with growing pauses, within a time that starts at the first failure."""

    def __init__(self, nodes: Nodes, seconds: float, renewed_seconds: float | None = None) -> None:
        self._nodes = nodes
        self._allowed_seconds = seconds
        self._renewed_seconds = renewed_seconds or seconds
        self._ends: float | None = None
        self._backoff = Backoff(PAUSE_MS, longest_ms=PAUSE_MS_MAX, budget_ms=NO_BUDGET_MS)

    def start(self) -> None:
        """Start the time now."""
        self._ends = self._nodes.seconds() + self._allowed_seconds

    def renew(self) -> None:
        """Reset the pauses and the time, after progress."""
        self._allowed_seconds = self._renewed_seconds
        self._ends = None
        self._backoff.reset()

    def prolong(self) -> None:
        """Allow as much time as after progress, because a node has answered."""
        if self._allowed_seconds != self._renewed_seconds:
            self._allowed_seconds = self._renewed_seconds
            self._ends = None

    def pause(self, error: FloodmarkError) -> None:
        """Wait before another attempt.  Raises the error if no time is left."""
        if self._ends is None:
            self.start()
        assert self._ends is not None
        left = self._ends - self._nodes.seconds()
        if left <= 0:
            asked = f"asked {', '.join(self._nodes.urls)} for {self._allowed_seconds:.0f} s"
            raise type(error)(f"{error} ({asked})", **error.details) from error
        pause_ms = self._backoff.next_ms() or PAUSE_MS_MAX
        self._nodes.wait(min(pause_ms / 1_000 * (0.5 + self._nodes.random() / 2), left))
