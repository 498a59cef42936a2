"""Faults to plant in nodes on a shared engine; `nodes.py` must find each."""

from collections.abc import Callable, Sequence
from typing import Any, Final

from floodmark.engine import Guard, WriteRow
from floodmark.model.batch import is_batch
from floodmark.model.partition import ReadSet
from floodmark.model.ranges import KeyRange
from floodmark.model.version import COUNTER_BITS
from floodmark.partition.families import CATALOG, DATA, META
from floodmark.partition.node import ended_batches, forget_batches
from floodmark.testing.simulation.faults import PlantedFault

_Original = Callable[..., Any]
_FENCING: Final = "floodmark.partition.fencing:FencedEngine"


def _is_round(rows: Sequence[WriteRow]) -> bool:
    return any(family == DATA for family, _, _ in rows)


def _is_catalog(rows: Sequence[WriteRow]) -> bool:
    return any(family == META and key.startswith(CATALOG) for family, key, _ in rows)


def _unguarded(original: _Original, concerns: Callable[[Sequence[WriteRow]], bool]) -> _Original:
    """Leave all guards out of some writes."""

    def guarded(self: Any, write: Any, rows: Any, guards: Any) -> Any:
        batch = list(rows)
        return write(batch) if concerns(batch) else original(self, write, batch, guards)

    return guarded


def _guard_before(original: _Original) -> _Original:
    """Look at the fence before the batch, and not in it."""

    def guarded(self: Any, write: Any, rows: Any, guards: Any) -> Any:
        batch = list(rows)
        fence = self._fence
        if _is_round(batch) and self.shared.get(fence.family, fence.key) == fence.expected:
            return write(batch)
        return original(self, write, batch, guards)

    return guarded


def _announce_above(_: _Original) -> _Original:
    """Resolve to the present time, whatever the ceiling is."""

    def resolve(self: Any, keys: KeyRange | None = None) -> Any:
        now = self._clock.time_source() << COUNTER_BITS
        return self.floors.below(max(now, self._clock.latest), keys)

    return resolve


def _count_from_beginning(original: _Original) -> _Original:
    """Count all changes of logs, not only those above the last heartbeat."""
    return lambda engine, logs, _, *rest: original(engine, logs, 1, *rest)


def _refuse_in_passing(original: _Original) -> _Original:
    """Answer that a batch is refused, and store nothing."""

    def refuse(self: Any) -> Any:
        original(self)
        return ()

    return refuse


def _forget_at_once(_: _Original) -> _Original:
    """Forget how a batch has ended here, whether its other partitions know it or not."""

    def forget(node: Any, *_: object) -> None:
        forget_batches(
            node, [(batch, key) for batch, key, outcome in ended_batches(node, 0) if outcome.version]
        )

    return forget


def _depend_on_keys(is_kept: Callable[[Any, bytes], bool]) -> _Original:
    """Let a commit depend on some of the keys that were read, and on no range."""

    def replace(original: Any) -> Any:
        def conflicts(self: Any) -> Any:
            reads = original.fget(self)
            keys = [] if reads is None else [key for key in reads.keys if is_kept(self, key)]
            return ReadSet(reads.since, keys) if keys else None

        return property(conflicts)

    return replace


def _is_written(self: Any, key: bytes) -> bool:
    return key in self._written


def _validate_first(original: _Original) -> _Original:
    """Validate what was read before the keys are locked."""

    def commit(self: Any, transaction: str, writes: Any, reads: Any = None) -> Any:
        if reads is not None:
            self._router.validate(transaction, reads, self._node.committer.now())
        return original(self, transaction, writes, None)

    return commit


_CONFLICTS: Final = ("floodmark.site.reading:TransactionReads", "conflicts")

# To be found with transactions in the world.
TRANSACTION_FAULTS: Final = {
    "lost-update": PlantedFault(
        "a commit in one round does not look at what was read",
        "floodmark.partition.validating:Validation",
        "require_unchanged",
        lambda _: lambda *_: None,
    ),
    "write-skew": PlantedFault(
        "a commit depends only on what it writes", *_CONFLICTS, _depend_on_keys(_is_written)
    ),
    "read-skew": PlantedFault(
        "each read of a transaction is at a version of its own",
        "floodmark.site.reading:TransactionReads",
        "version",
        lambda _: property(lambda self: self._read_version()),  # type: ignore[arg-type, return-value]
    ),
    "phantom": PlantedFault(
        "a commit depends on keys, and not on ranges",
        *_CONFLICTS,
        _depend_on_keys(lambda *_: True),
    ),
    "validated-before-locked": PlantedFault(
        "a coordinator looks at what was read before it locks the keys",
        "floodmark.host.coordination:LocalTransactions",
        "commit",
        _validate_first,
    ),
    "lock-lost-in-takeover": PlantedFault(
        "a node that takes partitions over does not load the prepared writes of transactions",
        "floodmark.partition.prepared.writes:PreparedWrites",
        "_is_mine",
        lambda original: lambda self, row: is_batch(row[0]) and original(self, row),
    ),
    "cached-before-own-commit": PlantedFault(
        "a client that caches read versions forgets the version of its last commit",
        "floodmark.site.read_versions:ReadVersions",
        "saw",
        lambda _: lambda *_: None,
    ),
}

NODE_FAULTS: Final = {
    "refusal-not-durable": PlantedFault(
        "a partition that is asked for a batch refuses it, and does not store that",
        "floodmark.partition.prepared.steps:AbortPrepared",
        "_refuse",
        _refuse_in_passing,
    ),
    "outcome-dropped": PlantedFault(
        "the outcome of a batch is dropped before all of its partitions have ended it",
        "floodmark.testing.simulation.node_batches",
        "forget_ended",
        _forget_at_once,
    ),
    "round-unguarded": PlantedFault(
        "a round is written without the fence", _FENCING, "guarded", lambda each: _unguarded(each, _is_round)
    ),
    "guard-before-batch": PlantedFault(
        "the fence is read before a round, not in it", _FENCING, "guarded", _guard_before
    ),
    "ceiling-not-passed": PlantedFault(
        "a successor does not pass the ceiling of the dead node",
        "floodmark.partition.takeover",
        "load_number",
        lambda _: lambda *_, **__: 0,
    ),
    "announced-above-ceiling": PlantedFault(
        "a version above the ceiling is announced",
        "floodmark.partition.committer:Committer",
        "resolve",
        _announce_above,
    ),
    "lease-ignored": PlantedFault(
        "a read is answered without a look at the lease",
        "floodmark.partition.membership:Membership",
        "require",
        lambda _: lambda _: None,
    ),
    "keeper-unguarded": PlantedFault(
        "the keeper writes without guards", _FENCING, "guarded", lambda each: _unguarded(each, _is_catalog)
    ),
    "takeover-unguarded": PlantedFault(
        "a takeover goes on after the dead node has started again",
        "floodmark.partition.takeover",
        "fence_guard",
        lambda _: lambda *_, **__: Guard(META, b"never written", None),
    ),
    "counted-twice": PlantedFault(
        "the last heartbeat of a dead node counts what earlier ones have told",
        "floodmark.partition.recounting",
        "_count_logs",
        _count_from_beginning,
    ),
    "account-ends-early": PlantedFault(
        "the account of a node ends with its last heartbeat, before its logs are sealed",
        "floodmark.partition.summing:LogAccount",
        "may_end",
        lambda original: lambda self, through, ends: through > self.counted or original(self, through, ends),
    ),
    "slow-node-left-out": PlantedFault(
        "the heartbeat of a site does not wait for all of its nodes",
        "floodmark.partition.summing:LogAccount",
        "may_end",
        lambda original: lambda self, through, ends: through <= self.counted or original(self, through, ends),
    ),
    "trim-unseen": PlantedFault(
        "a node goes by the trimmed version that it has loaded when it started",
        "floodmark.partition.retention.retention:Retention",
        "share",
        lambda _: lambda _: None,
    ),
    "log-not-passed": PlantedFault(
        "a new owner does not pass the seal of the log before its own",
        "floodmark.clock.hybrid:HybridClock",
        "pass_version",
        lambda _: lambda *_, **__: None,
    ),
}
