"""Counters that every site adds to.

Each site has one entry with its total, which it alone writes: of two states of an entry, the younger includes
all additions of the older.  The value is the sum of the entries, so that no addition is lost or counted
twice, however often and in whatever order the sites exchange changes.  A delete removes the entries that are
not younger than it, and the sites begin again at 0.  An entry is a whole total: if a site adds before it has
received a delete, its entry is younger than the delete, and stays with all earlier additions.
"""

from floodmark.codec.states import CounterEntry, CounterState, encode_state
from floodmark.merge.fields import later_delete
from floodmark.model.change import Stamp
from floodmark.model.errors import InvalidValue, LimitExceeded
from floodmark.model.limits import COUNTER_TOTAL_MAX
from floodmark.model.version import Version


def merge_counters(current: CounterState, incoming: CounterState) -> CounterState:
    """The join of two states: for each site the younger entry, if it is above the higher delete.

    >>> old, new, other = CounterEntry(1, 7, 5), CounterEntry(1, 8, 6), CounterEntry(2, 3, -4)
    >>> merge_counters(CounterState(None, (old, other)), CounterState(None, (new,))).entries == (new, other)
    True
    """
    entries = {entry.site: entry for entry in current.entries}
    for entry in incoming.entries:
        standing = entries.get(entry.site)
        if standing is None or entry.version > standing.version:
            entries[entry.site] = entry
    merged = [entries[site] for site in sorted(entries)]
    deleted = later_delete(current.deleted, incoming.deleted)
    if deleted is not None:
        merged = [entry for entry in merged if entry.stamp > deleted]
    return CounterState(deleted, tuple(merged))


def stamp_counter(
    write: CounterState, current: CounterState | None, version: Version, site: int
) -> CounterState:
    """The stamped state of an unstamped write: its number, added to the site's total at a commit version."""
    if write.deleted is not None:
        return CounterState(Stamp(version, site), ())
    (added,) = write.entries
    total = added.total
    for entry in () if current is None else current.entries:
        if entry.site == site:
            total += entry.total
    if abs(total) > COUNTER_TOTAL_MAX:
        raise LimitExceeded(
            f"adding {added.total:,} would make the total of site {site} {total:,}; it may be at most "
            f"{COUNTER_TOTAL_MAX:,}, above or below zero. Delete the counter to begin anew"
        )
    return CounterState(None, (CounterEntry(site, version, total),))


def add_to_counter(number: int) -> bytes:
    """An unstamped write that adds a number, which may be negative."""
    if not isinstance(number, int) or isinstance(number, bool):
        raise InvalidValue(f"only a whole number can be added to a counter, not {number!r:.60}")
    if abs(number) > COUNTER_TOTAL_MAX:
        raise LimitExceeded(f"at most {COUNTER_TOTAL_MAX:,} can be added to a counter, above or below zero")
    return encode_state(CounterState(None, (CounterEntry(0, 0, number),)))
