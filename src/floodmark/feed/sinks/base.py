"""The port to the target of a feed, and the lookup of sinks by URI.

A sink is opened for one range of a feed, at the range's checkpoint, and gets the range's changes from there
on: batch after batch, in commit order, from one thread at a time.  A batch is never divided between two
calls.  When `flush` returns, everything that was written is durable, and only then does the checkpoint move.

A feed that begins with a snapshot at a version S first writes the records that are live at S, in key order,
as changes with `snapshot` set and the version S.  Either all rows of a batch belong to the snapshot or none
does; a batch of the snapshot has `since` and `through` S.  A range that is opened in the middle of the
snapshot has `snapshot` in its context: the keys above that one are delivered again.

The rows of a swap, if the feed continues there, have one version, are in key order, and are delivered like a
snapshot, with or without `snapshot` set.  Before them, each range gets a change of type `generation`, which
has no key.

After a crash, an error or a move, the range is opened again at its last checkpoint and **the changes above it
are delivered again**.  A sink must make that harmless: by comparing key and stamp, as another site does; by
leaving out rows that it holds, as files do; or by documenting it, as stdout does.  A repeated batch may end
at another version than the first time, so batches cannot be matched.

Sinks are found by the scheme of their URI among the entry points of the group `floodmark.sinks`.  An entry
point is a function `open_sink(address, context) -> Sink`; its module is imported at the first use.

A URI, `scheme:place?name=value&…`, is stored with its feed and shown to every reader of the feed, so it never
contains a secret: a password or a token is in a file that the URI names.  Errors do not repeat a refused URI
either.

A caller that may change a feed chooses its sink, but the runner opens it with its own rights: its files, its
network, its tokens.  So each runner has a list of allowed sinks.  An entry is the prefix of a sink's URI, and
covers that place and everything below it:

    parquet:/srv/exports                                     this directory, and directories below it
    kafka://broker:9092?password_file=secret/broker          every topic of this broker
    kafka:                                                   everything of this kind

The parameters of an entry are added to the address of a sink that it covers.  Only entries may name files
with credentials: a feed's URI that names a file is refused, unless the entry names the same one.  `stdout:`
and `blackhole:` need no entry.
"""

import os
import posixpath
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points
from typing import Final, NamedTuple, Protocol, TypeAlias, cast
from urllib.parse import SplitResult, parse_qsl, quote, unquote, urlencode, urlsplit

from floodmark.model.change import Change
from floodmark.model.errors import InvalidArgument, NotAllowed
from floodmark.model.ranges import KeyRange
from floodmark.model.version import Version

GROUP: Final = "floodmark.sinks"
# Kinds of sinks that earlier releases had, each with the command to use instead.
_RETIRED: Final = dict.fromkeys(
    ("floodmark", "floodmark+tls"), "floodmark replicate SOURCE TARGET --runner process"
)
_UNLISTED: Final = frozenset({"stdout", "blackhole"})
_NAMES_A_FILE: Final = re.compile(r".*_(file|path|location|directory)", re.IGNORECASE)

URI_CHARACTERS_MAX: Final = 2_048

_SECRET: Final = re.compile(r"token|password|secret|credential|key", re.IGNORECASE)
# Parameters that name a file, or keys that are no secret.
_HARMLESS: Final = re.compile(r".*_(file|path|location)|(start|end)_key", re.IGNORECASE)


class SinkAddress(NamedTuple):
    """The parts of a sink's URI.  `host` follows `//`; `path` is unescaped."""

    scheme: str
    host: str
    path: str
    parameters: Mapping[str, str]

    def __str__(self) -> str:
        """The URI of the address.

        >>> str(parse_sink("parquet:data/out?compression=zstd"))
        'parquet:data/out?compression=zstd'
        """
        place = f"//{self.host}" if self.host else ""
        query = f"?{urlencode(self.parameters, safe='/')}" if self.parameters else ""
        return f"{self.scheme}:{place}{quote(self.path)}{query}"

    def require_known(self, known: Iterable[str]) -> None:
        """Raise InvalidArgument for parameters that the sink does not have, such as mistyped ones."""
        names = sorted(known)
        unknown = sorted(self.parameters.keys() - set(names))
        if unknown:
            raise InvalidArgument(
                f"the sink {self.scheme}: has no parameter {', '.join(unknown)}; "
                + (f"it takes: {', '.join(names)}" if names else "it takes none of its own")
            )

    def require_empty(self) -> None:
        """Refuse a host or a path where the sink has none."""
        if self.host or self.path:
            raise InvalidArgument(f"the sink {self.scheme}: takes nothing behind the colon but parameters")


def parse_sink(uri: str) -> SinkAddress:
    """Parse a sink's URI.

    >>> parse_sink("kafka://broker:9092/users?password_file=p")
    SinkAddress(scheme='kafka', host='broker:9092', path='/users', parameters={'password_file': 'p'})
    >>> parse_sink("stdout:").scheme
    'stdout'
    """
    if not isinstance(uri, str) or not 0 < len(uri) <= URI_CHARACTERS_MAX or not uri.isprintable():
        raise InvalidArgument(
            f"a sink is a URI of at most {URI_CHARACTERS_MAX:,} printable characters, such as "
            "parquet:data/changes"
        )
    try:
        parts = urlsplit(uri)
        pairs = parse_qsl(parts.query, keep_blank_values=True, strict_parsing=bool(parts.query))
    except ValueError:
        raise InvalidArgument(
            "the sink's URI cannot be read; write scheme:place?name=value&name=value"
        ) from None
    _require_plain(parts, [name for name, _ in pairs])
    return SinkAddress(parts.scheme, parts.netloc, unquote(parts.path), dict(pairs))


def _require_plain(parts: SplitResult, names: list[str]) -> None:
    if not parts.scheme or parts.fragment:
        raise InvalidArgument(
            "a sink's URI begins with its scheme and has no #fragment; write for example parquet:data/changes"
        )
    if "@" in parts.netloc:
        raise InvalidArgument(
            "a sink's URI must not hold a user name or a password, for it is stored and shown; "
            "put the secret into a file and name the file, for example with token_file="
        )
    for name in names:
        if _SECRET.search(name) and not _HARMLESS.fullmatch(name):
            raise InvalidArgument(
                f"a sink's URI must not hold {name}, for it is stored and shown; "
                "put the secret into a file and name the file, for example with token_file="
            )
    if len(set(names)) < len(names):
        raise InvalidArgument("a sink's URI must not name a parameter twice")


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
        """Write all changes of the range in `(since, through]`, or rows of a snapshot; at least one."""

    def flush(self) -> None:
        """Return when everything that was written is durable."""

    def close(self) -> None:
        """Free resources.  Changes that were not flushed may be lost.  Closing twice is harmless."""


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
        if entry is None and address.scheme not in _UNLISTED:
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
    """Whether an address is the place of an entry, or below it."""
    if entry.scheme != address.scheme:
        return False
    if not entry.host and not entry.path:
        return True
    if entry.host != address.host:
        return False
    place, path = _plain(entry), _plain(address)
    return path == place or path.startswith(place.rstrip("/") + "/")


def _plain(address: SinkAddress) -> str:
    """The normalised path.  Without a host it is a local path, whose symbolic links are resolved."""
    if address.host:
        return posixpath.normpath("/" + address.path.lstrip("/"))
    return os.path.realpath(address.path)
