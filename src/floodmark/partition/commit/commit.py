"""What a commit consists of, and the rows that it becomes."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain, compress, repeat
from operator import add
from typing import Protocol, TypeAlias

from floodmark.codec.changelog import encode_commit, encode_log_key, encode_single
from floodmark.codec.copies import Copies
from floodmark.codec.digest import digest_changes, digest_qualified
from floodmark.codec.ordered import NAMESPACE_BYTES, encode_version
from floodmark.codec.stamps import digest_copies
from floodmark.engine import WriteRow
from floodmark.model.errors import FloodmarkError
from floodmark.model.version import Version
from floodmark.partition.commit.turn import Waiter
from floodmark.partition.families import DATA, LOG
from floodmark.partition.heat import Heat

# What a commit adds to the sums of its log: version, namespace, number of changes, their digest, and
# whether they were first written at this site.
CommitTally: TypeAlias = tuple[Version, bytes, int, int, bool]


class Writer(Protocol):
    """What a commit needs to know of the partition that it belongs to."""

    id: int
    log_id: int
    retired: bool
    tallies: deque[CommitTally]
    heat: Heat


class Writes:
    """What a commit stores: qualified keys in order, their encoded prefixes, and the stored values.

    `own` is False for changes that come from another site and carry their origin.  Where records are
    merged, `logged` is what was written to them, and `values` is what they became.  What is `loaded` is no
    change: it was one elsewhere, and everybody who wants to know has heard of it.  `copies` is the same once
    more, if all of it is plain copies.
    """

    __slots__ = ("copies", "keys", "loaded", "logged", "own", "prefixes", "size", "values")

    def __init__(
        self,
        keys: Sequence[bytes],
        prefixes: Sequence[bytes],
        values: Sequence[bytes],
        size: int,
        *,
        own: bool = True,
        loaded: bool = False,
        logged: Sequence[bytes] | None = None,
        copies: Copies | None = None,
    ) -> None:
        self.own = own
        self.loaded = loaded
        self.logged = logged
        self.copies = copies
        self.keys = keys
        self.prefixes = prefixes
        self.values = values
        self.size = size

    @property
    def changes(self) -> Sequence[bytes]:
        """What the change log holds, and the sums count."""
        return self.values if self.logged is None else self.logged

    def only(self, wanted: Sequence[bool]) -> "Writes | None":
        """Those of the writes that are wanted; None if there are none."""
        if all(wanted):
            return self if wanted else None
        keys, values = list(compress(self.keys, wanted)), list(compress(self.values, wanted))
        if not keys:
            return None
        size = sum(map(len, keys)) + sum(map(len, values))
        prefixes = list(compress(self.prefixes, wanted))
        return Writes(keys, prefixes, values, size, own=self.own, loaded=self.loaded)


class Mint:
    """The version of a commit, which is minted when it is first asked for: one that is refused needs none."""

    __slots__ = ("_now", "_version")

    def __init__(self, now: Callable[[], Version]) -> None:
        self._now = now
        self._version: Version = 0

    def __call__(self) -> Version:
        if not self._version:
            self._version = self._now()
        return self._version


# Decides inside the commit, when all earlier commits can be read; None refuses.
Decide: TypeAlias = Callable[[Mint], Writes | None]


class Commit(Waiter):
    """One commit on its way through a round.  Without a writer it only wants the turn, or is a step."""

    # Whether it is written on a disk that is nearly full as well, because it lets something be freed.
    frees = False
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


class Step(Commit):
    """Something else than a plain commit that takes part in a round and shares its sync: always durable.

    It has a version once it has something to write.  One that writes no records has no writer.
    """

    # Whether it makes changes.
    is_commit = False

    def __init__(self, writer: Writer | None) -> None:
        super().__init__(writer, None, durable=True, decide=lambda _: None)

    def take(self, mint: Mint) -> Sequence[WriteRow]:
        """Decide, when all that comes before can be read; the rows to write."""
        raise NotImplementedError

    def is_written(self) -> bool:
        """Whether it has happened, after a failure."""
        raise NotImplementedError

    def undo(self) -> None:
        """Make memory what the engine says, after a failure that the engine has got over."""

    def finish(self) -> None:
        """Publish what is written and synced.  Called before the round's floor goes."""

    def count(self, uncounted_through: Version) -> bool:
        """Put the sums right, after the other commits have; False if some commit in question has no sums."""
        return True


def encode_commit_rows(commit: Commit, version: Version, site_id: int) -> Iterable[WriteRow]:
    """Give a commit its version: its data and change-log rows, to be taken once, and its sums."""
    writer, writes = commit.writer, commit.writes
    assert writer is not None
    assert writes is not None
    commit.version = version
    suffix = encode_version(version)
    keys, values, changes = writes.keys, writes.values, writes.changes
    if writes.loaded:
        return _data_rows(writes, suffix)
    if writes.copies is not None:
        copies = writes.copies
        commit.tallies = ((version, keys[0][:NAMESPACE_BYTES], len(keys), copies.digest(), False),)
        return chain(_data_rows(writes, suffix), _log_rows(writer, version, copies.encode_rows()))
    if not writes.own:
        commit.tallies = [
            (version, namespace, count, digest, own)
            for namespace, count, digest, own in digest_copies(keys, changes, site_id)
        ]
    elif len(keys) == 1:
        commit.tallies = (tally_one(version, site_id, keys[0], changes[0]),)
    else:
        commit.tallies = [
            (version, namespace, count, digest, True)
            for namespace, count, digest in digest_changes(version, site_id, keys, changes)
        ]
    if len(keys) == 1:
        return [
            (DATA, writes.prefixes[0] + suffix, values[0]),
            (LOG, encode_log_key(writer.log_id, version), encode_single(keys[0], changes[0])),
        ]
    return chain(_data_rows(writes, suffix), _log_rows(writer, version, encode_commit(keys, changes)))


def _data_rows(writes: Writes, suffix: bytes) -> Iterator[WriteRow]:
    engine_keys = map(add, writes.prefixes, repeat(suffix))
    return zip(repeat(DATA, len(writes.prefixes)), engine_keys, writes.values, strict=True)


def _log_rows(writer: Writer, version: Version, rows: Sequence[bytes]) -> list[WriteRow]:
    return [(LOG, encode_log_key(writer.log_id, version, chunk), row) for chunk, row in enumerate(rows)]


def tally_one(version: Version, site_id: int, key: bytes, value: bytes) -> CommitTally:
    """What a commit of one qualified key adds to the sums."""
    return version, key[:NAMESPACE_BYTES], 1, digest_qualified(version, site_id, key, value), True
