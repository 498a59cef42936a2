"""The changes of a site in commit order, read from its change logs."""

from collections.abc import Callable, Iterator
from typing import Final

from floodmark.codec.changelog import CommitRow
from floodmark.codec.ordered import NAMESPACE_BYTES
from floodmark.model.change import Change, ChangeType, Stamp
from floodmark.model.ranges import KeyRange
from floodmark.model.version import Version
from floodmark.partition import LogEntry, Node, decode_change, look_up_value, require_untrimmed
from floodmark.site.paging import Pages, rows_of
from floodmark.site.safepoints import SafePoints

FOLLOW_SECONDS: Final = 0.2


class ChangeReader:
    """Reads changes up to the resolved version, and waits for more if asked to."""

    def __init__(
        self,
        node: Node,
        safe_points: SafePoints,
        names: Callable[[], dict[int, str]],
        site_id: int,
    ) -> None:
        self._node = node
        self._safe_points = safe_points
        self._names = names
        self._site_id = site_id

    def read(
        self,
        keys: KeyRange,
        since: Version,
        until: Version | None,
        *,
        follow: bool,
        namespace: int | None,
    ) -> Iterator[Change]:
        """The changes of qualified keys in `(since, until]`.

        Without `until` it ends at the present, or never if it follows.
        """
        return rows_of(self._pages(keys, since, until, follow=follow, namespace=namespace))

    def _pages(
        self,
        keys: KeyRange,
        since: Version,
        until: Version | None,
        *,
        follow: bool,
        namespace: int | None,
    ) -> Pages[Change]:
        with self._safe_points.reading(since, namespace) as advance:
            require_untrimmed(since, self._node.retention.trimmed_version())
            yield []
            position = since
            while until is None or position < until:
                self._node.require_open()
                self._node.committer.sync()
                publications = self._node.committer.publications
                resolved = self._node.resolved_version()
                target = resolved if until is None else min(until, resolved)
                yield from self._between(keys, position, target)
                position = max(position, target)
                advance(position)
                if not follow:
                    return
                if target == resolved:
                    self._node.committer.wait_published(publications, FOLLOW_SECONDS)

    def _between(self, keys: KeyRange, since: Version, until: Version) -> Iterator[list[Change]]:
        if since >= until:
            return
        names = self._names()
        for entry in self._node.read_changes(since, until, keys):
            if isinstance(entry.row, CommitRow):
                yield list(self._changes(entry, entry.row, keys, names))

    def _changes(
        self, entry: LogEntry, row: CommitRow, keys: KeyRange, names: dict[int, str]
    ) -> Iterator[Change]:
        assert entry.partition is not None
        for key, value in zip(row.keys, row.values, strict=True):
            namespace = int.from_bytes(key[:NAMESPACE_BYTES], "big")
            if not keys.contains(key) or namespace not in names:
                continue
            stored = look_up_value(self._node.engine, key, entry.version) if value is None else value
            record = decode_change(key, entry.version, stored)
            yield Change(
                namespace=names[namespace],
                key=key[NAMESPACE_BYTES:],
                value=None if record.deleted else record.value,
                type=ChangeType.DELETE if record.deleted else ChangeType.UPSERT,
                version=entry.version,
                stamp=record.origin or Stamp(entry.version, self._site_id),
                partition=entry.partition,
                expires_at=record.expires_at,
            )
