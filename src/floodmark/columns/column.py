"""A column of a batch of changes: an Arrow array from a change log or from a server.

A reader of single changes uses it as a list, which is made when it is first needed; code that computes with
whole columns uses the array.
"""

from collections.abc import Iterator, Sequence
from functools import cached_property
from operator import lt
from typing import Any, Final, TypeVar, overload

import numpy
import pyarrow
import pyarrow.compute
from numpy.typing import NDArray

Item = TypeVar("Item")

# From this number of values on, it is quicker to process them all at once.
MANY: Final = 256


class Column(Sequence[Item]):
    """The values of an Arrow array.

    >>> column: Column[int] = Column(pyarrow.array([7, 8, 9]))
    >>> column[0], column[1:], list(column), column == [7, 8, 9], pyarrow.array(column) is column.array
    (7, [8, 9], [7, 8, 9], True, True)
    """

    def __init__(self, array: pyarrow.Array) -> None:
        self.array = array

    @cached_property
    def _items(self) -> list[Item]:
        items: list[Item] = self.array.to_pylist()
        return items

    @cached_property
    def is_ascending(self) -> bool:
        """Whether each value is greater than the one before it."""
        if len(self.array) < MANY:
            items: list[Any] = [*self._items]
            return all(map(lt, items, items[1:]))
        ascends = pyarrow.compute.less(self.array[:-1], self.array[1:])
        return bool(pyarrow.compute.all(ascends).as_py())

    @overload
    def __getitem__(self, place: int) -> Item: ...

    @overload
    def __getitem__(self, place: slice) -> list[Item]: ...

    def __getitem__(self, place: int | slice) -> Item | list[Item]:
        if "_items" in self.__dict__ or isinstance(place, slice):
            return self._items[place]
        item: Item = self.array[place].as_py()
        return item

    def __iter__(self) -> Iterator[Item]:
        return iter(self._items)

    def __len__(self) -> int:
        return len(self.array)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and self._items == list(other)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"Column({self._items!r})"

    def __arrow_array__(self, type: pyarrow.DataType | None = None) -> pyarrow.Array:
        return self.array if type is None or type == self.array.type else self.array.cast(type)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> NDArray[Any]:
        return numpy.array(self.array.to_numpy(zero_copy_only=False), dtype, copy=copy)
