"""What is said of sites as a whole, and when lag is not believed."""

from datetime import timedelta

import pytest

from floodmark.divergence.comparing import ComparedTally, Pair, Vantage
from floodmark.divergence.outcome import Compared, Outcome, conclude, find_overdue
from floodmark.model.version import Version, compose

NOW_MS = 1_700_000_000_000
MINUTE = timedelta(minutes=1)


def at(seconds_ago: int) -> Version:
    return compose(NOW_MS - 1000 * seconds_ago, 0)


def vantage(site: str, site_id: int, mark: dict[int, Version]) -> Vantage:
    return Vantage(site, site_id, at(0), {site_id: at(0), **mark}, lambda: 0)


@pytest.mark.parametrize(
    ("drift", "doubts", "outcome"),
    [
        (0, [], Outcome.AGREE),
        (0, ["away"], Outcome.UNKNOWN),
        (1, [], Outcome.DRIFT),
        (1, ["away"], Outcome.DRIFT),
    ],
)
def test_drift_outweighs_doubt(drift: int, doubts: list[str], outcome: Outcome) -> None:
    assert conclude(drift, doubts) is outcome


def test_lag_is_believed_while_sites_hear_of_each_other() -> None:
    sites = [vantage("oslo", 1, {2: at(59)}), vantage("rome", 2, {1: at(60)})]
    lagging = {Pair("oslo", "rome"): ComparedTally(9, agree=8, lag=1)}
    assert find_overdue([Compared("users", sites, lagging)], MINUTE) == []


@pytest.mark.parametrize(
    ("mark", "said"), [(at(61), "only up to 2023-11-14T22:12:19"), (0, "not at all yet")]
)
def test_lag_of_a_site_that_has_not_heard_for_long_is_not_believed(mark: Version, said: str) -> None:
    sites = [vantage("oslo", 1, {2: at(0)}), vantage("rome", 2, {1: mark})]
    (doubt,) = find_overdue(
        [Compared("users", sites, {Pair("oslo", "rome"): ComparedTally(9, agree=8, lag=1)})], MINUTE
    )
    assert doubt.startswith(f"rome has the changes in 'users' of oslo {said}")


def test_site_that_lags_in_several_namespaces_is_named_once_with_the_oldest_position() -> None:
    lagging = {Pair("oslo", "rome"): ComparedTally(9, agree=8, lag=1)}
    compared = [
        Compared(name, [vantage("oslo", 1, {2: at(0)}), vantage("rome", 2, {1: at(age)})], lagging)
        for name, age in (("users", 61), ("orders", 90))
    ]
    (doubt,) = find_overdue(compared, MINUTE)
    assert doubt.startswith(
        "rome has the changes in 'orders', 'users' of oslo only up to 2023-11-14T22:11:50"
    )


def test_where_nothing_lags_nobody_has_to_hear_of_anybody() -> None:
    sites = [vantage("oslo", 1, {2: 0}), vantage("rome", 2, {1: 0})]
    assert (
        find_overdue([Compared("users", sites, {Pair("oslo", "rome"): ComparedTally(9, agree=9)})], MINUTE)
        == []
    )


def test_only_sites_that_lag_are_asked_whom_they_have_heard() -> None:
    sites = [
        vantage("oslo", 1, {2: at(0), 3: at(100)}),
        vantage("rome", 2, {1: at(0), 3: at(0)}),
        vantage("bonn", 3, {1: at(0), 2: at(0)}),
    ]
    tallies = {
        Pair("oslo", "rome"): ComparedTally(9, agree=9),
        Pair("oslo", "bonn"): ComparedTally(9, agree=9),
        Pair("rome", "bonn"): ComparedTally(9, agree=8, lag=1),
    }
    assert find_overdue([Compared("users", sites, tallies)], MINUTE) == []
    stopped = {**tallies, Pair("oslo", "rome"): ComparedTally(9, agree=8, lag=1)}
    (doubt,) = find_overdue([Compared("users", sites, stopped)], MINUTE)
    assert doubt.startswith("oslo has the changes in 'users' of bonn only up to")
