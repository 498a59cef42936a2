"""The history of a range of keys at a site, for `walk_histories`."""

from collections.abc import Iterator, Mapping
from typing import Final

from floodmark.codec.ordered import NAMESPACE_BYTES
from floodmark.codec.states import decode_state
from floodmark.codec.thin import digest_record
from floodmark.codec.values import decode_value
from floodmark.divergence.histories import History, HistoryChange, part_stamps
from floodmark.host.ports import Host
from floodmark.model.change import Stamp
from floodmark.model.errors import LimitExceeded
from floodmark.model.ranges import KeyRange
from floodmark.model.stream import ChangeBatch, ChangesRequest, Way
from floodmark.model.version import Version

# A history is held in memory.
CHANGES_MAX: Final = 200_000


class HistoryTooLong(Exception):
    """A range has too many changes for memory; cut it at `middle`, a user's key."""

    def __init__(self, middle: bytes) -> None:
        super().__init__(middle)
        self.middle = middle


def read_history(
    host: Host,
    namespace_id: int,
    keys: KeyRange,
    since: Version,
    until: Version,
    *,
    changes_max: int = CHANGES_MAX,
) -> History:
    """The changes with stamps above `since` to a range of qualified keys, and the watermarks since then.

    `since` must be the same for all compared sites.  Then no earlier record has a higher stamp than the
    changes in the history, and earlier records need not be read.
    """
    request = ChangesRequest(
        keys=keys, namespace=namespace_id, since=since, until=until, heartbeats=True, partial=True
    )
    changes: list[HistoryChange] = []
    marks: list[tuple[Version, Mapping[int, Version]]] = []
    site_id = host.identity.site_id
    for batch in host.changes(request):
        # A repair may write a change that is older than the history.
        changes += [change for change in _changes_of(batch, site_id) if change.stamp.version > since]
        marks += [(beat.version, beat.watermark.get(namespace_id, {})) for beat in batch.heartbeats]
        if len(changes) > changes_max:
            raise _too_long(changes)
    return History(host.identity.site, site_id, changes, marks)


def _too_long(changes: list[HistoryChange]) -> Exception:
    keys = sorted({change.key for change in changes})
    if len(keys) > 1:
        return HistoryTooLong(keys[len(keys) // 2])
    return LimitExceeded(
        f"the history of {keys[0]!r:.60} has more than {CHANGES_MAX:,} changes, too many to compare; "
        "a shorter retention of its namespace makes it shorter"
    )


def _changes_of(batch: ChangeBatch, site_id: int) -> Iterator[HistoryChange]:
    for version, key, stored in zip(batch.versions, batch.keys, batch.values, strict=True):
        record = decode_value(stored)
        stamp = record.origin or Stamp(version, site_id)
        parts = None if record.stamps is None else part_stamps(decode_state(stored))
        # A scan and a repair give merged records as a whole, and not the fields of one write.
        exact = parts is None or (batch.way is not Way.SCAN and {stamp, *parts.values()} == {stamp})
        yield HistoryChange(version, key[NAMESPACE_BYTES:], stamp, digest_record(stored), exact, parts)
