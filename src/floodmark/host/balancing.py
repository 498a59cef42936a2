"""Plans moves of partitions between nodes, and chooses where to split a busy partition.  Pure functions.

A plan moves one partition at a time from the node with the highest load to the one with the lowest, and only
if that reduces the difference.  So a plan ends, never makes the busiest node busier, and moves nothing if a
single hot partition is the whole load of a node: that one must be split first.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate


@dataclass(frozen=True, kw_only=True)
class Move:
    """A planned change of the owner of a partition."""

    partition: int
    source: int
    target: int


def plan_moves(
    owners: Mapping[int, int],
    loads: Mapping[int, float],
    nodes: Sequence[int],
    *,
    tolerated: float = 0.0,
    moves_max: int | None = None,
) -> list[Move]:
    """The moves that balance the load of nodes, at most `moves_max`.

    `owners` has the node of each partition, `loads` its load, and `nodes` the nodes that may own partitions.
    Partitions of other nodes are moved away first, even if that does not improve the balance.  A difference
    between the busiest and the idlest node of at most `tolerated` times the mean is tolerated.

    >>> plan_moves({1: 1, 2: 1, 3: 1}, {1: 5, 2: 3, 3: 2}, [1, 2])
    [Move(partition=1, source=1, target=2)]
    """
    if not nodes:
        return []
    now = dict(owners)
    sums = dict.fromkeys(sorted(nodes), 0.0)
    for partition, owner in owners.items():
        if owner in sums:
            sums[owner] += loads.get(partition, 0.0)
    moves: list[Move] = []
    limit = len(owners) * len(nodes) if moves_max is None else moves_max
    away = [each for each, owner in owners.items() if owner not in sums]
    for partition in sorted(away, key=lambda each: (-loads.get(each, 0.0), each)):
        if len(moves) < limit:
            _move(moves, now, sums, partition, min(sums, key=lambda node: sums[node]), loads)
    slack = tolerated * sum(sums.values()) / len(sums)
    while len(moves) < limit:
        busiest, idlest = max(sums, key=lambda node: sums[node]), min(sums, key=lambda node: sums[node])
        difference = sums[busiest] - sums[idlest]
        fitting = [
            each for each, owner in now.items() if owner == busiest and 0 < loads.get(each, 0.0) < difference
        ]
        if difference <= slack or not fitting:
            break
        # The partition whose load is closest to half of the difference.
        best = min(fitting, key=lambda each: (abs(difference / 2 - loads[each]), each))
        _move(moves, now, sums, best, idlest, loads)
    return moves


def _move(
    moves: list[Move],
    owners: dict[int, int],
    sums: dict[int, float],
    partition: int,
    target: int,
    loads: Mapping[int, float],
) -> None:
    source, load = owners[partition], loads.get(partition, 0.0)
    moves.append(Move(partition=partition, source=source, target=target))
    owners[partition] = target
    if source in sums:
        sums[source] -= load
    sums[target] += load


def halving_key(keys: Sequence[bytes]) -> bytes | None:
    """The key that divides the written keys into halves, as nearly as possible; None if all are the same key.

    >>> halving_key([b"a", b"b", b"b", b"c"]), halving_key([b"a", b"a"])
    (b'b', None)
    """
    counts = sorted(Counter(keys).items())
    if len(counts) < 2:
        return None
    before = list(accumulate(count for _, count in counts))[:-1]
    best = min(range(len(before)), key=lambda index: abs(len(keys) / 2 - before[index]))
    return counts[best + 1][0]
