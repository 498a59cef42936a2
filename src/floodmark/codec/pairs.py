"""Keys and values that are columns already, on their way to a site.

To whoever wants a mapping they are one; a site behind a wire takes the columns as they are.
"""

from collections.abc import ItemsView, Iterator, Mapping
from functools import cached_property

import pyarrow
import pyarrow.compute


class Pairs(Mapping[bytes, bytes]):
    """Values under keys, in order of keys.

    >>> pairs = Pairs.sort(pyarrow.array([b"b", b"a"]), pyarrow.array([b"2", b"1"]))
    >>> dict(pairs), pairs.is_distinct
    ({b'a': b'1', b'b': b'2'}, True)
    """

    def __init__(self, key_column: pyarrow.BinaryArray, value_column: pyarrow.BinaryArray) -> None:
        self.key_column = key_column
        self.value_column = value_column

    @classmethod
    def sort(cls, keys: pyarrow.BinaryArray, values: pyarrow.BinaryArray) -> "Pairs":
        """Put keys in order, and values with them."""
        order = pyarrow.compute.sort_indices(keys)
        return cls(keys.take(order), values.take(order))

    @cached_property
    def is_distinct(self) -> bool:
        """Whether no key stands twice.  Of those that do, the mapping has the last."""
        keys = self.key_column
        return not pyarrow.compute.any(pyarrow.compute.equal(keys[1:], keys[:-1])).as_py()

    @cached_property
    def _rows(self) -> dict[bytes, bytes]:
        return dict(zip(self.key_column.to_pylist(), self.value_column.to_pylist(), strict=True))

    def __getitem__(self, key: bytes) -> bytes:
        return self._rows[key]

    def __iter__(self) -> Iterator[bytes]:
        return iter(self._rows)

    def __len__(self) -> int:
        return len(self.key_column) if self.is_distinct else len(self._rows)

    def items(self) -> ItemsView[bytes, bytes]:
        return self._rows.items()
