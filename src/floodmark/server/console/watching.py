"""Polls sites once a second, while at least one browser has the page open, and keeps the last answers.

A thread for each site requests its overview, so a silent site does not delay the others.  The page gets a
frame: for each site the last overview with its age, the alarms of all, and one sentence about their health.
History for the small charts is kept in points, one in five seconds, for 15 minutes.
"""

import logging
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from threading import Event, Lock, Thread
from typing import Final

import msgspec

from floodmark.clock import monotonic_ms, system_time_ms
from floodmark.host.examination import CheckResult, Severity
from floodmark.host.overview import SiteOverview
from floodmark.host.ports import Host
from floodmark.model.errors import FloodmarkError

LOOK_SECONDS: Final = 1.0
# A site that has not answered for this long is shown as silent.
SILENT_MS: Final = 2_000
POINT_MS: Final = 5_000
POINTS_MAX: Final = 180
# The numbers of a point at most; those of the first sites come first.
SERIES_MAX: Final = 200

_log = logging.getLogger("floodmark.server.console")


class Alarm(msgspec.Struct, frozen=True):
    """Something that an operator should look at, and what to do about it."""

    site: str
    finding: CheckResult


class Health(msgspec.Struct, frozen=True):
    """Whether anything is wrong, in one sentence."""

    severity: Severity
    sentence: str


class SiteFrame(msgspec.Struct, frozen=True, kw_only=True):
    """A site as it was last seen, at a moment of the console's clock.

    `state` is "answering", "silent" or "connecting".
    """

    name: str
    url: str
    state: str
    error: str | None
    at_ms: int
    seen_at_ms: int | None
    now_skew_ms: int
    changes_per_second: float
    overview: SiteOverview | None


class Frame(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that the page shows at a moment, but the history."""

    at_ms: int
    health: Health
    alarms: list[Alarm]
    sites: list[SiteFrame]


class Point(msgspec.Struct, frozen=True, kw_only=True):
    """Numbers at a moment, by the names of their series."""

    at_ms: int
    series: dict[str, float]


class SiteWatch:
    """Polls one site, and keeps its last answer.  `reach` returns its host, and connects if it must."""

    def __init__(self, name: str, url: str, reach: Callable[[], Host]) -> None:
        self.name, self.url, self.reach = name, url, reach
        self._overview: SiteOverview | None = None
        self._seen_ms = self._seen_at_ms = self._skew_ms = 0
        self._rate = 0.0
        self._error: str | None = None
        self._began_ms = monotonic_ms()

    def begin(self) -> None:
        """Forget the last answer, which is out of date: the page was closed since."""
        self._overview, self._error, self._began_ms = None, None, monotonic_ms()

    def look(self) -> bool:
        """Request the site's overview; returns whether it answered."""
        try:
            before_ms = system_time_ms()
            found = self.reach().status.overview()
            after_ms = system_time_ms()
        except FloodmarkError as error:
            self._error = str(error)
            return False
        except Exception as error:
            _log.exception("looking at site %s failed", self.name)
            self._error = f"looking at it failed: {error}"
            return False
        now_ms, before = monotonic_ms(), self._overview
        if before is not None and now_ms > self._seen_ms:
            # A restart resets the count.
            self._rate = max(0, found.changes - before.changes) * 1_000 / (now_ms - self._seen_ms)
        # Only what the duration of the call cannot explain.
        self._skew_ms = max(0, found.now_ms - after_ms) or min(0, found.now_ms - before_ms)
        self.name, self._error = found.site, None
        self._overview, self._seen_ms, self._seen_at_ms = found, now_ms, after_ms
        return True

    def frame(self, at_ms: int) -> SiteFrame:
        """The site as the page shows it."""
        now_ms, overview = monotonic_ms(), self._overview
        last_ms = self._began_ms if overview is None else self._seen_ms
        is_silent = self._error is not None or now_ms - last_ms > SILENT_MS
        state = "silent" if is_silent else "connecting" if overview is None else "answering"
        return SiteFrame(
            name=self.name,
            url=self.url,
            state=state,
            error=self._error or (f"no answer for {(now_ms - last_ms) / 1000:.0f} s" if is_silent else None),
            at_ms=at_ms,
            seen_at_ms=None if overview is None else self._seen_at_ms,
            now_skew_ms=self._skew_ms,
            changes_per_second=self._rate,
            overview=overview,
        )


class Watching:
    """Polls sites while at least one reader is in the block of `watched`."""

    def __init__(self, sites: Sequence[SiteWatch]) -> None:
        self.sites = list(sites)
        self.points: deque[Point] = deque(maxlen=POINTS_MAX)
        # How many points were ever added.
        self.points_added = 0
        self._point_ms: int | None = None
        self._readers: list[Callable[[], object]] = []
        self._stop = Event()
        self._lock = Lock()

    @contextmanager
    def watched(self, on_change: Callable[[], object]) -> Iterator[None]:
        """Poll the sites within the block; calls `on_change` when one falls silent or answers again."""
        with self._lock:
            self._readers.append(on_change)
            if len(self._readers) == 1:
                self._stop = Event()
                for site in self.sites:
                    site.begin()
                    name = f"floodmark-console-{site.name}"
                    Thread(target=self._look, args=(site, self._stop), name=name, daemon=True).start()
        try:
            yield
        finally:
            with self._lock:
                self._readers.remove(on_change)
                if not self._readers:
                    self._stop.set()

    def stop(self) -> None:
        """Stop polling."""
        self._stop.set()

    def _look(self, site: SiteWatch, stop: Event) -> None:
        answered = None
        while not stop.is_set():
            began_ms = monotonic_ms()
            before, answered = answered, site.look()
            if before is not answered:
                with self._lock:
                    readers = [*self._readers]
                for on_change in readers:
                    on_change()
            stop.wait(max(0.1, LOOK_SECONDS - (monotonic_ms() - began_ms) / 1_000))

    def frame(self) -> Frame:
        """What the page shows now; adds a point to the history if it is time."""
        at_ms = system_time_ms()
        sites = [site.frame(at_ms) for site in self.sites]
        alarms = find_alarms(sites)
        now_ms = monotonic_ms()
        if self._point_ms is None or now_ms - self._point_ms >= POINT_MS:
            self._point_ms = now_ms
            self.points.append(Point(at_ms=at_ms, series=dict(_series(sites))))
            self.points_added += 1
        return Frame(at_ms=at_ms, health=conclude_health(sites, alarms), alarms=alarms, sites=sites)


def find_alarms(sites: Sequence[SiteFrame]) -> list[Alarm]:
    """The alarms of all sites, the worst first; a finding that several sites report is named once."""
    found: list[Alarm] = []
    for site in sites:
        if site.state == "silent":
            advice = "look whether its server runs, and whether this machine reaches it"
            message = f"does not answer: {site.error}"
            found.append(Alarm(site.name, CheckResult("site", Severity.PROBLEM, message, advice)))
        elif site.overview is not None:
            found += [Alarm(site.name, each) for each in site.overview.findings]
    order = (Severity.PROBLEM, Severity.WARNING, Severity.UNKNOWN)
    said: dict[tuple[str, str], Alarm] = {}
    for alarm in sorted(found, key=lambda each: order.index(each.finding.severity)):
        said.setdefault((alarm.finding.check, alarm.finding.message), alarm)
    return list(said.values())


def conclude_health(sites: Sequence[SiteFrame], alarms: Sequence[Alarm]) -> Health:
    """One sentence: whether anything is wrong, and where."""
    names = [site.name for site in sites]
    shown = names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"
    if alarms:
        where = sorted({alarm.site for alarm in alarms})
        count = f"{len(alarms)} thing{'s' if len(alarms) > 1 else ''} to look at"
        return Health(alarms[0].finding.severity, f"{count}, at {' and '.join(where)}.")
    if any(site.state == "connecting" for site in sites):
        return Health(Severity.UNKNOWN, f"Connecting to {shown}.")
    links = [link for site in sites if site.overview is not None for link in site.overview.links]
    moving = (
        f", and {len(links)} link{'s' if len(links) > 1 else ''} move{'' if len(links) > 1 else 's'}"
        if links
        else ""
    )
    return Health(Severity.OK, f"Nothing is wrong: {shown} answer{'s' if len(names) == 1 else ''}{moving}.")


def _series(sites: Sequence[SiteFrame]) -> Iterator[tuple[str, float]]:
    """The numbers of a point, at most SERIES_MAX of them."""
    found: list[tuple[str, float | None]] = []
    for site in sites:
        if site.state != "answering" or site.overview is None:
            continue
        found.append((f"changes/{site.name}", round(site.changes_per_second, 1)))
        for link in site.overview.links:
            name = f"{site.name}/{link.source}/{link.namespace}"
            found += [(f"p50/{name}", link.lag_ms_p50), (f"p99/{name}", link.lag_ms_p99)]
    for name, number in found[:SERIES_MAX]:
        if number is not None:
            yield name, number
