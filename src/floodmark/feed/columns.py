"""Columns of changes on their way into a batch."""

from collections.abc import Callable, Iterator, Sequence
from operator import itemgetter
from typing import Final

from floodmark.codec.changelog import decode_row, decode_single, holds_copies_only
from floodmark.codec.ordered import VERSION_BYTES
from floodmark.codec.stamps import is_first_written_at
from floodmark.codec.values import HAS_ORIGIN, HAS_STAMPS, PLAIN
from floodmark.model.change import Heartbeat
from floodmark.model.limits import PAGE_BYTES_MAX
from floodmark.model.ranges import KeyRange
from floodmark.model.stream import ChangeBatch, Way
from floodmark.model.version import Version
from floodmark.partition import LogLine

BATCH_BYTES_MAX: Final = PAGE_BYTES_MAX
# What Python needs for a change beyond its bytes, about.
CHANGE_BYTES: Final = 100

# What is stored under a qualified key at a version; None if its namespace is gone.
LookUp = Callable[[bytes, Version], bytes | None]
Before = Callable[[bytes, Version], bytes | None]


# Above all flags.
_NEVER: Final = b"\xff\xff"
_WITH_ORIGIN: Final = frozenset(bytes([flags]) for flags in range(256) if flags & HAS_ORIGIN)
_NO_FLAGS: Final[frozenset[bytes]] = frozenset()
_flags: Final = itemgetter(slice(-1, None))


class Columns:
    """Gathers the changes of a key range, and gives them away as batches.

    With `own`, the id of the site, only those that were first written there; with `keys_only`, no values.
    """

    def __init__(
        self,
        keys: KeyRange,
        look_up: LookUp,
        before: Before | None,
        *,
        heartbeats: bool = False,
        own: int | None = None,
        partial: bool = False,
        keys_only: bool = False,
    ) -> None:
        self.bytes = 0
        self._range = keys
        self._heartbeats_wanted = heartbeats
        # From which flags on a value in the log is not the whole record, which is looked up then.
        self._incomplete = _NEVER if partial or keys_only else bytes([HAS_STAMPS])
        self._keys_only = keys_only
        # The flags of records that have to be looked into: they came from other sites, if not from this one.
        self._doubtful = _NO_FLAGS if own is None else _WITH_ORIGIN
        self._own = own or 0
        # Only who asks where a record was first written has to look into it.
        self._look_up = _pass_over if keys_only and own is None else look_up
        self._before = before
        self.clear()

    def clear(self) -> None:
        """Forget what was gathered."""
        self.bytes = 0
        self._heartbeats: list[Heartbeat] = []
        self._versions: list[Version] = []
        self._partitions: list[int] = []
        self._keys: list[bytes] = []
        self._values: list[bytes] = []

    @property
    def is_empty(self) -> bool:
        """Whether nothing was gathered."""
        return not self._keys and not self._heartbeats

    def add_line(self, line: LogLine) -> None:
        """Take the changes of a change-log line that lie in the range, or its heartbeat."""
        order, row, log = line
        version = int.from_bytes(order[:VERSION_BYTES], "big")
        single = decode_single(row)
        if single is not None:
            key, value = single
            start, end = self._range
            if key >= start and (end is None or key < end):
                if value[-1:] >= self._incomplete:
                    self.add_commit(version, log.partition or 0, (key,), (None,))
                    return
                if not self.wants(value):
                    return
                self._keys.append(key)
                self._values.append(value)
                self._versions.append(version)
                self._partitions.append(log.partition or 0)
                self.bytes += len(row) + CHANGE_BYTES
            return
        if self._doubtful and holds_copies_only(row, self._own):
            return
        decoded = decode_row(version, row)
        if isinstance(decoded, Heartbeat):
            if self._heartbeats_wanted:
                self._heartbeats.append(decoded)
            return
        keys, values = decoded
        self.add_commit(version, log.partition or 0, keys, values)

    def wants(self, stored: bytes) -> bool:
        """Whether a record is among those that were asked for, wherever its key lies."""
        return stored[-1:] not in self._doubtful or is_first_written_at(self._own, stored)

    def add_change(self, version: Version, partition: int, key: bytes, value: bytes) -> None:
        """Take a change that is known to lie in the range, and to be wanted."""
        self._versions.append(version)
        self._partitions.append(partition)
        self._keys.append(key)
        self._values.append(value)
        self.bytes += len(key) + len(value) + CHANGE_BYTES

    def add_commit(
        self, version: Version, partition: int, keys: Sequence[bytes], values: Sequence[bytes | None]
    ) -> None:
        """Take the changes of a commit that lie in the range; a value of None is looked up."""
        start, end = self._range
        if len(keys) == 1 and (value := values[0]) is not None and value[-1:] < self._incomplete:
            key = keys[0]
            if key >= start and (end is None or key < end) and self.wants(value):
                self.add_change(version, partition, key, value)
            return
        if min(keys) < start or (end is not None and max(keys) >= end):
            inside = [
                (key, value)
                for key, value in zip(keys, values, strict=True)
                if key >= start and (end is None or key < end)
            ]
            keys, values = [key for key, _ in inside], [value for _, value in inside]
        found = [value for value in values if value is not None]
        if len(found) < len(values) or max(map(_flags, found), default=b"") >= self._incomplete:
            keys, found = self._complete(version, keys, values)
        if self._doubtful and not all(map(self.wants, found)):
            keys = [key for key, stored in zip(keys, found, strict=True) if self.wants(stored)]
            found = list(filter(self.wants, found))
        self._keys += keys
        self._values += found
        self._versions += [version] * len(keys)
        self._partitions += [partition] * len(keys)
        self.bytes += sum(map(len, keys)) + sum(map(len, found)) + CHANGE_BYTES * len(keys)

    def _complete(
        self, version: Version, keys: Sequence[bytes], values: Sequence[bytes | None]
    ) -> tuple[list[bytes], list[bytes]]:
        """Look up what is only named; what is gone with its namespace is left out."""
        complete = [
            (key, stored)
            for key, value in zip(keys, values, strict=True)
            if (stored := self._look_up(key, version) if self._is_named(value) else value) is not None
        ]
        return [key for key, _ in complete], [stored for _, stored in complete]

    def _is_named(self, value: bytes | None) -> bool:
        return value is None or value[-1:] >= self._incomplete

    def drain(self, through: Version, way: Way) -> Iterator[ChangeBatch]:
        """Everything gathered so far, as batches of which the last goes through `through`.

        It is one batch, unless before-images are wanted: how large these are only shows when they are read.
        """
        heartbeats = self._heartbeats
        gathered = ChangeBatch(
            through=through,
            way=way,
            versions=self._versions,
            partitions=self._partitions,
            keys=self._keys,
            values=[b""] * len(self._keys) if self._keys_only else self._values,
            heartbeats=[beat for beat in heartbeats if beat.version <= through],
        )
        self.clear()
        # Several logs may be sealed at one version: their heartbeats come when all of them are there.
        self._heartbeats = [beat for beat in heartbeats if beat.version > through]
        if self._before is None:
            yield gathered
        else:
            yield from self._with_before_images(gathered, self._before)

    def _with_before_images(self, gathered: ChangeBatch, before: Before) -> Iterator[ChangeBatch]:
        start = size = since = 0
        befores: list[bytes | None] = []
        versions, last = gathered.versions, len(gathered.keys) - 1
        for index, (key, version) in enumerate(zip(gathered.keys, versions, strict=True)):
            image = before(key, version)
            befores.append(image)
            size += len(gathered.values[index]) + len(image or b"") + CHANGE_BYTES
            if size >= BATCH_BYTES_MAX and index < last:
                complete = version if versions[index + 1] != version else version - 1
                yield _cut(gathered, slice(start, index + 1), befores, since, complete)
                start, size, since, befores = index + 1, 0, complete, []
        yield _cut(gathered, slice(start, last + 1), befores, since, gathered.through)


def _pass_over(_key: bytes, _version: Version) -> bytes:
    """What stands for a value that nobody asked for."""
    return PLAIN


def _cut(
    batch: ChangeBatch, part: slice, befores: list[bytes | None], since: Version, through: Version
) -> ChangeBatch:
    """A part of a batch, with the heartbeats in `(since, through]`."""
    return ChangeBatch(
        through=through,
        way=batch.way,
        versions=batch.versions[part],
        partitions=batch.partitions[part],
        keys=batch.keys[part],
        values=batch.values[part],
        befores=befores,
        heartbeats=[beat for beat in batch.heartbeats if since < beat.version <= through],
    )
