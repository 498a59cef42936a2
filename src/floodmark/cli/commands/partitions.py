"""partition list, split, merge, move, rebalance and heat."""

import sys
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from threading import Event
from typing import Annotated, Final

import typer

import floodmark
from floodmark.cli.arguments import BYTES_HELP, READERS, Commands, OpenSite, parse
from floodmark.cli.heat import INTERVALS, Load, draw_page, measure
from floodmark.cli.render.output import Output, console_on, note
from floodmark.cli.render.text import draw_bar, draw_sparkline, show_time
from floodmark.codec.ordered import NAMESPACE_BYTES
from floodmark.host.balancing import Move
from floodmark.host.ports import Balance
from floodmark.host.statistics import PartitionStatistics
from floodmark.model.errors import InvalidOption
from floodmark.model.text import json_bytes, show_bytes
from floodmark.model.version import COUNTER_BITS, physical_ms

commands = Commands("partition")

WATCH_SECONDS: Final = 2
BAR_WIDTH: Final = 16

Names = dict[int, str]

_key = parse(READERS["KEY"])


@commands.command("list")
def list_partitions(site: OpenSite, output: Output) -> None:
    """List the partitions in order of keys."""
    names, partitions = namespace_names(site), site.partitions()
    columns: dict[str, Callable[[PartitionStatistics], str]] = {
        "id": lambda each: str(each.id),
        "from": lambda each: show_range(each, names)[0],
        "to": lambda each: show_range(each, names)[1],
    }
    if any(each.node for each in partitions):
        columns |= {"node": lambda each: str(each.node), "calls/s": lambda each: f"{each.rate:.1f}"}
    output.rows(
        partitions,
        columns,
        lambda each: {
            **partition_fields(each, names),
            "calls_per_second": each.rate,
            "node": each.node or None,
        },
    )


@commands.command()
def split(
    site: OpenSite,
    output: Output,
    namespace: Annotated[str, "NAMESPACE|ID", "The key's namespace; with --auto, the id of a partition."],
    key: Annotated[
        bytes | None,
        typer.Argument(metavar="[KEY]", help=f"The first key of the right half: {BYTES_HELP}", parser=_key),
    ] = None,
    auto: Annotated[bool, "Split a partition at the key that divides its recent writes in half."] = False,
) -> None:
    """Split a partition before a key, or where its load is halved.

    A key names the partition that holds it. With --auto, name the partition by its id: its last thousand
    commits tell its load.

    Examples:
      floodmark partition split data/oslo users m
      floodmark partition split data/oslo 3 --auto
    """
    if auto == (key is not None) or (auto and not namespace.isdecimal()):
        raise InvalidOption("name a namespace and a key, or the id of a partition and --auto")
    if key is not None:
        left, right = site.split(namespace, key)
        shown = show_bytes(key)
    else:
        halves = site.host.partitions.split_by_load(int(namespace))
        left, right = halves.left, halves.right
        shown = _show_bound(halves.key, namespace_names(site))
    output.result({"left": left, "right": right}, f"{left} now ends before {shown}, and {right} begins there")


@commands.command()
def merge(
    site: OpenSite,
    output: Output,
    left: Annotated[int, "LEFT", "The id of a partition."],
    right: Annotated[int, "RIGHT", "The id of the next partition."],
) -> None:
    """Join two neighbouring partitions.

    They are named by the ids that `floodmark partition list` shows.

    Example:
      floodmark partition merge data/oslo 3 5
    """
    joined = site.merge(left, right)
    output.result({"partition": joined}, f"{left} and {right} are now {joined}")


@commands.command()
def move(
    site: OpenSite,
    output: Output,
    partition: Annotated[int, "ID", "The id of a partition."],
    node: Annotated[int, "NODE", "The number of the new owner."],
) -> None:
    """Give a partition to another node; no data moves.

    Writes to it wait for some milliseconds. The partition gets a new id. Nodes have the numbers that
    `floodmark node list` shows.

    Example:
      floodmark partition move grpc://oslo-1:7100 3 2
    """
    moved = site.host.node_port.move(partition, node)
    output.result({"partition": moved, "node": node}, f"{partition} is now {moved}, on node {node}")


@commands.command()
def rebalance(
    site: OpenSite,
    output: Output,
    by: Annotated[
        str, "load|count", "What to balance: calls a second, or the number of partitions."
    ] = "load",
) -> None:
    """Even out the nodes of a site by moving partitions between them.

    A partition that is busier than all others together stays where it is: split it first. To have this
    done all the time, within limits, start nodes with `serve --rebalance`.

    Examples:
      floodmark partition rebalance grpc://oslo-1:7100
      floodmark partition rebalance grpc://oslo-1:7100 --by count
    """
    if by not in list(Balance):
        raise InvalidOption(f"--by is load or count, not {by!r}")
    show_moves(output, site.host.node_port.rebalance(Balance(by)))


def show_moves(output: Output, moves: list[Move]) -> None:
    """Print which partitions went where, with the ids that they have now."""
    if not moves:
        note("no partition was moved")
        return
    output.rows(
        moves,
        {
            "new id": lambda each: str(each.partition),
            "from": lambda each: f"node {each.source}",
            "to": lambda each: f"node {each.target}",
        },
        lambda each: {"partition": each.partition, "from": each.source, "to": each.target},
    )


@commands.command()
def heat(
    site: OpenSite,
    output: Output,
    last: Annotated[timedelta, "DURATION", "How far to look back."] = timedelta(minutes=10),
    watch: Annotated[bool, "Refresh every two seconds, until Ctrl-C."] = False,
    html: Annotated[Path | None, "FILE", "Also write the chart as a single HTML file."] = None,
) -> None:
    """Show the writes, reads and bytes of each partition, and when.

    Servers count them for some minutes. For a directory, writes are counted from the change log, so that they
    include those of other processes: a key counts for the partition that holds it now.

    Examples:
      floodmark partition heat data/oslo --last 1h
      floodmark partition heat grpc://127.0.0.1:7100 --watch
      floodmark partition heat grpc://127.0.0.1:7100 --html heat.html
    """
    output.flushes, pause = watch, Event()
    while True:
        _show_heat(site, output, last, html, watch=watch)
        if not watch:
            return
        pause.wait(WATCH_SECONDS)


def _show_heat(
    site: floodmark.Site, output: Output, last: timedelta, html: Path | None, *, watch: bool
) -> None:
    names, partitions = namespace_names(site), site.partitions()
    to_ms = physical_ms(site.now()) + 1
    from_ms = max(0, to_ms - max(INTERVALS, last // timedelta(milliseconds=1)))
    report = measure(site, names, partitions, from_ms, to_ms)
    since, until = (show_time(moment << COUNTER_BITS) for moment in (from_ms, to_ms))
    if html is not None:
        labels = [(str(each.id), *show_range(each, names)) for each in partitions]
        refresh = WATCH_SECONDS if watch else None
        page = draw_page(f"Heat of {site.name}", report, labels, (since, until), refresh)
        html.write_text(page, "utf-8")
    if watch and output.is_terminal and not output.json:
        console_on(sys.stdout).clear()
    calls = [load.calls for load in report.loads]
    top_total, top_count = max(map(sum, calls)), max(map(max, calls))
    columns: dict[str, Callable[[tuple[PartitionStatistics, Load]], str | int]] = {
        "id": lambda each: str(each[0].id),
        "from": lambda each: show_range(each[0], names)[0],
        "to": lambda each: show_range(each[0], names)[1],
        "writes": lambda each: sum(each[1].writes),
        "reads": lambda each: sum(each[1].reads),
        "bytes": lambda each: sum(each[1].written),
        "share": lambda each: draw_bar(sum(each[1].calls), top_total, BAR_WIDTH, output.bars),
        "over time": lambda each: draw_sparkline(each[1].calls, top_count, output.bars),
    }
    if not report.counts_reads:
        del columns["reads"]
    output.rows(
        list(zip(partitions, report.loads, strict=True)),
        columns,
        lambda each: {
            **partition_fields(each[0], names),
            "from": since,
            "to": until,
            "writes": sum(each[1].writes),
            "reads": sum(each[1].reads) if report.counts_reads else None,
            "bytes": sum(each[1].written),
            "writes_by_interval": each[1].writes,
            "reads_by_interval": each[1].reads if report.counts_reads else None,
            "bytes_by_interval": each[1].written,
        },
    )


def partition_fields(partition: PartitionStatistics, names: Names) -> dict[str, object]:
    """A partition for programs; where it has no bound, `start` or `end` is null."""
    return {
        "id": partition.id,
        "start": _bound(partition.range.start, names),
        "end": None if partition.range.end is None else _bound(partition.range.end, names),
    }


def namespace_names(site: floodmark.Site) -> Names:
    """The names of namespaces by id."""
    return {each.id: each.name for each in site.statistics().namespaces}


def show_range(partition: PartitionStatistics, names: Names) -> tuple[str, str]:
    """The bounds of a partition, with keys in the form in which they can be typed."""
    start, end = partition.range
    return (
        _show_bound(start, names) if start else "the first key",
        "the last key" if end is None else _show_bound(end, names),
    )


def _show_bound(qualified: bytes, names: Names) -> str:
    namespace, key = _cut(qualified, names)
    return f"{namespace} {show_bytes(key)}"


def _bound(qualified: bytes, names: Names) -> dict[str, object] | None:
    if not qualified:
        return None
    namespace, key = _cut(qualified, names)
    return {"namespace": namespace, **json_bytes("key", key)}


def _cut(qualified: bytes, names: Names) -> tuple[str, bytes]:
    """Split a qualified key into namespace and user key; a dropped namespace is shown by its id."""
    number = int.from_bytes(qualified[:NAMESPACE_BYTES], "big")
    return names.get(number, f"#{number}"), qualified[NAMESPACE_BYTES:]
