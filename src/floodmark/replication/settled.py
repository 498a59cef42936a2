"""Up to where nothing older can still arrive anywhere, so that a tombstone is no longer needed.

A tombstone hides what is older than it.  Once it is gone, something older that comes late would rise, here or
at another site that copied it from a third.  So it may go when everybody has got everything that was written
before it: when its stamp lies at or below every entry of every member's watermark.

Of itself each site knows its watermark, of the others what they say in their heartbeats, and what it does not
know counts as nothing.  That is late, never early: a watermark only grows.
"""

from collections.abc import Mapping

from floodmark.model.version import VERSION_MAX, Version
from floodmark.replication.topology import MemberSite


def settled_version(
    own: int, members: Mapping[int, MemberSite], watermarks: Mapping[int, Mapping[int, Version]]
) -> Version:
    """The version up to which every member has the changes of every other; `own` is this site's id.

    `watermarks` holds, by site, the entries that are known of each member's watermark.  A site's entry about
    itself is what it has announced.

    >>> members = {1: MemberSite(id=1), 2: MemberSite(id=2)}
    >>> settled_version(1, members, {1: {2: 40}, 2: {1: 30, 2: 50}})
    30
    >>> settled_version(1, members, {1: {2: 40}})
    0
    """
    holders = [site for site, member in members.items() if member.is_active]
    if own not in holders:
        return 0
    return min(
        _entry(site, members[site], own, watermarks.get(holder, {}), holder=holder)
        for holder in holders
        for site in members
    )


def _entry(
    site: int, member: MemberSite, own: int, watermark: Mapping[int, Version], *, holder: int
) -> Version:
    if site == holder == own:
        # Whatever is collected here is older than what this site will write.
        return VERSION_MAX
    version = watermark.get(site, 0)
    return VERSION_MAX if member.has_ended(version) else version
