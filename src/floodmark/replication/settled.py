"""The version up to which no site can still receive an older change, so that tombstones may go.

A tombstone hides older changes of its key.  After it was collected, an older change that arrives late would
bring the key back, here or at another site.  So it may go when its stamp is at or below every entry of the
watermarks that count: that of this site, and those of the sources, known from their heartbeats.  An unknown
entry is 0.  A watermark only grows, so an old heartbeat delays collection and never hastens it.

Only sources have entries: no change comes from another site.  The watermark of a site that is no source does
not count elsewhere, because its changes go nowhere.
"""

from collections.abc import Collection, Mapping

from floodmark.model.version import VERSION_MAX, Version
from floodmark.replication.topology import MemberSite


def settled_version(
    own: int,
    members: Mapping[int, MemberSite],
    watermarks: Mapping[int, Mapping[int, Version]],
    sources: Collection[int] | None = None,
) -> Version:
    """The version up to which this site, `own`, and all sources have the changes of every source.

    `watermarks` holds the known entries of each member's watermark, by site; a site's entry about itself is
    the version that it announced.  All members are sources unless `sources` names some.

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
