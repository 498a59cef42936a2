"""Leap Frog without stamps: records of which only the last write is known, and heartbeats (Venice's VIP-2).

A record of such a log names one position, that of the write which touched it last, at the site where it was
written.  What other sites wrote to it before is not known.  VIP-2 bounds it by the last heartbeat that stands
in front of the record, which names how far every site had been consumed:

    heartbeat  {1: 3, 2: 199, 3: 4500}
    record     {       2: 200        }      is at most      {1: 3, 2: 200, 3: 4500}

This holds for what was consumed before the heartbeat.  If another site's write to the same key stands between
the heartbeat and the record, a merged record is made of that as well, and the bound is too low: where that
write is still under way to the other log, the lag is reported as drift.  Where the last write is the whole
value there is no such report, for its position is known.  What a log had consumed right in front of the
record bounds it in any case, and can be given in the heartbeat's place:

    heartbeat_bounds(high_watermark(heartbeat, records_between), record)

This needs a log that one process writes serially, in the order in which it consumes: then a heartbeat bounds
what stands before it *from above*.  Our own watermarks bound it from below, for a change is applied first and
announced later; Floodmark's sites are compared by stamps (`rules.py`), which are exact.  Records with whole
vectors, as Venice has them today, are compared by the same verdict: they need no heartbeats.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import msgspec

from floodmark.divergence.rules import Verdict, covers
from floodmark.model.version import Version


@dataclass(frozen=True)
class BoundedVector:
    """The positions that a record can be made of: at most `upper`, and exactly that for one site."""

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
    """One of two logs, as far as a key is concerned.

    `vector` holds the positions that its last record is made of, or their bounds, and `digest` stands for
    its value; None if the log has no record of the key.  `mark` is how far the log has consumed each site.
    """

    digest: int | None
    vector: Mapping[int, Version]
    mark: Mapping[int, Version]


def heartbeat_bounds(heartbeat: Mapping[int, Version], record: Mapping[int, Version]) -> BoundedVector:
    """What a record with one component can be made of, by the last heartbeat before it.

    In place of the heartbeat may stand the high watermark through all records of the log that lie between;
    it has to if records are merged, and none that is only late may be taken for drift.

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
    """How far a log has come that was read from a heartbeat through some records.

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

    What is found here may be found later than it could be by exact vectors, for a bound may lie above the
    mark where the true position does not; and what was overwritten between two heartbeats is not found.  A
    bound that is too low makes drift of lag (see above).  A key without a record is taken for one that was
    never written: the logs must have kept their tombstones.

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
