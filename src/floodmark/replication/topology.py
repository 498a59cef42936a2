"""The topology: which sites share which namespaces, as an operator writes it.

    epoch = 1

    [sites.oslo]
    url = "grpc://oslo:7100"

    [sites.rome]
    id = 2
    url = "grpc://rome:7100"
    token-file = "/etc/floodmark/rome.token"

    [namespaces.users]
    sites = ["oslo", "rome"]
    merge = "last_write"

    [namespaces.reports]
    sites = ["oslo", "rome"]
    sources = ["oslo"]

A site that was created with an explicit id has the same id here; otherwise the id is derived from the name in
both places.  Every site stores the topology (`members.py`).  It is replaced as a whole, and each replacement
increments `epoch`.
The changes of a namespace go from each of its `sources`, by default all of its sites, to its other sites.  A
removed site stays in the topology with `state = "removed"`, because stamps carry its id.  A site restored
from a backup gets a higher `incarnation`, which fences the links of its earlier life.
"""

from collections.abc import Collection, Iterator, Mapping
from enum import StrEnum
from typing import Final, NamedTuple

import msgspec

from floodmark.codec.digest import SEED, hash_bytes
from floodmark.merge.policies import POLICIES
from floodmark.model.errors import InvalidConfiguration, InvalidName
from floodmark.model.limits import SITE_IDS_MAX
from floodmark.model.names import require_name
from floodmark.model.version import VERSION_MAX, Version

SITES_MIN: Final = 2
_NUMBER_MAX: Final = (1 << 63) - 1


class SiteState(StrEnum):
    """Whether a site takes part.  Removed is final."""

    ACTIVE = "active"
    REMOVED = "removed"


class MemberSite(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True, rename="kebab"
):
    """A site of a topology.  Only the process that runs links needs its url and credentials.

    `final` belongs to a removed site: the other sites exchange its changes up to that version, and later ones
    are lost.
    """

    id: int
    url: str | None = None
    token_file: str | None = None
    tls_root_certificate: str | None = None
    state: SiteState = SiteState.ACTIVE
    incarnation: int = 1
    final: Version | None = None

    @property
    def is_active(self) -> bool:
        """Whether the site takes part."""
        return self.state is SiteState.ACTIVE

    def admits(self, incarnation: int) -> bool:
        """Whether changes of an incarnation of the site are still applied.

        The other sites exchange the changes of a removed site as an incarnation above its last.
        """
        return incarnation >= self.incarnation + (not self.is_active)

    def has_ended(self, through: Version) -> bool:
        """Whether a site that has this one's changes up to a version has all of them."""
        return self.final is not None and through >= self.final


class SharedNamespace(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True
):
    """A namespace that sites share: its sites, the sources among them (all by default), and how it merges."""

    sites: tuple[str, ...] | None = None
    sources: tuple[str, ...] | None = None
    merge: str = "last_write"


class Direction(NamedTuple):
    """One link: `target` gets the changes that were first written at `source`."""

    source: str
    target: str
    namespaces: tuple[str, ...]


class Topology(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """Sites and the namespaces that they share.

    >>> topology = parse_topology('''
    ... epoch = 1
    ... sites = {oslo = {id = 1}, rome = {id = 2}, bonn = {id = 3, state = "removed"}}
    ... namespaces = {users = {}, reports = {sources = ["oslo"]}}
    ... ''')
    >>> sorted(topology.members("users")), sorted(topology.active_members("users"))
    (['bonn', 'oslo', 'rome'], ['oslo', 'rome'])
    >>> for direction in topology.directions():
    ...     print(*direction)
    oslo rome ('reports', 'users')
    rome oslo ('users',)
    """

    epoch: int
    sites: Mapping[str, MemberSite]
    namespaces: Mapping[str, SharedNamespace] = {}

    def members(self, namespace: str) -> dict[str, MemberSite]:
        """The sites that share a namespace, removed ones included; none if it is not shared."""
        shared = self.namespaces.get(namespace)
        if shared is None:
            return {}
        names = self.sites if shared.sites is None else shared.sites
        return {name: self.sites[name] for name in names}

    def active_members(self, namespace: str) -> dict[str, MemberSite]:
        """The sites that share a namespace now."""
        return {name: site for name, site in self.members(namespace).items() if site.is_active}

    def sources(self, namespace: str) -> dict[str, MemberSite]:
        """The members of a namespace whose changes go to the others, removed ones included."""
        members = self.members(namespace)
        named = self.namespaces[namespace].sources if members else None
        return members if named is None else {name: members[name] for name in named}

    def incarnations(self) -> dict[int, int]:
        """The incarnation of each site, by its id."""
        return {site.id: site.incarnation for site in self.sites.values()}

    def shared_by(self, site: str) -> list[str]:
        """The namespaces in which a site takes part, by name."""
        return sorted(name for name in self.namespaces if site in self.active_members(name))

    def directions(self) -> Iterator[Direction]:
        """All links between active sites, in order of their names."""
        active = sorted(name for name, site in self.sites.items() if site.is_active)
        for source in active:
            told = {name for name in self.shared_by(source) if source in self.sources(name)}
            for target in active:
                both = sorted(told.intersection(self.shared_by(target)))
                if source != target and both:
                    yield Direction(source, target, tuple(both))

    def name_of(self, site_id: int) -> str | None:
        """The name of the site of an id."""
        return next((name for name, site in self.sites.items() if site.id == site_id), None)


def parse_topology(text: str | bytes, place: str = "the topology") -> Topology:
    """Read a topology from TOML, and check it.  Errors name `place` as the origin of the text."""
    try:
        stated = msgspec.toml.decode(text)
        sites = stated.get("sites")
        for name, site in sites.items() if isinstance(sites, dict) else ():
            if isinstance(site, dict):
                site.setdefault("id", default_site_id(name))
        topology = msgspec.convert(stated, Topology)
    except (msgspec.MsgspecError, UnicodeDecodeError, ValueError) as error:
        raise InvalidConfiguration(f"{place} cannot be used: {error}") from error
    check_topology(topology, place)
    return topology


def default_site_id(name: str) -> int:
    """The id of a site without an explicit one: a hash of its name, which rarely collides with another's."""
    return hash_bytes(name.encode(), SEED) % SITE_IDS_MAX + 1


def check_topology(topology: Topology, place: str = "the topology") -> None:
    """Refuse a topology that contradicts itself."""

    def refuse(problem: str) -> InvalidConfiguration:
        return InvalidConfiguration(f"{place} cannot be used: {problem}", epoch=topology.epoch)

    if not 1 <= topology.epoch <= _NUMBER_MAX:
        raise refuse(f"epoch counts from 1, and is {topology.epoch}")
    if len(topology.sites) < SITES_MIN:
        raise refuse("at least two sites are needed for one to copy the other")
    if not any(site.is_active for site in topology.sites.values()):
        raise refuse("all of its sites are removed; at least one stays active")
    try:
        for name in topology.sites:
            require_name(name, "site")
        for name in topology.namespaces:
            require_name(name, "namespace")
    except InvalidName as error:
        raise refuse(str(error)) from error
    names: dict[int, str] = {}
    for name, site in topology.sites.items():
        if not 1 <= site.id <= SITE_IDS_MAX:
            raise refuse(f"site {name!r} has id {site.id}; ids go from 1 to {SITE_IDS_MAX}")
        if site.id in names:
            raise refuse(f"sites {names[site.id]!r} and {name!r} both have id {site.id}; give each its own")
        if not 1 <= site.incarnation <= _NUMBER_MAX:
            raise refuse(f"site {name!r}: incarnation counts from 1, and is {site.incarnation}")
        if site.final is not None and (site.is_active or not 0 <= site.final <= VERSION_MAX):
            raise refuse(f'site {name!r}: `final` is the last version of a site whose state is "removed"')
        names[site.id] = name
    for name, shared in topology.namespaces.items():
        if problem := _problem_of(shared, topology):
            raise refuse(f"namespace {name!r} {problem}")


def _problem_of(shared: SharedNamespace, topology: Topology) -> str | None:
    if shared.merge not in POLICIES:
        return f"has merge = {shared.merge!r}; choose from: {', '.join(POLICIES)}"
    sites = tuple(topology.sites) if shared.sites is None else shared.sites
    sources = sites if shared.sources is None else shared.sources
    if any(len(set(names)) < len(names) for names in (sites, sources)):
        return "names a site twice"
    unknown = [name for name in sites if name not in topology.sites]
    if unknown:
        return f"goes to {unknown[0]!r}, which is not in [sites]; there are: {', '.join(topology.sites)}"
    if len(sites) < SITES_MIN:
        return "goes to one site only; name two or more, or leave `sites` out for all"
    strangers = [name for name in sources if name not in sites]
    if strangers:
        return f"has the source {strangers[0]!r}, which is not among its sites: {', '.join(sites)}"
    if not sources:
        return "has no source; name one or more, or leave `sources` out for all"
    return None


def check_succession(old: Topology, new: Topology) -> None:
    """Refuse a topology that cannot follow the one in force."""

    def refuse(problem: str) -> InvalidConfiguration:
        return InvalidConfiguration(
            f"topology {new.epoch} cannot follow topology {old.epoch}: {problem}", epoch=new.epoch
        )

    if new.epoch <= old.epoch:
        raise refuse(
            f"its epoch must be higher; see `floodmark topology show`, and set epoch = {old.epoch + 1}"
        )
    for name, before in old.sites.items():
        after = new.sites.get(name)
        if after is None:
            raise refuse(
                f'site {name!r} is missing; a site that goes stays there with state = "removed", so that its '
                "id is never used again"
            )
        if after.id != before.id:
            raise refuse(f"site {name!r} had id {before.id} and now {after.id}; an id is for life")
        if after.is_active and not before.is_active:
            raise refuse(
                f"site {name!r} was removed, and that is final; let it join empty, with a new name and id"
            )
        if after.incarnation < before.incarnation:
            raise refuse(
                f"site {name!r} had incarnation {before.incarnation} and now {after.incarnation}; it only "
                "counts up"
            )
        if before.final is not None and after.final != before.final:
            raise refuse(f"site {name!r} ended at version {before.final}, and now at {after.final}")
    for name, shared in new.namespaces.items():
        known = old.namespaces.get(name)
        if known is not None and known.merge != shared.merge:
            raise refuse(
                f"namespace {name!r} had merge = {known.merge!r} and now {shared.merge!r}; it is for life"
            )
        if known is not None and (left := _left_by(old, new, name)):
            raise refuse(
                f"namespace {name!r} goes no longer to {left!r}, which stays: what it wrote may not have "
                "reached all others. Remove the site as a whole, or leave the namespace out for all sites"
            )
        if known is not None and (lost := old.sources(name).keys() - new.sources(name).keys()):
            raise refuse(
                f"namespace {name!r} has no longer the source {min(lost)!r}: what it wrote may not have "
                "reached all others. Leave it among the sources, or remove the site as a whole"
            )
        if gone := _gone_before(old, new, name):
            active = ", ".join(f'"{each}"' for each in new.active_members(name))
            raise refuse(
                f"namespace {name!r} is new at {gone!r}, which was removed before; name those that share it: "
                f"sites = [{active}]"
            )


def _left_by(old: Topology, new: Topology, namespace: str) -> str | None:
    """An active site that no longer shares a namespace which other sites go on sharing."""
    members = new.members(namespace)
    return next((name for name in old.active_members(namespace) if name not in members), None)


def _gone_before(old: Topology, new: Topology, namespace: str) -> str | None:
    """A member that was removed before it shared a namespace: collection would wait for it for ever."""
    late = [name for name in new.members(namespace) if name not in old.members(namespace)]
    return next((name for name in late if name in old.sites and not new.sites[name].is_active), None)


def settled_version(
    own: int,
    members: Mapping[int, MemberSite],
    watermarks: Mapping[int, Mapping[int, Version]],
    sources: Collection[int] | None = None,
) -> Version:
    """The version up to which this site, `own`, and all sources have the changes of every source.

    No older change can still arrive, so a tombstone at or below it hides nothing, and may be collected.
    `watermarks` holds the known entries of each member's watermark, by site; a site's entry about itself is
    the version that it announced, and an unknown entry is 0.  An old heartbeat only delays collection, for
    watermarks grow.  All members are sources unless `sources` names some: no change comes from another site,
    and the watermark of another site does not count, because its changes go nowhere.

    >>> members = {1: MemberSite(id=1), 2: MemberSite(id=2)}
    >>> settled_version(1, members, {1: {2: 40}, 2: {1: 30, 2: 50}})
    30
    >>> settled_version(1, members, {1: {2: 40}})
    0
    >>> settled_version(1, members, {1: {2: 40}, 2: {2: 50}}, sources={2})
    40
    """
    told = members if sources is None else sources
    active = [site for site, member in members.items() if member.is_active]
    if own not in active:
        return 0
    return min(
        _entry(site, members[site], own, watermarks.get(holder, {}), holder=holder)
        for holder in active
        if holder == own or holder in told
        for site in told
    )


def _entry(
    site: int, member: MemberSite, own: int, watermark: Mapping[int, Version], *, holder: int
) -> Version:
    if site == holder == own:
        # This site's later writes are newer than anything that it collects now.
        return VERSION_MAX
    version = watermark.get(site, 0)
    return VERSION_MAX if member.has_ended(version) else version
