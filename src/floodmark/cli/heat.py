"""How busy the partitions of a site were, interval by interval, and a page that shows it."""

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from typing import Final

import floodmark
from floodmark.cli.render.progress import counted
from floodmark.codec.ordered import encode_namespace
from floodmark.host.statistics import PartitionHeat, PartitionStatistics
from floodmark.model.errors import VersionCollected
from floodmark.model.version import COUNTER_BITS, physical_ms

INTERVALS: Final = 30


def _zeros() -> list[int]:
    return [0] * INTERVALS


@dataclass
class Load:
    """The writes, reads and written bytes of a partition in each interval, the oldest first."""

    writes: list[int] = field(default_factory=_zeros)
    reads: list[int] = field(default_factory=_zeros)
    written: list[int] = field(default_factory=_zeros)

    @property
    def calls(self) -> list[int]:
        """Reads and writes."""
        return [sum(both) for both in zip(self.writes, self.reads, strict=True)]


@dataclass
class HeatReport:
    """The load of each partition between two moments; a directory has no counts of reads."""

    from_ms: int
    to_ms: int
    counts_reads: bool
    loads: list[Load]


def measure(
    site: floodmark.Site,
    names: Mapping[int, str],
    partitions: Sequence[PartitionStatistics],
    from_ms: int,
    to_ms: int,
) -> HeatReport:
    """The load between two moments, as counted by servers or, for a directory, in its change log."""
    loads = {each.id: Load() for each in partitions}
    is_served = any(each.place for each in site.host.router.maps.map.partitions)
    if is_served:
        _add_samples(loads, site.heat(), from_ms, to_ms)
    else:
        _add_changes(list(loads.values()), site, names, partitions, from_ms, to_ms)
    return HeatReport(from_ms, to_ms, is_served, list(loads.values()))


def _add_samples(loads: Mapping[int, Load], heats: Iterable[PartitionHeat], from_ms: int, to_ms: int) -> None:
    for heat in heats:
        for sample in heat.samples:
            middle_ms = (sample.from_ms + sample.to_ms) // 2
            if heat.id in loads and from_ms <= middle_ms < to_ms:
                load, interval = loads[heat.id], (middle_ms - from_ms) * INTERVALS // (to_ms - from_ms)
                load.writes[interval] += sample.writes
                load.reads[interval] += sample.reads
                load.written[interval] += sample.bytes_written


def _add_changes(
    loads: Sequence[Load],
    site: floodmark.Site,
    names: Mapping[int, str],
    partitions: Sequence[PartitionStatistics],
    from_ms: int,
    to_ms: int,
) -> None:
    ids = {name: encode_namespace(number) for number, name in names.items()}
    starts = [partition.range.start for partition in partitions]
    for change in counted(_changes_since(site, from_ms << COUNTER_BITS), "changes read"):
        qualified = ids.get(change.namespace, b"") + change.key
        interval = (physical_ms(change.version) - from_ms) * INTERVALS // (to_ms - from_ms)
        load = loads[bisect_right(starts, qualified) - 1]
        load.writes[min(interval, INTERVALS - 1)] += 1
        load.written[min(interval, INTERVALS - 1)] += len(qualified) + len(change.value or b"")


def _changes_since(site: floodmark.Site, since: int) -> Iterator[floodmark.Change]:
    """Changes after a version, or after the oldest that is kept."""
    try:
        yield from site.changes(since=since)
    except VersionCollected as error:
        oldest = error.details.get("oldest")
        if not isinstance(oldest, int) or oldest <= since:
            raise
        yield from site.changes(since=oldest)


_PAGE: Final = """<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8">{refresh}<title>{title}</title><style>
body {{ font: 14px system-ui, sans-serif; margin: 2em; color: #222 }}
table {{ border-collapse: collapse }} th, td {{ padding: 3px 12px; text-align: left }}
td.number {{ text-align: right; font-variant-numeric: tabular-nums }}
.strip {{ display: flex }} .strip i {{ width: 12px; height: 22px; margin-right: 1px }}
</style></head><body><h1>{title}</h1><p>{since} to {until}; a darker cell has more reads and writes.</p>
<table><tr><th>partition</th><th>from</th><th>to</th><th>writes</th><th>reads</th><th>bytes</th><th>calls</th></tr>
{rows}
</table></body></html>
"""


def draw_page(
    title: str,
    report: HeatReport,
    labels: Sequence[tuple[str, str, str]],
    moments: tuple[str, str],
    refresh_seconds: int | None,
) -> str:
    """One HTML page that needs no other file: a row with a strip of cells for each partition."""
    top = max(max(load.calls) for load in report.loads) or 1
    rows = []
    for label, load in zip(labels, report.loads, strict=True):
        cells = "".join(
            f'<i style="background: rgb(214 72 32 / {calls / top:.2f})" title="{calls:,}"></i>'
            for calls in load.calls
        )
        reads = f"{sum(load.reads):,}" if report.counts_reads else ""
        numbers = (f"{sum(load.writes):,}", reads, f"{sum(load.written):,}")
        rows.append(
            "<tr>"
            + "".join(f"<td>{escape(each)}</td>" for each in label)
            + "".join(f'<td class="number">{each}</td>' for each in numbers)
            + f'<td><div class="strip">{cells}</div></td></tr>'
        )
    refresh = "" if refresh_seconds is None else f'<meta http-equiv="refresh" content="{refresh_seconds}">'
    since, until = moments
    return _PAGE.format(title=escape(title), refresh=refresh, since=since, until=until, rows="\n".join(rows))
