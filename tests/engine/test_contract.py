"""Every engine keeps the engine's contract."""

from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from floodmark.engine import Engine, MemoryEngine
from floodmark.engine.rocks import RocksEngine
from floodmark.testing import EngineContract, FaultyEngine
from floodmark.testing.contracts import Reopen


class TestMemoryEngine(EngineContract):
    @pytest.fixture
    def engine(self) -> MemoryEngine:
        return MemoryEngine(EngineContract.families)


class TestRocksEngine(EngineContract):
    prefix_bytes: Mapping[str, int] = {}

    @pytest.fixture
    def engine(self, tmp_path: Path) -> Iterator[Engine]:
        engine = RocksEngine(tmp_path, EngineContract.families, prefix_bytes=self.prefix_bytes)
        yield engine
        engine.close()

    @pytest.fixture
    def reopen(self, tmp_path: Path, engine: Engine) -> Iterator[Reopen]:
        opened: list[Engine] = []

        def reopen() -> Engine:
            engine.close()
            opened.append(RocksEngine(tmp_path, EngineContract.families, prefix_bytes=self.prefix_bytes))
            return opened[-1]

        yield reopen
        for again in opened:
            again.close()


class TestRocksEngineWithShortFilter(TestRocksEngine):
    prefix_bytes = dict.fromkeys(EngineContract.families, 1)


class TestRocksEngineWithLongFilter(TestRocksEngine):
    prefix_bytes = dict.fromkeys(EngineContract.families, 18)


class TestFaultyEngineWithoutFaults(EngineContract):
    @pytest.fixture
    def engine(self) -> FaultyEngine:
        return FaultyEngine(EngineContract.families)

    @pytest.fixture
    def reopen(self, engine: FaultyEngine) -> Reopen:
        def reopen() -> Engine:
            engine.close()
            return engine.crash(keep=0)

        return reopen
