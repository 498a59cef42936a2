"""Publishing a DataFrame: mode("overwrite") replaces all that a namespace holds, at once.

The driver begins a generation, tasks load their rows into it, and the driver's commit swaps it in.  A row
replaces itself, so a task that is repeated, or runs twice, changes nothing; one that comes after the swap is
refused.  If the job fails, the driver removes the generation; if the driver dies, the site does.

If sites share the namespace, each has a generation of its own: a task sorts its rows once, and sends them to
all sites.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass
from itertools import chain, pairwise
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
from floodmark.links.driver import site_addresses
from floodmark.model.errors import (
    FloodmarkError,
    InvalidKey,
    InvalidOption,
    InvalidTimeToLive,
    InvalidValue,
    LimitExceeded,
)
from floodmark.model.partition import GenerationStream
from floodmark.model.text import read_at
from floodmark.replication.topology import parse_topology
from floodmark.site.address import FILES, SiteAddress
from floodmark.site.dataset import DUPLICATES, REFUSED_MAX, RefusedRows, as_text, refuse_duplicates
from floodmark.site.generations import check_keep, for_namespace
from floodmark.site.site import Site
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
    "topology",
    "without",
}
# The most characters of a refused row's key, and of its value, that are sent to the driver.
_SHOWN: Final = 1_000


@dataclass(frozen=True, kw_only=True)
class _Loaded(TaskResult):
    """The result of a task: its first and its last key, and the rows that it has left out, as text."""

    span: tuple[bytes, bytes] | None
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
    """Loads the rows of a DataFrame as a new generation, and swaps it in."""

    target: Target
    # The sites, that of the target first, and the number of the generation at each.
    sites: tuple[SiteAddress, ...]
    numbers: tuple[int, ...]
    keep: int
    # Raises for a key that several rows of a task have (None: the last one counts), and whether the rows are
    # in order of keys.
    refuse: Callable[[bytes], None] | None
    in_order: bool
    # Whether the job may be resumed after a failure, so that loaded rows stay.
    resumes: bool = False
    # The driver's file for refused rows, and their maximum; without a file, the first one fails the job.
    refused: Path | None = None
    refused_max: int = REFUSED_MAX

    def write(self, iterator: Iterator[pyarrow.RecordBatch]) -> TaskResult:
        target = self.target
        first = next((batch for batch in iterator if batch.num_rows), None)
        if first is None:
            return TaskResult(stored=0)
        with ExitStack() as stack:
            hosts = [stack.enter_context(ask_patiently(each.connect)).host for each in self.sites]
            rows = ask_patiently(lambda: [host.namespaces.find_namespace(target.namespace) for host in hosts])
            row = rows[0]
            encoder = Encoder(target.layout, row.id, row.settings.ttl, hosts[0].physical_ms, row.merge)
            refused = _Refused(self.refused_max if self.refused else None)
            encoded = (part for batch in chain([first], iterator) for part in refused.encode(encoder, batch))
            # Keys ascend, so no batch overtakes one with the same key.
            deliveries = [
                BatchSender(
                    stack.enter_context(closing(host.write_stream(GenerationStream(each.id, number)))),
                    in_order=False,
                )
                for host, each, number in zip(hosts, rows, self.numbers, strict=True)
            ]
            span = None
            for pairs in sort_pairs(encoded, self.refuse, in_order=self.in_order):
                span = (span or pairs.key_column)[0], pairs.key_column[-1]
                for each, delivery in zip(rows, deliveries, strict=True):
                    delivery.send(for_namespace(pairs, each.id))
            for delivery in deliveries:
                delivery.finish()
            done = deliveries[0]
            return _Loaded(records=done.sent, stored=done.stored, span=span, refused=tuple(refused.rows))

    def commit(self, messages: list[WriterCommitMessage | None]) -> None:
        rows = sum(each.records for each in messages if isinstance(each, TaskResult))
        if self.refused is not None:
            with self.refused.open("w", newline="") as file:
                refused = RefusedRows(file, self.refused_max)
                for each in messages:
                    for key, value, error in each.refused if isinstance(each, _Loaded) else ():
                        refused.add((key, value), error)
        with ExitStack() as stack:
            site, *others = _connect(stack, self.sites)
            if self.refuse is not None:
                self._require_distinct(site, [each for each in messages if isinstance(each, _Loaded)])
            site.generations.finish(
                self.target.namespace, self.numbers, others=others, keep=self.keep, rows=rows
            )

    def _require_distinct(self, site: Site, loaded: Sequence[_Loaded]) -> None:
        """Refuse keys in rows of several tasks.  Where the keys of tasks overlap, the site counts them."""
        spans = sorted(each.span for each in loaded if each.span is not None)
        if all(left[1] < right[0] for left, right in pairwise(spans)):
            return
        namespace, rows = self.target.namespace, sum(each.records for each in loaded)
        keys = site.host.generations.count_generation(namespace, self.numbers[0])
        if keys < rows:
            raise InvalidKey(
                f"{rows:,} rows of the data set for {namespace!r} have {keys:,} keys, so that some stand in "
                "several rows; leave out all but one of each. `floodmark.spark.publish` names the first, or "
                "takes the last row of each with duplicates='last'"
            )

    def abort(self, messages: list[WriterCommitMessage | None]) -> None:
        if self.resumes:
            return
        # A generation that cannot be removed now is removed by its site, once the publisher has been silent.
        for each, number in zip(self.sites, self.numbers, strict=True):
            with suppress(FloodmarkError), each.connect() as site:
                site.generations.drop(self.target.namespace, number)


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
    publisher, base = options.text("publisher"), options.read("base", read_at)
    without = [name.strip() for name in (options.text("without") or "").split(",") if name.strip()]
    with ExitStack() as stack:
        (site,) = _connect(stack, [address])
        addresses = _members(options, address, site.name, without)
        numbers = site.generations.begin(
            target.namespace,
            base=base,
            publisher=publisher or f"spark/{uuid4().hex[:8]}",
            resumes=publisher is not None,
            others=_connect(stack, addresses),
            without=without,
        )
    return PublishingWriter(
        target,
        (address, *addresses),
        numbers,
        keep,
        refuse,
        in_order,
        resumes=publisher is not None,
        refused=None if refused is None else Path(refused),
        refused_max=options.number("refusedMax") or REFUSED_MAX,
    )


def _members(options: Options, address: SiteAddress, name: str, without: Sequence[str]) -> list[SiteAddress]:
    """The other sites of the option `topology` that share the namespace, except those in `without`."""
    file = options.text("topology")
    if file is None:
        return []
    try:
        topology = parse_topology(Path(file).read_bytes(), file)
    except OSError as error:
        raise InvalidOption(
            f"the option topology names a file that cannot be read: {file} ({error.strerror})",
            option="topology",
        ) from error
    wanted = topology.active_members(options.namespace()).keys() - {name, *without}
    credentials = {field: getattr(address, field) for field in FILES.values()}
    return [each for member, each in site_addresses(topology, **credentials).items() if member in wanted]


def _connect(stack: ExitStack, addresses: Sequence[SiteAddress]) -> list[Site]:
    return [stack.enter_context(each.connect()) for each in addresses]


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
