"""Connections to the sites of links, shared by all links of a process.

Connecting takes several round trips, and a step may take fewer, so connections stay open between steps.
After a failed call to a site, no link calls that site for a while.

A site may fall silent: its machine hangs, or the network drops packets.  A call then waits for half a minute,
and a stream, made to survive a restart, for minutes.  Work that other links wait for therefore runs in daemon
threads, which the caller may abandon (`attend`).
"""

from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from contextlib import suppress
from functools import partial
from threading import Lock, Thread
from typing import Final, TypeVar

from floodmark.clock import monotonic_ms
from floodmark.clock.backoff import Backoff
from floodmark.model.errors import FloodmarkError, Unreachable
from floodmark.site.address import SiteAddress
from floodmark.site.site import Site

# The pause after a failure, at first and at most.
BACKOFF_MS: Final = 250
BACKOFF_MS_MAX: Final = 15_000
# Concurrent requests of `at_once`.
THREADS_MAX: Final = 16
# The interval at which `attend` asks the sites whether they answer.
LOOK_SECONDS: Final = 1.0
# A site that does not answer a trivial request for this long counts as silent.
ANSWER_SECONDS: Final = 5.0

Item = TypeVar("Item")
Result = TypeVar("Result")


class Rest:
    """The pause after a failure; it doubles with each failure in a row."""

    def __init__(self) -> None:
        self._backoff = Backoff(BACKOFF_MS, longest_ms=BACKOFF_MS_MAX)
        self._until_ms: int | None = None

    @property
    def is_over(self) -> bool:
        """Whether it is time to try again."""
        return self._until_ms is None or monotonic_ms() >= self._until_ms

    def begin(self) -> None:
        """Pause after a failure."""
        self._until_ms = monotonic_ms() + (self._backoff.next_ms() or BACKOFF_MS_MAX)

    def forget(self) -> None:
        """Begin with the shortest pause again."""
        self._backoff.reset()
        self._until_ms = None


class SiteConnections:
    """One connection for each address.  After a failure, all callers get the error for a while."""

    def __init__(self) -> None:
        self._places: dict[SiteAddress, _ConnectedSite] = {}
        self._lock = Lock()

    def get(self, address: SiteAddress) -> Site:
        """The site at an address, connected on first use."""
        return self._place(address).get()

    def drop(self, address: SiteAddress) -> None:
        """Close the connection; the next `get` connects again."""
        self._place(address).drop()

    def close(self) -> None:
        """Close all connections, also one that another thread is about to make."""
        for address in list(self._places):
            self._place(address).close()

    def _place(self, address: SiteAddress) -> "_ConnectedSite":
        with self._lock:
            return self._places.setdefault(address, _ConnectedSite(address))


class _ConnectedSite:
    """An address and the connection to it."""

    def __init__(self, address: SiteAddress) -> None:
        self._address = address
        self._site: Site | None = None
        self._rest = Rest()
        self._away: Unreachable | None = None
        self._is_closed = False
        # Held while connecting: other threads wait for the same connection or error.
        self._connecting = Lock()
        # Held only for a moment, so that `drop` never waits for a silent site.
        self._lock = Lock()

    def get(self) -> Site:
        with self._connecting:
            site = self._site
            if site is not None:
                return site
            if self._away is not None and not self._rest.is_over:
                raise self._away.again()
            try:
                site = self._address.connect()
            except Unreachable as away:
                self._rest.begin()
                self._away = away
                raise
            self._rest.forget()
            self._away = None
            with self._lock:
                self._site = site
        if self._is_closed:
            self.drop()
        return site

    def close(self) -> None:
        self._is_closed = True
        self.drop()

    def drop(self) -> None:
        with self._lock:
            site, self._site = self._site, None
        if site is not None:
            with suppress(FloodmarkError):
                site.close()


def begin(work: Callable[[], Result], name: str = "floodmark-links") -> "Future[Result]":
    """Run work in a daemon thread of its own, which does not keep the process alive."""
    outcome: Future[Result] = Future()

    def run() -> None:
        try:
            outcome.set_result(work())
        except BaseException as error:
            outcome.set_exception(error)

    Thread(target=run, name=name, daemon=True).start()
    return outcome


def at_once(work: Callable[[Item], Result], items: Sequence[Item]) -> list[Result]:
    """Apply work to all items concurrently, at most 16 at a time; the results in the order of the items."""
    if len(items) < 2:
        return [work(item) for item in items]
    results = []
    for first in range(0, len(items), THREADS_MAX):
        begun = [begin(partial(work, item)) for item in items[first : first + THREADS_MAX]]
        results += [outcome.result() for outcome in begun]
    return results


def attend(
    work: Callable[[], Result],
    sites: SiteConnections,
    addresses: Sequence[SiteAddress],
    *,
    look_seconds: float = LOOK_SECONDS,
    answer_seconds: float = ANSWER_SECONDS,
) -> Result:
    """Run work that depends on sites, as long as all of them answer, and return its result.

    Raises Unreachable about six seconds after a site has fallen silent, or at the next look if it refuses
    connections.  The work is then abandoned, and must do no harm if it still goes on for a while.
    """
    outcome = begin(work)
    while outcome not in wait([outcome], look_seconds).done:
        _require_answers(sites, addresses, answer_seconds)
    return outcome.result()


def _require_answers(sites: SiteConnections, addresses: Sequence[SiteAddress], answer_seconds: float) -> None:
    asked = [begin(partial(_ask, sites, address)) for address in addresses]
    wait(asked, answer_seconds)
    for address, outcome in zip(addresses, asked, strict=True):
        if not outcome.done():
            raise Unreachable(
                f"no answer from {address.location} for {answer_seconds:g} s; see whether its server hangs"
            )
        # Any other error is an answer.
        if isinstance(error := outcome.exception(), Unreachable):
            raise error


def _ask(sites: SiteConnections, address: SiteAddress) -> None:
    sites.get(address).host.versions.now()
