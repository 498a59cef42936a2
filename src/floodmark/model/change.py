"""Stamps, changes, and the heartbeats by which a reader checks that it has all changes."""

from collections.abc import Mapping
from enum import StrEnum
from typing import NamedTuple

import msgspec

from floodmark.model.version import Version


class Stamp(msgspec.Struct, frozen=True, order=True, array_like=True, gc=False):
    """The version and site at which a change was first written.  All sites order writes to a key by stamp.

    >>> Stamp(7, 2) > Stamp(7, 1) > Stamp(6, 9)
    True
    """

    version: Version
    site: int


class ChangeType(StrEnum):
    """What a change did to its key.

    A reader that asks for before-images gets the finer types, as in Delta's change data feed: an update
    is two changes, with the value before and the value after, and a delete carries the value that it
    removed.
    """

    UPSERT = "upsert"
    DELETE = "delete"
    INSERT = "insert"
    UPDATE_PREIMAGE = "update_preimage"
    UPDATE_POSTIMAGE = "update_postimage"
    # A data set was published and has replaced the namespace.  The change has no key.  The changes after it
    # are the difference; with `snapshot`, they are all records, and everything read before is void.
    GENERATION = "generation"


class Change(msgspec.Struct, frozen=True, gc=False):
    """One put or delete of one key, committed at `version` of the site that it was read from.

    With `snapshot` it is a row of a snapshot at `version`: the record that the key had then, with its
    original stamp, whenever it was written.

    The changes of an atomic batch have its id, the version of its commit, as `batch`.
    """

    namespace: str
    key: bytes
    value: bytes | None
    type: ChangeType
    version: Version
    stamp: Stamp
    partition: int
    expires_at: int | None = None
    snapshot: bool = False
    batch: Version | None = None


class Resolved(msgspec.Struct, frozen=True):
    """A marker in a stream of changes: everything at or below `version` has been delivered.

    With `snapshot`, an opaque key, the stream is within a snapshot at `version`: the records up to that key
    have been delivered.  A stream can continue from either kind of marker.
    """

    version: Version
    snapshot: bytes | None = None


class Tally(NamedTuple):
    """A count of changes and the XOR of their digests: equal tallies mean that nothing is missing.

    XOR makes the order of counting irrelevant, so a reader may count as the changes arrive.
    """

    changes: int = 0
    digest: int = 0

    def plus(self, other: "Tally") -> "Tally":
        """The tally of two disjoint sets of changes.

        >>> Tally(1, 6).plus(Tally(2, 3))
        Tally(changes=3, digest=5)
        """
        return Tally(self.changes + other.changes, self.digest ^ other.digest)


class Sums(NamedTuple):
    """The tallies of one namespace over one interval: of this site's own changes, and of all."""

    own: Tally = Tally()
    all: Tally = Tally()

    def plus(self, other: "Sums") -> "Sums":
        """The sums of two disjoint sets of changes."""
        return Sums(self.own.plus(other.own), self.all.plus(other.all))


class Heartbeat(msgspec.Struct, frozen=True):
    """A sign of life of one node, and an account of its changes in `(since, through]`.

    Where several nodes serve a site, node 0 stands for the site: its account is the sum of theirs.

    `log` is None in an ordinary heartbeat, whose account covers all logs of the node; the heartbeat that
    seals a log covers that log alone.  `since` 0 means that the node has lost count (a write failed, or a
    restart had too much to count again): the interval is reported as unchecked.
    """

    version: Version
    node: int
    wall_ms: int
    since: Version
    through: Version
    watermark: Mapping[int, Mapping[int, Version]]
    sums: Mapping[int, Sums]
    log: int | None = None


class NamespaceBeat(msgspec.Struct, frozen=True, kw_only=True):
    """The part of a heartbeat that concerns one namespace, with the site and node that wrote it.

    `own` and `all` are the namespace's tallies over `(since, through]`, and `watermark` has the version up to
    which site `site` has the changes of each other site.  It has no entry for `site`: that is `through`.
    """

    site: int
    node: int
    version: Version
    wall_ms: int
    since: Version
    through: Version
    log: int | None = None
    own: Tally = Tally()
    all: Tally = Tally()
    watermark: dict[int, Version] = {}


def narrow_heartbeat(heartbeat: Heartbeat, site: int, namespace: int) -> NamespaceBeat:
    """The part of a site's heartbeat that concerns one namespace, by its id at that site."""
    sums = heartbeat.sums.get(namespace, Sums())
    return NamespaceBeat(
        site=site,
        node=heartbeat.node,
        version=heartbeat.version,
        wall_ms=heartbeat.wall_ms,
        since=heartbeat.since,
        through=heartbeat.through,
        log=heartbeat.log,
        own=sums.own,
        all=sums.all,
        watermark=dict(heartbeat.watermark.get(namespace, {})),
    )
