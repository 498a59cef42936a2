"""An engine in memory, for tests, simulations and scratch sites.  Nothing outlives the process."""

from bisect import bisect_left, insort
from collections.abc import Iterable, Mapping, Sequence
from threading import Lock

from floodmark.engine.base import EngineLimits, Guard, Row, WriteRow, guards_hold
from floodmark.model.errors import Closed
from floodmark.model.limits import MIB


class MemoryEngine:
    """Sorted keys beside a dict, for each family.

    >>> engine = MemoryEngine(("data",))
    >>> engine.write([("data", b"b", b"2"), ("data", b"a", b"1")])
    True
    >>> engine.ceiling("data", b"aa")
    (b'b', b'2')
    """

    limits = EngineLimits(value_bytes_max=64 * MIB, batch_bytes_max=256 * MIB, batch_rows_max=10_000_000)

    def __init__(self, families: Sequence[str]) -> None:
        self._lock = Lock()
        self._families: dict[str, _Family] | None = {name: _Family() for name in families}

    def get(self, family: str, key: bytes) -> bytes | None:
        with self._lock:
            return self._get(family, key)

    def get_many(self, family: str, keys: Sequence[bytes]) -> list[bytes | None]:
        with self._lock:
            values = self._family(family).values
            return [values.get(key) for key in keys]

    def ceiling(self, family: str, key: bytes, prefix: bytes = b"") -> Row | None:
        with self._lock:
            rows = self._family(family)
            index = bisect_left(rows.keys, key)
            if index == len(rows.keys) or not rows.keys[index].startswith(prefix):
                return None
            found = rows.keys[index]
            return found, rows.values[found]

    def ceilings(
        self, family: str, prefixes: Sequence[bytes], starts: Sequence[bytes] | None = None
    ) -> list[Row | None]:
        return [
            self.ceiling(family, start, prefix)
            for start, prefix in zip(starts or prefixes, prefixes, strict=True)
        ]

    def scan(
        self,
        family: str,
        start: bytes,
        end: bytes | None,
        *,
        rows_max: int,
        bytes_max: int,
        reverse: bool = False,
    ) -> list[Row]:
        with self._lock:
            rows = self._family(family)
            first = bisect_left(rows.keys, start)
            last = len(rows.keys) if end is None else bisect_left(rows.keys, end)
            order = range(last - 1, first - 1, -1) if reverse else range(first, last)
            page: list[Row] = []
            size = 0
            for index in order[:rows_max]:
                key = rows.keys[index]
                value = rows.values[key]
                page.append((key, value))
                size += len(key) + len(value)
                if size >= bytes_max:
                    break
            return page

    def write(self, rows: Iterable[WriteRow], guards: Sequence[Guard] = ()) -> bool:
        with self._lock:
            if not guards_hold(self._get, guards):
                return False
            # All families are looked up before the first row is applied: an unknown one changes nothing.
            planned = [(self._family(family), key, value) for family, key, value in rows]
            for rows_of_family, key, value in planned:
                rows_of_family.set(key, value)
            return True

    def delete_range(self, family: str, start: bytes, end: bytes, guards: Sequence[Guard] = ()) -> bool:
        with self._lock:
            if not guards_hold(self._get, guards):
                return False
            self._family(family).delete_range(start, end)
            return True

    def sync(self) -> None:
        with self._lock:
            self._require_open()

    def recover(self) -> None:
        with self._lock:
            self._require_open()

    def sizes(self) -> Mapping[str, int]:
        with self._lock:
            return {name: rows.size() for name, rows in self._require_open().items()}

    def close(self) -> None:
        with self._lock:
            self._families = None

    def _get(self, family: str, key: bytes) -> bytes | None:
        return self._family(family).values.get(key)

    def _require_open(self) -> "dict[str, _Family]":
        if self._families is None:
            raise Closed("the site was closed; open it again")
        return self._families

    def _family(self, name: str) -> "_Family":
        return self._require_open()[name]


class _Family:
    def __init__(self) -> None:
        self.keys: list[bytes] = []
        self.values: dict[bytes, bytes] = {}

    def set(self, key: bytes, value: bytes | None) -> None:
        if value is not None:
            if key not in self.values:
                insort(self.keys, key)
            self.values[key] = value
        elif self.values.pop(key, None) is not None:
            del self.keys[bisect_left(self.keys, key)]

    def delete_range(self, start: bytes, end: bytes) -> None:
        first, last = bisect_left(self.keys, start), bisect_left(self.keys, end)
        for key in self.keys[first:last]:
            del self.values[key]
        del self.keys[first:last]

    def size(self) -> int:
        return sum(len(key) + len(value) for key, value in self.values.items())
