"""Spark's filters as a range of keys.

Spark hands over simple conditions on columns, of which all must hold.  Those on the key become a range:
keys are ordered by their bytes here, and Spark orders binary columns, and text, which is UTF-8, by the same
bytes.

Spark pushes filters down only if `spark.sql.python.filterPushdown.enabled` is set, and refuses a reader that
takes filters when it is not.  The planner, a process of its own, has no session to ask; but Spark plans with
filters in another kind of process, which is only started when the setting is on.

That is not enough to go by.  Spark 4.3 keeps one plan of a DataFrame's source, the one with the filters that
were pushed down last: of two queries on one DataFrame, or two branches of one query, each may get the rows
of the other.  So filters are taken only if the option `filterPushdown` says that this DataFrame is used with
one filter alone; `startKey`, `endKey` and `prefix` do the same without that trap.
"""

import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final

from pyspark.sql.datasource import (
    EqualNullSafe,
    EqualTo,
    Filter,
    GreaterThan,
    GreaterThanOrEqual,
    In,
    IsNotNull,
    LessThan,
    LessThanOrEqual,
    StringStartsWith,
)

from floodmark.model.limits import KEY_BYTES_MAX
from floodmark.model.ranges import KeyRange, after, prefix_end

_KEY: Final = ("key",)
_PLANNER: Final = "pyspark.sql.worker.data_source_pushdown_filters"

_RANGES: Final[Mapping[type[Filter], Callable[[bytes], KeyRange]]] = {
    EqualTo: lambda key: KeyRange(key, after(key)),
    EqualNullSafe: lambda key: KeyRange(key, after(key)),
    LessThan: lambda key: KeyRange(b"", key),
    LessThanOrEqual: lambda key: KeyRange(b"", after(key)),
    GreaterThan: lambda key: KeyRange(after(key)),
    GreaterThanOrEqual: KeyRange,
    StringStartsWith: lambda prefix: KeyRange(prefix, prefix_end(prefix)),
}


def is_pushing() -> bool:
    """Whether this process plans a reading for which Spark pushes filters down."""
    main = getattr(sys.modules["__main__"], "__spec__", None)
    return _PLANNER in sys.modules or (main is not None and main.name == _PLANNER)


def narrow(keys: KeyRange, filters: Iterable[Filter]) -> tuple[KeyRange, list[Filter]]:
    """The keys of a range that can pass the filters, and the filters that Spark still has to apply.

    >>> narrow(KeyRange(b"a"), [LessThan(("key",), b"c"), EqualTo(("value",), b"1")])
    (KeyRange(start=b'a', end=b'c'), [EqualTo(attribute=('value',), value=b'1')])
    """
    left: list[Filter] = []
    for condition in filters:
        if condition == IsNotNull(_KEY):
            continue
        passing = _range_of(condition)
        if passing is None or isinstance(condition, In):
            left.append(condition)
        if passing is not None:
            keys = keys.intersect(passing) or KeyRange(keys.start, keys.start)
    return keys, left


def _range_of(condition: Any) -> KeyRange | None:
    """The smallest range with all keys that pass; None for what does not make a range."""
    if getattr(condition, "attribute", None) != _KEY:
        return None
    if isinstance(condition, In):
        choices = [_encode(choice) for choice in condition.value]
        known = [choice for choice in choices if choice is not None]
        if len(known) < len(choices) or not known:
            return None
        return _bounded(KeyRange(min(known), after(max(known))))
    make, key = _RANGES.get(type(condition)), _encode(getattr(condition, "value", None))
    return None if make is None or key is None else _bounded(make(key))


def _encode(literal: object) -> bytes | None:
    if isinstance(literal, str):
        return literal.encode()
    return bytes(literal) if isinstance(literal, bytes | bytearray) else None


def _bounded(keys: KeyRange) -> KeyRange:
    return KeyRange(_bound(keys.start), None if keys.end is None else _bound(keys.end))


def _bound(key: bytes) -> bytes:
    """The same bound, short enough to be asked for: no key is longer than KEY_BYTES_MAX."""
    return key if len(key) <= KEY_BYTES_MAX else after(key[:KEY_BYTES_MAX])
