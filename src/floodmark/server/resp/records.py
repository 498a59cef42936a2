"""Records as commands read and write them: namespaces by name, and writes that wait for their commit."""

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from floodmark.codec.ordered import NAMESPACE_BYTES
from floodmark.codec.states import live_value
from floodmark.codec.values import PLAIN_ENDS, encode_value
from floodmark.engine import Row
from floodmark.host.embedded import EmbeddedHost
from floodmark.host.nodes import NodeHost
from floodmark.merge.policies import COUNTER, FIELDS
from floodmark.model.access import Role
from floodmark.model.errors import NamespaceNotFound
from floodmark.model.version import Version
from floodmark.partition.atomic_reading import read_together
from floodmark.partition.deciding import newest_record
from floodmark.partition.read.records import read_record
from floodmark.server.access import Caller
from floodmark.server.resp.table import WRONG_TYPE, CommandError
from floodmark.site.namespace import Namespace
from floodmark.site.site import Site

NO_SPACE = (
    "ERR no namespace is selected; SELECT one by its name, or serve with --resp-namespace for a default"
)


class Space:
    """A namespace as commands see it."""

    def __init__(self, namespace: Namespace) -> None:
        self.namespace = namespace
        self.name = namespace.name
        self.policy, self.qualify, self.expire = namespace.encoding
        self.is_counter = namespace.settings.merge == COUNTER
        self.has_fields = namespace.settings.merge == FIELDS
        self.is_plain = not (self.is_counter or self.has_fields)


class Spaces:
    """The namespaces of a site by their names.  Used by the event loop and by committing threads."""

    def __init__(self, site: Site, *, default: str | None, by_prefix: bool) -> None:
        self.site = site
        self.default = default
        self.by_prefix = by_prefix
        self._known: dict[str, Space] = {}

    @property
    def host(self) -> EmbeddedHost:
        """The host that serves the site in this process now; a fenced node is replaced by another."""
        host = self.site.host
        found = host.current if isinstance(host, NodeHost) else host
        assert isinstance(found, EmbeddedHost)
        return found

    def find(self, name: str) -> Space:
        """The namespace of a name; NamespaceNotFound if there is none."""
        space = self._known.get(name)
        try:
            number = self.host.catalog.get(name).id
        except NamespaceNotFound:
            # Another node may have created it.
            number = self.site.namespace(name).id
        if space is None or space.namespace.id != number:
            space = self._known[name] = Space(self.site.namespace(name).stored)
        return space

    def select(self, name: str) -> Space:
        """The namespace that SELECT names: "0" is the default."""
        if name != "0":
            return self.find(name)
        if self.default is None:
            raise CommandError(NO_SPACE)
        return self.find(self.default)


class Held(NamedTuple):
    """The live record of a key: its value, and the second in which it expires."""

    value: bytes
    expires_at: int | None


class Watched(NamedTuple):
    """A watched key: the version of its newest record, dead or alive (0: none), and when it was watched."""

    version: Version
    at_ms: int


class KeyPlace(NamedTuple):
    """A key of a request: its namespace, and the key within it and qualified."""

    space: Space
    key: bytes
    qualified: bytes


class CommandRecords:
    """What the commands of one session read, and what those of one commit write.

    Reads see the writes that came before in the same commit.
    """

    def __init__(self, spaces: Spaces, space: Space | None, caller: Caller) -> None:
        self.spaces = spaces
        self.space = space
        self.caller = caller
        self.rows: dict[bytes, bytes] = {}
        self._held: dict[bytes, Held | None] = {}
        self._router = spaces.host.router
        fixed = None if spaces.by_prefix else space
        # Qualifies keys, if all are of one namespace, which the caller may read.
        self.qualify = fixed.qualify if fixed is not None and caller.may(Role.READ, fixed.name) else None
        # The namespace of all keys, if plain values can be put there by the caller.
        is_writable = fixed is not None and fixed.is_plain and caller.may(Role.WRITE, fixed.name)
        self._writable = fixed if is_writable else None

    def now_ms(self) -> int:
        """The site's time."""
        return self.spaces.host.physical_ms()

    # Keys

    def locate(self, key: bytes, role: Role) -> KeyPlace:
        """The place of a key; NotAllowed if the caller lacks the role there."""
        space = self.space
        if self.spaces.by_prefix:
            name, colon, key = key.partition(b":")
            if not colon:
                raise CommandError("ERR a key begins with the name of its namespace here, as in users:ada")
            space = self.spaces.find(name.decode(errors="replace"))
        if space is None:
            raise CommandError(NO_SPACE)
        self.caller.require(role, space.name)
        return KeyPlace(space, key, space.qualify(key))

    # Reads

    def get(self, key: bytes) -> bytes | None:
        """The value of a key."""
        place = self.locate(key, Role.READ)
        if place.qualified in self._held:
            held = self._held[place.qualified]
            return None if held is None else held.value
        return self._router.get(place.qualified, None)

    def get_many(self, keys: Sequence[bytes], bytes_max: int) -> Iterator[bytes | None]:
        """The values of keys, as of one moment if this node serves all and they have at most `bytes_max`."""
        places = [self.locate(key, Role.READ).qualified for key in keys]
        found = self._read_together(
            [key for key in dict.fromkeys(places) if key not in self._held], bytes_max
        )
        for key, place in zip(keys, places, strict=True):
            yield found[place] if place in found else self.get(key)

    def _read_together(self, keys: Sequence[bytes], bytes_max: int) -> dict[bytes, bytes | None]:
        """The values of qualified keys; empty if they have to be read one by one."""
        if len(keys) < 2:
            return {}
        node = self.spaces.host.node
        partitions = [node.map.route(key) for key in keys]
        if any(partition.retired for partition in partitions):
            return {}
        rows, at = read_together(node.committer, node.engine, node.clock, keys, bytes_max)
        # Rows may be missing if a partition was moved or versions were collected meanwhile.
        if len(rows) < len(keys) or any(partition.retired for partition in partitions):
            return {}
        if at is not None:
            spaces = {int.from_bytes(key[:NAMESPACE_BYTES], "big") for key in keys}
            if at < max(map(node.retention.collected_version, spaces)):
                return {}
        for partition in partitions:
            partition.heat.reads += 1
        now_ms = self.now_ms()
        return {key: _live_value(row, now_ms) for key, row in zip(keys, rows, strict=True)}

    def find(self, key: bytes) -> Held | None:
        """The record of a key."""
        return self.find_at(self.locate(key, Role.READ))

    def find_at(self, place: KeyPlace) -> Held | None:
        """The record at a place."""
        if place.qualified in self._held:
            return self._held[place.qualified]
        found = self._router.call(place.qualified, lambda partition: partition.find(place.qualified))
        return None if found is None else Held(found.value, found.expires_at)

    def watch(self, qualified: bytes) -> Watched:
        """The present state of a key, for `is_changed`."""
        found = newest_record(self.spaces.host.node.engine, qualified)
        return Watched(0 if found is None else found[0], self.now_ms())

    def is_changed(self, qualified: bytes, watched: Watched) -> bool:
        """Whether a key was written since it was watched, or what it held has expired."""
        found = newest_record(self.spaces.host.node.engine, qualified)
        if found is None or found[0] != watched.version:
            return found is not None or watched.version != 0
        return live_value(found[1], watched.at_ms) != live_value(found[1], self.now_ms())

    # Writes

    def encode_put(self, key: bytes, value: bytes) -> Row | None:
        """The row of a put that needs no decision: a qualified key and a stored value; None for others."""
        space = self._writable
        if space is None:
            return None
        return space.qualify(key), space.policy.put(key, value, space.expire(None))

    def put(self, place: KeyPlace, value: bytes, expires_at: int | None) -> None:
        """Write a value."""
        space = place.space
        if space.is_plain:
            row = space.policy.put(place.key, value, None)[:-1] + encode_value(b"", expires_at)
        else:
            row = space.policy.put(place.key, value, expires_at)
        self._write(place, row, Held(value, expires_at))

    def put_new(self, place: KeyPlace, value: bytes) -> None:
        """Write a value with the namespace's time to live."""
        self.put(place, value, place.space.expire(None))

    def delete(self, place: KeyPlace) -> None:
        """Delete a record."""
        self._write(place, place.space.policy.delete(), None)

    def merge(self, place: KeyPlace, state: bytes, held: Held | None) -> None:
        """Merge a state into a record; `held` is the result, for later reads of the same commit."""
        self._write(place, state, held)

    def _write(self, place: KeyPlace, row: bytes, held: Held | None) -> None:
        earlier = self.rows.get(place.qualified)
        joined = row if earlier is None else place.space.policy.join(earlier, row)
        if joined is None:
            raise CommandError(
                "ERR these two writes to one key cannot be one commit; do them in two transactions"
            )
        self.rows[place.qualified] = joined
        self._held[place.qualified] = held

    def attempt(self, run: "Callable[[], object]") -> object:
        """Run one command of a transaction; if it raises, its writes are dropped."""
        rows, held = dict(self.rows), dict(self._held)
        try:
            return run()
        except BaseException:
            self.rows, self._held = rows, held
            raise


def require_plain(place: KeyPlace) -> KeyPlace:
    """Raise CommandError if the namespace of a place holds counters or fields."""
    if not place.space.is_plain:
        raise CommandError(WRONG_TYPE)
    return place


def require_fields(place: KeyPlace) -> KeyPlace:
    """Raise CommandError unless the namespace of a place holds fields."""
    if not place.space.has_fields:
        raise CommandError(WRONG_TYPE)
    return place


def _live_value(row: Row | None, now_ms: int) -> bytes | None:
    if row is None or row[1][-1:] in PLAIN_ENDS:
        return None if row is None else row[1][:-1]
    live = read_record(*row, now_ms)
    return None if live is None else live[1]
