"""The last write wins, where "last" is the order of stamps: version, then site.

The site id breaks ties between versions, so two sites that merge the same writes in any order, any
number of times, hold the same record.
"""

from typing import NamedTuple

from floodmark.model.change import Stamp
from floodmark.model.record import Record


class Stamped(NamedTuple):
    """A record with the stamp that decides between it and another."""

    record: Record
    stamp: Stamp


def last_write(current: Stamped | None, incoming: Stamped) -> Stamped:
    """The winner of two records of one key.

    >>> old, new = Stamped(Record(b"old"), Stamp(1, 9)), Stamped(Record(b"new"), Stamp(2, 1))
    >>> last_write(old, new) == last_write(new, old) == new
    True
    """
    if current is None or incoming.stamp > current.stamp:
        return incoming
    return current
