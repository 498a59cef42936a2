"""Checks of the arguments that users pass.  The layers below rely on them and do not check again."""

from datetime import datetime, timedelta
from math import ceil, isfinite
from typing import Final, Literal, TypeAlias, TypeVar, cast

from floodmark.model.change import Resolved
from floodmark.model.errors import (
    InvalidArgument,
    InvalidRange,
    InvalidTimeToLive,
    InvalidValue,
    InvalidVersion,
)
from floodmark.model.limits import KEY_BYTES_MAX, TTL_MAX, VALUE_BYTES_MAX
from floodmark.model.ranges import KeyRange, prefix_end
from floodmark.model.stream import OnGeneration
from floodmark.model.version import VERSION_MAX, Version, version_at

# URL schemes of the databases that can hold sites.
DATABASES: Final = ("postgresql://", "postgres://")

_LIFETIME_US_MAX: Final = TTL_MAX // timedelta(microseconds=1)

Kind = TypeVar("Kind")

At: TypeAlias = Version | datetime
# Where to begin reading changes: at a checkpoint, a moment, the first change ("beginning"), with every live
# key ("snapshot"), or with future changes only ("now").
Since: TypeAlias = Version | datetime | Resolved | Literal["snapshot", "beginning", "now", "end"]
Durability: TypeAlias = Literal["fsync", "async"]
Reaction: TypeAlias = OnGeneration | Literal["fail", "difference", "snapshot"]


def refuse_value(key: object, value: object) -> InvalidValue:
    """The error for a value that is not bytes of at most VALUE_BYTES_MAX."""
    if type(value) is not bytes:
        return InvalidValue(
            f"the value of {key!r:.60} must be bytes, not {type(value).__name__}; encode it first",
            key=key,
        )
    return InvalidValue(
        f"the value of {key!r:.60} has {len(value):,} bytes; at most {VALUE_BYTES_MAX:,} are allowed. "
        "Cut it into several keys",
        key=key,
        size=len(value),
    )


def to_reaction(reaction: Reaction) -> OnGeneration:
    """The reaction of a reader to a published data set, as an `OnGeneration`."""
    try:
        return OnGeneration(reaction)
    except ValueError as error:
        raise InvalidArgument(
            f"on_generation is one of {', '.join(map(str, OnGeneration))}, not {reaction!r:.60}"
        ) from error


def check_bound(bound: object, what: str) -> bytes:
    """Check one bound of a key range: it must be bytes, and not longer than a key."""
    if type(bound) is not bytes or len(bound) > KEY_BYTES_MAX:
        raise InvalidRange(f"{what} must be bytes of at most {KEY_BYTES_MAX:,}, not {bound!r:.60}")
    return bound


def check_range(start: bytes, end: bytes | None, prefix: bytes | None = None) -> KeyRange:
    """The user keys in `[start, end)` that start with `prefix`."""
    keys = KeyRange(check_bound(start, "start"), None if end is None else check_bound(end, "end"))
    if keys.end is not None and keys.start > keys.end:
        raise InvalidRange(
            f"start {start!r:.60} lies behind end {end!r:.60}; swap them, and pass reverse=True to "
            "read backwards"
        )
    if prefix is None:
        return keys
    within = KeyRange(check_bound(prefix, "prefix"), prefix_end(prefix))
    return keys.intersect(within) or KeyRange(prefix, prefix)


def check_kind(value: object, kind: type[Kind], what: str) -> Kind:
    """Return `value` if it is an instance of `kind`.  A bool is not accepted as an int."""
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        raise InvalidArgument(f"{what} must be a {kind.__name__}, not {value!r:.60}")
    return value


def check_duration(duration: object, what: str) -> timedelta:
    """Return the duration if it is a timedelta and not negative."""
    if check_kind(duration, timedelta, what) < timedelta(0):
        raise InvalidArgument(f"{what} must not be negative, as {duration!r:.60} is")
    return cast(timedelta, duration)


def check_count(number: object, what: str) -> int:
    """Return the number if it is an int and not negative."""
    if check_kind(number, int, what) < 0:
        raise InvalidArgument(f"{what} must not be negative, as {number!r:.60} is")
    return cast(int, number)


def check_time_source(time_source: object) -> None:
    """Check that a time source is a function without arguments that returns unix milliseconds."""
    if not callable(time_source) or type(time_source()) is not int:
        raise InvalidArgument(
            f"time_source must be a function that returns unix milliseconds, not {time_source!r:.60}"
        )


def check_durability(durability: object) -> bool:
    """Whether a write with this durability waits until it is on disk."""
    if durability == "fsync":
        return True
    if durability == "async":
        return False
    raise InvalidArgument(f"durability is 'fsync' or 'async', not {durability!r}")


def to_version(at: object) -> Version:
    """The version of an argument that is a version or a moment."""
    if isinstance(at, datetime):
        try:
            return version_at(at)
        except ValueError as error:
            raise InvalidVersion(str(error)) from error
    if type(at) is not int or not 0 < at <= VERSION_MAX:
        raise InvalidVersion(f"`at` must be a version or a datetime with a time zone, not {at!r:.60}")
    return at


def to_expiry(ttl: object, now_ms: int) -> int:
    """The unix second at which a value written now with this time to live expires, rounded up."""
    if isinstance(ttl, timedelta):
        lifetime_us = ttl // timedelta(microseconds=1)
    elif type(ttl) in (int, float) and isfinite(cast(float, ttl)):
        lifetime_us = ceil(cast(float, ttl) * 1_000_000)
    else:
        raise InvalidTimeToLive(f"a time to live is a timedelta or a number of seconds, not {ttl!r:.60}")
    if not 0 < lifetime_us <= _LIFETIME_US_MAX:
        raise InvalidTimeToLive(
            f"a time to live must be positive and at most {TTL_MAX.days:,} days, not {ttl}. "
            "Use delete to remove at once, and no ttl to keep for good"
        )
    return -((now_ms * 1000 + lifetime_us) // -1_000_000)
