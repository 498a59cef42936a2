"""What a comparison needs of the sites that it looks at.

These are parts of what every host of a site offers (`host/ports.py`), embedded or behind a server: this room
stands below `host` and says only what it uses.
"""

from collections.abc import Mapping, Sequence
from typing import Protocol

from floodmark.model.names import SiteIdentity
from floodmark.model.record import FoundRecord, Repair
from floodmark.model.version import Version


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


class LookedAtVersions(Protocol):
    """The versions of a site."""

    def read_version(self) -> Version: ...


class LookedAtLinks(Protocol):
    """The links that end at a site."""

    def watermark(self, namespace: str, at: Version | None) -> Mapping[int, Version]: ...

    def links(self) -> object: ...


class LookedAtMembership(Protocol):
    """The part of a site in the topology."""

    def topology(self) -> TopologyFacts | None: ...


class LookedAtStatus(Protocol):
    """The statistics of a site."""

    def statistics(self) -> SiteFacts: ...


class LookedAtRecords(Protocol):
    """The records of a site."""

    def find_records(
        self, namespace: str, keys: list[bytes], at: Version, thin: bool
    ) -> Sequence[FoundRecord | None]: ...


class LookedAtSite(Protocol):
    """A site that is compared with others."""

    @property
    def identity(self) -> SiteIdentity: ...

    @property
    def versions(self) -> LookedAtVersions: ...

    @property
    def replication(self) -> LookedAtLinks: ...

    @property
    def membership(self) -> LookedAtMembership: ...

    @property
    def status(self) -> LookedAtStatus: ...

    @property
    def verification(self) -> LookedAtRecords: ...


class RepairedRecords(LookedAtRecords, Protocol):
    """The records of a site that is repaired."""

    def repair_records(self, namespace: str, repairs: list[Repair]) -> Sequence[bool]: ...


class RepairedSite(LookedAtSite, Protocol):
    """A site that is compared with others, and gets from them what it has lost."""

    @property
    def verification(self) -> RepairedRecords: ...
