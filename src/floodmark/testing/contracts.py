"""The contract of engines as tests.  Derive a class from `EngineContract` and give it an engine.

    class TestMyEngine(EngineContract):
        @pytest.fixture
        def engine(self, tmp_path):
            with closing(MyEngine(tmp_path, EngineContract.families)) as engine:
                yield engine

        @pytest.fixture
        def reopen(self, tmp_path, engine): ...

`reopen` closes the engine and opens it again.  Only durable engines have it; a class without it skips the
tests that need it.  Each test starts with an empty engine.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from threading import Barrier, Thread
from typing import Final, TypeAlias

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from floodmark.engine import Engine, Guard, Row, WriteRow
from floodmark.engine.base import BulkLoads
from floodmark.model.errors import Closed, StorageFailed
from floodmark.model.limits import MIB
from floodmark.model.ranges import after

Reopen: TypeAlias = Callable[[], Engine]

# Keys whose order is not that of text, of lengths or of signed bytes.
AWKWARD_KEYS: Final = (
    b"",
    b"\x00",
    b"\x00\x00",
    b"\x00\xff",
    b"A",
    b"Z",
    b"a",
    b"a\x00",
    b"aa",
    b"b",
    b"\x7f",
    b"\x80",
    b"\xfe\xff\xff",
    b"\xff",
    b"\xff\x00",
    b"\xff\xff",
)

LEFT: Final = "left"
RIGHT: Final = "right"

THREADS: Final = 4


def loading(engine: Engine) -> Callable[[str, Sequence[bytes], Sequence[bytes]], None]:
    """The engine's bulk load; the test of an engine without one is skipped."""
    if not isinstance(engine, BulkLoads):
        pytest.skip("this engine takes loads as batches of writes")
    return engine.load


class EngineReadContract:
    """Rows, families, keys and scans."""

    def test_a_written_row_is_read_back_and_others_are_absent(self, engine: Engine) -> None:
        assert engine.write([(LEFT, b"a", b"1")]) is True
        assert engine.get(LEFT, b"a") == b"1"
        assert engine.get(LEFT, b"b") is None

    def test_the_last_write_of_a_key_counts(self, engine: Engine) -> None:
        engine.write([(LEFT, b"a", b"1")])
        engine.write([(LEFT, b"a", b"2"), (LEFT, b"a", b"3")])
        assert engine.get(LEFT, b"a") == b"3"

    def test_an_empty_value_is_not_an_absent_one(self, engine: Engine) -> None:
        engine.write([(LEFT, b"a", b"")])
        assert engine.get(LEFT, b"a") == b""
        assert rows_of(engine) == [(b"a", b"")]

    def test_families_are_separate(self, engine: Engine) -> None:
        engine.write([(LEFT, b"a", b"1"), (RIGHT, b"b", b"2")])
        assert engine.get(RIGHT, b"a") is None
        assert engine.ceiling(RIGHT, b"") == (b"b", b"2")
        engine.delete_range(LEFT, b"", b"z")
        assert rows_of(engine, LEFT) == []
        assert rows_of(engine, RIGHT) == [(b"b", b"2")]

    def test_keys_are_compared_byte_by_byte(self, engine: Engine) -> None:
        engine.write([(LEFT, key, b"v" + key) for key in reversed(AWKWARD_KEYS)])
        expected = [(key, b"v" + key) for key in sorted(AWKWARD_KEYS)]
        assert rows_of(engine) == expected
        assert rows_of(engine, reverse=True) == expected[::-1]

    def test_get_many_answers_in_the_order_of_the_keys(self, engine: Engine) -> None:
        engine.write([(LEFT, b"a", b"1"), (LEFT, b"b", b"2")])
        assert engine.get_many(LEFT, [b"b", b"x", b"a", b"b"]) == [b"2", None, b"1", b"2"]
        assert engine.get_many(LEFT, []) == []

    def test_ceiling_is_the_first_row_at_or_after_a_key(self, engine: Engine) -> None:
        engine.write([(LEFT, b"b", b"1"), (LEFT, b"d", b"2"), (RIGHT, b"z", b"3")])
        assert engine.ceiling(LEFT, b"") == (b"b", b"1")
        assert engine.ceiling(LEFT, b"b") == (b"b", b"1")
        assert engine.ceiling(LEFT, b"b\x00") == (b"d", b"2")
        assert engine.ceiling(LEFT, b"e") is None

    def test_ceiling_finds_nothing_beyond_the_prefix_that_matters(self, engine: Engine) -> None:
        long = b"a prefix of some length/"
        rows: list[WriteRow] = [(LEFT, long + b"2", b"1"), (LEFT, b"a", b"2"), (LEFT, b"b", b"3")]
        assert engine.write(rows)
        assert engine.ceiling(LEFT, long, long) == (long + b"2", b"1")
        assert engine.ceiling(LEFT, long + b"1", long) == (long + b"2", b"1")
        assert engine.ceiling(LEFT, long + b"3", long) is None
        assert engine.ceiling(LEFT, b"a", b"a") == (b"a", b"2")
        assert engine.ceiling(LEFT, b"a\x00", b"a") == (long + b"2", b"1")
        assert engine.ceiling(LEFT, b"a\xff", b"a") is None

    def test_ceilings_are_the_ceiling_of_each_prefix(self, engine: Engine) -> None:
        long = b"a prefix of some length/"
        assert engine.write([(LEFT, long + b"2", b"1"), (LEFT, b"a", b"2"), (LEFT, b"b", b"3")])
        for prefixes in ([], [long], [b"z", long + b"1", long, b"b", b"", b"a"]):
            expected = [engine.ceiling(LEFT, prefix, prefix) for prefix in prefixes]
            assert engine.ceilings(LEFT, prefixes) == expected
        starts = [long + b"1", long + b"3", b"a\x00", b"b"]
        prefixes = [long, long, b"a", b"b"]
        expected = list(map(partial(engine.ceiling, LEFT), starts, prefixes))
        assert engine.ceilings(LEFT, prefixes, starts) == expected

    def test_large_values_and_batches_within_the_limits_are_taken(self, engine: Engine) -> None:
        assert 0 < engine.limits.value_bytes_max <= engine.limits.batch_bytes_max
        size = min(2 * MIB, engine.limits.value_bytes_max)
        count = min(5_000, engine.limits.batch_rows_max - 1)
        rows: list[WriteRow] = [(LEFT, index.to_bytes(4, "big"), b"x") for index in range(count)]
        engine.write([*rows, (RIGHT, b"large", bytes(size))])
        assert engine.get(RIGHT, b"large") == bytes(size)
        assert len(rows_of(engine)) == count

    # Scans

    def test_scan_is_half_open_and_ends_with_none_at_the_last_row(self, engine: Engine) -> None:
        engine.write([(LEFT, key, key) for key in (b"a", b"b", b"c", b"\xff\xff")])
        for reverse in (False, True):
            assert keys_of(engine, b"a", b"c", reverse=reverse) == [b"a", b"b"]
            assert keys_of(engine, b"b", None, reverse=reverse) == [b"b", b"c", b"\xff\xff"]
            assert keys_of(engine, b"a\x00", b"b\x00", reverse=reverse) == [b"b"]

    @pytest.mark.parametrize(
        ("start", "end"), [(b"", b""), (b"b", b"b"), (b"c", b"a"), (b"aa", b"ab"), (b"d", None), (b"d", b"e")]
    )
    def test_scan_of_an_empty_range_is_an_empty_page(
        self, engine: Engine, start: bytes, end: bytes | None
    ) -> None:
        engine.write([(LEFT, key, key) for key in (b"a", b"b", b"c")])
        for reverse in (False, True):
            assert engine.scan(LEFT, start, end, rows_max=9, bytes_max=MIB, reverse=reverse) == []

    @pytest.mark.parametrize("rows_max", [1, 2, 31, 32, 33, 1_000])
    def test_a_page_holds_at_most_rows_max_rows(self, engine: Engine, rows_max: int) -> None:
        engine.write([(LEFT, b"%03d" % index, b"x") for index in range(100)])
        for reverse in (False, True):
            sizes = [len(page) for page in pages_of(engine, rows_max=rows_max, reverse=reverse)]
            assert sum(sizes) == 100
            assert max(sizes) <= rows_max

    def test_a_page_ends_soon_after_bytes_max(self, engine: Engine) -> None:
        engine.write([(LEFT, b"%03d" % index, bytes(1_000)) for index in range(400)])
        for reverse in (False, True):
            pages = list(pages_of(engine, rows_max=400, bytes_max=10_000, reverse=reverse))
            assert sum(map(len, pages)) == 400
            assert max(map(len, pages)) <= 100

    def test_a_page_with_any_room_makes_headway(self, engine: Engine) -> None:
        engine.write([(LEFT, b"%03d" % index, bytes(1_000)) for index in range(10)])
        for reverse in (False, True):
            pages = pages_of(engine, rows_max=10, bytes_max=1, reverse=reverse)
            assert sum(map(len, pages)) == 10

    def test_a_reversed_page_goes_no_further_than_its_start(self, engine: Engine) -> None:
        engine.write([(LEFT, b"%03d" % index, b"x") for index in range(100)])
        page = engine.scan(LEFT, b"040", b"050", rows_max=64, bytes_max=MIB, reverse=True)
        assert [key for key, _ in page] == [b"%03d" % index for index in range(49, 39, -1)]


class EngineWriteContract:
    """Writes and guards."""

    def test_a_batch_is_visible_as_a_whole_when_it_returns(self, engine: Engine) -> None:
        engine.write([(LEFT, b"old", b"1")])
        engine.write([(LEFT, b"a", b"1"), (RIGHT, b"a", b"2"), (LEFT, b"old", None)])
        assert rows_of(engine, LEFT) == [(b"a", b"1")]
        assert rows_of(engine, RIGHT) == [(b"a", b"2")]

    def test_a_batch_that_cannot_be_taken_leaves_nothing(self, engine: Engine) -> None:
        with pytest.raises(KeyError):
            engine.write([(LEFT, b"a", b"1"), ("no such family", b"b", b"2")])
        assert rows_of(engine) == []

    def test_a_batch_whose_rows_run_out_with_an_error_leaves_nothing(self, engine: Engine) -> None:
        def rows() -> Iterator[WriteRow]:
            yield LEFT, b"a", b"1"
            raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError):
            engine.write(rows())
        assert rows_of(engine) == []
        assert engine.write([(LEFT, b"b", b"2")])

    def test_an_empty_batch_is_written(self, engine: Engine) -> None:
        assert engine.write([]) is True
        assert rows_of(engine) == []

    def test_none_deletes_a_key_whether_or_not_it_is_there(self, engine: Engine) -> None:
        engine.write([(LEFT, b"a", b"1"), (LEFT, b"b", b"2")])
        engine.write([(LEFT, b"a", None), (LEFT, b"never", None)])
        assert engine.get(LEFT, b"a") is None
        assert rows_of(engine) == [(b"b", b"2")]

    def test_rows_of_a_batch_are_applied_in_their_order(self, engine: Engine) -> None:
        engine.write([(LEFT, b"a", None), (LEFT, b"a", b"1"), (LEFT, b"b", b"2"), (LEFT, b"b", None)])
        assert rows_of(engine) == [(b"a", b"1")]

    def test_delete_range_is_half_open(self, engine: Engine) -> None:
        engine.write([(LEFT, key, key) for key in (b"a", b"b", b"b\x00", b"c", b"d")])
        engine.delete_range(LEFT, b"b", b"c")
        assert keys_of(engine) == [b"a", b"c", b"d"]

    @pytest.mark.parametrize(("start", "end"), [(b"", b""), (b"b", b"b"), (b"c", b"a"), (b"aa", b"ab")])
    def test_delete_range_of_an_empty_range_removes_nothing(
        self, engine: Engine, start: bytes, end: bytes
    ) -> None:
        engine.write([(LEFT, key, key) for key in (b"a", b"b", b"c")])
        engine.delete_range(LEFT, start, end)
        assert keys_of(engine) == [b"a", b"b", b"c"]

    def test_a_deleted_range_can_be_written_again(self, engine: Engine) -> None:
        engine.write([(LEFT, b"a", b"1"), (LEFT, b"b", b"1")])
        engine.delete_range(LEFT, b"a", b"z")
        engine.write([(LEFT, b"b", b"2")])
        assert rows_of(engine) == [(b"b", b"2")]

    # Loads

    def test_loaded_rows_are_read_among_others(self, engine: Engine) -> None:
        load = loading(engine)
        engine.write([(LEFT, b"a", b"1"), (LEFT, b"c", b"1"), (RIGHT, b"b", b"1")])
        load(LEFT, [b"b", b"c", b"d"], [b"2", b"2", b""])
        engine.write([(LEFT, b"d", b"3")])
        assert rows_of(engine, LEFT) == [(b"a", b"1"), (b"b", b"2"), (b"c", b"2"), (b"d", b"3")]
        assert engine.get(LEFT, b"c") == b"2"
        assert rows_of(engine, RIGHT) == [(b"b", b"1")]

    def test_loading_again_changes_nothing_and_a_range_of_it_can_be_deleted(self, engine: Engine) -> None:
        load = loading(engine)
        keys = [b"%05d" % index for index in range(3_000)]
        for _ in range(3):
            load(LEFT, keys, keys)
        assert keys_of(engine) == keys
        engine.delete_range(LEFT, b"", b"1")
        assert rows_of(engine, LEFT) == []
        load(LEFT, keys, keys)
        assert keys_of(engine) == keys

    def test_rows_out_of_order_are_not_loaded_and_others_are_afterwards(self, engine: Engine) -> None:
        load = loading(engine)
        for keys in ([b"b", b"a"], [b"a", b"a"]):
            with pytest.raises(StorageFailed):
                load(LEFT, keys, keys)
        assert rows_of(engine, LEFT) == []
        load(LEFT, [b"a", b"b"], [b"1", b"2"])
        assert engine.get(LEFT, b"b") == b"2"

    def test_what_was_loaded_is_there_after_reopening(self, engine: Engine, reopen: Reopen) -> None:
        load = loading(engine)
        load(LEFT, [b"a", b"b"], [b"1", b"2"])
        assert rows_of(reopen(), LEFT) == [(b"a", b"1"), (b"b", b"2")]

    # Guards

    def test_a_write_whose_guard_holds_happens(self, engine: Engine) -> None:
        engine.write([(LEFT, b"guard", b"1")])
        assert engine.write([(RIGHT, b"a", b"x")], [Guard(LEFT, b"guard", b"1")]) is True
        assert engine.get(RIGHT, b"a") == b"x"

    def test_a_write_whose_guard_fails_leaves_nothing(self, engine: Engine) -> None:
        engine.write([(LEFT, b"guard", b"1")])
        for expected in (b"2", b"", None):
            assert engine.write([(RIGHT, b"a", b"x")], [Guard(LEFT, b"guard", expected)]) is False
        assert engine.write([(RIGHT, b"a", b"x")], [Guard(LEFT, b"absent", b"")]) is False
        assert rows_of(engine, RIGHT) == []

    def test_a_guard_that_expects_none_holds_only_while_the_key_is_absent(self, engine: Engine) -> None:
        guard = [Guard(LEFT, b"guard", None)]
        assert engine.write([(LEFT, b"guard", b"mine")], guard) is True
        assert engine.write([(LEFT, b"guard", b"theirs")], guard) is False
        assert engine.get(LEFT, b"guard") == b"mine"
        engine.write([(LEFT, b"guard", None)])
        assert engine.write([(LEFT, b"guard", b"theirs")], guard) is True

    def test_rows_change_only_if_all_guards_hold(self, engine: Engine) -> None:
        engine.write([(LEFT, b"fence", b"1"), (RIGHT, b"keeper", b"2")])
        fence, keeper = Guard(LEFT, b"fence", b"1"), Guard(RIGHT, b"keeper", b"2")
        absent = Guard(LEFT, b"z", None)
        assert engine.write([(LEFT, b"a", b"x")], [fence, keeper, absent]) is True
        for broken in (fence._replace(expected=b"2"), keeper._replace(expected=None)):
            assert engine.write([(LEFT, b"b", b"x")], [fence, keeper, absent, broken]) is False
            assert engine.delete_range(LEFT, b"a", b"b", [keeper, broken, fence]) is False
        assert keys_of(engine) == [b"a", b"fence"]
        assert engine.delete_range(LEFT, b"a", b"b", [absent, keeper, fence]) is True
        assert keys_of(engine) == [b"fence"]


class EngineLifeContract:
    """Durability, closing and threads."""

    @pytest.fixture
    def reopen(self) -> Reopen:
        """A function that closes the engine and opens it again with its stored rows."""
        pytest.skip("this engine keeps nothing")

    # Durability

    def test_sync_and_recover_leave_what_was_written(self, engine: Engine) -> None:
        engine.write([(LEFT, b"a", b"1")])
        engine.sync()
        engine.write([(LEFT, b"b", b"2")])
        engine.recover()
        assert rows_of(engine) == [(b"a", b"1"), (b"b", b"2")]
        engine.write([(LEFT, b"c", b"3")])
        engine.sync()
        assert keys_of(engine) == [b"a", b"b", b"c"]

    def test_what_was_written_and_removed_is_so_after_reopening(self, engine: Engine, reopen: Reopen) -> None:
        engine.write([(LEFT, b"%d" % index, b"1") for index in range(10)])
        engine.write([(LEFT, b"3", None), (RIGHT, b"r", b"2")])
        engine.delete_range(LEFT, b"5", b"8")
        engine.sync()
        again = reopen()
        assert keys_of(again) == [b"0", b"1", b"2", b"4", b"8", b"9"]
        assert rows_of(again, RIGHT) == [(b"r", b"2")]

    def test_close_syncs(self, engine: Engine, reopen: Reopen) -> None:
        engine.write([(LEFT, b"a", b"1")])
        assert reopen().get(LEFT, b"a") == b"1"

    def test_sizes_name_every_family_and_grow(self, engine: Engine) -> None:
        before = engine.sizes()
        engine.write([(LEFT, b"%d" % index, bytes(10_000)) for index in range(500)])
        engine.sync()
        after_write = engine.sizes()
        assert set(before) == set(after_write) == {LEFT, RIGHT}
        assert all(size >= 0 for size in before.values())
        assert after_write[LEFT] > before[LEFT]

    # Closing

    def test_closing_twice_is_harmless(self, engine: Engine) -> None:
        engine.write([(LEFT, b"a", b"1")])
        engine.close()
        engine.close()

    @pytest.mark.parametrize("name", ["get", "get_many", "ceiling", "scan", "reverse scan", "write"])
    def test_rows_cannot_be_used_after_close(self, engine: Engine, name: str) -> None:
        uses: dict[str, Callable[[], object]] = {
            "get": lambda: engine.get(LEFT, b"a"),
            "get_many": lambda: engine.get_many(LEFT, [b"a"]),
            "ceiling": lambda: engine.ceiling(LEFT, b"a"),
            "scan": lambda: engine.scan(LEFT, b"", None, rows_max=1, bytes_max=1),
            "reverse scan": lambda: engine.scan(LEFT, b"", None, rows_max=1, bytes_max=1, reverse=True),
            "write": lambda: engine.write([(LEFT, b"a", b"2")]),
        }
        engine.write([(LEFT, b"a", b"1")])
        engine.close()
        with pytest.raises(Closed):
            uses[name]()

    @pytest.mark.parametrize("name", ["guarded write", "delete_range", "sync", "recover", "sizes"])
    def test_the_engine_cannot_be_used_after_close(self, engine: Engine, name: str) -> None:
        uses: dict[str, Callable[[], object]] = {
            "guarded write": lambda: engine.write([], [Guard(LEFT, b"a", b"1")]),
            "delete_range": lambda: engine.delete_range(LEFT, b"a", b"b"),
            "sync": engine.sync,
            "recover": engine.recover,
            "sizes": engine.sizes,
        }
        engine.write([(LEFT, b"a", b"1")])
        engine.close()
        with pytest.raises(Closed):
            uses[name]()

    # Threads

    def test_threads_write_side_by_side(self, engine: Engine) -> None:
        def work(number: int) -> None:
            for index in range(50):
                key = b"%d-%02d" % (number, index)
                engine.write([(LEFT, key, b"x"), (RIGHT, key, b"x")])
                assert engine.get(LEFT, key) == b"x"
            engine.sync()

        run_threads(work)
        assert len(rows_of(engine, LEFT)) == len(rows_of(engine, RIGHT)) == THREADS * 50

    def test_a_page_never_shows_half_a_batch(self, engine: Engine) -> None:
        def work(number: int) -> None:
            for index in range(100):
                value = b"%d-%d" % (number, index)
                if number % 2:
                    engine.write([(LEFT, b"a", value), (LEFT, b"z", value)])
                else:
                    page = engine.scan(LEFT, b"", None, rows_max=9, bytes_max=MIB)
                    assert len({value for _, value in page}) <= 1

        run_threads(work)

    def test_guards_of_many_threads_let_one_through_at_a_time(self, engine: Engine) -> None:
        def work(number: int) -> None:
            for index in range(25):
                while True:
                    held = engine.get(LEFT, b"count")
                    count = 0 if held is None else int(held)
                    mine = (RIGHT, b"%d-%d" % (number, index), b"x")
                    if engine.write(
                        [(LEFT, b"count", b"%d" % (count + 1)), mine], [Guard(LEFT, b"count", held)]
                    ):
                        break

        run_threads(work)
        assert engine.get(LEFT, b"count") == b"%d" % (THREADS * 25)
        assert len(rows_of(engine, RIGHT)) == THREADS * 25


class EngineContract(EngineReadContract, EngineWriteContract, EngineLifeContract):
    """The contract of `floodmark.engine.Engine`, sentence by sentence."""

    families = (LEFT, RIGHT)

    def test_any_history_reads_like_a_plain_dict(self, engine: Engine) -> None:
        @settings(deadline=None, derandomize=True, database=None)
        @given(st.lists(STEPS, max_size=12))
        def compare(steps: list[Step]) -> None:
            model: dict[str, dict[bytes, bytes]] = {family: {} for family in self.families}
            for family in self.families:
                engine.write([(family, key, None) for key, _ in rows_of(engine, family)])
            for step in steps:
                take_step(engine, model, step)
            for family, rows in model.items():
                compare_reads(engine, family, rows)

        compare()


# Writes with guards, or a family and the range to delete from it.
Step: TypeAlias = tuple[list[WriteRow], list[Guard]] | tuple[str, bytes, bytes]

KEYS: Final = st.binary(max_size=2) | st.sampled_from(AWKWARD_KEYS)
VALUES: Final = st.binary(max_size=3)
FAMILIES: Final = st.sampled_from(EngineContract.families)
ROWS: Final = st.tuples(FAMILIES, KEYS, st.none() | VALUES)
GUARDS: Final = st.builds(Guard, FAMILIES, KEYS, st.none() | VALUES)
STEPS: Final[st.SearchStrategy[Step]] = st.one_of(
    st.tuples(st.lists(ROWS, max_size=6), st.lists(GUARDS, max_size=2)),
    st.tuples(FAMILIES, KEYS, KEYS),
)


def take_step(engine: Engine, model: dict[str, dict[bytes, bytes]], step: Step) -> None:
    """Apply one step to an engine and to the model of dicts that it must equal."""
    if len(step) == 3:
        family, start, end = step
        engine.delete_range(family, start, end)
        model[family] = {key: value for key, value in model[family].items() if not start <= key < end}
        return
    rows, guards = step
    holds = all(model[each.family].get(each.key) == each.expected for each in guards)
    assert engine.write(iter(rows), guards) is holds
    for family, key, new in rows if holds else ():
        if new is None:
            model[family].pop(key, None)
        else:
            model[family][key] = new


def compare_reads(engine: Engine, family: str, rows: dict[bytes, bytes]) -> None:
    """All ways of reading a family must give the rows of a dict."""
    expected = sorted(rows.items())
    probes = sorted({*AWKWARD_KEYS, *rows})
    assert rows_of(engine, family) == expected
    assert rows_of(engine, family, rows_max=2, reverse=True) == expected[::-1]
    assert engine.get_many(family, probes) == [rows.get(key) for key in probes]
    for key in probes:
        assert engine.get(family, key) == rows.get(key)
        ceiling = next((row for row in expected if row[0] >= key), None)
        for prefix in [key[:length] for length in range(len(key) + 1)]:
            reached = ceiling if ceiling is not None and ceiling[0].startswith(prefix) else None
            assert engine.ceiling(family, key, prefix) == reached
    middle = probes[len(probes) // 2]
    for start, end in ((b"", middle), (middle, None), (probes[1], middle)):
        within = [key for key, _ in expected if start <= key and (end is None or key < end)]
        assert keys_of(engine, start, end, family=family) == within


def pages_of(
    engine: Engine,
    start: bytes = b"",
    end: bytes | None = None,
    *,
    family: str = LEFT,
    rows_max: int = 1_000,
    bytes_max: int = MIB,
    reverse: bool = False,
) -> Iterator[list[Row]]:
    """The pages of a range, each beginning after the previous one, up to the empty page."""
    while page := engine.scan(family, start, end, rows_max=rows_max, bytes_max=bytes_max, reverse=reverse):
        yield page
        start, end = (start, page[-1][0]) if reverse else (after(page[-1][0]), end)


def rows_of(engine: Engine, family: str = LEFT, *, rows_max: int = 1_000, reverse: bool = False) -> list[Row]:
    """All rows of a family."""
    return [
        row for page in pages_of(engine, family=family, rows_max=rows_max, reverse=reverse) for row in page
    ]


def keys_of(
    engine: Engine, start: bytes = b"", end: bytes | None = None, *, family: str = LEFT, reverse: bool = False
) -> list[bytes]:
    """The keys of a range in order, read in pages of two, forwards or backwards."""
    pages = pages_of(engine, start, end, family=family, rows_max=2, reverse=reverse)
    keys = [key for page in pages for key, _ in page]
    return keys[::-1] if reverse else keys


def run_threads(work: Callable[[int], None]) -> None:
    """Run `work` in concurrent threads, each with its number; raise the error of one that failed."""
    barrier = Barrier(THREADS)
    errors: list[BaseException] = []

    def run(number: int) -> None:
        barrier.wait()
        try:
            work(number)
        except BaseException as error:
            errors.append(error)

    threads = [Thread(target=run, args=(number,)) for number in range(THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
