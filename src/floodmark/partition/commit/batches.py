"""The keys of a node's last atomic batches, by commit version: what an atomic read asks for first.

Records and logs hold only the mark of a batch.  A batch that was evicted from here, or lost by a restart,
costs its readers a snapshot.
"""

from collections import deque
from collections.abc import Collection

from floodmark.model.limits import BATCH_CACHE_BYTES_MAX
from floodmark.model.version import Version


class BatchCache:
    """Bounded by the bytes of keys.  One thread at a time may call `remember`; `find` needs no lock."""

    def __init__(self, bytes_max: int = BATCH_CACHE_BYTES_MAX) -> None:
        self._bytes_max = bytes_max
        self._bytes = 0
        self._batches: dict[Version, Collection[bytes]] = {}
        self._order: deque[tuple[Version, int]] = deque()

    def remember(self, version: Version, keys: Collection[bytes]) -> None:
        """Remember all keys of a batch, before its first record can be read.

        A batch that is not written after all does no harm: no record has its version.
        """
        if version in self._batches:
            return
        size = sum(map(len, keys))
        self._batches[version] = keys
        self._order.append((version, size))
        self._bytes += size
        while self._bytes > self._bytes_max:
            oldest, size = self._order.popleft()
            del self._batches[oldest]
            self._bytes -= size

    def find(self, version: Version) -> Collection[bytes] | None:
        """All qualified keys of a batch; None if it is not in the cache."""
        return self._batches.get(version)
