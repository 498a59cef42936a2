"""A checker that a history of transactions is serializable, in an order that respects real time.

A history is a list of `Observed` transactions: what each read, what it wrote, when it began and when it was
known to have ended.  Every written value is unique, so a value that was read identifies its writer, and
nothing is deleted.  For each key the store returns the order of the values that it has held.  The graph of
dependencies then has these edges:

- ww: the writer of a value, to the writer of the next value of the key;
- wr: the writer of a value, to each transaction that read it;
- rw: a transaction that read a value, to the writer of the next value of the key;
- rt: a transaction that ended, to each that began later;
- so: a transaction, to a later one of the same client that names it.

The history is strictly serializable if and only if the graph has no cycle, given that no transaction read
what was never committed.  A range that was read is a read of every key in it, of absent ones too: so a
phantom is an rw edge like others.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from graphlib import CycleError, TopologicalSorter
from itertools import pairwise
from math import inf
from typing import Final

from floodmark.model.ranges import KeyRange

EVER: Final = -inf


@dataclass(frozen=True)
class Observed:
    """A transaction as its client saw it.

    `ended` is None if the client never learned the outcome: then its writes count if the store has them.
    Reads have None for an absent key.  An aborted transaction may be listed with its reads only.  A
    transaction that is not ordered by real time began at `EVER`; it still follows those whose names are in
    `after`.
    """

    name: str
    began: float
    ended: float | None
    reads: Mapping[bytes, bytes | None] = field(default_factory=dict)
    ranges: Sequence[tuple[KeyRange, Mapping[bytes, bytes]]] = ()
    writes: Mapping[bytes, bytes] = field(default_factory=dict)
    after: Sequence[str] = ()

    def __str__(self) -> str:
        return self.name


class NotSerializable(AssertionError):
    """No order of the transactions explains what they read and wrote."""


def check_serializable(
    history: Sequence[Observed], orders: Mapping[bytes, Sequence[bytes]]
) -> list[Observed]:
    """An order that explains a history; raises NotSerializable if there is none.

    `orders` has, for each key, the values that the store has held, the oldest first.

    >>> first = Observed("first", 0, 1, writes={b"a": b"1"})
    >>> later = Observed("later", 2, 3, reads={b"a": None})
    >>> [str(each) for each in check_serializable([first], {b"a": [b"1"]})]
    ['first']
    >>> check_serializable([first, later], {b"a": [b"1"]})
    Traceback (most recent call last):
    floodmark.testing.serializability.NotSerializable: a cycle: first -rt-> later -rw-> first
    """
    return _Graph(history, orders).order()


class _Graph:
    """The dependencies of a history."""

    def __init__(self, history: Sequence[Observed], orders: Mapping[bytes, Sequence[bytes]]) -> None:
        self._history = {each.name: each for each in history}
        if len(self._history) < len(history):
            raise ValueError("two transactions of a history have one name")
        self._orders = orders
        self._places = {
            key: {value: place for place, value in enumerate(values)} for key, values in orders.items()
        }
        # For each transaction, its predecessors, each with the kind of the edge.
        self._before: dict[str, dict[str, str]] = {each.name: {} for each in history}
        self._writers = self._find_writers()
        for key, values in orders.items():
            self._add_writes(key, values)
        for each in history:
            self._add_reads(each)
            for name in each.after:
                self._add(name, each.name, "so")
        self._add_times()

    def order(self) -> list[Observed]:
        """The transactions in an order that respects all edges."""
        try:
            names = list(TopologicalSorter(self._before).static_order())
        except CycleError as error:
            # Each transaction of the cycle precedes the next one, and the last one is the first.
            raise NotSerializable(f"a cycle: {self._tell(error.args[1])}") from None
        return [self._history[name] for name in names if name in self._history]

    def _find_writers(self) -> dict[tuple[bytes, bytes], str]:
        """The transaction that wrote each value."""
        writers: dict[tuple[bytes, bytes], str] = {}
        places = self._places
        for each in self._history.values():
            for key, value in each.writes.items():
                if (key, value) in writers:
                    raise ValueError(f"two transactions wrote {value!r} to {key!r}")
                if value in places.get(key, ()):
                    writers[key, value] = each.name
                elif each.ended is not None:
                    raise NotSerializable(f"{each} has ended, and its write to {key!r} is lost")
        return writers

    def _add_writes(self, key: bytes, values: Sequence[bytes]) -> None:
        written = [self._writers.get((key, value)) for value in values]
        for one, other in pairwise(written):
            self._add(one, other, "ww")

    def _add_reads(self, reader: Observed) -> None:
        read = dict(reader.reads)
        for keys, found in reader.ranges:
            read.update({key: found.get(key) for key in {*self._orders, *found} if keys.contains(key)})
        for key, value in read.items():
            values, places = self._orders.get(key, ()), self._places.get(key, {})
            if value is not None and value not in places:
                raise NotSerializable(f"{reader} read {value!r} of {key!r}, which was never committed")
            following = 0
            if value is not None:
                self._add(self._writers.get((key, value)), reader.name, "wr")
                following = places[value] + 1
            if following < len(values):
                self._add(reader.name, self._writers.get((key, values[following])), "rw")

    def _add_times(self) -> None:
        """Add the edges of real time, by a chain of moments instead of an edge for each pair."""
        moments: list[tuple[float, bool, str]] = []
        for each in self._history.values():
            moments.append((each.began, False, each.name))
            if each.ended is not None:
                moments.append((each.ended, True, each.name))
        last: str | None = None
        for number, (_, is_end, name) in enumerate(sorted(moments)):
            if not is_end:
                self._add(last, name, "rt")
                continue
            moment = f"moment {number}"
            self._before[moment] = {name: "rt"}
            self._add(last, moment, "rt")
            last = moment

    def _add(self, one: str | None, other: str | None, why: str) -> None:
        """Add an edge; none if one side is None, for a value that no transaction of the history wrote."""
        if one is not None and other is not None and one != other:
            self._before[other].setdefault(one, why)

    def _tell(self, cycle: Sequence[str]) -> str:
        """A cycle without the moments in it, from the transaction whose name comes first."""
        edges = [
            (name, self._before[after][name]) for name, after in pairwise(cycle) if name in self._history
        ]
        start = min(range(len(edges)), key=lambda index: edges[index][0])
        told = [*edges[start:], *edges[:start]]
        return "".join(f"{name} -{why}-> " for name, why in told) + told[0][0]
