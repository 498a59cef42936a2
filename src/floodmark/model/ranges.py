"""Half-open ranges of keys.  An `end` of None means "to the end", so that no largest key is needed."""

from typing import NamedTuple


class KeyRange(NamedTuple):
    """All keys from `start` up to, but not including, `end`.

    >>> KeyRange(b"a", b"c").contains(b"b")
    True
    >>> KeyRange(b"a", b"c").intersect(KeyRange(b"b", None))
    KeyRange(start=b'b', end=b'c')
    >>> KeyRange(b"a", b"b").intersect(KeyRange(b"b", b"c")) is None
    True
    """

    start: bytes = b""
    end: bytes | None = None

    def contains(self, key: bytes) -> bool:
        """Whether the key lies in the range."""
        return key >= self.start and (self.end is None or key < self.end)

    def intersect(self, other: "KeyRange") -> "KeyRange | None":
        """The keys in both ranges, or None if there are none."""
        start = max(self.start, other.start)
        if self.end is None or other.end is None:
            end = other.end if self.end is None else self.end
        else:
            end = min(self.end, other.end)
        return KeyRange(start, end) if end is None or start < end else None


def prefix_end(prefix: bytes) -> bytes | None:
    """The smallest key above all keys that start with `prefix`; None if there is none.

    >>> prefix_end(b"ab"), prefix_end(b"a" + bytes([255])), prefix_end(bytes([255]))
    (b'ac', b'b', None)
    """
    stripped = prefix.rstrip(b"\xff")
    return stripped[:-1] + bytes([stripped[-1] + 1]) if stripped else None


def after(key: bytes) -> bytes:
    """The smallest key above `key`."""
    return key + b"\x00"
