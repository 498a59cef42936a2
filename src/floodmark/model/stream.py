"""A stream of changes as it travels: what is asked for, and the batches that come.

Batches hold columns of stored bytes and nothing decoded, so that a batch goes from the change log into a
process, or over a wire and into one, without work for each change on the way.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum

import msgspec

from floodmark.model.change import Heartbeat
from floodmark.model.ranges import KeyRange
from floodmark.model.version import Version


def order_places(version: Version, snapshot: bytes | None) -> tuple[Version, bool, bytes]:
    """What sorts places in a stream: a snapshot at a version comes before the changes above it.

    >>> order_places(7, b"") < order_places(7, b"ada") < order_places(7, None) < order_places(8, None)
    True
    """
    return version, snapshot is None, snapshot or b""


class Way(StrEnum):
    """How a reader gets on: from memory, from the change log, by scanning all versions, or by a snapshot."""

    TAIL = "tail"
    LOG = "log"
    SCAN = "scan"
    SNAPSHOT = "snapshot"


class ChangesRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Which changes a reader wants: those of qualified keys in `(since, until]`.

    Without `until` the stream ends at the present, or never if it follows.  `namespace` is the id of the
    one namespace that the keys are in; None means all of them.  `own` leaves out what came from other sites.

    Where records are merged, a change wrote only a part of one.  Its value is the whole record as it was
    then; with `partial` it is what was written, to be merged elsewhere.  Who catches up by scanning gets
    whole records in both cases.

    With `keys_only` all values are empty, for readers that need only the keys that changed.

    With `snapshot` the stream begins with the records that live at `since`, in order of keys, and goes on
    with the changes above it.  The bytes are the qualified key behind which the snapshot begins; empty for
    all of it.  So a place in a stream is a version and, within a snapshot, a key.
    """

    keys: KeyRange = KeyRange()
    namespace: int | None = None
    since: Version = 0
    until: Version | None = None
    follow: bool = False
    before_images: bool = False
    heartbeats: bool = False
    own: bool = False
    partial: bool = False
    keys_only: bool = False
    snapshot: bytes | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ChangeBatch:
    """Some changes in commit order, column by column.

    `keys` are qualified and `values` as stored.  `befores` holds what was stored under each key before
    the change, if that was asked for.  With this batch and those before it, the reader has every change
    at or below `through`, and none above: it is where to go on from.  So a batch never ends inside a commit,
    whatever partitions that lies in.  Within a commit, changes stand in order of keys.

    A batch with `snapshot` holds records as of version `through` instead, with the versions at which they
    were committed.  The reader has those up to the qualified key `snapshot`, and goes on from both.  The
    first batch without it says that the snapshot is complete.
    """

    through: Version
    way: Way = Way.LOG
    versions: Sequence[Version] = ()
    partitions: Sequence[int] = ()
    keys: Sequence[bytes] = ()
    values: Sequence[bytes] = ()
    befores: Sequence[bytes | None] | None = None
    heartbeats: Sequence[Heartbeat] = field(default=())
    snapshot: bytes | None = None
