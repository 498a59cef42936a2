"""Copies a data set that was published at the source of a link to a target that lacks it.

A publisher loads the data set at all sites before any of them swaps.  A site that was away gets it when its
links run again.  The rows of the data set are not in the change log of the source, but they have its stamp:
as of a version, the source has all of them except those that were overwritten since, and these arrive as
changes.  So the target waits until its links have brought everything that the source had at that version.
Then it loads the rows, copies its own changes since the base, and swaps as a publisher does.  Meanwhile it
shows what it waits for.

The source's watermark cannot tell what the source had: it moves after the changes are applied.  So the target
compares its own watermark with the stamps of the source's records, after it has read them.

The target's change log may begin above the base by then.  A deletion that it has collected was known at all
sites before, so the source's rows do not contain the deleted record.

If a publisher dies between the first swap and the last, the links of the sites that have swapped finish its
work.  They load the rows again, because the publisher may have died before a site had all of them.  A
generation that another publisher has left behind may hold other rows under the same stamp: it is dropped
first, by an operator or after an hour.
"""

from collections.abc import Callable, Mapping
from functools import partial

from floodmark.codec.ordered import VERSION_BYTES, qualify_range
from floodmark.codec.records import add_origins, qualify_keys
from floodmark.codec.stamps import find_origins, stamp_version, take_origin
from floodmark.codec.values import HAS_EXPIRY, decode_value
from floodmark.host.catalog import KEPT_GENERATIONS, GenerationRow
from floodmark.host.ports import Host
from floodmark.model.errors import FloodmarkError
from floodmark.model.partition import GenerationStream
from floodmark.model.version import Version, moment_of, physical_ms
from floodmark.replication.step import LinkStep, NamespaceStep
from floodmark.site.generations import Generations


def bring_data_sets(source: Host, target: Host, step: LinkStep) -> None:
    """Publish the data sets of the source of a step at the target, as soon as that is possible.

    If it must wait or fails, the target shows the reason, and the step continues.
    """
    for part in step.namespaces:
        if part.data_set:
            show = partial(target.replication.stall_link, step.source_id, [part.name])
            try:
                _bring(source, target, part, show)
            except FloodmarkError as error:
                # A conflict means that the publisher or another link is at work here.
                show(f"the data set that was published at {step.source!r} is not here: {error}")


def _bring(source: Host, target: Host, part: NamespaceStep, show: Callable[[str], None]) -> None:
    present = source.namespaces.find_namespace(part.name).present
    if present.stamp != part.data_set:
        return
    data_set = f"the data set of {moment_of(present.base).isoformat()} to {part.name!r}"
    awaited = _find_awaited(source, target, part, present)
    if awaited is not None:
        show(f"it waits until {awaited} are there before it brings {data_set}")
        return
    show(f"it brings {data_set}")
    # Rows of a rollback may hold changes that were made at the source until its swap.
    target.versions.observe(part.since)
    publisher = f"the data set of {present.base} from site {present.origin}"
    loading = target.namespaces.find_namespace(part.name).loading
    known = publisher, present.publisher
    if loading is None or loading.stamp != part.data_set or loading.publisher not in known:
        loading = target.generations.begin_generation(
            part.name, present.base, publisher, present.origin, brought=True
        )
    rows, newest = _load(source, target, part, GenerationStream(part.target_id, loading.number))
    awaited = _find_uncovered(source, target, part, newest)
    if awaited is not None:
        show(f"it waits until {awaited} are there before it brings {data_set}")
        return
    generations = Generations(lambda: target, publisher)
    generations.finish(part.name, [loading.number], keep=KEPT_GENERATIONS, rows=rows)


def _find_awaited(source: Host, target: Host, part: NamespaceStep, present: GenerationRow) -> str | None:
    """A text about the changes that the source had at the link's position and that the target lacks.

    None if the target has them all, and the source had the data set at that position.
    """
    assert present.since is not None
    if part.since < present.since:
        return _changes("its changes", present.since)
    has = target.replication.watermark(part.name, None)
    for site, through in source.replication.watermark(part.name, part.since).items():
        if site != target.identity.site_id and has.get(site, 0) < through:
            return _changes(f"the changes of site {site}", through)
    return None


def _find_uncovered(
    source: Host, target: Host, part: NamespaceStep, newest: Mapping[int, Version]
) -> str | None:
    """A text about the newest changes of a third site that the target lacks; None if it has them all.

    `newest` has the version of the newest record of each site at the source.  The source's own records are
    there: the link's position covers them.
    """
    has = target.replication.watermark(part.name, None)
    there = {source.identity.site_id, target.identity.site_id}
    for site, version in newest.items():
        if site not in there and has.get(site, 0) < version:
            return _changes(f"the changes of site {site}", version)
    return None


def _changes(whose: str, through: Version) -> str:
    return f"{whose} up to {moment_of(through).isoformat()}"


def _load(
    source: Host, target: Host, part: NamespaceStep, command: GenerationStream
) -> tuple[int, dict[int, Version]]:
    """Load the rows with the stamp of the data set.

    Returns their number, and by site the version of the newest other record, deletions included.
    """
    stream, rows, at = target.write_stream(command), 0, part.since
    newest: dict[int, Version] = {}
    try:
        for page in source.router.scan_records(qualify_range(part.source_id), at, dead=True):
            versions = page.column("version").to_numpy()
            records = add_origins(page.column("value"), versions, source.identity.site_id).to_pylist()
            keys = qualify_keys(part.target_id, page.column("key")).to_pylist()
            origins = find_origins(records)
            found = {
                key: take_origin(record)[1]
                for key, record, origin in zip(keys, records, origins, strict=True)
                if origin == part.data_set and not _is_dead(record, physical_ms(at))
            }
            for origin in {*origins} - {part.data_set}:
                site = origin[VERSION_BYTES]
                newest[site] = max(newest.get(site, 0), stamp_version(origin))
            rows += stream.send(found).result() if found else 0
    finally:
        stream.close()
    return rows, newest


def _is_dead(record: bytes, at_ms: int) -> bool:
    return bool(record[-1] & HAS_EXPIRY) and decode_value(record).is_dead_at(at_ms)
