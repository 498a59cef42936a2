"""Percentiles of lags: of changes and not of batches, to three digits, and however they are added."""

import msgspec
import numpy

from floodmark.model.version import compose
from floodmark.replication.lag import LagCounts, round_lag


def test_percentiles_of_lags_are_those_of_changes_and_not_of_batches() -> None:
    counts = LagCounts()
    assert counts.percentile(0.5) is None
    counts.add(10, changes=980)
    counts.add(5_000, changes=20)
    assert counts.percentile(0.5) == 10
    assert counts.percentile(0.98) == 10
    assert counts.percentile(0.99) == 5_000
    assert round_lag(123_456) == 123_000


def test_lags_are_counted_from_the_milliseconds_of_versions_and_never_below_zero() -> None:
    counts = LagCounts()
    versions = numpy.array([compose(1_000, 5), compose(1_000, 6), compose(2_500, 0)], numpy.uint64)
    counts.add_versions(versions, now_ms=2_000)
    assert counts.counts == {1_000: 2, 0: 1}


def test_lags_add_up_and_travel() -> None:
    first, second = LagCounts(), LagCounts()
    first.add(10)
    second.add(10, changes=2)
    second.add(20)
    both = first.plus(second)
    assert both.counts == {10: 3, 20: 1}
    assert first.counts == {10: 1}
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(both), type=LagCounts) == both
