"""The board: what the sites and their links do at this moment, from figures that anybody can ask for."""

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from floodmark.cli.demo.messaging import Messaging
from floodmark.cli.demo.stage import Stage, rate
from floodmark.cli.render.text import draw_sparkline, show_lag
from floodmark.clock import monotonic_ms
from floodmark.host.statistics import LinkStatistics

RATES_KEPT: Final = 20


@dataclass(frozen=True, kw_only=True)
class Link:
    """How one direction is, over all namespaces: of what differs, the worst."""

    source: str
    target: str
    changes: int
    lag_ms_p50: int | None
    lag_ms_p99: int | None
    backlog_ms: int
    heartbeat_age_ms: int | None
    checked: int
    wrong: int
    findings: Sequence[str]
    stalled: str | None


def summarize(source: str, target: str, links: Sequence[LinkStatistics]) -> Link:
    """One direction, from its entries for each namespace."""
    return Link(
        source=source,
        target=target,
        changes=sum(link.changes for link in links),
        lag_ms_p50=max((link.lag_ms_p50 for link in links if link.lag_ms_p50 is not None), default=None),
        lag_ms_p99=max((link.lag_ms_p99 for link in links if link.lag_ms_p99 is not None), default=None),
        backlog_ms=max((link.backlog_ms for link in links), default=0),
        heartbeat_age_ms=max(
            (link.heartbeat_age_ms for link in links if link.heartbeat_age_ms is not None), default=None
        ),
        checked=min((link.intervals_checked for link in links), default=0),
        wrong=sum(link.intervals_wrong for link in links),
        findings=[finding for link in links for finding in link.findings],
        stalled=next((link.stalled for link in links if link.stalled is not None), None),
    )


class Board:
    """Figures of the moment, and of the moments before."""

    def __init__(self, stage: Stage, people: Mapping[str, Messaging]) -> None:
        self.links: list[Link] = []
        self._stage = stage
        self._people = people
        self._taken_at_ms = monotonic_ms()
        self._writes = {name: each.writes for name, each in people.items()}
        self._rates: dict[str, deque[int]] = {name: deque(maxlen=RATES_KEPT) for name in people}

    def take(self, links: Sequence[Link]) -> None:
        """Take note of the figures of this moment."""
        now_ms = monotonic_ms()
        for name, each in self._people.items():
            written = each.writes - self._writes[name]
            # When nobody writes any more, the last rate is more telling than nothing.
            if written:
                self._rates[name].append(rate(written, now_ms - self._taken_at_ms))
            self._writes[name] = each.writes
        self._taken_at_ms = now_ms
        self.links = list(links)

    def line(self) -> str:
        """The figures of the moment in one line."""
        sites = ", ".join(f"{name} {self._rate(name):,} writes/s" for name in self._people)
        links = ", ".join(
            f"{link.source} {self._stage.arrow} {link.target} lag {_lag(link.lag_ms_p50)}"
            for link in self.links
        )
        return f"{sites}; {links}; {sum(link.checked for link in self.links)} heartbeats checked"

    def draw(self, note: RenderableType | None = None) -> RenderableType:
        """The figures as two tables, with a note below."""
        parts: list[RenderableType] = [self._draw_sites(), Text(), self._draw_links()]
        return Group(*parts, *([] if note is None else [Text(), note]))

    def _rate(self, name: str) -> int:
        return self._rates[name][-1] if self._rates[name] else 0

    def _draw_sites(self) -> Table:
        table = _table("site", "sent", "read", "writes/s")
        table.add_column("", justify="left", no_wrap=True)
        top = max((each for rates in self._rates.values() for each in rates), default=0)
        for name, each in self._people.items():
            spark = Text(draw_sparkline(list(self._rates[name]), 2 * top, self._stage.bars), style="cyan")
            table.add_row(
                Text(name, "bold"), f"{each.sent:,}", f"{each.read:,}", f"{self._rate(name):,}", spark
            )
        return table

    def _draw_links(self) -> Table:
        table = _table("link", "copied", "lag p50", "p99", "backlog", "heartbeat", "checked")
        for link in self.links:
            age = "none yet" if link.heartbeat_age_ms is None else f"{_lag(link.heartbeat_age_ms)} ago"
            table.add_row(
                Text(f"{link.source} {self._stage.arrow} {link.target}", "bold"),
                f"{link.changes:,}",
                _lag(link.lag_ms_p50),
                _lag(link.lag_ms_p99),
                show_lag(link.backlog_ms),
                age,
                self._checked(link),
            )
        return table

    def _checked(self, link: Link) -> Text:
        if link.wrong:
            return Text(f"{link.wrong} wrong", style="bold red")
        return Text.assemble(f"{link.checked:,} ", self._stage.mark(True))


def _table(first: str, *others: str) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim", pad_edge=False)
    table.add_column(first, no_wrap=True)
    for name in others:
        table.add_column(name, justify="right", no_wrap=True)
    return table


def _lag(lag_ms: int | None) -> str:
    return "-" if lag_ms is None else show_lag(lag_ms)
