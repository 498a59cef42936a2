"""What a request may hold.  A client checks its users' arguments too, but a server cannot rely on that:
whoever speaks the protocol may send anything, and what is stored stays."""

from collections.abc import Mapping, Sequence
from typing import TypeAlias

from floodmark.codec.column import Column
from floodmark.codec.ordered import NAMESPACE_BYTES
from floodmark.codec.packed import pack
from floodmark.codec.states import CounterState, decode_state, is_unstamped
from floodmark.codec.values import HAS_STAMPS, PLAIN, decode_value
from floodmark.merge.fields import parse_object
from floodmark.model.errors import (
    CommitTooLarge,
    Corruption,
    InvalidArgument,
    InvalidKey,
    InvalidRange,
    InvalidValue,
    InvalidVersion,
    LimitExceeded,
    PartitionMoved,
    WrongPolicy,
)
from floodmark.model.limits import KEY_BYTES_MAX, VALUE_BYTES_MAX
from floodmark.model.partition import Partition
from floodmark.model.ranges import KeyRange, prefix_end
from floodmark.model.record import Record
from floodmark.model.version import VERSION_MAX, Version
from floodmark.site.catalog import COUNTER, FIELDS, LAST_WRITE

# The merge policies of namespaces, by the bytes that their keys begin with.
Policies: TypeAlias = Mapping[bytes, str]

_QUALIFIED_BYTES_MAX = NAMESPACE_BYTES + KEY_BYTES_MAX
# A range may begin right behind the longest key.
_BOUND_BYTES_MAX = _QUALIFIED_BYTES_MAX + 1


def check_size(what: str, size: int, size_max: int) -> None:
    """Refuse what is too large to be handled at once."""
    if size > size_max:
        raise LimitExceeded(
            f"{what} has {size:,} bytes; at most {size_max:,} are allowed. Ask for less at a time",
            size=size,
        )


def check_keys(keys: Sequence[bytes]) -> None:
    """Qualified keys, at least one, each once."""
    if not keys:
        raise InvalidArgument("a request must name at least one key")
    ordered = isinstance(keys, Column) and keys.is_ascending
    for length in set(pack(keys).lengths.tolist() if ordered else map(len, keys)):
        if not NAMESPACE_BYTES < length <= _QUALIFIED_BYTES_MAX:
            raise InvalidKey(
                f"a key has {length - NAMESPACE_BYTES:,} bytes; 1 to {KEY_BYTES_MAX:,} are allowed"
            )
    if not ordered and len(set(keys)) != len(keys):
        raise InvalidArgument("a commit must name each key once")


def check_values(
    keys: Sequence[bytes], values: Sequence[bytes], policies: Policies, *, with_origin: bool
) -> None:
    """Stored records, one for each key, of the kind that its namespace holds.

    Only what is copied from another site carries its origin.
    """
    if len(values) != len(keys):
        raise InvalidArgument(f"{len(keys):,} keys came with {len(values):,} values; send one for each")
    plain = set(policies.values()) <= {LAST_WRITE}
    for key, value in zip(keys, values, strict=True):
        if value[-1:] == PLAIN and plain and not with_origin:
            size = len(value) - len(PLAIN)
        else:
            size = _check_record(key, value, policies[key[:NAMESPACE_BYTES]], with_origin=with_origin)
        if size > VALUE_BYTES_MAX and not (with_origin and value[-1] & HAS_STAMPS):
            raise InvalidValue(
                f"the value of {_shown(key)} has {size:,} bytes; at most {VALUE_BYTES_MAX:,} are allowed",
                size=size,
            )


def check_mergeable(keys: Sequence[bytes], policies: Policies, *, merges: bool) -> None:
    """Refuse to put where records are merged, and to merge where they are put."""
    for namespace, policy in policies.items():
        if (policy != LAST_WRITE) != merges:
            raise _wrong_policy(next(key for key in keys if key.startswith(namespace)), policy)


def _wrong_policy(key: bytes, policy: str) -> WrongPolicy:
    return WrongPolicy(
        f"{_shown(key)} is in a namespace that merges by {policy}, and something else is written to it; "
        "upgrade the client, or write to another namespace",
        key=key[NAMESPACE_BYTES:],
    )


def _check_record(key: bytes, value: bytes, policy: str, *, with_origin: bool) -> int:
    try:
        record = decode_value(value)
        kind = LAST_WRITE if record.stamps is None else _check_state(record, value, stamped=with_origin)
    except (Corruption, InvalidValue) as error:
        raise InvalidValue(f"the value of {_shown(key)} is not a record: {error}") from error
    if kind != policy:
        raise _wrong_policy(key, policy)
    if record.deleted and record.value:
        raise InvalidValue(f"the value of {_shown(key)} is deleted and not empty")
    if (record.origin is not None) != with_origin:
        raise InvalidValue(
            f"the value of {_shown(key)} carries no origin; use put"
            if with_origin
            else f"the value of {_shown(key)} carries an origin; use apply"
        )
    return len(record.value)


def _check_state(record: Record, value: bytes, *, stamped: bool) -> str:
    """The policy that a state belongs to.  What is new gets its stamps here, what is copied has them."""
    state = decode_state(value)
    if is_unstamped(state) == stamped:
        raise Corruption("it has no stamps of its own" if stamped else "it has stamps before it is committed")
    if isinstance(state, CounterState):
        return COUNTER
    if record.value:
        parse_object(record.value)
    return FIELDS


def check_commit(partition: Partition, keys: Sequence[bytes], values: Sequence[bytes]) -> None:
    """Refuse more than one commit of a partition can hold."""
    limits = partition.limits
    size = sum(map(len, keys)) + sum(map(len, values))
    if size > limits.bytes_max or len(keys) > limits.changes_max:
        raise CommitTooLarge(
            f"{len(keys):,} pairs make {size:,} bytes; one commit holds at most {limits.bytes_max:,} bytes "
            f"and {limits.changes_max:,} pairs. Write them in smaller portions",
            partition=partition.id,
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
    if place is not None and len(place) > NAMESPACE_BYTES + KEY_BYTES_MAX:
        raise InvalidKey(f"a place in a snapshot is a key, and this one has {len(place):,} bytes")


def _shown(key: bytes) -> str:
    return f"{key[NAMESPACE_BYTES:]!r:.60}"
