"""The namespaces of a site: their ids, names and settings, kept in the engine's metadata."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import timedelta
from threading import Lock
from typing import Any, Final

import msgspec

from floodmark.engine import Engine, WriteRow
from floodmark.merge import POLICIES
from floodmark.model.errors import (
    Corruption,
    InvalidName,
    LimitExceeded,
    NamespaceExists,
    NamespaceNotFound,
)
from floodmark.model.limits import NAMESPACES_MAX
from floodmark.model.version import Version
from floodmark.partition import META, read_metadata
from floodmark.site.directory import require_name

RETENTION: Final = timedelta(hours=24)

_NAMESPACES: Final = b"namespaces/"
_NEXT_ID: Final = b"next-namespace"


@dataclass(frozen=True, kw_only=True)
class NamespaceSettings:
    """How a namespace treats its records.

    `ttl` is the time to live of writes that name none; `retention` is how long old versions and
    changes are kept at least.
    """

    merge: str = "last_write"
    ttl: timedelta | None = None
    retention: timedelta = RETENTION

    def __post_init__(self) -> None:
        if self.merge not in POLICIES:
            known = ", ".join(sorted(POLICIES))
            raise InvalidName(f"merge policy {self.merge!r} is not known; choose from: {known}")
        if self.ttl is not None and self.ttl <= timedelta(0):
            raise InvalidName(f"a namespace's ttl must be positive, not {self.ttl}")
        if self.retention < timedelta(0):
            raise InvalidName(f"a namespace's retention must not be negative, not {self.retention}")


class NamespaceRow(msgspec.Struct):
    """A namespace as stored.  Its id is never used again, so a name that returns is a new set."""

    id: int
    name: str
    merge: str
    ttl_ms: int | None
    retention_ms: int
    created_at: Version
    dropped_at: Version | None = None

    @property
    def settings(self) -> NamespaceSettings:
        """The settings in the form that users give them."""
        return NamespaceSettings(
            merge=self.merge,
            ttl=None if self.ttl_ms is None else timedelta(milliseconds=self.ttl_ms),
            retention=timedelta(milliseconds=self.retention_ms),
        )

    def apply(self, settings: NamespaceSettings) -> None:
        """Take over changed settings."""
        self.merge = settings.merge
        self.ttl_ms = None if settings.ttl is None else settings.ttl // timedelta(milliseconds=1)
        self.retention_ms = settings.retention // timedelta(milliseconds=1)


class Catalog:
    """Creates, finds, changes and drops namespaces.

    Rows are shared with those who use a namespace, so they see a drop at once.
    """

    def __init__(self, engine: Engine, now: Callable[[], Version]) -> None:
        self._engine = engine
        self._now = now
        self._lock = Lock()
        self._rows: dict[int, NamespaceRow] = {}
        for key, stored in read_metadata(engine, _NAMESPACES):
            try:
                row = msgspec.json.decode(stored, type=NamespaceRow)
            except msgspec.MsgspecError as error:
                raise Corruption(f"the metadata row {key!r} is damaged: {error}") from error
            self._rows[row.id] = row
        # Id 0 names no namespace, so that a zeroed key is never taken for a user's.
        stored_id = engine.get(META, _NEXT_ID)
        self._next_id = 1 if stored_id is None else int.from_bytes(stored_id, "big")

    def create(self, name: str, settings: NamespaceSettings) -> NamespaceRow:
        """Add a namespace."""
        require_name(name, "namespace")
        with self._lock:
            if self._find(name) is not None:
                raise NamespaceExists(
                    f"namespace {name!r} is already there; get it with site.namespace({name!r})",
                    namespace=name,
                )
            if self._next_id >= NAMESPACES_MAX:
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
            self._store(row, (META, _NEXT_ID, (row.id + 1).to_bytes(4, "big")))
            self._rows[row.id] = row
            self._next_id = row.id + 1
            return row

    def get(self, name: str) -> NamespaceRow:
        """The namespace of a name."""
        row = self._find(name)
        if row is None:
            known = ", ".join(sorted(row.name for row in self.live())) or "none yet"
            raise NamespaceNotFound(
                f"no namespace {name!r}; there are: {known}. Create it with site.create_namespace({name!r})",
                namespace=name,
            )
        return row

    def update(self, name: str, changes: dict[str, Any]) -> NamespaceRow:
        """Change some settings; the merge policy stays what it was."""
        with self._lock:
            row = self.get(name)
            if "merge" in changes and changes["merge"] != row.merge:
                raise InvalidName(
                    f"the merge policy of {name!r} is {row.merge!r} and cannot be changed; create "
                    "another namespace and copy",
                    namespace=name,
                )
            changed = msgspec.structs.replace(row)
            changed.apply(replace(row.settings, **changes))
            self._store(changed)
            row.apply(changed.settings)
            return row

    def drop(self, name: str) -> None:
        """Hide a namespace at once; its data goes when garbage collection has passed the drop."""
        with self._lock:
            row = self.get(name)
            dropped = msgspec.structs.replace(row, dropped_at=self._now())
            self._store(dropped)
            row.dropped_at = dropped.dropped_at

    def forget(self, namespace: int) -> None:
        """Remove the last trace of a dropped namespace whose data is gone.  Its id stays used."""
        with self._lock:
            self._engine.write([(META, _key(namespace), None)])
            self._engine.sync()
            del self._rows[namespace]

    def live(self) -> list[NamespaceRow]:
        """The namespaces that were not dropped, by name."""
        rows = [row for row in list(self._rows.values()) if row.dropped_at is None]
        return sorted(rows, key=lambda row: row.name)

    def all(self) -> list[NamespaceRow]:
        """The namespaces that have data, dropped ones included."""
        return list(self._rows.values())

    def names(self) -> dict[int, str]:
        """The names of all namespaces by id."""
        return {row.id: row.name for row in list(self._rows.values())}

    def _find(self, name: str) -> NamespaceRow | None:
        return next((row for row in self.live() if row.name == name), None)

    def _store(self, row: NamespaceRow, *others: WriteRow) -> None:
        self._engine.write([(META, _key(row.id), msgspec.json.encode(row)), *others])
        self._engine.sync()


def _key(namespace: int) -> bytes:
    return _NAMESPACES + namespace.to_bytes(3, "big")
