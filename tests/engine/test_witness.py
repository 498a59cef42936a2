"""Loss is told from a torn tail: what a crash can leave opens, and what it cannot is refused unchanged.

A copy of the files of an open database is what kill -9 leaves.  What a power cut leaves besides is made by
hand: everything that was not synced may be missing, cut, zero or garbage.
"""

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from pathlib import Path
from random import Random

import pytest

from floodmark.engine.rocks import RocksEngine
from floodmark.engine.witness import SLOT_BYTES, Witness, WitnessFile
from floodmark.model.errors import Corruption, StorageFailed
from floodmark.model.limits import KIB, MIB

DATA = "data"
# Written and witnessed, then written and synced, then written only.
WITNESSED, SYNCED, WRITTEN = 40, 20, 20
ALL = WITNESSED + SYNCED + WRITTEN
VERSION = 7 << 18


class Store:
    """A database and its witness, in a directory that can be copied."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def open(self, *, boot: str = "first", accept_loss: bool = False, buffer: int = MIB) -> RocksEngine:
        return RocksEngine(
            self.path / "engine",
            (DATA,),
            witness=self.path / "witness",
            accept_loss=accept_loss,
            boot=lambda: boot,
            write_buffer_bytes=buffer,
        )

    def copy(self, name: str) -> "Store":
        """The files as they are at one moment, also while a flush in the background replaces some."""
        copied = self.path.with_name(name)
        while True:
            shutil.rmtree(copied, ignore_errors=True)
            before = self._sizes()
            with suppress(shutil.Error):
                shutil.copytree(self.path, copied)
                if before == self._sizes():
                    return Store(copied)

    def _sizes(self) -> dict[str, int]:
        sizes = {}
        for folder in (self.path, self.path / "engine"):
            with os.scandir(folder) as entries:
                for entry in entries:
                    with suppress(FileNotFoundError):
                        sizes[entry.path] = entry.stat().st_size
        return sizes

    @property
    def log(self) -> Path:
        return max((self.path / "engine").glob("*.log"))

    @property
    def manifest(self) -> Path:
        return self.path / "engine" / (self.path / "engine" / "CURRENT").read_text().strip()

    def witness(self) -> Witness:
        found = WitnessFile(self.path / "witness").load()
        assert found is not None
        return found

    def contents(self) -> dict[str, bytes]:
        """The bytes of all files that hold data."""
        kinds = (".log", ".sst")
        return {
            file.name: file.read_bytes()
            for file in (self.path / "engine").iterdir()
            if file.suffix in kinds or file.name.startswith(("MANIFEST", "CURRENT"))
        }


def write(engine: RocksEngine, start: int, count: int, size: int = 500) -> None:
    for number in range(start, start + count):
        engine.write([(DATA, b"%06d" % number, bytes([number % 256]) * size)])


def rows_of(engine: RocksEngine) -> int:
    """How many rows are there, which must be the first ones without a gap."""
    rows = engine.scan(DATA, b"", None, rows_max=100_000, bytes_max=64 * MIB)
    assert [key for key, _ in rows] == [b"%06d" % number for number in range(len(rows))]
    return len(rows)


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Store]:
    """What kill -9 leaves, some time after the last witness."""
    store = Store(tmp_path_factory.mktemp("store") / "open")
    store.path.mkdir()
    with closing(store.open()) as engine:
        write(engine, 0, WITNESSED)
        engine.sync_witnessed(VERSION)
        write(engine, WITNESSED, SYNCED)
        engine.sync()
        write(engine, WITNESSED + SYNCED, WRITTEN)
        yield store.copy("killed")


@pytest.fixture(scope="module")
def closed(tmp_path_factory: pytest.TempPathFactory) -> Store:
    """A database that was closed, opened and closed again, so that its MANIFEST has a history."""
    store = Store(tmp_path_factory.mktemp("store") / "closed")
    store.path.mkdir()
    for start in (0, WITNESSED):
        with closing(store.open()) as engine:
            write(engine, start, WITNESSED)
            engine.sync_witnessed(VERSION)
    return store


def refuse(store: Store, match: str, *, boot: str = "first") -> Corruption:
    """Opening is refused, twice, and leaves every file as it is."""
    before = store.contents()
    for _ in range(2):
        with pytest.raises(Corruption, match=match) as refused:
            store.open(boot=boot)
    assert store.contents() == before
    assert "doctor --accept-loss" in str(refused.value)
    return refused.value


def change(file: Path, how: Callable[[bytearray], object]) -> None:
    content = bytearray(file.read_bytes())
    changed = how(content)
    file.write_bytes(changed if isinstance(changed, bytes | bytearray) else content)


def flip(file: Path, position: int, bit: int = 4) -> None:
    def invert(content: bytearray) -> None:
        content[position] ^= 1 << bit

    change(file, invert)


def cut(file: Path, size: int) -> None:
    os.truncate(file, size)


# What a crash can leave


@pytest.mark.parametrize("boot", ["first", "second"])
def test_what_kill_leaves_opens_with_everything(killed: Store, boot: str) -> None:
    with closing(killed.copy("healthy").open(boot=boot)) as engine:
        assert rows_of(engine) == ALL
        assert engine.witnessed_version == VERSION


def positions(killed: Store, step: int) -> range:
    """Lengths of the log from what the witness saw to all of it."""
    ((_, seen),) = killed.witness().files.logs.items()
    return range(seen, killed.log.stat().st_size + 1, step)


@pytest.mark.parametrize("boot", ["first", "second"])
def test_log_that_is_cut_behind_the_witness_opens_with_a_prefix(killed: Store, boot: str) -> None:
    """kill -9 in the middle of a write, or a power cut."""
    kept = []
    for size in positions(killed, 2_711):
        torn = killed.copy("torn")
        cut(torn.log, size)
        with closing(torn.open(boot=boot)) as engine:
            kept.append(rows_of(engine))
            write(engine, kept[-1], 1)
        with closing(torn.open(boot=boot)) as engine:
            assert rows_of(engine) == kept[-1] + 1
    assert kept[0] == WITNESSED
    assert kept == sorted(kept)


@pytest.mark.parametrize("seed", range(6))
def test_power_cut_that_scatters_what_was_not_synced_opens(killed: Store, seed: int) -> None:
    """Sectors reach the disk in any order: some hold zeros, some hold what stood there before."""
    chance = Random(seed)
    torn = killed.copy("scattered")
    places = positions(killed, 512)

    def scatter(content: bytearray) -> None:
        for start in places:
            if start < len(content) and chance.random() < 0.4:
                end = min(start + 512, len(content))
                content[start:end] = (
                    bytes(end - start) if chance.random() < 0.5 else chance.randbytes(end - start)
                )

    change(torn.log, scatter)
    with closing(torn.open(boot="second")) as engine:
        assert rows_of(engine) >= WITNESSED


def test_log_that_was_flushed_and_removed_after_the_last_witness_is_not_missed(tmp_path: Path) -> None:
    store = Store(tmp_path / "store")
    store.path.mkdir()
    with closing(store.open(buffer=64 * KIB)) as engine:
        write(engine, 0, 10)
        engine.sync_witnessed(VERSION)
        seen = set(store.witness().files.logs)
        while seen & {log.name for log in (store.path / "engine").glob("*.log")}:
            write(engine, 0, 100, size=5_000)
        killed = store.copy("killed")
    with closing(killed.open()) as engine:
        assert rows_of(engine) == 100


def test_older_witness_that_a_power_cut_brings_back_refuses_nothing(tmp_path: Path) -> None:
    store = Store(tmp_path / "store")
    store.path.mkdir()
    witnesses = []
    for start in range(0, 40, 10):
        with closing(store.open(buffer=64 * KIB)) as engine:
            write(engine, start, 10, size=30_000)
            engine.sync_witnessed(VERSION + start)
            witnesses.append((store.path / "witness").read_bytes())
        witnesses.append((store.path / "witness").read_bytes())
    for witness in witnesses:
        older = store.copy("older")
        (older.path / "witness").write_bytes(witness)
        with closing(older.open()) as engine:
            assert rows_of(engine) == 40


def test_half_of_the_witness_may_be_torn(killed: Store) -> None:
    for slot in (0, 1):
        torn = killed.copy("torn-witness")
        flip(torn.path / "witness", slot * SLOT_BYTES + 30)
        with closing(torn.open()) as engine:
            assert rows_of(engine) == ALL


def test_database_without_a_witness_opens_and_gets_one(killed: Store) -> None:
    """As an earlier Floodmark left it, killed in the middle of a write."""
    older = killed.copy("earlier")
    (older.path / "witness").unlink()
    cut(older.log, older.log.stat().st_size - 3)
    with closing(older.open()) as engine:
        assert rows_of(engine) == ALL - 1
    assert older.witness().closed


def test_witness_that_cannot_be_written_fails_the_sync(tmp_path: Path) -> None:
    """No version may be minted above a bound that is not stored."""
    store = Store(tmp_path / "store")
    store.path.mkdir()
    with closing(store.open()) as engine:
        (store.path / "witness").unlink()
        (store.path / "witness.new").mkdir()
        with pytest.raises(StorageFailed, match="witness"):
            engine.sync_witnessed(VERSION)
        (store.path / "witness.new").rmdir()
        engine.sync_witnessed(VERSION)


# What no crash can leave


def test_flipped_bit_anywhere_in_the_log_is_refused_while_the_machine_runs(killed: Store) -> None:
    chance = Random(1)
    size = killed.log.stat().st_size
    for _ in range(25):
        damaged = killed.copy("flipped")
        position = chance.randrange(size)
        flip(damaged.log, position, chance.randrange(8))
        if position < size - 32 * KIB:
            refuse(damaged, "write-ahead log")
            continue
        # In the last block, a length can make what follows it look like one record that was cut short.
        with suppress(Corruption), closing(damaged.open()) as engine:
            assert rows_of(engine) >= WITNESSED


def test_flipped_bit_in_what_the_witness_saw_is_refused_after_a_restart_too(killed: Store) -> None:
    chance = Random(2)
    for _ in range(10):
        damaged = killed.copy("flipped")
        flip(damaged.log, chance.randrange(positions(killed, 1)[0]))
        refused = refuse(damaged, "lost acknowledged writes: the write-ahead log ends", boot="second")
        assert damaged.log.name in str(refused.details["missing"])


def test_log_that_is_cut_below_what_the_witness_saw_is_refused(killed: Store) -> None:
    for size in (0, 1, 1_000, positions(killed, 1)[0] - 1):
        damaged = killed.copy("cut")
        cut(damaged.log, size)
        refuse(damaged, rf"{damaged.log.name} has {size:,} bytes, and had", boot="second")


@pytest.mark.parametrize("boot", ["first", "second"])
def test_log_that_is_gone_is_refused_and_can_be_put_back(killed: Store, boot: str) -> None:
    damaged = killed.copy("gone")
    kept = damaged.log.read_bytes()
    log = damaged.log
    log.unlink()
    refuse(damaged, rf"{log.name}.*is missing", boot=boot)
    log.write_bytes(kept)
    with closing(damaged.open(boot=boot)) as engine:
        assert rows_of(engine) == ALL


def test_cut_or_changed_manifest_of_a_closed_database_is_refused_and_can_be_put_back(closed: Store) -> None:
    damaged = closed.copy("cut")
    kept = damaged.manifest.read_bytes()
    for size in range(0, len(kept), 23):
        cut(damaged.manifest, size)
        refuse(damaged, f"{damaged.manifest.name} has {size:,} bytes, and had {len(kept):,}")
        damaged.manifest.write_bytes(kept)
    for position in range(0, len(kept), 23):
        flip(damaged.manifest, position)
        refuse(damaged, f"{damaged.manifest.name} has other bytes than before")
        damaged.manifest.write_bytes(kept)
    with closing(damaged.open()) as engine:
        assert rows_of(engine) == 2 * WITNESSED


def test_table_or_catalogue_that_is_gone_is_refused(closed: Store) -> None:
    for pattern in ("*.sst", "MANIFEST-*", "CURRENT"):
        for name in sorted(file.name for file in (closed.path / "engine").glob(pattern)):
            damaged = closed.copy("gone")
            (damaged.path / "engine" / name).unlink()
            with pytest.raises(Corruption, match=name):
                damaged.open()


def test_current_that_names_an_earlier_manifest_is_refused(closed: Store) -> None:
    damaged = closed.copy("back")
    shutil.copy(damaged.manifest, damaged.manifest.with_name("MANIFEST-000001"))
    (damaged.path / "engine" / "CURRENT").write_text("MANIFEST-000001\n")
    refuse(damaged, "CURRENT names 'MANIFEST-000001', and has named")


@pytest.mark.parametrize("boot", ["first", "second"])
def test_zeros_in_place_of_records_are_refused(killed: Store, boot: str) -> None:
    """RocksDB passes zeros over, and takes what follows them or the end."""
    record, seen = 7 + 523, positions(killed, 1)[0]
    for start, end in ((10 * record, 12 * record), (10 * record, seen), (seen - record, seen + 10 * record)):
        damaged = killed.copy("zeros")

        def clear(content: bytearray, start: int = start, end: int = end) -> None:
            content[start:end] = bytes(end - start)

        change(damaged.log, clear)
        refuse(damaged, f"{damaged.log.name} at byte", boot=boot)


@pytest.mark.parametrize("kind", [5, 6, 7, 8, 11, 130, 255])
def test_type_of_a_record_that_stops_the_reader_of_rocksdb_is_refused(killed: Store, kind: int) -> None:
    """With a type of 5 to 8 RocksDB 9.8 looks at the same record for ever, or takes it for the end."""
    record = 7 + 523
    for number in (0, 1, 50):
        damaged = killed.copy("type")
        position = number * record + 6

        def change_type(content: bytearray, position: int = position) -> None:
            content[position] = kind

        change(damaged.log, change_type)
        refuse(damaged, f"{damaged.log.name} at byte {position - 6:,}")


def test_damaged_witness_is_refused(killed: Store) -> None:
    damaged = killed.copy("witness")
    flip(damaged.path / "witness", 30)
    flip(damaged.path / "witness", SLOT_BYTES + 30)
    refuse(damaged, "witness.*is damaged")


# Accepting it


def test_accepted_loss_opens_with_a_prefix_and_mints_nothing_twice(killed: Store) -> None:
    damaged = killed.copy("accepted")
    flip(damaged.log, 10_000)
    refuse(damaged, "write-ahead log")
    with closing(damaged.open(accept_loss=True)) as engine:
        kept = rows_of(engine)
        assert 0 < kept < WITNESSED
        assert engine.witnessed_version == VERSION
    with closing(damaged.open()) as engine:
        assert rows_of(engine) == kept
        assert engine.witnessed_version == VERSION


def test_lost_witness_can_be_accepted(killed: Store) -> None:
    damaged = killed.copy("accepted-witness")
    (damaged.path / "witness").write_bytes(b"")
    refuse(damaged, "witness.*is damaged")
    damaged.open(accept_loss=True).close()
    with closing(damaged.open()) as engine:
        assert rows_of(engine) == ALL


def test_recovery_from_a_failed_write_keeps_to_the_witness(killed: Store) -> None:
    store = killed.copy("recovering")
    with closing(store.open()) as engine:
        engine.recover()
        assert rows_of(engine) == ALL
        write(engine, ALL, 1)
        engine.sync_witnessed(VERSION + 1)
        engine.recover()
        assert rows_of(engine) == ALL + 1
