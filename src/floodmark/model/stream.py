"""A stream of changes as it travels: what is asked for, and the batches that come.

Batches hold columns of stored bytes and nothing decoded, so that a batch goes from the change log into a
process, or over a wire and into one, without work for each change on the way.
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
    """The reaction of a stream of changes to a data set that was published in the place of what it read."""

    # GenerationSwapped.
    FAIL = "fail"
    # A marker, and what is different: puts and deletes at the version of the swap.
    DIFFERENCE = "difference"
    # A marker, and all records of the new generation.
    SNAPSHOT = "snapshot"


# No key of a namespace begins with it.
_SWAP: Final = b"\xff\xff\xff"
_WAYS: Final = {way.value[:1].encode(): way for way in (OnGeneration.DIFFERENCE, OnGeneration.SNAPSHOT)}
SWAP_PLACE_BYTES: Final = len(_SWAP) + 1


class SwapPlace(NamedTuple):
    """A place within what comes at a swap, behind a qualified key; without one, behind the marker.

    It is written where a place in a snapshot has its key.  Its version is the last before the swap, so a
    reader that looks at nothing else begins again with the marker.

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
    """What sorts places in a stream: a snapshot at a version comes before the changes above it.

    What comes at a swap comes after the changes before it.

    >>> order_places(7, b"") < order_places(7, b"ada") < order_places(7, None) < order_places(8, None)
    True
    >>> order_places(7, None) < order_places(7, SwapPlace(OnGeneration.SNAPSHOT).encode())
    True
    """
    if snapshot is None:
        return version, 1, b""
    return version, 2 if snapshot.startswith(_SWAP) else 0, snapshot


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

    `on_generation` says how the stream goes on where a data set was published.  A stream that begins within
    what comes there, at a `SwapPlace`, goes on with that first.
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

    `keys` are qualified and `values` as stored.  `befores` holds what was stored under each key before
    the change, if that was asked for.  With this batch and those before it, the reader has every change
    at or below `through`, and none above: it is where to go on from.  So a batch never ends inside a commit,
    whatever partitions that lies in.  Within a commit, changes stand in order of keys.

    A batch with `snapshot` holds records as of version `through` instead, with the versions at which they
    were committed.  The reader has those up to the qualified key `snapshot`, and goes on from both.  The
    first batch without it says that the snapshot is complete.  At a `SwapPlace` the records are those that
    come at the swap, whose version follows `through`.
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
