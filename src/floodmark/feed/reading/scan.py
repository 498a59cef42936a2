"""Catching up without a change log: scan all versions of the keys, and sort the new ones by version.

It costs O(keys) however few changes there are, so it is rate limited.  No change is delivered before the last
key was read; the sorter keeps rows in memory up to its quota and spills the others to disk.
"""

from collections.abc import Iterator
from typing import TypeAlias

from floodmark.feed.reading.columns import BATCH_BYTES_MAX, Columns
from floodmark.feed.reading.rate import RateLimit
from floodmark.feed.reading.sorter import Sorter
from floodmark.model.ranges import KeyRange
from floodmark.model.stream import ChangeBatch, Way
from floodmark.model.version import Version
from floodmark.partition import Node

# A change's place in the stream: by version, and by key within a commit.
Position: TypeAlias = tuple[Version, bytes]


def scan_changes(
    node: Node,
    keys: KeyRange,
    since: Version,
    until: Version,
    seen: Position,
    columns: Columns,
    sorter: Sorter,
    rate: RateLimit,
) -> Iterator[ChangeBatch]:
    """The changes of qualified keys in `(since, until]`, in commit order.

    Changes at or before the position `seen` are left out, of a commit that was read in part.  The caller
    holds a safe point at `since`, and `until` is resolved: the versions in between do not change.  An empty
    batch comes after each page, so that a reader can stop.
    """
    nothing_yet = ChangeBatch(through=since, way=Way.SCAN)
    for page in node.scan_versions(keys, since, until):
        route = node.map.route
        sorter.add_page(
            [
                (version, key, route(key).id, stored)
                for version, key, stored in page.rows
                if columns.wants(stored)
            ]
        )
        rate.spend(page.bytes_read)
        yield nothing_yet
    last: Version = since
    for version, key, partition, stored in sorter.rows():
        if (version, key) <= seen:
            continue
        if columns.gathered_bytes >= BATCH_BYTES_MAX:
            # A batch goes through the last complete commit.
            yield from columns.drain(last if version != last else last - 1, Way.SCAN)
        columns.add_change(version, partition, key, stored)
        last = version
    yield from columns.drain(until, Way.SCAN)
