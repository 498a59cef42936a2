"""Streams of changes: the request, and the batches of the answer.

Batches hold columns of stored bytes and nothing decoded, so that a batch gets from the change log to a
reader, also over a wire, without work for each change.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final, NamedTuple

import msgspec

from floodmark.model.change import Heartbeat
from floodmark.model.errors import InvalidVersion
from floodmark.model.ranges import KeyRange
from floodmark.model.version import Version


class OnGeneration(StrEnum):
    """The reaction of a stream of changes to a data set that replaces the records that it has read."""

    # Raise GenerationSwapped.
    FAIL = "fail"
    # Deliver a marker and the difference: puts and deletes at the version of the swap.
    DIFFERENCE = "difference"
    # Deliver a marker, and all records of the new generation.
    SNAPSHOT = "snapshot"


# No key of a namespace begins with it.
_SWAP: Final = b"\xff\xff\xff"
_WAYS: Final = {way.value[:1].encode(): way for way in (OnGeneration.DIFFERENCE, OnGeneration.SNAPSHOT)}
SWAP_PLACE_BYTES: Final = len(_SWAP) + 1


class SwapPlace(NamedTuple):
    """A place within the changes of a swap, after a qualified key; without a key, after the marker.

    It is encoded in the place of a snapshot's key.  Its version is the last before the swap, so a reader that
    uses only the version begins again with the marker.

    >>> SwapPlace.decode(SwapPlace(OnGeneration.DIFFERENCE, b"ada").encode())
    SwapPlace(way=<OnGeneration.DIFFERENCE: 'difference'>, key=b'ada')
    >>> SwapPlace.decode(b"ada")
    """

    way: OnGeneration
    key: bytes = b""

    def encode(self) -> bytes:
        return _SWAP + self.way.value[:1].encode() + self.key

    @staticmethod
    def decode(place: bytes | None) -> "SwapPlace | None":
        """The place that was encoded; None if it is not at a swap."""
        if place is None or not place.startswith(_SWAP):
            return None
        way = _WAYS.get(place[len(_SWAP) : SWAP_PLACE_BYTES])
        if way is None:
            raise InvalidVersion(f"0x{place.hex():.60} is no place in a stream of changes")
        return SwapPlace(way, place[SWAP_PLACE_BYTES:])


def order_places(version: Version, snapshot: bytes | None) -> tuple[Version, int, bytes]:
    """A sort key for places in a stream: a snapshot at a version precedes the changes above that version.

    The changes of a swap follow the changes at or below the version before it.

    >>> order_places(7, b"") < order_places(7, b"ada") < order_places(7, None) < order_places(8, None)
    True
    >>> order_places(7, None) < order_places(7, SwapPlace(OnGeneration.SNAPSHOT).encode())
    True
    """
    if snapshot is None:
        return version, 1, b""
    return version, 2 if snapshot.startswith(_SWAP) else 0, snapshot


class Way(StrEnum):
    """The source of a reader's changes: memory, the change log, a scan of all versions, or a snapshot."""

    TAIL = "tail"
    LOG = "log"
    SCAN = "scan"
    SNAPSHOT = "snapshot"


class ChangesRequest(msgspec.Struct, frozen=True, kw_only=True):
    """The changes that a reader wants: those of qualified keys in `(since, until]`.

    Without `until` the stream ends at the present, or never if it follows.  `namespace` is the id of the
    one namespace that the keys are in; None means all of them.  `own` leaves out changes from other sites.

    Where records are merged, a change wrote only a part of one.  Its value is the whole record as it was
    then; with `partial` it is the written part, to be merged elsewhere.  A reader that catches up by a scan
    gets whole records in both cases.

    With `keys_only` all values are empty, for readers that need only the keys that changed.

    With `snapshot` the stream begins with the records that live at `since`, in order of keys, and continues
    with the changes above it.  The bytes are the qualified key after which the snapshot begins; empty for
    all of it.  So a place in a stream is a version and, within a snapshot, a key.

    `on_generation` is the reaction of the stream to a published data set.  A stream that begins at a
    `SwapPlace`, within the changes of a swap, continues with these first.
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
    on_generation: OnGeneration = OnGeneration.FAIL


@dataclass(frozen=True, slots=True, kw_only=True)
class ChangeBatch:
    """Some changes in commit order, column by column.

    `keys` are qualified and `values` as stored.  `befores` has the stored record of each key before the
    change, if that was asked for.  With this batch and those before it, the reader has every change at or
    below `through`, and none above: the stream can continue from there.  So a batch never ends inside a
    commit, whatever partitions the commit is in.  Within a commit, changes are in order of keys.

    A batch with `snapshot` has records as of version `through` instead, with the versions at which they were
    committed.  The reader has those up to the qualified key `snapshot`, and continues from the two.  The
    first batch without it means that the snapshot is complete.  At a `SwapPlace` the records are those of the
    swap, whose version follows `through`.
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

    @property
    def is_snapshot(self) -> bool:
        """Whether the rows are records of a snapshot, and no changes."""
        swap = SwapPlace.decode(self.snapshot)
        return self.snapshot is not None and (swap is None or swap.way is OnGeneration.SNAPSHOT)

    @property
    def is_marker(self) -> bool:
        """Whether the row is the marker of a swap."""
        swap = SwapPlace.decode(self.snapshot)
        return bool(self.keys) and swap is not None and not swap.key

    @property
    def at(self) -> Version:
        """The version of a snapshot."""
        return self.through if SwapPlace.decode(self.snapshot) is None else self.through + 1
