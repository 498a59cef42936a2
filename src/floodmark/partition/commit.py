"""What a commit consists of, and the rows that it becomes."""

from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol, TypeAlias

from floodmark.codec.changelog import encode_commit, encode_log_key, encode_single
from floodmark.codec.digest import digest_change, digest_changes
from floodmark.codec.ordered import NAMESPACE_BYTES, encode_version
from floodmark.engine import WriteRow
from floodmark.model.errors import FloodmarkError
from floodmark.model.version import Version
from floodmark.partition.families import DATA, LOG
from floodmark.partition.heat import Heat
from floodmark.partition.turn import Waiter

# Version, namespace, number of changes and their digest: what a commit adds to the sums of its log.
CommitTally: TypeAlias = tuple[Version, bytes, int, int]


class Writer(Protocol):
    """What a commit needs to know of the partition that it belongs to."""

    id: int
    log_id: int
    retired: bool
    tallies: deque[CommitTally]
    heat: Heat


class Writes:
    """What a commit stores: qualified keys, their encoded prefixes, and the stored values."""

    __slots__ = ("keys", "prefixes", "size", "values")

    def __init__(
        self, keys: Sequence[bytes], prefixes: Sequence[bytes], values: Sequence[bytes], size: int
    ) -> None:
        self.keys = keys
        self.prefixes = prefixes
        self.values = values
        self.size = size


# Decides inside the commit, when all earlier commits can be read; None refuses.
Decide: TypeAlias = Callable[[], Writes | None]


class Commit(Waiter):
    """One commit on its way through a round.  Without a writer it only wants the turn."""

    version: Version = 0
    error: FloodmarkError | None = None
    tallies: Sequence[CommitTally] = ()

    def __init__(
        self,
        writer: Writer | None,
        writes: Writes | None,
        *,
        durable: bool,
        decide: Decide | None = None,
    ) -> None:
        self.writer = writer
        self.writes = writes
        self.durable = durable
        self.decide = decide


def encode_commit_rows(commit: Commit, version: Version, site_id: int) -> list[WriteRow]:
    """Give a commit its version: the data and change-log rows, and its share of the sums."""
    writer, writes = commit.writer, commit.writes
    assert writer is not None
    assert writes is not None
    commit.version = version
    suffix = encode_version(version)
    keys, values = writes.keys, writes.values
    if len(keys) == 1:
        key, value = keys[0], values[0]
        commit.tallies = (tally_one(version, site_id, key, value),)
        return [
            (DATA, writes.prefixes[0] + suffix, value),
            (LOG, encode_log_key(writer.log_id, version), encode_single(key, value)),
        ]
    commit.tallies = [
        (version, namespace, count, digest)
        for namespace, count, digest in digest_changes(version, site_id, keys, values)
    ]
    rows: list[WriteRow] = [
        (DATA, prefix + suffix, value) for prefix, value in zip(writes.prefixes, values, strict=True)
    ]
    for chunk, row in enumerate(encode_commit(keys, values)):
        rows.append((LOG, encode_log_key(writer.log_id, version, chunk), row))
    return rows


def tally_one(version: Version, site_id: int, key: bytes, value: bytes) -> CommitTally:
    """What a commit of one qualified key adds to the sums."""
    return version, key[:NAMESPACE_BYTES], 1, digest_change(version, site_id, key[NAMESPACE_BYTES:], value)
