"""Keys whose bytes sort as users expect: by key, then newest version first.

A key is cut into groups of eight bytes.  Each group is padded with zeros and followed by a marker,
0xFF minus the number of padding bytes, so that no key is a prefix of another and byte order is key
order ("memory-comparable encoding", MCE):

    +--------------------+----+--------------------+----+
    | 8 bytes            | FF | 3 bytes + 5 zeros  | FA |    a key of 11 bytes
    +--------------------+----+--------------------+----+

A key in the engine is MCE of `r`, the namespace and the user key, followed by the bitwise inverse of
the version, which puts the newest version first:

    MCE( 'r' | namespace: 3 bytes | user key ) | ~version: 8 bytes, big-endian

This is TiKV's API V2, byte for byte.  `encode_prefix` is the part before the version.
"""

from collections.abc import Callable, Sequence
from functools import lru_cache
from struct import Struct
from struct import error as StructError
from typing import Final

import numpy

from floodmark.columns.packed import Packed, Places, pack
from floodmark.model.errors import Corruption
from floodmark.model.ranges import KeyRange, prefix_end
from floodmark.model.version import VERSION_MAX, Version

GROUP: Final = 8
MARKED_GROUP: Final = GROUP + 1
VERSION_BYTES: Final = 8
NAMESPACE_BYTES: Final = 3
_EVERY_KEY: Final = KeyRange()
RAW: Final = b"r"

_SHAPES_MAX: Final = 8192
# From this number of keys of one length on, it is quicker to encode them all at once.
_MANY: Final = 64
_MARKED: Final = numpy.dtype([("group", numpy.uint64), ("marker", numpy.uint8)])

Unpack = Callable[[bytes], tuple[bytes, ...]]


@lru_cache(maxsize=_SHAPES_MAX)
def _encoding_shape(length: int) -> tuple[Unpack, bytes]:
    """The function that cuts a key of this length into groups, and the bytes after its last group."""
    whole, rest = divmod(length, GROUP)
    padding = GROUP - rest
    return Struct("8s" * whole + f"{rest}s").unpack, bytes(padding) + bytes([0xFF - padding])


def encode_bytes(data: bytes) -> bytes:
    """Encode so that byte order is the order of `data`, whatever bytes follow.

    >>> encode_bytes(b"").hex(), encode_bytes(bytes([1, 2, 3])).hex()
    ('0000000000000000f7', '0102030000000000fa')
    """
    unpack, tail = _encoding_shape(len(data))
    return b"\xff".join(unpack(data)) + tail


def decode_bytes(encoded: bytes) -> tuple[bytes, bytes]:
    """Decode the result of `encode_bytes`: the bytes, and the rest that follows them.

    >>> decode_bytes(bytes.fromhex("0102030000000000fa") + b"rest")
    (b'\\x01\\x02\\x03', b'rest')
    """
    groups: list[bytes] = []
    for start in range(0, len(encoded), MARKED_GROUP):
        group = encoded[start : start + GROUP]
        marker = encoded[start + GROUP : start + MARKED_GROUP]
        if not marker:
            break
        if marker == b"\xff":
            groups.append(group)
            continue
        padding = 0xFF - marker[0]
        if padding > GROUP:
            raise Corruption(f"encoded key {encoded.hex()} has an impossible marker {marker.hex()}")
        if any(group[GROUP - padding :]):
            raise Corruption(f"encoded key {encoded.hex()} has padding that is not zero")
        groups.append(group[: GROUP - padding])
        return b"".join(groups), encoded[start + MARKED_GROUP :]
    raise Corruption(f"encoded key {encoded.hex()} ends in the middle of a group")


def encode_namespace(namespace: int) -> bytes:
    """The three bytes that a namespace's keys start with."""
    return namespace.to_bytes(NAMESPACE_BYTES, "big")


def qualify_range(namespace: int, keys: KeyRange = _EVERY_KEY) -> KeyRange:
    """A range of a namespace's keys, all by default, as a range of qualified keys.

    >>> qualify_range(1, KeyRange(b"a"))
    KeyRange(start=b'\\x00\\x00\\x01a', end=b'\\x00\\x00\\x02')
    """
    prefix = encode_namespace(namespace)
    return KeyRange(prefix + keys.start, prefix_end(prefix) if keys.end is None else prefix + keys.end)


def encode_prefix(qualified: bytes) -> bytes:
    """An engine key without its version.  `qualified` is the namespace bytes and the user key."""
    return encode_bytes(RAW + qualified)


def encode_prefixes(qualified: Sequence[bytes]) -> list[bytes]:
    """`encode_prefix` of many keys, without a call for each.

    >>> encode_prefixes([b"user-1", b"u"]) == [encode_prefix(b"user-1"), encode_prefix(b"u")]
    True
    """
    if len(qualified) >= _MANY:
        packed = pack(qualified)
        lengths = packed.lengths
        if (lengths == lengths[0]).all():
            return _encode_alike(packed)
        if len(qualified) >= _MANY * len(found := numpy.unique(lengths)):
            return _encode_groups(packed, found)
    length = -1
    prefixes: list[bytes] = []
    for key in qualified:
        data = RAW + key
        if len(data) != length:
            length = len(data)
            unpack, tail = _encoding_shape(length)
        prefixes.append(b"\xff".join(unpack(data)) + tail)
    return prefixes


def _encode_groups(qualified: Packed, lengths: Places) -> list[bytes]:
    """`encode_prefixes` for keys of a few distinct lengths: all keys of one length at once."""
    data = numpy.frombuffer(qualified.data, numpy.uint8)
    prefixes = numpy.empty(len(qualified.lengths), object)
    for length in lengths.tolist():
        places = numpy.flatnonzero(qualified.lengths == length)
        rows = data[qualified.borders[places][:, None] + numpy.arange(length)]
        borders = numpy.arange(0, rows.size + 1, length) if length else numpy.zeros(len(places) + 1, int)
        prefixes[places] = _encode_alike(Packed(rows.tobytes(), borders))
    encoded: list[bytes] = prefixes.tolist()
    return encoded


def _encode_alike(qualified: Packed) -> list[bytes]:
    """`encode_prefixes` for keys of one length, all at once."""
    count = len(qualified.borders) - 1
    length = len(RAW) + len(qualified.data) // count
    groups = length // GROUP + 1
    padded = numpy.zeros((count, groups * GROUP), numpy.uint8)
    padded[:, 0] = RAW[0]
    padded[:, len(RAW) : length] = numpy.frombuffer(qualified.data, numpy.uint8).reshape(count, -1)
    marked = numpy.empty((count, groups), _MARKED)
    marked["group"] = padded.view(numpy.uint64)
    marked["marker"] = 0xFF
    marked["marker"][:, -1] -= groups * GROUP - length
    prefixes: list[bytes] = marked.view(f"V{groups * MARKED_GROUP}")[:, 0].tolist()
    return prefixes


def encode_version(version: Version) -> bytes:
    """The last eight bytes of an engine key.

    >>> encode_version(30).hex()
    'ffffffffffffffe1'
    """
    return (VERSION_MAX ^ version).to_bytes(VERSION_BYTES, "big")


def decode_version(engine_key: bytes) -> Version:
    """The version that an engine key ends with."""
    return VERSION_MAX ^ int.from_bytes(engine_key[-VERSION_BYTES:], "big")


def encode_key(namespace: int, key: bytes, version: Version) -> bytes:
    """The engine key of one version of one user key.

    >>> encode_key(0, b"abc", 30).hex()
    '7200000061626300feffffffffffffffe1'
    """
    return encode_prefix(encode_namespace(namespace) + key) + encode_version(version)


def decode_key(engine_key: bytes) -> tuple[int, bytes, Version]:
    """Decode an engine key: namespace, user key and version."""
    decoded, version = decode_bytes(engine_key)
    if len(version) != VERSION_BYTES:
        raise Corruption(f"engine key {engine_key.hex()} ends with {len(version)} bytes of version, not 8")
    if decoded[:1] != RAW or len(decoded) < len(RAW) + NAMESPACE_BYTES:
        raise Corruption(f"engine key {engine_key.hex()} does not start with 'r' and a namespace")
    namespace = int.from_bytes(decoded[1 : 1 + NAMESPACE_BYTES], "big")
    return namespace, decoded[1 + NAMESPACE_BYTES :], VERSION_MAX ^ int.from_bytes(version, "big")


@lru_cache(maxsize=_SHAPES_MAX)
def user_key_shape(markers: bytes) -> Unpack:
    """The function that cuts the user key out of a prefix with these markers."""
    if not markers:
        raise Corruption("an encoded key is shorter than one group")
    groups, padding = len(markers), 0xFF - markers[-1]
    if markers[:-1].strip(b"\xff") or not 1 <= padding <= GROUP:
        raise Corruption(f"encoded key has impossible markers {markers.hex()}")
    skipped = len(RAW) + NAMESPACE_BYTES
    kept = [GROUP - skipped, *[GROUP] * (groups - 1)]
    kept[-1] -= padding
    if kept[0] < 0:
        raise Corruption("encoded key is too short to hold a namespace")
    ends = "x".join(f"{length}s" for length in kept)
    return Struct(f"{skipped}x{ends}{padding + 1}x").unpack


def decode_user_key(prefix: bytes) -> bytes:
    """The user key of an engine key's prefix: for scans, without the check of padding in `decode_key`.

    >>> decode_user_key(encode_prefix(bytes(3) + b"a key of some length"))
    b'a key of some length'
    """
    try:
        return b"".join(user_key_shape(prefix[GROUP::MARKED_GROUP])(prefix))
    except StructError as error:
        raise Corruption(f"encoded key {prefix.hex()} is not made of whole groups") from error
