"""Counts the changes since the last heartbeat before a restart, from the change logs.

Commits add to the sums of the next heartbeat in memory, which a restart loses.  The change logs still have
these commits, usually those of one second.  If the logs were trimmed, or there are very many commits, the
interval stays unchecked, and its heartbeat says so.

A node that takes over from a dead one counts in the same way what the dead node's heartbeats lack.
"""

from collections.abc import Iterable, Iterator, Sequence, Set
from typing import Final, NamedTuple

from floodmark.codec.changelog import CommitRow, decode_log_key, decode_row, encode_log_range
from floodmark.codec.digest import digest_changes
from floodmark.codec.stamps import digest_copies
from floodmark.codec.values import HAS_ORIGIN
from floodmark.engine import Engine
from floodmark.model.change import Heartbeat, Sums
from floodmark.model.errors import Corruption, VersionCollected
from floodmark.model.limits import MIB, PAGE_BYTES_MAX
from floodmark.model.version import VERSION_MAX, Version
from floodmark.partition.commit.commit import CommitTally
from floodmark.partition.families import LOG
from floodmark.partition.heartbeat import add_tallies
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
    """Count the commits above the last heartbeat of a node; None if the logs do not show them all.

    `open_logs` are those of the node's partitions.  A node that shares its engine and never wrote a heartbeat
    counts from the version at which its first log was opened.
    """
    try:
        last = last_beat(engine, node)
        if last is not None:
            through = last.through
        elif node:
            own = {node, *open_logs}
            through = min((log.opened_at for log in logs if log.id in own), default=0)
        else:
            return None
        if not all(_is_accounted(engine, log, node, through) for log in logs):
            return None
    except Corruption:
        return None
    serving = [log for log in logs if log.id in open_logs]
    tallies = _count_logs(engine, serving, through, site_id, trimmed)
    return None if tallies is None else Recount(through, tallies)


def end_log(log: LogRow, counted: tuple[int, Version], tallies: Iterable[CommitTally] | None) -> Heartbeat:
    """The heartbeat that ends a log for the account of the node that has counted it up to a version.

    `tallies` are those of the log's changes above that version; None if they are unknown.  The caller sets
    the heartbeat's version and time.
    """
    node, since = counted
    sums: dict[int, Sums] = {}
    add_tallies(sums, list(tallies or ()))
    return Heartbeat(
        version=0,
        node=node,
        wall_ms=0,
        since=0 if tallies is None else since,
        through=0,
        watermark={},
        sums=sums,
        log=log.id,
    )


def count_log(
    engine: Engine, log: LogRow, since: Version, site_id: int, trimmed: Version
) -> list[CommitTally] | None:
    """Count the commits of a log above a version; None if the log lacks some, or the version is 0."""
    tallies = _count_logs(engine, [log], since, site_id, trimmed) if since else None
    return None if tallies is None else tallies[log.id]


def _count_logs(
    engine: Engine, logs: Sequence[LogRow], since: Version, site_id: int, trimmed: Version
) -> dict[int, list[CommitTally]] | None:
    tallies: dict[int, list[CommitTally]] = {log.id: [] for log in logs}
    changes = size = 0
    try:
        for page in read_logs(engine, logs, since, VERSION_MAX, lambda: trimmed):
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
    return tallies


def last_beat(engine: Engine, log: int, until: Version = VERSION_MAX) -> Heartbeat | None:
    """The last row of a log up to a version, if it is a heartbeat."""
    start, end = encode_log_range(log, 0, until)
    rows = engine.scan(LOG, start, end, rows_max=1, bytes_max=PAGE_BYTES_MAX, reverse=True)
    for key, stored in rows:
        row = decode_row(decode_log_key(key)[1], stored)
        return row if isinstance(row, Heartbeat) else None
    return None


def _is_accounted(engine: Engine, log: LogRow, node: int, through: Version) -> bool:
    """Whether the seal of a log, if the node's and above a version, has counted all changes above that."""
    if log.sealed_at is None or log.sealed_at <= through:
        return True
    beat = last_beat(engine, log.id, log.sealed_at)
    return beat is not None and (beat.node != node or 0 < beat.since <= through)


def _look_up_values(engine: Engine, row: CommitRow, version: Version) -> list[bytes]:
    """The values of a commit; large ones, which the log lacks, are read from the data."""
    return [
        look_up_value(engine, key, version) if value is None else value
        for key, value in zip(row.keys, row.values, strict=True)
    ]


def _count(
    keys: Sequence[bytes], values: Sequence[bytes], version: Version, site_id: int
) -> Iterator[CommitTally]:
    """The tallies of a commit, equal to those that the commit itself has added."""
    if values[0][-1] & HAS_ORIGIN:
        for namespace, count, digest, own in digest_copies(keys, values, site_id):
            yield version, namespace, count, digest, own
    else:
        for namespace, count, digest in digest_changes(version, site_id, keys, values):
            yield version, namespace, count, digest, True
