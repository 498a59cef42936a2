"""Faults to plant: each replaces one function of the product by one that breaks a promise.

A simulation without findings proves something only if it finds planted faults.  Every checker therefore has
its canaries here.  A test switches them on, or a command that shows the effect of a fault:

    python -m floodmark.testing.simulation --fault async-published --seed 3
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from pkgutil import resolve_name
from typing import Any, Final, NamedTuple
from unittest.mock import patch

import msgspec

from floodmark.codec.stamps import NO_STAMP
from floodmark.codec.states import CounterEntry, CounterState, FieldsState
from floodmark.links.exchange import Copied
from floodmark.model.change import Sums, Tally
from floodmark.model.record import AtomicAnswer
from floodmark.model.version import VERSION_MAX
from floodmark.partition.recounting import Recount


class PlantedFault(NamedTuple):
    """A function of the product, and its replacement, which gets the original as its argument."""

    what: str
    owner: str
    function: str
    replace: Callable[[Callable[..., Any]], Callable[..., Any]]


def plant(name: str, faults: Mapping[str, PlantedFault] | None = None) -> AbstractContextManager[object]:
    """Plant a fault for the duration of a block: one of this module, unless `faults` are given."""
    fault = (FAULTS | PUBLISHING_FAULTS if faults is None else faults)[name]
    owner = resolve_name(fault.owner)
    return patch.object(owner, fault.function, fault.replace(getattr(owner, fault.function)))


def _every(period: int, original: Callable[..., Any], otherwise: Callable[..., Any]) -> Callable[..., Any]:
    """Replace every `period`-th call of a function by a call of another one."""
    calls = 0

    def replacement(*arguments: Any, **options: Any) -> Any:
        nonlocal calls
        calls += 1
        return (otherwise if calls % period == 0 else original)(*arguments, **options)

    return replacement


def _always(result: object) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Replace a function by one that does nothing and returns `result`."""
    return lambda _: lambda *_, **__: result


def _above_open_floor_only(_: Callable[..., Any]) -> Callable[..., Any]:
    return lambda floors, version, *_: version if floors.round is None else min(version, floors.round)


def _asynchronous(original: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *arguments, **_: original(*arguments, durable=False)


def _without_first_line(original: Callable[..., Any]) -> Callable[..., Any]:
    def read_logs(engine: Any, logs: Any, since: int, *rest: Any) -> Iterator[Any]:
        pages = original(engine, logs, since, *rest)
        first: list[Any] = next(pages, [])
        return iter([first[1:], *pages] if first[1:] else list(pages))

    return read_logs


def _without_sealed(original: Callable[..., Any]) -> Callable[..., Any]:
    def read_logs(engine: Any, logs: Sequence[Any], *rest: Any) -> Any:
        return original(engine, [log for log in logs if log.sealed_at is None], *rest)

    return read_logs


def _one_too_many(original: Callable[..., Any]) -> Callable[..., Any]:
    def drain_sums(*arguments: Any) -> dict[int, Sums]:
        sums: dict[int, Sums] = original(*arguments)
        one = Tally(1, 0)
        return {namespace: each.plus(Sums(one, one)) for namespace, each in sums.items()}

    return drain_sums


def _nothing_counted(original: Callable[..., Any]) -> Callable[..., Any]:
    def recount(*arguments: Any) -> Recount | None:
        counted: Recount | None = original(*arguments)
        return counted and counted._replace(tallies={log: [] for log in counted.tallies})

    return recount


def _last_tally(_: Callable[..., Any]) -> Callable[..., Any]:
    def count(applied: Any, through: int, tally: Tally) -> None:
        applied.tallies = [*(each for each in applied.tallies if each[0] != through), (through, tally)]

    return count


def _row_by_row(_: Callable[..., Any]) -> Callable[..., Any]:
    def cut_repeats(batch: Any) -> Iterator[Any]:
        for row in range(len(batch.keys)):
            yield batch.part(row, row + 1)

    return cut_repeats


def _partition_by_partition(original: Callable[..., Any]) -> Callable[..., Any]:
    def apply(router: Any, rows: Any, **options: Any) -> int:
        return max((original(router, group, **options) for _, group in router._groups(rows)), default=0)

    return apply


def _without_first_row(original: Callable[..., Any]) -> Callable[..., Any]:
    return _every(7, original, lambda *arguments: original(*arguments).slice(1))


def _unheard(_: Callable[..., Any]) -> Callable[..., Any]:
    def settle(sender: Any, *_: Any) -> None:
        sender._sent.clear()

    return settle


def _added_again(original: Callable[..., Any]) -> Callable[..., Any]:
    def merge_counters(current: CounterState, incoming: CounterState) -> CounterState:
        known = {(entry.site, entry.version): entry.total for entry in current.entries}
        again = {
            entry.site: CounterEntry(
                entry.site, entry.version, entry.total + known[entry.site, entry.version]
            )
            for entry in incoming.entries
            if (entry.site, entry.version) in known and len(current.entries) > len(incoming.entries)
        }
        merged: CounterState = original(current, incoming)
        entries = tuple(again.get(entry.site, entry) for entry in merged.entries)
        return msgspec.structs.replace(merged, entries=entries)

    return merge_counters


def _last_to_arrive(original: Callable[..., Any]) -> Callable[..., Any]:
    def merge_fields(current: FieldsState, incoming: FieldsState) -> FieldsState:
        arrived = {field.name: field for field in incoming.fields}
        merged: FieldsState = original(current, incoming)
        fields = tuple(arrived.get(field.name, field) for field in merged.fields)
        deleted = merged.deleted
        return FieldsState(deleted, tuple(field for field in fields if not deleted or field.stamp >= deleted))

    return merge_fields


def _newest(_: Callable[..., Any]) -> Callable[..., Any]:
    def read_missed(router: Any, needed: Mapping[bytes, int], records: dict[bytes, Any]) -> bool:
        def read(partition: Any, keys: Sequence[bytes]) -> None:
            records.update(zip(keys, partition.read_batches(keys, ()).records, strict=True))

        router.each(list(needed), read, together=True)
        return True

    return read_missed


def _known_to_be_alone(original: Callable[..., Any]) -> Callable[..., Any]:
    def missed(first: Any) -> Any:
        versions = (record.version for record in first.records.values())
        first._siblings = {version: first._siblings.get(version, set()) for version in versions}
        return original(first)

    return missed


def _as_if_overwritten(original: Callable[..., Any]) -> Callable[..., Any]:
    def missed(first: Any) -> Any:
        for key, record in first.records.items():
            first.records[key] = msgspec.structs.replace(record, merged=False)
        return original(first)

    return missed


def _resolved_after(original: Callable[..., Any]) -> Callable[..., Any]:
    def read_batches(committer: Any, *rest: Any) -> AtomicAnswer:
        answer: AtomicAnswer = original(committer, *rest)
        return msgspec.structs.replace(answer, resolved=committer.passed_version())

    return read_batches


FAULTS: Final[dict[str, PlantedFault]] = {
    "resolved-too-high": PlantedFault(
        "a resolved version one too high",
        "floodmark.partition.floors:Floors",
        "below",
        lambda original: lambda *arguments, **options: original(*arguments, **options) + 1,
    ),
    "async-published": PlantedFault(
        "an asynchronous commit is published before it is durable",
        "floodmark.partition.floors:Floors",
        "below",
        _above_open_floor_only,
    ),
    "sync-forgotten": PlantedFault(
        "a write returns before it is durable",
        "floodmark.partition.partition:LocalPartition",
        "put",
        _asynchronous,
    ),
    "version-reissued": PlantedFault(
        "the clock forgets its upper bound in a restart",
        "floodmark.partition.node:EngineBound",
        "load",
        _always(0),
    ),
    "clock-not-moved": PlantedFault(
        "the clock does not move past what other sites have written",
        "floodmark.clock.hybrid:HybridClock",
        "observe",
        _always(None),
    ),
    "feed-skips": PlantedFault(
        "a feed resumes one commit too far",
        "floodmark.partition.node",
        "read_logs",
        _without_first_line,
    ),
    "sealed-forgotten": PlantedFault(
        "a feed does not finish the logs that a split has sealed",
        "floodmark.partition.node",
        "read_logs",
        _without_sealed,
    ),
    "tail-leaks": PlantedFault(
        "a commit does not enter the live tail",
        "floodmark.partition.commit.tail:LiveTail",
        "add",
        lambda original: _every(5, original, lambda *_, **__: None),
    ),
    "safe-point-passed": PlantedFault(
        "garbage collection passes the safe points of feeds",
        "floodmark.feed.safepoints:SafePoints",
        "lowest",
        lambda _: lambda *arguments: arguments[-1],
    ),
    "tombstone-early": PlantedFault(
        "a tombstone is collected while something older may still arrive",
        "floodmark.replication.links:Links",
        "settled_version",
        _always(VERSION_MAX),
    ),
    "loser-stored": PlantedFault(
        "a change from another site is stored over a newer one",
        "floodmark.partition.partition",
        "newest_stamps",
        lambda original: lambda *arguments: [NO_STAMP] * len(original(*arguments)),
    ),
    "last-to-arrive": PlantedFault(
        "of two writes of a field the one that arrives last wins",
        "floodmark.merge.states",
        "merge_fields",
        _last_to_arrive,
    ),
    "added-again": PlantedFault(
        "a change that comes again is added to a counter as if it were new",
        "floodmark.merge.states",
        "merge_counters",
        _added_again,
    ),
    "change-dropped": PlantedFault(
        "a change is dropped on the way",
        "floodmark.links.reading",
        "_encode_changes",
        _without_first_row,
    ),
    "watermark-early": PlantedFault(
        "a watermark moves before the changes are durable",
        "floodmark.links.applying:Sender",
        "settle",
        _unheard,
    ),
    "stale-step": PlantedFault(
        "a step is noted that does not begin where the link stands",
        "floodmark.replication.links",
        "_require_next",
        _always(None),
    ),
    "put-many-split": PlantedFault(
        "a put_many to several partitions of a node is a commit in each",
        "floodmark.routing.router",
        "_by_place",
        lambda _: list,
    ),
    "commit-split": PlantedFault(
        "a commit of another site is split in two at the target",
        "floodmark.links.applying",
        "_cut_repeats",
        _row_by_row,
    ),
    "second-round-newest": PlantedFault(
        "the second round of an atomic read returns the newest record, and not the batch's",
        "floodmark.routing.atomic",
        "_read_missed",
        _newest,
    ),
    "unknown-batch-harmless": PlantedFault(
        "an atomic read takes a batch whose siblings are not known for one of a single key",
        "floodmark.routing.atomic:FirstRound",
        "missed",
        _known_to_be_alone,
    ),
    "merged-batch-forgotten": PlantedFault(
        "an atomic read takes a merged record for what the last batch wrote",
        "floodmark.routing.atomic:FirstRound",
        "missed",
        _as_if_overwritten,
    ),
    "resolved-after-read": PlantedFault(
        "the resolved version of an atomic read is taken after its records were read",
        "floodmark.partition.partition",
        "read_batches",
        _resolved_after,
    ),
    "batch-unmarked": PlantedFault(
        "the records of an atomic batch do not carry its mark",
        "floodmark.partition.deciding",
        "mark_batch",
        lambda _: lambda stored: stored,
    ),
    "copy-split": PlantedFault(
        "a commit of another site is applied partition by partition",
        "floodmark.routing.router:Router",
        "apply",
        _partition_by_partition,
    ),
    "fence-left-out": PlantedFault(
        "what a site wrote in a life that was lost is still taken in from its old links",
        "floodmark.replication.topology:MemberSite",
        "admits",
        _always(True),
    ),
    "removed-unshared": PlantedFault(
        "what some have of a site that is removed is not given to the others",
        "floodmark.links.removing",
        "copy_origin",
        _always(Copied(0, 0)),
    ),
    "uncounted-start": PlantedFault(
        "a site that starts takes what it wrote since its last heartbeat for nothing",
        "floodmark.partition.beating",
        "recount",
        _nothing_counted,
    ),
    "one-beat-for-another": PlantedFault(
        "of heartbeats that go through one version the last counts alone",
        "floodmark.replication.applied:NamespaceApplied",
        "count",
        _last_tally,
    ),
    "miscounted": PlantedFault(
        "a heartbeat counts one change too many",
        "floodmark.partition.beating",
        "drain_sums",
        _one_too_many,
    ),
}


def _loads_most(original: Callable[..., Any]) -> Callable[..., Any]:
    return lambda dataset, places, *rest: original(dataset, places[: max(1, len(places) - 1)], *rest)


def _from_the_present(original: Callable[..., Any]) -> Callable[..., Any]:
    def begin_generation(generations: Any, row: Any, *rest: Any, **named: Any) -> None:
        original(generations, row, *rest, **named)
        loading = row.loading
        generations.change_generation(row, loading.number, position=named["now"])

    return begin_generation


def _earlier(original: Callable[..., Any]) -> Callable[..., Any]:
    def cross(request: Any, swap: Any, *rest: Any) -> Iterator[Any]:
        at = swap.version
        for batch in original(request, swap._replace(version=at - (1 << 22)), *rest):
            versions = [at] * len(batch.versions)
            yield replace(batch, through=batch.through + (1 << 22), versions=versions)

    return cross


# Of a world that publishes data sets.
PUBLISHING_FAULTS: Final[dict[str, PlantedFault]] = {
    "swap-unloaded": PlantedFault(
        "a data set is read at a site that has not loaded it",
        "floodmark.site.generations",
        "_load",
        _loads_most,
    ),
    "replay-late": PlantedFault(
        "the replay of changes starts after the base",
        "floodmark.host.catalog:Catalog",
        "begin_generation",
        _from_the_present,
    ),
    "older-comes-back": PlantedFault(
        "a link brings changes that a data set has replaced",
        "floodmark.partition.partition",
        "published_stamps",
        _always(None),
    ),
    "difference-early": PlantedFault(
        "the difference of two data sets is computed at the wrong version",
        "floodmark.feed.reading.reader",
        "cross",
        _earlier,
    ),
    "brought-early": PlantedFault(
        "a link brings a data set before the changes above it",
        "floodmark.links.bringing",
        "_find_awaited",
        _always(None),
    ),
    "brought-uncovered": PlantedFault(
        "a link brings a data set before changes that the source has above its watermark",
        "floodmark.links.bringing",
        "_find_uncovered",
        _always(None),
    ),
    "swap-unannounced": PlantedFault(
        "a feed passes over a data set",
        "floodmark.feed.reading.reader",
        "end_before_swap",
        lambda _: lambda _swap, _position, end: end,
    ),
    "rollback-forgets": PlantedFault(
        "a rollback forgets what was written since",
        "floodmark.site.earlier",
        "_changes",
        lambda original: lambda *arguments: (each.slice(0, 0) for each in original(*arguments)),
    ),
    "rollback-early": PlantedFault(
        "a rollback has a base up to which not all has arrived",
        "floodmark.site.earlier",
        "_look",
        lambda original: lambda hosts, namespace, _: original(hosts, namespace, {}),
    ),
}
