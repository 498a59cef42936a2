"""Publishing a DataFrame: mode("overwrite") replaces all that a namespace holds, at once.

The driver begins a generation, tasks load their rows into it, and the driver's commit swaps it in.  A row
replaces itself, so a task that is repeated, or runs twice, changes nothing; one that comes after the swap is
refused.  If the job fails, the driver removes the generation; if the driver dies, the site does.
"""

from collections.abc import Iterator, Mapping
from contextlib import closing, suppress
from dataclasses import dataclass
from itertools import chain
from typing import Final
from uuid import uuid4

import pyarrow
from pyspark.sql.datasource import DataSourceArrowWriter, WriterCommitMessage
from pyspark.sql.types import StructType

from floodmark.host.catalog import KEPT_GENERATIONS
from floodmark.model.errors import FloodmarkError
from floodmark.model.partition import GenerationStream
from floodmark.model.text import read_at
from floodmark.site.generations import check_keep
from floodmark.spark.runtime.patience import ask_patiently
from floodmark.spark.source.incoming import Encoder, check_columns, check_stamps
from floodmark.spark.source.options import COMMON, Options
from floodmark.spark.source.schemas import JSON
from floodmark.spark.source.writing import BatchSender, Target, TaskResult, cut_batch, send_rows

OPTIONS: Final = COMMON | {"valueFormat", "base", "keep"}


@dataclass
class PublishingWriter(DataSourceArrowWriter):
    """Loads the rows of a DataFrame as generation `number`, and swaps it in."""

    target: Target
    number: int
    keep: int

    def write(self, iterator: Iterator[pyarrow.RecordBatch]) -> TaskResult:
        target = self.target
        first = next((batch for batch in iterator if batch.num_rows), None)
        if first is None:
            return TaskResult(stored=0)
        with ask_patiently(target.address.connect) as site:
            row = ask_patiently(lambda: site.host.namespaces.find_namespace(target.namespace))
            encoder = Encoder(target.layout, row.id, row.settings.ttl, site.host.physical_ms, row.merge)
            encoded = (encoder.encode(batch) for batch in chain([first], iterator))
            with closing(site.host.write_stream(GenerationStream(row.id, self.number))) as stream:
                delivery = BatchSender(stream, in_order=True)
                send_rows(delivery, (piece for batch in encoded for piece in cut_batch(batch)))
            return TaskResult(records=delivery.sent, stored=delivery.stored)

    def commit(self, messages: list[WriterCommitMessage | None]) -> None:
        rows = sum(each.records for each in messages if isinstance(each, TaskResult))
        with self.target.address.connect() as site:
            site.generations.finish(self.target.namespace, self.number, keep=self.keep, rows=rows)

    def abort(self, messages: list[WriterCommitMessage | None]) -> None:
        # What cannot be removed now, the site removes when it hears no more of the publisher.
        with suppress(FloodmarkError), self.target.address.connect() as site:
            site.generations.drop(self.target.namespace, self.number)


def open_publisher(given: Mapping[str, str], schema: StructType) -> PublishingWriter:
    """A writer that publishes a DataFrame.  Raises errors of options and columns before a job starts."""
    options = Options(given, OPTIONS)
    address = options.address()
    address.require_url("written")
    layout = check_columns(schema, json=options.value_format() == JSON)
    check_stamps(layout, keep=False)
    target = Target(address=address, namespace=options.namespace(), layout=layout, distinct_keys=True)
    keep = options.number("keep") or KEPT_GENERATIONS
    check_keep(keep)
    with address.connect() as site:
        begun = site.host.generations.begin_generation(
            target.namespace, options.read("base", read_at) or 0, f"spark/{uuid4().hex[:8]}"
        )
    return PublishingWriter(target, begun.number, keep)
