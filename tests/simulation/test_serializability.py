"""The checker of transactions: it finds every anomaly, and nothing else."""

from collections.abc import Mapping, Sequence
from itertools import permutations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from floodmark.model.ranges import KeyRange
from floodmark.testing.serializability import NotSerializable, Observed, check_serializable

A, B = b"a", b"b"
Orders = Mapping[bytes, Sequence[bytes]]


def setup() -> Observed:
    return Observed("0-setup", 0, 1, writes={A: b"a0", B: b"b0"})


ANOMALIES: dict[str, tuple[list[Observed], Orders]] = {
    "lost update": (
        [
            setup(),
            Observed("one", 2, 9, reads={A: b"a0"}, writes={A: b"a1"}),
            Observed("two", 2, 9, reads={A: b"a0"}, writes={A: b"a2"}),
        ],
        {A: [b"a0", b"a1", b"a2"], B: [b"b0"]},
    ),
    "write skew": (
        [
            setup(),
            Observed("one", 2, 9, reads={A: b"a0", B: b"b0"}, writes={A: b"a1"}),
            Observed("two", 2, 9, reads={A: b"a0", B: b"b0"}, writes={B: b"b1"}),
        ],
        {A: [b"a0", b"a1"], B: [b"b0", b"b1"]},
    ),
    "read skew": (
        [
            setup(),
            Observed("one", 2, 9, writes={A: b"a1", B: b"b1"}),
            Observed("two", 2, 9, reads={A: b"a0", B: b"b1"}),
        ],
        {A: [b"a0", b"a1"], B: [b"b0", b"b1"]},
    ),
    "phantom": (
        [
            Observed("one", 2, 9, ranges=[(KeyRange(A, None), {})], writes={A: b"a1"}),
            Observed("two", 2, 9, ranges=[(KeyRange(A, None), {})], writes={B: b"b1"}),
        ],
        {A: [b"a1"], B: [b"b1"]},
    ),
    "stale read": (
        [setup(), Observed("one", 2, 3, writes={A: b"a1"}), Observed("two", 4, 5, reads={A: b"a0"})],
        {A: [b"a0", b"a1"], B: [b"b0"]},
    ),
    "dirty read": ([setup(), Observed("one", 2, 3, reads={A: b"aborted"})], {A: [b"a0"], B: [b"b0"]}),
    "lost write": ([setup(), Observed("one", 2, 3, writes={A: b"a1"})], {A: [b"a0"], B: [b"b0"]}),
    "writes in two orders": (
        [
            Observed("one", 2, 9, writes={A: b"a1", B: b"b1"}),
            Observed("two", 2, 9, writes={A: b"a2", B: b"b2"}),
        ],
        {A: [b"a1", b"a2"], B: [b"b2", b"b1"]},
    ),
}


@pytest.mark.parametrize("name", ANOMALIES)
def test_each_anomaly_is_found(name: str) -> None:
    with pytest.raises(NotSerializable):
        check_serializable(*ANOMALIES[name])


def test_write_of_unknown_outcome_may_be_there_or_not() -> None:
    unknown = Observed("one", 2, None, reads={A: b"a0"}, writes={A: b"a1"})
    reader = Observed("two", 3, 4, reads={A: b"a1"})
    assert check_serializable([setup(), unknown], {A: [b"a0"], B: [b"b0"]})
    found = check_serializable([setup(), unknown, reader], {A: [b"a0", b"a1"], B: [b"b0"]})
    assert list(map(str, found)) == ["0-setup", "one", "two"]


def test_cycle_is_told() -> None:
    with pytest.raises(NotSerializable, match=r"^a cycle: one -rw-> two -rw-> one$"):
        check_serializable(*ANOMALIES["write skew"])


def replays(order: Sequence[Observed], orders: Orders) -> bool:
    """Whether transactions one after the other read what they read, and leave the orders that there are."""
    held: dict[bytes, list[bytes]] = {A: [], B: []}
    for number, each in enumerate(order):
        if any(later.ended is not None and later.ended < each.began for later in order[number + 1 :]):
            return False
        if any((held[key][-1] if held[key] else None) != value for key, value in each.reads.items()):
            return False
        for key, value in each.writes.items():
            held[key].append(value)
    return held == orders


@st.composite
def histories(draw: st.DrawFn) -> tuple[list[Observed], dict[bytes, list[bytes]]]:
    """Up to four transactions over two keys, whose reads and orders are right or wrong by chance."""
    count = draw(st.integers(1, 4))
    writes = [draw(st.sets(st.sampled_from([A, B]))) for _ in range(count)]
    values = {key: [key + b"%d" % n for n in range(count) if key in writes[n]] for key in (A, B)}
    orders = {key: draw(st.permutations(values[key])) for key in (A, B)}
    history = []
    for number in range(count):
        began = draw(st.integers(0, 6))
        reads = {
            key: draw(st.sampled_from([None, *(v for v in values[key] if v != key + b"%d" % number)]))
            for key in draw(st.sets(st.sampled_from([A, B])))
        }
        written = {key: key + b"%d" % number for key in sorted(writes[number])}
        history.append(Observed(str(number), began, began + draw(st.integers(1, 4)), reads, (), written))
    return history, orders


@given(histories())
def test_a_history_passes_exactly_if_some_order_explains_it(
    drawn: tuple[list[Observed], dict[bytes, list[bytes]]],
) -> None:
    history, orders = drawn
    expected = any(replays(order, orders) for order in permutations(history))
    try:
        found = check_serializable(history, orders)
    except NotSerializable:
        assert not expected
    else:
        assert replays(found, orders)
