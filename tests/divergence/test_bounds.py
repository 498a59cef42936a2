"""The tables of Venice's VIP-2, and the examples of its own checker."""

from random import Random

import pytest

from floodmark.divergence.bounds import BoundedSide, heartbeat_bounds, high_watermark, verdict_bounded
from floodmark.divergence.rules import Verdict, covers

Positions = dict[int, int]

COLO_A = {1: 3, 2: 199, 3: 4500}
COLO_B = {1: 4, 2: 199, 3: 4900}
RECORDS_A: list[Positions] = [{2: 200}, {2: 201}, {1: 5}, {3: 5001}]
RECORDS_B: list[Positions] = [{2: 200}, {3: 4950}, {2: 300}, {1: 20}]


def vector(*positions: int) -> Positions:
    """A list of positions, by the numbers of its places."""
    return dict(enumerate(positions, start=1))


@pytest.mark.parametrize(
    ("heartbeat", "records", "table"),
    [
        (COLO_A, RECORDS_A, ["{<3, 200, <4500}", "{<3, 201, <4500}", "{5, <199, <4500}", "{<3, <199, 5001}"]),
        (
            COLO_B,
            RECORDS_B,
            ["{<4, 200, <4900}", "{<4, <199, 4950}", "{<4, 300, <4900}", "{20, <199, <4900}"],
        ),
    ],
)
def test_records_are_bounded_by_the_last_heartbeat(
    heartbeat: Positions, records: list[Positions], table: list[str]
) -> None:
    assert [str(heartbeat_bounds(heartbeat, record)) for record in records] == table


def test_whole_vectors_make_a_watermark() -> None:
    records = [vector(1, 200, 5000), vector(0, 201, 4000), vector(5, 195, 3000)]
    mark = high_watermark({}, records)
    assert mark == vector(5, 201, 5000)
    assert not covers(mark, vector(3, 205, 5001))


def test_without_a_heartbeat_nothing_can_be_said_about_a_site_that_was_not_heard_of() -> None:
    mark = high_watermark({}, RECORDS_A[:3])
    assert mark == {1: 5, 2: 201}
    assert not covers(mark, RECORDS_A[3])
    assert not covers(mark, {3: 1})


@pytest.mark.parametrize(
    ("heartbeat", "mark"),
    [
        ({3: 4500}, {1: 5, 2: 201, 3: 4500}),
        ({2: 199}, {1: 5, 2: 201}),
        (COLO_A, {1: 5, 2: 201, 3: 4500}),
    ],
)
def test_a_heartbeat_is_where_a_watermark_begins(heartbeat: Positions, mark: Positions) -> None:
    assert high_watermark(heartbeat, RECORDS_A[:3]) == mark
    assert not covers(mark, RECORDS_A[3])


def bounded_sides(left: int, right: int) -> tuple[BoundedSide, BoundedSide]:
    """A key whose last record is one of each colo, when both have been read to their ends."""
    return (
        BoundedSide(1, heartbeat_bounds(COLO_A, RECORDS_A[left]).upper, high_watermark(COLO_A, RECORDS_A)),
        BoundedSide(2, heartbeat_bounds(COLO_B, RECORDS_B[right]).upper, high_watermark(COLO_B, RECORDS_B)),
    )


@pytest.mark.parametrize(
    ("left", "right", "expected"),
    [
        # B has consumed 5001 of site 3 nowhere, and A 300 of site 2 nowhere, nor 20 of site 1.
        (0, 0, Verdict.VALUE_MISMATCH),
        (1, 0, Verdict.VALUE_MISMATCH),
        (2, 1, Verdict.VALUE_MISMATCH),
        (0, 2, Verdict.LAG),
        (0, 3, Verdict.LAG),
        (3, 0, Verdict.LAG),
    ],
)
def test_colos_that_differ_have_drifted_if_each_has_consumed_what_the_other_holds(
    left: int, right: int, expected: Verdict
) -> None:
    assert verdict_bounded(*bounded_sides(left, right)) is expected


@pytest.mark.parametrize(
    ("mark_1", "vector_1", "mark_2", "vector_2", "expected"),
    [
        (vector(10, 20, 1500), vector(3, 0), vector(20, 40, 1600), vector(20, 39), Verdict.LAG),
        (vector(10, 40, 1500), vector(3, 25), vector(10, 20, 1500), vector(10, 19), Verdict.LAG),
        (vector(20, 40, 1600), vector(3, 0), vector(20, 40, 1600), vector(20, 39), Verdict.VALUE_MISMATCH),
        ({}, vector(3, 0), vector(20, 40, 1600), vector(20, 39), Verdict.LAG),
        (vector(20, 40, 1600), {}, vector(20, 40, 1600), vector(20, 39), Verdict.LAG),
    ],
)
def test_whole_vectors_are_judged_as_venice_judges_them(
    mark_1: Positions, vector_1: Positions, mark_2: Positions, vector_2: Positions, expected: Verdict
) -> None:
    assert verdict_bounded(BoundedSide(1, vector_1, mark_1), BoundedSide(2, vector_2, mark_2)) is expected
    assert (
        verdict_bounded(BoundedSide(1, vector_1, mark_1), BoundedSide(1, vector_2, mark_2)) is Verdict.AGREE
    )


def test_a_key_that_only_one_log_has_is_missing_in_the_other_once_that_has_read_so_far() -> None:
    record = heartbeat_bounds(COLO_A, RECORDS_A[0]).upper
    there = BoundedSide(1, record, high_watermark(COLO_A, RECORDS_A))
    early, late = BoundedSide(None, {}, COLO_B), BoundedSide(None, {}, {1: 4, 2: 200, 3: 4900})
    assert verdict_bounded(there, early) is Verdict.LAG
    assert verdict_bounded(there, late) is Verdict.MISSING_RIGHT
    assert verdict_bounded(late, there) is Verdict.MISSING_LEFT


def test_bounds_may_be_too_high_to_tell_what_exact_vectors_could() -> None:
    """The record was made of position 2 of site 1 at most, and the heartbeat only knows that it was not 4."""
    mark = vector(3, 300, 5000)
    exact = BoundedSide(1, {1: 2, 2: 200}, vector(4, 300, 5000)), BoundedSide(2, {2: 199}, mark)
    bounded = (
        BoundedSide(1, heartbeat_bounds(COLO_B, {2: 200}).upper, vector(4, 300, 5000)),
        BoundedSide(2, {2: 199}, mark),
    )
    assert verdict_bounded(*exact) is Verdict.VALUE_MISMATCH
    assert verdict_bounded(*bounded) is Verdict.LAG


@pytest.mark.parametrize(
    ("before", "expected"), [([], Verdict.VALUE_MISMATCH), ([{2: 200}], Verdict.LAG)], ids=["vip-2", "whole"]
)
def test_a_write_that_stands_between_heartbeat_and_record_has_to_be_in_the_bound(
    before: list[Positions], expected: Verdict
) -> None:
    """The left record is made of two writes, and only one of them has come to the right."""
    heartbeat: Positions = {1: 3, 2: 199}
    bounds = heartbeat_bounds(high_watermark(heartbeat, before), {1: 5})
    left = BoundedSide(1, bounds.upper, high_watermark(heartbeat, [{2: 200}, {1: 5}]))
    right = BoundedSide(2, heartbeat_bounds(heartbeat, {1: 5}).upper, high_watermark(heartbeat, [{1: 5}]))
    assert verdict_bounded(left, right) is expected
    exact = BoundedSide(1, {1: 5, 2: 200}, left.mark), BoundedSide(2, {1: 5}, right.mark)
    assert verdict_bounded(*exact) is Verdict.LAG


class Log:
    """The log of a process that consumes three sites in its own order, and holds one key."""

    def __init__(self, *, merged: bool) -> None:
        self.merged = merged
        self.heartbeat = self.consumed = dict.fromkeys((1, 2, 3), 0)
        self.records: list[Positions] = []
        self.held: Positions = {}
        self.bounds: dict[str, Positions] = {"heartbeats": {}, "heartbeats and the log": {}}

    def consume(self, site: int) -> None:
        """Take in the next write of a site.  Of two writes, the one at the higher position is the newer."""
        position = self.consumed[site] + 1
        self.consumed = {**self.consumed, site: position}
        if not self.merged and (position, site) < max(
            ((old, by) for by, old in self.held.items()), default=(0, 0)
        ):
            return
        record = {site: position}
        self.bounds = {
            "heartbeats": dict(heartbeat_bounds(self.heartbeat, record).upper),
            "heartbeats and the log": dict(
                heartbeat_bounds(high_watermark(self.heartbeat, self.records), record).upper
            ),
        }
        self.held = {**self.held, **record} if self.merged else record
        self.records.append(record)

    def beat(self) -> None:
        self.heartbeat, self.records = self.consumed, []

    def side(self, form: str) -> BoundedSide:
        digest = hash(tuple(sorted(self.held.items()))) if self.held else None
        return BoundedSide(digest, self.bounds[form], high_watermark(self.heartbeat, self.records))


@pytest.mark.parametrize(
    ("form", "merged", "is_sound"),
    [
        ("heartbeats", False, True),
        ("heartbeats", True, False),
        ("heartbeats and the log", False, True),
        ("heartbeats and the log", True, True),
    ],
)
def test_lag_is_not_drift_if_the_bounds_know_all_that_was_merged(
    form: str, merged: bool, is_sound: bool
) -> None:
    """Nothing is lost here, so that every report is a false one."""
    random, false_reports = Random(2), 0
    for _ in range(400):
        logs = Log(merged=merged), Log(merged=merged)
        for _ in range(30):
            log = random.choice(logs)
            if random.random() < 0.2:
                log.beat()
            else:
                log.consume(random.randint(1, 3))
            false_reports += verdict_bounded(logs[0].side(form), logs[1].side(form)).is_drift
    assert (false_reports == 0) is is_sound
