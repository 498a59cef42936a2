"""The port to whatever a feed writes to, and how a sink is found.

A sink is opened for one range of a feed, at the range's checkpoint, and gets the range's changes from there
on: batch after batch, in commit order, from one thread at a time.  A batch is never divided between two
calls.  When `flush` returns, everything that was written is safe, and only then does the checkpoint move.

A feed that begins with a snapshot at a version S first writes what lives then, in order of keys, as changes
with `snapshot` set and the version S.  A batch is all of a snapshot or not at all, and one of a snapshot has
`since` and `through` S.  A range that is opened in the middle of it has `snapshot` in its context: what lies
behind that key is written again.

After a crash, an error or a move, the range is opened again at its last checkpoint and **what came after it
is written once more**.  A sink must make that harmless: by key and stamp, as another site does; by
replacing what it has above `since`, as files do; or by saying so, as stdout does.  A retried batch may end
elsewhere than it did the first time, so the batch itself tells nothing.

Sinks are found by the scheme of their URI among the entry points of the group `floodmark.sinks`.  An entry
point is a function `open_sink(address, context) -> Sink`; its module is imported when it is first used, so
what a sink needs is loaded by those who use it.
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


@dataclass(frozen=True, kw_only=True)
class SinkContext:
    """Whose changes a sink is to get, and from where on.

    `range_id` is never used again for other keys of the feed; `keys` are the user keys of the range.  What
    the sink holds of these keys above `since` will be written again.  With `snapshot`, a user's key or b"",
    so will the rows of the snapshot at `since` behind that key.
    """

    site: str
    feed: str
    namespace: str
    range_id: int
    keys: KeyRange
    since: Version
    snapshot: bytes | None = None


class Sink(Protocol):
    """Somewhere to write the changes of one range to.

    A `Terminal` error says that trying again is of no use; any other error, that the sink is to be closed,
    opened again and given the same changes.
    """

    def write(self, changes: Sequence[Change], *, since: Version, through: Version) -> None:
        """Take all changes of the range in `(since, through]`, or rows of a snapshot; at least one."""
        ...

    def flush(self) -> None:
        """Return when everything that was written is safe."""
        ...

    def close(self) -> None:
        """Let go.  What was not flushed may be lost.  Closing twice is harmless."""
        ...


OpenSink: TypeAlias = Callable[[str, SinkContext], Sink]


def open_sink(uri: str, context: SinkContext) -> Sink:
    """Open the sink of a URI for one range of a feed."""
    address = parse_sink(uri)
    opener = cast(Callable[[SinkAddress, SinkContext], Sink], _find(address.scheme).load())
    return opener(address, context)


def require_sink(uri: str) -> None:
    """Refuse a URI that cannot be read, or whose kind of sink is not installed here."""
    _find(parse_sink(uri).scheme)


def known_schemes() -> list[str]:
    """The kinds of sinks that are installed."""
    return sorted({point.name for point in entry_points(group=GROUP)})


def _find(scheme: str) -> EntryPoint:
    for point in entry_points(group=GROUP, name=scheme):
        return point
    raise InvalidArgument(
        f"there is no sink {scheme}: here; there are: {', '.join(name + ':' for name in known_schemes())}. "
        "Other kinds come as packages that register themselves when they are installed",
        scheme=scheme,
    )
