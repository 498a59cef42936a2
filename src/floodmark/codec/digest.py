"""The digest of a change, which heartbeats sum up and every stage of a pipeline can recompute.

XXH64 with seed 42 (Spark's `xxhash64` of a binary column) over

    stamp version: 8 bytes | stamp site: 1 byte | key length: 2 bytes | user key | content

where the content is the result of `encode_value` without the origin: value, stamps, expiry, flags.  The
digest depends on the origin and not on the site that stores the change, so it is the same at every site.
"""

from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from struct import Struct
from typing import Final

import xxhash

from floodmark.codec.ordered import NAMESPACE_BYTES
from floodmark.model.version import Version

SEED: Final = 42

_STAMP: Final = Struct(">QB")
_LENGTHS: Final = tuple(length.to_bytes(2, "big") for length in range(4097))
# By the length of the qualified key.
_QUALIFIED_LENGTHS: Final = (b"",) * NAMESPACE_BYTES + _LENGTHS

hash_bytes: Final[Callable[[bytes, int], int]] = xxhash.xxh64_intdigest
# `hash_bytes` as eight bytes, big-endian.
digest_bytes: Final[Callable[[bytes, int], bytes]] = xxhash.xxh64_digest
# Eight bytes, big-endian, for checking that content is unchanged; several times as quick as `digest_bytes`.
checksum: Final[Callable[[bytes], bytes]] = xxhash.xxh3_64_digest


def digest_change(version: Version, site: int, key: bytes, content: bytes) -> int:
    """The digest of one change with stamp (version, site)."""
    return hash_bytes(_STAMP.pack(version, site) + _LENGTHS[len(key)] + key + content, SEED)


def digest_rows(
    versions: Sequence[Version], site: int, keys: Sequence[bytes], contents: Sequence[bytes]
) -> list[int]:
    """The digests of changes that were all first written at one site; `keys` are qualified."""
    # Most of the cost of checking is here, so each row takes as few calls as possible.
    pack, lengths, digest_of = _STAMP.pack, _QUALIFIED_LENGTHS, hash_bytes
    return [
        digest_of(pack(version, site) + lengths[len(key)] + key[NAMESPACE_BYTES:] + content, SEED)
        for version, key, content in zip(versions, keys, contents, strict=True)
    ]


def digest_changes(
    version: Version, site: int, keys: Sequence[bytes], contents: Sequence[bytes]
) -> Iterator[tuple[bytes, int, int]]:
    """Namespace, count and XOR of digests of one commit, for each namespace.

    `keys` are qualified, the namespace's three bytes, then the user key; and they are in order.
    """
    stamp, digest_of = _STAMP.pack(version, site), hash_bytes
    heads = {length: stamp + _QUALIFIED_LENGTHS[length] for length in set(map(len, keys))}
    changes = zip(keys, contents, strict=True)
    start = 0
    while start < len(keys):
        namespace = keys[start][:NAMESPACE_BYTES]
        end = len(keys) if keys[-1].startswith(namespace) else bisect_right(keys, namespace, key=_namespace)
        digest = 0
        for key, content in islice(changes, end - start):
            digest ^= digest_of(heads[len(key)] + key[NAMESPACE_BYTES:] + content, SEED)
        yield namespace, end - start, digest
        start = end


def _namespace(qualified: bytes) -> bytes:
    return qualified[:NAMESPACE_BYTES]
