"""Sites compared over a range of keys: what is counted, what is told, and when a horizon is read."""

from collections.abc import Iterator, Mapping
from functools import partial

import pyarrow
import pytest

from floodmark.codec.columns import RECORDS_WITH_DIGESTS
from floodmark.codec.thin import thin_record
from floodmark.codec.values import encode_value
from floodmark.divergence import comparing
from floodmark.divergence.alignment import align
from floodmark.divergence.comparing import ComparedTally, Drift, Lag, Pair, Vantage, compare
from floodmark.divergence.rules import Verdict
from floodmark.model.change import Stamp
from floodmark.model.errors import FloodmarkError, Unreachable

Held = Mapping[bytes, bytes]


def put(value: bytes, version: int, site: int) -> bytes:
    return encode_value(value, origin=Stamp(version, site))


def stream_of(held: Held, reads: list[str] | None = None, name: str = "") -> Iterator[pyarrow.RecordBatch]:
    """The thin records of a site, one batch for each."""
    for key, stored in sorted(held.items()):
        if reads is not None:
            reads.append(name)
        thin, digest = thin_record(stored)
        signed = digest - (1 << 64) if digest >> 63 else digest
        columns = [[key], [90], [0], [thin], [signed]]
        arrays = [
            pyarrow.array(column, each.type)
            for column, each in zip(columns, RECORDS_WITH_DIGESTS, strict=True)
        ]
        yield pyarrow.RecordBatch.from_arrays(arrays, schema=RECORDS_WITH_DIGESTS)


def vantage(site: str, site_id: int, mark: Mapping[int, int], horizon: int = 0) -> Vantage:
    return Vantage(site, site_id, 100, {**mark, site_id: 100}, lambda: horizon)


OSLO = {
    b"agreed": put(b"1", 5, 1),
    b"altered": put(b"1", 6, 1),
    b"deleted": encode_value(b"", deleted=True, origin=Stamp(9, 1)),
    b"late": put(b"2", 50, 1),
    b"missing": put(b"1", 7, 1),
}
ROME = {
    b"agreed": put(b"1", 5, 1),
    b"altered": put(b"x", 6, 1),
    b"deleted": put(b"1", 8, 1),
    b"late": put(b"1", 3, 1),
}


def test_every_key_is_counted_once_and_differences_are_told() -> None:
    comparison = compare(
        [vantage("oslo", 1, {2: 40}), vantage("rome", 2, {1: 40})], [stream_of(OSLO), stream_of(ROME)]
    )
    found = list(comparison)
    assert {each.key: each.verdict for each in found if isinstance(each, Drift)} == {
        b"altered": Verdict.VALUE_MISMATCH,
        b"deleted": Verdict.MISSING_LEFT,
        b"missing": Verdict.MISSING_RIGHT,
    }
    assert [each for each in found if isinstance(each, Lag)] == [Lag(b"late", "oslo", "rome")]
    assert comparison.tallies == {
        Pair("oslo", "rome"): ComparedTally(
            5, agree=1, lag=1, value_mismatch=1, missing_left=1, missing_right=1
        )
    }


def test_a_drift_says_what_both_sides_hold() -> None:
    marks = {2: 40}, {1: 40}
    comparison = compare(
        [vantage("oslo", 1, marks[0]), vantage("rome", 2, marks[1])],
        [stream_of({b"missing": OSLO[b"missing"]}), stream_of({})],
    )
    (drift,) = comparison
    assert isinstance(drift, Drift)
    assert (drift.left.site, drift.left.version, drift.left.stamp) == ("oslo", 90, Stamp(7, 1))
    assert drift.left.mark == {1: 100, 2: 40}
    assert drift.left.digest == thin_record(OSLO[b"missing"])[1]
    assert (drift.right.site, drift.right.version, drift.right.stamp) == ("rome", 0, None)
    assert (drift.right.digest, drift.right.deleted, drift.part) == (None, False, None)


def test_of_three_sites_each_is_compared_with_each() -> None:
    sites = [
        vantage("oslo", 1, {2: 40, 3: 40}),
        vantage("rome", 2, {1: 40, 3: 40}),
        vantage("bonn", 3, {1: 40, 2: 40}),
    ]
    held = {b"agreed": OSLO[b"agreed"], b"missing": OSLO[b"missing"]}
    comparison = compare(sites, [stream_of(held), stream_of(held), stream_of({b"agreed": OSLO[b"agreed"]})])
    found = [(each.left.site, each.right.site) for each in comparison if isinstance(each, Drift)]
    assert sorted(found) == [("oslo", "bonn"), ("rome", "bonn")]
    assert comparison.tallies == {
        Pair("oslo", "rome"): ComparedTally(2, agree=2),
        Pair("oslo", "bonn"): ComparedTally(2, agree=1, missing_right=1),
        Pair("rome", "bonn"): ComparedTally(2, agree=1, missing_right=1),
    }


def test_horizons_are_read_after_all_records_and_only_if_they_matter() -> None:
    events: list[str] = []

    def horizon() -> int:
        events.append("horizon")
        return 0

    sites = [
        Vantage("oslo", 1, 100, {1: 100, 2: 40}, horizon),
        Vantage("rome", 2, 100, {1: 40, 2: 100}, horizon),
    ]
    assert len(list(compare(sites, [stream_of(OSLO, events, "read"), stream_of(ROME, events, "read")]))) == 4
    assert events == ["read"] * 9 + ["horizon"] * 2
    events.clear()
    agreed = (
        {b"agreed": OSLO[b"agreed"], b"altered": OSLO[b"altered"]},
        {
            b"agreed": ROME[b"agreed"],
            b"altered": ROME[b"altered"],
        },
    )
    assert len(list(compare(sites, [stream_of(each) for each in agreed]))) == 1
    assert events == []


def test_a_horizon_that_the_other_site_has_not_reached_makes_absence_lag() -> None:
    sites = [vantage("oslo", 1, {2: 40}), vantage("rome", 2, {1: 40}, horizon=41)]
    (lag,) = compare(sites, [stream_of({b"missing": OSLO[b"missing"]}), stream_of({})])
    assert isinstance(lag, Lag)


def test_differences_that_wait_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    def horizon() -> int:
        asked.append(1)
        return 0

    held = {b"%05d" % number: put(b"1", 5, 1) for number in range(2_000)}
    (whole,) = pyarrow.Table.from_batches(stream_of(held)).combine_chunks().to_batches()
    batches = (whole.slice(start, 100) for start in range(0, 2_000, 100))
    sites = [
        Vantage("oslo", 1, 100, {1: 100, 2: 40}, lambda: 0),
        Vantage("rome", 2, 100, {1: 40, 2: 100}, horizon),
    ]
    monkeypatch.setattr(comparing, "align", partial(align, window_rows=100))
    comparison = compare(sites, [batches, iter(())], waiting_max=500)
    assert sum(isinstance(each, Drift) for each in comparison) == 2_000
    assert len(asked) == 4


def failing(held: Held, error: FloodmarkError) -> Iterator[pyarrow.RecordBatch]:
    yield from stream_of(held)
    raise error


def test_a_site_that_fails_hides_nothing_of_the_others_and_is_told_of_at_the_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(comparing, "align", partial(align, window_rows=1))
    sites = [
        vantage("oslo", 1, {2: 40, 3: 40}),
        vantage("bonn", 3, {1: 40, 2: 40}),
        vantage("rome", 2, {1: 40, 3: 40}),
    ]
    first = {b"agreed": OSLO[b"agreed"]}
    comparison = compare(sites, [stream_of(OSLO), failing(first, Unreachable("gone")), stream_of(ROME)])
    found: list[Drift | Lag] = []
    with pytest.raises(Unreachable, match="gone"):
        found.extend(comparison)
    drifted = {each.key: (each.left.site, each.right.site) for each in found if isinstance(each, Drift)}
    assert drifted == dict.fromkeys((b"altered", b"deleted", b"missing"), ("oslo", "rome"))
    assert comparison.tallies[Pair("oslo", "rome")].compared == 5
    assert comparison.tallies[Pair("oslo", "bonn")] == ComparedTally(1, agree=1)
    assert [*comparison.failures] == ["bonn"]


def test_nothing_is_concluded_from_absence_where_no_horizon_can_be_read() -> None:
    def gone() -> int:
        raise Unreachable("gone")

    held = {b"missing": OSLO[b"missing"]}
    sites = [
        vantage("oslo", 1, {2: 40, 3: 40}),
        vantage("rome", 2, {1: 40, 3: 40}),
        Vantage("bonn", 3, 100, {1: 40, 2: 40, 3: 100}, gone),
    ]
    comparison = compare(sites, [stream_of(held), stream_of({}), stream_of({})])
    found: list[Drift | Lag] = []
    with pytest.raises(Unreachable, match="gone"):
        found.extend(comparison)
    assert [(type(each), each.key) for each in found] == [(Drift, b"missing"), (Lag, b"missing")]
    assert [*comparison.failures] == ["bonn"]


def test_all_that_is_found_of_a_key_comes_at_once_if_nothing_may_wait(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(comparing, "align", partial(align, window_rows=1))
    sites = [
        vantage("oslo", 1, {2: 40, 3: 40}),
        vantage("rome", 2, {1: 40, 3: 40}),
        vantage("bonn", 3, {1: 40, 2: 40}),
    ]
    keys = [b"%02d" % number for number in range(10)]
    held = [{key: put(value, 6, 1) for key in keys} for value in (b"1", b"x")]
    comparison = compare(sites, [stream_of(held[0]), stream_of(held[1]), stream_of({})], waiting_max=0)
    windows = [[finding.key for finding in window] for window in comparison.windows()]
    assert [window for window in windows if window] == [[key] * 3 for key in keys]
