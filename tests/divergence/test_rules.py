"""What is called drift and what lag: one case for each sentence of the rules."""

from collections.abc import Mapping

import pytest

from floodmark.codec.states import CounterEntry, CounterState, Field, FieldsState, State, encode_state
from floodmark.codec.thin import thin_record
from floodmark.codec.values import encode_value
from floodmark.divergence.rules import (
    Evidence,
    Judgement,
    Side,
    Verdict,
    covers,
    evidence_of,
    find_doubt,
    judge,
    verdict,
)
from floodmark.model.change import Stamp
from floodmark.model.version import compose

SECOND = compose(1_000, 0)


def side(
    record: bytes | Evidence | None,
    mark: Mapping[int, int],
    *,
    site: int = 1,
    at: int = 50,
    horizon: int = 0,
    version: int = 40,
) -> Side:
    """A site that holds a stored record."""
    found = evidence_of(version, site, *thin_record(record)) if isinstance(record, bytes) else record
    return Side(found, {**mark, site: at}, horizon, at)


def last(value: bytes, stamp: Stamp, expires_at: int | None = None) -> bytes:
    return encode_value(value, expires_at, origin=stamp)


def tombstone(stamp: Stamp) -> bytes:
    return encode_value(b"", deleted=True, origin=stamp)


def fields(deleted: Stamp | None = None, **texts: tuple[bytes | None, Stamp]) -> bytes:
    found = [Field(name, text, stamp) for name, (text, stamp) in sorted(texts.items())]
    return encode_state(FieldsState(deleted, tuple(found)))


def counter(*entries: CounterEntry, deleted: Stamp | None = None) -> bytes:
    return encode_state(CounterState(deleted, entries))


def both_ways(left: Side, right: Side) -> Verdict:
    """The verdict, which does not depend on which side is called left."""
    mirrored = {
        Verdict.MISSING_LEFT: Verdict.MISSING_RIGHT,
        Verdict.MISSING_RIGHT: Verdict.MISSING_LEFT,
    }
    found = verdict(left, right)
    assert verdict(right, left) is mirrored.get(found, found)
    return found


# Whole records


def test_equal_content_agrees_under_different_stamps() -> None:
    left, right = side(last(b"a", Stamp(5, 1)), {2: 9}), side(last(b"a", Stamp(6, 2)), {1: 0}, site=2)
    assert both_ways(left, right) is Verdict.AGREE


def test_nothing_agrees_with_nothing() -> None:
    assert both_ways(side(None, {2: 9}), side(None, {1: 9}, site=2)) is Verdict.AGREE


@pytest.mark.parametrize(
    ("left_heard", "right_heard", "expected"),
    [
        (6, 5, Verdict.VALUE_MISMATCH),
        (5, 5, Verdict.LAG),
        (6, 4, Verdict.LAG),
        (0, 0, Verdict.LAG),
    ],
)
def test_values_that_differ_have_drifted_if_each_has_heard_of_the_other(
    left_heard: int, right_heard: int, expected: Verdict
) -> None:
    left = side(last(b"a", Stamp(5, 1)), {2: left_heard})
    right = side(last(b"b", Stamp(6, 2)), {1: right_heard}, site=2)
    assert both_ways(left, right) is expected


def test_equal_stamps_over_different_bytes_are_drift() -> None:
    left, right = (
        side(last(b"a", Stamp(5, 3)), {2: 9, 3: 5}),
        side(last(b"b", Stamp(5, 3)), {1: 9, 3: 5}, site=2),
    )
    assert both_ways(left, right) is Verdict.VALUE_MISMATCH


def test_a_site_that_the_watermark_does_not_name_may_not_have_been_heard_of() -> None:
    left, right = side(last(b"a", Stamp(5, 3)), {2: 9}), side(last(b"b", Stamp(6, 3)), {1: 9}, site=2)
    assert both_ways(left, right) is Verdict.LAG


def test_a_lost_delete_is_found_while_the_tombstone_is_there() -> None:
    left, right = side(tombstone(Stamp(7, 1)), {2: 9}), side(last(b"a", Stamp(5, 1)), {1: 7}, site=2)
    assert both_ways(left, right) is Verdict.MISSING_LEFT
    assert both_ways(left, side(last(b"a", Stamp(5, 1)), {1: 6}, site=2)) is Verdict.LAG


def test_tombstones_agree_with_tombstones_and_with_nothing() -> None:
    left = side(tombstone(Stamp(7, 1)), {2: 9})
    assert both_ways(left, side(tombstone(Stamp(8, 2)), {1: 9}, site=2)) is Verdict.AGREE
    assert both_ways(left, side(None, {1: 9}, site=2)) is Verdict.AGREE


def test_what_has_expired_by_the_later_snapshot_is_gone_on_both_sides() -> None:
    expiring = last(b"a", Stamp(5, 1), expires_at=2)
    left = side(expiring, {2: 9}, at=SECOND)
    assert both_ways(left, side(None, {1: 9}, site=2, at=2 * SECOND)) is Verdict.AGREE
    assert both_ways(left, side(None, {1: 9}, site=2, at=2 * SECOND - 1)) is Verdict.MISSING_RIGHT


def test_an_expired_record_has_a_stamp() -> None:
    expired = last(b"a", Stamp(9, 1), expires_at=1)
    left = side(expired, {2: 9}, at=SECOND)
    right = side(last(b"b", Stamp(6, 2)), {1: 8}, site=2, at=SECOND)
    assert both_ways(left, right) is Verdict.LAG
    assert both_ways(left, side(last(b"b", Stamp(6, 2)), {1: 9}, site=2, at=SECOND)) is Verdict.MISSING_LEFT


def test_an_expiry_that_differs_is_a_difference() -> None:
    left, right = side(last(b"a", Stamp(5, 3), 9), {3: 5}), side(last(b"a", Stamp(5, 3)), {3: 5}, site=2)
    assert both_ways(left, right) is Verdict.VALUE_MISMATCH


# Absence


def test_a_record_that_should_have_come_and_is_not_there_is_missing() -> None:
    there = side(last(b"a", Stamp(5, 1)), {2: 9})
    assert both_ways(there, side(None, {1: 5}, site=2)) is Verdict.MISSING_RIGHT
    assert both_ways(there, side(None, {1: 4}, site=2)) is Verdict.LAG


def test_a_tombstone_that_was_collected_must_have_come_to_the_other_site() -> None:
    absent = side(None, {1: 9, 3: 9}, site=2, horizon=8)
    assert both_ways(side(last(b"a", Stamp(5, 1)), {2: 8, 3: 8}), absent) is Verdict.MISSING_RIGHT
    assert both_ways(side(last(b"a", Stamp(5, 1)), {2: 8, 3: 7}), absent) is Verdict.LAG
    assert both_ways(side(last(b"a", Stamp(5, 1)), {2: 7, 3: 8}), absent) is Verdict.LAG


def test_a_site_that_only_the_other_side_knows_may_have_sent_the_tombstone() -> None:
    absent = side(None, {1: 9, 3: 9}, site=2, horizon=8)
    assert both_ways(side(last(b"a", Stamp(5, 1)), {2: 8}), absent) is Verdict.LAG


def test_the_horizon_of_the_site_that_has_the_record_does_not_matter() -> None:
    there = side(last(b"a", Stamp(5, 1)), {2: 5}, horizon=40)
    assert both_ways(there, side(None, {1: 5}, site=2)) is Verdict.MISSING_RIGHT


# Merged records


def test_each_field_is_judged_by_itself() -> None:
    left = side(fields(city=(b"1", Stamp(5, 1)), name=(b"1", Stamp(9, 1))), {2: 9})
    right = side(fields(city=(b"1", Stamp(5, 1)), name=(b"2", Stamp(8, 2))), {1: 8}, site=2)
    assert both_ways(left, right) is Verdict.LAG
    altered = side(fields(city=(b"2", Stamp(5, 1)), name=(b"2", Stamp(8, 2))), {1: 8}, site=2)
    assert judge(left, altered) == Judgement(Verdict.VALUE_MISMATCH, "city", Stamp(5, 1), Stamp(5, 1))


def test_dead_fields_and_deletes_that_one_site_has_forgotten_are_no_difference() -> None:
    left = side(fields(Stamp(3, 2), city=(None, Stamp(5, 1)), name=(b"1", Stamp(9, 1))), {2: 9})
    right = side(fields(name=(b"1", Stamp(9, 1))), {1: 9}, site=2)
    assert both_ways(left, right) is Verdict.AGREE


def test_a_field_that_the_records_delete_took_away_has_its_stamp() -> None:
    left = side(fields(Stamp(8, 1), name=(b"1", Stamp(9, 1))), {2: 9})
    lost = fields(city=(b"1", Stamp(5, 2)), name=(b"1", Stamp(9, 1)))
    assert both_ways(left, side(lost, {1: 7}, site=2)) is Verdict.LAG
    assert judge(left, side(lost, {1: 8}, site=2)) == Judgement(
        Verdict.VALUE_MISMATCH, "city", Stamp(8, 1), Stamp(5, 2)
    )


def test_a_field_that_is_not_there_falls_under_the_rule_of_absence() -> None:
    left = side(fields(city=(b"1", Stamp(5, 1)), name=(b"1", Stamp(9, 1))), {2: 9})
    bare = fields(name=(b"1", Stamp(9, 1)))
    assert judge(left, side(bare, {1: 9}, site=2)) == Judgement(
        Verdict.VALUE_MISMATCH, "city", Stamp(5, 1), None
    )
    assert both_ways(left, side(bare, {1: 9}, site=2, horizon=10)) is Verdict.LAG


def test_each_sites_count_is_judged_by_itself() -> None:
    left = side(counter(CounterEntry(1, 9, 5), CounterEntry(2, 4, 1)), {2: 9})
    behind = counter(CounterEntry(1, 7, 3), CounterEntry(2, 4, 1))
    assert both_ways(left, side(behind, {1: 8}, site=2)) is Verdict.LAG
    assert judge(left, side(behind, {1: 9}, site=2)) == Judgement(
        Verdict.VALUE_MISMATCH, 1, Stamp(9, 1), Stamp(7, 1)
    )


def test_a_count_as_old_as_the_delete_is_deleted() -> None:
    left = side(counter(CounterEntry(2, 12, 1), deleted=Stamp(9, 1)), {2: 12})
    lost = side(counter(CounterEntry(1, 9, 5), CounterEntry(2, 12, 1)), {1: 9}, site=2)
    assert judge(left, lost).left == Stamp(9, 1)
    assert both_ways(left, lost) is Verdict.VALUE_MISMATCH


def test_a_merged_record_that_is_missing_is_called_missing() -> None:
    left = side(counter(CounterEntry(1, 9, 5)), {2: 9})
    assert both_ways(left, side(None, {1: 9}, site=2)) is Verdict.MISSING_RIGHT
    assert both_ways(left, side(counter(deleted=Stamp(7, 2)), {1: 9}, site=2)) is Verdict.MISSING_RIGHT


@pytest.mark.parametrize("other", [last(b"5", Stamp(8, 2)), fields(city=(b"1", Stamp(8, 2)))])
def test_records_of_different_kinds_have_drifted_if_each_site_has_all_that_the_other_is_made_of(
    other: bytes,
) -> None:
    left = side(counter(CounterEntry(1, 9, 5), CounterEntry(3, 7, 1)), {2: 9, 3: 7})
    assert both_ways(left, side(other, {1: 9, 3: 7}, site=2)) is Verdict.VALUE_MISMATCH
    assert both_ways(left, side(other, {1: 9, 3: 6}, site=2)) is Verdict.LAG
    lagging = side(other, {1: 8, 3: 7}, site=2)
    assert both_ways(left, lagging) is Verdict.LAG
    assert "not of the same kind" in (find_doubt(left.record, lagging.record, {1, 2, 3}) or "")


# Stamps that cannot be


@pytest.mark.parametrize(
    ("altered", "sound"),
    [
        (last(b"a", Stamp(41, 1)), last(b"a", Stamp(40, 1))),
        (tombstone(Stamp(41, 3)), tombstone(Stamp(40, 3))),
        (
            counter(CounterEntry(1, 9, 5), CounterEntry(3, 41, 1)),
            counter(CounterEntry(1, 9, 5), CounterEntry(3, 40, 1)),
        ),
        (fields(city=(b"1", Stamp(41, 3))), fields(city=(b"1", Stamp(40, 3)))),
    ],
    ids=["value", "tombstone", "counter", "fields"],
)
def test_a_stamp_above_the_version_that_it_is_stored_under_is_drift_whoever_has_heard_of_it(
    altered: bytes, sound: bytes
) -> None:
    present = side(last(b"b", Stamp(5, 2)), {}, site=2)
    assert both_ways(side(altered, {}), present) is Verdict.VALUE_MISMATCH
    assert both_ways(side(sound, {}), present) is Verdict.LAG


def test_an_altered_stamp_over_the_same_content_agrees() -> None:
    assert both_ways(side(last(b"a", Stamp(41, 1)), {}), side(last(b"a", Stamp(9, 1)), {}, site=2)) is (
        Verdict.AGREE
    )


def test_lag_under_a_stamp_of_a_site_that_nobody_knows_is_in_doubt() -> None:
    left, right = side(last(b"a", Stamp(5, 130)), {2: 9}), side(last(b"b", Stamp(6, 2)), {1: 9}, site=2)
    assert both_ways(left, right) is Verdict.LAG
    assert "a stamp of site 130" in (find_doubt(left.record, right.record, {1, 2}) or "")
    assert find_doubt(left.record, right.record, {1, 2, 130}) is None
    assert find_doubt(None, right.record, {1, 2}) is None


# Coverage


@pytest.mark.parametrize(
    ("mark", "vector", "expected"),
    [
        ({1: 10, 2: 20}, {1: 10, 2: 20}, True),
        ({1: 10, 2: 20}, {2: 20}, True),
        ({1: 10, 2: 20}, {1: 11}, False),
        ({1: 10}, {1: 3, 2: 0}, False),
        ({}, {1: 3}, False),
        ({1: 10}, {}, False),
    ],
)
def test_a_mark_covers_a_vector(mark: dict[int, int], vector: dict[int, int], expected: bool) -> None:
    assert covers(mark, vector) is expected


def test_evidence_of_a_state_has_its_stamps() -> None:
    state: State = CounterState(None, (CounterEntry(1, 9, 5),))
    assert evidence_of(12, 2, *thin_record(encode_state(state, Stamp(9, 1)))).state == state
