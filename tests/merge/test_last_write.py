"""Last write wins: the same winner whatever the order, the grouping and the number of arrivals."""

from collections.abc import Sequence
from functools import reduce

import pytest
from hypothesis import given
from hypothesis import strategies as st

from floodmark.merge import POLICIES, Stamped, last_write
from floodmark.model import Record, Stamp

STAMPS = st.builds(Stamp, st.integers(1, 4), st.integers(1, 3))


def write_at(stamp: Stamp) -> Stamped:
    """What was written with a stamp: one stamp names one write, so the record follows from it."""
    deleted = (stamp.version + stamp.site) % 3 == 0
    return Stamped(Record(b"" if deleted else repr(stamp).encode(), None, deleted, stamp), stamp)


WRITES = STAMPS.map(write_at)


def merge_all(writes: Sequence[Stamped]) -> Stamped | None:
    start: Stamped | None = None
    return reduce(last_write, writes, start)


@given(WRITES, WRITES)
def test_it_is_commutative(left: Stamped, right: Stamped) -> None:
    assert last_write(left, right) == last_write(right, left)


@given(WRITES, WRITES, WRITES)
def test_it_is_associative(first: Stamped, second: Stamped, third: Stamped) -> None:
    assert last_write(last_write(first, second), third) == last_write(first, last_write(second, third))


@given(WRITES, WRITES)
def test_it_is_idempotent(left: Stamped, right: Stamped) -> None:
    assert last_write(left, left) == left
    winner = last_write(left, right)
    assert last_write(winner, left) == last_write(winner, right) == winner


@given(st.lists(WRITES, min_size=1, max_size=8), st.data())
def test_any_order_with_any_repetition_gives_the_highest_stamp(
    writes: list[Stamped], data: st.DataObject
) -> None:
    repeated = writes + data.draw(st.lists(st.sampled_from(writes), max_size=5))
    shuffled = data.draw(st.permutations(repeated))
    winner = merge_all(shuffled)
    assert winner == merge_all(writes)
    assert winner is not None
    assert winner.stamp == max(write.stamp for write in writes)


@pytest.mark.parametrize(
    ("loser", "winner"),
    [
        (Stamp(1, 9), Stamp(2, 1)),
        (Stamp(7, 1), Stamp(7, 2)),
        (Stamp(7, 254), Stamp(7, 255)),
    ],
)
def test_higher_version_wins_and_the_site_id_breaks_ties(loser: Stamp, winner: Stamp) -> None:
    lost, won = write_at(loser), write_at(winner)
    assert last_write(lost, won) is won
    assert last_write(won, lost) is won


def test_a_delete_is_a_write_like_any_other() -> None:
    put = Stamped(Record(b"value"), Stamp(1, 1))
    deletion = Stamped(Record(b"", deleted=True), Stamp(2, 1))
    again = Stamped(Record(b"again"), Stamp(3, 1))
    assert last_write(put, deletion) is deletion
    assert last_write(deletion, put) is deletion
    assert last_write(deletion, again) is again


def test_first_write_wins_over_nothing() -> None:
    write = write_at(Stamp(1, 1))
    assert last_write(None, write) is write


def test_policy_is_found_by_its_name() -> None:
    assert POLICIES["last_write"] is last_write
