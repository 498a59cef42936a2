"""The namespaces of a site: their ids, names and settings, kept in the engine's metadata."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from enum import StrEnum
from itertools import accumulate
from typing import Any, Final

import msgspec

from floodmark.codec.ordered import encode_namespace
from floodmark.codec.stamps import NO_STAMP, encode_stamp
from floodmark.engine import Engine, WriteRow
from floodmark.feed.reading.swaps import Swap
from floodmark.merge.policies import COUNTER, LAST_WRITE, POLICIES
from floodmark.model.errors import (
    InvalidName,
    LimitExceeded,
    NamespaceExists,
    NamespaceNotFound,
    PublicationConflict,
)
from floodmark.model.limits import NAMESPACES_MAX, TTL_MAX
from floodmark.model.names import require_name
from floodmark.model.version import Version
from floodmark.partition import META, Storage, load_metadata
from floodmark.partition.generations import NOT_READ, GenerationsEngine, Since

RETENTION: Final = timedelta(hours=24)

_NAMESPACES: Final = b"namespaces/"
_NEXT_ID: Final = b"next-namespace"


@dataclass(frozen=True, kw_only=True)
class NamespaceSettings:
    """The settings of a namespace.

    `merge` is the merge policy for writes of several sites to one key: "last_write", "fields" or "counter".
    `ttl` is the default time to live of writes.  `retention` is how long old versions and changes are kept at
    least.
    """

    merge: str = LAST_WRITE
    ttl: timedelta | None = None
    retention: timedelta = RETENTION

    def __post_init__(self) -> None:
        if not isinstance(self.merge, str) or self.merge not in POLICIES:
            known = ", ".join(POLICIES)
            raise InvalidName(f"merge policy {self.merge!r} is not known; choose from: {known}")
        if self.ttl is not None:
            _require_duration("ttl", self.ttl)
            if self.ttl <= timedelta(0):
                raise InvalidName(f"a namespace's ttl must be positive, not {self.ttl}")
            if self.merge == COUNTER:
                raise InvalidName("counters do not expire: leave out the ttl, and delete them instead")
        _require_duration("retention", self.retention)


def _require_duration(setting: str, duration: object) -> None:
    if not isinstance(duration, timedelta) or not timedelta(0) <= duration <= TTL_MAX:
        raise InvalidName(
            f"a namespace's {setting} is a timedelta of at most {TTL_MAX.days:,} days, not {duration!r:.60}"
        )


KEPT_GENERATIONS: Final = 1


class GenerationState(StrEnum):
    """The state of a generation for readers."""

    LOADING = "loading"
    CURRENT = "current"
    KEPT = "kept"
    ENDED = "ended"
    """A publication that did not come to its swap; its records are removed."""


class GenerationRow(msgspec.Struct, frozen=True, kw_only=True):
    """One generation of a namespace: its number, and the physical id of its records.

    It holds the loaded data set as of `base`, and the replayed changes above `base` up to `position`.
    Readers see it from version `since` on, and below `until`.  The rows of the data set have the stamp
    (`base`, `origin`); an `origin` of 0 means that they keep their stamps, as in a rollback.  Once it has
    `joined`, it gets all writes, although it is not read yet.
    """

    number: int
    id: int
    base: Version
    publisher: str = ""
    since: Version | None = None
    until: Version | None = None
    position: Version = 0
    loaded: int = 0
    replayed: int = 0
    joined: bool = False
    origin: int = 0
    # For a rollback, the number of the generation whose records it took.
    source: int | None = None

    @property
    def state(self) -> GenerationState:
        """The state of the generation for readers."""
        if self.since is None:
            return GenerationState.LOADING if self.until is None else GenerationState.ENDED
        return GenerationState.CURRENT if self.until is None else GenerationState.KEPT

    @property
    def stamp(self) -> bytes:
        """The stamp of the data set's rows.  Sites with the same stamp hold the same data set."""
        return encode_stamp(self.base, self.origin) if self.origin else NO_STAMP


class Rewound(msgspec.Struct, frozen=True):
    """The number of changes that a call has copied into a generation, and how far that lags behind now."""

    replayed: int
    behind_ms: int


class NamespaceRow(msgspec.Struct):
    """A namespace as stored.  Its id is never reused: one created again with the same name has another id.

    `generations` is empty until a data set is published.
    """

    id: int
    name: str
    merge: str
    ttl_ms: int | None
    retention_ms: int
    created_at: Version
    dropped_at: Version | None = None
    generations: list[GenerationRow] = []

    @property
    def present(self) -> GenerationRow:
        """The generation that is read now; the first one if no data set was published."""
        found = [each for each in self.generations if each.state is GenerationState.CURRENT]
        return found[0] if found else GenerationRow(number=1, id=self.id, base=0, since=self.created_at)

    def at(self, version: Version) -> GenerationRow:
        """The generation that readers as of a version read."""
        found = [each for each in self.generations if each.since is not None and each.since <= version]
        return found[-1] if found else self.present

    @property
    def loading(self) -> GenerationRow | None:
        """The generation that is being published."""
        return next((each for each in self.generations if each.state is GenerationState.LOADING), None)

    def earlier(self, number: int | None) -> GenerationRow:
        """The earlier generation with this number, for a rollback; by default the one before the present."""
        kept = [each for each in self.generations if each.state is GenerationState.KEPT]
        found = next((each for each in reversed(kept) if number in (None, each.number)), None)
        if found is None:
            known = ", ".join(str(each.number) for each in kept)
            wanted = "an earlier generation" if number is None else f"generation {number}"
            raise PublicationConflict(
                f"{self.name!r} cannot go back to {wanted}: those kept are: {known or 'none'}. "
                f"{'Choose one of them, or publish' if known else 'Publish'} the data set again",
                namespace=self.name,
            )
        return found

    def swap_after(self, position: Version) -> Swap | None:
        """The first swap above a position."""
        bases = accumulate((each.base for each in self.generations), max)
        swaps = [
            # The number distinguishes data sets with the same base.
            Swap(each.since, self.id, base + each.number, each.origin)
            for each, base in [*zip(self.generations, bases, strict=True)][1:]
            if each.since is not None
        ]
        return min((swap for swap in swaps if swap.version > position), default=None)

    def adopt(self, other: "NamespaceRow") -> None:
        """Copy the attributes that can change from another row of the namespace."""
        self.apply(other.settings)
        self.dropped_at, self.generations = other.dropped_at, other.generations

    @property
    def settings(self) -> NamespaceSettings:
        """The settings in the form in which users pass them."""
        return NamespaceSettings(
            merge=self.merge,
            ttl=None if self.ttl_ms is None else timedelta(milliseconds=self.ttl_ms),
            retention=timedelta(milliseconds=self.retention_ms),
        )

    def apply(self, settings: NamespaceSettings) -> None:
        """Set the attributes from changed settings."""
        self.merge = settings.merge
        self.ttl_ms = None if settings.ttl is None else _milliseconds(settings.ttl)
        self.retention_ms = _milliseconds(settings.retention)


def load_namespaces(engine: Engine) -> list[NamespaceRow]:
    """The namespaces that have data, dropped ones included."""
    return list(load_metadata(engine, _NAMESPACES, NamespaceRow))


def generations_of(rows: Iterable[NamespaceRow]) -> tuple[dict[bytes, list[Since]], list[bytes]]:
    """By namespace, the generations that an engine reads or writes; and the physical ids that it hides."""
    hidden: list[bytes] = []
    table: dict[bytes, list[Since]] = {}
    for row in rows:
        written = [each for each in row.generations if each.since is not None]
        if row.loading is not None and row.loading.joined:
            written.append(row.loading)
        if any(each.id != row.id for each in written):
            table[encode_namespace(row.id)] = [
                Since(
                    NOT_READ if each.since is None else each.since,
                    encode_namespace(each.id),
                    each.stamp,
                    each.base,
                    each.source,
                )
                for each in written
            ]
        hidden += [encode_namespace(each.id) for each in row.generations if each.id != row.id]
    return table, hidden


class Catalog:
    """Creates, finds, changes and drops namespaces.  Holders of a row see a drop at once."""

    def __init__(self, storage: Storage, now: Callable[[], Version]) -> None:
        self._storage = storage
        self._now = now
        self._rows: dict[int, NamespaceRow] = {}
        # Id 0 names no namespace, so that a zeroed key is never taken for a user's.
        self._next_id = 1
        self.load()
        storage.on_recovery.append(self.load)

    def load(self) -> None:
        """Load the namespaces, which the keeper may have changed.  The caller holds the write turn."""
        stored_rows = {row.id: row for row in load_namespaces(self._storage.engine)}
        for namespace, row in stored_rows.items():
            held = self._rows.setdefault(namespace, row)
            held.adopt(row)
            if row.dropped_at is not None:
                self._storage.drop(encode_namespace(namespace))
        for namespace in self._rows.keys() - stored_rows.keys():
            del self._rows[namespace]
            # Ids are never reused, so a namespace that is missing was dropped.
            self._storage.drop(encode_namespace(namespace))
        self._tell_policies()
        self._show_generations()
        stored_id = self._storage.engine.get(META, _NEXT_ID)
        self._next_id = 1 if stored_id is None else int.from_bytes(stored_id, "big")

    def create(self, name: str, settings: NamespaceSettings) -> NamespaceRow:
        """Add a namespace."""
        require_name(name, "namespace")
        if not name.strip("."):
            # Exports and backups use the name for a directory.
            raise InvalidName(f"{name!r} cannot name a namespace: use other characters than dots")
        with self._storage.settled():
            self._storage.require_wanted()
            if self._find(name) is not None:
                raise NamespaceExists(
                    f"namespace {name!r} is already there; get it with site.namespace({name!r})",
                    namespace=name,
                )
            if self._next_id >= NAMESPACES_MAX - 1:
                raise LimitExceeded(f"a site names at most {NAMESPACES_MAX:,} namespaces in its life")
            row = NamespaceRow(
                id=self._next_id,
                name=name,
                merge="",
                ttl_ms=None,
                retention_ms=0,
                created_at=self._now(),
            )
            row.apply(settings)
            next_id = (META, _NEXT_ID, (row.id + 1).to_bytes(4, "big"))
            self._storage.store([stored(row), next_id])
            self._rows[row.id] = row
            self._next_id = row.id + 1
            self._tell_policies()
            return row

    def get(self, name: str) -> NamespaceRow:
        """The namespace of a name."""
        row = self._find(name)
        if row is None:
            known = ", ".join(row.name for row in self.live()) or "none yet"
            raise NamespaceNotFound(
                f"no namespace {name!r}; there are: {known}. Create it with site.create_namespace({name!r})",
                namespace=name,
            )
        return row

    def update(self, name: str, change: Callable[[NamespaceSettings], NamespaceSettings]) -> None:
        """Apply `change` to the present settings of a namespace, and store the result."""
        with self._storage.settled():
            self._storage.require_wanted()
            row = self.get(name)
            settings = change(row.settings)
            changed = msgspec.structs.replace(row)
            changed.apply(settings)
            self._storage.store([stored(changed)])
            row.apply(settings)

    def drop(self, name: str) -> None:
        """Drop a namespace.  Its data is removed when garbage collection has passed the drop."""
        with self._storage.settled():
            row = self.get(name)
            dropped = msgspec.structs.replace(row, dropped_at=self._now())
            self._storage.store([stored(dropped)])
            row.dropped_at = dropped.dropped_at
            self._storage.drop(encode_namespace(row.id))

    def begin_generation(
        self,
        row: NamespaceRow,
        base: Version,
        publisher: str,
        *,
        source: int | None,
        origin: int,
        now: Version,
    ) -> None:
        """Add a generation that is loading.  One that was loading until now has ended."""
        with self._storage.settled():
            self._storage.require_wanted()
            generations = [
                msgspec.structs.replace(each, until=now) if each is row.loading else each
                for each in row.generations or [row.present]
            ]
            number = max(each.number for each in generations) + 1
            begun = GenerationRow(
                number=number,
                id=self._next_id,
                base=base,
                publisher=publisher,
                position=base,
                source=source,
                origin=origin,
            )
            next_id = (META, _NEXT_ID, (begun.id + 1).to_bytes(4, "big"))
            self.set_generations(row, [*generations, begun], [next_id])
            self._next_id = begun.id + 1

    def set_generations(
        self, row: NamespaceRow, generations: list[GenerationRow], rows: Sequence[WriteRow] = ()
    ) -> None:
        """Store the generations of a namespace.  The caller holds the turn."""
        self._storage.store([stored(msgspec.structs.replace(row, generations=generations)), *rows])
        self.show(row, generations)

    def change_generation(self, row: NamespaceRow, number: int, **changes: Any) -> None:
        """Store what has changed of one generation.  The caller holds the turn."""
        self.set_generations(row, with_changes(row, number, **changes))

    def show(self, row: NamespaceRow, generations: list[GenerationRow]) -> None:
        """Make the stored generations of a namespace visible to readers.  The caller holds the write turn."""
        row.generations = generations
        self._show_generations()

    def _show_generations(self) -> None:
        engine = self._storage.engine
        if isinstance(engine, GenerationsEngine):
            engine.show(*generations_of(self._rows.values()))

    def forget(self, namespace: int) -> None:
        """Delete the row of a dropped namespace whose data is gone.  Its id is not reused."""
        with self._storage.settled():
            self._storage.store([(META, _key(namespace), None)])
            self._rows.pop(namespace, None)
            self._tell_policies()
            self._show_generations()

    def _tell_policies(self) -> None:
        """Set the merge policy of each namespace, by which the entrance checks records."""
        policies = {encode_namespace(row.id): row.merge for row in self._rows.values()}
        self._storage.entrance.set_policies(policies)

    def swap_after(self, namespace: int | None, position: Version) -> Swap | None:
        """The first swap of a namespace, or any, above a position."""
        rows = [row for row in list(self._rows.values()) if namespace in (None, row.id)]
        swaps = [swap for row in rows if (swap := row.swap_after(position)) is not None]
        return min(swaps, default=None)

    def swapped_version(self) -> Version:
        """The version of the last swap of any namespace."""
        return max((each.since or 0 for row in self._rows.values() for each in row.generations), default=0)

    def live(self) -> list[NamespaceRow]:
        """The namespaces that were not dropped, by name."""
        rows = [row for row in list(self._rows.values()) if row.dropped_at is None]
        return sorted(rows, key=lambda row: row.name)

    def live_ids(self) -> list[int]:
        """The ids of the namespaces that were not dropped."""
        return [row.id for row in list(self._rows.values()) if row.dropped_at is None]

    def is_live(self, namespace: int) -> bool:
        """Whether a namespace exists and was not dropped."""
        row = self._rows.get(namespace)
        return row is not None and row.dropped_at is None

    def name_of(self, namespace: int) -> str | None:
        """The name of the namespace with an id; None if it does not exist or was dropped."""
        row = self._rows.get(namespace)
        return None if row is None or row.dropped_at is not None else row.name

    def all(self) -> list[NamespaceRow]:
        """The namespaces that have data, dropped ones included."""
        return list(self._rows.values())

    def _find(self, name: str) -> NamespaceRow | None:
        return next((row for row in self.live() if row.name == name), None)


def with_changes(row: NamespaceRow, number: int, **changes: Any) -> list[GenerationRow]:
    """The generations of a namespace, one of them changed."""
    return [
        msgspec.structs.replace(each, **changes) if each.number == number else each
        for each in row.generations
    ]


def stored(row: NamespaceRow) -> WriteRow:
    return META, _key(row.id), msgspec.json.encode(row)


def _milliseconds(duration: timedelta) -> int:
    """A duration in milliseconds, rounded up, so that a positive one is never 0."""
    return -(duration // -timedelta(milliseconds=1))


def _key(namespace: int) -> bytes:
    return _NAMESPACES + namespace.to_bytes(3, "big")
