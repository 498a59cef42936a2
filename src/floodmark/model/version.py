"""A version is a point in hybrid time, and the one number that everything in Floodmark is ordered by.

    63                                18 17               0
    +-----------------------------------+------------------+
    |  physical: unix milliseconds (46) |   counter (18)   |
    +-----------------------------------+------------------+

The same kind of number is the commit version of a change, the checkpoint of a feed, the moment of a snapshot
and the bound of garbage collection.  It is never 0, so 0 can mean "before everything".
"""

from datetime import UTC, datetime
from typing import Final, TypeAlias

Version: TypeAlias = int

COUNTER_BITS: Final = 18
COUNTER_MAX: Final = (1 << COUNTER_BITS) - 1
PHYSICAL_MS_MAX: Final = (1 << 46) - 1
VERSION_MAX: Final = (1 << 64) - 1
# The last second of the year 9999, beyond which readers of timestamps fail.
MOMENT_SECONDS_MAX: Final = 253_402_300_799


def compose(physical_ms: int, logical: int) -> Version:
    """Make a version of unix milliseconds and a counter.

    >>> compose(1568700549751, 108)
    411225436913926252
    """
    if not 0 <= physical_ms <= PHYSICAL_MS_MAX:
        raise ValueError(f"physical time {physical_ms} ms does not fit into 46 bits")
    if not 0 <= logical <= COUNTER_MAX:
        raise ValueError(f"counter {logical} does not fit into {COUNTER_BITS} bits")
    return physical_ms << COUNTER_BITS | logical


def split(version: Version) -> tuple[int, int]:
    """Split a version into unix milliseconds and counter.

    >>> split(411225436913926252)
    (1568700549751, 108)
    """
    return version >> COUNTER_BITS, version & COUNTER_MAX


def physical_ms(version: Version) -> int:
    """The unix milliseconds at which a version was minted."""
    return version >> COUNTER_BITS


def version_at(moment: datetime) -> Version:
    """The last version of the millisecond of `moment`: reading there sees all that was written in it.

    Raises ValueError for a moment without a time zone, which is ambiguous.

    >>> split(version_at(datetime(2020, 1, 1, tzinfo=UTC)))
    (1577836800000, 262143)
    """
    if moment.utcoffset() is None:
        raise ValueError(f"{moment!r} has no time zone; pass for example datetime.now(timezone.utc)")
    # Whole microseconds first: a float of seconds cannot hold a millisecond exactly.
    since_epoch = moment - datetime(1970, 1, 1, tzinfo=UTC)
    milliseconds = (since_epoch.days * 86_400 + since_epoch.seconds) * 1000
    return compose(milliseconds + since_epoch.microseconds // 1000, COUNTER_MAX)


def moment_of(version: Version) -> datetime:
    """The wall-clock moment of a version, in UTC, to the millisecond.

    >>> moment_of(411225436913926252).isoformat()
    '2019-09-17T06:09:09.751000+00:00'
    """
    seconds, milliseconds = divmod(version >> COUNTER_BITS, 1000)
    return datetime.fromtimestamp(seconds, UTC).replace(microsecond=milliseconds * 1000)
