"""The stamps of stored records, read from their last bytes alone.

A commit that decides by stamps may read those of thousands of records.  Here a stamp is nine bytes that
compare as stamps do, the same as in a record from another site (`values.py`) and in a digest (`digest.py`):

    version: 8 bytes | site id: 1 byte          (big-endian)
"""

from collections.abc import Iterator, Mapping, Sequence
from operator import itemgetter
from typing import Final

from floodmark.codec.digest import SEED, hash_bytes
from floodmark.codec.ordered import NAMESPACE_BYTES, VERSION_BYTES
from floodmark.codec.values import (
    DELETED,
    HAS_EXPIRY,
    HAS_ORIGIN,
    HAS_STAMPS,
    IN_BATCH,
    PLAIN,
    decode_value,
    find_stamps,
)
from floodmark.model.version import Version

STAMP_BYTES: Final = VERSION_BYTES + 1
# The stamp of a record that carries none, and of a key that has no record: below every other.
NO_STAMP: Final = b""

_EXPIRY_BYTES: Final = 8
_INVERSE: Final = bytes(range(255, -1, -1))
_flags: Final = itemgetter(-1)
# The last byte of the origin, in a record in which only flags follow it.
_plain_site: Final = itemgetter(-2)


def _origin_place(flags: int) -> slice:
    if not flags & HAS_ORIGIN:
        return slice(0, 0)
    end = -1 - (_EXPIRY_BYTES if flags & HAS_EXPIRY else 0)
    return slice(end - STAMP_BYTES, end)


# The place of the origin in a record without stamps, by the flags that the record ends with.
_PLACES: Final = {
    flags: _origin_place(flags)
    for flags in range(1 + (HAS_EXPIRY | DELETED | HAS_ORIGIN | IN_BATCH))
    if not flags & ~(HAS_EXPIRY | DELETED | HAS_ORIGIN | IN_BATCH)
}


def encode_stamp(version: Version, site: int) -> bytes:
    """A stamp as bytes.

    >>> encode_stamp(7, 2) > encode_stamp(7, 1) > encode_stamp(6, 9) > NO_STAMP
    True
    """
    return version.to_bytes(VERSION_BYTES, "big") + bytes([site])


def stamp_version(stamp: bytes) -> Version:
    """The version of a stamp; 0 for `NO_STAMP`.

    >>> stamp_version(encode_stamp(7, 2)), stamp_version(NO_STAMP)
    (7, 0)
    """
    return int.from_bytes(stamp[:VERSION_BYTES], "big")


def is_later(stamp: bytes, data_set: bytes) -> bool:
    """Whether the version of a change's stamp is above that of a data set, which then does not replace it.

    >>> is_later(encode_stamp(8, 1), encode_stamp(7, 2)), is_later(encode_stamp(7, 3), encode_stamp(7, 2))
    (True, False)
    """
    return stamp[:VERSION_BYTES] > data_set[:VERSION_BYTES]


def own_stamp(engine_key: bytes, site: bytes) -> bytes:
    """The stamp of a record that was first written at this site: the version that its key ends with."""
    return engine_key[-VERSION_BYTES:].translate(_INVERSE) + site


def find_origins(records: Sequence[bytes]) -> list[bytes]:
    """The origins that stored records carry; `NO_STAMP` for those that were first written here.

    >>> from floodmark.codec.values import encode_value
    >>> from floodmark.model.change import Stamp
    >>> copied = encode_value(b"value", expires_at=2, origin=Stamp(7, 2))
    >>> find_origins([copied, encode_value(b"own")]) == [encode_stamp(7, 2), NO_STAMP]
    True
    """
    places = _PLACES
    try:
        flags = set(map(_flags, records))
        if len(flags) == 1:
            origins = list(map(itemgetter(places[flags.pop()]), records))
        else:
            origins = [record[places[record[-1]]] for record in records]
    except (IndexError, KeyError):
        return _decode_origins(records)
    return origins if set(map(len, origins)) <= {0, STAMP_BYTES} else _decode_origins(records)


def _decode_origins(records: Sequence[bytes]) -> list[bytes]:
    """`find_origins` for any records; raises Corruption for damaged ones."""
    origins = [decode_value(record).origin for record in records]
    return [NO_STAMP if origin is None else encode_stamp(origin.version, origin.site) for origin in origins]


def add_origin(record: bytes, stamp: bytes) -> bytes:
    """A record that was first written here, with its stamp.  A record that has its stamp keeps it.

    >>> add_origin(b"a\\x00", encode_stamp(7, 2))
    b'a\\x00\\x00\\x00\\x00\\x00\\x00\\x00\\x07\\x02\\x04'
    """
    end = len(decode_value(record).value)
    flags = record[-1]
    return (
        record if flags & HAS_ORIGIN else record[:end] + stamp + record[end:-1] + bytes([flags | HAS_ORIGIN])
    )


def take_origin(record: bytes) -> tuple[bytes, bytes]:
    """The origin of a record, and the record without it, as its first site stores it."""
    flags = record[-1]
    place = _place_before_stamps(record) if flags & HAS_STAMPS else _PLACES[flags]
    return record[place], record[: place.start] + record[place.stop : -1] + bytes([flags ^ HAS_ORIGIN])


def _place_before_stamps(record: bytes) -> slice:
    expiry = _EXPIRY_BYTES if record[-1] & HAS_EXPIRY else 0
    end = find_stamps(record, len(record) - 1 - expiry)
    return slice(end - STAMP_BYTES, end)


def is_first_written_at(site: int, record: bytes) -> bool:
    """Whether a record that is stored at a site was first written there.

    Then it carries no origin, unless a restored site got it back from another one.

    >>> from floodmark.codec.values import encode_value
    >>> from floodmark.model.change import Stamp
    >>> records = [encode_value(b"own"), *(encode_value(b"x", origin=Stamp(7, site)) for site in (1, 2))]
    >>> [is_first_written_at(1, record) for record in records]
    [True, True, False]
    """
    return not record[-1] & HAS_ORIGIN or find_origins((record,))[0][-1] == site


def digest_copies(
    keys: Sequence[bytes], records: Sequence[bytes], site: int
) -> Iterator[tuple[bytes, int, int, bool]]:
    """`digest_changes` for records that carry their origins, in runs of those first written at `site` or not.

    Yields namespace, count, XOR of digests, and whether the records of the run were first written at `site`.
    The keys are in order.  The content of a record excludes its origin and the flag for it.
    """
    lengths = {length: (length - NAMESPACE_BYTES).to_bytes(2, "big") for length in set(map(len, keys))}
    namespace, digest_of, seed = keys[0][:NAMESPACE_BYTES], hash_bytes, SEED
    plain, plain_end = HAS_ORIGIN, -1 - STAMP_BYTES
    if _are_alike(namespace, keys, records, site):
        yield namespace, len(keys), _digest_alike(keys, records, lengths), False
        return
    start = digest = 0
    own = is_first_written_at(site, records[0])
    for index, (key, record) in enumerate(zip(keys, records, strict=True)):
        # Most records have neither an expiry nor a tombstone.
        if record[-1] == plain:
            origin, content = record[plain_end:-1], record[:plain_end] + PLAIN
        else:
            origin, content = take_origin(record)
        if (origin[-1] == site) is not own or not key.startswith(namespace):
            yield namespace, index - start, digest, own
            namespace, start, digest, own = key[:NAMESPACE_BYTES], index, 0, origin[-1] == site
        digest ^= digest_of(origin + lengths[len(key)] + key[NAMESPACE_BYTES:] + content, seed)
    yield namespace, len(keys) - start, digest, own


def _are_alike(namespace: bytes, keys: Sequence[bytes], records: Sequence[bytes], site: int) -> bool:
    """Whether records are all of one namespace and of other sites, with neither an expiry nor a tombstone."""
    return (
        set(map(_flags, records)) == {HAS_ORIGIN}
        and keys[-1].startswith(namespace)
        and site not in map(_plain_site, records)
    )


def _digest_alike(keys: Sequence[bytes], records: Sequence[bytes], lengths: Mapping[int, bytes]) -> int:
    """The XOR of the digests of records that `_are_alike`."""
    plain_end, digest_of, joined = -1 - STAMP_BYTES, hash_bytes, b"".join
    digest = 0
    for key, record in zip(keys, records, strict=True):
        change = record[plain_end:-1], lengths[len(key)], key[NAMESPACE_BYTES:], record[:plain_end], PLAIN
        digest ^= digest_of(joined(change), SEED)
    return digest
