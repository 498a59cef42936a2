"""What a link needs of the two sites that it connects.

These are parts of what every host of a site offers (`host/ports.py`), embedded or behind a server: this room
stands below `host` and says only what it uses.
"""

from collections.abc import Iterator
from typing import Protocol

from floodmark.model.names import SiteIdentity
from floodmark.model.partition import LinkGuard, WriteStream
from floodmark.model.stream import ChangeBatch, ChangesRequest
from floodmark.model.version import Version
from floodmark.replication.applied import Applied
from floodmark.replication.step import LinkStep, NamespaceCut, NamespacePosition


class NamespaceIdentity(Protocol):
    """A namespace at one of the sites.  A name that was dropped and made anew has another id."""

    @property
    def id(self) -> int: ...


class SourceLinks(Protocol):
    """The requests of a step to its source."""

    def cut_link(self, positions: dict[str, Version], changes_max: int | None) -> list[NamespaceCut]: ...


class SourceSite(Protocol):
    """Where a link reads."""

    @property
    def identity(self) -> SiteIdentity: ...

    @property
    def replication(self) -> SourceLinks: ...

    def changes(self, request: ChangesRequest) -> Iterator[ChangeBatch]: ...


class LinkState(Protocol):
    """How far a target is with a namespace of a source."""

    @property
    def source_id(self) -> int: ...

    @property
    def namespace(self) -> str: ...

    @property
    def through(self) -> Version: ...


class TargetLinks(Protocol):
    """The requests of a step to its target."""

    def link_positions(self, source_id: int, namespaces: list[str]) -> list[NamespacePosition]: ...

    def advance_link(self, step: LinkStep, applied: Applied) -> object: ...


class TargetSite(Protocol):
    """Where a link writes."""

    @property
    def replication(self) -> TargetLinks: ...

    def physical_ms(self) -> int: ...

    def write_stream(self, *, durable: bool, apply: bool, link: LinkGuard | None) -> WriteStream: ...
