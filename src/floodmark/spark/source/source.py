"""The data source `floodmark`: `spark.read.format("floodmark").load(url)`, its streams and its writes.

Spark creates a source in a process of its own, asks it for a schema, and pickles it for the next process,
which plans the reading or the writing.  Errors in the options are raised there, on the driver, before a job
starts; if the user names the schema, by the first action and not by `load`.

Spark 4.3 gives the options of a table (`CREATE TABLE users USING floodmark OPTIONS (namespace 'users') …`) to
a Python source only once, when the table is created without columns and Spark asks the source for them.  A
reader or a writer of the table gets only its columns.  So the source stores the options in the metadata of
the column `key`, which the catalog keeps.  Like all options they name files with credentials and never hold
any.
"""

from collections.abc import Mapping
from typing import Final

from pyspark.sql.datasource import (
    DataSource,
    DataSourceReader,
    DataSourceStreamReader,
    DataSourceStreamWriter,
    DataSourceWriter,
)
from pyspark.sql.types import StructField, StructType

from floodmark.model.errors import InvalidOption
from floodmark.site.address import SiteAddress
from floodmark.spark.source.options import reads_changes
from floodmark.spark.source.publishing import open_publisher
from floodmark.spark.source.reading import (
    changes_schema,
    open_changes_reader,
    open_snapshot_reader,
    snapshot_schema,
)
from floodmark.spark.source.schemas import KEY
from floodmark.spark.source.stream import open_stream_reader
from floodmark.spark.source.writing import open_stream_writer, open_writer

# The name of the format, and the key of a table's options in the metadata of a column.
FORMAT: Final = "floodmark"
# Spark adds each option of a new table again behind a prefix, and the name of the source.
_PREFIX: Final = "option."
_PROVIDER: Final = "provider"


class FloodmarkSource(DataSource):
    """Reads and writes the namespaces of a site."""

    @classmethod
    def name(cls) -> str:
        return FORMAT

    def schema(self) -> StructType:
        table = table_options(self.options)
        options = self.options if table is None else table
        columns = changes_schema(options) if reads_changes(options) else snapshot_schema(options)
        return columns if table is None else note_options(columns, table)

    def reader(self, schema: StructType) -> DataSourceReader:
        options, columns = find_options(schema, self.options)
        if reads_changes(options):
            return open_changes_reader(options, columns)
        return open_snapshot_reader(options, columns)

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:
        return open_stream_reader(*find_options(schema, self.options))

    def writer(self, schema: StructType, overwrite: bool) -> DataSourceWriter:
        options, columns = find_options(schema, self.options)
        return open_publisher(options, columns) if overwrite else open_writer(options, columns)

    def streamWriter(self, schema: StructType, overwrite: bool) -> DataSourceStreamWriter:
        return open_stream_writer(*find_options(schema, self.options), overwrite)


def table_options(given: Mapping[str, str]) -> dict[str, str] | None:
    """The options of a table that is being created; None if none is."""
    if given.get(_PROVIDER, "").lower() != FORMAT:
        return None
    options = {name.removeprefix(_PREFIX): text for name, text in given.items() if name.startswith(_PREFIX)}
    if "path" in given:
        options["path"] = given["path"]
    SiteAddress(location=options.get("path", "")).require_url("be a table")
    return options


def note_options(columns: StructType, options: Mapping[str, str]) -> StructType:
    """The columns of a table, with its options noted in them."""
    key = StructField(
        KEY.name, columns[KEY.name].dataType, columns[KEY.name].nullable, {FORMAT: dict(options)}
    )
    return StructType([key if each.name == KEY.name else each for each in columns])


def find_options(columns: StructType, given: Mapping[str, str]) -> tuple[dict[str, str], StructType]:
    """The options of a reader or a writer, and its columns without notes.

    Rows of a table that are written elsewhere carry its notes.  So notes count only if Spark names no site,
    which it does for everything but tables.
    """
    noted: dict[str, str] = {}
    for each in columns:
        noted |= (each.metadata or {}).get(FORMAT, {})
    options = {name.lower(): text for name, text in given.items()}
    if "path" not in options:
        options = {name.lower(): text for name, text in noted.items()} | options
    if not options:
        raise InvalidOption(
            "Spark named neither a site nor a namespace. It forgets the options of a table that is created "
            "with columns or AS SELECT: leave the columns out, CREATE TABLE … USING floodmark OPTIONS "
            "(namespace '…') LOCATION 'grpc://…'; or create a temporary view, which may have columns"
        )
    plain = [StructField(each.name, each.dataType, each.nullable) for each in columns]
    return options, StructType(plain) if noted else columns
