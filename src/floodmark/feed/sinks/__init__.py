"""Where feeds write to: the port, and the sinks that come with Floodmark."""

from floodmark.feed.sinks.base import (
    AllowedSinks,
    OpenSink,
    Sink,
    SinkAddress,
    SinkContext,
    known_schemes,
    open_sink,
    parse_sink,
    require_sink,
)

__all__ = [
    "AllowedSinks",
    "OpenSink",
    "Sink",
    "SinkAddress",
    "SinkContext",
    "known_schemes",
    "open_sink",
    "parse_sink",
    "require_sink",
]
