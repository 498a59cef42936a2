"""The rows of a rollback of a namespace that several sites share.

At several sites a rollback is a publication like any other (`generations.py`).  The publisher reads its rows
at its own site: the records of the earlier generation as of its end, and the newest change of each key since
then.  Each site's rewind also copies the changes above the base.

The rows replace all records at or below the base, at all sites.  Three conditions follow:

- The publisher must have the changes of all other sites up to the base.
- The base lies above the swap to the present data set, so that this data set has the older stamp.
- The other sites must first have all changes of the publisher.  Otherwise the rows could show them a part of
  an atomic batch that the link has not brought yet.

The rows hold the newest change of each key, also if it lies above the base.  A change at or below the base
that lost to a newer one is in no log of the publisher, so the newest below the base may be too old.
"""

from collections.abc import Callable, Collection, Generator, Iterator, Mapping, Sequence
from datetime import timedelta
from itertools import chain
from threading import Event
from typing import Final, NamedTuple

import pyarrow
import pyarrow.compute

from floodmark.clock.backoff import Backoff
from floodmark.codec.ordered import qualify_range
from floodmark.codec.records import BINARY, join_values, qualify_keys, split_values
from floodmark.columns.packed import pack
from floodmark.columns.pairs import PAIRS, Pairs
from floodmark.columns.sorting import sort_pairs
from floodmark.host.catalog import NamespaceRow
from floodmark.host.ports import Host
from floodmark.model.errors import LinkStalled, PublicationConflict, VersionCollected
from floodmark.model.stream import ChangesRequest
from floodmark.model.version import Version, moment_of
from floodmark.replication.topology import MemberSite

# How long a rollback waits for changes of other sites, whose heartbeats arrive each second.
ARRIVAL: Final = timedelta(seconds=10)


class Arrived(NamedTuple):
    """A base for a rollback: the publisher has the changes of all sites at or below it, as of `resolved`.

    `presents` are the numbers of the current generations of the sites.
    """

    base: Version
    resolved: Version
    row: NamespaceRow
    presents: tuple[int, ...]


def wait_arrived(hosts: Sequence[Host], namespace: str, wait: timedelta, without: Collection[str]) -> Arrived:
    """Wait until the first site has the others' changes up to the last swap, and they have its changes.

    Changes of the sites in `without` may be missing.  Raises LinkStalled after `wait`.
    """
    topology = hosts[0].membership.topology()
    sources = {} if topology is None else topology.sources(namespace)
    here = hosts[0].identity.site
    # The rows hold this site's changes, so the others need them, even if `without` names this site.
    near = {name: member for name, member in sources.items() if name == here or name not in without}
    pauses = Backoff(10, longest_ms=250, budget_ms=wait // timedelta(milliseconds=1)).pauses()
    while True:
        try:
            arrived = _look(hosts, namespace, near)
            break
        except LinkStalled:
            if (pause := next(pauses, None)) is None:
                raise
            Event().wait(pause)
    for other in hosts[1:]:
        # A write that follows a read of these rows must be newer than every row.
        other.versions.observe(arrived.resolved)
    return arrived


def _look(hosts: Sequence[Host], namespace: str, near: Mapping[str, MemberSite]) -> Arrived:
    """A base as of the last version here that the others have.  Raises LinkStalled if it is too old."""
    here, site = hosts[0], hosts[0].identity
    others = {each.identity.site: each.replication.watermark(namespace, None) for each in hosts[1:]}
    resolved = here.versions.resolved_version()
    if site.site in near:
        resolved = min([resolved, *(has.get(site.site_id, 0) for has in others.values())])
    # Looked up after the resolved version, so that no swap below it is missed.
    rows = [host.namespaces.find_namespace(namespace) for host in hosts]
    presents = [row.present for row in rows]
    stamps = [(each.stamp, host.identity.site) for each, host in zip(presents, hosts, strict=True)]
    newest, holder = max(stamps)
    if newest > stamps[0][0]:
        raise LinkStalled(
            f"{namespace!r} cannot go back yet: {site.site!r} lacks the data set that {holder!r} has. Let "
            f"the link from {holder!r} run, or roll back from there",
            namespace=namespace,
            source=holder,
            target=site.site,
        )
    swapped, base = max(each.since or 0 for each in presents), resolved
    arrived = {**here.replication.watermark(namespace, resolved), site.site_id: resolved}
    for source, member in near.items():
        if member.has_ended(through := arrived.get(member.id, 0)):
            continue
        base, wanted = min(base, through), swapped if source == site.site else through
        for name, has in others.items():
            if name != source:
                _require_through(namespace, source, name, has.get(member.id, 0), wanted, away=name)
        _require_through(namespace, source, site.site, through, swapped, away=source)
    _require_through(namespace, site.site, site.site, base, swapped, away=site.site)
    return Arrived(base, resolved, rows[0], tuple(each.number for each in presents))


def require_present(hosts: Sequence[Host], arrived: Arrived) -> None:
    """Raise PublicationConflict if a site swapped since the base was found: the rollback would undo that."""
    for host, number in zip(hosts, arrived.presents, strict=True):
        if host.namespaces.find_namespace(arrived.row.name).present.number != number:
            raise changed(arrived)


def changed(arrived: Arrived) -> PublicationConflict:
    """The error for a base that a later swap or garbage collection has made useless."""
    return PublicationConflict(
        f"{arrived.row.name!r} has not gone back: meanwhile another data set was published, or a site has "
        f"removed its changes from before {moment_of(arrived.base).isoformat()}. Look at `floodmark "
        "generation list`, and roll back again",
        namespace=arrived.row.name,
        version=arrived.base,
    )


def _require_through(
    namespace: str, source: str, target: str, through: Version, wanted: Version, *, away: str
) -> None:
    if through < wanted and source == target:
        raise LinkStalled(
            f"{namespace!r} cannot go back yet: all writes of {source!r} are settled up to "
            f"{moment_of(through).isoformat()}, and have to be up to {moment_of(wanted).isoformat()}. A "
            "transaction is open, or a partition has no owner; try again",
            namespace=namespace,
            source=source,
            target=target,
        )
    if through < wanted:
        raise LinkStalled(
            f"{namespace!r} cannot go back yet: {target!r} has what {source!r} wrote up to "
            f"{moment_of(through).isoformat()}, and needs it up to {moment_of(wanted).isoformat()}. Let the "
            f"link from {source!r} run, or leave a site out (`--without {away}`)",
            namespace=namespace,
            source=source,
            target=target,
        )


def earlier_rows(
    host: Host, arrived: Arrived, number: int, report: Callable[[str, int], None]
) -> Generator[Pairs, None, None]:
    """The records of a generation as of its end, overwritten with the changes since then.

    They are stored records under qualified keys, in key order, each key once, without deleted keys.
    """
    row = arrived.row
    until = row.earlier(number).until
    assert until is not None
    _require_logged(host, row, until)
    with host.reading(until - 1, row.id):
        # Each key's record precedes its changes, which are in version order: the last one counts.
        batches = chain(_records(host, row, until - 1), _changes(host, arrived, until))
        for pairs in sort_pairs(_counted(batches, report)):
            keys, values = (pack(column).to_arrow() for column in (pairs.key_column, pairs.value_column))
            live = pyarrow.compute.invert(split_values(values).deleted)
            if live.true_count:
                yield Pairs(keys.filter(live), values.filter(live))


def _require_logged(host: Host, row: NamespaceRow, since: Version) -> None:
    """Raise VersionCollected if the namespace was loaded since a version: a load is not in the change log."""
    if (loaded := host.membership.shared_since(row.name, since)) > since:
        raise VersionCollected(
            f"{row.name!r} was loaded {moment_of(loaded).isoformat()}, after the end of the generation, so "
            "the change log does not tell what was written in between; publish the data set again",
            namespace=row.name,
            version=since,
            oldest=loaded,
        )


def _counted(
    batches: Iterator[pyarrow.RecordBatch], report: Callable[[str, int], None]
) -> Iterator[pyarrow.RecordBatch]:
    read = 0
    for batch in batches:
        yield batch
        read += len(batch)
        report("reading", read)


def _records(host: Host, row: NamespaceRow, at: Version) -> Iterator[pyarrow.RecordBatch]:
    for page in host.router.scan_records(qualify_range(row.id), at):
        yield _plain(qualify_keys(row.id, page.column("key")), page.column("value"))


def _changes(host: Host, arrived: Arrived, since: Version) -> Iterator[pyarrow.RecordBatch]:
    """The changes from a swap on, in version order."""
    row, resolved = arrived.row, arrived.resolved
    for generation in row.generations:
        if generation.since is None or not since <= generation.since < resolved:
            continue
        # A stream must end before a swap.  No other change has the version of a swap.
        end = resolved if generation.until is None else min(generation.until - 1, resolved)
        request = ChangesRequest(
            keys=qualify_range(row.id), namespace=row.id, since=generation.since, until=end
        )
        for batch in host.changes(request):
            if batch.keys:
                yield _plain(pyarrow.array(batch.keys, BINARY), pyarrow.array(batch.values, BINARY))


def _plain(keys: pyarrow.BinaryArray, stored: pyarrow.BinaryArray) -> pyarrow.RecordBatch:
    """Records without stamps and batch flags: a loaded record gets the stamp of its data set."""
    columns = split_values(stored)
    values = join_values(columns.values, deleted=columns.deleted, expires_at=columns.expires_at)
    return pyarrow.RecordBatch.from_arrays([keys, values], schema=PAIRS)
