"""Records: the content of one version of one key, and the answers of reads."""

import msgspec

from floodmark.model.change import Stamp
from floodmark.model.version import Version


class Record(msgspec.Struct, frozen=True):
    """The value or tombstone of one version of a key.

    `origin` is None at the site where the record was first written.  `stamps` is the body of the stamps of
    its fields or counts, if the record is merged with others of its key.  `batched` is true if an atomic
    batch wrote it.
    """

    value: bytes
    expires_at: int | None = None
    deleted: bool = False
    origin: Stamp | None = None
    stamps: bytes | None = None
    batched: bool = False

    def is_dead_at(self, physical_ms: int) -> bool:
        """Whether a reader at this time finds nothing.  A record is dead from its second of expiry on.

        >>> Record(b"x", expires_at=2).is_dead_at(1999), Record(b"x", expires_at=2).is_dead_at(2000)
        (False, True)
        """
        return self.deleted or (self.expires_at is not None and self.expires_at * 1000 <= physical_ms)


class Versioned(msgspec.Struct, frozen=True):
    """A live record with the version of its commit at this site, and its stamp."""

    key: bytes
    value: bytes
    version: Version
    stamp: Stamp
    expires_at: int | None = None


class AtomicRecord(msgspec.Struct, frozen=True, array_like=True):
    """The newest record of a key, as an atomic read needs it; version 0 if there is none.

    `value` is None if the record is dead.  A `merged` record contains the parts of several writes.
    """

    version: Version
    stamp: Stamp
    value: bytes | None
    batched: bool
    merged: bool


class FreshValue(msgspec.Struct, frozen=True, array_like=True):
    """The value of a key as of a fresh version, and that version."""

    version: Version
    value: bytes | None


class AtomicAnswer(msgspec.Struct, frozen=True, array_like=True):
    """The answer of a node to an atomic read.

    Nothing at or below `resolved` was still to come when the first record was read.  `siblings` has the keys
    of batches by their versions, as places in the keys and `among` of the request; a batch above `resolved`
    that is missing there is unknown to the node.  `swapped` is the version of the last swap that the node
    knows in the namespaces of the keys and of `among`.
    """

    resolved: Version
    records: list[AtomicRecord]
    siblings: dict[Version, list[int]] = {}
    swapped: Version = 0


class FoundRecord(msgspec.Struct, frozen=True):
    """The record of a key at a site, dead or alive, and the digest of its content (`codec/thin.py`)."""

    version: Version
    stored: bytes
    digest: int


class Repair(msgspec.Struct, frozen=True):
    """A record to store under a key, if the key still has the version `seen`; 0 stands for no record."""

    key: bytes
    seen: Version
    stored: bytes
