"""Tables and views in SQL: what Spark lets a Python source do, and what it does not."""

from datetime import date

import pytest
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession
from tests.spark.support_read import open_source

from floodmark.model.errors import FloodmarkError, InvalidOption
from floodmark.site import Namespace, Site
from floodmark.spark.runtime.failures import find_error
from floodmark.spark.source.schemas import PAIRS
from floodmark.spark.source.source import find_options

TABLES = ("by_options", "by_location")


@pytest.fixture
def users(site: Site) -> Namespace:
    users = site.create_namespace("users")
    users.put(b"ada", b"1")
    return users


def select(spark: SparkSession, table: str) -> dict[bytes, bytes]:
    return {bytes(row.key): bytes(row.value) for row in spark.sql(f"SELECT * FROM {table}").collect()}


def error_of(spark: SparkSession, statement: str) -> FloodmarkError:
    with pytest.raises(PySparkException) as caught:
        spark.sql(statement).collect()
    error = find_error(caught.value)
    assert error is not None
    return error


def test_tables_are_created_read_and_written_in_sql(spark: SparkSession, url: str, users: Namespace) -> None:
    version = users.put(b"ada", b"2")
    users.put(b"alan", b"3")
    try:
        spark.sql(f"CREATE TABLE by_options USING floodmark OPTIONS (path '{url}', namespace 'users')")
        spark.sql(f"CREATE TABLE by_location USING floodmark OPTIONS (namespace 'users') LOCATION '{url}'")
        for number, table in enumerate(TABLES):
            spark.sql(f"INSERT INTO {table} VALUES (CAST('{table}' AS BINARY), X'61')")
            assert select(spark, table) == dict(users.scan())
            assert users.get(table.encode()) == b"a"
            # A table is read as of each query, whatever was written since the last.
            users.put(b"later", b"%d" % number)
            assert select(spark, table)[b"later"] == b"%d" % number
        assert select(spark, "by_options WITH (prefix = 'al')") == {b"alan": b"3"}
        # Time travel is refused by Spark itself: no Python source can offer it.
        with pytest.raises(PySparkException, match="TIME_TRAVEL"):
            spark.sql(f"SELECT * FROM by_options VERSION AS OF {version}").collect()
    finally:
        for table in TABLES:
            spark.sql(f"DROP TABLE IF EXISTS {table}")


@pytest.mark.slow
def test_a_table_with_columns_of_its_own_says_what_to_do(
    spark: SparkSession, url: str, users: Namespace
) -> None:
    options = f"USING floodmark OPTIONS (path '{url}', namespace 'users')"
    try:
        spark.sql(f"CREATE TABLE by_columns (key BINARY, value BINARY) {options}")
        assert "leave the columns out" in str(error_of(spark, "SELECT * FROM by_columns"))
        assert "leave the columns out" in str(error_of(spark, "INSERT INTO by_columns VALUES (X'61', X'61')"))
        spark.sql(f"CREATE TEMPORARY VIEW view_of_users (key STRING, value STRING) {options}")
        assert [tuple(row) for row in spark.sql("SELECT * FROM view_of_users").collect()] == [("ada", "1")]
        # A view keeps the version of its first reading.
        users.put(b"ada", b"2")
        assert [tuple(row) for row in spark.sql("SELECT * FROM view_of_users").collect()] == [("ada", "1")]
    finally:
        spark.sql("DROP TABLE IF EXISTS by_columns")
        spark.catalog.dropTempView("view_of_users")


@pytest.mark.slow
def test_maps_that_were_written_as_json_are_read_as_maps(
    spark: SparkSession, url: str, users: Namespace
) -> None:
    users.delete(b"ada")
    columns = "key string, scores map<string, int>, visits array<map<string, date>>"
    rows = [("a", {"x": 1, "y": 2}, [{"rome": date(2026, 1, 2)}, {}]), ("b", None, [])]
    frame = spark.createDataFrame(rows, columns)
    options = {"namespace": "users", "valueFormat": "json"}
    frame.write.format("floodmark").options(**options).mode("append").save(url)
    read = spark.read.format("floodmark").schema(columns).options(**options).load(url)
    assert [tuple(row) for row in read.orderBy("key").collect()] == rows


CREATED = {"provider": "floodmark", "owner": "me", "namespace": "users", "option.namespace": "users"}


def test_a_directory_is_not_made_a_table_because_dropping_it_could_remove_the_site() -> None:
    with pytest.raises(InvalidOption, match="but not be a table"):
        open_source("data/oslo", **CREATED).schema()


def test_options_of_a_table_are_noted_and_those_of_a_statement_win() -> None:
    url = "grpc://127.0.0.1:1"
    columns = open_source(url, **CREATED, **{"option.prefix": "a"}).schema()
    noted = {"namespace": "users", "path": url, "prefix": "a"}
    assert columns["key"].metadata == {"floodmark": noted}
    assert find_options(columns, {}) == (noted, PAIRS)
    assert find_options(columns, {"Prefix": "b"}) == (noted | {"prefix": "b"}, PAIRS)
    # Rows of a table that are written elsewhere leave its options behind.
    elsewhere = {"path": "grpc://127.0.0.1:2", "namespace": "others"}
    assert find_options(columns, elsewhere) == (elsewhere, PAIRS)
    assert find_options(PAIRS, elsewhere) == (elsewhere, PAIRS)
