"""partition list, split, merge and heat."""

from bisect import bisect_right
from collections.abc import Iterator
from datetime import timedelta
from typing import Annotated, Final

import floodmark
from floodmark.cli.arguments import Commands, Key, NamespaceName, OpenSite
from floodmark.cli.render.output import Output
from floodmark.cli.render.progress import counted
from floodmark.cli.render.text import draw_bar, draw_sparkline, json_bytes, show_bytes, show_time
from floodmark.codec.ordered import NAMESPACE_BYTES, encode_namespace
from floodmark.host.statistics import PartitionStatistics
from floodmark.model.errors import VersionCollected
from floodmark.model.version import COUNTER_BITS, physical_ms

commands = Commands("partition")

INTERVALS: Final = 30
BAR_WIDTH: Final = 16

Names = dict[int, str]


@commands.command("list")
def list_partitions(site: OpenSite, output: Output) -> None:
    """List the partitions in order of keys."""
    names = namespace_names(site)
    output.rows(
        site.partitions(),
        {
            "id": lambda each: str(each.id),
            "from": lambda each: show_range(each, names)[0],
            "to": lambda each: show_range(each, names)[1],
        },
        lambda each: partition_fields(each, names),
    )


@commands.command()
def split(site: OpenSite, output: Output, namespace: NamespaceName, key: Key) -> None:
    """Split the partition that holds a key in two, before that key.

    Example:
      floodmark partition split data/oslo users m
    """
    left, right = site.split(namespace, key)
    output.result(
        {"left": left, "right": right}, f"{left} now ends before {show_bytes(key)}, and {right} begins there"
    )


@commands.command()
def merge(
    site: OpenSite,
    output: Output,
    left: Annotated[int, "LEFT", "The id of a partition."],
    right: Annotated[int, "RIGHT", "The id of the one that follows it."],
) -> None:
    """Join two neighbouring partitions.

    They are named by the ids that `floodmark partition list` shows.

    Example:
      floodmark partition merge data/oslo 3 5
    """
    joined = site.merge(left, right)
    output.result({"partition": joined}, f"{left} and {right} are now {joined}")


@commands.command()
def heat(
    site: OpenSite,
    output: Output,
    last: Annotated[timedelta, "DURATION", "How far to look back."] = timedelta(minutes=10),
) -> None:
    """Show how many writes went to the keys of each partition, and when.

    Counted from the change log, so that it includes writes of other processes. A key counts for
    the partition that holds it now: after a split, the halves show what they would have had.

    Examples:
      floodmark partition heat data/oslo
      floodmark partition heat data/oslo --last 1h
    """
    names, partitions = namespace_names(site), site.partitions()
    to_ms = physical_ms(site.now()) + 1
    from_ms = max(0, to_ms - max(INTERVALS, last // timedelta(milliseconds=1)))
    writes = _count_writes(site, names, partitions, from_ms, to_ms)
    since, until = (show_time(moment << COUNTER_BITS) for moment in (from_ms, to_ms))
    top_total, top_count = max(map(sum, writes)), max(map(max, writes))
    output.rows(
        list(zip(partitions, writes, strict=True)),
        {
            "id": lambda each: str(each[0].id),
            "from": lambda each: show_range(each[0], names)[0],
            "to": lambda each: show_range(each[0], names)[1],
            "writes": lambda each: sum(each[1]),
            "share": lambda each: draw_bar(sum(each[1]), top_total, BAR_WIDTH, output.bars),
            "over time": lambda each: draw_sparkline(each[1], top_count, output.bars),
        },
        lambda each: {
            **partition_fields(each[0], names),
            "from": since,
            "to": until,
            "writes": sum(each[1]),
            "writes_by_interval": each[1],
        },
    )


def partition_fields(partition: PartitionStatistics, names: Names) -> dict[str, object]:
    """A partition for programs; where it has no bound, `start` or `end` is null."""
    return {
        "id": partition.id,
        "start": _bound(partition.range.start, names),
        "end": None if partition.range.end is None else _bound(partition.range.end, names),
    }


def _count_writes(
    site: floodmark.Site, names: Names, partitions: list[PartitionStatistics], from_ms: int, to_ms: int
) -> list[list[int]]:
    """Changes by partition and interval."""
    ids = {name: encode_namespace(number) for number, name in names.items()}
    starts = [partition.range.start for partition in partitions]
    writes = [[0] * INTERVALS for _ in partitions]
    for change in counted(_changes_since(site, from_ms << COUNTER_BITS), "changes read"):
        qualified = ids.get(change.namespace, b"") + change.key
        interval = (physical_ms(change.version) - from_ms) * INTERVALS // (to_ms - from_ms)
        writes[bisect_right(starts, qualified) - 1][min(interval, INTERVALS - 1)] += 1
    return writes


def _changes_since(site: floodmark.Site, since: int) -> Iterator[floodmark.Change]:
    """Changes after a version, or after the oldest that is kept."""
    try:
        yield from site.changes(since=since)
    except VersionCollected as error:
        oldest = error.details.get("oldest")
        if not isinstance(oldest, int) or oldest <= since:
            raise
        yield from site.changes(since=oldest)


def namespace_names(site: floodmark.Site) -> Names:
    """The names of namespaces by id."""
    return {each.id: each.name for each in site.statistics().namespaces}


def show_range(partition: PartitionStatistics, names: Names) -> tuple[str, str]:
    """Where a partition begins and ends, with keys that can be typed."""
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
    """Namespace and user key; a namespace that was dropped is known by its id alone."""
    number = int.from_bytes(qualified[:NAMESPACE_BYTES], "big")
    return names.get(number, f"#{number}"), qualified[NAMESPACE_BYTES:]
