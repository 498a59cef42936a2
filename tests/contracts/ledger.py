"""What every ledger must do, as tests.  Derive a class from `LedgerContract` and give it a ledger.

    class TestMyLedger(LedgerContract):
        @pytest.fixture
        def open_ledger(self, tmp_path):
            return lambda settings, time_source: MyLedger(tmp_path, settings, time_source=time_source)

A ledger that keeps what it holds is opened over and over on the same storage, and must go on where it was;
one that does not says so by `keeps = False`.
"""

from collections.abc import Callable
from typing import ClassVar, TypeAlias

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.sizes import scaled

from floodmark.clock import TimeSource
from floodmark.log import EntryId, Ledger, LedgerSettings
from floodmark.model.errors import Closed, InvalidArgument
from floodmark.model.limits import MIB
from floodmark.testing.clock import SimulatedTime

OpenLedger: TypeAlias = Callable[[LedgerSettings, TimeSource], Ledger]

ROOMY = LedgerSettings()


class LedgerContract:
    """The contract of `floodmark.log.Ledger`, sentence by sentence."""

    keeps: ClassVar[bool] = True
    times: ClassVar[float] = 0.5

    @pytest.fixture
    def ledger(self, open_ledger: OpenLedger) -> Ledger:
        return open_ledger(ROOMY, SimulatedTime())

    def reopened(self, ledger: Ledger, open_ledger: OpenLedger) -> Ledger:
        """The same ledger after a restart, where there is such a thing."""
        return open_ledger(ROOMY, SimulatedTime()) if self.keeps else ledger

    # Entries

    def test_entries_are_read_back_in_order_with_growing_ids(
        self, ledger: Ledger, open_ledger: OpenLedger
    ) -> None:
        ids = [ledger.append(b"%d" % number) for number in range(5)]
        assert ids == sorted(set(ids))
        expected = [(entry, b"%d" % number) for number, entry in enumerate(ids)]
        assert entries_of(ledger) == expected
        assert entries_of(self.reopened(ledger, open_ledger)) == expected

    def test_an_empty_ledger_has_no_entries_and_no_segments(self, ledger: Ledger) -> None:
        assert entries_of(ledger) == []
        assert ledger.segments() == []
        assert ledger.marks() == {}

    def test_an_empty_entry_is_an_entry(self, ledger: Ledger) -> None:
        entry = ledger.append(b"")
        assert entries_of(ledger) == [(entry, b"")]

    def test_a_page_ends_by_entries_or_soon_after_bytes_and_the_next_goes_on(self, ledger: Ledger) -> None:
        ids = [ledger.append(bytes(100)) for _ in range(100)]
        assert [entry for entry, _ in ledger.read(entries_max=7, bytes_max=MIB)] == ids[:7]
        assert [entry for entry, _ in ledger.read(ids[7], entries_max=1, bytes_max=MIB)] == [ids[7]]
        assert 1 <= len(ledger.read(entries_max=100, bytes_max=1)) <= 50
        assert [entry for entry, _ in entries_of(ledger, entries_max=3)] == ids
        assert [entry for entry, _ in entries_of(ledger, bytes_max=250)] == ids
        assert ledger.read(ids[-1] + 1, entries_max=9, bytes_max=MIB) == []

    def test_ids_are_not_given_out_again_when_all_is_gone(
        self, ledger: Ledger, open_ledger: OpenLedger
    ) -> None:
        last = [ledger.append(b"x") for _ in range(3)][-1]
        ledger.mark({entry: None for entry, _ in entries_of(ledger)})
        again = self.reopened(ledger, open_ledger)
        assert entries_of(again) == []
        assert again.append(b"y") > last

    # Marks

    def test_marks_are_kept_with_their_entries(self, ledger: Ledger, open_ledger: OpenLedger) -> None:
        first, second = ledger.append(b"1"), ledger.append(b"2")
        ledger.mark({first: b"\x05"})
        ledger.mark({first: b"\x04", second: b"\x01"})
        again = self.reopened(ledger, open_ledger)
        assert again.marks() == {first: b"\x04", second: b"\x01"}
        assert entries_of(again) == [(first, b"1"), (second, b"2")]

    def test_an_entry_that_is_marked_gone_goes_with_its_marks(
        self, ledger: Ledger, open_ledger: OpenLedger
    ) -> None:
        first, second, third = (ledger.append(b"x") for _ in range(3))
        ledger.mark({second: b"\x01"})
        ledger.mark({second: None})
        for again in (ledger, self.reopened(ledger, open_ledger)):
            assert [entry for entry, _ in entries_of(again)] == [first, third]
            assert again.marks() == {}

    def test_marks_can_come_with_an_append(self, ledger: Ledger, open_ledger: OpenLedger) -> None:
        first, second = ledger.append(b"1"), ledger.append(b"2")
        third = ledger.append(b"3", {first: None, second: b"\x02"})
        again = self.reopened(ledger, open_ledger)
        assert [entry for entry, _ in entries_of(again)] == [second, third]
        assert again.marks() == {second: b"\x02"}

    def test_marks_of_entries_that_are_not_there_are_ignored(self, ledger: Ledger) -> None:
        entry = ledger.append(b"x")
        ledger.mark({entry: None})
        ledger.mark({entry: b"\x01", entry + 7: b"\x01", 0: None})
        ledger.append(b"y", {entry: b"\x01"})
        assert ledger.marks() == {}
        assert [content for _, content in entries_of(ledger)] == [b"y"]

    # Trimming

    @pytest.mark.parametrize("kept", [0, 1, 4, 5])
    def test_trim_removes_all_below(self, ledger: Ledger, open_ledger: OpenLedger, kept: int) -> None:
        ids = [ledger.append(b"%d" % number) for number in range(5)]
        ledger.mark({ids[1]: b"\x01"})
        remove_below(ledger, ids[-kept] if kept else ids[-1] + 1)
        for again in (ledger, self.reopened(ledger, open_ledger)):
            assert [entry for entry, _ in entries_of(again)] == ids[5 - kept :]
            assert set(again.marks()) == set(ids[5 - kept :]) & {ids[1]}

    def test_a_long_history_that_is_gone_leaves_what_is_live(
        self, ledger: Ledger, open_ledger: OpenLedger
    ) -> None:
        old = ledger.append(b"old")
        for number in range(300):
            ledger.append(b"%d" % number, {entry: None for entry, _ in ledger.read(old + 1, **ONE)})
        newest = entries_of(ledger)[-1][0]
        assert entries_of(self.reopened(ledger, open_ledger)) == [(old, b"old"), (newest, b"299")]
        remove_below(ledger, newest)
        for number in range(300):
            newest = ledger.append(b"%d" % number, {newest: None})
        assert entries_of(self.reopened(ledger, open_ledger)) == [(newest, b"299")]

    # Segments

    @pytest.mark.parametrize(("sizes", "expected"), [([4, 5], [2]), ([4, 6], [2]), ([4, 7], [1, 1])])
    def test_a_segment_is_closed_by_size(
        self, open_ledger: OpenLedger, sizes: list[int], expected: list[int]
    ) -> None:
        ledger = open_ledger(LedgerSettings(segment_bytes_max=10), SimulatedTime())
        for size in sizes:
            ledger.append(bytes(size))
        assert [segment.entries for segment in ledger.segments()] == expected

    def test_an_entry_larger_than_a_segment_has_one_of_its_own(self, open_ledger: OpenLedger) -> None:
        ledger = open_ledger(LedgerSettings(segment_bytes_max=10), SimulatedTime())
        for size in (11, 1, 11):
            ledger.append(bytes(size))
        assert [segment.bytes for segment in ledger.segments()] == [11, 1, 11]

    @pytest.mark.parametrize(("passed_ms", "segments"), [(999, 1), (1_000, 2), (1_001, 2), (-5_000, 1)])
    def test_a_segment_is_closed_by_age_and_a_clock_that_jumps_back_does_no_harm(
        self, open_ledger: OpenLedger, passed_ms: int, segments: int
    ) -> None:
        time = SimulatedTime(1_000_000)
        ledger = open_ledger(LedgerSettings(segment_age_ms_max=1_000), time)
        first = ledger.append(b"a")
        time.advance(passed_ms)
        second = ledger.append(b"b")
        assert [segment.first for segment in ledger.segments()] == [first, second][:segments]
        assert ledger.segments()[-1].opened_ms == (1_000_000 + passed_ms if segments == 2 else 1_000_000)

    def test_segments_count_what_is_there_and_go_when_it_is_gone(self, open_ledger: OpenLedger) -> None:
        tight = LedgerSettings(segment_bytes_max=10)
        ledger = open_ledger(tight, SimulatedTime())
        ids = [ledger.append(bytes(5)) for _ in range(6)]
        assert [segment.id for segment in ledger.segments()] == [1, 2, 3]
        ledger.mark({ids[0]: None, ids[2]: None, ids[3]: None})
        expected = [(1, ids[0], 1, 5), (3, ids[4], 2, 10)]
        assert [segment[:4] for segment in ledger.segments()] == expected
        if self.keeps:
            assert [segment[:4] for segment in open_ledger(tight, SimulatedTime()).segments()] == expected

    def test_the_last_segment_stays_until_the_next_begins(self, open_ledger: OpenLedger) -> None:
        tight = LedgerSettings(segment_bytes_max=10)
        ledger = open_ledger(tight, SimulatedTime())
        ledger.mark({ledger.append(bytes(8)): None})
        assert [segment[2:4] for segment in ledger.segments()] == [(0, 0)]
        last = ledger.append(bytes(8))
        assert [segment[:4] for segment in ledger.segments()] == [(2, last, 1, 8)]
        if self.keeps:
            assert [segment[:4] for segment in open_ledger(tight, SimulatedTime()).segments()] == [
                (2, last, 1, 8)
            ]

    @pytest.mark.parametrize("wrong", [{"segment_bytes_max": 0}, {"segment_age_ms_max": 0}])
    def test_settings_that_make_no_sense_are_refused(self, wrong: dict[str, int]) -> None:
        with pytest.raises(InvalidArgument):
            LedgerSettings(**wrong)

    # Deleting

    def test_a_deleted_ledger_is_gone_and_cannot_be_used(
        self, ledger: Ledger, open_ledger: OpenLedger
    ) -> None:
        ledger.append(b"x")
        ledger.delete()
        ledger.delete()
        uses: list[Callable[[], object]] = [
            lambda: ledger.append(b"y"),
            lambda: ledger.mark({1: None}),
            lambda: ledger.read(entries_max=1, bytes_max=1),
            ledger.marks,
            ledger.segments,
        ]
        for use in uses:
            with pytest.raises(Closed, match="deleted"):
                use()
        if self.keeps:
            again = open_ledger(ROOMY, SimulatedTime())
            assert entries_of(again) == []
            assert again.segments() == []

    # All of it, against a plain dict

    def test_any_history_reads_like_a_plain_dict(self, open_ledger: OpenLedger) -> None:
        @scaled(self.times)
        @given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 30)), max_size=40))
        def compare(steps: list[tuple[int, int]]) -> None:
            ledger = open_ledger(LedgerSettings(segment_bytes_max=20), SimulatedTime())
            remove_below(ledger, 1 << 62)
            self._compare(ledger, open_ledger, steps)

        compare()

    def _compare(self, ledger: Ledger, open_ledger: OpenLedger, steps: list[tuple[int, int]]) -> None:
        model: dict[EntryId, bytes] = {}
        marks: dict[EntryId, bytes] = {}
        ids = [0]
        for kind, number in steps:
            entry = ids[number % len(ids)]
            if kind <= 2:
                gone = {entry: None} if kind == 1 else {}
                ids.append(ledger.append(bytes(number), gone))
                model[ids[-1]] = bytes(number)
            elif kind == 3:
                ledger.mark({entry: b"%d" % number})
                marks[entry] = b"%d" % number
            elif kind == 4:
                ledger.mark({entry: None})
            else:
                remove_below(ledger, entry)
            if kind in (1, 4):
                model.pop(entry, None)
            if kind == 5:
                model = {held: content for held, content in model.items() if held >= entry}
            marks = {held: bits for held, bits in marks.items() if held in model}
        for again in (ledger, self.reopened(ledger, open_ledger)):
            assert entries_of(again, entries_max=3) == sorted(model.items())
            assert again.marks() == marks
            assert sum(segment.entries for segment in again.segments()) == len(model)
            assert sum(segment.bytes for segment in again.segments()) == sum(map(len, model.values()))


ONE = {"entries_max": 1, "bytes_max": 1}


def remove_below(ledger: Ledger, before: EntryId) -> None:
    """Remove all entries below one."""
    ledger.mark({entry: None for entry, _ in entries_of(ledger) if entry < before})


def entries_of(
    ledger: Ledger, *, entries_max: int = 1_000, bytes_max: int = MIB
) -> list[tuple[EntryId, bytes]]:
    """All entries of a ledger, page by page."""
    entries: list[tuple[EntryId, bytes]] = []
    start = 0
    while page := ledger.read(start, entries_max=entries_max, bytes_max=bytes_max):
        entries += page
        start = page[-1][0] + 1
    return entries
