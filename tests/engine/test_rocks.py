"""RocksDB as an engine: its errors become ours, what it keeps survives, and damage is never passed over."""

import shutil
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from threading import Event, Thread

import pytest
from rocksdict import DbClosedError, Rdict

from floodmark.engine import WriteRow, rocks
from floodmark.engine.rocks import RocksEngine
from floodmark.model.errors import (
    CannotOpen,
    Closed,
    Corruption,
    FloodmarkError,
    OutcomeUnknown,
    Retryable,
    StorageFailed,
    StorageFull,
)
from floodmark.model.limits import MIB

DATA = "data"
LOG = "log"
FAMILIES = (DATA, LOG)
BATCHES = 20


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "engine"


@pytest.fixture
def engine(path: Path) -> Iterator[RocksEngine]:
    with closing(RocksEngine(path, FAMILIES)) as engine:
        yield engine


def fill(engine: RocksEngine) -> None:
    """Write the same key to both families, batch by batch."""
    for number in range(BATCHES):
        key = b"%02d" % number
        engine.write([(DATA, key, b"d" * 50), (LOG, key, b"l" * 50)])
    engine.sync()


def keys_of(engine: RocksEngine, family: str = DATA) -> list[bytes]:
    return [key for key, _ in engine.scan(family, b"", None, rows_max=1_000, bytes_max=MIB)]


def flip_byte(file: Path, position: int) -> None:
    content = bytearray(file.read_bytes())
    content[position] ^= 0xFF
    file.write_bytes(content)


def only_file(path: Path, pattern: str) -> Path:
    (file,) = path.glob(pattern)
    return file


# Damage

DAMAGES: dict[str, Callable[[Path], object]] = {
    "CURRENT is cut": lambda path: (path / "CURRENT").write_bytes(b""),
    "CURRENT is gone": lambda path: (path / "CURRENT").unlink(),
    "CURRENT holds something else": lambda path: (path / "CURRENT").write_bytes(b"something else"),
    "MANIFEST is empty": lambda path: only_file(path, "MANIFEST-*").write_bytes(b""),
    "MANIFEST has a flipped byte": lambda path: flip_byte(only_file(path, "MANIFEST-*"), 40),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_catalogue_is_corruption(path: Path, damage: str) -> None:
    with closing(RocksEngine(path, FAMILIES)) as engine:
        fill(engine)
    copy = path.with_name("damaged")
    shutil.copytree(path, copy)
    DAMAGES[damage](copy)
    with pytest.raises(Corruption, match="damaged files"):
        RocksEngine(copy, FAMILIES)


READS: dict[str, Callable[[RocksEngine], object]] = {
    "get": lambda engine: engine.get(DATA, b"07"),
    "get_many": lambda engine: engine.get_many(DATA, [b"07"]),
    "ceiling": lambda engine: engine.ceiling(DATA, b"07"),
    "scan": lambda engine: engine.scan(DATA, b"", None, rows_max=99, bytes_max=MIB),
    "scan of a part": lambda engine: engine.scan(DATA, b"05", b"07", rows_max=99, bytes_max=MIB),
    "reverse scan": lambda engine: engine.scan(DATA, b"", None, rows_max=99, bytes_max=MIB, reverse=True),
}


@pytest.mark.parametrize("read", READS)
def test_a_damaged_table_is_corruption_and_never_reads_as_empty(path: Path, read: str) -> None:
    with closing(RocksEngine(path, FAMILIES)) as engine:
        fill(engine)
    copy = path.with_name("damaged")
    shutil.copytree(path, copy)
    for table in copy.glob("*.sst"):
        flip_byte(table, 10)
    with closing(RocksEngine(copy, FAMILIES)) as damaged, pytest.raises(Corruption, match="damaged files"):
        READS[read](damaged)


def test_a_locked_directory_is_refused_and_its_owner_goes_on(engine: RocksEngine, path: Path) -> None:
    engine.write([(DATA, b"a", b"1")])
    with pytest.raises((StorageFailed, CannotOpen), match="lock"):
        RocksEngine(path, FAMILIES)
    assert engine.get(DATA, b"a") == b"1"
    assert engine.write([(DATA, b"a", b"2")])


def test_marks_of_many_removed_rows_do_not_stay_in_memory(
    engine: RocksEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a file RocksDB compacts them away; in memory every scan passes over them."""
    monkeypatch.setattr(rocks, "REMOVED_ROWS_MAX", 50)
    keys = [b"%02d" % number for number in range(60)]
    engine.write([(DATA, key, b"1") for key in keys])
    for key in keys[:49]:
        engine.write([(DATA, key, None), (LOG, key, b"kept")])
    data, log = engine._columns[DATA], engine._columns[LOG]
    assert data.property_int_value("rocksdb.num-deletes-active-mem-table") == 49
    engine.write([(DATA, keys[49], None), (LOG, keys[49], b"kept")])
    assert data.property_int_value("rocksdb.num-deletes-active-mem-table") == 0
    assert log.property_int_value("rocksdb.num-entries-active-mem-table") == 50
    assert keys_of(engine) == keys[50:]
    assert keys_of(engine, LOG) == keys[:50]


# Failing writes.  RocksDB fails when the machine does, so a stand-in raises what it would raise.


class FailingDatabase:
    """Raises RocksDB's error for every write; rocksdict gives it no kind of its own."""

    def __init__(self, text: str, kind: type[Exception] = Exception) -> None:
        self._error = kind(text)

    def write(self, batch: object) -> None:
        raise self._error

    def flush_wal(self, sync: bool) -> None:
        raise self._error

    def close(self) -> None:
        pass


ERRORS_OF_CLOSING = {
    "Already mutably borrowed": RuntimeError,
    "DB instance already closed": DbClosedError,
}

WRITES: dict[str, Callable[[RocksEngine], object]] = {
    "write": lambda engine: engine.write([(DATA, b"a", b"1")]),
    "delete_range": lambda engine: engine.delete_range(DATA, b"a", b"b"),
    "sync": lambda engine: engine.sync(),
    "close": lambda engine: engine.close(),
}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("IO error: No space left on device: While appending to file", OutcomeUnknown),
        ("IO error: Input/output error: While fsync", OutcomeUnknown),
        ("Corruption: block checksum mismatch", Corruption),
    ],
)
@pytest.mark.parametrize("write", WRITES)
def test_a_failed_write_raises_our_error_with_the_text_of_rocksdb(
    path: Path, monkeypatch: pytest.MonkeyPatch, write: str, text: str, expected: type[FloodmarkError]
) -> None:
    engine = RocksEngine(path, FAMILIES)
    monkeypatch.setattr(engine, "_database", FailingDatabase(text))
    with pytest.raises(expected, match=text):
        WRITES[write](engine)


# Persistence


def test_reopening_finds_what_was_synced_and_what_close_synced(path: Path) -> None:
    with closing(RocksEngine(path, FAMILIES)) as engine:
        fill(engine)
        engine.write([(DATA, b"last", b"1")])
        engine.delete_range(LOG, b"00", b"05")
    with closing(RocksEngine(path, FAMILIES)) as engine:
        assert keys_of(engine) == [*(b"%02d" % number for number in range(BATCHES)), b"last"]
        assert keys_of(engine, LOG)[0] == b"05"


def test_a_closed_engine_lets_go_of_its_directory_while_it_is_still_referenced(path: Path) -> None:
    first = RocksEngine(path, FAMILIES)
    first.write([(DATA, b"a", b"1")])
    first.close()
    with closing(RocksEngine(path, FAMILIES)) as second:
        assert second.get(DATA, b"a") == b"1"
    first.close()


def test_a_family_that_was_added_later_is_made(path: Path) -> None:
    with closing(RocksEngine(path, (DATA,))) as engine:
        engine.write([(DATA, b"a", b"1")])
        del engine
    with closing(RocksEngine(path, FAMILIES)) as engine:
        engine.write([(LOG, b"a", b"2")])
        assert (engine.get(DATA, b"a"), engine.get(LOG, b"a")) == (b"1", b"2")


def test_unsynced_writes_survive_the_end_of_the_process(engine: RocksEngine, path: Path) -> None:
    engine.write([(DATA, b"a", b"1")])
    copy = path.with_name("copy")
    shutil.copytree(path, copy)
    with closing(RocksEngine(copy, FAMILIES)) as survivor:
        assert survivor.get(DATA, b"a") == b"1"


@pytest.mark.parametrize("missing", [0, 1, 2, 7, 50, 130, 131, 500, 1_500])
def test_a_cut_log_loses_only_a_suffix_of_whole_batches(
    engine: RocksEngine, path: Path, missing: int
) -> None:
    fill(engine)
    copy = path.with_name("cut")
    shutil.copytree(path, copy)
    log = max(copy.glob("*.log"))
    content = log.read_bytes()
    log.write_bytes(content[: len(content) - missing])
    with closing(RocksEngine(copy, FAMILIES)) as survivor:
        kept = keys_of(survivor)
        assert kept == keys_of(survivor, LOG), "half a batch survived"
        assert kept == [b"%02d" % number for number in range(len(kept))], "the middle was lost"
        lost = BATCHES - len(kept)
        assert (lost > 0) == (missing > 0)
        assert lost <= 1 + missing // 100
        survivor.write([(DATA, b"zz", b"1")])
        survivor.sync()


# Recovery


def test_recover_keeps_serving_and_keeps_what_was_written(engine: RocksEngine) -> None:
    fill(engine)
    engine.write([(DATA, b"unsynced", b"1")])
    for round_ in range(3):
        engine.recover()
        assert engine.get(DATA, b"unsynced") == b"1"
        assert len(keys_of(engine)) == BATCHES + 1 + round_
        engine.write([(DATA, b"unsynced-%d" % round_, b"2")])
        engine.sync()


def test_recover_ends_a_failure(engine: RocksEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    engine.write([(DATA, b"a", b"1")])
    with monkeypatch.context() as patch:
        patch.setattr(engine, "_database", FailingDatabase("IO error: gone"))
        with pytest.raises(OutcomeUnknown, match="gone"):
            engine.write([(DATA, b"a", b"2")])
    engine.recover()
    assert engine.get(DATA, b"a") == b"1"
    assert engine.write([(DATA, b"a", b"3")])


def test_a_write_that_a_recovery_overtakes_is_refused_whole(engine: RocksEngine) -> None:
    def rows() -> Iterator[WriteRow]:
        yield DATA, b"a", b"1"
        engine.recover()
        yield LOG, b"a", b"1"

    with pytest.raises(StorageFailed, match="try again"):
        engine.write(rows())
    assert (engine.get(DATA, b"a"), engine.get(LOG, b"a")) == (None, None)
    assert engine.write([(DATA, b"a", b"2")])


@pytest.mark.parametrize("write", ["write", "delete_range", "sync"])
def test_a_write_to_a_database_that_was_just_closed_did_certainly_not_happen(
    engine: RocksEngine, monkeypatch: pytest.MonkeyPatch, write: str
) -> None:
    """Another thread has picked the database up, and a recovery closes it before the call."""
    for text in ("Already mutably borrowed", "DB instance already closed"):
        with monkeypatch.context() as patch:
            patch.setattr(engine, "_database", FailingDatabase(text, kind=ERRORS_OF_CLOSING[text]))
            with pytest.raises(StorageFailed, match="try again"):
                WRITES[write](engine)


class BorrowedHandle:
    """A handle inside which another thread is: it can be closed only when that has left."""

    def __init__(self, handle: Rdict, refusals: int) -> None:
        self._handle = handle
        self.refusals = refusals

    def __getattr__(self, name: str) -> object:
        return getattr(self._handle, name)

    def close(self) -> None:
        if self.refusals:
            self.refusals -= 1
            raise RuntimeError("Already borrowed")
        self._handle.close()


@pytest.mark.parametrize("end", ["close", "recover"])
def test_readers_inside_the_database_hold_its_end_up_and_do_not_fail_it(path: Path, end: str) -> None:
    engine = RocksEngine(path, FAMILIES)
    fill(engine)
    column = BorrowedHandle(engine._columns[DATA], refusals=2)
    database = BorrowedHandle(engine._writable(), refusals=1)
    engine._columns[DATA] = column  # type: ignore[assignment]
    engine._database = database  # type: ignore[assignment]
    getattr(engine, end)()
    assert (column.refusals, database.refusals) == (0, 0)
    engine.close()
    with closing(RocksEngine(path, FAMILIES)) as again:
        assert len(keys_of(again)) == BATCHES


def test_a_recovery_that_failed_can_be_tried_again(engine: RocksEngine, path: Path) -> None:
    fill(engine)
    current = path / "CURRENT"
    content = current.read_bytes()
    current.write_bytes(b"something else")
    with pytest.raises(Corruption):
        engine.recover()
    current.write_bytes(content)
    engine.recover()
    assert len(keys_of(engine)) == BATCHES
    assert engine.write([(DATA, b"a", b"1")])


def test_recover_without_room_says_so_and_reads_go_on(
    engine: RocksEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine.write([(DATA, b"a", b"1")])
    usage = shutil.disk_usage("/")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=1))
    with pytest.raises(StorageFull, match="make room"):
        engine.recover()
    assert engine.get(DATA, b"a") == b"1"
    monkeypatch.undo()
    engine.recover()
    assert engine.get(DATA, b"a") == b"1"


def test_readers_during_a_recovery_get_an_answer_or_are_told_to_try_again(engine: RocksEngine) -> None:
    fill(engine)
    done = Event()
    wrong: list[object] = []

    def read() -> None:
        while not done.is_set():
            try:
                answers = (engine.get(DATA, b"07"), len(keys_of(engine)), engine.ceiling(DATA, b"07"))
            except Retryable:
                continue
            except BaseException as error:
                wrong.append(error)
                return
            if answers != (b"d" * 50, BATCHES, (b"07", b"d" * 50)):
                wrong.append(answers)

    readers = [Thread(target=read) for _ in range(2)]
    for reader in readers:
        reader.start()
    try:
        for _ in range(5):
            engine.recover()
    finally:
        done.set()
        for reader in readers:
            reader.join()
    assert wrong == []


# Loads


def test_files_that_overlap_are_compacted_before_others_are_loaded(engine: RocksEngine) -> None:
    for number in range(60):
        keys = [b"%05d" % (60 * row + number) for row in range(50)]
        engine.load(DATA, keys, keys)
        level0 = engine.measures().families[DATA]["level0_files"]
        assert level0 <= rocks.OVERLAPPING_FILES_MAX
    assert engine.scan(DATA, b"", None, rows_max=10_000, bytes_max=MIB) == [
        (b"%05d" % row, b"%05d" % row) for row in range(3_000)
    ]


def test_files_that_a_killed_load_has_left_are_removed(path: Path) -> None:
    with closing(RocksEngine(path, FAMILIES)) as engine:
        fill(engine)
    left = path / "load-7.tmp"
    left.write_bytes(b"half a file")
    with closing(RocksEngine(path, FAMILIES)) as engine:
        assert not left.exists()
        assert len(keys_of(engine)) == BATCHES


def test_a_load_after_close_is_refused(path: Path) -> None:
    engine = RocksEngine(path, FAMILIES)
    engine.close()
    with pytest.raises(Closed):
        engine.load(DATA, [b"a"], [b"1"])
    assert not list(path.glob("load-*"))
