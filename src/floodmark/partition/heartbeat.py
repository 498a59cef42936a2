"""Heartbeats: a sign of life each second, and an account by which readers check what they have got."""

from bisect import bisect_right
from collections.abc import Iterable, Sequence

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


def fold_tallies(partitions: Iterable[LocalPartition], borders: Sequence[Version]) -> None:
    """Put tallies together between versions that a heartbeat may have to go through, which are in order.

    While something is prepared, heartbeats go through less than is written, and the tallies of what lies
    above must not pile up.  They end only before what is prepared now, or behind all of them.
    """
    for partition in partitions:
        folded: dict[tuple[int, bytes, bool], CommitTally] = {}
        for version, namespace, changes, digest, own in partition.tallies:
            kind = bisect_right(borders, version), namespace, own
            _, _, counted, standing, _ = folded.get(kind, (0, b"", 0, 0, own))
            folded[kind] = version, namespace, counted + changes, standing ^ digest, own
        partition.tallies.clear()
        partition.tallies.extend(sorted(folded.values()))


def _add(sums: dict[int, Sums], entry: CommitTally) -> None:
    _, encoded, changes, digest, own = entry
    namespace = int.from_bytes(encoded, "big")
    tally = Tally(changes, digest)
    sums[namespace] = sums.get(namespace, Sums()).plus(Sums(tally if own else Tally(), tally))
