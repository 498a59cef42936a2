"""Ranges that transactions declare as written without writing them: readers of them conflict.

    "conflict/" | p: version, big-endian  ->  MessagePack: [transaction, until, [[start, end], …]]

A commit of one node stores its ranges at its version c, in its engine write: p = until = c.  A transaction
that is committed above them conflicts if it has read a part of them below `until`.

**Over several nodes** the commit version is not known yet when a node learns of the ranges.  They are
reserved at the node's next version p, when all writes are prepared, and conflict with all that is committed
above p and has read below `until`, a moment later.  The commit version must lie at or below that moment.  The
coordinator then tells the nodes the version, or that there is none; if it does not, some transactions of that
moment conflict without need.

The rows survive restarts, and takeovers by other nodes.  They are removed once every transaction that can
have read below them is too old to commit.
"""

from bisect import bisect_left
from collections.abc import Sequence
from typing import Final

import msgspec

from floodmark.engine import Engine, WriteRow
from floodmark.engine.base import scan_rows
from floodmark.model.errors import LimitExceeded, Retryable
from floodmark.model.limits import (
    TRANSACTION_AGE_MS_MAX,
    WRITE_CONFLICTS_HELD_MAX,
    WRITE_CONFLICTS_MAX,
)
from floodmark.model.partition import ReadSet
from floodmark.model.ranges import KeyRange
from floodmark.model.version import COUNTER_BITS, Version
from floodmark.partition.commit.commit import CommittingPartition, Mint, RoundStep
from floodmark.partition.families import META

CONFLICTS: Final = b"conflict/"
# How far the commit version of a transaction over several nodes may lie above the first version reserved.
RESERVED_MS: Final = 250
# Twice the age of a transaction that may commit, since clocks of nodes differ.
_KEPT_MS: Final = 2 * TRANSACTION_AGE_MS_MAX


class Declared(msgspec.Struct, array_like=True):
    """Ranges of one transaction that conflict with reads below a version."""

    transaction: str
    until: Version
    ranges: list[KeyRange]


def check_write_conflicts(count: int) -> None:
    """Raise LimitExceeded if a transaction declares too many ranges."""
    if count > WRITE_CONFLICTS_MAX:
        raise LimitExceeded(
            f"a transaction may declare {WRITE_CONFLICTS_MAX:,} keys and ranges as written; declare a range "
            "that has them all"
        )


def reserved_until(version: Version) -> Version:
    """The version below which reads conflict with ranges that were reserved at `version`."""
    return version + (RESERVED_MS << COUNTER_BITS)


class WriteConflicts:
    """The declared ranges of a node.  A round adds its ranges in the turn; other threads iterate copies."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._declared: dict[Version, Declared] = {}
        self.load()

    def load(self) -> None:
        """Load the ranges from the engine; those of a running round are not there yet."""
        found: dict[Version, Declared] = {}
        for key, stored in scan_rows(self._engine, META, CONFLICTS, CONFLICTS + b"\xff" * 9):
            version = int.from_bytes(key[len(CONFLICTS) :], "big")
            found[version] = msgspec.msgpack.decode(stored, type=Declared)
        self._declared = found

    def add(self, version: Version, declared: Declared) -> WriteRow:
        """Add ranges at a version; returns the row that stores them.  Raises Retryable without room."""
        self._forget_below(version - (_KEPT_MS << COUNTER_BITS))
        held = sum(len(each.ranges) for each in list(self._declared.values()))
        if held + len(declared.ranges) > WRITE_CONFLICTS_HELD_MAX:
            raise Retryable(
                f"{held:,} keys and ranges were declared as written in the last seconds, and a node keeps "
                f"{WRITE_CONFLICTS_HELD_MAX:,}; try again"
            )
        self._declared[version] = declared
        return META, _row_key(version), msgspec.msgpack.encode(declared)

    def decide(self, transaction: str, at: Version) -> None:
        """Limit the conflicts of a transaction's reserved ranges to its commit version; 0 ends them all."""
        for declared in list(self._declared.values()):
            if declared.transaction == transaction:
                declared.until = at

    def find(self, reads: ReadSet, at: Version, transaction: str) -> tuple[bytes, Version] | None:
        """A key of `reads` that another transaction has declared as written up to `at`, and the version."""
        if not self._declared:
            return None
        recent = [
            declared
            for version, declared in list(self._declared.items())
            if version <= at and declared.until > reads.since
        ]
        keys = sorted(reads.keys) if recent else ()
        for declared in recent:
            if transaction and declared.transaction == transaction:
                continue
            for written in declared.ranges:
                place = bisect_left(keys, written.start)
                if place < len(keys) and written.contains(keys[place]):
                    return keys[place], declared.until
                for read in reads.ranges:
                    if (both := read.intersect(written)) is not None:
                        return both.start, declared.until
        return None

    def old_rows(self, now_ms: int) -> tuple[bytes, bytes] | None:
        """The range of rows that no transaction needs any more; None if this node knows of none."""
        before = now_ms - _KEPT_MS << COUNTER_BITS
        return (CONFLICTS, _row_key(before)) if self._forget_below(before) else None

    def _forget_below(self, version: Version) -> bool:
        """Forget the ranges declared below a version; returns whether there were any."""
        old = [at for at in list(self._declared) if at < version]
        for at in old:
            self._declared.pop(at, None)
        return bool(old)


class Reserve(RoundStep):
    """Reserve ranges for a transaction over several nodes, at the version of the step."""

    def __init__(
        self,
        conflicts: WriteConflicts,
        engine: Engine,
        writer: CommittingPartition,
        transaction: str,
        ranges: Sequence[KeyRange],
    ) -> None:
        super().__init__(writer)
        self._conflicts = conflicts
        self._engine = engine
        self._transaction = transaction
        self._ranges = list(ranges)

    def take(self, mint: Mint) -> Sequence[WriteRow]:
        version = mint()
        declared = Declared(self._transaction, reserved_until(version), self._ranges)
        row = self._conflicts.add(version, declared)
        self.version = version
        return (row,)

    def is_written(self) -> bool:
        return self._engine.get(META, _row_key(self.version)) is not None


def _row_key(version: Version) -> bytes:
    return CONFLICTS + max(0, version).to_bytes(8, "big")
