"""The sites that a process of the links' query talks to, over connections that outlast its tasks.

Spark uses its Python workers again and again.  To connect takes several round trips, a step may take less,
and sites that copy each other are often far apart: so whoever was connected to stays so.

A site may fall silent without a word: its machine hangs, or the network swallows what is sent.  Calls then
wait for half a minute, and streams, which are made to outlive a restart, for several minutes.  All links
share a query, so nobody in it waits that long: what sites take part in is done in threads that may be left
behind.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from contextlib import suppress
from functools import partial
from threading import Lock
from typing import Final, TypeVar

from floodmark.clock import monotonic_ms
from floodmark.clock.backoff import Backoff
from floodmark.model.errors import FloodmarkError, Unreachable
from floodmark.site.site import Site
from floodmark.spark.links.beside import beside
from floodmark.spark.source.address import SiteAddress

# How long somebody rests who came to nothing, at first and at most.
BACKOFF_MS: Final = 250
BACKOFF_MS_MAX: Final = 15_000
# Links wait for answers most of the time, so that many can be looked after at once.
THREADS_MAX: Final = 16
# Work that takes longer than this may wait for a site that is silent, so the sites are asked.
LOOK_SECONDS: Final = 1.0
# A site that has no answer to the simplest of questions for so long is taken to be silent.
ANSWER_SECONDS: Final = 5.0

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
        """Connect to nobody any more, also if somebody is about to."""
        for address in list(self._places):
            self._place(address).close()

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
        self._is_closed = False
        # Held while connecting: whoever comes meanwhile wants the same connection, or the same error.
        self._connecting = Lock()
        # Held for a moment only, so that to drop never waits for a site that does not answer.
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


# Those of a worker, which serves one task after the other.
WORKER_SITES: Final = Sites()


def begin(work: Callable[[], Result]) -> "Future[Result]":
    """Do something for a link, which does not wait for it."""
    return beside("floodmark-links", work)


def at_once(work: Callable[[Item], Result], items: Sequence[Item]) -> list[Result]:
    """Do the same for several things that do not wait for each other; the results in their order."""
    if len(items) < 2:
        return [work(item) for item in items]
    results = []
    for first in range(0, len(items), THREADS_MAX):
        begun = [begin(partial(work, item)) for item in items[first : first + THREADS_MAX]]
        results += [outcome.result() for outcome in begun]
    return results


def attend(work: Callable[[], Result], sites: Sites, addresses: Sequence[SiteAddress]) -> Result:
    """Do work that sites take part in, for as long as all of them answer, and return what comes of it.

    Raises Unreachable about six seconds after one has fallen silent, or at the next look if it refuses to be
    connected to.  The work is then left behind: it must do no harm if it still goes on for a while.
    """
    outcome = begin(work)
    while outcome not in wait([outcome], LOOK_SECONDS).done:
        _require_answers(sites, addresses)
    return outcome.result()


def _require_answers(sites: Sites, addresses: Sequence[SiteAddress]) -> None:
    asked = [begin(partial(_ask, sites, address)) for address in addresses]
    wait(asked, ANSWER_SECONDS)
    for address, outcome in zip(addresses, asked, strict=True):
        if not outcome.done():
            raise Unreachable(
                f"no answer from {address.location} for {ANSWER_SECONDS:.0f} s; see if it hangs"
            )
        # Any other error is an answer.
        if isinstance(error := outcome.exception(), Unreachable):
            raise error


def _ask(sites: Sites, address: SiteAddress) -> None:
    sites.get(address).host.versions.now()
