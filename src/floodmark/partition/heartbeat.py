"""The sums of heartbeats, by which readers check that they got all changes."""

from bisect import bisect_right
from collections.abc import Collection, Iterable, Sequence
from functools import reduce
from operator import xor

from floodmark.model.change import Sums, Tally
from floodmark.model.version import Version
from floodmark.partition.commit.commit import CommitTally, CommittingPartition


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

    While something is prepared, heartbeats count only up to it, and tallies above must not pile up.  A
    heartbeat ends only before a prepared write or above all of them, so these are the only borders.
    """
    for partition in partitions:
        folded = _fold(partition.tallies, borders)
        partition.tallies.clear()
        partition.tallies.extend(sorted(folded))


def _fold(tallies: Collection[CommitTally], borders: Sequence[Version]) -> list[CommitTally]:
    """One tally for each namespace and origin between two borders, at the version of its last commit."""
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
