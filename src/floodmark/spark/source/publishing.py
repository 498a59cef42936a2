"""Publishing a DataFrame: mode("overwrite") replaces all that a namespace holds, at once.

The driver begins a generation, tasks load their rows into it, and the driver's commit swaps it in.  A row
replaces itself, so a task that is repeated, or runs twice, changes nothing; one that comes after the swap is
refused.  If the job fails, the driver removes the generation; if the driver dies, the site does.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, suppress
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Final
from uuid import uuid4

import pyarrow
from pyspark.sql import DataFrame
from pyspark.sql.datasource import DataSourceArrowWriter, WriterCommitMessage
from pyspark.sql.functions import monotonically_increasing_id
from pyspark.sql.types import StructType

from floodmark.columns.sorting import sort_pairs
from floodmark.host.catalog import KEPT_GENERATIONS
from floodmark.model.errors import FloodmarkError, InvalidKey, InvalidTimeToLive, InvalidValue, LimitExceeded
from floodmark.model.partition import GenerationStream
from floodmark.model.text import read_at
from floodmark.site.dataset import DUPLICATES, REFUSED_MAX, RefusedRows, as_text, refuse_duplicates
from floodmark.site.generations import check_keep
from floodmark.spark.runtime.patience import ask_patiently
from floodmark.spark.source.incoming import Encoder, check_columns, check_stamps
from floodmark.spark.source.options import COMMON, Options
from floodmark.spark.source.schemas import JSON
from floodmark.spark.source.writing import BatchSender, Target, TaskResult

# A column with the place of each row in the DataFrame.
_PLACE: Final = "_place"
OPTIONS: Final = COMMON | {
    "valueFormat",
    "base",
    "keep",
    "duplicates",
    "inOrder",
    "publisher",
    "refused",
    "refusedMax",
}
# What the driver gets to see of the key and of the value of a refused row.
_SHOWN: Final = 1_000


@dataclass(frozen=True, kw_only=True)
class _Loaded(TaskResult):
    """The result of a task, with the rows that it has left out: keys, values and errors as text."""

    refused: tuple[tuple[str, str, str], ...]


class _Refused:
    """The rows that a task leaves out, up to a limit; without one, the first fails the task."""

    def __init__(self, rows_max: int | None) -> None:
        self.rows: list[tuple[str, str, str]] = []
        self._rows_max = rows_max

    def encode(self, encoder: Encoder, rows: pyarrow.RecordBatch) -> Iterator[pyarrow.RecordBatch]:
        """Rows as stored records.  Those that cannot be are found by halving."""
        try:
            yield encoder.encode(rows)
        except (InvalidKey, InvalidValue, InvalidTimeToLive) as error:
            if self._rows_max is None:
                raise
            if len(rows) > 1:
                half = len(rows) // 2
                yield from self.encode(encoder, rows.slice(0, half))
                yield from self.encode(encoder, rows.slice(half))
                return
            if len(self.rows) == self._rows_max:
                raise LimitExceeded(
                    f"more than {self._rows_max:,} rows are refused, the last because {error}"
                ) from error
            row = rows.to_pylist()[0]
            key, value = row.pop("key"), row.get("value", row)
            self.rows.append((as_text(key)[:_SHOWN], as_text(value)[:_SHOWN], str(error)))


@dataclass
class PublishingWriter(DataSourceArrowWriter):
    """Loads the rows of a DataFrame as generation `number`, and swaps it in."""

    target: Target
    number: int
    keep: int
    # What becomes of a key that stands in several rows of a task, and whether its rows are in order of keys.
    refuse: Callable[[bytes], None] | None
    in_order: bool
    # Whether the same job may go on after a failure, so that what was loaded stays.
    resumes: bool = False
    # The driver's file of rows that no namespace takes, and how many these may be; None if the job fails.
    refused: Path | None = None
    refused_max: int = REFUSED_MAX

    def write(self, iterator: Iterator[pyarrow.RecordBatch]) -> TaskResult:
        target = self.target
        first = next((batch for batch in iterator if batch.num_rows), None)
        if first is None:
            return TaskResult(stored=0)
        with ask_patiently(target.address.connect) as site:
            row = ask_patiently(lambda: site.host.namespaces.find_namespace(target.namespace))
            encoder = Encoder(target.layout, row.id, row.settings.ttl, site.host.physical_ms, row.merge)
            refused = _Refused(self.refused_max if self.refused else None)
            encoded = (part for batch in chain([first], iterator) for part in refused.encode(encoder, batch))
            with closing(site.host.write_stream(GenerationStream(row.id, self.number))) as stream:
                # Keys ascend, so no batch overtakes one with the same key.
                delivery = BatchSender(stream, in_order=False)
                for pairs in sort_pairs(encoded, self.refuse, in_order=self.in_order):
                    delivery.send(pairs)
                delivery.finish()
            return _Loaded(records=delivery.sent, stored=delivery.stored, refused=tuple(refused.rows))

    def commit(self, messages: list[WriterCommitMessage | None]) -> None:
        rows = sum(each.records for each in messages if isinstance(each, TaskResult))
        if self.refused is not None:
            with self.refused.open("w", newline="") as file:
                refused = RefusedRows(file, self.refused_max)
                for each in messages:
                    for key, value, error in each.refused if isinstance(each, _Loaded) else ():
                        refused.add((key, value), error)
        with self.target.address.connect() as site:
            site.generations.finish(self.target.namespace, self.number, keep=self.keep, rows=rows)

    def abort(self, messages: list[WriterCommitMessage | None]) -> None:
        if self.resumes:
            return
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
    refuse = refuse_duplicates(options.choice("duplicates", DUPLICATES), target.namespace)
    in_order, refused = options.flag("inOrder"), options.text("refused")
    publisher = options.text("publisher")
    with address.connect() as site:
        begun = site.host.generations.begin_generation(
            target.namespace, options.read("base", read_at) or 0, publisher or f"spark/{uuid4().hex[:8]}"
        )
    return PublishingWriter(
        target,
        begun.number,
        keep,
        refuse,
        in_order,
        resumes=publisher is not None,
        refused=None if refused is None else Path(refused),
        refused_max=options.number("refusedMax") or REFUSED_MAX,
    )


def publish(
    frame: DataFrame,
    url: str,
    namespace: str,
    *,
    duplicates: str = "fail",
    options: Mapping[str, str] | None = None,
) -> None:
    """Replace all that a namespace holds by a DataFrame, at once: mode("overwrite") at its fastest.

    Spark cuts the rows into ranges of keys and sorts them, so that each task loads a range of its own, and a
    key that stands in several rows is found.  Of these the last of the DataFrame counts, or the job fails, as
    `duplicates` says.  `options` are those of the format.
    """
    order = ["key"]
    if duplicates == "last":
        frame = frame.withColumn(_PLACE, monotonically_increasing_id())
        order.append(_PLACE)
    rows = frame.repartitionByRange("key").sortWithinPartitions(*order).drop(_PLACE)
    writer = rows.write.format("floodmark").options(**(options or {}))
    writer = writer.option("namespace", namespace).option("duplicates", duplicates).option("inOrder", "true")
    writer.mode("overwrite").save(url)
