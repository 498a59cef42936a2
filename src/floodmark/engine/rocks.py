"""RocksDB, the default engine of a site in a directory.  The only module that imports rocksdict.

A write goes to the write-ahead log without an fsync, and `sync` flushes that log: unlike a synced
write, a flush lets other threads run while the disk works, which group commit needs.

After a failed write RocksDB refuses all others, and the failed one may be in its log or not.  `recover`
reopens the database, which then shows what happened.

RocksDB opens a database with a damaged write-ahead log and drops everything after the damage.  With a
witness (`witness.py`) the engine first opens it in a mode that refuses any flaw and changes nothing on disk
then.  It accepts only a flaw that a crash can have left: one after everything that the witness saw, and,
while the machine has not restarted, only a last record that was cut short.
"""

import ctypes
import logging
import os
import re
import shutil
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from itertools import chain, count, islice, starmap
from pathlib import Path
from threading import Event, Lock
from typing import Final

import msgspec
from rocksdict import (
    AccessType,
    BlockBasedOptions,
    Cache,
    ColumnFamily,
    DbClosedError,
    DBRecoveryMode,
    IngestExternalFileOptions,
    Options,
    Rdict,
    RdictIter,
    ReadOptions,
    SliceTransform,
    SstFileWriter,
    WriteBatch,
)

from floodmark.engine.base import (
    RECOVERY_ROOM_BYTES,
    EngineLimits,
    EngineMeasures,
    Guard,
    Row,
    WriteRow,
    guards_hold,
)
from floodmark.engine.witness import (
    Witness,
    WitnessFile,
    damaged_log,
    find_flaws,
    missing_logs,
    read_boot,
    read_files,
    require_files,
    require_logs,
    require_sequence,
)
from floodmark.files.local import FULL_DISK
from floodmark.model.errors import (
    CannotOpen,
    Closed,
    Corruption,
    FloodmarkError,
    OutcomeUnknown,
    StorageFailed,
    StorageFull,
)
from floodmark.model.limits import MIB
from floodmark.model.version import Version

BLOCK_CACHE_BYTES: Final = 64 * MIB
WRITE_BUFFER_BYTES: Final = 32 * MIB
# A scan takes some ten milliseconds to skip this many removed rows in memory.
REMOVED_ROWS_MAX: Final = 20_000
_WINDOW_ROWS: Final = 1_024
# Memtables of records grow by this size: the C library returns such blocks to the system when they are freed.
_RECORDS_BLOCK_BYTES: Final = 4 * MIB

# Rows are read in gulps: the size of the page is checked once a gulp, not once a row.
# The first gulp is small, because a few rows may fill the page.
_GULP: Final = 32
_FIRST_GULP: Final = 4
_BULK_ROWS: Final = 1_000

# Rows that are added to a file at a time.  No other thread runs meanwhile, for a quarter of a millisecond.
# The pause in between lets a waiting thread run, which Python would else delay for five milliseconds.
_LOADED_ROWS: Final = 500
_LOADING_PAUSE_SECONDS: Final = 0.000_05
# Files at level 0, where they overlap: at 20 RocksDB delays writers, and stops them at 36.
OVERLAPPING_FILES_MAX: Final = 12
_OVERLAPPING: Final = "rocksdb.num-files-at-level0"
_COMPACTION_TRIES: Final = 3_000
# RocksDB ignores files with names that it does not know.
_LOADING: Final = "load-{}.tmp"

# More than RocksDB writes at once when it opens an ordinary database.
_PROBE_BYTES: Final = 4 * MIB
# Longer than any key: a family without a prefix filter.
_NO_PREFIX: Final = 1 << 62
_MEMTABLE_FILTER_RATIO: Final = 0.1

_REOPEN_TRIES: Final = 200
_REOPEN_PAUSE_SECONDS: Final = 0.01
# A call of another thread that has released the interpreter borrows its handle until it returns.
_CLOSE_TRIES: Final = 6_000
_BORROWED: Final = "Already borrowed"
_BEING_CLOSED: Final = "Already mutably borrowed"

# How the text of RocksDB's own errors starts.
_STATUS: Final = re.compile(
    "IO error|Corruption|Invalid argument|Not ?[fF]ound|Not implemented|Busy|Resource busy|Timed out|"
    "Operation|Aborted|Shutdown|Result incomplete|Merge|Column family|Insufficient|Already|DB "
)
_OLDEST_LOG: Final = "rocksdb.min-log-number-to-keep"

# The properties of RocksDB that are measured, of the whole database and of each family.
_OF_DATABASE: Final = {
    "block_cache_bytes": "rocksdb.block-cache-usage",
    "running_compactions": "rocksdb.num-running-compactions",
    "running_flushes": "rocksdb.num-running-flushes",
    "background_errors": "rocksdb.background-errors",
    "writes_stopped": "rocksdb.is-write-stopped",
    "delayed_write_bytes_per_second": "rocksdb.actual-delayed-write-rate",
}
_OF_FAMILY: Final = {
    "files_bytes": "rocksdb.total-sst-files-size",
    "live_bytes": "rocksdb.estimate-live-data-size",
    "memtables_bytes": "rocksdb.cur-size-all-mem-tables",
    "table_readers_bytes": "rocksdb.estimate-table-readers-mem",
    "pending_compaction_bytes": "rocksdb.estimate-pending-compaction-bytes",
    "level0_files": "rocksdb.num-files-at-level0",
}

_log = logging.getLogger("floodmark.engine")


class _Database:
    """The reads of a RocksDB database, which both ways of opening it share."""

    limits = EngineLimits(value_bytes_max=64 * MIB, batch_bytes_max=256 * MIB, batch_rows_max=10_000_000)

    def __init__(
        self,
        path: Path,
        families: Sequence[str],
        *,
        prefix_bytes: Mapping[str, int] | None,
        block_cache_bytes: int,
        write_buffer_bytes: int,
        access: AccessType,
    ) -> None:
        self._path = path
        self._families = tuple(families)
        # These families have filters on the first bytes of every key: `ceiling` with a prefix at least that
        # long skips files that cannot have it, and costs hardly more than a point lookup.
        self._prefix_bytes = dict(prefix_bytes or {})
        self._in_total_order = ReadOptions()
        self._in_total_order.set_total_order_seek(True)
        self._block_cache = Cache(block_cache_bytes)
        self._write_buffer_bytes = write_buffer_bytes
        self._access = access
        self._closed = False
        self._refusal: FloodmarkError | None = None
        # Never set; its `wait` is a short sleep.
        self._pause = Event()
        self._database: Rdict | None = None
        self._columns: dict[str, Rdict] = {}
        self._handles: dict[str, ColumnFamily] = {}

    def get(self, family: str, key: bytes) -> bytes | None:
        try:
            value: bytes | None = self._columns[family].get(key)
        except Exception as error:
            raise self._read_error(error) from error
        return value

    def get_many(self, family: str, keys: Sequence[bytes]) -> list[bytes | None]:
        with self._read_errors():
            values: list[bytes | None] = self._columns[family].get(list(keys)) or []
            return values

    def ceiling(self, family: str, key: bytes, prefix: bytes = b"") -> Row | None:
        # The hottest read of all: plain try, because a context manager costs as much as the rest.
        try:
            filtered = self._prefix_bytes.get(family, _NO_PREFIX) <= len(prefix)
            iterator = self._columns[family].iter(None if filtered else self._in_total_order)
            iterator.seek(key)
            found: bytes | None = iterator.key()
            if found is not None:
                return (found, iterator.value()) if found.startswith(prefix) else None
            iterator.status()
            return None
        except Exception as error:
            raise self._read_error(error) from error

    def ceilings(
        self, family: str, prefixes: Sequence[bytes], starts: Sequence[bytes] | None = None
    ) -> list[Row | None]:
        if not prefixes:
            return []
        filtered = self._prefix_bytes.get(family, _NO_PREFIX) <= min(map(len, prefixes))
        found: list[Row | None] = []
        try:
            # One iterator for all of them: making it costs as much as a look-up.
            iterator = self._columns[family].iter(None if filtered else self._in_total_order)
            seek, read_key, read_value = iterator.seek, iterator.key, iterator.value
            for start, prefix in zip(starts or prefixes, prefixes, strict=True):
                seek(start)
                key: bytes | None = read_key()
                if key is None:
                    iterator.status()
                    found.append(None)
                else:
                    found.append((key, read_value()) if key.startswith(prefix) else None)
        except Exception as error:
            raise self._read_error(error) from error
        return found

    def scan(
        self,
        family: str,
        start: bytes,
        end: bytes | None,
        *,
        rows_max: int,
        bytes_max: int,
        reverse: bool = False,
    ) -> list[Row]:
        options = ReadOptions()
        options.set_total_order_seek(True)
        if rows_max >= _BULK_ROWS:
            # A long scan reads its blocks once; in the cache they would only evict others.
            options.fill_cache(False)  # type: ignore[call-arg]
        if end is not None:
            options.set_iterate_upper_bound(end)
        with self._read_errors():
            column = self._columns[family]
            rows: Iterator[Row] = column.items(  # type: ignore[assignment]
                backwards=reverse, from_key=None if reverse else start, read_opt=options
            )
            page: list[Row] = []
            size = 0
            while len(page) < rows_max and size < bytes_max:
                wanted = min(_GULP, max(_FIRST_GULP, len(page)), rows_max - len(page))
                gulp = list(islice(rows, wanted))
                page += gulp
                size += sum(map(len, chain.from_iterable(gulp)))
                # Not by a lower bound: rocksdict's `set_iterate_lower_bound` sets the upper one.
                if reverse and gulp and gulp[-1][0] < start:
                    return [row for row in page if row[0] >= start]
                if len(gulp) < wanted:
                    _require_healthy_end(column.iter(options), start, end, page, reverse=reverse)
                    break
            return page

    def sizes(self) -> Mapping[str, int]:
        families = self.measures().families
        return {name: found["files_bytes"] + found["memtables_bytes"] for name, found in families.items()}

    def measures(self) -> EngineMeasures:
        with self._read_errors():
            if self._database is None:
                raise self._unavailable()
            return EngineMeasures(
                _read_properties(self._database, _OF_DATABASE),
                {name: _read_properties(column, _OF_FAMILY) for name, column in self._columns.items()},
            )

    def _unavailable(self) -> FloodmarkError:
        if self._refusal is not None:
            return self._refusal.again()
        if self._closed:
            return Closed("the site was closed; open it again")
        return StorageFailed("the database has not recovered from a failed write yet; try again")

    @contextmanager
    def _read_errors(self) -> Iterator[None]:
        try:
            yield
        except FloodmarkError:
            raise
        except Exception as error:
            raise self._read_error(error) from error

    def _read_error(self, error: Exception) -> FloodmarkError:
        _pass_foreign(error)
        # A family is missing only after a recovery or `close` has released all of them.
        if self._database is None or isinstance(error, DbClosedError | KeyError):
            return self._unavailable()
        return _translate(error, otherwise=StorageFailed)

    def _open(self) -> None:
        self._adopt(self._connect(self._access, self._families, DBRecoveryMode.point_in_time()))

    def _connect(self, access: AccessType, families: Iterable[str], mode: DBRecoveryMode) -> Rdict:
        _require_threads()
        options = self._options(0)
        options.set_wal_recovery_mode(mode)
        try:
            return Rdict(
                os.fspath(self._path),
                options,
                column_families={name: self._options(self._prefix_bytes.get(name, 0)) for name in families},
                access_type=access,
            )
        except Exception as error:
            full = "No space left" in str(error)
            raise _translate(error, otherwise=StorageFull if full else StorageFailed) from error

    def _adopt(self, database: Rdict) -> None:
        self._handles = {name: database.get_column_family_handle(name) for name in self._families}
        self._columns = {name: database.get_column_family(name) for name in self._families}
        self._database = database

    def _reopen(self, passing: str) -> None:
        """Open, and retry while the error contains `passing`, the text of a transient one."""
        for _ in range(_REOPEN_TRIES - 1):
            try:
                self._open()
                return
            except StorageFailed as error:
                if passing not in str(error):
                    raise
                self._pause.wait(_REOPEN_PAUSE_SECONDS)
        self._open()

    def _release(self) -> None:
        """Close every handle, also after an error: RocksDB keeps its files open until the last is closed."""
        handles = [*self._columns.values(), *([self._database] if self._database else [])]
        # First, so that other threads do not take a closed handle for a failure of RocksDB.
        self._database = None
        # Emptied in place: the frames of an old error may still refer to this dict.
        self._handles.clear()
        self._columns = {}
        failure: Exception | None = None
        while handles:
            try:
                self._close_handle(handles.pop())
            except Exception as error:
                failure = failure or error
        if failure is not None:
            raise failure

    def _close_handle(self, handle: Rdict) -> None:
        """Close a handle; retries while another thread is inside one of its calls."""
        for _ in range(_CLOSE_TRIES - 1):
            try:
                handle.close()
                return
            except RuntimeError as error:
                if str(error) != _BORROWED:
                    raise
                self._pause.wait(_REOPEN_PAUSE_SECONDS)
        handle.close()

    def _options(self, prefix_bytes: int) -> Options:
        options = rocks_options(self._block_cache, self._write_buffer_bytes)
        if prefix_bytes:
            options.set_prefix_extractor(SliceTransform.create_max_len_prefix(prefix_bytes))
            options.set_memtable_prefix_bloom_ratio(_MEMTABLE_FILTER_RATIO)
            options.set_arena_block_size(_RECORDS_BLOCK_BYTES)
        return options


class RocksEngine(_Database):
    """A RocksDB database in a directory, which is made if it is missing.

    With the path of a witness, a database that holds less than the witness saw is refused, unless
    `accept_loss`.
    """

    def __init__(
        self,
        path: Path,
        families: Sequence[str],
        *,
        prefix_bytes: Mapping[str, int] | None = None,
        block_cache_bytes: int = BLOCK_CACHE_BYTES,
        write_buffer_bytes: int = WRITE_BUFFER_BYTES,
        witness: Path | None = None,
        accept_loss: bool = False,
        boot: Callable[[], str] = read_boot,
    ) -> None:
        super().__init__(
            path,
            families,
            prefix_bytes=prefix_bytes,
            block_cache_bytes=block_cache_bytes,
            write_buffer_bytes=write_buffer_bytes,
            access=AccessType.read_write(),
        )
        self._guard_lock = Lock()
        self._loads = count()
        # How many rows were removed from each family since `_tidy` last flushed it.
        self._removed = dict.fromkeys(families, 0)
        self._witness_file = None if witness is None else WitnessFile(witness)
        self._witness: Witness | None = None
        self._accepts_loss = accept_loss
        self._boot = boot() if witness else ""
        self._recovers = False
        try:
            path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise _cannot_make(path, error) from error
        for left in path.glob(_LOADING.format("*")):
            left.unlink(missing_ok=True)
        self._witness = self._load_witness()
        self._open()
        try:
            self.sync_witnessed(self.witnessed_version)
        except BaseException:
            with suppress(Exception):
                self._release()
            raise
        self._accepts_loss = False

    # The witness

    @property
    def witnessed_version(self) -> Version:
        """The version above which none was minted before the witness was stored; 0 without a witness."""
        return 0 if self._witness is None else self._witness.version

    def sync_witnessed(self, version: Version) -> None:
        """`sync`, and then store a witness of the synced files, with `version` as the bound."""
        if self._witness_file is None:
            self.sync()
            return
        database = self._writable()
        try:
            # Read before the sync, which then covers all that was seen.
            files = read_files(self._path, None if self._witness is None else self._witness.files.manifest)
            sequence = database.latest_sequence_number()
            database.flush_wal(True)
            self._store_witness(Witness(version=version, sequence=sequence, files=files, boot=self._boot))
        except FloodmarkError:
            raise
        except OSError as error:
            raise StorageFailed(
                f"cannot write {self._witness_file.path}: {error.strerror}; make room, then call again"
            ) from error
        except Exception as error:
            raise self._write_error(error) from error

    def _load_witness(self) -> Witness | None:
        if self._witness_file is None:
            return None
        try:
            return self._witness_file.load()
        except Corruption:
            if not self._accepts_loss:
                raise
            return None

    def _store_witness(self, witness: Witness) -> None:
        assert self._witness_file is not None
        self._witness_file.store(witness)
        self._witness = witness

    def _store_closed_witness(self, sequence: int) -> None:
        """Store a witness of the closed database.  Without it, the last witness claims less."""
        if self._witness_file is None or self._witness is None:
            return
        try:
            files = read_files(self._path, self._witness.files.manifest)
            self._store_witness(
                msgspec.structs.replace(self._witness, sequence=sequence, files=files, closed=True)
            )
        except (OSError, Corruption) as error:
            _log.warning("%s was closed, and its witness could not be written: %s", self._path, error)

    def _open(self) -> None:
        if not (self._path / "CURRENT").exists() and self._witness is None:
            super()._open()
            return
        if self._accepts_loss:
            self._cut_flaws(find_flaws(self._path))
            super()._open()
            return
        witness = self._witness
        was_closed = witness is not None and require_files(self._path, witness)
        self._require_readable(was_closed=was_closed)
        if witness is not None and missing_logs(self._path, witness):
            # Before it is opened for writing: after that it no longer reports which logs it needs.
            _, oldest_log = self._look(DBRecoveryMode.point_in_time())
            require_logs(self._path, witness, oldest_log)
        try:
            database = self._connect(self._access, self._families, DBRecoveryMode.absolute_consistency())
        except Corruption as flaw:
            self._require_torn(flaw, was_closed=was_closed)
            database = self._connect(self._access, self._families, DBRecoveryMode.point_in_time())
        if witness is not None:
            try:
                require_sequence(self._path, witness, database.latest_sequence_number())
            except Corruption:
                database.close()
                raise
        self._adopt(database)

    @property
    def _may_be_scattered(self) -> bool:
        """Whether the unsynced end of a file may hold any bytes: after a power cut or a failed write.

        Until the machine restarts, a file holds the bytes that were written to it.
        """
        same_boot = self._witness is not None and self._witness.boot == self._boot != ""
        return self._recovers or not same_boot

    def _require_readable(self, *, was_closed: bool) -> None:
        """Refuse logs that RocksDB cannot read to their end; cut those that a power cut has torn."""
        # Without a witness, zeros that a power cut has left cannot be told from other zeros.
        flaws = find_flaws(self._path, zeros=self._witness is not None)
        seen = {} if self._witness is None else self._witness.files.logs
        for name, position in flaws.items():
            is_torn = name.endswith(".log") and self._may_be_scattered and not was_closed
            if not is_torn or position < seen.get(name, 0) or self._witness is None:
                raise damaged_log(self._path, f"{name} at byte {position:,}", flaws)
        self._cut_flaws(flaws)

    def _cut_flaws(self, flaws: Mapping[str, int]) -> None:
        for name, position in flaws.items():
            if name.endswith(".log"):
                _log.warning("%s is cut to %d bytes, behind which it is damaged", self._path / name, position)
                os.truncate(self._path / name, position)

    def _require_torn(self, flaw: Corruption, *, was_closed: bool) -> None:
        """Raise Corruption if no crash can have left the flaw of a log.  Changes nothing on disk."""
        sequence, _ = self._look(DBRecoveryMode.point_in_time())
        if self._witness is not None:
            logs = self._witness.files.logs
            if was_closed:
                raise damaged_log(self._path, flaw, logs)
            require_sequence(self._path, self._witness, sequence)
            if not self._may_be_scattered:
                try:
                    self._look(DBRecoveryMode.tolerate_corrupted_tail_records())
                except Corruption as error:
                    raise damaged_log(self._path, error, logs) from error
        _log.warning(
            "%s: the last records of the write-ahead log were torn by a crash and are left out (%s); "
            "the last sequence number is %d",
            self._path,
            flaw,
            sequence,
        )

    def _look(self, mode: DBRecoveryMode) -> tuple[int, int]:
        """Open the database read-only; returns its last sequence number, and the oldest log that it needs."""
        try:
            families = set(Rdict.list_cf(os.fspath(self._path), self._options(0)))
        except Exception as error:
            raise _translate(error, otherwise=StorageFailed) from error
        held = [name for name in self._families if name in families]
        database = self._connect(AccessType.read_only(), held, mode)
        try:
            return database.latest_sequence_number(), database.property_int_value(_OLDEST_LOG) or 0
        finally:
            database.close()

    def write(self, rows: Iterable[WriteRow], guards: Sequence[Guard] = ()) -> bool:
        # The hottest write of all: each call that this saves counts.
        database = self._database
        if database is None:
            raise self._unavailable()
        batch = WriteBatch(True)
        put, handles = batch.put, self._handles
        removed = ""
        try:
            for family, key, value in rows:
                if value is None:
                    batch.delete(key, handles[family])
                    self._removed[family] += 1
                    removed = family
                else:
                    put(key, value, handles[family])
        except KeyError as error:
            if handles:
                raise
            # A recovery or `close` has released the families meanwhile.
            raise self._unavailable() from error
        try:
            if not guards:
                database.write(batch)
            else:
                with self._guard_lock:
                    if not guards_hold(self.get, guards):
                        return False
                    database.write(batch)
        except Exception as error:
            raise self._write_error(error) from error
        if removed and self._removed[removed] >= REMOVED_ROWS_MAX:
            self._tidy(removed)
        return True

    def _tidy(self, family: str) -> None:
        """Flush tombstones to a file, which RocksDB then compacts.  Before that, scans pass over each one."""
        self._removed[family] = 0
        # A failure does not undo the write.
        with suppress(Exception):
            self._columns[family].flush(False)

    def delete_range(self, family: str, start: bytes, end: bytes, guards: Sequence[Guard] = ()) -> bool:
        database = self._writable()
        batch = WriteBatch(raw_mode=True)
        handles = self._handles
        try:
            if start < end:
                batch.delete_range(start, end, handles[family])
        except KeyError as error:
            if handles:
                raise
            raise self._unavailable() from error
        with self._guard_lock:
            if not guards_hold(self.get, guards):
                return False
            self._apply(database, batch)
            return True

    def load(self, family: str, keys: Sequence[bytes], values: Sequence[bytes]) -> None:
        self._writable()
        path = os.fspath(self._path / _LOADING.format(next(self._loads)))
        try:
            self._write_file(path, family, keys, values)
            self._wait_for_compaction(self._columns[family])
            options = IngestExternalFileOptions()
            options.set_move_files(True)
            self._columns[family].ingest_external_file([path], options)
        except FloodmarkError:
            raise
        except KeyError as error:
            raise self._unavailable() from error
        except Exception as error:
            raise self._write_error(error) from error
        finally:
            with suppress(OSError):
                os.unlink(path)

    def _wait_for_compaction(self, column: Rdict) -> None:
        """Wait while many files overlap: with more, RocksDB would delay all writers."""
        for _ in range(_COMPACTION_TRIES):
            if (column.property_int_value(_OVERLAPPING) or 0) < OVERLAPPING_FILES_MAX:
                return
            self._pause.wait(_REOPEN_PAUSE_SECONDS)
        raise StorageFailed(
            f"{OVERLAPPING_FILES_MAX} files of loaded rows wait to be compacted; try again, or load rows "
            "that all senders together have sorted, whose files do not overlap"
        )

    def _write_file(self, path: str, family: str, keys: Sequence[bytes], values: Sequence[bytes]) -> None:
        """Write rows to a file in RocksDB's format, and sync it."""
        try:
            file = SstFileWriter(self._options(self._prefix_bytes.get(family, 0)))
            file.open(path)
            rows = zip(keys, values, strict=True)
            for _ in range(0, len(keys), _LOADED_ROWS):
                # A loop in C, without Python code for each row.
                deque(starmap(file.__setitem__, islice(rows, _LOADED_ROWS)), maxlen=0)
                self._pause.wait(_LOADING_PAUSE_SECONDS)
            file.finish()
        except Exception as error:
            _pass_foreign(error)
            full = "No space left" in str(error)
            raise _translate(error, otherwise=StorageFull if full else StorageFailed) from error

    def sync(self) -> None:
        database = self._writable()
        try:
            database.flush_wal(True)
        except Exception as error:
            raise self._write_error(error) from error

    def recover(self) -> None:
        if self._closed:
            raise self._unavailable()
        # First: as long as the old database stays open, it can still serve reads.
        self._require_room()
        with suppress(Exception):
            self._release()
        # A failed write may leave any bytes after the synced ones.
        self._recovers = True
        try:
            # RocksDB releases its lock only when the last reader has ended.
            self._reopen("lock hold by current process")
        finally:
            self._recovers = False

    def _require_room(self) -> None:
        """Raise `StorageFull` unless RocksDB has room to open."""
        probe = self._path / "room.tmp"
        free = shutil.disk_usage(self._path).free
        try:
            if free >= RECOVERY_ROOM_BYTES:
                probe.write_bytes(bytes(_PROBE_BYTES))
                return
            reason = f"has {free:,} bytes left"
        except OSError as error:
            reason = f"takes no new files ({error.strerror})"
        finally:
            probe.unlink(missing_ok=True)
        raise StorageFull(
            f"{self._path} {reason} and needs {RECOVERY_ROOM_BYTES:,} bytes to recover from a failed write; "
            "make room, then call again",
            free=free,
        )

    def abandon(self, refusal: FloodmarkError) -> None:
        """Refuse all calls in a forked process.

        The handles are never freed there: RocksDB would wait for threads that the fork has not copied, or
        write to files that the parent process has open.
        """
        self._refusal, self._closed = refusal, True
        handles = [*self._columns.values(), *self._handles.values(), self._database]
        for handle in handles:
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(handle))
        self._guard_lock = Lock()
        self._database, self._columns, self._handles = None, {}, {}

    def close(self) -> None:
        self._closed = True
        if self._database is None:
            return
        try:
            self._database.flush_wal(True)
            sequence = self._database.latest_sequence_number()
            self._release()
        except Exception as error:
            with suppress(Exception):
                self._release()
            raise self._write_error(error) from error
        self._store_closed_witness(sequence)

    def _writable(self) -> Rdict:
        if self._database is None:
            raise self._unavailable()
        return self._database

    def _apply(self, database: Rdict, batch: WriteBatch) -> None:
        try:
            database.write(batch)
        except Exception as error:
            raise self._write_error(error) from error

    def _write_error(self, error: Exception) -> FloodmarkError:
        _pass_foreign(error)
        # The call never began: a recovery or `close` is releasing the database, or has released it.
        if isinstance(error, DbClosedError) or str(error) == _BEING_CLOSED:
            return self._unavailable()
        return _translate(error, otherwise=OutcomeUnknown)


class RocksSecondary(_Database):
    """A read-only view of a database, which another process may have open, as of the last `catch_up`.

    It takes no lock on the directory.  RocksDB writes an information log under `scratch`, and rocksdict
    rewrites its small file of settings with the same bytes.  Open files stay readable after the other process
    has removed them.
    """

    def __init__(
        self,
        path: Path,
        families: Sequence[str],
        *,
        scratch: Path,
        prefix_bytes: Mapping[str, int] | None = None,
        block_cache_bytes: int = BLOCK_CACHE_BYTES,
    ) -> None:
        super().__init__(
            path,
            families,
            prefix_bytes=prefix_bytes,
            block_cache_bytes=block_cache_bytes,
            write_buffer_bytes=WRITE_BUFFER_BYTES,
            access=AccessType.secondary(os.fspath(scratch)),
        )
        # rocksdict would create the directory.
        if not (path / "CURRENT").exists():
            raise StorageFailed(f"{path} holds no database; restore the site from a backup")
        if flaws := find_flaws(path, zeros=False):
            name, position = next(iter(flaws.items()))
            raise damaged_log(path, f"{name} at byte {position:,}", flaws)
        self._reopen("No such file")

    def catch_up(self) -> None:
        """Make the writes of the other process up to now visible."""
        if self._database is None:
            raise self._unavailable()
        try:
            self._database.try_catch_up_with_primary()
        except Exception:
            # The other process has reopened the database and removed files that were about to be read.
            with suppress(Exception):
                self._release()
            self._reopen("No such file")

    def write(self, rows: Iterable[WriteRow], guards: Sequence[Guard] = ()) -> bool:
        raise _only_read()

    def delete_range(self, family: str, start: bytes, end: bytes, guards: Sequence[Guard] = ()) -> bool:
        raise _only_read()

    def sync(self) -> None:
        raise _only_read()

    def recover(self) -> None:
        raise _only_read()

    def close(self) -> None:
        self._closed = True
        with suppress(Exception):
            self._release()


def _read_properties(column: Rdict, properties: Mapping[str, str]) -> dict[str, int]:
    return {name: column.property_int_value(each) or 0 for name, each in properties.items()}


def _cannot_make(path: Path, error: OSError) -> FloodmarkError:
    if error.errno in FULL_DISK:
        return StorageFull(f"the disk of {path} is full; make room, then open again")
    return CannotOpen(
        f"{path} cannot be used for the database: {error.strerror}. Move away what stands there, or restore "
        "the site from a backup",
        path=str(path),
    )


def _only_read() -> StorageFailed:
    return StorageFailed("this database is only read here; write through the process that has it open")


@cache
def _rocks_process() -> int:
    """The id of the process in which RocksDB was first used, and has started its threads."""
    return os.getpid()


def _require_threads() -> None:
    """Raise CannotOpen in a process forked from one that used RocksDB: a flush would never end there."""
    if _rocks_process() != os.getpid():
        raise CannotOpen(
            "this process was forked from one that has used RocksDB, whose threads a fork does not copy; "
            "start it with multiprocessing's method 'spawn', or fork before the first site is opened"
        )


def rocks_options(block_cache: Cache, write_buffer_bytes: int = WRITE_BUFFER_BYTES) -> Options:
    """The options of a site's database; the benchmarks use the same for plain RocksDB."""
    table = BlockBasedOptions()
    table.set_block_cache(block_cache)
    table.set_bloom_filter(10, False)
    table.set_format_version(5)
    options = Options(raw_mode=True)
    options.create_if_missing(True)
    options.create_missing_column_families(True)
    options.set_block_based_table_factory(table)
    options.set_write_buffer_size(write_buffer_bytes)
    options.set_max_total_wal_size(8 * write_buffer_bytes)
    # A table with many removed rows next to each other is compacted soon: a scan passes over each of them.
    options.add_compact_on_deletion_collector_factory(_WINDOW_ROWS, _WINDOW_ROWS // 2, 0.0)
    options.set_keep_log_file_num(4)
    options.set_max_log_file_size(4 * MIB)
    return options


def _require_healthy_end(
    iterator: RdictIter, start: bytes, end: bytes | None, page: list[Row], *, reverse: bool
) -> None:
    """Raise RocksDB's error if rows ended at a damaged block, and not because there are no more.

    rocksdict's row iterators end silently in both cases; only an `RdictIter` has a status.
    """
    if not reverse:
        iterator.seek(page[-1][0] + b"\x00" if page else start)
    elif page:
        iterator.seek_for_prev(page[-1][0])
        if iterator.valid():
            iterator.prev()
    elif end is not None:
        iterator.seek_for_prev(end)
    else:
        iterator.seek_to_last()
    if not iterator.valid():
        iterator.status()


def _pass_foreign(error: Exception) -> None:
    """Reraise an error that a signal handler has raised inside a call of RocksDB."""
    traceback = error.__traceback__
    while traceback is not None and traceback.tb_next is not None:
        traceback = traceback.tb_next
    module = None if traceback is None else traceback.tb_frame.f_globals.get("__name__")
    if module not in (None, __name__) and not _STATUS.match(str(error)):
        raise error


def _translate(error: Exception, otherwise: Callable[[str], FloodmarkError]) -> FloodmarkError:
    """Translate an error of rocksdict: a plain exception whose text starts with RocksDB's status."""
    text = str(error)
    if isinstance(error, FloodmarkError):
        return error
    if text.startswith("Corruption"):
        return Corruption(
            f"RocksDB found damaged files ({text}); restore the site from a backup or from a peer"
        )
    return otherwise(f"RocksDB: {text}")
