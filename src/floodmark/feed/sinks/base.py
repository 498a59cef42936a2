"""The port to the target of a feed, and how a sink is found.

A sink is opened for one range of a feed, at the range's checkpoint, and gets the range's changes from there
on: batch after batch, in commit order, from one thread at a time.  A batch is never divided between two
calls.  When `flush` returns, everything that was written is durable, and only then does the checkpoint move.

A feed that begins with a snapshot at a version S first writes the records that live at S, in order of keys,
as changes with `snapshot` set and the version S.  All rows of a batch belong to the snapshot or none does; a
batch of the snapshot has `since` and `through` S.  A range that is opened in the middle of the snapshot has
`snapshot` in its context: the keys above that one are delivered again.

After a crash, an error or a move, the range is opened again at its last checkpoint and **the changes above it
are delivered again**.  A sink must make that harmless: by key and stamp, as another site does; by leaving out
the rows that it holds, as files do; or by saying so, as stdout does.  A repeated batch may end at another
version than the first time, so batches cannot be matched.

Sinks are found by the scheme of their URI among the entry points of the group `floodmark.sinks`.  An entry
point is a function `open_sink(address, context) -> Sink`; its module is imported at the first use.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points
from typing import Final, Protocol, TypeAlias, cast

from floodmark.feed.sinks.address import SinkAddress, parse_sink
from floodmark.model.change import Change
from floodmark.model.errors import InvalidArgument
from floodmark.model.ranges import KeyRange
from floodmark.model.version import Version

GROUP: Final = "floodmark.sinks"

# Kinds that earlier releases had, with the command to use instead.
_RETIRED: Final = dict.fromkeys(
    ("floodmark", "floodmark+tls"), "floodmark replicate SOURCE TARGET --runner process"
)


@dataclass(frozen=True, kw_only=True)
class SinkContext:
    """The range whose changes a sink gets, and its checkpoint.

    `range_id` is never used again for other keys of the feed; `keys` are the user keys of the range.  Changes
    of these keys above `since` are delivered, also if the sink got them before.  With `snapshot`, a user's
    key or b"", so are the rows of the snapshot at `since` above that key.
    """

    site: str
    feed: str
    namespace: str
    range_id: int
    keys: KeyRange
    since: Version
    snapshot: bytes | None = None


class Sink(Protocol):
    """A target for the changes of one range.

    After a `Terminal` error the feed fails.  After any other error the sink is closed, opened again and given
    the same changes.
    """

    def write(self, changes: Sequence[Change], *, since: Version, through: Version) -> None:
        """Take all changes of the range in `(since, through]`, or rows of a snapshot; at least one."""
        ...

    def flush(self) -> None:
        """Return when everything that was written is durable."""
        ...

    def close(self) -> None:
        """Free resources.  Changes that were not flushed may be lost.  Closing twice is harmless."""
        ...


OpenSink: TypeAlias = Callable[[str, SinkContext], Sink]


def open_sink(uri: str, context: SinkContext) -> Sink:
    """Open the sink of a URI for one range of a feed."""
    address = parse_sink(uri)
    opener = cast(Callable[[SinkAddress, SinkContext], Sink], _find(address.scheme).load())
    return opener(address, context)


def require_sink(uri: str) -> None:
    """Raise InvalidArgument for a URI that cannot be read, or whose kind of sink is not installed."""
    _find(parse_sink(uri).scheme)


def known_schemes() -> list[str]:
    """The kinds of sinks that are installed."""
    return sorted({point.name for point in entry_points(group=GROUP)} - _RETIRED.keys())


def _find(scheme: str) -> EntryPoint:
    if scheme in _RETIRED:
        raise InvalidArgument(
            f"the sink {scheme}: was removed, because it could bring deleted keys back; remove the "
            f"feed, and use `{_RETIRED[scheme]}` instead (docs/operations/replicate.md)",
            scheme=scheme,
        )
    for point in entry_points(group=GROUP, name=scheme):
        return point
    raise InvalidArgument(
        f"there is no sink {scheme}: here; there are: {', '.join(name + ':' for name in known_schemes())}. "
        "Other kinds come as packages that register themselves when they are installed",
        scheme=scheme,
    )
