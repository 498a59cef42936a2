"""The data source `floodmark`: `spark.read.format("floodmark").load(url)`, its streams and its writes.

Spark creates a source in a process of its own, asks it for a schema, and pickles it for the next process,
which plans the reading or the writing.  Errors in the options are raised there, on the driver, before a job
starts; if the user names the schema, by the first action and not by `load`.
"""

from pyspark.sql import SparkSession
from pyspark.sql.datasource import (
    DataSource,
    DataSourceReader,
    DataSourceStreamReader,
    DataSourceStreamWriter,
    DataSourceWriter,
)
from pyspark.sql.types import StructType

from floodmark.spark.runtime.threads import follow_threads
from floodmark.spark.source.changes import changes_schema, open_changes_reader
from floodmark.spark.source.options import reads_changes
from floodmark.spark.source.snapshot import open_snapshot_reader, snapshot_schema
from floodmark.spark.source.stream import open_stream_reader
from floodmark.spark.source.tables import FORMAT, find_options, note_options, table_options
from floodmark.spark.source.writing import open_stream_writer, open_writer


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
        return open_writer(*find_options(schema, self.options), overwrite)

    def streamWriter(self, schema: StructType, overwrite: bool) -> DataSourceStreamWriter:
        return open_stream_writer(*find_options(schema, self.options), overwrite)


def register(spark: SparkSession) -> None:
    """Make the format `floodmark` known to a session, and to every thread that writes with it."""
    spark.dataSource.register(FloodmarkSource)
    follow_threads(FORMAT)
