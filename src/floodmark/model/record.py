"""What is stored under one version of one key."""

import msgspec

from floodmark.model.change import Stamp
from floodmark.model.version import Version


class Record(msgspec.Struct, frozen=True):
    """A value or a tombstone, as one version of a key holds it.

    `origin` is None where the record was first written at the site that holds it.  `stamps` are those of its
    fields or of its counts, where the record is merged with others of its key.  `batched` tells that an
    atomic batch wrote it.
    """

    value: bytes
    expires_at: int | None = None
    deleted: bool = False
    origin: Stamp | None = None
    stamps: bytes | None = None
    batched: bool = False

    def is_dead_at(self, physical_ms: int) -> bool:
        """Whether a reader at this time finds nothing.  A record is gone in the second it expires in.

        >>> Record(b"x", expires_at=2).is_dead_at(1999), Record(b"x", expires_at=2).is_dead_at(2000)
        (False, True)
        """
        return self.deleted or (self.expires_at is not None and self.expires_at * 1000 <= physical_ms)


class Versioned(msgspec.Struct, frozen=True):
    """A live record together with its history: when it was committed here, and where it came from."""

    key: bytes
    value: bytes
    version: Version
    stamp: Stamp
    expires_at: int | None = None


class AtomicRecord(msgspec.Struct, frozen=True, array_like=True):
    """The newest record of a key, as an atomic read needs it; version 0 if there is none.

    `value` is None if the record is dead.  A `merged` record holds what several writes have added.
    """

    version: Version
    stamp: Stamp
    value: bytes | None
    batched: bool
    merged: bool


class FreshValue(msgspec.Struct, frozen=True, array_like=True):
    """The value of a key as of a fresh version, which is told with it."""

    version: Version
    value: bytes | None


class AtomicAnswer(msgspec.Struct, frozen=True, array_like=True):
    """What a node answers to an atomic read.

    Nothing at or below `resolved` was still to come when the first record was read.  `siblings` has the keys
    of batches by their versions, as places in the keys and `among` of the request; a batch that is missing
    above `resolved` is not known any more.  `swapped` is the version of the last swap that the node knows in
    the namespaces of the keys and of `among`.
    """

    resolved: Version
    records: list[AtomicRecord]
    siblings: dict[Version, list[int]] = {}
    swapped: Version = 0


class FoundRecord(msgspec.Struct, frozen=True):
    """What a key holds at a site, dead or alive, and the digest of its content (`codec/thin.py`)."""

    version: Version
    stored: bytes
    digest: int


class Repair(msgspec.Struct, frozen=True):
    """A record that a key is to have, if it still has the version that was seen; 0 if it had none."""

    key: bytes
    seen: Version
    stored: bytes
