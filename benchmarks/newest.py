"""Two prototypes of an index of newest versions, to see whether it would pay.

A site finds the newest version of a key by seeking.  With an index it would look the version up and then
get one exact key, for which RocksDB has bloom filters.  Compared on bare rocksdict, with a site's encoded
rows, but without the rest of a site:

    seek     what a site does
    family   a column family from key to version, then an exact get
    dict     the same from a dict in memory
"""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from benchmarks.harness import Database, Pair
from rocksdict import WriteBatch

from floodmark.codec.changelog import encode_log_key, encode_single
from floodmark.codec.ordered import VERSION_BYTES, encode_namespace, encode_prefix, encode_version
from floodmark.codec.values import PLAIN
from floodmark.partition.families import DATA, LOG

# As large as versions are today: milliseconds since 1970, shifted by 18 bits.
FIRST_VERSION: Final = 1_750_000_000_000 << 18
LOG_ID: Final = 64

_NEWEST: Final = "newest"
_NAMESPACE: Final = encode_namespace(1)


class VersionedRows(Database):
    """A site's rows on bare rocksdict, with or without the column family of newest versions."""

    def __init__(self, path: Path, *, indexed: bool) -> None:
        super().__init__(path, (DATA, LOG, _NEWEST) if indexed else (DATA, LOG))
        self._indexed = indexed
        self._version = FIRST_VERSION
        self._dict: dict[bytes, bytes] = {}

    def put(self, pairs: Sequence[Pair]) -> None:
        """Put pairs one by one, as a site does: the row, the change-log row and, if any, the index row."""
        data, log = self.handles[DATA], self.handles[LOG]
        newest = self.handles[_NEWEST] if self._indexed else None
        write = self.rows.write
        for key, value in pairs:
            self._version += 1
            qualified, stored, suffix = _NAMESPACE + key, value + PLAIN, encode_version(self._version)
            batch = WriteBatch(raw_mode=True)
            batch.put(encode_prefix(qualified) + suffix, stored, data)
            batch.put(encode_log_key(LOG_ID, self._version), encode_single(qualified, stored), log)
            if newest is not None:
                batch.put(qualified, suffix, newest)
            write(batch)

    def load_dict(self, pairs: Sequence[Pair]) -> None:
        """Fill the dict; the pairs must have been put in this order, before any others."""
        self._dict = {
            _NAMESPACE + key: encode_version(FIRST_VERSION + count)
            for count, (key, _) in enumerate(pairs, start=1)
        }

    def get_by_seek(self, keys: Sequence[bytes]) -> bytes | None:
        """Get keys by seeking; returns the last value."""
        data = self.families[DATA]
        value: bytes | None = None
        for key in keys:
            prefix = encode_prefix(_NAMESPACE + key)
            iterator = data.iter()
            iterator.seek(prefix)
            found: bytes | None = iterator.key()
            value = None
            if found is not None and found[:-VERSION_BYTES] == prefix:
                value = iterator.value()[:-1]
        return value

    def get_by_family(self, keys: Sequence[bytes]) -> bytes | None:
        """Get keys by the column family; returns the last value."""
        get_newest, get_row = self.families[_NEWEST].get, self.families[DATA].get
        value: bytes | None = None
        for key in keys:
            qualified = _NAMESPACE + key
            suffix: bytes | None = get_newest(qualified)
            value = None
            if suffix is not None:
                stored: bytes | None = get_row(encode_prefix(qualified) + suffix)
                value = None if stored is None else stored[:-1]
        return value

    def get_by_dict(self, keys: Sequence[bytes]) -> bytes | None:
        """Get keys by the dict; returns the last value."""
        get_newest, get_row = self._dict.get, self.families[DATA].get
        value: bytes | None = None
        for key in keys:
            qualified = _NAMESPACE + key
            suffix = get_newest(qualified)
            value = None
            if suffix is not None:
                stored: bytes | None = get_row(encode_prefix(qualified) + suffix)
                value = None if stored is None else stored[:-1]
        return value

    def family_bytes(self) -> int:
        """Flush and compact the index column family; returns its bytes on disk."""
        family = self.families[_NEWEST]
        family.flush()
        family.compact_range(None, None)
        return family.property_int_value("rocksdb.total-sst-files-size") or 0

    def dict_bytes(self) -> int:
        """The bytes of the dict in memory, with its keys and versions."""
        getsizeof = sys.getsizeof
        rows = sum(getsizeof(key) + getsizeof(suffix) for key, suffix in self._dict.items())
        return getsizeof(self._dict) + rows
