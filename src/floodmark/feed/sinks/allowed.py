"""The sinks that a runner may open, and the parameters that it adds to their addresses.

A caller that may change a feed chooses its sink, and the runner opens it with its own rights: its files, its
network, its tokens.  So a runner has its own list.  An entry is the beginning of a sink's URI, and covers
that place and everything below it:

    parquet:/srv/exports                                     this directory, and directories below it
    kafka://broker:9092?password_file=secret/broker          every topic of this broker
    kafka:                                                   everything of this kind

The parameters of an entry are added to the address of a sink that it covers.  Only they may name files with
credentials: a feed's URI that names a file is refused, unless the entry names the same one.

`stdout:` and `blackhole:` need no entry.
"""

import os
import posixpath
import re
from collections.abc import Iterable
from typing import Final

from floodmark.feed.sinks.address import SinkAddress, parse_sink
from floodmark.feed.sinks.base import Sink, SinkContext, open_sink, require_sink
from floodmark.model.errors import NotAllowed

_HARMLESS: Final = frozenset({"stdout", "blackhole"})
_NAMES_A_FILE: Final = re.compile(r".*_(file|path|location|directory)", re.IGNORECASE)


class AllowedSinks:
    """The sinks that a runner may write to, by the beginnings of their URIs.

    >>> allowed = AllowedSinks(["parquet:exports", "kafka://broker:9092?password_file=secret"])
    >>> str(allowed.admit("kafka://broker:9092/users"))
    'kafka://broker:9092/users?password_file=secret'
    >>> allowed.admit("parquet:exports/../etc")
    Traceback (most recent call last):
      ...
    floodmark.model.errors.NotAllowed: the runner may not write to the feed's sink parquet:exports/../etc; \
if it is the right one, allow it with --allow or sinks=
    """

    def __init__(self, uris: Iterable[str] = ()) -> None:
        self._entries = tuple(map(parse_sink, uris))

    def open(self, uri: str, context: SinkContext) -> Sink:
        """Open the sink of a feed, if it is allowed, with the parameters that the runner adds."""
        require_sink(uri)
        return open_sink(str(self.admit(uri)), context)

    def admit(self, uri: str) -> SinkAddress:
        """The address of a sink with the runner's parameters; `NotAllowed` if no entry covers it."""
        address = parse_sink(uri)
        entry = next((entry for entry in self._entries if _covers(entry, address)), None)
        if entry is None and address.scheme not in _HARMLESS:
            raise NotAllowed(
                f"the runner may not write to the feed's sink {uri}; if it is the right one, allow it with "
                "--allow or sinks=",
                sink=uri,
            )
        own = {} if entry is None else dict(entry.parameters)
        for name, value in address.parameters.items():
            if _NAMES_A_FILE.fullmatch(name) and own.get(name) != value:
                raise NotAllowed(
                    f"the feed's sink {uri} names a file with {name}, which only the runner may do; allow "
                    f"the sink with --allow or sinks=, and add ?{name}=FILE there",
                    sink=uri,
                )
        return address._replace(parameters={**address.parameters, **own})


def _covers(entry: SinkAddress, address: SinkAddress) -> bool:
    """Whether an address is the place of an entry, or lies below it."""
    if entry.scheme != address.scheme:
        return False
    if not entry.host and not entry.path:
        return True
    if entry.host != address.host:
        return False
    place, path = _plain(entry), _plain(address)
    return path == place or path.startswith(place.rstrip("/") + "/")


def _plain(address: SinkAddress) -> str:
    """A normalised path.  Without a host it is a path of this machine, whose links are resolved."""
    if address.host:
        return posixpath.normpath("/" + address.path.lstrip("/"))
    return os.path.realpath(address.path)
