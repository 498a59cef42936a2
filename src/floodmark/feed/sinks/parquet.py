"""`parquet:DIRECTORY` writes changes to Parquet files that any reader of directories takes as one table.

    _floodmark.json                               whose changes these are; readers pass over it
    changes-000003-<since>-<through>.parquet      the changes of range 3 in (since, through]
    snapshot-000003-<version>-<hash>.parquet      rows of the snapshot that range 3 begins with
    .changes-000003-….parquet.new                 being written; readers pass over it

The directory holds each change exactly once, whatever happened.  A file appears whole, by being renamed,
and a batch is in one file.  A sink that is opened at a checkpoint first takes away what the directory holds
of its keys above that checkpoint, for it will be written again: its own files as a whole, and from files of
earlier ranges, after the feed was cut anew, the rows that are its own now.  Each step leaves a directory
with all changes up to the checkpoint and some after it, each once, so it does not matter where a crash comes.

This holds for readers of the whole directory.  A reader that takes each file as it appears may have taken one
that is then taken away, and gets its changes again in another file: as the same rows, which it tells by `key`
and `_commit_version`.

The columns are those of Floodmark's change rows elsewhere: `key, value, _change_type, _commit_version,
_commit_timestamp, _origin_site, _origin_version, _site_partition, _expires_at, _snapshot`.

A file of a snapshot is named by the hash of its first key, and holds keys in order, so that a sink that is
opened in the middle of the snapshot takes away the files that begin behind that place.
"""

import os
import re
from collections.abc import Sequence
from pathlib import Path
from threading import Lock
from typing import Final, NamedTuple

import msgspec
import pyarrow
import pyarrow.compute
import pyarrow.parquet

from floodmark.codec.digest import SEED, hash_bytes
from floodmark.feed.sinks.address import SinkAddress
from floodmark.feed.sinks.base import Sink, SinkContext
from floodmark.model.change import Change
from floodmark.model.errors import Closed, InvalidArgument, SinkFailed
from floodmark.model.version import Version, physical_ms

COMPRESSIONS: Final = ("zstd", "snappy", "gzip", "none")

SCHEMA: Final = pyarrow.schema(
    [
        pyarrow.field("key", pyarrow.binary(), nullable=False),
        pyarrow.field("value", pyarrow.binary()),
        pyarrow.field("_change_type", pyarrow.string(), nullable=False),
        pyarrow.field("_commit_version", pyarrow.int64(), nullable=False),
        pyarrow.field("_commit_timestamp", pyarrow.timestamp("us", "UTC"), nullable=False),
        pyarrow.field("_origin_site", pyarrow.int32(), nullable=False),
        pyarrow.field("_origin_version", pyarrow.int64(), nullable=False),
        pyarrow.field("_site_partition", pyarrow.int64(), nullable=False),
        pyarrow.field("_expires_at", pyarrow.timestamp("us", "UTC")),
        # Null in files that were written before there were snapshots.
        pyarrow.field("_snapshot", pyarrow.bool_()),
    ]
)

_OWNER: Final = "_floodmark.json"
_NEW: Final = ".new"
_NAME: Final = re.compile(
    r"(changes-(?P<range>\d{6,})-(?P<since>\d{20})-(?P<through>\d{20})"
    r"|snapshot-(?P<snapshot_range>\d{6,})-(?P<version>\d{20})-(?P<part>[0-9a-f]{16}))\.parquet"
)
_FRESH: Final = re.compile(rf"\.({_NAME.pattern})\{_NEW}")
# The last second of the year 9999: beyond it, readers of timestamps fail.
_EXPIRY_MAX: Final = 253_402_300_799

# The ranges of a feed are opened side by side, and two of them may have to clear the same file.
_clearing: Final = Lock()
# The ranges that this process writes: what they have begun is not to be cleared away by another one.
_writing: Final[set[tuple[Path, int]]] = set()


class Owner(msgspec.Struct, frozen=True):
    """Whose changes a directory holds."""

    site: str
    feed: str
    namespace: str


class ChangeFile(NamedTuple):
    """A file of changes, or with `part` one of the rows of a snapshot at `through`, by its name.

    >>> ChangeFile(3, 17, 42).name
    'changes-000003-00000000000000000017-00000000000000000042.parquet'
    >>> ChangeFile(3, 42, 42, "00000000000000ff").name
    'snapshot-000003-00000000000000000042-00000000000000ff.parquet'
    """

    range_id: int
    since: Version
    through: Version
    part: str | None = None

    @classmethod
    def of(cls, range_id: int, changes: Sequence[Change], since: Version, through: Version) -> "ChangeFile":
        """The file of a batch."""
        first = changes[0]
        part = f"{hash_bytes(first.key, SEED):016x}" if first.snapshot else None
        return cls(range_id, since, through, part)

    @property
    def name(self) -> str:
        """The file's name."""
        if self.part is not None:
            return f"snapshot-{self.range_id:06}-{self.through:020}-{self.part}.parquet"
        return f"changes-{self.range_id:06}-{self.since:020}-{self.through:020}.parquet"


class Files:
    """The steps that a sink takes on disk, each of them whole or not done.  Tests put faults here."""

    def list(self, directory: Path) -> list[str]:
        """The names in a directory."""
        return sorted(os.listdir(directory))

    def write(self, file: Path, content: bytes | pyarrow.Buffer) -> None:
        """Write a file, and return when it is on disk."""
        with file.open("wb") as stream:
            stream.write(content)
            stream.flush()
            os.fsync(stream.fileno())

    def rename(self, file: Path, target: Path) -> None:
        """Give a file its name; whatever had that name is replaced in the same step."""
        file.rename(target)

    def remove(self, file: Path) -> None:
        """Remove a file, if it is there."""
        file.unlink(missing_ok=True)

    def sync(self, directory: Path) -> None:
        """Return when the names in a directory are on disk."""
        descriptor = os.open(directory, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


class ParquetSink:
    """Writes the changes of one range to files, one a batch."""

    def __init__(
        self,
        directory: Path,
        context: SinkContext,
        *,
        compression: str = "zstd",
        files: Files | None = None,
    ) -> None:
        self._directory = directory
        self._context = context
        self._compression = compression
        self._files = files or Files()
        self._written: list[ChangeFile] = []
        self._closed = False
        self._place = directory.resolve(), context.range_id
        try:
            directory.mkdir(parents=True, exist_ok=True)
            with _clearing:
                self._own()
                self._clear()
                _writing.add(self._place)
        except OSError as error:
            raise self._failed(error) from error

    def write(self, changes: Sequence[Change], *, since: Version, through: Version) -> None:
        if self._closed:
            raise Closed(f"the sink parquet:{self._directory} was closed; open it again")
        file = ChangeFile.of(self._context.range_id, changes, since, through)
        try:
            self._files.write(self._fresh(file.name), self._encode(to_table(changes)))
        except OSError as error:
            raise self._failed(error) from error
        self._written.append(file)

    def flush(self) -> None:
        try:
            for file in self._written:
                self._files.rename(self._fresh(file.name), self._directory / file.name)
            self._files.sync(self._directory)
        except OSError as error:
            raise self._failed(error) from error
        self._written.clear()

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            with _clearing:
                _writing.discard(self._place)

    def _own(self) -> None:
        """Enter the feed as the owner of an empty directory; refuse one that is somebody else's."""
        context = self._context
        owner = Owner(context.site, context.feed, context.namespace)
        names = self._files.list(self._directory)
        if _OWNER not in names:
            if any(not name.startswith(".") for name in names):
                raise InvalidArgument(
                    f"{self._directory} holds other files; give feed {context.feed!r} an empty or a new "
                    "directory"
                )
            fresh = self._fresh(_OWNER)
            self._files.write(fresh, msgspec.json.encode(owner))
            self._files.rename(fresh, self._directory / _OWNER)
            self._files.sync(self._directory)
            return
        try:
            known = msgspec.json.decode((self._directory / _OWNER).read_bytes(), type=Owner)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise InvalidArgument(
                f"{self._directory / _OWNER} is damaged ({error}); choose another directory"
            ) from error
        if known != owner:
            raise InvalidArgument(
                f"{self._directory} holds the changes of {known.namespace!r} by feed {known.feed!r} of site "
                f"{known.site!r}; give feed {context.feed!r} another directory"
            )

    def _clear(self) -> None:
        """Take away what is going to be written again."""
        context = self._context
        names = self._files.list(self._directory)
        for name in names:
            fresh = _FRESH.fullmatch(name)
            begun = None if fresh is None else _parse(fresh[1])
            if begun is not None and (self._place[0], begun.range_id) not in _writing:
                self._files.remove(self._directory / name)
        later = [file for file in map(_parse, names) if file is not None and self._is_later(file)]
        # From the end, so that what is left never has a hole.
        for file in sorted(later, key=lambda file: file.through, reverse=True):
            if file.part is None and file.range_id == context.range_id and file.since >= context.since:
                self._files.remove(self._directory / file.name)
            else:
                self._clear_rows(file)
        if later:
            self._files.sync(self._directory)

    def _is_later(self, file: ChangeFile) -> bool:
        """Whether a file may hold something that is going to be written again."""
        context = self._context
        if file.part is not None and context.snapshot is not None:
            return file.through >= context.since
        return file.through > context.since

    def _clear_rows(self, file: ChangeFile) -> None:
        path = self._directory / file.name
        columns = ["key", "_commit_version", "_snapshot"]
        kept = _is_kept(pyarrow.parquet.read_table(path, schema=SCHEMA, columns=columns), self._context)
        if pyarrow.compute.all(kept).as_py():
            return
        if not pyarrow.compute.any(kept).as_py():
            self._files.remove(path)
            return
        # Under this range's name: another range may be about to clear the same file.
        fresh = self._fresh(file._replace(range_id=self._context.range_id).name)
        table = pyarrow.parquet.read_table(path, schema=SCHEMA)
        self._files.write(fresh, self._encode(table.filter(kept)))
        self._files.rename(fresh, path)

    def _encode(self, table: pyarrow.Table) -> pyarrow.Buffer:
        context = self._context
        metadata = {"floodmark.site": context.site, "floodmark.feed": context.feed}
        metadata["floodmark.namespace"] = context.namespace
        output = pyarrow.BufferOutputStream()
        pyarrow.parquet.write_table(
            table.replace_schema_metadata(metadata), output, compression=self._compression
        )
        return output.getvalue()

    def _fresh(self, name: str) -> Path:
        return self._directory / f".{name}{_NEW}"

    def _failed(self, error: OSError) -> SinkFailed:
        return SinkFailed(f"cannot write to {self._directory}: {error.strerror or error}")


def to_table(changes: Sequence[Change]) -> pyarrow.Table:
    """Changes as rows."""
    return pyarrow.table(
        [
            [change.key for change in changes],
            [change.value for change in changes],
            [change.type.value for change in changes],
            [change.version for change in changes],
            [physical_ms(change.version) * 1000 for change in changes],
            [change.stamp.site for change in changes],
            [change.stamp.version for change in changes],
            [change.partition for change in changes],
            [_microseconds(change.expires_at) for change in changes],
            [change.snapshot for change in changes],
        ],
        schema=SCHEMA,
    )


def open_sink(address: SinkAddress, context: SinkContext) -> Sink:
    """Open `parquet:DIRECTORY`."""
    address.require_known(("compression",))
    if address.host or not address.path:
        raise InvalidArgument("the sink parquet: takes a directory, as in parquet:data/changes")
    compression = address.parameters.get("compression", COMPRESSIONS[0])
    if compression not in COMPRESSIONS:
        raise InvalidArgument(
            f"the sink parquet: has no compression {compression!r:.60}; choose from: "
            + ", ".join(COMPRESSIONS)
        )
    return ParquetSink(Path(address.path), context, compression=compression)


def _parse(name: str) -> ChangeFile | None:
    match = _NAME.fullmatch(name)
    if match is None:
        return None
    if match["part"] is not None:
        version = int(match["version"])
        return ChangeFile(int(match["snapshot_range"]), version, version, match["part"])
    return ChangeFile(int(match["range"]), int(match["since"]), int(match["through"]))


def _is_kept(table: pyarrow.Table, context: SinkContext) -> pyarrow.ChunkedArray:
    """Which rows are not going to be written again: those of other keys, and those up to the checkpoint."""
    compute, keys = pyarrow.compute, context.keys
    delivered = compute.less_equal(table["_commit_version"], context.since)
    if context.snapshot is not None:
        is_behind = compute.and_(
            compute.equal(table["_commit_version"], context.since),
            compute.and_(
                compute.fill_null(table["_snapshot"], False),
                compute.greater(table["key"], context.snapshot),
            ),
        )
        delivered = compute.and_(delivered, compute.invert(is_behind))
    kept = compute.or_(delivered, compute.less(table["key"], keys.start))
    if keys.end is not None:
        kept = compute.or_(kept, compute.greater_equal(table["key"], keys.end))
    return kept


def _microseconds(expires_at: int | None) -> int | None:
    return None if expires_at is None else min(expires_at, _EXPIRY_MAX) * 1_000_000
