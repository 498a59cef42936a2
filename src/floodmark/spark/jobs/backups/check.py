"""Check every part of a backup against its manifest.

First the names and sizes of files are compared, which finds missing, truncated and foreign files.  Then all
rows are read, counted and hashed again, which finds all other damage.
"""

from typing import Final

import msgspec
from py4j.protocol import Py4JJavaError
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession

from floodmark.files.directory import Directory, directory_at
from floodmark.model.errors import Corruption, InvalidArgument
from floodmark.model.version import Version
from floodmark.spark.jobs.backups.manifest import (
    ATTEMPT,
    MANIFEST,
    Manifest,
    PartFile,
    RowSums,
    find_gaps,
    part_names,
    read_manifest,
)
from floodmark.spark.jobs.backups.parts import read_files, require_columns, sum_rows
from floodmark.spark.runtime.progress import SILENT, JobProgress
from floodmark.spark.session import use_session

_STAGE: Final = "check parts"


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
    manifests, unfinished, findings = _read_manifests(place, names)
    findings += [
        CheckFinding(each.part, f"it follows version {each.since}, to which no complete part leads")
        for each in find_gaps(manifests)
    ]
    watcher = progress or SILENT
    with use_session(spark, "floodmark check") as session:
        for done, manifest in enumerate(manifests):
            watcher.report(_STAGE, done, len(manifests))
            findings += [CheckFinding(manifest.part, text) for text in _check_part(session, place, manifest)]
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


def _read_manifests(
    place: Directory, names: list[str]
) -> tuple[list[Manifest], list[str], list[CheckFinding]]:
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
    return manifests, unfinished, findings


def _check_part(spark: SparkSession, place: Directory, manifest: Manifest) -> list[str]:
    strange = find_strange_files(manifest.files, place.directory(manifest.part).sizes())
    return find_damage(spark, place, manifest) + strange


def find_damage(spark: SparkSession, place: Directory, manifest: Manifest) -> list[str]:
    """The flaws in the files and rows of a part, without foreign files."""
    columns = require_columns(manifest)
    part = place.directory(manifest.part)
    different = compare_files(manifest.files, part.sizes())
    if different:
        return different
    try:
        rows = read_files(spark, part, [file.name for file in manifest.files], columns)
        found = sum_rows(rows, manifest.version)
    except (PySparkException, Py4JJavaError):
        return _find_unreadable(spark, part, manifest)
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

    >>> find_strange_files([PartFile("a", 7), PartFile("b", 7)], {"b": 5, "c": 1})
    ['c does not belong to it']
    """
    known = {MANIFEST, *(file.name for file in expected)}
    attempts = {_attempt(file.name) for file in expected}
    strange = [name for name in found if name not in known and not _is_left_over(name, attempts)]
    return [f"{name} does not belong to it" for name in strange]


def _is_left_over(name: str, attempts: set[str]) -> bool:
    """Whether a file is from a killed attempt: on a cluster some tasks outlive their driver."""
    return _attempt(name).startswith(ATTEMPT) and _attempt(name) not in attempts


def _attempt(name: str) -> str:
    return name.partition("/")[0]


def _find_unreadable(spark: SparkSession, part: Directory, manifest: Manifest) -> list[str]:
    """The files that cannot be read, each read by itself."""
    texts = []
    for file in manifest.files:
        try:
            sum_rows(read_files(spark, part, [file.name], require_columns(manifest)), manifest.version)
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
