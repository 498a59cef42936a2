"""Reading the change logs of a node in commit order."""

from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from heapq import heappop, heappush
from itertools import accumulate, chain
from typing import Final, TypeAlias

from floodmark.codec.changelog import LOG_ID_BYTES, encode_log_range
from floodmark.codec.ordered import NAMESPACE_BYTES, VERSION_BYTES, encode_prefix, encode_version
from floodmark.engine import Engine
from floodmark.model.errors import Corruption, VersionCollected
from floodmark.model.limits import PAGE_BYTES_MAX, PAGE_ROWS_MAX
from floodmark.model.ranges import after
from floodmark.model.version import Version, moment_of
from floodmark.partition.families import DATA, LOG
from floodmark.partition.layout import LogRow

# One row of a change log, not decoded: its order, the row, and its log.  The order is version, rank of the
# log and chunk.  Logs rank by their first keys, so that a commit to several logs is in order of keys.
LogLine: TypeAlias = tuple[bytes, bytes, LogRow]


def version_of(line: LogLine) -> Version:
    """The version of the commit or heartbeat in a line."""
    return int.from_bytes(line[0][:VERSION_BYTES], "big")


_NO_LINES: Final[list[LogLine]] = []
_RANK_BYTES: Final = 4


def read_logs(
    engine: Engine,
    logs: Sequence[LogRow],
    since: Version,
    until: Version,
    trimmed: Callable[[], Version],
) -> Iterator[list[LogLine]]:
    """The lines in `(since, until]` of all logs together, in order of versions, page by page.

    A child log begins above the version at which its parents were sealed, so in order of versions
    the lines of the parents come first.
    """
    require_untrimmed(since, trimmed())
    relevant = [
        log for log in logs if log.opened_at < until and (log.sealed_at is None or log.sealed_at > since)
    ]
    if len(relevant) == 1:
        return _read_log(engine, relevant[0], since, until, trimmed, PAGE_BYTES_MAX, b"")
    return _Merge(engine, relevant, since, until, trimmed).pages()


class _LogStream:
    """A log that is being read: its present page, and how much of it is taken."""

    __slots__ = ("page", "pages", "taken")

    def __init__(self, pages: Iterator[list[LogLine]]) -> None:
        self.pages = pages
        self.page = next(pages, _NO_LINES)
        self.taken = 0

    def take(self, bound: bytes) -> list[LogLine]:
        """The lines up to a bound.  Reads the next page once the last line of this one is taken."""
        end = bisect_right(self.page, bound, self.taken, key=_order)
        lines = self.page[self.taken : end]
        self.taken = end
        if end == len(self.page):
            self.page, self.taken = next(self.pages, _NO_LINES), 0
        return lines


class _Merge:
    """Merges many logs into one stream.

    The lowest last line among the present pages is a bound: up to it, the lines of all open logs have been
    read.  A log is opened once the bound passes the version at which the log begins, so that only logs which
    existed at the same time are open together.
    """

    def __init__(
        self,
        engine: Engine,
        logs: Sequence[LogRow],
        since: Version,
        until: Version,
        trimmed: Callable[[], Version],
    ) -> None:
        # All pages together stay near one page: a site may have many logs.
        bytes_max = PAGE_BYTES_MAX // _width(logs)
        ranked = sorted(logs, key=lambda log: (log.start, log.id))
        ranks = {log.id: rank.to_bytes(_RANK_BYTES, "big") for rank, log in enumerate(ranked)}

        def open_log(log: LogRow) -> _LogStream:
            return _LogStream(_read_log(engine, log, since, until, trimmed, bytes_max, ranks[log.id]))

        self._open_log = open_log
        # The next to be opened comes last.
        self._unopened = sorted(logs, key=lambda log: log.opened_at, reverse=True)
        # Open logs by the first line that is not taken, and by the last of their page.
        self._by_first: list[tuple[bytes, int, _LogStream]] = []
        self._by_last: list[tuple[bytes, int, _LogStream]] = []

    def pages(self) -> Iterator[list[LogLine]]:
        while (bound := self._find_bound()) is not None:
            parts: list[list[LogLine]] = []
            while self._by_first and self._by_first[0][0] <= bound:
                _, log, stream = heappop(self._by_first)
                page = stream.page
                parts.append(stream.take(bound))
                if stream.page:
                    heappush(self._by_first, (stream.page[stream.taken][0], log, stream))
                    if stream.page is not page:
                        heappush(self._by_last, (stream.page[-1][0], log, stream))
            yield sorted(chain.from_iterable(parts), key=_order)

    def _find_bound(self) -> bytes | None:
        """Open the logs that begin below the bound; returns the bound, or None at the end."""
        while True:
            while self._by_last and not self._is_current(*self._by_last[0]):
                heappop(self._by_last)
            bound = self._by_last[0][0] if self._by_last else None
            if not self._unopened:
                return bound
            begins = self._unopened[-1].opened_at
            if bound is not None and int.from_bytes(bound[:VERSION_BYTES], "big") <= begins:
                return bound
            self._open_next()

    def _open_next(self) -> None:
        log = self._unopened.pop()
        stream = self._open_log(log)
        if stream.page:
            heappush(self._by_first, (stream.page[0][0], log.id, stream))
            heappush(self._by_last, (stream.page[-1][0], log.id, stream))

    def _is_current(self, last: bytes, _log: int, stream: _LogStream) -> bool:
        return bool(stream.page) and stream.page[-1][0] == last


def _width(logs: Sequence[LogRow]) -> int:
    """The largest number of the logs that were open at the same version."""
    opened = [(log.opened_at, 1) for log in logs]
    sealed = [(log.sealed_at, -1) for log in logs if log.sealed_at is not None]
    # At the same version, logs are sealed before their children are opened.
    return max(accumulate(step for _, step in sorted(opened + sealed)), default=1)


def _order(line: LogLine) -> bytes:
    return line[0]


def _read_log(
    engine: Engine,
    log: LogRow,
    since: Version,
    until: Version,
    trimmed: Callable[[], Version],
    bytes_max: int,
    rank: bytes,
) -> Iterator[list[LogLine]]:
    chunk = LOG_ID_BYTES + VERSION_BYTES
    start, end = encode_log_range(log.id, since, until)
    position = since
    while page := engine.scan(LOG, start, end, rows_max=PAGE_ROWS_MAX, bytes_max=bytes_max):
        require_untrimmed(position, trimmed())
        if rank:
            lines = [(key[LOG_ID_BYTES:chunk] + rank + key[chunk:], row, log) for key, row in page]
        else:
            lines = [(key[LOG_ID_BYTES:], row, log) for key, row in page]
        yield lines
        # More chunks of the last commit may follow: the reader has everything before it.
        position = version_of(lines[-1]) - 1
        start = after(page[-1][0])
    # Rows may have been trimmed between two pages, and an empty page would hide it.
    require_untrimmed(position, trimmed())


def require_untrimmed(since: Version, trimmed: Version) -> None:
    """Raise VersionCollected if changes above `since` were trimmed: a feed never skips changes silently."""
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
