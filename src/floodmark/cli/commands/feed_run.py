"""feed run: a feed in the foreground, with a line that says how it goes."""

import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from typing import Final

from rich.live import Live
from rich.text import Text

import floodmark
from floodmark.cli.failures import DONE, FINDING
from floodmark.cli.jobs import SparkChoice, reach, spark_job
from floodmark.cli.render.fields import plain
from floodmark.cli.render.output import Output, console_on, note
from floodmark.cli.render.text import show_bytes, show_count, show_lag, show_size, show_version
from floodmark.cli.signals import on_stop_signal
from floodmark.clock import monotonic_ms
from floodmark.feed.named.feeds import FeedState
from floodmark.feed.named.runner import FeedRunner, RunnerStatistics
from floodmark.feed.reading.items import OnCorrupt
from floodmark.feed.sinks.base import parse_sink
from floodmark.model import Version
from floodmark.model.errors import Closed, VersionCollected

SHOW_MS: Final = 1_000
# Poll interval of --once.
_LOOK_SECONDS: Final = 0.1
_SOUND: Final = (FeedState.NORMAL, FeedState.STOPPED, FeedState.FINISHED)

Show = Callable[[RunnerStatistics], None]


def run_feed(
    site: floodmark.Site,
    name: str,
    *,
    sinks: Sequence[str],
    once: bool,
    wait_for_lease: bool,
    on_corrupt: OnCorrupt | None,
    json: bool,
) -> int:
    """Run a feed until a signal stops it, and print its end; the exit code."""
    spec = site.feeds.show(name).spec
    scheme = parse_sink(spec.sink).scheme
    # A sink that writes to stdout has it for itself.
    stream = sys.stderr if scheme == "stdout" else sys.stdout
    output = Output(json=json, flush=True, stream=stream)
    target = site.resolved_version() if once else None
    runner = site.feeds.runner(name, sinks=sinks, wait_for_lease=wait_for_lease, on_corrupt=on_corrupt)
    with (
        _showing(output, is_stdout_taken=scheme == "stdout") as show,
        on_stop_signal(runner.request_stop),
        ThreadPoolExecutor(max_workers=1, thread_name_prefix="floodmark-feed") as executor,
    ):
        running = executor.submit(runner.run)
        try:
            _oversee(runner, running, target, show)
        finally:
            # Leaving the block waits for the runner, also after a broken pipe.
            runner.request_stop()
        state = _result(running)
    statistics = runner.statistics()
    _print_end(output, statistics, state)
    skipped = [change for part in statistics.ranges for change in part.skipped]
    for change in skipped:
        note(f"left out {show_bytes(change.key)} at {change.version}: {change.reason}")
    is_finding = bool(skipped) and (on_corrupt or spec.on_corrupt) is OnCorrupt.REPORT
    return DONE if state in _SOUND and not is_finding else FINDING


def run_feed_on_spark(
    location: str, name: str, choice: SparkChoice, *, sinks: Sequence[str], once: bool, json: bool
) -> int:
    """Run a feed as a Spark query until a signal stops it, and print its end; the exit code."""
    with reach(location) as (source,), spark_job(choice, "feed", in_order=True) as job:
        summary = job.functions.run_feed(
            source, name, sinks=sinks, once=once, spark=job.session, progress=job.progress, stop=job.stop
        )
    Output(json=json).report(summary)
    return DONE if summary.state in _SOUND else FINDING


def _oversee(runner: FeedRunner, running: "Future[FeedState]", target: Version | None, show: Show) -> None:
    shown_at_ms = monotonic_ms()
    while not wait([running], _LOOK_SECONDS).done:
        statistics = runner.statistics()
        is_at_snapshot = any(part.snapshot is not None for part in statistics.ranges)
        if target is not None and statistics.checkpoint >= target and not is_at_snapshot:
            runner.request_stop()
        if monotonic_ms() - shown_at_ms >= SHOW_MS:
            shown_at_ms = monotonic_ms()
            show(statistics)


def _result(running: "Future[FeedState]") -> FeedState:
    try:
        return running.result()
    except VersionCollected:
        note("the feed has failed: give it an empty sink, then feed resume it --since snapshot")
        raise
    except Closed as error:
        # The reader of a sink on stdout has closed the pipe, as in `| head`.
        if isinstance(error.__cause__, BrokenPipeError):
            raise error.__cause__ from None
        raise


@contextmanager
def _showing(output: Output, *, is_stdout_taken: bool) -> Iterator[Show]:
    """Show progress as JSON lines, as one live line on a terminal, or not at all."""
    if output.json:
        yield lambda statistics: output.object(_fields(statistics))
        return
    console = console_on(sys.stderr)
    if not console.is_terminal or (is_stdout_taken and sys.stdout.isatty()):
        yield lambda _: None
        return
    with Live(console=console, auto_refresh=False, transient=True) as live:
        yield lambda statistics: live.update(Text(describe(statistics)), refresh=True)


def describe(statistics: RunnerStatistics) -> str:
    """A runner in one line."""
    parts = [
        statistics.feed,
        "waiting for the lease" if statistics.state is None else statistics.state.value,
        f"{statistics.changes_per_second:,.0f} changes/s",
        f"{show_size(round(statistics.bytes_per_second))}/s",
        f"checkpoint lag {show_lag(statistics.checkpoint_lag_ms)}",
        f"resolved lag {show_lag(statistics.resolved_lag_ms)}",
    ]
    if statistics.problem is not None:
        parts.append(f"attempt {statistics.failures + 1}: {statistics.problem}")
    return "  ".join(parts)


def _print_end(output: Output, statistics: RunnerStatistics, state: FeedState) -> None:
    if output.json:
        output.object({**_fields(statistics), "state": state.value, "ended": True})
        return
    delivered = show_count(statistics.changes, "change")
    output.line(
        f"{statistics.feed} is {state}: {delivered} delivered, up to {show_version(statistics.checkpoint)}"
    )
    if state is FeedState.STOPPED:
        note(f"the feed was paused; floodmark feed resume lets {statistics.feed} go on")
    elif statistics.problem is not None:
        note(f"the last error: {statistics.problem}")


def _fields(statistics: RunnerStatistics) -> dict[str, object]:
    fields = plain(statistics)
    del fields["ranges"]
    return {**fields, "ended": False}
