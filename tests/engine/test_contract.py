"""Every engine keeps the engine's contract."""

from collections.abc import Iterator
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
    @pytest.fixture
    def engine(self, tmp_path: Path) -> Iterator[Engine]:
        engine = RocksEngine(tmp_path, EngineContract.families)
        yield engine
        engine.close()

    @pytest.fixture
    def reopen(self, tmp_path: Path, engine: Engine) -> Iterator[Reopen]:
        opened: list[Engine] = []

        def reopen() -> Engine:
            engine.close()
            opened.append(RocksEngine(tmp_path, EngineContract.families))
            return opened[-1]

        yield reopen
        for again in opened:
            again.close()


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
