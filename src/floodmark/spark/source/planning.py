"""How a reading is cut into Spark's tasks.

One task for each partition of the site: its keys lie together and are served by one node.  If more are asked
for (`minPartitions`), the keys of a partition are cut further, at guessed places: nothing is counted, because
counting costs as much as reading.  The guess takes the first and the last key and draws even steps between
them, in the alphabet that the keys are written in: between `user/0000` and `user/9999` lies `user/5000`, and
half-way in the bytes' own order would be far behind all of them.
"""

from collections.abc import Callable, Iterable, Sequence
from fractions import Fraction
from itertools import pairwise, takewhile
from math import floor
from string import punctuation
from typing import Final, TypeAlias

from floodmark.codec.ordered import NAMESPACE_BYTES
from floodmark.model.ranges import KeyRange
from floodmark.model.version import Version

# A few of the keys at both ends of a range, in any order.
Sample: TypeAlias = Callable[[KeyRange], Sequence[bytes]]

# How often a range is halved before its parts are cut evenly.
ROUNDS: Final = 3
# Steps are computed over this many bytes after the common prefix of all keys.
_PLACES: Final = 8

# The alphabets that keys often use, the smallest first; the last one has every byte.
_ALPHABETS: Final = tuple(
    sorted(set(alphabet))
    for alphabet in (
        b"0123456789",
        b"0123456789abcdef",
        b"0123456789ABCDEF",
        b"0123456789abcdefghijklmnopqrstuvwxyz",
        b"0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZ",
        b"0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz",
        bytes(range(0x20, 0x7F)),
        bytes(range(0x100)),
    )
)


def plan_ranges(
    partitions: Sequence[KeyRange],
    keys: KeyRange,
    count_min: int | None = None,
    sample: Sample | None = None,
) -> list[KeyRange]:
    """A range of keys cut along partitions, and further if `count_min` ranges are wanted; at least one.

    >>> plan_ranges([KeyRange(b"", b"m"), KeyRange(b"m")], KeyRange(b"c", b"x"))
    [KeyRange(start=b'c', end=b'm'), KeyRange(start=b'm', end=b'x')]
    """
    ranges = [within for partition in partitions if (within := partition.intersect(keys)) is not None]
    if not ranges:
        return [KeyRange(keys.start, keys.start)]
    if count_min is None or sample is None or count_min <= len(ranges):
        return ranges
    pieces = -(count_min // -len(ranges))
    return [piece for each in ranges for piece in cut_range(each, pieces, sample)]


def cut_range(keys: KeyRange, pieces: int, sample: Sample, rounds: int = ROUNDS) -> list[KeyRange]:
    """A range in up to `pieces` parts with about as many keys each, estimated from samples.

    It is halved a few times, and each half is sampled again, because keys are often clustered.

    >>> cut_range(KeyRange(b""), 2, lambda keys: [b"user/0000", b"user/9999"])
    [KeyRange(start=b'', end=b'user/5000'), KeyRange(start=b'user/5000', end=None)]
    """
    if pieces == 1:
        return [keys]
    if rounds == 0:
        return _cut_at(keys, _guess_borders(sample(keys), [Fraction(n, pieces) for n in range(1, pieces)]))
    left = pieces // 2
    halves = _cut_at(keys, _guess_borders(sample(keys), [Fraction(left, pieces)]))
    if len(halves) == 1:
        return halves
    counts = (left, pieces - left)
    return [
        piece
        for half, count in zip(halves, counts, strict=True)
        for piece in cut_range(half, count, sample, rounds - 1)
    ]


def users_keys(qualified: KeyRange) -> KeyRange:
    """A range of qualified keys of one namespace without its id, which differs between sites."""
    namespace, end = qualified.start[:NAMESPACE_BYTES], qualified.end
    inside = end is not None and end.startswith(namespace)
    return KeyRange(qualified.start[NAMESPACE_BYTES:], end[NAMESPACE_BYTES:] if end and inside else None)


def plan_versions(since: Version, until: Version, count: int) -> list[tuple[Version, Version]]:
    """The versions in `(since, until]` as up to `count` intervals of equal length; at least one.

    >>> plan_versions(0, 10, 3)
    [(0, 3), (3, 6), (6, 10)]
    """
    count = max(1, min(count, until - since))
    borders = [since + (until - since) * index // count for index in range(count + 1)]
    return list(pairwise(borders))


def _cut_at(keys: KeyRange, borders: Iterable[bytes]) -> list[KeyRange]:
    """A range in parts, of which each border begins one; borders outside are passed over."""
    inner = sorted({border for border in borders if keys.start < border and keys.contains(border)})
    ends: list[bytes | None] = [*inner, keys.end]
    return [KeyRange(start, end) for start, end in zip([keys.start, *inner], ends, strict=True)]


def _guess_borders(sampled: Sequence[bytes], places: Sequence[Fraction]) -> list[bytes]:
    """The keys that stand at some fractions of the way from the first key to the last."""
    if len(set(sampled)) < 2:
        return []
    prefix = _common_prefix(min(sampled), max(sampled))
    rests = [key[len(prefix) : len(prefix) + _PLACES] for key in sampled]
    alphabets = [
        _alphabet({rest[place] for rest in rests if place < len(rest)})
        for place in range(max(map(len, rests)))
    ]
    first, last = _to_number(min(rests), alphabets), _to_number(max(rests), alphabets) + 1
    return [prefix + _to_text(first + floor((last - first) * place), alphabets) for place in places]


def _common_prefix(first: bytes, last: bytes) -> bytes:
    same = takewhile(lambda pair: pair[0] == pair[1], zip(first, last, strict=False))
    return bytes(each for each, _ in same)


def _alphabet(seen: set[int]) -> Sequence[int]:
    """The bytes that may stand where some were seen."""
    if len(seen) == 1 and chr(min(seen)) in punctuation:
        return tuple(seen)
    return next(alphabet for alphabet in _ALPHABETS if seen.issubset(alphabet))


def _to_number(text: bytes, alphabets: Sequence[Sequence[int]]) -> int:
    number = 0
    for place, alphabet in enumerate(alphabets):
        number = number * len(alphabet) + (alphabet.index(text[place]) if place < len(text) else 0)
    return number


def _to_text(number: int, alphabets: Sequence[Sequence[int]]) -> bytes:
    text = bytearray()
    for alphabet in reversed(alphabets):
        number, digit = divmod(number, len(alphabet))
        text.append(alphabet[digit])
    return bytes(reversed(text))
