"""`parquet:DIRECTORY` writes changes to Parquet files, which readers of directories see as one table.

    _floodmark.json                               the feed that owns the directory; readers skip it
    changes-000003-<since>-<through>.parquet      the changes of range 3 in (since, through]
    snapshot-000003-<version>-<hash>.parquet      rows of the snapshot that range 3 begins with
    .changes-000003-….parquet.new                 staged (`files/directory.py`); readers skip it

The directory holds each change exactly once, whenever a crash occurs, and **a published file is never changed
or removed**, so a reader that processes each file when it appears gets each change once, too.  A file appears
whole, by a rename, and a batch is in one file.  After a crash, a feed delivers the changes above its
checkpoint again, perhaps in other batches and, if the feed was divided again, in other ranges.  So a sink
that is opened at a checkpoint lists the files with rows above it, and leaves out of each batch the rows that
one of them has.

The columns are those of Floodmark's change rows elsewhere: `key, value, _change_type, _commit_version,
_commit_timestamp, _origin_site, _origin_version, _site_partition, _expires_at, _snapshot,
_batch`.

The rows of a snapshot file are in order of keys.  The hash in its name is that of its first key.
"""

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from threading import Lock
from typing import Final, NamedTuple, TypeAlias

import msgspec
import pyarrow
import pyarrow.parquet

from floodmark.codec.digest import SEED, hash_bytes
from floodmark.feed.sinks.base import Sink, SinkAddress, SinkContext
from floodmark.files.directory import Directory, directory_at
from floodmark.model.change import Change
from floodmark.model.errors import Closed, Corruption, InvalidArgument, SinkFailed, StorageFailed
from floodmark.model.limits import KEY_BYTES_MAX
from floodmark.model.version import MOMENT_SECONDS_MAX, Version, physical_ms

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
        # Null in files of releases without snapshots.
        pyarrow.field("_snapshot", pyarrow.bool_()),
        pyarrow.field("_batch", pyarrow.int64()),
    ]
)

_OWNER: Final = "_floodmark.json"
_NAME: Final = re.compile(
    r"(changes-(?P<range>\d{6,})-(?P<since>\d{20})-(?P<through>\d{20})(-(?P<swap_part>[0-9a-f]{16}))?"
    r"|snapshot-(?P<snapshot_range>\d{6,})-(?P<version>\d{20})-(?P<part>[0-9a-f]{16}))\.parquet"
)

# The ranges of a feed are opened concurrently.
_opening: Final = Lock()
# The ranges that this process writes, whose staged files another range must not remove.
_writing: Final[set[tuple[str, int]]] = set()

# A position in the order of delivery of a range: first the snapshot by key, then changes by version.
_Place: TypeAlias = tuple[Version, bytes]
# Version, key, and whether the row is of a snapshot.
_RowId: TypeAlias = tuple[Version, bytes, bool]
# Above every key.
_LAST_KEY: Final = b"\xff" * (KEY_BYTES_MAX + 1)


class Owner(msgspec.Struct, frozen=True):
    """The feed whose changes a directory holds."""

    site: str
    feed: str
    namespace: str


class ChangeFile(NamedTuple):
    """A file of changes, or with `part` one of the rows of a snapshot or a swap at `through`, by its name.

    >>> ChangeFile(3, 17, 42).name
    'changes-000003-00000000000000000017-00000000000000000042.parquet'
    >>> ChangeFile(3, 41, 42, "00000000000000ff").name
    'changes-000003-00000000000000000041-00000000000000000042-00000000000000ff.parquet'
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
        if since < through:
            return cls(range_id, since, through)
        part = f"{hash_bytes(first.key, SEED):016x}"
        return cls(range_id, since if first.snapshot else since - 1, through, part)

    @property
    def name(self) -> str:
        if self.part is not None and self.since == self.through:
            return f"snapshot-{self.range_id:06}-{self.through:020}-{self.part}.parquet"
        part = "" if self.part is None else f"-{self.part}"
        return f"changes-{self.range_id:06}-{self.since:020}-{self.through:020}{part}.parquet"


@dataclass(frozen=True)
class _Held:
    """A published file, and the first and the last place that it may hold rows of."""

    directory: Directory
    file: ChangeFile
    first: _Place
    last: _Place

    @cached_property
    def rows(self) -> frozenset[_RowId]:
        """The identities of the rows."""
        table = _read(self.directory, self.file, ["_commit_version", "key", "_snapshot"])
        return frozenset(
            (row["_commit_version"], row["key"], bool(row["_snapshot"])) for row in table.to_pylist()
        )


class ParquetSink:
    """Writes the changes of one range to files, one file for each batch."""

    def __init__(self, directory: Directory, context: SinkContext, *, compression: str = "zstd") -> None:
        self._directory = directory
        self._context = context
        self._compression = compression
        self._staged: list[str] = []
        self._closed = False
        self._place = directory.url, context.range_id
        with _opening, self._failing():
            directory.make()
            self._own()
            self._remove_staged()
            self._held = self._find_held()
            _writing.add(self._place)

    def write(self, changes: Sequence[Change], *, since: Version, through: Version) -> None:
        if self._closed:
            raise Closed(f"the sink parquet:{self._directory.location} was closed; open it again")
        with self._failing():
            is_by_key = since == through
            missing = self._missing(changes, is_by_key=is_by_key)
            if missing:
                if len(missing) < len(changes) and not is_by_key:
                    # Named after the rows that it adds, so that it does not replace the file with the other
                    # rows.
                    since, through = max(since, missing[0].version - 1), missing[-1].version
                file = ChangeFile.of(self._context.range_id, missing, since, through)
                self._directory.stage(file.name, self._encode(to_table(missing)))
                self._staged.append(file.name)

    def flush(self) -> None:
        with self._failing():
            self._directory.reveal(self._staged)
        self._staged.clear()

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            with _opening:
                _writing.discard(self._place)

    def _own(self) -> None:
        """Enter the feed as the owner of an empty directory; refuse a directory of another owner."""
        context, directory = self._context, self._directory
        owner = Owner(context.site, context.feed, context.namespace)
        try:
            known = directory.read_document(_OWNER, Owner, "choose another directory")
        except Corruption as error:
            raise InvalidArgument(str(error)) from error
        if known is None:
            if any(not name.startswith(".") for name in directory.names()):
                raise InvalidArgument(
                    f"{directory.location} holds other files; give feed {context.feed!r} an empty or a new "
                    "directory"
                )
            directory.publish(_OWNER, msgspec.json.encode(owner))
        elif known != owner:
            raise InvalidArgument(
                f"{directory.location} holds the changes of {known.namespace!r} by feed {known.feed!r} of "
                f"site {known.site!r}; give feed {context.feed!r} another directory"
            )

    def _remove_staged(self) -> None:
        """Remove files that were staged by a run that was killed."""
        for file in filter(None, map(_parse, self._directory.staged())):
            if (self._place[0], file.range_id) not in _writing:
                self._directory.unstage(file.name)

    def _find_held(self) -> list[_Held]:
        """The published files that may hold rows that will be delivered again."""
        context = self._context
        start = (context.since + 1, b"") if context.snapshot is None else (context.since, context.snapshot)
        files = filter(None, map(_parse, self._directory.names()))
        held = (_hold(self._directory, file) for file in files if file.through >= context.since)
        return [each for each in held if each.last > start]

    def _missing(self, changes: Sequence[Change], *, is_by_key: bool) -> list[Change]:
        """The changes of a batch that no published file holds."""
        first, last = [
            (change.version, change.key if is_by_key else _LAST_KEY) for change in (changes[0], changes[-1])
        ]
        self._held = [held for held in self._held if held.last >= first]
        known: set[_RowId] = set()
        for held in self._held:
            if held.first <= last:
                known |= held.rows
        return [each for each in changes if (each.version, each.key, each.snapshot) not in known]

    def _encode(self, table: pyarrow.Table) -> pyarrow.Buffer:
        context = self._context
        metadata = {"floodmark.site": context.site, "floodmark.feed": context.feed}
        metadata["floodmark.namespace"] = context.namespace
        output = pyarrow.BufferOutputStream()
        pyarrow.parquet.write_table(
            table.replace_schema_metadata(metadata), output, compression=self._compression
        )
        return output.getvalue()

    @contextmanager
    def _failing(self) -> Iterator[None]:
        try:
            yield
        except StorageFailed as error:
            raise SinkFailed(str(error)) from error


def to_table(changes: Sequence[Change]) -> pyarrow.Table:
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
            [change.batch for change in changes],
        ],
        schema=SCHEMA,
    )


def open_sink(address: SinkAddress, context: SinkContext) -> Sink:
    address.require_known(("compression",))
    if address.host or not address.path:
        raise InvalidArgument("the sink parquet: takes a directory, as in parquet:data/changes")
    compression = address.parameters.get("compression", COMPRESSIONS[0])
    if compression not in COMPRESSIONS:
        raise InvalidArgument(
            f"the sink parquet: has no compression {compression!r:.60}; choose from: "
            + ", ".join(COMPRESSIONS)
        )
    return ParquetSink(directory_at(address.path), context, compression=compression)


def _parse(name: str) -> ChangeFile | None:
    match = _NAME.fullmatch(name)
    if match is None:
        return None
    if match["part"] is not None:
        version = int(match["version"])
        return ChangeFile(int(match["snapshot_range"]), version, version, match["part"])
    return ChangeFile(int(match["range"]), int(match["since"]), int(match["through"]), match["swap_part"])


def _hold(directory: Directory, file: ChangeFile) -> _Held:
    if file.part is None:
        return _Held(directory, file, (file.since + 1, b""), (file.through, _LAST_KEY))
    keys = _read(directory, file, ["key"])["key"]
    return _Held(directory, file, (file.through, keys[0].as_py()), (file.through, keys[-1].as_py()))


def _read(directory: Directory, file: ChangeFile, columns: list[str]) -> pyarrow.Table:
    with directory.failing("read"), directory.open(file.name) as stream:
        return pyarrow.parquet.read_table(stream, schema=SCHEMA, columns=columns)


def _microseconds(expires_at: int | None) -> int | None:
    return None if expires_at is None else min(expires_at, MOMENT_SECONDS_MAX) * 1_000_000
