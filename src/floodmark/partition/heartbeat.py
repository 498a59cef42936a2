"""Heartbeats: a sign of life each second, and an account by which readers check what they have got."""

from bisect import bisect_right
from collections.abc import Collection, Iterable, Sequence
from functools import reduce
from operator import xor

from floodmark.model.change import Sums, Tally
from floodmark.model.version import Version
from floodmark.partition.commit.commit import CommitTally, Writer


def drain_sums(partitions: Iterable[Writer], through: Version) -> dict[int, Sums]:
    """Take the tallies at or below `through` out of the partitions, summed by namespace."""
    sums: dict[int, Sums] = {}
    for partition in partitions:
        tallies = partition.tallies
        drained: list[CommitTally] = []
        while tallies and tallies[0][0] <= through:
            drained.append(tallies.popleft())
        for _, encoded, changes, digest, own in _fold(drained, ()):
            namespace, tally = int.from_bytes(encoded, "big"), Tally(changes, digest)
            sums[namespace] = sums.get(namespace, Sums()).plus(Sums(tally if own else Tally(), tally))
    return sums


def fold_tallies(partitions: Iterable[Writer], borders: Sequence[Version]) -> None:
    """Put tallies together between versions that a heartbeat may have to go through, which are in order.

    While something is prepared, heartbeats go through less than is written, and without a background there
    may be none at all: the tallies of what lies above must not pile up.  A heartbeat ends only before what is
    prepared now, or behind all of them.
    """
    for partition in partitions:
        folded = _fold(partition.tallies, borders)
        partition.tallies.clear()
        partition.tallies.extend(sorted(folded))


def _fold(tallies: Collection[CommitTally], borders: Sequence[Version]) -> list[CommitTally]:
    """One tally for each namespace and origin between two borders, at the version of its last commit."""
    if tallies and not borders:
        # Most often they are all of one kind, and every commit pays for its share of this.
        versions, namespaces, changes, digests, owns = zip(*tallies, strict=True)
        if len({*namespaces}) == len({*owns}) == 1:
            return [(versions[-1], namespaces[0], sum(changes), reduce(xor, digests), owns[0])]
    folded: dict[tuple[int, bytes, bool], CommitTally] = {}
    for version, namespace, count, digest, own in tallies:
        kind = bisect_right(borders, version), namespace, own
        _, _, counted, standing, _ = folded.get(kind, (0, b"", 0, 0, own))
        folded[kind] = version, namespace, counted + count, standing ^ digest, own
    return list(folded.values())
