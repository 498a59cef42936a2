"""An engine that shows one generation of each namespace at a time.

A data set that is published replaces all records of a namespace at one version X.  Its records are loaded
under a namespace id of their own, the *physical* id of the generation, and X is the version from which
readers find them under the namespace.  All the rest of a node knows the namespace by one id for life: change
log, prepared writes, safe points, the caches of clients.  Only the records of a key have several places:

    above:   MCE('r' | namespace          | user key) | ~version
    stored:  MCE('r' | physical namespace | user key) | ~version      the id is in the first group, never cut

A read as of a version goes to the generation of that version, every other read to the present one.  A write
at a version goes to the generation of that version and to all later ones.  Most often that is the present one
alone; but a prepared write may be committed below a swap, and a generation that is about to be swapped in has
*joined*: it gets all writes, and no reads.  `show` replaces the table as a whole, inside the turn to write;
a reader sees it before or after.

While no namespace was published, the calls of this class *are* those of the engine below.
"""

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple, Protocol, TypeAlias

from floodmark.codec.ordered import NAMESPACE_BYTES, RAW, VERSION_BYTES, decode_version, encode_version
from floodmark.codec.stamps import NO_STAMP, encode_stamp, find_origins, is_later
from floodmark.engine import Engine, EngineLimits, Guard, Row, WriteRow
from floodmark.engine.base import DurableWrites, Measured, durable_writes
from floodmark.model.ranges import prefix_end
from floodmark.model.version import VERSION_MAX, Version
from floodmark.partition.families import DATA

_ID: Final = slice(1, 4)
_ID_END: Final = 4
# An encoded key is made of groups of nine bytes; with a version behind it, eight bytes are left.
_GROUP: Final = 9
_VERSIONED: Final = 8
_TRANSLATED: Final = ("get", "get_many", "ceiling", "ceilings", "scan", "write", "delete_range")


# Stands for the version of a generation that has joined, and is not read yet.
NOT_READ: Final = VERSION_MAX


class Loaded(Protocol):
    """The records with which a generation began: those of a base, or of another generation, its source."""

    @property
    def base(self) -> Version:
        """The version of the data."""

    @property
    def stamp(self) -> bytes:
        """The stamp of the records; `NO_STAMP` if each has its own."""

    @property
    def source(self) -> int | None:
        """The number of the generation from which they were copied."""


class Since(NamedTuple):
    """A generation: from which version on it is read, the id of its records, and its data set."""

    version: Version
    physical: bytes
    stamp: bytes = NO_STAMP
    base: Version = 0
    source: int | None = None


def is_above(data_set: Loaded, origin: bytes, version: Version, site_id: int) -> bool:
    """Whether a change is above a data set, by their stamps; otherwise the data set replaces it.

    A rollback keeps changes of other sites that came late: their stamps say nothing about what came before.
    """
    stamp = data_set.stamp or encode_stamp(data_set.base, site_id)
    is_foreign = origin != NO_STAMP and origin[-1] != site_id
    return is_later(origin or encode_stamp(version, site_id), stamp) or (
        data_set.source is not None and is_foreign
    )


# By namespace id: the generations that can be read, oldest first, and then the one that has joined, if any.
Table: TypeAlias = Mapping[bytes, Sequence[Since]]


def place(engine_key: bytes, physical: bytes) -> bytes:
    """An engine key in another generation.

    >>> place(b"r" + b"\\0\\0\\1" + b"ada", b"\\0\\0\\7")
    b'r\\x00\\x00\\x07ada'
    """
    return RAW + physical + engine_key[_ID_END:]


class _Places:
    """A table, and what is derived from it.  Immutable: a call uses one from its beginning to its end."""

    def __init__(self, table: Table, hidden: Iterable[bytes], site_id: int) -> None:
        self.table = table
        self.site_id = site_id
        shown = {name: [each for each in found if each.version < NOT_READ] for name, found in table.items()}
        self.present = {namespace: generations[-1].physical for namespace, generations in shown.items()}
        self.swapped = {namespace: generations[-1].version for namespace, generations in shown.items()}
        self.stamps = {each: found[-1].stamp for each, found in shown.items() if found[-1].stamp}
        self.bases = {namespace: generations[-1].base for namespace, generations in shown.items()}
        # A version at or above which there is no other generation.
        self.newest = max(self.swapped.values(), default=0)
        # The encoded version from which a write goes to one generation alone.
        self.borders_of_writes = {each: encode_version(found[-1].version) for each, found in table.items()}
        # The ids at which a scan over several namespaces has to look.
        self.borders = sorted({*table, *self.present.values(), *hidden})

    def of(self, namespace: bytes, version: Version) -> bytes:
        """The physical id of a namespace in the table, as of a version."""
        generations = self.table[namespace]
        found = bisect_right(generations, version, key=lambda each: each.version)
        return generations[max(found - 1, 0)].physical

    def place(self, engine_key: bytes) -> bytes:
        """Where a record is stored, or the records of a key."""
        namespace = engine_key[_ID]
        present = self.present.get(namespace)
        if present is None:
            return engine_key
        if len(engine_key) % _GROUP == _VERSIONED:
            return place(engine_key, self.of(namespace, decode_version(engine_key)))
        return place(engine_key, present)

    def parts(self, start: bytes, end: bytes | None) -> Iterator[tuple[bytes, bytes | None, bytes]]:
        """Cut a range into parts stored together; each with its namespace if it is stored elsewhere."""
        for border in self.borders:
            first, behind = RAW + border, prefix_end(RAW + border)
            assert behind is not None
            if behind <= start:
                continue
            if end is not None and first >= end:
                break
            if start < first:
                yield start, first, b""
            if border in self.present:
                yield max(start, first), behind if end is None else min(behind, end), border
            start = behind
        if end is None or start < end:
            yield start, end, b""

    def move(self, rows: Iterable[WriteRow]) -> Iterator[WriteRow]:
        """The rows, with each record placed in all generations that must have it."""
        present, borders = self.present, self.borders_of_writes
        for row in rows:
            family, key, value = row
            border = borders.get(key[_ID]) if family == DATA else None
            if border is None:
                yield row
            elif key[-VERSION_BYTES:] <= border:
                yield DATA, place(key, present[key[_ID]]), value
            else:
                yield from self._move_to_several(key, value)

    def _move_to_several(self, key: bytes, value: bytes | None) -> Iterator[WriteRow]:
        generations, version = self.table[key[_ID]], decode_version(key)
        first = max(bisect_right(generations, version, key=lambda each: each.version) - 1, 0)
        yield DATA, place(key, generations[first].physical), value
        origin = NO_STAMP if value is None else find_origins([value])[0]
        for later in generations[first + 1 :]:
            if version > later.base and is_above(later, origin, version, self.site_id):
                yield DATA, place(key, later.physical), value

    def move_present(self, rows: Iterable[WriteRow]) -> Iterator[WriteRow]:
        """The rows, with each record placed in the present generation of its namespace."""
        for row in rows:
            physical = self.present.get(row[1][_ID]) if row[0] == DATA else None
            yield row if physical is None else (DATA, place(row[1], physical), row[2])


class GenerationsEngine(Engine):
    """The engine below, with the present generation of each namespace.

    `reads` is another such engine, which is made to show the same generations.
    """

    def __init__(self, engine: Engine, site_id: int = 0, *, reads: "GenerationsEngine | None" = None) -> None:
        self.below = engine
        self._site_id = site_id
        self._reads = reads
        self.places = _Places({}, (), site_id)
        self._pinned: GenerationsEngine | None = None
        self._write_durably = durable_writes(engine)
        # Loads the stored generations, and shows them.
        self.reload: Callable[[], None] = lambda: None
        if isinstance(engine, Measured):
            self.measures = engine.measures
        if isinstance(engine, DurableWrites):
            self.write_durably = self._write_translated
        self.show({}, ())

    def __getattr__(self, name: str) -> Any:
        return getattr(self.below, name)

    @property
    def limits(self) -> EngineLimits:  # type: ignore[override]
        return self.below.limits

    def show(self, table: Table, hidden: Iterable[bytes]) -> None:
        """Read and write by a table from now on; `hidden` are ids whose records no reader finds."""
        self._use(_Places(table, hidden, self._site_id))
        if self._reads is not None:
            self._reads.show(table, hidden)

    def _use(self, places: _Places) -> None:
        self.places = places
        for name in _TRANSLATED:
            if places.borders:
                self.__dict__.pop(name, None)
            else:
                setattr(self, name, getattr(self.below, name))

    def pinned(self) -> "GenerationsEngine":
        """The engine with the generations that are present now, whatever is shown later."""
        places, view = self.places, self._pinned
        if view is None or view.places is not places:
            view = GenerationsEngine(self.below, self._site_id)
            view._use(places)
            self._pinned = view
        return view

    def at(self, version: Version) -> Engine:
        """The engine for a reader as of a version; a later swap does not change what it shows."""
        view = self.pinned()
        places = view.places
        if version >= places.newest:
            return view
        view = GenerationsEngine(self.below)
        view.show({each: (Since(0, places.of(each, version)),) for each in places.table}, places.borders)
        return view

    def swapped_at(self, namespace: bytes) -> Version:
        """The version from which the present generation of a namespace is read; 0 if it is the first."""
        return self.places.swapped.get(namespace, 0)

    # The port

    def get(self, family: str, key: bytes) -> bytes | None:
        return self.below.get(family, self.places.place(key) if family == DATA else key)

    def get_many(self, family: str, keys: Sequence[bytes]) -> list[bytes | None]:
        return self.below.get_many(family, [*map(self.places.place, keys)] if family == DATA else keys)

    def ceiling(self, family: str, key: bytes, prefix: bytes = b"") -> Row | None:
        places = self.places
        if family != DATA or key[_ID] not in places.present:
            return self.below.ceiling(family, key, prefix)
        placed = places.place(key)
        row = self.below.ceiling(family, placed, prefix and place(prefix, placed[_ID]))
        return None if row is None else _restored(row, key[_ID], placed[_ID])

    def ceilings(
        self, family: str, prefixes: Sequence[bytes], starts: Sequence[bytes] | None = None
    ) -> list[Row | None]:
        places = self.places
        if family != DATA or places.present.keys().isdisjoint({prefix[_ID] for prefix in prefixes}):
            return self.below.ceilings(family, prefixes, starts)
        placed = [*map(places.place, prefixes if starts is None else starts)]
        within = [place(prefix, start[_ID]) for prefix, start in zip(prefixes, placed, strict=True)]
        rows = self.below.ceilings(family, within, None if starts is None else placed)
        return [
            None if row is None else _restored(row, prefix[_ID], start[_ID])
            for row, prefix, start in zip(rows, prefixes, placed, strict=True)
        ]

    def scan(
        self,
        family: str,
        start: bytes,
        end: bytes | None,
        *,
        rows_max: int,
        bytes_max: int,
        reverse: bool = False,
    ) -> list[Row]:
        places = self.places
        parts = [*places.parts(start, end)] if family == DATA else [(start, end, b"")]
        for part_start, part_end, namespace in reversed(parts) if reverse else parts:
            physical = namespace and places.present[namespace]
            page = self.below.scan(
                family,
                place(part_start, physical) if physical else part_start,
                _placed_end(part_end, namespace, physical),
                rows_max=rows_max,
                bytes_max=bytes_max,
                reverse=reverse,
            )
            if page:
                return [_restored(row, namespace, physical) for row in page] if physical else page
        return []

    def write(self, rows: Iterable[WriteRow], guards: Sequence[Guard] = ()) -> bool:
        return self.below.write(self.places.move(rows), guards)

    def remove(self, rows: Iterable[WriteRow], guards: Sequence[Guard] = ()) -> bool:
        """Remove rows of the present generation alone: others may still need what is garbage there."""
        return self.below.write(self.places.move_present(rows), guards)

    def _write_translated(self, rows: Iterable[WriteRow], guards: Sequence[Guard] = ()) -> bool:
        places = self.places
        return self._write_durably(places.move(rows) if places.borders else rows, guards)

    def delete_range(self, family: str, start: bytes, end: bytes, guards: Sequence[Guard] = ()) -> bool:
        physical = self.places.present.get(start[_ID]) if family == DATA else None
        if physical is None:
            return self.below.delete_range(family, start, end, guards)
        moved_end = _placed_end(end, start[_ID], physical)
        assert moved_end is not None
        return self.below.delete_range(family, place(start, physical), moved_end, guards)

    def sync(self) -> None:
        self.below.sync()

    def recover(self) -> None:
        self.below.recover()
        # A swap of unknown outcome is shown before any reader can get a version above it.
        self.reload()

    def sizes(self) -> Mapping[str, int]:
        return self.below.sizes()

    def close(self) -> None:
        self.below.close()


def as_of(engine: Engine, version: Version) -> Engine:
    """The engine for a reader as of a version; `GenerationsEngine.at`."""
    return engine.at(version) if isinstance(engine, GenerationsEngine) else engine


def pinned(engine: Engine) -> Engine:
    """An engine with the generations that are present now, whatever is published later."""
    return engine.pinned() if isinstance(engine, GenerationsEngine) else engine


def remover(engine: Engine) -> Callable[[Iterable[WriteRow], Sequence[Guard]], bool]:
    """Removes garbage from the present generations of an engine."""
    return engine.remove if isinstance(engine, GenerationsEngine) else engine.write


def swapped_at(engine: Engine, namespace: bytes) -> Version:
    """The version from which the present generation of a namespace is read; 0 if it is the first."""
    return engine.swapped_at(namespace) if isinstance(engine, GenerationsEngine) else 0


def published_stamps(engine: Engine, keys: Sequence[bytes]) -> list[bytes] | None:
    """For each key, the stamp of the data set that was published into its namespace; `NO_STAMP` without one.

    None if no data set was published at all.  A data set replaces all older records of its namespace, also
    those of keys that it lacks.
    """
    stamps = engine.places.stamps if isinstance(engine, GenerationsEngine) else None
    return [stamps.get(key[:NAMESPACE_BYTES], NO_STAMP) for key in keys] if stamps else None


def published_bases(engine: Engine, keys: Sequence[bytes]) -> list[Version]:
    """For each key, the base version of the data set published into its namespace; 0 without one.

    A data set, or a rollback, is a change of every key at its base, also of one that it lacks.
    """
    bases = engine.places.bases if isinstance(engine, GenerationsEngine) else {}
    return [bases.get(key[:NAMESPACE_BYTES], 0) for key in keys]


def below(engine: Engine) -> Engine:
    """The engine in which the records of all generations are found, by their physical ids."""
    return engine.below if isinstance(engine, GenerationsEngine) else engine


def shown(engine: Engine) -> object:
    """An object that each swap replaces, by which a reader detects a swap during its reads."""
    return engine.places if isinstance(engine, GenerationsEngine) else None


def _restored(row: Row, namespace: bytes, physical: bytes) -> Row:
    engine_key, stored = row
    return (place(engine_key, namespace), stored) if engine_key[_ID] == physical else row


def _placed_end(end: bytes | None, namespace: bytes, physical: bytes) -> bytes | None:
    """The end of a part; it may be the end of its namespace, whose id is the next one."""
    if not physical or end is None:
        return end
    return place(end, physical) if end[_ID] == namespace else prefix_end(RAW + physical)
