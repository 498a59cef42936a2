"""Leap Frog for logs without stamps: bounds from heartbeats (Venice's VIP-2).

A record of such a log names one position: that of the write which touched it last, at the site of that write.
VIP-2 bounds the positions of other sites' earlier writes by the last heartbeat in front of the record, which
names how far every site had been consumed:

    heartbeat  {1: 3, 2: 199, 3: 4500}
    record     {       2: 200        }      is at most      {1: 3, 2: 200, 3: 4500}

If another site's write to the same key stands between the heartbeat and the record, a merged record contains
that as well, and the bound is too low: while that write is under way to the other log, lag is reported as
drift.  The state of the log right in front of the record bounds it in any case:

    heartbeat_bounds(high_watermark(heartbeat, records_between), record)

One process must write such a log serially, in the order in which it consumes.  Floodmark's own watermarks
bound from below, because a change is announced after it is applied: sites are compared by stamps
(`rules.py`), which are exact.  The same verdict compares records with whole vectors, without heartbeats.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import msgspec

from floodmark.divergence.rules import Verdict, covers
from floodmark.model.version import Version


@dataclass(frozen=True)
class BoundedVector:
    """The positions of the writes in a record: at most `upper`, and exactly that for the site `exact`."""

    upper: Mapping[int, Version]
    exact: int

    def __str__(self) -> str:
        """As the document writes it, in the order of the sites' ids."""
        entries = [
            f"{version}" if site == self.exact else f"<{version}"
            for site, version in sorted(self.upper.items())
        ]
        return f"{{{', '.join(entries)}}}"


class BoundedSide(msgspec.Struct, frozen=True):
    """A key in one of two logs.

    `vector` holds the positions of the writes in its last record, or their bounds, and `digest` stands for
    the value;  None without a record.  `mark` is how far the log has consumed each site.
    """

    digest: int | None
    vector: Mapping[int, Version]
    mark: Mapping[int, Version]


def heartbeat_bounds(heartbeat: Mapping[int, Version], record: Mapping[int, Version]) -> BoundedVector:
    """The bounds of a record with one component, by the last heartbeat before it.

    For merged records, give the high watermark through all records in between in place of the heartbeat.

    >>> bounds = heartbeat_bounds({1: 3, 2: 199, 3: 4500}, {2: 200})
    >>> print(bounds)
    {<3, 200, <4500}
    >>> print(heartbeat_bounds(high_watermark({1: 3, 2: 199}, [{2: 200}]), {1: 5}))
    {5, <200}
    """
    (site,) = record
    return BoundedVector({**heartbeat, **record}, site)


def high_watermark(
    heartbeat: Mapping[int, Version], records: Iterable[Mapping[int, Version]] = ()
) -> dict[int, Version]:
    """The position of a log after a heartbeat and some records.

    >>> high_watermark({1: 3, 2: 199, 3: 4500}, [{2: 200}, {2: 201}, {1: 5}])
    {1: 5, 2: 201, 3: 4500}
    """
    mark = dict(heartbeat)
    for record in records:
        for site, version in record.items():
            mark[site] = max(version, mark.get(site, 0))
    return mark


def verdict_bounded(left: BoundedSide, right: BoundedSide) -> Verdict:
    """Whether two logs have drifted apart in a key, as far as bounds can tell.

    Drift may be found later than by exact vectors, and not at all if it is overwritten between heartbeats.  A
    key without a record counts as never written: the logs must have kept their tombstones.

    >>> mark, other = {1: 20, 2: 300, 3: 5000}, {1: 5, 2: 201, 3: 5001}
    >>> left = BoundedSide(0xADA, heartbeat_bounds({1: 3, 2: 199, 3: 4500}, {2: 200}).upper, other)
    >>> right = BoundedSide(0xA1A, heartbeat_bounds({1: 4, 2: 199, 3: 4900}, {2: 200}).upper, mark)
    >>> verdict_bounded(left, right).value
    'value_mismatch'
    """
    if left.digest == right.digest:
        return Verdict.AGREE
    if left.digest is None:
        return Verdict.MISSING_LEFT if covers(left.mark, right.vector) else Verdict.LAG
    if right.digest is None:
        return Verdict.MISSING_RIGHT if covers(right.mark, left.vector) else Verdict.LAG
    both = covers(left.mark, right.vector) and covers(right.mark, left.vector)
    return Verdict.VALUE_MISMATCH if both else Verdict.LAG
