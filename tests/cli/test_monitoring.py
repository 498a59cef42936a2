"""The pages of replicate and feed run: before the work begins, while it runs, and in trouble."""

from threading import Event

import pytest
from msgspec.structs import replace

from floodmark.cli import monitoring
from floodmark.cli.monitoring import FeedRunMetrics, ReplicateMetrics
from floodmark.feed.named.feeds import FeedState
from floodmark.feed.named.runner import RunnerStatistics
from floodmark.links.driver import LinkSummary, TopologySummary

LINK = LinkSummary(
    source="oslo",
    target="rome",
    namespaces=["users"],
    changes=7,
    backlog_ms=1_500,
    lag_ms_p50=20,
    lag_ms_p99=None,
    findings=0,
    wrong=0,
    stalled=None,
)
SILENT = replace(LINK, target="cork", changes=None, backlog_ms=None, lag_ms_p50=None, wrong=None)
SUMMARY = TopologySummary(epoch=1, elapsed_ms=1, restarts=2, changes=7, wrong=0, links=[LINK, SILENT])
RUNNER = RunnerStatistics(
    feed="lake",
    state=FeedState.NORMAL,
    changes=7,
    bytes=700,
    batches=1,
    changes_per_second=0.0,
    bytes_per_second=0.0,
    checkpoint=5,
    resolved=6,
    checkpoint_lag_ms=61_000,
    resolved_lag_ms=12,
    buffered_bytes=0,
    problem=None,
    failures=0,
    retry_budget_ms=1,
    ranges=[],
)


def lines(page: ReplicateMetrics | FeedRunMetrics) -> set[str]:
    """The samples of Floodmark's metrics."""
    return {line for line in page.render().decode().splitlines() if line.startswith("floodmark_")}


def test_replicate_shows_its_links_and_leaves_out_what_a_silent_target_does_not_tell() -> None:
    page = ReplicateMetrics()
    assert (page.why_not_ready(), page.find_alarms(), lines(page)) == ("the links do not run yet", [], set())
    page.watch(lambda: SUMMARY)
    assert page.why_not_ready() is None
    assert page.find_alarms() == ["oslo to cork: the target does not answer"]
    assert lines(page) == {
        "floodmark_replicate_restarts_total 2.0",
        'floodmark_replicate_target_up{source="oslo",target="rome"} 1.0',
        'floodmark_replicate_target_up{source="oslo",target="cork"} 0.0',
        'floodmark_replicate_backlog_seconds{source="oslo",target="rome"} 1.5',
        'floodmark_replicate_lag_seconds{quantile="0.5",source="oslo",target="rome"} 0.02',
        'floodmark_replicate_stalled{source="oslo",target="rome"} 0.0',
        'floodmark_replicate_stalled{source="oslo",target="cork"} 0.0',
        'floodmark_replicate_changes_total{source="oslo",target="rome"} 7.0',
        'floodmark_replicate_intervals_wrong_total{source="oslo",target="rome"} 0.0',
    }


def test_replicate_names_links_that_wait_or_have_lost_changes() -> None:
    page = ReplicateMetrics()
    stalled, wrong = replace(LINK, stalled="its clock is ahead"), replace(LINK, target="cork", wrong=1)
    page.watch(lambda: replace(SUMMARY, links=[stalled, wrong]))
    assert page.find_alarms() == [
        "oslo to rome: its clock is ahead",
        "oslo to cork: changes were lost or doubled; run floodmark verify",
    ]


def test_target_that_does_not_answer_in_time_costs_neither_the_page_nor_a_second_call(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    page, answers, calls = ReplicateMetrics(), Event(), []
    page.watch(lambda: SUMMARY)
    before = lines(page)

    def summarize() -> TopologySummary:
        calls.append(1)
        answers.wait()
        return replace(SUMMARY, restarts=3)

    page.watch(summarize)
    monkeypatch.setattr(monitoring, "ASK_SECONDS", 0.0)
    assert (lines(page), lines(page), len(calls)) == (before, before, 1)
    answers.set()
    monkeypatch.undo()
    assert "floodmark_replicate_restarts_total 3.0" in lines(page)


def test_feed_run_shows_its_runner() -> None:
    page = FeedRunMetrics()
    assert (page.find_alarms(), lines(page)) == ([], set())
    told = {**vars(RUNNER), "state": None}
    page.watch(lambda: RunnerStatistics(**told))
    assert "another process" in (page.why_not_ready() or "")
    assert 'floodmark_feed_run_state{feed="lake",state="waiting"} 1.0' in lines(page)
    told |= {"state": FeedState.ERROR, "problem": "no room", "failures": 2}
    assert (page.why_not_ready(), page.find_alarms()) == (None, ["feed lake: no room"])
    assert lines(page) == {
        'floodmark_feed_run_state{feed="lake",state="error"} 1.0',
        'floodmark_feed_run_checkpoint_lag_seconds{feed="lake"} 61.0',
        'floodmark_feed_run_resolved_lag_seconds{feed="lake"} 0.012',
        'floodmark_feed_run_buffered_bytes{feed="lake"} 0.0',
        'floodmark_feed_run_failures{feed="lake"} 2.0',
        'floodmark_feed_run_changes_total{feed="lake"} 7.0',
        'floodmark_feed_run_delivered_bytes_total{feed="lake"} 700.0',
        'floodmark_feed_run_batches_total{feed="lake"} 1.0',
    }
