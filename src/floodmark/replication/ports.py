"""What a link needs of the two sites that it connects.

These are parts of what every host of a site offers (`host/ports.py`), embedded or behind a server: this room
stands below `site` and says only what it uses.
"""

from collections.abc import Iterator
from typing import Protocol

from floodmark.feed.reading.cut import ChangesCut
from floodmark.model.partition import LinkGuard, WriteStream
from floodmark.model.stream import ChangeBatch, ChangesRequest
from floodmark.model.version import Version
from floodmark.replication.applied import Applied
from floodmark.replication.step import LinkStep, NamespaceCut, NamespacePosition


class SiteIdentity(Protocol):
    """Who a site is."""

    @property
    def site(self) -> str: ...

    @property
    def site_id(self) -> int: ...


class NamespaceFacts(Protocol):
    """A namespace at one of the sites.  A name that was dropped and made anew has another id."""

    @property
    def id(self) -> int: ...


class SourceNamespaces(Protocol):
    """What a source knows of its namespaces."""

    def find_namespace(self, namespace: str) -> NamespaceFacts: ...

    def shared_since(self, namespace: str, position: Version) -> Version: ...

    def returned_version(self) -> Version: ...

    def cut_changes(
        self,
        namespace: str,
        since: Version,
        changes_max: int | None,
        until: Version | None,
        at_heartbeat: bool,
        own: bool = False,
    ) -> ChangesCut: ...


class SourceAdministration(Protocol):
    """What is asked of a source once a step."""

    def cut_link(self, positions: dict[str, Version], changes_max: int | None) -> list[NamespaceCut]: ...


class SourceSite(Protocol):
    """Where a link reads."""

    @property
    def identity(self) -> SiteIdentity: ...

    @property
    def administration(self) -> SourceAdministration: ...

    def changes(self, request: ChangesRequest) -> Iterator[ChangeBatch]: ...


class LinkPosition(Protocol):
    """How far a target is with a namespace of a source."""

    @property
    def source_id(self) -> int: ...

    @property
    def namespace(self) -> str: ...

    @property
    def through(self) -> Version: ...


class TargetAdministration(Protocol):
    """What is asked of a target once a step."""

    def link_positions(self, source_id: int, namespaces: list[str]) -> list[NamespacePosition]: ...

    def advance_link(self, step: LinkStep, applied: Applied) -> object: ...


class TargetSite(Protocol):
    """Where a link writes."""

    @property
    def administration(self) -> TargetAdministration: ...

    def physical_ms(self) -> int: ...

    def write_stream(self, *, durable: bool, apply: bool, link: LinkGuard | None) -> WriteStream: ...
