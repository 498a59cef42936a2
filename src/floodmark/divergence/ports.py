"""What a comparison needs of the sites that it looks at.

These are parts of what every host of a site offers (`host/ports.py`), embedded or behind a server: this room
stands below `site` and says only what it uses.
"""

from collections.abc import Mapping, Sequence
from typing import Protocol

from floodmark.model.record import FoundRecord, Repair
from floodmark.model.version import Version


class SiteIdentity(Protocol):
    """Who a site is."""

    @property
    def site(self) -> str: ...

    @property
    def site_id(self) -> int: ...


class MemberFacts(Protocol):
    """A site that shares a namespace, or did so until it was removed."""

    @property
    def id(self) -> int: ...

    @property
    def is_active(self) -> bool: ...

    def has_ended(self, through: Version) -> bool: ...


class TopologyFacts(Protocol):
    """Who shares what."""

    def members(self, namespace: str) -> Mapping[str, MemberFacts]: ...


class NamespaceFacts(Protocol):
    """What is known of a namespace besides its records."""

    @property
    def name(self) -> str: ...

    @property
    def collected_horizon(self) -> Version: ...


class SiteFacts(Protocol):
    """A site at one moment."""

    @property
    def namespaces(self) -> Sequence[NamespaceFacts]: ...


class LookedAtAdministration(Protocol):
    """What is asked of a site that is looked at."""

    def read_version(self) -> Version: ...

    def watermark(self, namespace: str, at: Version | None) -> Mapping[int, Version]: ...

    def topology(self) -> TopologyFacts | None: ...

    def links(self) -> object: ...

    def statistics(self) -> SiteFacts: ...

    def find_records(
        self, namespace: str, keys: list[bytes], at: Version, thin: bool
    ) -> Sequence[FoundRecord | None]: ...


class LookedAtSite(Protocol):
    """A site that is compared with others."""

    @property
    def identity(self) -> SiteIdentity: ...

    @property
    def administration(self) -> LookedAtAdministration: ...


class RepairedAdministration(LookedAtAdministration, Protocol):
    """What is asked of a site that is repaired."""

    def repair_records(self, namespace: str, repairs: list[Repair]) -> Sequence[bool]: ...


class RepairedSite(Protocol):
    """A site that is compared with others, and gets from them what it has lost."""

    @property
    def identity(self) -> SiteIdentity: ...

    @property
    def administration(self) -> RepairedAdministration: ...
