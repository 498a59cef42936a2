"""The rows of a backup in Spark: from a site to files, from files to a site, counted and checked.

The rows of a part are counted and hashed in the pass that writes them, and again in each pass that reads
them.  A check first compares the names and sizes of files with the manifest, which finds missing, truncated
and foreign files.  Then it reads, counts and hashes all rows again, which finds all other damage.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final

import msgspec
from msgspec.structs import replace
from py4j.protocol import Py4JJavaError
from pyspark.errors import PySparkException
from pyspark.sql import Column, DataFrame, Observation, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.types import StructType

from floodmark.files.directory import Directory, directory_at, find_full_disk
from floodmark.model.change import ChangeType
from floodmark.model.errors import Corruption, FormatTooNew, InvalidArgument
from floodmark.model.version import Version, physical_ms
from floodmark.spark.jobs.backups.manifest import (
    ATTEMPT,
    MANIFEST,
    ColumnType,
    Manifest,
    PartFile,
    RowCounts,
    RowSums,
    find_gaps,
    part_names,
    read_manifest,
)
from floodmark.spark.runtime.failures import raising_floodmark_errors
from floodmark.spark.runtime.progress import SILENT, JobProgress
from floodmark.spark.session import open_session
from floodmark.spark.source.schemas import RECORDS, record_columns

# Makes Spark verify the checksums of Parquet pages.
_CHECKED: Final = {"parquet.page.verify-checksum.enabled": "true"}
_STAGE: Final = "check parts"


@contextmanager
def explaining(directory: Directory) -> Iterator[None]:
    """Raise errors of Spark as Floodmark's, also StorageFull for a directory."""
    try:
        with raising_floodmark_errors():
            yield
    except (PySparkException, Py4JJavaError) as error:
        full = find_full_disk(directory.location, str(error))
        if full is None:
            raise
        raise full from None


def write_files(rows: DataFrame, directory: Directory, at: Version) -> RowSums:
    """Write rows to a new directory; returns their sums."""
    observed, sums = observe_rows(rows, at)
    observed.write.mode("error").option("compression", "zstd").parquet(directory.url)
    return sums()


def read_parts(spark: SparkSession, target: Directory, parts: Iterable[Manifest]) -> DataFrame:
    """The rows of some parts of one backup.  Raises FormatTooNew for unknown columns."""
    urls: list[str] = []
    columns = RECORDS
    for manifest in parts:
        columns = _require_columns(manifest)
        urls += [f"{target.directory(manifest.part).url}/{file.name}" for file in manifest.files]
    return spark.read.schema(columns).options(**_CHECKED).parquet(*urls)


def columns_of(schema: StructType) -> list[ColumnType]:
    """The columns of rows, for a manifest."""
    return [ColumnType(field.name, field.dataType.simpleString()) for field in schema.fields]


def _require_columns(manifest: Manifest) -> StructType:
    columns = record_columns(manifest.namespace.merge)
    if manifest.columns != columns_of(columns):
        named = ", ".join(f"{column.name} {column.type}" for column in manifest.columns)
        raise FormatTooNew(f"the rows of {manifest.part} have columns that are not known here: {named}")
    return columns


# Sums


def is_deleted() -> Column:
    """Whether a row is a deletion."""
    return F.col("_change_type") == F.lit(ChangeType.DELETE.value)


def sum_columns(columns: Iterable[str], at: Version) -> list[Column]:
    """Expressions for `to_sums`, over rows as of a version."""
    expired = ~is_deleted() & (F.unix_millis("_expires_at") <= F.lit(physical_ms(at)))
    return [
        F.count(F.lit(1)).alias("total"),
        F.count_if(is_deleted()).alias("tombstones"),
        F.count_if(expired).alias("expired"),
        F.bit_xor(F.xxhash64(*columns)).alias("digest"),
    ]


def to_sums(found: Mapping[str, Any]) -> RowSums:
    """The sums from the values of `sum_columns`."""
    total, tombstones, expired = found["total"], found["tombstones"], found["expired"]
    live = total - tombstones - expired
    counts = RowCounts(live=live, tombstones=tombstones, expired=expired, total=total)
    # Without rows, Spark's XOR is null.
    return RowSums(counts=counts, digest=found["digest"] or 0)


def observe_rows(rows: DataFrame, at: Version) -> tuple[DataFrame, Callable[[], RowSums]]:
    """Rows that are counted as they pass, and a function for their sums afterwards."""
    observation = Observation()
    observed = rows.observe(observation, *sum_columns(rows.columns, at))
    return observed, lambda: to_sums(observation.get)


# The check


class CheckFinding(msgspec.Struct, frozen=True):
    """A flaw in a part of a backup."""

    part: str
    message: str


class CheckSummary(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a check: no `findings` if the backup is sound.

    `unfinished` names parts without a manifest, which a running or the next backup completes.
    """

    target: str
    parts: int
    rows: int
    bytes: int
    newest_version: Version
    unfinished: list[str]
    findings: list[CheckFinding]


def check_backup(
    target: str, *, spark: SparkSession | None = None, progress: JobProgress | None = None
) -> CheckSummary:
    """Recompute the counts, hashes and file lists of every complete part."""
    place = directory_at(target)
    names = part_names(place)
    if not names:
        raise InvalidArgument(f"there is no backup at {target}")
    manifests: list[Manifest] = []
    unfinished: list[str] = []
    findings: list[CheckFinding] = []
    for name in names:
        try:
            manifest = read_manifest(place, name)
        except Corruption as error:
            findings.append(CheckFinding(name, str(error)))
            continue
        if manifest is None:
            unfinished.append(name)
        else:
            manifests.append(manifest)
    findings += [
        CheckFinding(each.part, f"it follows version {each.since}, to which no complete part leads")
        for each in find_gaps(manifests)
    ]
    watcher = progress or SILENT
    with open_session(name="floodmark check", spark=spark) as session:
        for done, manifest in enumerate(manifests):
            watcher.report(_STAGE, done, len(manifests))
            strange = find_strange_files(manifest.files, place.directory(manifest.part).sizes())
            flaws = [*find_damage(session, place, manifest), *strange]
            findings += [CheckFinding(manifest.part, text) for text in flaws]
        watcher.report(_STAGE, len(manifests), len(manifests))
    return CheckSummary(
        target=target,
        parts=len(manifests),
        rows=sum(each.sums.counts.total for each in manifests),
        bytes=sum(file.bytes for each in manifests for file in each.files),
        newest_version=max((each.version for each in manifests), default=0),
        unfinished=unfinished,
        findings=findings,
    )


def find_damage(spark: SparkSession, place: Directory, manifest: Manifest) -> list[str]:
    """The flaws in the files and rows of a part, without foreign files."""
    _require_columns(manifest)
    if different := compare_files(manifest.files, place.directory(manifest.part).sizes()):
        return different
    try:
        found = _sum_rows(spark, place, manifest)
    except (PySparkException, Py4JJavaError):
        return _find_unreadable(spark, place, manifest)
    return [] if found == manifest.sums else [_describe(found, manifest.sums)]


def compare_files(expected: list[PartFile], found: dict[str, int]) -> list[str]:
    """The files of a part that are missing or have another size.

    >>> compare_files([PartFile("a", 7), PartFile("b", 7)], {"b": 5, "c": 1})
    ['a is missing', 'b has 5 bytes instead of 7']
    """
    texts = []
    for file in expected:
        size = found.get(file.name)
        if size is None:
            texts.append(f"{file.name} is missing")
        elif size != file.bytes:
            texts.append(f"{file.name} has {size:,} bytes instead of {file.bytes:,}")
    return texts


def find_strange_files(expected: list[PartFile], found: dict[str, int]) -> list[str]:
    """The files that do not belong to a part.

    Those of a killed attempt do: on a cluster some tasks outlive their driver.

    >>> find_strange_files([PartFile("a", 7), PartFile("b", 7)], {"b": 5, "c": 1})
    ['c does not belong to it']
    """
    known = {MANIFEST, *(file.name for file in expected)}
    attempts = {_attempt(name) for name in known}
    return [
        f"{name} does not belong to it"
        for name in found
        if name not in known and (not name.startswith(ATTEMPT) or _attempt(name) in attempts)
    ]


def _attempt(name: str) -> str:
    return name.partition("/")[0]


def _sum_rows(spark: SparkSession, place: Directory, manifest: Manifest) -> RowSums:
    """The sums of a part's rows, by reading them all."""
    rows = read_parts(spark, place, [manifest])
    return to_sums(rows.agg(*sum_columns(rows.columns, manifest.version)).collect()[0].asDict())


def _find_unreadable(spark: SparkSession, place: Directory, manifest: Manifest) -> list[str]:
    """The files that cannot be read, each read by itself."""
    texts = []
    for file in manifest.files:
        try:
            _sum_rows(spark, place, replace(manifest, files=[file]))
        except (PySparkException, Py4JJavaError) as error:
            texts.append(f"{file.name} cannot be read: {_first_line(error)}")
    return texts or ["its files could be read one by one, but not together; check it again"]


def _first_line(error: Exception) -> str:
    """The first line of Spark's message, without its calls and stacks."""
    lines = [line.strip().removeprefix(": ") for line in str(error).splitlines()]
    said = [line for line in lines if line and not line.startswith("An error occurred while calling")]
    return said[0][:300] if said else type(error).__name__


def _describe(found: RowSums, expected: RowSums) -> str:
    if found.counts.total != expected.counts.total:
        return f"it holds {found.counts.total:,} rows instead of {expected.counts.total:,}"
    if found.counts != expected.counts:
        return f"its rows are {found.counts} instead of {expected.counts}"
    return f"the hash of its rows is {found.digest:016x} instead of {expected.digest:016x}"
