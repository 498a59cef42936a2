"""Commands that may wait: scans, the past, and the changes of a namespace as a stream.

A stream `changes:<namespace>` has an entry for each change, with the id `<version>-<index>`: the index counts
the changes of a commit from 0.  An id stays valid as long as the namespace keeps its history.

The entries where a data set was published are one commit, too.  They are computed each time they are read, so
the server remembers the places among them at which calls ended.
"""

import re
from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Iterator, Mapping
from itertools import count as count_from
from itertools import dropwhile, islice
from threading import Lock
from typing import Any, Final, Generic, NamedTuple, TypeVar

from floodmark.clock import monotonic_ms
from floodmark.model.access import Role
from floodmark.model.change import Change, Resolved
from floodmark.model.errors import GenerationSwapped
from floodmark.model.limits import PAGE_ROWS_MAX, RESP_CURSORS_MAX
from floodmark.model.ranges import after
from floodmark.model.stream import OnGeneration
from floodmark.model.text import read_at
from floodmark.model.version import VERSION_MAX, Version
from floodmark.server.resp.records import NO_SPACE, Space
from floodmark.server.resp.session import Later, Session
from floodmark.server.resp.table import SYNTAX, TABLE, Arguments, CommandError, integer, read_options, word

COUNT_DEFAULT: Final = 10
HISTORY_MAX: Final = 1_000
KEYS_COUNTED_MAX: Final = 100_000
STREAM_PREFIX: Final = b"changes:"
INVALID_CURSOR: Final = "ERR invalid cursor; begin the scan again with 0"
INVALID_ID: Final = "ERR Invalid stream ID specified as stream command argument"

Name = TypeVar("Name")
Place = TypeVar("Place")
Item = TypeVar("Item")


def _readable(session: Session) -> list[Space]:
    """The namespaces that SCAN and DBSIZE see: the selected one, or with prefixes all of the caller."""
    caller, spaces = session.caller, session.door.spaces
    assert caller is not None
    if spaces.by_prefix:
        return [spaces.find(name) for name in spaces.site.namespaces() if caller.may(Role.READ, name)]
    if session.space is None:
        raise CommandError(NO_SPACE)
    caller.require(Role.READ, session.space.name)
    return [session.space]


# Scans


class Places(Generic[Name, Place]):
    """Places by the names that clients use for them; beyond RESP_CURSORS_MAX the oldest is forgotten."""

    def __init__(self) -> None:
        self._places: OrderedDict[Name, Place] = OrderedDict()
        self._lock = Lock()

    def keep(self, name: Name, place: Place) -> None:
        """Remember a place."""
        with self._lock:
            self._places[name] = place
            if len(self._places) > RESP_CURSORS_MAX:
                self._places.popitem(last=False)

    def find(self, name: Name) -> Place | None:
        """The place of a name, if it is not forgotten."""
        return self._places.get(name)


class Cursors:
    """The places at which unfinished scans resume, by the number that the client has."""

    def __init__(self) -> None:
        self._places: Places[int, tuple[int, bytes]] = Places()
        self._numbers = count_from(1)

    def keep(self, namespace: int, key: bytes) -> int:
        """Remember a place; returns its cursor."""
        cursor = next(self._numbers)
        self._places.keep(cursor, (namespace, key))
        return cursor

    def find(self, cursor: int) -> tuple[int, bytes]:
        """The namespace and the key at which a scan resumes; CommandError for a cursor that is forgotten."""
        place = self._places.find(cursor)
        if place is None:
            raise CommandError(INVALID_CURSOR)
        return place


_cursors: Final = Cursors()


@TABLE.slow("SCAN", -2, "differs: keys come in their order; a cursor is forgotten after 10,000 others")
def scan(session: Session, arguments: Arguments) -> object:
    cursor = integer(arguments[1], "ERR invalid cursor")
    options = read_options(arguments[2:], (b"MATCH", b"COUNT", b"TYPE"))
    pattern, kind = options.get(b"MATCH", b"*"), options.get(b"TYPE", b"").lower()
    count = min(integer(options.get(b"COUNT", b"%d" % COUNT_DEFAULT)), PAGE_ROWS_MAX)
    if count < 1:
        raise CommandError(SYNTAX)
    literal = re.split(rb"[*?\[\\]", pattern, maxsplit=1)[0]
    spaces = _readable(session)
    prefixes = [space.name.encode() + b":" if session.door.spaces.by_prefix else b"" for space in spaces]
    # Namespaces come one after the other, and only those that the pattern can match.
    places = [
        (space, prefix)
        for space, prefix in zip(spaces, prefixes, strict=True)
        if prefix.startswith(literal) or literal.startswith(prefix)
    ]
    wanted = re.compile(translate_pattern(pattern), re.DOTALL).fullmatch
    namespace_id, start = _cursors.find(cursor) if cursor else (0, b"")
    if cursor:
        places = [*dropwhile(lambda place: place[0].namespace.id != namespace_id, places)]
        if not places:
            raise CommandError(INVALID_CURSOR)
    if not places:
        return [b"0", []]
    space, prefix = places[0]
    rows = space.namespace.scan(start, prefix=literal[len(prefix) :], limit=count)
    keys = [key for key, _ in islice(rows, count)]
    following = 0
    if len(keys) == count:
        following = _cursors.keep(space.namespace.id, after(keys[-1]))
    elif len(places) > 1:
        following = _cursors.keep(places[1][0].namespace.id, b"")
    is_wanted = kind in (b"", b"hash" if space.has_fields else b"string")
    return [b"%d" % following, [prefix + key for key in keys if is_wanted and wanted(prefix + key)]]


def translate_pattern(pattern: bytes) -> bytes:
    r"""A pattern of Redis as a regular expression.

    >>> translate_pattern(rb"a*b?[x-z]\*")
    b'a.*b.[\\x78\\x79\\x7a]\\*'
    """
    parts: list[bytes] = []
    position = 0
    while position < len(pattern):
        character = pattern[position : position + 1]
        position += 1
        if character == b"*":
            parts.append(b".*")
        elif character == b"?":
            parts.append(b".")
        elif character == b"[":
            part, position = _translate_class(pattern, position)
            parts.append(part)
        else:
            if character == b"\\" and position < len(pattern):
                character = pattern[position : position + 1]
                position += 1
            parts.append(re.escape(character))
    return b"".join(parts)


def _translate_class(pattern: bytes, position: int) -> tuple[bytes, int]:
    """Translate a class of bytes that begins at a position; returns it and the position after its end."""
    is_negated = pattern[position : position + 1] == b"^"
    position += is_negated
    wanted: set[int] = set()
    while position < len(pattern) and pattern[position] != ord("]"):
        left = len(pattern) - position
        if pattern[position] == ord("\\") and left > 1:
            wanted.add(pattern[position + 1])
            position += 2
        elif left > 2 and pattern[position + 1] == ord("-"):
            # A range that runs backwards matches either way.
            low, high = sorted((pattern[position], pattern[position + 2]))
            wanted.update(range(low, high + 1))
            position += 3
        else:
            wanted.add(pattern[position])
            position += 1
    if is_negated:
        wanted = {*range(256)} - wanted
    escaped = b"".join(b"\\x%02x" % byte for byte in sorted(wanted))
    return b"[%b]" % escaped if wanted else b"(?!)", position + 1


@TABLE.slow(
    "DBSIZE", 1, "differs: counts at most 100,000 keys of the selected namespace, or with prefixes of each"
)
def count_keys(session: Session, arguments: Arguments) -> object:
    return sum(1 for space in _readable(session) for _ in space.namespace.scan(limit=KEYS_COUNTED_MAX))


# The past


@TABLE.slow("FM.GET", 4, "ours: `FM.GET key AT version|ISO-time`, the value as of then", keys=(1, 1, 1))
def get_at(session: Session, arguments: Arguments) -> object:
    assert session.records is not None
    if word(arguments[2]) != b"AT":
        raise CommandError(SYNTAX)
    place = session.records.locate(arguments[1], Role.READ)
    try:
        version = read_at(arguments[3].decode(errors="replace"))
    except ValueError as error:
        raise CommandError(f"ERR {error}") from None
    return place.space.namespace.get(place.key, at=version)


@TABLE.slow(
    "FM.HISTORY",
    2,
    "ours: the changes of a key that are kept, at most 1,000: version, type, value",
    keys=(1, 1, 1),
)
def history(session: Session, arguments: Arguments) -> object:
    assert session.records is not None
    place = session.records.locate(arguments[1], Role.READ)
    site, name = session.door.spaces.site, place.space.name
    since = site.host.retention.oldest_version(name)
    changes = site.changes(
        name,
        since=since,
        start_key=place.key,
        end_key=after(place.key),
        on_generation=OnGeneration.DIFFERENCE,
    )
    # Without the markers of data sets, which have no key.
    own = (change for change in changes if change.key)
    return [[change.version, str(change.type), change.value] for change in deque(own, HISTORY_MAX)]


@TABLE.slow(
    "FM.RESOLVED", 1, "ours: the resolved version of the site: all changes at or below it are published"
)
def resolved(session: Session, arguments: Arguments) -> object:
    assert session.caller is not None
    space = session.space
    session.caller.require(Role.READ, None if space is None else space.name)
    return session.door.spaces.site.resolved_version()


# Changes


class EntryId(NamedTuple):
    """The id of an entry."""

    version: Version
    number: int

    def __str__(self) -> str:
        return f"{self.version}-{self.number}"


FIRST: Final = EntryId(0, 0)
LAST: Final = EntryId(VERSION_MAX, VERSION_MAX)


def parse_id(argument: bytes, index: int) -> EntryId:
    """Parse the id of an entry; `index` is used if it has none.  Raises CommandError."""
    version, dash, rest = argument.partition(b"-")
    if not version.isdigit() or (dash and not rest.isdigit()) or int(version) > VERSION_MAX:
        raise CommandError(INVALID_ID)
    return EntryId(int(version), int(rest) if dash else index)


def stream_space(session: Session, stream: bytes, role: Role = Role.READ) -> Space:
    """The namespace of a stream; NotAllowed if the caller lacks the role there."""
    assert session.caller is not None
    if not stream.startswith(STREAM_PREFIX):
        raise CommandError("ERR a stream is named changes:<namespace> here")
    name = stream.removeprefix(STREAM_PREFIX).decode(errors="replace")
    session.caller.require(role, name)
    return session.door.spaces.find(name)


class SwapEntry(NamedTuple):
    """An entry that comes where a data set was published, in the stream of a namespace."""

    site: int
    namespace: int
    reaction: OnGeneration
    entry: EntryId


# The place from which an entry is found, and how many entries of its commit come before that.
_swap_places: Final[Places[SwapEntry, tuple[Resolved, int]]] = Places()


def read_entries(
    session: Session,
    space: Space,
    start: EntryId,
    end: EntryId,
    on_generation: OnGeneration | None = None,
) -> Iterator[tuple[EntryId, list[Any]]]:
    """The entries from an id to another, both inclusive."""
    site, reaction = session.door.spaces.site, on_generation or session.on_generation
    found = SwapEntry(site.id, space.namespace.id, reaction, start)
    # From the beginning means from the oldest change that is kept; any other place must still be there.
    since = start.version - 1 if start.version else site.host.retention.oldest_version(space.name)
    place: Version | Resolved
    place, before = _swap_places.find(found) or (since, 0)
    last, index, entry = start.version if before else 0, before - 1, None
    goes_on = reaction is not OnGeneration.FAIL
    try:
        for change in site.changes(space.name, since=place, resolved_markers=goes_on, on_generation=reaction):
            if isinstance(change, Resolved):
                place, before = change, index + 1
                continue
            assert isinstance(change, Change)
            index = index + 1 if change.version == last else 0
            last = change.version
            entry = EntryId(change.version, index)
            if entry > end:
                return
            if entry >= start:
                yield entry, render_entry(entry, change)
    finally:
        if entry is not None and isinstance(place, Resolved) and place.snapshot is not None:
            following = EntryId(entry.version, entry.number + 1)
            _swap_places.keep(found._replace(entry=following), (place, before))


def take_entries(entries: Iterator[Item], count: int) -> list[Item]:
    """The next entries.  Those before a published data set are returned; the next call raises its error."""
    found: list[Item] = []
    try:
        found.extend(islice(entries, count))
    except GenerationSwapped:
        if not found:
            raise
    return found


def render_entry(entry: EntryId, change: Change) -> list[Any]:
    """A change as an entry of a stream."""
    fields: list[Any] = [b"type", str(change.type), b"key", change.key]
    if change.value is not None:
        fields += [b"value", change.value]
    if change.batch is not None:
        fields += [b"batch", str(change.batch)]
    return [str(entry), fields]


@TABLE.slow("XRANGE", -4, "differs: of streams `changes:<namespace>`; at most 1,000 entries at a time")
def read_range(session: Session, arguments: Arguments) -> object:
    space = stream_space(session, arguments[1])
    first, last = arguments[2:4]
    start = FIRST if first == b"-" else parse_id(first.removeprefix(b"("), 0)
    end = LAST if last == b"+" else parse_id(last.removeprefix(b"("), VERSION_MAX)
    if first.startswith(b"("):
        start = EntryId(start.version, start.number + 1)
    entries = (
        entry
        for number, entry in read_entries(session, space, start, end)
        if not (last.startswith(b"(") and number == end)
    )
    count = read_options(arguments[4:], (b"COUNT",)).get(b"COUNT", b"%d" % PAGE_ROWS_MAX)
    return take_entries(entries, max(0, min(integer(count), PAGE_ROWS_MAX)))


@TABLE.slow(
    "XREAD",
    -4,
    "differs: of streams `changes:<namespace>`; an id is valid while the namespace keeps its history; at "
    "most 1,000 entries of each stream",
)
def read_stream(session: Session, arguments: Arguments) -> object:
    options, names = read_stream_options(arguments[1:])
    if len(names) % 2:
        raise CommandError(
            "ERR Unbalanced 'xread' list of streams: for each stream key an ID or '$' must be specified."
        )
    count = min(integer(options.get(b"COUNT", b"%d" % PAGE_ROWS_MAX)), PAGE_ROWS_MAX)
    half = len(names) // 2
    starts: list[tuple[bytes, Space, EntryId]] = []
    for stream, argument in zip(names[:half], names[half:], strict=True):
        space = stream_space(session, stream)
        if argument == b"$":
            start = EntryId(session.door.spaces.site.resolved_version() + 1, 0)
        else:
            given = parse_id(argument, 0)
            start = given if given == FIRST else EntryId(given.version, given.number + 1)
        starts.append((stream, space, start))

    def read() -> object:
        found: dict[bytes, list[Any]] = {}
        for stream, space, start in starts:
            entries = [entry for _, entry in take_entries(read_entries(session, space, start, LAST), count)]
            if entries:
                found[stream] = entries
        # A map in RESP3, and pairs in RESP2.
        return (found if session.protocol == 3 else [[*pair] for pair in found.items()]) if found else None

    return block(read, options.get(b"BLOCK"))


def read_stream_options(
    arguments: Arguments, flags: Collection[bytes] = ()
) -> tuple[Mapping[bytes, bytes], Arguments]:
    """The options of XREAD and XREADGROUP, and the arguments after STREAMS."""
    words = [word(argument) for argument in arguments]
    if b"STREAMS" not in words:
        raise CommandError(SYNTAX)
    place = words.index(b"STREAMS")
    return read_options(arguments[:place], (b"COUNT", b"BLOCK"), flags), arguments[place + 1 :]


def block(read: Callable[[], object], block: bytes | None) -> object:
    """The result of `read`, or if there is none, a reply to wait for: `block` milliseconds, 0 for ever."""
    if block is None:
        return read()
    block_ms = integer(block, "ERR timeout is not an integer or out of range")
    if block_ms < 0:
        raise CommandError("ERR timeout is negative")
    return read() or Later(read, monotonic_ms() + block_ms if block_ms else None)


@TABLE.slow(
    "XINFO",
    3,
    "differs: `XINFO STREAM changes:<namespace>` tells first entry, last id and the resolved version",
)
def describe_stream(session: Session, arguments: Arguments) -> object:
    if word(arguments[1]) != b"STREAM":
        raise CommandError("ERR only XINFO STREAM is here")
    space = stream_space(session, arguments[2])
    first = next(read_entries(session, space, FIRST, LAST, OnGeneration.DIFFERENCE), None)
    version = session.door.spaces.site.resolved_version()
    return {
        "last-generated-id": f"{version}-0",
        "resolved-version": version,
        "first-entry": None if first is None else first[1],
    }
