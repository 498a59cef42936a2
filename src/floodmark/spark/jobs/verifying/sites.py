"""The compared sites, as the driver sees them: which of them answer, their shared namespaces, their vantages.

A site that cannot be read is a doubt, and the others are still compared: its absence must not hide that two
others have drifted.
"""

from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import groupby
from typing import Final
from uuid import uuid4

from floodmark.codec.ordered import NAMESPACE_BYTES, encode_namespace
from floodmark.divergence.comparing import Vantage, take_vantage
from floodmark.feed import at_present
from floodmark.host.catalog import NamespaceRow
from floodmark.model.errors import (
    Corruption,
    FloodmarkError,
    InvalidArgument,
    InvalidConfiguration,
    NamespaceNotFound,
    Rejoining,
    Unreachable,
    VersionCollected,
    WireMismatch,
)
from floodmark.model.ranges import KeyRange
from floodmark.model.version import Version
from floodmark.replication.topology import Topology
from floodmark.site.address import SiteAddress
from floodmark.site.arguments import qualify_range
from floodmark.site.site import Site
from floodmark.spark.jobs.safepoints import holding, release
from floodmark.spark.jobs.verifying.comparing import SITES_MIN, NamespaceViews, RangeComparison, SiteView
from floodmark.spark.source.planning import plan_ranges
from floodmark.spark.source.reading import READERS, ServedReader

_TRIES: Final = 10
_CANNOT_LOOK: Final = (
    InvalidConfiguration,
    NamespaceNotFound,
    Rejoining,
    Unreachable,
    VersionCollected,
)


@dataclass(frozen=True, kw_only=True)
class Look:
    """A namespace at all sites that can be compared, with their vantages."""

    namespace: str
    sites: Sequence[Site]
    rows: Sequence[NamespaceRow]
    vantages: Sequence[Vantage]


class ComparedSites:
    """The sites that answer, and doubts about the others."""

    def __init__(self, addresses: Sequence[SiteAddress]) -> None:
        if len(addresses) < SITES_MIN:
            raise InvalidArgument("name two sites or more: one alone agrees with itself")
        self.doubts: list[str] = []
        self.sites: list[Site] = []
        self._addresses: dict[str, SiteAddress] = {}
        self._name = f"{READERS}verify-{uuid4()}"
        with ExitStack() as stack:
            for address in addresses:
                address.require_url("compared")
                self._open(stack, address)
            self._check_names()
            self._open_sites = stack.pop_all()
        self._unanswered = tuple(self.doubts)

    def begin_anew(self) -> None:
        """Drop the doubts of earlier looks, and keep those about sites that did not answer."""
        self.doubts[:] = self._unanswered

    def _open(self, stack: ExitStack, address: SiteAddress) -> None:
        try:
            site = stack.enter_context(address.connect())
        except (Unreachable, WireMismatch) as error:
            self.doubts.append(f"{address.location} cannot be compared: {error}")
            return
        self.sites.append(site)
        self._addresses[site.name] = address

    def _check_names(self) -> None:
        for name, group in groupby(sorted(site.name for site in self.sites)):
            if len(list(group)) > 1:
                raise InvalidArgument(f"site {name!r} is named twice; name sites that may differ")
        if len({site.id for site in self.sites}) < len(self.sites):
            raise InvalidArgument(
                "two of the sites have the same id, so that their writes cannot be told apart"
            )

    def __enter__(self) -> "ComparedSites":
        return self

    def __exit__(self, *_: object) -> None:
        self._open_sites.close()

    # Namespaces

    def shared_namespaces(self) -> dict[str, list[Site]]:
        """The namespaces that two or more of the sites share, by any of their topologies, and these sites."""
        members: dict[str, set[str]] = {}
        for topology in filter(None, map(self._topology_of, self.sites)):
            for name in topology.namespaces:
                members.setdefault(name, set()).update(topology.active_members(name))
        sharing = {
            name: [site for site in self.sites if site.name in members[name]] for name in sorted(members)
        }
        return {name: sites for name, sites in sharing.items() if len(sites) >= SITES_MIN}

    def _topology_of(self, site: Site) -> Topology | None:
        try:
            return site.topology()
        except Unreachable as error:
            self.doubts.append(f"the topology of {site.name} could not be read: {error}")
            return None

    def look(self, namespace: str, sites: Sequence[Site]) -> Look | None:
        """Take the vantages of some sites; None if fewer than two can be compared."""
        found: list[tuple[Site, NamespaceRow, Vantage]] = []
        for site in sites:
            try:
                row = site.host.namespaces.find_namespace(namespace)
                self._hold(site, row)
                found.append((site, row, take_vantage(site.host, namespace)))
            except _CANNOT_LOOK as error:
                self.doubts.append(f"{namespace!r} of {site.name} cannot be compared: {error}")
        policies = Counter(row.merge for _, row, _ in found)
        if len(policies) > 1:
            said = ", ".join(f"{site.name} by {row.merge}" for site, row, _ in found)
            self.doubts.append(f"{namespace!r} has several merge policies: {said}")
            # The sites with the most common policy can still be compared.
            policy = policies.most_common(1)[0][0]
            found = [each for each in found if each[1].merge == policy]
        if len(found) < SITES_MIN:
            return None
        compared, rows, vantages = zip(*found, strict=True)
        return Look(namespace=namespace, sites=compared, rows=rows, vantages=vantages)

    def _hold(self, site: Site, row: NamespaceRow) -> None:
        """Hold the present version until the sites are closed."""
        name = f"{self._name}-{row.id}"
        at_present(
            site.host.versions.read_version,
            lambda version: self._open_sites.enter_context(holding(site, name, version, row.name)),
        )
        self._open_sites.callback(_release_quietly, site, name)

    # Ranges

    def views(self, look: Look, *, history: bool) -> NamespaceViews:
        """A namespace for the tasks."""
        views = [
            SiteView(
                address=self._addresses[site.name],
                site=site.name,
                site_id=site.id,
                namespace_id=row.id,
                version=vantage.version,
                mark=dict(vantage.mark),
            )
            for site, row, vantage in zip(look.sites, look.rows, look.vantages, strict=True)
        ]
        since = self._hold_history(look) if history else None
        return NamespaceViews(namespace=look.namespace, views=views, history_since=since)

    def _hold_history(self, look: Look) -> Version | None:
        """The version above which all sites have their histories, held until the sites are closed."""
        for left in reversed(range(_TRIES)):
            try:
                since = max(map(_first_version, look.sites, look.rows))
                with ExitStack() as stack:
                    for site, row in zip(look.sites, look.rows, strict=True):
                        name = f"{self._name}-history-{row.id}"
                        stack.enter_context(holding(site, name, since, row.name))
                        stack.callback(_release_quietly, site, name)
                    self._open_sites.push(stack.pop_all())
            except (Unreachable, VersionCollected) as error:
                if not left:
                    self.doubts.append(f"the history of {look.namespace!r} cannot be compared: {error}")
            else:
                return since
        return None

    def plan(self, look: Look, tasks_min: int, *, history: bool) -> list[RangeComparison]:
        """A namespace cut into ranges of users' keys, by the site with the most ranges."""
        views = self.views(look, history=history)
        plans = [
            _plan_site(site, row, vantage.version, tasks_min)
            for site, row, vantage in zip(look.sites, look.rows, look.vantages, strict=True)
        ]
        return [RangeComparison(namespace=views, keys=keys) for keys in max(plans, key=len)]


def _plan_site(site: Site, row: NamespaceRow, version: Version, tasks_min: int) -> list[KeyRange]:
    prefix = encode_namespace(row.id)
    whole = qualify_range(prefix, KeyRange())
    reader = ServedReader(site)
    try:
        ranges = plan_ranges(
            reader.partition_ranges(), whole, tasks_min, lambda keys: reader.sample_keys(keys, version)
        )
    except (Corruption, Unreachable):
        # The task that compares the range raises the error; another site may give the ranges.
        return [KeyRange()]
    return [_users_keys(keys, whole) for keys in ranges]


def _users_keys(keys: KeyRange, whole: KeyRange) -> KeyRange:
    """A range of qualified keys without the namespace's id, which differs between sites."""
    end = None if keys.end is None or keys.end == whole.end else keys.end[NAMESPACE_BYTES:]
    return KeyRange(keys.start[NAMESPACE_BYTES:], end)


def _first_version(site: Site, row: NamespaceRow) -> Version:
    """The version above which all sites should have the same history."""
    host = site.host
    return max(host.retention.oldest_version(row.name), host.membership.shared_since(row.name, 0))


def _release_quietly(site: Site, name: str) -> None:
    try:
        release(site, name)
    except FloodmarkError:
        # The safe point expires.
        return
