"""Filters that are pushed down become key ranges: exact ones, and never one that loses a row."""

import sys
from collections.abc import Callable
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.datasource import (
    DataSourceReader,
    EqualNullSafe,
    EqualTo,
    Filter,
    GreaterThan,
    GreaterThanOrEqual,
    In,
    IsNotNull,
    IsNull,
    LessThan,
    LessThanOrEqual,
    Not,
    StringEndsWith,
    StringStartsWith,
)
from tests.spark.conftest import Served
from tests.spark.support_read import open_reader

from floodmark.model.limits import KEY_BYTES_MAX
from floodmark.model.ranges import KeyRange
from floodmark.spark import filters
from floodmark.spark.filters import narrow
from floodmark.spark.snapshot import FilteringSnapshotReader

KEY = ("key",)
ALL = KeyRange()
PUSHDOWN = "spark.sql.python.filterPushdown.enabled"

TESTS: dict[type[Filter], Callable[[bytes, bytes], bool]] = {
    EqualTo: lambda key, bound: key == bound,
    EqualNullSafe: lambda key, bound: key == bound,
    LessThan: lambda key, bound: key < bound,
    LessThanOrEqual: lambda key, bound: key <= bound,
    GreaterThan: lambda key, bound: key > bound,
    GreaterThanOrEqual: lambda key, bound: key >= bound,
}

short_keys = st.lists(st.sampled_from([0, 1, 0x61, 0xFE, 0xFF]), max_size=4).map(bytes)


@given(
    st.lists(st.tuples(st.sampled_from(sorted(TESTS, key=lambda kind: kind.__name__)), short_keys)),
    short_keys,
    st.booleans(),
)
def test_keys_in_the_range_are_those_that_pass(
    conditions: list[tuple[type[Filter], bytes]], key: bytes, bounded: bool
) -> None:
    start = KeyRange(b"\x00", b"\xff") if bounded else ALL
    keys, left = narrow(start, [kind(KEY, bound) for kind, bound in conditions])  # type: ignore[call-arg]
    assert left == []
    passes = all(TESTS[kind](key, bound) for kind, bound in conditions)
    assert keys.contains(key) == (passes and start.contains(key))


@given(st.lists(short_keys, min_size=1), short_keys)
def test_choices_become_the_range_around_them_and_stay_with_spark(choices: list[bytes], key: bytes) -> None:
    condition = In(KEY, tuple(choices))
    keys, left = narrow(ALL, [condition])
    assert left == [condition]
    assert keys.contains(key) == (min(choices) <= key <= max(choices))


@given(st.text(max_size=4), st.text(max_size=4))
def test_text_is_compared_by_its_bytes(prefix: str, key: str) -> None:
    keys, left = narrow(ALL, [StringStartsWith(KEY, prefix)])
    assert left == []
    assert keys.contains(key.encode()) == key.startswith(prefix)


@pytest.mark.parametrize(
    "condition",
    [
        EqualTo(("value",), b"x"),
        EqualTo(("key", "inner"), b"x"),
        EqualTo(KEY, None),
        EqualTo(KEY, 7),
        Not(EqualTo(KEY, b"x")),
        StringEndsWith(KEY, "x"),
        IsNull(KEY),
        In(KEY, ()),
        In(KEY, (b"x", None)),
    ],
)
def test_other_conditions_are_left_to_spark(condition: Filter) -> None:
    assert narrow(ALL, [condition]) == (ALL, [condition])


def test_key_is_never_null() -> None:
    assert narrow(ALL, [IsNotNull(KEY)]) == (ALL, [])


@pytest.mark.parametrize("extra", [0, 1, 2, 100])
def test_bounds_longer_than_any_key_stay_within_what_can_be_asked_for(extra: int) -> None:
    long, longest = b"k" * (KEY_BYTES_MAX + extra), b"k" * KEY_BYTES_MAX
    for kind, passes in TESTS.items():
        keys, _ = narrow(ALL, [kind(KEY, long)])  # type: ignore[call-arg]
        assert len(keys.start) <= KEY_BYTES_MAX + 1
        assert len(keys.end or b"") <= KEY_BYTES_MAX + 1
        for key in (longest, longest[:-1], longest[:-1] + b"j", longest[:-1] + b"l"):
            assert keys.contains(key) == passes(key, long), (kind, len(long), key[-3:])


def test_reader_takes_filters_only_where_spark_pushes_them(monkeypatch: pytest.MonkeyPatch) -> None:
    def takes_filters(**options: str) -> bool:
        kind = type(open_reader("grpc://127.0.0.1:1", None, **options))
        return kind.pushFilters is not DataSourceReader.pushFilters

    assert not takes_filters(filterPushdown="true")
    # A module with this name is loaded only by the process that plans with filters.
    monkeypatch.setitem(sys.modules, filters._PLANNER, filters)
    assert takes_filters(filterPushdown="true")
    assert takes_filters(filterPushdown="true", readChangeFeed="true")
    assert not takes_filters()


def test_pushed_filters_narrow_what_is_planned(served: Served) -> None:
    served.site.create_namespace("users").put(b"a", b"1")
    reader = open_reader(served.url)
    narrowing = FilteringSnapshotReader(reader._options, reader._schema)  # type: ignore[attr-defined]
    left = list(narrowing.pushFilters([EqualTo(KEY, b"b"), EqualTo(("value",), b"1")]))
    (part,) = narrowing.partitions()
    assert left == [EqualTo(("value",), b"1")]
    assert (part.keys.start[3:], part.keys.end[3:]) == (b"b", b"b\x00")  # type: ignore[attr-defined]


def load(spark: SparkSession, url: str, schema: str | None = None, **options: str) -> DataFrame:
    reader = spark.read.format("floodmark").option("namespace", "users").options(**options)
    return (reader if schema is None else reader.schema(schema)).load(url)


def rows_read(served: Served, query: Callable[[], int]) -> tuple[int, int]:
    """What a query answers, and how many records the site read for it."""
    before = sum(partition.reads for partition in served.site.partitions())
    answer = query()
    return answer, sum(partition.reads for partition in served.site.partitions()) - before


def test_only_the_range_is_read_if_the_dataframe_asks_for_it(spark: SparkSession, served: Served) -> None:
    served.site.create_namespace("users").put_many({b"%03d" % number: b"x" for number in range(200)})
    pushing = partial(load, spark, served.url, filterPushdown="true")
    few = pushing().where("key >= X'313938'")
    assert rows_read(served, few.count) == (2, 2)
    text = pushing("key string, value string").where("key LIKE '01%' AND key IN ('011', '013', '5')")
    assert rows_read(served, text.count) == (2, 9)
    assert rows_read(served, load(spark, served.url).where("key >= X'313938'").count) == (2, 200)


def test_dataframe_that_is_used_with_several_filters_gets_the_rows_of_each(
    spark: SparkSession, served: Served
) -> None:
    served.site.create_namespace("users").put_many({b"a": b"1", b"b": b"2"})
    assert spark.conf.get(PUSHDOWN) == "true"
    users = load(spark, served.url)
    first, second = users.where("key = X'61'"), users.where("key = X'62'")
    assert [bytes(row.key) for row in first.union(second).collect()] == [b"a", b"b"]
    assert users.count() == 2


def test_filters_work_where_spark_does_not_push_them(spark: SparkSession, served: Served) -> None:
    served.site.create_namespace("users").put_many({b"a": b"1", b"b": b"2"})
    before = spark.conf.get(PUSHDOWN)
    spark.conf.set(PUSHDOWN, "false")
    try:
        assert load(spark, served.url, filterPushdown="true").where("key = X'61'").count() == 1
    finally:
        spark.conf.set(PUSHDOWN, before or "false")
