"""The engine that puts the records of a namespace under the id of their generation."""

from collections.abc import Iterator

import pytest

from floodmark.codec.ordered import encode_key, encode_namespace
from floodmark.engine import Engine, MemoryEngine
from floodmark.partition.generations import GenerationsEngine, Since
from floodmark.testing import EngineContract, FaultyEngine
from floodmark.testing.contracts import Reopen

FIRST, SECOND, HIDDEN = map(encode_namespace, (1, 7, 8))


class TestGenerationsWithoutAny(EngineContract):
    @pytest.fixture
    def engine(self) -> Engine:
        return GenerationsEngine(MemoryEngine(EngineContract.families))


class TestGenerationsOfOtherNamespaces(EngineContract):
    @pytest.fixture
    def engine(self) -> Engine:
        engine = GenerationsEngine(FaultyEngine(EngineContract.families))
        engine.show({FIRST: [Since(1, FIRST), Since(5, SECOND)]}, [SECOND, HIDDEN])
        return engine

    @pytest.fixture
    def reopen(self, engine: GenerationsEngine) -> Reopen:
        def reopen() -> Engine:
            engine.close()
            below = engine.below
            assert isinstance(below, FaultyEngine)
            return GenerationsEngine(below.crash(keep=0))

        return reopen


@pytest.fixture
def engine() -> Iterator[GenerationsEngine]:
    """Namespace 1, whose records stood under its own id below version 50, and stand under 7 from there on."""
    below = MemoryEngine(("data",))
    for namespace in (0, 1, 2, 7, 8, 9):
        below.write([("data", encode_key(namespace, b"key", 10), b"%d" % namespace)])
    engine = GenerationsEngine(below)
    engine.show({FIRST: [Since(1, FIRST), Since(50, SECOND)]}, [SECOND, HIDDEN])
    yield engine
    engine.close()


@pytest.mark.parametrize("reverse", [False, True])
def test_a_scan_over_all_namespaces_finds_each_record_once_in_its_place(
    engine: GenerationsEngine, reverse: bool
) -> None:
    start, end, found = b"", None, []
    while page := engine.scan("data", start, end, rows_max=1, bytes_max=1_000, reverse=reverse):
        found += page
        if reverse:
            end = page[-1][0]
        else:
            start = page[-1][0] + b"\0"
    wanted = [(encode_key(each, b"key", 10), b"%d" % each) for each in (0, 2, 9)]
    wanted.insert(1, (encode_key(1, b"key", 10), b"7"))
    assert found == (wanted[::-1] if reverse else wanted)


def test_a_read_as_of_a_version_finds_the_generation_of_that_version(engine: GenerationsEngine) -> None:
    prefix = encode_key(1, b"key", 10)[:-8]
    for version, value in ((49, b"1"), (50, b"7")):
        start = encode_key(1, b"key", version)
        assert engine.ceiling("data", start, prefix) == (encode_key(1, b"key", 10), value)
        assert engine.ceilings("data", [prefix], [start]) == [(encode_key(1, b"key", 10), value)]
        rows = engine.at(version).scan("data", prefix, prefix + b"\xff" * 9, rows_max=2, bytes_max=1_000)
        assert rows == [(encode_key(1, b"key", 10), value)]
    assert engine.ceiling("data", prefix, prefix) == (encode_key(1, b"key", 10), b"7")


def test_a_reader_as_of_a_version_stays_in_its_generation_over_a_swap(engine: GenerationsEngine) -> None:
    def value(view: Engine) -> bytes:
        start = encode_key(1, b"key", 60)
        ((_, found),) = view.scan("data", start, start[:-8] + b"\xff" * 9, rows_max=2, bytes_max=1_000)
        return found

    unpublished = GenerationsEngine(engine.below)
    views = unpublished.at(60), engine.at(60)
    table = {FIRST: [Since(1, FIRST), Since(50, SECOND), Since(70, HIDDEN)]}
    for each in (unpublished, engine):
        each.show(table, [SECOND, HIDDEN])
        assert value(each) == b"8"
    assert [value(each) for each in views] == [b"1", b"7"]


def test_what_was_garbage_before_a_swap_is_removed_where_it_was(engine: GenerationsEngine) -> None:
    before, row = engine.pinned(), encode_key(1, b"key", 10)
    engine.show({FIRST: [Since(1, FIRST), Since(50, SECOND), Since(70, HIDDEN)]}, [SECOND, HIDDEN])
    before.remove([("data", row, None)])
    assert [engine.below.get("data", encode_key(each, b"key", 10)) for each in (1, 7, 8)] == [
        b"1",
        None,
        b"8",
    ]


def test_a_write_goes_to_the_present_generation(engine: GenerationsEngine) -> None:
    engine.write([("data", encode_key(1, b"key", 60), b"new"), ("data", encode_key(2, b"key", 60), b"other")])
    assert engine.below.get("data", encode_key(7, b"key", 60)) == b"new"
    assert engine.below.get("data", encode_key(2, b"key", 60)) == b"other"
    engine.delete_range("data", encode_key(1, b"", 60)[:4], encode_key(2, b"", 60)[:4])
    assert engine.below.get("data", encode_key(7, b"key", 60)) is None
    assert engine.below.get("data", encode_key(1, b"key", 10)) == b"1"
