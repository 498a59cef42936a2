"""Counts the changes since the last heartbeat before a restart, from the change logs.

Commits add to the sums of the next heartbeat in memory, which a restart loses.  The change logs still have
these commits, usually those of one second.  If the logs were trimmed, or there are very many commits, the
interval stays unchecked, and its heartbeat says so.
"""

from collections.abc import Iterator, Sequence, Set
from typing import Final, NamedTuple

from floodmark.codec.changelog import CommitRow, decode_log_key, decode_row, encode_log_range
from floodmark.codec.digest import digest_changes
from floodmark.codec.stamps import digest_copies
from floodmark.codec.values import HAS_ORIGIN
from floodmark.engine import Engine
from floodmark.model.change import Heartbeat
from floodmark.model.errors import Corruption, VersionCollected
from floodmark.model.limits import MIB, PAGE_BYTES_MAX
from floodmark.model.version import VERSION_MAX, Version
from floodmark.partition.commit.commit import CommitTally
from floodmark.partition.families import LOG
from floodmark.partition.layout import LogRow
from floodmark.partition.read.changelog import look_up_value, read_logs, version_of

# Limits of a count, which delays the start of a node.
CHANGES_MAX: Final = 20_000
BYTES_MAX: Final = 64 * MIB


class Recount(NamedTuple):
    """The version up to which the last heartbeat counted, and the tallies above it, by log."""

    through: Version
    tallies: dict[int, list[CommitTally]]


def recount(
    engine: Engine,
    logs: Sequence[LogRow],
    node: int,
    open_logs: Set[int],
    site_id: int,
    trimmed: Version,
) -> Recount | None:
    """Count the commits above the last heartbeat of a node; None if the logs do not tell.

    `open_logs` are those of the node's partitions.
    """
    try:
        last = _last_beat(engine, node, VERSION_MAX)
        if last is None or not all(_is_accounted(engine, log, node, last.through) for log in logs):
            return None
        serving = [log for log in logs if log.id in open_logs]
        tallies: dict[int, list[CommitTally]] = {log.id: [] for log in serving}
        changes = size = 0
        for page in read_logs(engine, serving, last.through, VERSION_MAX, lambda: trimmed):
            for line in page:
                row = decode_row(version_of(line), line[1])
                if not isinstance(row, CommitRow):
                    # Another node has sealed the log meanwhile, and counted it.
                    return None
                values = _look_up_values(engine, row, version_of(line))
                tallies[line[2].id] += _count(row.keys, values, version_of(line), site_id)
                changes += len(values)
                size += sum(map(len, values))
                if changes > CHANGES_MAX or size > BYTES_MAX:
                    return None
    except (Corruption, VersionCollected):
        return None
    return Recount(last.through, tallies)


def _last_beat(engine: Engine, log: int, until: Version) -> Heartbeat | None:
    start, end = encode_log_range(log, 0, until)
    rows = engine.scan(LOG, start, end, rows_max=1, bytes_max=PAGE_BYTES_MAX, reverse=True)
    for key, stored in rows:
        row = decode_row(decode_log_key(key)[1], stored)
        return row if isinstance(row, Heartbeat) else None
    return None


def _is_accounted(engine: Engine, log: LogRow, node: int, through: Version) -> bool:
    """Whether a log, if it was sealed and is the node's, has told of all that it held above a version."""
    if log.sealed_at is None or log.sealed_at <= through:
        return True
    beat = _last_beat(engine, log.id, log.sealed_at)
    return beat is not None and (beat.node != node or beat.since == through)


def _look_up_values(engine: Engine, row: CommitRow, version: Version) -> list[bytes]:
    """All that a commit stored.  Large values stand with the data."""
    return [
        look_up_value(engine, key, version) if value is None else value
        for key, value in zip(row.keys, row.values, strict=True)
    ]


def _count(
    keys: Sequence[bytes], values: Sequence[bytes], version: Version, site_id: int
) -> Iterator[CommitTally]:
    """The sums of a commit, as the commit itself gave them."""
    if values[0][-1] & HAS_ORIGIN:
        for namespace, count, digest, own in digest_copies(keys, values, site_id):
            yield version, namespace, count, digest, own
    else:
        for namespace, count, digest in digest_changes(version, site_id, keys, values):
            yield version, namespace, count, digest, True
