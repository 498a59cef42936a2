"""Looking at sites: from where each is seen, and single keys compared.

The version is fixed first, and everything else is asked for as of it or after it.  A site that is entered
into the topology in between is not yet in the watermark, and then nothing is concluded from absence.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import islice
from typing import Final

from floodmark.divergence.alignment import Row
from floodmark.divergence.comparing import Comparison, Vantage, compare_rows
from floodmark.host.ports import Host
from floodmark.model.errors import InvalidConfiguration
from floodmark.model.record import FoundRecord
from floodmark.model.version import VERSION_MAX, Version
from floodmark.replication.topology import MemberSite

# As many as a site looks up in one call.
KEYS_AT_ONCE: Final = 10_000


def take_vantage(site: Host, namespace: str) -> Vantage:
    """A site as of now.  The caller sees to it that the version stays readable, by a safe point.

    Raises InvalidConfiguration where nothing can ever be told, because the site does not share the namespace,
    and Rejoining while a site that was restored does not know yet what it has lost.
    """
    own = site.identity
    version = site.versions.read_version()
    watermark = site.replication.watermark(namespace, version)
    members = _find_members(site, namespace)
    # Asked for its refusal: a site that is rejoining does not know how far it is.
    site.replication.links()
    if own.site_id not in members and not watermark:
        raise InvalidConfiguration(
            f"site {own.site!r} does not share namespace {namespace!r} and has got no changes of it from "
            "others, so that it cannot be told what it should hold. Name sites that replicate it",
            site=own.site,
            namespace=namespace,
        )
    entries = {
        site_id: _entry(member, watermark.get(site_id, 0), version) for site_id, member in members.items()
    }
    mark = {**watermark, **entries, own.site_id: version}
    horizon_of = partial(read_horizon, site, namespace, tuple(mark))
    return Vantage(own.site, own.site_id, version, mark, horizon_of)


def read_horizon(site: Host, namespace: str, known: Collection[int]) -> Version:
    """The collected horizon of a namespace now, for a vantage that knows of some sites, by their ids.

    It is above everything if another site has joined since: a tombstone of that may have been collected.
    """
    facts = site.status.statistics().namespaces
    horizon = next((each.collected_horizon for each in facts if each.name == namespace), VERSION_MAX)
    joined = _find_members(site, namespace).keys() - set(known)
    return VERSION_MAX if joined else horizon


def compare_keys(
    sites: Sequence[Host],
    namespace: str,
    keys: Iterable[bytes],
    vantages: Sequence[Vantage] | None = None,
) -> Comparison:
    """Compare what sites hold of some keys, each site with each, as of now or from vantages taken before."""
    taken = [take_vantage(site, namespace) for site in sites] if vantages is None else vantages
    return compare_rows(taken, _find_rows(sites, taken, namespace, iter(keys)))


def _find_rows(
    sites: Sequence[Host], vantages: Sequence[Vantage], namespace: str, keys: Iterator[bytes]
) -> Iterator[tuple[bytes, list[Row | None]]]:
    while some := list(islice(keys, KEYS_AT_ONCE)):
        found = [
            site.verification.find_records(namespace, some, vantage.version, True)
            for site, vantage in zip(sites, vantages, strict=True)
        ]
        for key, *records in zip(some, *found, strict=True):
            yield key, [_row_of(record) for record in records]


def _row_of(record: FoundRecord | None) -> Row | None:
    return None if record is None else Row(record.version, record.stored, record.digest)


def _find_members(site: Host, namespace: str) -> Mapping[int, MemberSite]:
    topology = site.membership.topology()
    members = {} if topology is None else topology.members(namespace)
    return {member.id: member for member in members.values()}


def _entry(member: MemberSite, through: Version, version: Version) -> Version:
    """How far a watermark is with a site.  Of one that has ended, everything up to any version is in."""
    return max(through, version) if member.has_ended(through) else through
