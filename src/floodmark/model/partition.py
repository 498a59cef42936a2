"""The partition protocol: what a site needs of a range of keys, wherever it is served.

A *qualified* key is the three bytes of a namespace followed by the user's key.  Every call may raise
`PartitionMoved`; the site then asks for the partition map again and goes on behind what it has.
"""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from floodmark.model.ranges import KeyRange
from floodmark.model.record import Versioned
from floodmark.model.version import Version


class Page(NamedTuple):
    """Live (user key, value) pairs in order, and where to go on; None where the range has ended.

    `resume` is opaque: pass it back to `scan` of the same partition.
    """

    rows: list[tuple[bytes, bytes]]
    resume: bytes | None


class CommitLimits(NamedTuple):
    """What one commit may hold; derived from what the engine underneath can take at once."""

    bytes_max: int
    changes_max: int


class Partition(Protocol):
    """A range of keys with one writer."""

    id: int
    range: KeyRange
    limits: CommitLimits

    def get(self, key: bytes, at: Version | None = None) -> bytes | None:
        """The value of a qualified key, now or as of a version."""
        ...

    def find(self, key: bytes, at: Version | None = None) -> Versioned | None:
        """The live record of a qualified key with its version and stamp."""
        ...

    def scan(
        self,
        keys: KeyRange,
        at: Version,
        *,
        rows_max: int,
        reverse: bool = False,
        resume: bytes | None = None,
    ) -> Page:
        """Some live records of one namespace as of a version; it may be empty before the end."""
        ...

    def put(self, keys: Sequence[bytes], values: Sequence[bytes], *, durable: bool) -> Version:
        """Store encoded values under distinct qualified keys, as one commit."""
        ...

    def compare_and_set(self, key: bytes, expected: bytes | None, value: bytes, *, durable: bool) -> Version:
        """Store an encoded value if the present one is as expected (None: absent); 0 if it is not."""
        ...

    def delete_unchanged(self, keys: Sequence[bytes], since: Version, *, durable: bool) -> int:
        """Delete those keys that were not written after `since`, as one commit; how many."""
        ...

    def resolved_version(self) -> Version:
        """Every change at or below it is durable and published, and none will be added."""
        ...
