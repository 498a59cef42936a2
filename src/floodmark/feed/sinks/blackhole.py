"""`blackhole:` discards all changes.  It serves to measure the throughput of a feed, and to try feeds."""

from collections.abc import Sequence

from floodmark.feed.sinks.base import Sink, SinkAddress, SinkContext
from floodmark.model.change import Change
from floodmark.model.errors import Closed
from floodmark.model.version import Version


class BlackholeSink:
    """Discards all changes."""

    def __init__(self) -> None:
        self._closed = False

    def write(self, changes: Sequence[Change], *, since: Version, through: Version) -> None:
        if self._closed:
            raise Closed("the sink blackhole: was closed; open it again")

    def flush(self) -> None:
        pass

    def close(self) -> None:
        self._closed = True


def open_sink(address: SinkAddress, _context: SinkContext) -> Sink:
    address.require_empty()
    address.require_known(())
    return BlackholeSink()
