"""What a request may ask for.  A client checks its users' arguments too, but a server cannot rely on that:
a client of the protocol may send anything.  What may be stored, partitions check themselves
(`partition/commit/entering.py`)."""

from collections.abc import Sequence

from floodmark.codec.ordered import NAMESPACE_BYTES
from floodmark.model.errors import (
    InvalidKey,
    InvalidRange,
    InvalidVersion,
    LimitExceeded,
    PartitionMoved,
)
from floodmark.model.partition import Partition
from floodmark.model.ranges import KeyRange, prefix_end
from floodmark.model.version import VERSION_MAX, Version
from floodmark.partition.commit.entering import QUALIFIED_BYTES_MAX

# A range may begin right behind the longest key.
_BOUND_BYTES_MAX = QUALIFIED_BYTES_MAX + 1


def check_size(what: str, size: int, size_max: int) -> None:
    """Refuse what is too large to be handled at once."""
    if size > size_max:
        raise LimitExceeded(
            f"{what} has {size:,} bytes; at most {size_max:,} are allowed. Ask for less at a time",
            size=size,
        )


def check_inside(partition: Partition, keys: Sequence[bytes]) -> None:
    """Refuse keys that another partition has: the client's map is old."""
    if not (partition.range.contains(min(keys)) and partition.range.contains(max(keys))):
        raise PartitionMoved(
            f"partition {partition.id} does not hold all of the keys; ask for the map again",
            partition=partition.id,
        )


def check_namespace_range(namespace: bytes, keys: KeyRange) -> None:
    """A range of qualified keys that begins and ends within one namespace."""
    end = prefix_end(namespace)
    if (
        len(namespace) != NAMESPACE_BYTES
        or not keys.start.startswith(namespace)
        or keys.end is None
        or end is None
        or not keys.start <= keys.end <= end
        or max(len(keys.start), len(keys.end)) > _BOUND_BYTES_MAX
    ):
        raise InvalidRange("a range of keys must lie within one namespace, and begin before it ends")


def check_version(version: Version | None) -> None:
    """A version that a reader may ask for; None stands for the present."""
    if version is not None and not 0 < version <= VERSION_MAX:
        raise InvalidVersion(f"{version} is not a version; versions are positive and have 64 bits")


def check_position(version: Version | None) -> None:
    """A version, or 0 for before everything."""
    if version:
        check_version(version)


def check_snapshot(place: bytes | None) -> None:
    """A place in a snapshot is a qualified key, or empty for its beginning."""
    if place is not None and len(place) > QUALIFIED_BYTES_MAX:
        raise InvalidKey(f"a place in a snapshot is a key, and this one has {len(place):,} bytes")
