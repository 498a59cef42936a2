"""The sums of heartbeats, by which readers check that they got all changes.

The heartbeats of nodes that share an engine end at common versions, `SPAN` apart, so that they can be added
(`summing.py`).
"""

from bisect import bisect_right
from collections.abc import Collection, Iterable, Sequence
from functools import reduce
from operator import xor
from typing import Final

from floodmark.model.change import Sums, Tally
from floodmark.model.version import COUNTER_BITS, Version
from floodmark.partition.commit.commit import CommitTally, CommittingPartition

# 1,024 ms.  Nodes that share an engine mint no multiple of it.
SPAN: Final = 1_024 << COUNTER_BITS


def align(version: Version) -> Version:
    """The highest version at or below `version` at which heartbeats of several nodes may end.

    >>> align(3 * SPAN + 5) == align(3 * SPAN) == 3 * SPAN
    True
    """
    return version - version % SPAN


def drain_sums(partitions: Iterable[CommittingPartition], through: Version) -> dict[int, Sums]:
    """Take the tallies at or below `through` out of the partitions, summed by namespace."""
    sums: dict[int, Sums] = {}
    for partition in partitions:
        tallies = partition.tallies
        drained: list[CommitTally] = []
        while tallies and tallies[0][0] <= through:
            drained.append(tallies.popleft())
        add_tallies(sums, drained)
    return sums


def add_tallies(sums: dict[int, Sums], tallies: Collection[CommitTally]) -> None:
    """Add tallies to the sums of their namespaces."""
    for _, encoded, changes, digest, own in _fold(tallies, ()):
        namespace, tally = int.from_bytes(encoded, "big"), Tally(changes, digest)
        sums[namespace] = sums.get(namespace, Sums()).plus(Sums(tally if own else Tally(), tally))


def fold_tallies(partitions: Iterable[CommittingPartition], borders: Sequence[Version]) -> None:
    """Fold tallies between borders, which are the ordered versions of prepared writes.

    Heartbeats count only up to the first prepared write, and tallies above it must not pile up.  A heartbeat
    ends before a prepared write, above all of them, or at a multiple of `SPAN`: tallies are folded between
    these versions.
    """
    for partition in partitions:
        spans = {align(version) for version, *_ in partition.tallies}
        # No tally is below the first.
        folded = _fold(partition.tallies, sorted((*borders, *sorted(spans)[1:])))
        partition.tallies.clear()
        partition.tallies.extend(sorted(folded))


def _fold(tallies: Collection[CommitTally], borders: Sequence[Version]) -> list[CommitTally]:
    """For each namespace and origin between two borders, one tally at the version of its last commit."""
    if tallies and not borders:
        # The usual case, in which all tallies are of one namespace and origin, is on the path of commits.
        versions, namespaces, changes, digests, owns = zip(*tallies, strict=True)
        if len({*namespaces}) == len({*owns}) == 1:
            return [(versions[-1], namespaces[0], sum(changes), reduce(xor, digests), owns[0])]
    folded: dict[tuple[int, bytes, bool], CommitTally] = {}
    for version, namespace, count, digest, own in tallies:
        kind = bisect_right(borders, version), namespace, own
        _, _, counted, standing, _ = folded.get(kind, (0, b"", 0, 0, own))
        folded[kind] = version, namespace, counted + count, standing ^ digest, own
    return list(folded.values())
