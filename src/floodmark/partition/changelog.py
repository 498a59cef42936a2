"""Reading the change logs of a node in commit order."""

from collections.abc import Callable, Iterator, Sequence
from heapq import merge
from typing import NamedTuple

from floodmark.codec.changelog import CommitRow, decode_log_key, decode_row, encode_log_range
from floodmark.codec.ordered import NAMESPACE_BYTES, encode_prefix, encode_version
from floodmark.engine import Engine
from floodmark.model.change import Heartbeat
from floodmark.model.errors import Corruption, VersionCollected
from floodmark.model.limits import PAGE_BYTES_MAX, PAGE_ROWS_MAX
from floodmark.model.ranges import after
from floodmark.model.version import Version, moment_of
from floodmark.partition.families import DATA, LOG
from floodmark.partition.layout import LogRow


class LogEntry(NamedTuple):
    """One row of a change log."""

    version: Version
    chunk: int
    log: int
    partition: int | None
    row: CommitRow | Heartbeat


def read_logs(
    engine: Engine,
    logs: Sequence[LogRow],
    since: Version,
    until: Version,
    trimmed: Callable[[], Version],
) -> Iterator[LogEntry]:
    """The rows in `(since, until]`, in order of versions over all logs.

    A child log begins above the version at which its parents were sealed, so merging by version
    finishes parents first.
    """
    require_untrimmed(since, trimmed())
    relevant = [
        log for log in logs if log.opened_at < until and (log.sealed_at is None or log.sealed_at > since)
    ]
    # All pages together stay near one page: a site may have many logs.
    bytes_max = PAGE_BYTES_MAX // max(1, len(relevant))
    streams = [_read_log(engine, log, since, until, trimmed, bytes_max) for log in relevant]
    if len(streams) == 1:
        return streams[0]
    return merge(*streams, key=_order)


def _order(entry: LogEntry) -> tuple[Version, int]:
    return entry.version, entry.chunk


def _read_log(
    engine: Engine,
    log: LogRow,
    since: Version,
    until: Version,
    trimmed: Callable[[], Version],
    bytes_max: int,
) -> Iterator[LogEntry]:
    start, end = encode_log_range(log.id, since, until)
    position = since
    while page := engine.scan(LOG, start, end, rows_max=PAGE_ROWS_MAX, bytes_max=bytes_max):
        require_untrimmed(position, trimmed())
        for key, row in page:
            _, version, chunk = decode_log_key(key)
            yield LogEntry(version, chunk, log.id, log.partition, decode_row(version, row))
        position = version
        start = after(page[-1][0])
    # Rows may have gone while the reader was away, and an empty page would hide it.
    require_untrimmed(position, trimmed())


def require_untrimmed(since: Version, trimmed: Version) -> None:
    """Refuse to read from a version whose changes are partly gone: a feed never skips silently."""
    if since < trimmed:
        raise VersionCollected(
            f"changes after version {since} are no longer complete: the change log was trimmed up to "
            f"{trimmed} ({moment_of(trimmed).isoformat()}). Read a snapshot with `scan(at=...)` at "
            "that version or later, and follow the changes from there",
            version=since,
            oldest=trimmed,
        )


def look_up_value(engine: Engine, key: bytes, version: Version) -> bytes:
    """The stored value of a change whose row names only the key, because the value is large."""
    stored = engine.get(DATA, encode_prefix(key) + encode_version(version))
    if stored is None:
        raise Corruption(
            f"the change log names {key[NAMESPACE_BYTES:]!r} at version {version}, but the data is gone. "
            "Restore the site from a backup",
            key=key[NAMESPACE_BYTES:],
            version=version,
        )
    return stored
