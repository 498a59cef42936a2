"""Atomic reads: of the keys that are read, all those of an atomic batch show it, or none does (RAMP).

A batch has one stamp, and one commit version c in all its partitions.  A key shows the batch or a later write
if its record has the batch's stamp or a higher one.  It also does if the resolved version of its answer
*covers* c, that is, lies at or above it: nothing at or below c was still to come when the key was read.

1. Every node answers for its keys: the newest records, its resolved version from before, and the siblings of
   the batches that wrote them, as far as it knows them (`partition/atomic_reading.py`).
2. If a record of a batch was read, and a sibling with an older stamp, the sibling is read again, *at c*.  The
   newest record might belong to a later batch, of which other keys were missed.
3. If siblings are unknown, or the second round finds a record other than the batch's own, all keys are read
   at one fresh version.
4. If a node does not know yet that a data set was published, all keys are read at one fresh version, too.

**Merged records** (fields, counters) contain the writes of many batches, and the mark of the last only.  So a
merged record that not all answers cover is treated as one of a batch with unknown siblings, marked or not.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence

from floodmark.model.errors import VersionCollected
from floodmark.model.partition import Partition
from floodmark.model.record import AtomicRecord
from floodmark.model.version import Version
from floodmark.routing.router import Router

# Reads all keys as of one version that is at or above the given one.
Snapshot = Callable[[Version], list[bytes | None]]


class FirstRound:
    """The newest records of distinct keys, and the siblings in their batches that the nodes know."""

    def __init__(self, router: Router, keys: Sequence[bytes]) -> None:
        self.records: dict[bytes, AtomicRecord] = {}
        self._resolved: list[tuple[Version, Sequence[bytes]]] = []
        self._siblings: dict[Version, set[bytes]] = {}
        self._swapped: set[Version] = set()
        self._keys = keys
        router.each(keys, self._read, together=True)

    def _read(self, partition: Partition, keys: Sequence[bytes]) -> None:
        while keys:
            asked = set(keys)
            others = [key for key in self._keys if key not in asked]
            answer = partition.read_batches(keys, others)
            read, left = keys[: len(answer.records)], keys[len(answer.records) :]
            self.records.update(zip(read, answer.records, strict=True))
            self._resolved.append((answer.resolved, read))
            self._swapped.add(answer.swapped)
            if answer.siblings:
                request = [*keys, *others]
                for version, places in answer.siblings.items():
                    self._siblings.setdefault(version, set()).update([request[place] for place in places])
            keys = left

    @property
    def seen(self) -> Version:
        """The highest version that was read."""
        return max(*self._swapped, *(record.version for record in self.records.values()))

    def missed(self) -> dict[bytes, Version] | None:
        """The version at which to read each key that lacks a batch's value; None if only a snapshot helps."""
        if len(self._swapped) > 1:
            return None
        covered = min(self._resolved)[0]
        open_records = [
            record
            for record in self.records.values()
            if record.version > covered and (record.batched or record.merged)
        ]
        if not open_records:
            return {}
        resolved = {key: version for version, keys in self._resolved for key in keys}
        needed: dict[bytes, AtomicRecord] = {}
        for record in open_records:
            version = record.version
            siblings = self._siblings.get(version)
            if siblings is None or record.merged:
                return None
            for key in siblings:
                if resolved[key] >= version:
                    continue
                if self.records[key].merged:
                    return None
                if needed.get(key, self.records[key]).stamp < record.stamp:
                    needed[key] = record
        return {key: record.version for key, record in needed.items()}


def read_atomic(router: Router, keys: Iterable[bytes], snapshot: Snapshot) -> Mapping[bytes, bytes | None]:
    """The values of qualified keys, with no batch read in part; None for a key without value."""
    distinct = list(dict.fromkeys(keys))
    if not distinct:
        return {}
    first = FirstRound(router, distinct)
    needed = first.missed()
    if needed is not None and _read_missed(router, needed, first.records):
        return {key: first.records[key].value for key in distinct}
    return dict(zip(distinct, snapshot(first.seen), strict=True))


def _read_missed(router: Router, needed: Mapping[bytes, Version], records: dict[bytes, AtomicRecord]) -> bool:
    """Read keys again, each at its version; False if one does not have the batch's own record."""
    for version in set(needed.values()):

        def read(partition: Partition, keys: Sequence[bytes], at: Version = version) -> None:
            left = list(keys)
            while left:
                found = partition.read_batches(left, (), at).records
                records.update(zip(left, found, strict=False))
                left = left[len(found) :]

        keys = [key for key in needed if needed[key] == version]
        try:
            router.each(keys, read, together=True)
        except VersionCollected:
            return False
        if any(records[key].version != version or records[key].merged for key in keys):
            return False
    return True
