"""Every ledger keeps the ledger's contract; and what only stored ones have to show."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.contracts.ledger import LedgerContract, OpenLedger, entries_of

from floodmark.engine import Engine, MemoryEngine
from floodmark.engine.rocks import RocksEngine
from floodmark.log import FAMILY, LedgerSettings, StoredLedger, list_ledgers
from floodmark.log.stored import HEAD_LAG_MAX
from floodmark.model.errors import Corruption, InvalidName
from floodmark.model.limits import MIB
from floodmark.partition import FAMILIES
from floodmark.testing.ledgers import EngineStore, MemoryLedger


class TestMemoryLedger(LedgerContract):
    keeps = False

    @pytest.fixture
    def open_ledger(self) -> OpenLedger:
        return lambda settings, time_source: MemoryLedger(settings, time_source=time_source)


class TestStoredLedgerInMemory(LedgerContract):
    @pytest.fixture
    def open_ledger(self) -> OpenLedger:
        store = EngineStore(MemoryEngine((FAMILY,)))
        return lambda settings, time_source: StoredLedger(store, "log", settings, time_source=time_source)


class TestStoredLedgerInRocks(LedgerContract):
    times = 0.05

    @pytest.fixture
    def open_ledger(self, tmp_path: Path) -> Iterator[OpenLedger]:
        engine = RocksEngine(tmp_path, (FAMILY,))
        store = EngineStore(engine)
        yield lambda settings, time_source: StoredLedger(store, "log", settings, time_source=time_source)
        engine.close()


@pytest.fixture
def engine() -> MemoryEngine:
    return MemoryEngine((FAMILY,))


def rows_of(engine: Engine) -> list[tuple[bytes, bytes]]:
    return engine.scan(FAMILY, b"", None, rows_max=1_000_000, bytes_max=1 << 40)


def test_ledgers_side_by_side_do_not_see_each_other(engine: MemoryEngine) -> None:
    names = ["a", "a!", "aa", "ab", "pending-ack/näme", "z"]
    store = EngineStore(engine)
    ledgers = {name: StoredLedger(store, name) for name in names}
    for name, ledger in ledgers.items():
        ledger.append(name.encode())
    assert list_ledgers(engine) == names
    ledgers["aa"].delete()
    names.remove("aa")
    assert list_ledgers(engine) == names
    for name in names:
        assert [entry for _, entry in entries_of(StoredLedger(store, name))] == [name.encode()]


@pytest.mark.parametrize("name", ["", "a\x00b", "line\n"])
def test_a_name_that_would_break_the_keys_is_refused(engine: MemoryEngine, name: str) -> None:
    with pytest.raises(InvalidName, match="cannot name a ledger"):
        StoredLedger(EngineStore(engine), name)


def test_what_is_gone_leaves_no_rows_behind(engine: MemoryEngine) -> None:
    ledger = StoredLedger(EngineStore(engine), "log", LedgerSettings(segment_bytes_max=50))
    entries = [ledger.append(bytes(20), {}) for _ in range(100)]
    ledger.mark(dict.fromkeys(entries, b"\x01"))
    ledger.mark(dict.fromkeys(entries))
    # The last segment, the head and the next id.
    assert len(rows_of(engine)) <= 3


def test_only_entries_that_are_partly_gone_have_rows_of_marks(engine: MemoryEngine) -> None:
    ledger = StoredLedger(EngineStore(engine), "log")
    for _ in range(50):
        ledger.append(b"x")
    before = len(rows_of(engine))
    ledger.mark({7: b"\x01"})
    assert len(rows_of(engine)) == before + 1


def test_a_reader_begins_close_to_what_is_live_after_a_long_history() -> None:
    """Removed rows may stand in an engine's files for long; nobody may have to climb over them."""
    seen: list[bytes] = []

    class Watched(MemoryEngine):
        def scan(self, family: str, start: bytes, end: bytes | None, **how: int) -> list[tuple[bytes, bytes]]:
            seen.append(start)
            return super().scan(family, start, end, **how)  # type: ignore[arg-type]

    store = EngineStore(Watched((FAMILY,)))
    ledger = StoredLedger(store, "log")
    newest = ledger.append(b"x")
    for _ in range(5 * HEAD_LAG_MAX):
        newest = ledger.append(b"x", {newest: None})
    seen.clear()
    StoredLedger(store, "log")
    begun = min(int.from_bytes(key[5:], "big") for key in seen if key.startswith(b"log\x00e"))
    assert newest - 2 * HEAD_LAG_MAX <= begun <= newest


@pytest.mark.parametrize(
    ("key", "value"),
    [(b"log\x00s" + bytes(8), b"short"), (b"log\x00e\x01", b"entry"), (b"log\x00m\x01", b"x")],
)
def test_damaged_rows_are_named(engine: MemoryEngine, key: bytes, value: bytes) -> None:
    store = EngineStore(engine)
    StoredLedger(store, "log").append(b"x")
    engine.write([(FAMILY, key, value)])
    with pytest.raises(Corruption, match="log"):
        StoredLedger(store, "log")


def test_a_site_that_was_made_before_there_were_ledgers_opens(tmp_path: Path) -> None:
    before = tuple(family for family in FAMILIES if family != FAMILY)
    assert len(before) == len(FAMILIES) - 1
    engine = RocksEngine(tmp_path, before)
    engine.write([(before[0], b"a", b"1")])
    engine.close()
    engine = RocksEngine(tmp_path, FAMILIES)
    ledger = StoredLedger(EngineStore(engine), "log")
    ledger.append(bytes(2 * MIB))
    assert engine.get(before[0], b"a") == b"1"
    assert len(entries_of(ledger)) == 1
    engine.close()
