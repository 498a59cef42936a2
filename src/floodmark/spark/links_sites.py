"""The sites that a process of the links' query talks to, over connections that outlast its tasks.

Spark uses its Python workers again and again.  To connect takes several round trips, a step may take less,
and sites that copy each other are often far apart: so whoever was connected to stays so.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from threading import Lock
from typing import Final, TypeVar

from floodmark.clock import monotonic_ms
from floodmark.feed.runner_backoff import Backoff
from floodmark.model.errors import FloodmarkError, Unreachable
from floodmark.site.site import Site
from floodmark.spark.address import SiteAddress

# How long somebody rests who came to nothing, at first and at most.
BACKOFF_MS: Final = 250
BACKOFF_MS_MAX: Final = 15_000
# Links wait for answers most of the time, so that many can be looked after at once.
THREADS_MAX: Final = 16

Item = TypeVar("Item")
Result = TypeVar("Result")


class Rest:
    """How long somebody rests who has come to nothing, longer each time."""

    def __init__(self) -> None:
        self._backoff = Backoff(BACKOFF_MS, longest_ms=BACKOFF_MS_MAX)
        self._until_ms: int | None = None

    @property
    def is_over(self) -> bool:
        return self._until_ms is None or monotonic_ms() >= self._until_ms

    def begin(self) -> None:
        self._until_ms = monotonic_ms() + (self._backoff.next_ms() or BACKOFF_MS_MAX)

    def forget(self) -> None:
        self._backoff.reset()
        self._until_ms = None


class Sites:
    """Connections to sites.  A site that did not answer is left alone for a while, by all links."""

    def __init__(self) -> None:
        self._places: dict[SiteAddress, _Place] = {}
        self._lock = Lock()

    def get(self, address: SiteAddress) -> Site:
        """The site at an address, connected to if it is not yet."""
        return self._place(address).get()

    def drop(self, address: SiteAddress) -> None:
        """Connect anew the next time."""
        self._place(address).drop()

    def close(self) -> None:
        for address in list(self._places):
            self.drop(address)

    def _place(self, address: SiteAddress) -> "_Place":
        with self._lock:
            return self._places.setdefault(address, _Place(address))


class _Place:
    """Where a site is, and the connection to it."""

    def __init__(self, address: SiteAddress) -> None:
        self._address = address
        self._site: Site | None = None
        self._rest = Rest()
        self._away: Unreachable | None = None
        # Held while connecting: whoever comes meanwhile wants the same connection, or the same error.
        self._lock = Lock()

    def get(self) -> Site:
        with self._lock:
            if self._site is not None:
                return self._site
            if self._away is not None and not self._rest.is_over:
                raise self._away.again()
            try:
                self._site = self._address.connect()
            except Unreachable as away:
                self._rest.begin()
                self._away = away
                raise
            self._rest.forget()
            self._away = None
            return self._site

    def drop(self) -> None:
        with self._lock:
            site, self._site = self._site, None
        if site is not None:
            with suppress(FloodmarkError):
                site.close()


# Those of a worker, which serves one task after the other.
WORKER_SITES: Final = Sites()


def at_once(work: Callable[[Item], Result], items: Sequence[Item]) -> list[Result]:
    """Do the same for several links that do not wait for each other; the results in their order."""
    if len(items) < 2:
        return [work(item) for item in items]
    with ThreadPoolExecutor(min(len(items), THREADS_MAX), thread_name_prefix="floodmark-links") as pool:
        return list(pool.map(work, items))
