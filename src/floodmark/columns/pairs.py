"""Writes whose keys and values are columns already.

They are a mapping; a stream to a server sends the columns as they are.
"""

from collections.abc import ItemsView, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import chain
from typing import Final

import pyarrow
import pyarrow.compute

from floodmark.columns.column import MANY, Column
from floodmark.columns.packed import pack

_BINARY: Final = pyarrow.binary()
PAIRS: Final = pyarrow.schema(
    [pyarrow.field("key", _BINARY, nullable=False), pyarrow.field("value", _BINARY, nullable=False)]
)


class Pairs(Mapping[bytes, bytes]):
    """Values under keys.

    >>> pairs = Pairs.sort(pyarrow.array([b"b", b"a"]), pyarrow.array([b"2", b"1"]))
    >>> dict(pairs), pairs.is_ordered
    ({b'a': b'1', b'b': b'2'}, True)
    """

    def __init__(self, key_column: pyarrow.BinaryArray, value_column: pyarrow.BinaryArray) -> None:
        self.key_column: Column[bytes] = Column(key_column)
        self.value_column: Column[bytes] = Column(value_column)

    @classmethod
    def sort(cls, keys: pyarrow.BinaryArray, values: pyarrow.BinaryArray) -> "Pairs":
        """The pairs in order of keys."""
        order = pyarrow.compute.sort_indices(keys)
        return cls(keys.take(order), values.take(order))

    @classmethod
    def of(cls, rows: Mapping[bytes, bytes]) -> "Pairs":
        """The rows of a mapping, in order of keys."""
        keys = sorted(rows)
        return cls(pack(keys).to_arrow(), pack([rows[key] for key in keys]).to_arrow())

    @property
    def is_ordered(self) -> bool:
        """Whether keys are in order, each once.  Of repeated keys, the mapping has the last value."""
        return self.key_column.is_ascending

    def columns(self) -> tuple[Sequence[bytes], Sequence[bytes]]:
        """Keys and values, in the order of rows: as columns if they are many, else as quicker lists."""
        if len(self.key_column) >= MANY:
            return self.key_column, self.value_column
        return list(self.key_column), list(self.value_column)

    @property
    def size(self) -> int:
        """The bytes of all keys and values."""
        if len(self.key_column) < MANY:
            return sum(map(len, chain(self.key_column, self.value_column)))
        return len(pack(self.key_column).data) + len(pack(self.value_column).data)

    @cached_property
    def _rows(self) -> dict[bytes, bytes]:
        return dict(zip(self.key_column, self.value_column, strict=True))

    def __getitem__(self, key: bytes) -> bytes:
        return self._rows[key]

    def __iter__(self) -> Iterator[bytes]:
        return iter(self._rows)

    def __len__(self) -> int:
        return len(self.key_column) if self.is_ordered else len(self._rows)

    def items(self) -> ItemsView[bytes, bytes]:
        return self._rows.items()
