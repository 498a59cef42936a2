"""Writes over any keys of a node, which validate the reads of their transaction.

A single value in the partition that is called is committed like a plain put.  Every other write is a decided
commit.
"""

from collections.abc import Mapping, Sequence
from functools import partial

from floodmark.clock import HybridClock
from floodmark.clock.hybrid import READ_SKEW_MS_MAX
from floodmark.codec.appends import (
    any_append,
    append_size,
    complete_append,
    decode_append,
    highest_after,
    is_append,
    late_append,
)
from floodmark.codec.ordered import NAMESPACE_BYTES, encode_bytes, encode_prefixes
from floodmark.codec.values import PLAIN
from floodmark.model.batch import require_batch
from floodmark.model.partition import ReadSet
from floodmark.model.ranges import KeyRange
from floodmark.model.version import Version
from floodmark.partition.commit.commit import Commit, Writes
from floodmark.partition.commit.entering import Entrance, WriteKind
from floodmark.partition.commit.merging import is_state
from floodmark.partition.committer import Committer
from floodmark.partition.deciding import Decided, DecidingPartition, Decision, Serving, commit_decided
from floodmark.partition.prepared.outcomes import NamedCommit
from floodmark.partition.validating import Validation


class NodeWrites:
    """Commits the writes of atomic batches and transactions."""

    def __init__(
        self,
        committer: Committer,
        clock: HybridClock,
        serving: Serving,
        collected: Mapping[bytes, Version],
        entrance: Entrance,
    ) -> None:
        self._committer = committer
        self._clock = clock
        self._serving = serving
        self._collected = collected
        self._entrance = entrance

    def write(
        self,
        partition: DecidingPartition,
        keys: Sequence[bytes],
        values: Sequence[bytes],
        reads: ReadSet | None,
        *,
        durable: bool,
        batch: bool,
        transaction: str,
    ) -> Version:
        """See `Partition.write`."""
        is_one = len(keys) == 1 == len(values)
        if is_one and reads is None and not transaction and is_append(values[0]):
            version = self._append(partition, keys[0], values[0], durable=durable)
            if version:
                return version
        validation = self._begin(keys, values, reads, transaction)
        if not (batch or _declared(reads)) and _is_one(partition, keys, values):
            if transaction:
                commit = self._one(partition, keys, values, validation, transaction, durable=durable)
                return self._committer.commit(commit)
            key, value = keys[0], values[0]
            return self._committer.commit_one(
                partition, key, encode_bytes(b"r" + key), value, durable=durable, validation=validation
            )
        make = partial(
            self._decided, keys, values, reads, validation, transaction, durable=durable, batch=batch
        )
        return commit_decided(self._committer, make).version

    def _append(self, partition: DecidingPartition, key: bytes, value: bytes, *, durable: bool) -> Version:
        """Commit a value whose key contains the version, while no other commit runs; 0 if one does."""
        append = decode_append(value)
        # The plain value that `Entrance.check` would make of it; taken here, since this path is hot.
        is_plain = append.stored.endswith(PLAIN) and append_size(key, append.shift) >= NAMESPACE_BYTES
        self._entrance.check((key,), (append.stored if is_plain else value,), WriteKind.WRITE)
        if append.after > self._clock.latest:
            self._committer.observe(append.after, skew_ms_max=READ_SKEW_MS_MAX)

        def complete_one(version: Version) -> tuple[DecidingPartition, bytes, bytes, bytes]:
            completed, stored = complete_append(key, append, version)
            writer = self._serving().route(completed)
            if writer.retired:
                raise late_append(version)
            return writer, completed, encode_bytes(b"r" + completed), stored

        return self._committer.commit_one(partition, key, b"", value, durable=durable, complete=complete_one)

    def plan(
        self,
        partition: DecidingPartition,
        keys: Sequence[bytes],
        values: Sequence[bytes],
        reads: ReadSet | None,
        *,
        durable: bool,
        batch: bool,
        transaction: str,
    ) -> Commit:
        """The commit of a `write` without states, checked, for a round that the caller leads."""
        validation = self._begin(keys, values, reads, transaction)
        if not (batch or _declared(reads)) and _is_one(partition, keys, values):
            return self._one(partition, keys, values, validation, transaction, durable=durable)
        return self._decided(keys, values, reads, validation, transaction, durable=durable, batch=batch)

    def _decided(
        self,
        keys: Sequence[bytes],
        values: Sequence[bytes],
        reads: ReadSet | None,
        validation: Validation | None,
        transaction: str,
        *,
        durable: bool,
        batch: bool,
    ) -> Decided:
        """The commit of any values."""
        return Decided(
            self._committer,
            self._serving,
            None,
            self._decide(keys, values, validation),
            durable=durable,
            batch=batch,
            checked=True,
            named=self._name(transaction, keys),
            conflicts=_declared(reads),
        )

    def _one(
        self,
        partition: DecidingPartition,
        keys: Sequence[bytes],
        values: Sequence[bytes],
        validation: Validation | None,
        transaction: str,
        *,
        durable: bool,
    ) -> Commit:
        """The commit of one value."""
        writes = Writes(keys, encode_prefixes(keys), values, len(keys[0]) + len(values[0]))
        named = self._name(transaction, keys)
        return Commit(partition, writes, durable=durable, validation=validation, named=named)

    def _name(self, transaction: str, keys: Sequence[bytes]) -> NamedCommit | None:
        """The outcome of a commit with an id."""
        return NamedCommit(self._committer.place.engine, transaction, min(keys)) if transaction else None

    def _begin(
        self, keys: Sequence[bytes], values: Sequence[bytes], reads: ReadSet | None, transaction: str
    ) -> Validation | None:
        """Check a write before its round; returns the validation of its reads in the round."""
        self._entrance.check(keys, values, WriteKind.WRITE)
        if any_append(values) and (after := highest_after(values)) > self._clock.latest:
            self._committer.observe(after, skew_ms_max=READ_SKEW_MS_MAX)
        if transaction:
            require_batch(transaction)
        if reads is None:
            return None
        validation = Validation(self._committer, self._clock, self._serving, self._collected, reads)
        if reads.ranges:
            validation.look_ahead()
        return validation

    def _decide(
        self, keys: Sequence[bytes], values: Sequence[bytes], validation: Validation | None
    ) -> Decision:
        rows = dict(zip(keys, values, strict=True))

        def decide() -> Mapping[bytes, bytes]:
            if validation is not None:
                validation.require_unchanged(self._clock.now())
            return rows

        return decide


def _is_one(partition: DecidingPartition, keys: Sequence[bytes], values: Sequence[bytes]) -> bool:
    """Whether a write is one plain or expiring value, or one deletion, in its partition."""
    return (
        len(keys) == 1
        and not is_state(values[0])
        and not is_append(values[0])
        and partition.range.contains(keys[0])
    )


def _declared(reads: ReadSet | None) -> Sequence[KeyRange]:
    """The ranges that a transaction declares as written."""
    return () if reads is None else reads.writes
