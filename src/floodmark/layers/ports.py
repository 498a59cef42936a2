"""The public calls of a site that a layer uses, so that layers can also be written outside this package.

A layer keeps its rows in a namespace of its own, which it marks: the row `LAYER` names the layer and the
format of its rows.  This row is copied, backed up and exported with the others.
"""

from collections.abc import Callable, Iterable, Iterator
from datetime import datetime
from typing import Any, Final, Protocol, TypeVar

from floodmark.model.change import Change, Stamp
from floodmark.model.errors import NamespaceNotFound, WrongPolicy
from floodmark.model.record import Versioned
from floodmark.model.version import VERSION_MAX, Version

LAYER: Final = b"\x00layer"

Result = TypeVar("Result")


class LayerRecords(Protocol):
    """A namespace, with keys and values as bytes."""

    @property
    def name(self) -> str: ...

    @property
    def settings(self) -> Any: ...

    def get(self, key: bytes, *, at: Version | datetime | None = None) -> bytes | None: ...

    def record(self, key: bytes, *, at: Version | datetime | None = None) -> Versioned | None: ...

    def first(
        self, start: bytes, end: bytes, *, at: Version | datetime | None = None
    ) -> tuple[bytes, bytes] | None: ...

    def scan(
        self,
        start: bytes = b"",
        end: bytes | None = None,
        *,
        prefix: bytes | None = None,
        limit: int | None = None,
        reverse: bool = False,
        at: Version | datetime | None = None,
    ) -> Iterator[tuple[bytes, bytes]]: ...

    def pages(
        self, start: bytes = b"", end: bytes | None = None, *, at: Version | datetime | None = None
    ) -> Iterator[list[tuple[bytes, bytes]]]: ...

    def delete(self, key: bytes) -> Version: ...

    def delete_range(
        self, start: bytes = b"", end: bytes | None = None, *, prefix: bytes | None = None
    ) -> int: ...


class LayerTransaction(Protocol):
    """Reads and writes of one commit."""

    @property
    def version(self) -> Version: ...

    @property
    def read_version(self) -> Version: ...

    def get(self, namespace: Any, key: bytes) -> Any: ...

    def get_many(self, namespace: Any, keys: Iterable[bytes]) -> list[Any]: ...

    def scan(
        self,
        namespace: Any,
        start: bytes = b"",
        end: bytes | None = None,
        *,
        prefix: bytes | None = None,
        limit: int | None = None,
        reverse: bool = False,
    ) -> Iterator[tuple[Any, Any]]: ...

    def put(self, namespace: Any, key: bytes, value: bytes) -> None: ...

    def delete(self, namespace: Any, key: bytes) -> None: ...

    def append(
        self,
        namespace: Any,
        prefix: bytes,
        value: bytes,
        *,
        shift: int | None = None,
        before: Version = VERSION_MAX,
    ) -> int: ...

    def add_read_conflict(self, namespace: Any, key: bytes) -> None: ...

    def add_write_conflict(self, namespace: Any, key: bytes) -> None: ...


class LayerSite(Protocol):
    """A site, embedded or behind servers."""

    id: int

    def namespace(self, name: str) -> LayerRecords: ...

    def create_namespace(self, name: str, *, exist_ok: bool) -> LayerRecords: ...

    def append(
        self,
        namespace: Any,
        prefix: bytes,
        value: bytes,
        *,
        shift: int | None = None,
        before: Version = VERSION_MAX,
    ) -> Version: ...

    def resolved_version(self) -> Version: ...

    def covers(self, namespace: str, stamp: Stamp, *, at: Version | datetime | None = None) -> bool: ...

    def changes(self, namespace: str, *, since: Version, follow: bool, prefix: bytes) -> Iterator[Change]: ...

    def run_transaction(self, work: Callable[[LayerTransaction], Result]) -> Result: ...


def claim(site: LayerSite, name: str, layer: bytes) -> LayerRecords:
    """The namespace of a layer, created if it is missing.

    Raises WrongPolicy if it holds plain records or those of another layer, or if its records merge or expire.
    """
    try:
        records = site.namespace(name)
    except NamespaceNotFound:
        records = site.create_namespace(name, exist_ok=True)
    if records.settings.merge != "last_write" or records.settings.ttl is not None:
        raise WrongPolicy(
            f"namespace {name!r} merges or expires its records, and those of a layer must stay as they are; "
            "choose another name",
            namespace=name,
        )
    found = layer_of(records) or site.run_transaction(lambda t: _enter(t, records, layer))
    if found != layer:
        raise WrongPolicy(
            f"namespace {name!r} holds {found.decode(errors='replace')}, not {layer.decode()}; a layer has a "
            "namespace of its own: choose another name",
            namespace=name,
        )
    return records


def layer_of(records: LayerRecords) -> bytes | None:
    """The layer that a namespace belongs to; None for plain records."""
    return records.get(LAYER)


def present(site: LayerSite) -> Version:
    """A version at or above all writes that have returned, at any node."""
    return site.run_transaction(lambda transaction: transaction.read_version)


def _enter(transaction: LayerTransaction, records: LayerRecords, layer: bytes) -> bytes:
    """Assign an empty namespace to a layer; return the layer that owns it, or a text for plain records."""
    for key, value in transaction.scan(records, limit=1):
        return bytes(value) if key == LAYER else b"other records"
    transaction.put(records, LAYER, layer)
    return layer
