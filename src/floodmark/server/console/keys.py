"""One key at all sites: its record side by side, and the versions that are still kept of it."""

from collections.abc import Callable
from typing import Final

import msgspec

from floodmark.codec.states import CounterState, decode_state
from floodmark.host.ports import Host
from floodmark.links.connections import at_once
from floodmark.model.errors import FloodmarkError, VersionCollected
from floodmark.model.record import FoundRecord
from floodmark.model.text import show_bytes
from floodmark.model.version import physical_ms
from floodmark.partition.read.records import decode_whole
from floodmark.server.console.watching import SiteWatch

VERSIONS_MAX: Final = 20
VALUE_CHARACTERS_MAX: Final = 2_000


class KeyRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One version of a key.  Versions are texts: JavaScript's numbers have too few digits.

    Records with one digest are equal, at whichever site they are.
    """

    version: str
    at_ms: int
    origin: str
    digest: str
    deleted: bool
    expired: bool
    expires_at: int | None
    value: str
    bytes: int
    cut: bool


class KeyAtSite(msgspec.Struct, frozen=True, kw_only=True):
    """The versions of a key at a site, the newest first; `more` says why there are no older ones."""

    site: str
    records: list[KeyRecord] = []
    more: str | None = None
    error: str | None = None


class FoundKey(msgspec.Struct, frozen=True, kw_only=True):
    """A key at all sites."""

    namespace: str
    key: str
    sites: list[KeyAtSite]


def look_up(sites: list[SiteWatch], namespace: str, key: bytes) -> FoundKey:
    """Read a key and its history at all sites at once; a site that fails has an error."""

    def at_site(watch: SiteWatch) -> KeyAtSite:
        try:
            return _history(watch.name, watch.reach(), namespace, key)
        except FloodmarkError as error:
            return KeyAtSite(site=watch.name, error=str(error))

    return FoundKey(namespace=namespace, key=show_bytes(key), sites=at_once(at_site, sites))


def _history(site: str, host: Host, namespace: str, key: bytes) -> KeyAtSite:
    names = _site_names(host)
    now_ms = host.physical_ms()
    records: list[KeyRecord] = []
    at = None
    while len(records) < VERSIONS_MAX:
        try:
            (found,) = host.verification.find_records(namespace, [key], at, False)
        except VersionCollected:
            return KeyAtSite(site=site, records=records, more="older versions were collected")
        if found is None:
            return KeyAtSite(site=site, records=records)
        records.append(_describe(found, names, now_ms))
        at = found.version - 1
    return KeyAtSite(site=site, records=records, more=f"the last {VERSIONS_MAX} versions are shown")


def _site_names(host: Host) -> Callable[[int | None], str]:
    identity = host.identity
    topology = host.membership.topology()
    names = {} if topology is None else {site.id: name for name, site in topology.sites.items()}

    def name(site: int | None) -> str:
        return identity.site if site is None else names.get(site, f"site {site}")

    return name


def _describe(found: FoundRecord, names: Callable[[int | None], str], now_ms: int) -> KeyRecord:
    record = decode_whole(found.stored)
    value = _show_value(record.value)
    if record.stamps is not None and isinstance(state := decode_state(found.stored), CounterState):
        parts = ", ".join(f"{names(entry.site)} {entry.total:+,}" for entry in state.entries)
        value = f"{value}\n({parts})" if parts else value
    version = found.version if record.origin is None else record.origin.version
    return KeyRecord(
        version=str(found.version),
        at_ms=physical_ms(version),
        origin=names(None if record.origin is None else record.origin.site),
        digest=f"{found.digest:016x}",
        deleted=record.deleted,
        expired=not record.deleted and record.is_dead_at(now_ms),
        expires_at=record.expires_at,
        value=value[:VALUE_CHARACTERS_MAX],
        bytes=len(record.value),
        cut=len(value) > VALUE_CHARACTERS_MAX,
    )


def _show_value(value: bytes) -> str:
    """A value in the form of keys, except that text may have several lines."""
    lines = [show_bytes(line) for line in value.split(b"\n")]
    return show_bytes(value) if any(line.startswith("0x") for line in lines) else "\n".join(lines)
