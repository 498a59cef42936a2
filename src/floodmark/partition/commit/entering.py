"""Checks of all keys and values before a partition stores them: plain writes, merges, copies from other
sites, loads, repairs and prepared writes.

A stored value that is no record would fail every reader of the namespace and every follower of the site until
it is collected.  Sites and clients check their users' arguments too, for better messages; a partition does
not rely on that.

Most records are plain, as their last byte shows; only the others are decoded.
"""

from collections.abc import Callable, Mapping, Sequence, Set
from enum import Enum, auto
from operator import itemgetter
from typing import Final

import numpy

from floodmark.codec.appends import any_append, append_size, decode_append, is_append
from floodmark.codec.ordered import NAMESPACE_BYTES, VERSION_BYTES, encode_bytes
from floodmark.codec.stamps import STAMP_BYTES
from floodmark.codec.states import CounterState, decode_state, is_unstamped
from floodmark.codec.values import HAS_EXPIRY, HAS_ORIGIN, HAS_STAMPS, PLAIN, TOMBSTONE, decode_value
from floodmark.columns.column import Column
from floodmark.columns.packed import pack
from floodmark.engine import EngineLimits, Guard
from floodmark.merge.fields import parse_object
from floodmark.merge.policies import COUNTER, FIELDS, LAST_WRITE
from floodmark.model.errors import (
    CommitTooLarge,
    Corruption,
    InvalidArgument,
    InvalidKey,
    InvalidValue,
    NamespaceNotFound,
    WrongPolicy,
)
from floodmark.model.limits import KEY_BYTES_MAX, VALUE_BYTES_MAX
from floodmark.model.partition import CommitLimits, LinkGuard
from floodmark.model.record import Record

QUALIFIED_BYTES_MAX: Final = NAMESPACE_BYTES + KEY_BYTES_MAX
PLAIN_BYTES_MAX: Final = VALUE_BYTES_MAX + len(PLAIN)
# Room for the bytes that precede an engine key in a row of the metadata.
META_BYTES_MAX: Final = 32
# With an engine that takes values of this size, values need not be compared with its limit.
STORED_BYTES_MAX: Final = 2 * VALUE_BYTES_MAX
# Readers represent times as 64 bits of microseconds.
EXPIRY_MAX: Final = ((1 << 63) - 1) // 1_000_000

_EXPIRY_BYTES: Final = 8
_EXPIRY_MAX_BYTES: Final = EXPIRY_MAX.to_bytes(_EXPIRY_BYTES, "big")
_EXPIRING_BYTES_MIN: Final = _EXPIRY_BYTES + len(PLAIN)
_EXPIRING: Final = bytes([HAS_EXPIRY])
# The last byte of a copy without expiry and tombstone, and the bytes that it has besides its value.
_PLAIN_COPY: Final = bytes([HAS_ORIGIN])
_COPY_OVERHEAD: Final = STAMP_BYTES + len(_PLAIN_COPY)
_PLAIN_COPY_BYTES_MAX: Final = VALUE_BYTES_MAX + _COPY_OVERHEAD
_FLAGS: Final = itemgetter(-1)
_NO_VERSION: Final = bytes(STAMP_BYTES - 1)


class WriteKind(Enum):
    """The kind of a write."""

    PUT = auto()
    """New values, which replace the stored ones."""

    MERGE = auto()
    """New states, which are merged into the stored ones."""

    WRITE = auto()
    """New values or states, depending on the namespace."""

    COPY = auto()
    """Records of another site, with their origin."""


_NEW: Final = (WriteKind.PUT, WriteKind.WRITE)


class Entrance:
    """Checks writes to the partitions of a node.

    A node without a catalog does not know the namespaces, and accepts any kind of record.
    """

    def __init__(self, limits: EngineLimits) -> None:
        # Narrower than those of the model where the engine's are.
        self.qualified_bytes_max = min(QUALIFIED_BYTES_MAX, _qualified_bytes_max(limits.key_bytes_max))
        self._copied_bytes_max = limits.value_bytes_max
        # Its origin is added to a record when it has expired, and a version while it is prepared.
        self._own_bytes_max = limits.value_bytes_max - STAMP_BYTES
        self.plain_bytes_max = min(PLAIN_BYTES_MAX, self._own_bytes_max)
        self._policies: Mapping[bytes, str] | None = None
        # Raises for changes that a link sends too late; returns the guards under which others are written.
        self.admit: Callable[[LinkGuard], Sequence[Guard]] = lambda _: ()
        # Called before a namespace is refused as unknown: another node may have created it.  Waits for the
        # turn, so a thread that holds the turn must not call it.
        self.catch_up: Callable[[], None] = lambda: None
        # The namespaces whose records are plain values, by the bytes that their keys begin with.
        self.plain: frozenset[bytes] = frozenset()

    def set_policies(self, policies: Mapping[bytes, str]) -> None:
        """Set the merge policy of every namespace, by the bytes that its keys begin with."""
        self._policies = policies
        self.plain = frozenset(namespace for namespace, policy in policies.items() if policy == LAST_WRITE)

    def meet(self, namespaces: Set[bytes]) -> None:
        """Load the catalog if it lacks one of the namespaces.  The caller must not hold the turn."""
        if self._policies is not None and not namespaces <= self._policies.keys():
            self.catch_up()

    def check(
        self, keys: Sequence[bytes], values: Sequence[bytes], kind: WriteKind, *, in_turn: bool = False
    ) -> None:
        """Raise if a qualified key or a stored value is invalid; the caller must store none of them then.

        With `in_turn`, the caller holds the turn, and has called `meet` before.
        """
        if kind is WriteKind.WRITE and any_append(values):
            values = list(map(_stored_by, keys, values))
        if len(keys) == 1 == len(values) and kind in _NEW:
            # The hottest path: a plain value in a namespace of plain values.
            key, value = keys[0], values[0]
            if (
                value.endswith(PLAIN)
                and key[:NAMESPACE_BYTES] in self.plain
                and NAMESPACE_BYTES < len(key) <= self.qualified_bytes_max
                and len(value) <= self.plain_bytes_max
            ):
                return
        check_keys(keys)
        require_paired(keys, values)
        self._check_engine(keys, values, kind)
        namespaces = namespaces_of(keys)
        if not in_turn:
            self.meet(namespaces)
        if namespaces <= self.plain:
            if kind is WriteKind.MERGE:
                raise _wrong_policy(keys[0], LAST_WRITE)
            keys, values = _unusual_copies(keys, values) if kind is WriteKind.COPY else _unusual(keys, values)
        policies = {namespace: self._policy_of(namespace) for namespace in namespaces}
        for key, value in zip(keys, values, strict=True):
            _check_record(key, value, policies[key[:NAMESPACE_BYTES]], kind)

    def _check_engine(self, keys: Sequence[bytes], values: Sequence[bytes], kind: WriteKind) -> None:
        """Refuse keys and values within the limits of the model that this site's engine cannot hold."""
        if self.qualified_bytes_max < QUALIFIED_BYTES_MAX:
            longest = max(keys, key=len)
            size, longest_max = (n - NAMESPACE_BYTES for n in (len(longest), self.qualified_bytes_max))
            if size > longest_max:
                raise InvalidKey(
                    f"the key {_shown(longest)} has {size:,} bytes; the database of this site takes "
                    f"{longest_max:,}. Hash it, or keep the rest in the value",
                    size=size,
                )
        size_max = self._copied_bytes_max if kind is WriteKind.COPY else self._own_bytes_max
        if size_max < STORED_BYTES_MAX:
            size, key = max(zip(map(len, values), keys, strict=True))
            if size > size_max:
                raise InvalidValue(
                    f"the record of {_shown(key)} has {size:,} bytes; the database of this site takes "
                    f"{size_max:,}. Write it in parts, or keep it elsewhere",
                    key=key[NAMESPACE_BYTES:],
                    size=size,
                )

    def _policy_of(self, namespace: bytes) -> str | None:
        if self._policies is None:
            return None
        policy = self._policies.get(namespace)
        if policy is None:
            raise NamespaceNotFound(
                f"there is no namespace with id {int.from_bytes(namespace, 'big')}, or it was dropped; look "
                "it up by its name again"
            )
        return policy


def _stored_by(key: bytes, value: bytes) -> bytes:
    """The record of a write, whose key may wait for its version."""
    if not is_append(value):
        return value
    append = decode_append(value)
    if append_size(key, append.shift) < NAMESPACE_BYTES:
        raise InvalidKey(f"the key {_shown(key)} is too short to hold a version")
    return append.stored


def _qualified_bytes_max(key_bytes_max: int) -> int:
    """The size of the longest qualified key whose engine key fits, with a version and in the metadata.

    >>> len(encode_bytes(bytes(1 + _qualified_bytes_max(2_600)))) + VERSION_BYTES + META_BYTES_MAX <= 2_600
    True
    """
    groups = (key_bytes_max - VERSION_BYTES - META_BYTES_MAX) // len(encode_bytes(b""))
    return 8 * groups - 2


def check_keys(keys: Sequence[bytes]) -> None:
    """Raise unless there are one or more qualified keys, each once."""
    if len(keys) == 1 and NAMESPACE_BYTES < len(keys[0]) <= QUALIFIED_BYTES_MAX:
        return
    if not keys:
        raise InvalidArgument("a request must name at least one key")
    ordered = isinstance(keys, Column) and keys.is_ascending
    for length in set(pack(keys).lengths.tolist() if ordered else map(len, keys)):
        if not NAMESPACE_BYTES < length <= QUALIFIED_BYTES_MAX:
            raise InvalidKey(
                f"a key has {max(0, length - NAMESPACE_BYTES):,} bytes; 1 to {KEY_BYTES_MAX:,} are allowed"
            )
    if not ordered and len(set(keys)) != len(keys):
        raise InvalidArgument("a commit must name each key once")


def require_paired(keys: Sequence[bytes], values: Sequence[bytes]) -> None:
    """Raise unless there is a value for each key."""
    if len(values) != len(keys):
        raise InvalidArgument(f"{len(keys):,} keys came with {len(values):,} values; send one for each")


def check_key(key: object) -> None:
    """Raise InvalidKey unless a user's key is bytes of 1 to KEY_BYTES_MAX."""
    if type(key) is not bytes or not 0 < len(key) <= KEY_BYTES_MAX:
        raise refuse_key(key)


def refuse_key(key: object) -> InvalidKey:
    """The error for a key that is not bytes of 1 to KEY_BYTES_MAX."""
    if type(key) is not bytes:
        return InvalidKey(f"a key must be bytes, not {type(key).__name__} ({key!r:.60}); encode it first")
    if not key:
        return InvalidKey("a key must not be empty")
    return InvalidKey(
        f"the key {key[:40]!r}… has {len(key):,} bytes; at most {KEY_BYTES_MAX:,} are allowed. "
        "Hash it, or keep the rest in the value",
        size=len(key),
    )


def check_fits(limits: CommitLimits, count: int, size: int) -> None:
    """Raise CommitTooLarge if the pairs do not fit into one commit."""
    if size > limits.bytes_max or count > limits.changes_max:
        raise CommitTooLarge(
            f"{count:,} pairs make {size:,} bytes; one commit holds at most {limits.bytes_max:,} bytes and "
            f"{limits.changes_max:,} pairs. Write them in smaller portions",
            size=size,
        )


def ends_of(keys: Sequence[bytes]) -> tuple[bytes, bytes]:
    """The first and the last of some keys."""
    ordered = isinstance(keys, Column) and keys.is_ascending
    return (keys[0], keys[-1]) if ordered else (min(keys), max(keys))


def namespaces_of(keys: Sequence[bytes]) -> set[bytes]:
    """The bytes that qualified keys begin with, once for each namespace."""
    if len(keys) == 1:
        return {keys[0][:NAMESPACE_BYTES]}
    first, last = (key[:NAMESPACE_BYTES] for key in ends_of(keys))
    # Every key between two keys of a namespace is in that namespace, too.
    return {first} if first == last else {key[:NAMESPACE_BYTES] for key in keys}


def _unusual(keys: Sequence[bytes], values: Sequence[bytes]) -> tuple[Sequence[bytes], Sequence[bytes]]:
    """The pairs to decode: all but those whose bytes show a plain value, an expiring value or a deletion."""
    if isinstance(values, Column) and _all_end_with(values, PLAIN, len(PLAIN), PLAIN_BYTES_MAX):
        return (), ()
    if all(values) and max(map(len, values)) <= PLAIN_BYTES_MAX and {*map(_FLAGS, values)} == {*PLAIN}:
        return (), ()
    return _only(keys, values, [not _is_simple(value) for value in values])


def _is_simple(value: bytes) -> bool:
    if value.endswith(PLAIN):
        return len(value) <= PLAIN_BYTES_MAX
    if value.endswith(_EXPIRING):
        size = len(value) - _EXPIRING_BYTES_MIN
        return 0 <= size <= VALUE_BYTES_MAX and value[size:-1] <= _EXPIRY_MAX_BYTES
    return value == TOMBSTONE


def _unusual_copies(
    keys: Sequence[bytes], values: Sequence[bytes]
) -> tuple[Sequence[bytes], Sequence[bytes]]:
    """The pairs to decode: all but those whose bytes show a plain value with an origin."""
    if isinstance(values, Column) and _are_plain_copies(values):
        return (), ()
    return _only(keys, values, [not _is_plain_copy(value) for value in values])


def _is_plain_copy(value: bytes) -> bool:
    return (
        value.endswith(_PLAIN_COPY)
        and _COPY_OVERHEAD <= len(value) <= _PLAIN_COPY_BYTES_MAX
        and value[-2] != 0
        and value[-_COPY_OVERHEAD:-2] != _NO_VERSION
    )


def _all_end_with(values: Column[bytes], flags: bytes, bytes_min: int, bytes_max: int) -> bool:
    packed = pack(values)
    lengths, data = packed.lengths, numpy.frombuffer(packed.data, numpy.uint8)
    if not len(lengths) or lengths.min() < bytes_min or lengths.max() > bytes_max:
        return False
    return bool((data[packed.borders[1:] - 1] == flags[0]).all())


def _are_plain_copies(values: Column[bytes]) -> bool:
    if not _all_end_with(values, _PLAIN_COPY, _COPY_OVERHEAD, _PLAIN_COPY_BYTES_MAX):
        return False
    packed = pack(values)
    data, ends = numpy.frombuffer(packed.data, numpy.uint8), packed.borders[1:]
    versions = numpy.bitwise_or.reduce([data[ends - place] for place in range(3, _COPY_OVERHEAD + 1)])
    return bool(data[ends - 2].all() and versions.all())


def _only(
    keys: Sequence[bytes], values: Sequence[bytes], wanted: Sequence[bool]
) -> tuple[Sequence[bytes], Sequence[bytes]]:
    places = [place for place, is_wanted in enumerate(wanted) if is_wanted]
    return [keys[place] for place in places], [values[place] for place in places]


def _check_record(key: bytes, value: bytes, policy: str | None, kind: WriteKind) -> None:
    copied = kind is WriteKind.COPY
    try:
        record = decode_value(value)
        found = LAST_WRITE if record.stamps is None else _check_state(record, value, stamped=copied)
        if record.deleted and record.value:
            raise Corruption("it is deleted and not empty")
        if record.expires_at is not None and record.expires_at > EXPIRY_MAX:
            raise Corruption(f"it expires at second {record.expires_at}, which is no moment")
    except (Corruption, InvalidValue) as error:
        raise InvalidValue(
            f"the value of {_shown(key)} is not a record: {error}", key=key[NAMESPACE_BYTES:]
        ) from error
    is_merged = found != LAST_WRITE
    if (
        found != (policy or found)
        or (kind is WriteKind.PUT and is_merged)
        or (kind is WriteKind.MERGE and not is_merged)
    ):
        raise _wrong_policy(key, policy or found)
    if record.batched and not copied:
        raise InvalidValue(
            f"the value of {_shown(key)} carries the mark of an atomic batch, which only a commit "
            "sets; write it in a batch",
            key=key[NAMESPACE_BYTES:],
        )
    has_origin = record.origin is not None and 0 not in (record.origin.version, record.origin.site)
    if has_origin != copied or (record.origin is not None) != copied:
        raise InvalidValue(
            f"the value of {_shown(key)} carries no origin; use put"
            if copied
            else f"the value of {_shown(key)} carries an origin; use apply",
            key=key[NAMESPACE_BYTES:],
        )
    size = len(record.value)
    if size > VALUE_BYTES_MAX and not (copied and value[-1] & HAS_STAMPS):
        raise InvalidValue(
            f"the value of {_shown(key)} has {size:,} bytes; at most {VALUE_BYTES_MAX:,} are allowed",
            key=key[NAMESPACE_BYTES:],
            size=size,
        )


def _check_state(record: Record, value: bytes, *, stamped: bool) -> str:
    """The policy of a state.  A new state has no stamps yet, a copied one has them."""
    state = decode_state(value)
    if is_unstamped(state) == stamped:
        raise Corruption("it has no stamps of its own" if stamped else "it has stamps before it is committed")
    if isinstance(state, CounterState):
        return COUNTER
    if record.value:
        parse_object(record.value)
    return FIELDS


def _wrong_policy(key: bytes, policy: str) -> WrongPolicy:
    return WrongPolicy(
        f"{_shown(key)} is in a namespace that merges by {policy}, and something else is written to it; "
        "upgrade the client, or write to another namespace",
        key=key[NAMESPACE_BYTES:],
    )


def _shown(key: bytes) -> str:
    return f"{key[NAMESPACE_BYTES:]!r:.60}"
