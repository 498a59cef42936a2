"""Atomic batches over several nodes.

The writer prepares a batch at each partition that has keys of it, and commits it at the highest version p
that a partition has returned.  From the last prepare on the batch is committed, even if its writer fails:
each partition that has had it prepared for a second asks the others (`ask_fate`), and all find one version.

A writer that misses an answer asks as well.  It must not abort a batch on its own, because a partition may
have found it prepared everywhere.  A partition that has not prepared the batch refuses it for ever when it is
asked; then nothing was written, and the router tries again under a fresh id.  The random model of these rules
is `tests/partition/test_batches_model.py`.
"""

import logging
from collections.abc import Callable, Mapping, Sequence, Set
from functools import partial
from itertools import groupby, islice
from typing import Final, Protocol, TypeAlias, TypeVar

from floodmark.model.errors import (
    FloodmarkError,
    OutcomeUnknown,
    PartitionMoved,
    Retryable,
    StaleLink,
    TransactionEnded,
)
from floodmark.model.limits import BATCH_AGE_MS_MAX
from floodmark.model.partition import Decision, Fate, LinkGuard, Partition, PartitionMaps
from floodmark.model.version import Version
from floodmark.partition import Node
from floodmark.partition.node import ended_batches, forget_batches
from floodmark.routing.calls import CallPool

# The outcome of a batch is kept this long, since repeated prepares may arrive late, and clocks differ.
FORGET_MS: Final = 2 * BATCH_AGE_MS_MAX
# How many outcomes are removed at once.
FORGET_MAX: Final = 5_000

_log = logging.getLogger("floodmark.site")

Result = TypeVar("Result")
Rows: TypeAlias = Mapping[bytes, bytes]


class CallPartition(Protocol):
    """Calls the partition of a qualified key."""

    def __call__(self, key: bytes, operation: Callable[[Partition], Result], /) -> Result: ...


def ask_fate(call: CallPartition, batch: str, siblings: Sequence[bytes]) -> Fate:
    """The decision on a batch.  A partition that is asked and has not prepared it refuses it from then on.

    `siblings` are its partitions, each named by the first key that the batch has there.
    """
    highest: Version = 0
    for key in siblings:
        fate = call(key, partial(_ask, batch, key))
        if fate.decision is not Decision.UNDECIDED:
            return fate
        highest = max(highest, fate.version)
    return Fate(Decision.COMMIT, highest)


def forget_ended(node: Node, maps: PartitionMaps, call: CallPartition) -> None:
    """Remove from a node the outcomes of batches too old to be prepared, and prepared at no partition."""
    found = list(islice(ended_batches(node, FORGET_MS), FORGET_MAX))
    still_open = _find_open({(key, each[0]) for each in found for key in each[2].siblings}, maps, call)
    forget_batches(node, [(batch, key) for batch, key, _ in found if batch not in still_open])


def _find_open(parts: Set[tuple[bytes, str]], maps: PartitionMaps, call: CallPartition) -> set[str]:
    """The batches that are prepared in a partition of some keys, or may be, since it did not answer."""
    still_open: set[str] = set()
    served = maps.map
    for _, group in groupby(sorted(parts), key=lambda part: served.route(part[0]).id):
        keys, batches = zip(*group, strict=True)
        try:
            ended = call(keys[0], partial(_ended, batches, keys))
        except FloodmarkError as error:
            _log.debug("a partition does not tell which batches have ended: %s", error)
            still_open.update(batches)
        else:
            still_open.update(batch for batch, is_over in zip(batches, ended, strict=True) if not is_over)
    return still_open


class BatchWriter:
    """Writes batches over several nodes.  Safe to use from many threads.

    `mint` makes their ids.  `calls` makes the calls of their partitions.
    """

    def __init__(self, mint: Callable[[], str], calls: CallPool | None = None) -> None:
        self._mint = mint
        self.calls = calls or CallPool()

    def write(
        self,
        call: CallPartition,
        groups: Sequence[tuple[Partition, Rows]],
        link: LinkGuard | None = None,
        batch: str = "",
    ) -> Version:
        """Write the rows of several partitions as one batch; returns its version.

        Copies may have the guard of a `link`.  `batch` is the id that a client has given, for this attempt
        only.  Raises PartitionMoved if another attempt may succeed, or a Terminal error; nothing was written
        then.  Raises OutcomeUnknown if a partition does not answer in time.
        """
        batch, siblings = batch or self._mint(), [min(rows) for _, rows in groups]
        members = [key for _, rows in groups for key in rows]
        prepares = [
            partial(partition.prepare, batch, list(rows), list(rows.values()), siblings, members, link)
            for partition, rows in groups
        ]
        answers = self.calls.each(prepares)
        failures = [answer for answer in answers if isinstance(answer, FloodmarkError)]
        if not failures:
            version = max(answer for answer in answers if isinstance(answer, int))
        else:
            version = _version_after(failures[0], call, batch, siblings)
            if not version:
                # A partition that cannot be reached aborts it later, when it asks the others.
                self.calls.each(
                    [partial(partition.abort_prepared, batch, min(rows)) for partition, rows in groups]
                )
                raise _nothing_written(failures)
        commits = [partial(call, key, partial(_commit, batch, version)) for key in siblings]
        for answer in self.calls.each(commits):
            if isinstance(answer, FloodmarkError):
                raise OutcomeUnknown(
                    f"the atomic batch {batch} is committed at version {version}, and a partition has not "
                    f"answered that its part is stored ({answer}); it stores it when it is served again",
                    batch=batch,
                    version=version,
                ) from answer
        return version


def _version_after(
    failure: FloodmarkError, call: CallPartition, batch: str, siblings: Sequence[bytes]
) -> Version:
    """The version at which a batch commits though a prepare failed; 0 if it is refused."""
    try:
        return ask_fate(call, batch, siblings).version
    except FloodmarkError as error:
        raise OutcomeUnknown(
            f"a partition did not prepare the atomic batch {batch} ({failure}), and not all partitions tell "
            f"what becomes of it ({error}); read before you repeat",
            batch=batch,
        ) from error


def _nothing_written(failures: Sequence[FloodmarkError]) -> FloodmarkError:
    """The error for a refused batch: StaleLink or a lasting one, if there is any; else PartitionMoved."""
    for error in failures:
        if isinstance(error, StaleLink):
            return error
    passing = (Retryable, TransactionEnded, OutcomeUnknown)
    failure = min(failures, key=lambda error: isinstance(error, passing))
    if not isinstance(failure, passing):
        return failure
    return PartitionMoved(
        f"an atomic batch could not be prepared everywhere, and nothing was written ({failure}); try again"
    )


def _ask(batch: str, key: bytes, partition: Partition) -> Fate:
    return partition.ask_prepared(batch, key)


def _ended(batches: Sequence[str], keys: Sequence[bytes], partition: Partition) -> list[bool]:
    return partition.ended_prepared(batches, keys)


def _commit(batch: str, version: Version, partition: Partition) -> bool:
    return partition.commit_prepared(batch, version)
