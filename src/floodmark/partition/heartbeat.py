"""Heartbeats: a sign of life each second, and an account by which readers check what they have got."""

from collections.abc import Iterable

from floodmark.model.change import Sums, Tally
from floodmark.model.version import Version
from floodmark.partition.commit import CommitTally
from floodmark.partition.partition import LocalPartition


def drain_sums(partitions: Iterable[LocalPartition], through: Version) -> dict[int, Sums]:
    """Take the tallies at or below `through` out of the partitions, summed by namespace."""
    sums: dict[int, Sums] = {}
    for partition in partitions:
        tallies = partition.tallies
        while tallies and tallies[0][0] <= through:
            _add(sums, tallies.popleft())
    return sums


def _add(sums: dict[int, Sums], entry: CommitTally) -> None:
    _, encoded, changes, digest, own = entry
    namespace = int.from_bytes(encoded, "big")
    tally = Tally(changes, digest)
    sums[namespace] = sums.get(namespace, Sums()).plus(Sums(tally if own else Tally(), tally))
