"""Reads the directory of a site without opening the site, also while another process has it open.

Spark's workers read a directory beside its writer and take no lock: each opens the database as a RocksDB
*secondary*, a view of the moment at which it last caught up.  Such a view has every commit before the last
one that it shows.  The writer's heartbeats tell up to which version it is *complete*; if no process has the
site open, all of it is.  Importing this module loads RocksDB, which clients of a server do not need.
"""

import os
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

import pyarrow

from floodmark.clock import system_time_ms
from floodmark.codec.changelog import decode_log_key, decode_row, encode_log_range
from floodmark.codec.ordered import NAMESPACE_BYTES, decode_key, encode_namespace, encode_prefix
from floodmark.engine import Row
from floodmark.engine.rocks import RocksSecondary
from floodmark.engine.witness import Witness, WitnessFile, require_files
from floodmark.feed.reading.columns import Columns
from floodmark.feed.reading.items import snapshot_ms
from floodmark.feed.reading.reader import gather_lines
from floodmark.feed.reading.swaps import Swap, cross, end_before_swap
from floodmark.host.catalog import NamespaceRow, generations_of, load_namespaces
from floodmark.host.directory import (
    Identity,
    engine_path,
    read_identity,
    read_ownership,
    require_same_identity,
    witness_path,
)
from floodmark.model.change import Heartbeat
from floodmark.model.errors import (
    CannotOpen,
    Corruption,
    InvalidArgument,
    NamespaceNotFound,
    StorageFailed,
    VersionInFuture,
)
from floodmark.model.limits import PAGE_BYTES_MAX
from floodmark.model.partition import Content
from floodmark.model.ranges import KeyRange
from floodmark.model.stream import ChangeBatch, ChangesRequest, OnGeneration
from floodmark.model.version import VERSION_MAX, Version, moment_of
from floodmark.partition import FILTERED_BYTES, IDENTITY, META, READ_FAMILIES
from floodmark.partition.beating import NODE
from floodmark.partition.families import COLLECTED, DATA, LOG, LOG_TRIMMED
from floodmark.partition.generations import GenerationsEngine
from floodmark.partition.layout import LogRow, load_logs, load_partitions, load_version
from floodmark.partition.read.changelog import look_up_value, read_logs
from floodmark.partition.read.records import find_before, require_kept, scan_records_page

# The number of attempts to open a site that another process is opening or closing.
_LOOKS_MAX: Final = 100


def open_directory(path: str | os.PathLike[str]) -> "DirectoryReader":
    """A reader of the site in a directory.  It needs to be closed."""
    return DirectoryReader(Path(path))


class DirectoryReader:
    """The records and changes of a site's directory when it last caught up.  For one thread at a time."""

    def __init__(self, path: Path) -> None:
        self.identity: Identity = read_identity(path)
        self._path = path
        self._complete: Version = 0
        self._scratch = TemporaryDirectory(prefix="floodmark-", ignore_cleanup_errors=True)
        try:
            # Loaded before the files are read, because they only grow.
            witness = WitnessFile(witness_path(path)).load()
            self._secondary = _open_engine(engine_path(path), Path(self._scratch.name), witness)
            self._engine = GenerationsEngine(self._secondary)
            self._catch_up()
            self._require_own()
        except BaseException:
            self._scratch.cleanup()
            raise

    def __enter__(self) -> "DirectoryReader":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"DirectoryReader({str(self._path)!r})"

    def close(self) -> None:
        """Close the database.  Closing twice is harmless."""
        self._engine.close()
        self._scratch.cleanup()

    def _require_own(self) -> None:
        """Refuse the database of another site.  One of an earlier Floodmark does not say whose it is."""
        try:
            stored = self._engine.get(META, IDENTITY)
            if stored is not None:
                require_same_identity(self.identity, stored, self._path)
        except BaseException:
            self._engine.close()
            raise

    # Contents

    def find_namespace(self, name: str) -> NamespaceRow:
        """The namespace of a name."""
        row = self._live_namespaces().get(name)
        if row is None:
            self._catch_up()
            row = self._live_namespaces().get(name)
        if row is None:
            known = ", ".join(sorted(self._live_namespaces())) or "none yet"
            raise NamespaceNotFound(
                f"no namespace {name!r} in {self._path}; there are: {known}", namespace=name
            )
        return row

    def _catch_up(self) -> None:
        self._secondary.catch_up()
        self._namespaces = list(load_namespaces(self._engine))
        self._engine.show(*generations_of(self._namespaces))

    def _live_namespaces(self) -> dict[str, NamespaceRow]:
        return {row.name: row for row in load_namespaces(self._engine) if row.dropped_at is None}

    def partitions(self) -> list[tuple[int, KeyRange]]:
        """The ids and the qualified keys of the partitions, in order of keys."""
        return [(row.id, row.range) for row in load_partitions(self._engine)]

    def sample_keys(self, keys: KeyRange, count: int) -> list[bytes]:
        """A few qualified keys from both ends of a range, of any version."""
        assert keys.end is not None
        start, end = encode_prefix(keys.start), encode_prefix(keys.end)
        found: list[Row] = []
        for reverse in (False, True):
            found += self._engine.scan(
                DATA, start, end, rows_max=count, bytes_max=PAGE_BYTES_MAX, reverse=reverse
            )
        decoded = [decode_key(key) for key, _ in found]
        return [encode_namespace(namespace) + key for namespace, key, _ in decoded]

    # Versions

    def complete_version(self) -> Version:
        """Catch up, and return the version up to which every change is there.  It never goes back."""
        for _ in range(_LOOKS_MAX):
            before = read_ownership(self._path)
            self._catch_up()
            if before == read_ownership(self._path):
                break
        complete = self._announced_version() if before.is_owned else self._last_version()
        self._complete = max(self._complete, complete)
        return self._complete

    def oldest_version(self, namespace: int) -> Version:
        """The oldest version at which a namespace can still be read."""
        created_at = next((row.created_at for row in load_namespaces(self._engine) if row.id == namespace), 0)
        return max(created_at, self._collected_version(encode_namespace(namespace)))

    def oldest_changes_version(self, namespace: int) -> Version:
        """The version after which every change of a namespace is still in the change log."""
        return max(self.oldest_version(namespace), self._trimmed_version())

    def _announced_version(self) -> Version:
        """The version up to which all changes are there, by the newest heartbeat."""
        node = next((log for log in load_logs(self._engine) if log.id == NODE), None)
        if node is None:
            return 0
        # Trimmed changes had been announced before, and nothing precedes the beginning.
        known = max(node.opened_at, self._trimmed_version())
        row = self._last_row(node)
        if row is None:
            return known
        heartbeat = decode_row(decode_log_key(row[0])[1], row[1])
        return max(known, heartbeat.through) if isinstance(heartbeat, Heartbeat) else known

    def _last_version(self) -> Version:
        """The last version that stands in any log, or at which a data set was published."""
        logs = load_logs(self._engine)
        last_rows = [row for log in logs if (row := self._last_row(log)) is not None]
        written = [decode_log_key(key)[1] for key, _ in last_rows]
        swaps = [each.since or 0 for row in self._namespaces for each in row.generations]
        return max([self._trimmed_version(), *(log.opened_at for log in logs), *written, *swaps])

    def _last_row(self, log: LogRow) -> Row | None:
        start, end = encode_log_range(log.id, 0, VERSION_MAX)
        rows = self._engine.scan(LOG, start, end, rows_max=1, bytes_max=PAGE_BYTES_MAX, reverse=True)
        return rows[0] if rows else None

    def _trimmed_version(self) -> Version:
        return load_version(self._engine, LOG_TRIMMED)

    def _collected_version(self, namespace: bytes) -> Version:
        return load_version(self._engine, COLLECTED + namespace)

    # Reading

    def scan_records(
        self, keys: KeyRange, at: Version, *, dead: bool = False, content: Content = Content.WHOLE
    ) -> Iterator[pyarrow.RecordBatch]:
        """`Partition.scan_records`, at a version that a reader of this directory has found complete."""
        assert keys.end is not None
        namespace = keys.start[:NAMESPACE_BYTES]
        self._require_seen(at)
        judged_ms = snapshot_ms(at, system_time_ms())
        for partition, held in self.partitions():
            within = held.intersect(keys)
            if within is None:
                continue
            assert within.end is not None
            resume: bytes | None = encode_prefix(within.start)
            end = encode_prefix(within.end)
            while resume is not None:
                batch, resume = scan_records_page(
                    self._engine, resume, end, at, partition, dead=dead, content=content, judged_ms=judged_ms
                )
                # The reader may have caught up with garbage collection in between.
                require_kept(at, self._collected_version(namespace))
                yield batch

    def _require_seen(self, at: Version) -> None:
        """Raise VersionInFuture unless all commits up to `at` are visible here."""
        if at <= self._complete or at <= self.complete_version() or at <= self._last_version():
            return
        raise VersionInFuture(
            f"version {at} ({moment_of(at).isoformat()}) is not in {self._path} yet; the newest that is "
            f"complete is {self._complete} ({moment_of(self._complete).isoformat()})",
            version=at,
        )

    def changes(self, request: ChangesRequest) -> Iterator[ChangeBatch]:
        """The requested changes, as far as they are complete and still in the change log."""
        if request.follow:
            raise InvalidArgument(
                f"{self._path} is read up to the present and not followed; serve the site, and follow it by "
                "its URL"
            )
        complete = self.complete_version()
        until = complete if request.until is None else min(request.until, complete)
        logs = load_logs(self._engine)
        born = next((log.opened_at for log in logs if log.id == NODE), 0)
        since = max(request.since, born)
        self._require_changes_kept(since, request.namespace)
        if request.on_generation is OnGeneration.FAIL and (swap := self._swap_after(request, since)):
            end_before_swap(swap, swap.version - 1, until)
        return self._read_over_swaps(request, logs, since, until)

    def _swap_after(self, request: ChangesRequest, position: Version) -> Swap | None:
        """The first swap above a position."""
        rows = [row for row in self._namespaces if request.namespace in (None, row.id)]
        return min([swap for row in rows if (swap := row.swap_after(position)) is not None], default=None)

    def _read_over_swaps(
        self, request: ChangesRequest, logs: list[LogRow], since: Version, until: Version
    ) -> Iterator[ChangeBatch]:
        while since < until:
            swap = self._swap_after(request, since)
            if swap is not None and swap.version == since + 1:
                yield from cross(request, swap, None, self.scan_records, self.identity.site_id)
                since = swap.version
                continue
            end = until if swap is None else min(until, swap.version - 1)
            yield from self._read_changes(request, logs, since, end)
            since = end

    def _read_changes(
        self, request: ChangesRequest, logs: list[LogRow], since: Version, until: Version
    ) -> Iterator[ChangeBatch]:
        relevant = [
            log
            for log in logs
            if (
                request.heartbeats if log.partition is None else log.range.intersect(request.keys) is not None
            )
        ]
        before = partial(find_before, self._engine)
        columns = Columns(
            request.keys,
            self._look_up,
            before if request.before_images else None,
            heartbeats=request.heartbeats,
            partial=request.partial,
            keys_only=request.keys_only,
        )
        pages = read_logs(self._engine, relevant, since, until, self._trimmed_version)
        return gather_lines(pages, until, columns)

    def _require_changes_kept(self, since: Version, namespace: int | None) -> None:
        """Raise VersionCollected if the data in which large values are looked up was collected."""
        live = [row.id for row in self._live_namespaces().values()]
        for each in live if namespace is None else [namespace]:
            require_kept(since, self._collected_version(encode_namespace(each)))

    def _look_up(self, key: bytes, version: Version) -> bytes | None:
        try:
            return look_up_value(self._engine, key, version)
        except Corruption:
            # The data of a dropped namespace is removed before its changes are.
            namespace = int.from_bytes(key[:NAMESPACE_BYTES], "big")
            if any(row.id == namespace for row in self._live_namespaces().values()):
                raise
            return None


def _open_engine(path: Path, scratch: Path, witness: Witness | None) -> RocksSecondary:
    try:
        if witness is not None and path.exists():
            require_files(path, witness)
        return RocksSecondary(path, READ_FAMILIES, scratch=scratch, prefix_bytes=FILTERED_BYTES)
    except (StorageFailed, PermissionError) as error:
        if not isinstance(error, PermissionError) and not isinstance(error.__cause__, PermissionError):
            raise
        raise CannotOpen(
            f"cannot use {path}: permission denied. A process that reads a site's directory must be allowed "
            "to write there, because rocksdict renews its own small file; otherwise read from a server",
            path=str(path),
        ) from error
