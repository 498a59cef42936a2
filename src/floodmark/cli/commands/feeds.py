"""feed create, list, show, pause, resume, update, remove, rebalance, statistics and run."""

import sys
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Annotated, Any, Final

import msgspec
import typer
from rich.live import Live
from rich.text import Text

import floodmark
from floodmark.cli.arguments import (
    Commands,
    Json,
    KeyOptions,
    Location,
    NamespaceName,
    OpenSite,
    SinceOption,
    given,
)
from floodmark.cli.commands.changes import OnCorruptOption, OnGenerationOption, OnGenerationUpdate
from floodmark.cli.failures import DONE, FINDING, Usage
from floodmark.cli.jobs import SparkChoice, reach, spark_job
from floodmark.cli.monitoring import FeedRunMetrics, MetricsOptions, serving_page
from floodmark.cli.opening import open_site
from floodmark.cli.render.output import Column, Output, console_on, note, plain
from floodmark.cli.render.text import (
    show_count,
    show_keys,
    show_lag,
    show_place,
    show_size,
    show_time,
    show_version,
)
from floodmark.cli.signals import on_stop_signal
from floodmark.clock import monotonic_ms
from floodmark.codec.ordered import NAMESPACE_BYTES
from floodmark.feed.named.feeds import Feed, FeedSpec, FeedState, FeedStatistics, SinkOptions, measure
from floodmark.feed.named.runner import FeedRunner, RunnerStatistics
from floodmark.feed.reading.items import OnCorrupt
from floodmark.feed.sinks.base import parse_sink
from floodmark.model import Resolved, Version
from floodmark.model.errors import Closed, VersionCollected
from floodmark.model.stream import OnGeneration
from floodmark.model.text import json_bytes, show_bytes
from floodmark.model.version import compose

commands = Commands("feed", sample="lake")

SHOW_MS: Final = 1_000
# Poll interval of --once.
_LOOK_SECONDS: Final = 0.1
_SOUND: Final = (FeedState.NORMAL, FeedState.STOPPED, FeedState.FINISHED)

Show = Callable[[RunnerStatistics], None]
Name = Annotated[str, "NAME", "The feed's name."]
SinkUri = Annotated[str | None, "URI", "The sink's URI: parquet:directory, stdout: or blackhole:."]
Target = Annotated[
    Version | None, "VERSION|TIME", "Finish when all changes up to this are delivered; never by default."
]
Description = Annotated[str | None, "TEXT", "A description for people."]
_RANGES_HELP: Final = "How many key ranges to divide the feed into; 1 delivers all changes in commit order."


@dataclass(frozen=True, kw_only=True)
class SinkNumbers:
    """The options for the fields of `SinkOptions`."""

    concurrency: Annotated[int | None, "NUMBER", "How many ranges are delivered in parallel."] = None
    batch_records: Annotated[int | None, "NUMBER", "About how many changes a batch has."] = None
    backoff_ms: Annotated[
        int | None, "NUMBER", "Pause before a failed write is retried; doubled after each failure."
    ] = None
    linger_ms: Annotated[
        int | None, "NUMBER", "How long a batch waits for more changes before it is written."
    ] = None
    rate_bytes_max: Annotated[int | None, "NUMBER", "Maximum bytes a second."] = None

    def replace(self, before: SinkOptions) -> SinkOptions:
        """The options of `before`, with the given numbers in the place of the earlier ones."""
        return msgspec.structs.replace(before, **given(**vars(self)))


@commands.command()
def create(
    site: OpenSite,
    output: Output,
    name: Name,
    namespace: NamespaceName,
    keys: KeyOptions,
    numbers: SinkNumbers,
    sink: SinkUri = None,
    since: SinceOption = None,
    until: Target = None,
    description: Description = None,
    ranges: Annotated[int, "NUMBER", _RANGES_HELP] = 2,
    on_corrupt: OnCorruptOption = None,
    on_generation: OnGenerationOption = OnGeneration.FAIL,
) -> None:
    """Create a feed of a namespace's changes.

    From now on the site keeps the changes that the feed has not delivered. Without --since the
    feed begins with a snapshot, which has every key of the namespace, and goes on with the changes
    after it. `floodmark feed run` runs it. The URI of the sink is stored and shown, so it holds no
    secret: files with credentials are named by the runner, with feed run --allow.

    At a damaged change the feed stops, unless --on-corrupt lets it go on. `floodmark feed show`
    lists the changes that it leaves out.

    Examples:
      floodmark feed create data/oslo lake users --sink parquet:exports/users
      floodmark feed create data/oslo lake users --sink parquet:exports --since now
    """
    if sink is None:
        raise Usage("a feed needs a sink", "--sink parquet:directory, or another of feed create --help")
    site.feeds.create(
        name,
        namespace,
        sink,
        since="snapshot" if since is None else since,
        until=until,
        **keys.given(),
        description=description or "",
        ranges=ranges,
        options=numbers.replace(SinkOptions()),
        on_corrupt=on_corrupt or OnCorrupt.FAIL,
        on_generation=on_generation,
    )
    show(site, output, name)


@commands.command("list")
def list_feeds(site: OpenSite, output: Output) -> None:
    """List the feeds of a site, with how far they are.

    The lag is how much would be missing at the sink if the site were lost now.
    """
    resolved, now_ms = site.resolved_version(), site.host.physical_ms()
    found = [_fields(feed, measure(feed, resolved, now_ms)) for feed in site.feeds.list()]
    columns: dict[str, Column[dict[str, Any]]] = {
        "name": "name",
        "state": "state",
        "checkpoint": "checkpoint",
        "lag": "checkpoint_lag_ms",
        "sink": "sink",
        "run by": lambda each: each["holder"] or "none",
    }
    output.rows(found, columns)
    for each in found:
        if each["alarm"] is not None and not output.json:
            note(f"alarm of {each['name']}: {each['alarm']}")


@commands.command()
def show(site: OpenSite, output: Output, name: Name) -> None:
    """Show a feed: what it does, and how far it is."""
    feed = site.feeds.show(name)
    measured = measure(feed, site.resolved_version(), site.host.physical_ms())
    spec, options = feed.spec, feed.spec.options
    rate = "" if options.rate_bytes_max is None else f", at most {options.rate_bytes_max:,} bytes/s"
    snapshot = ", at its snapshot" if feed.is_at_snapshot else ""
    damage = f"{spec.on_corrupt}, {show_count(feed.skipped_count, 'change')} left out"
    pairs = [
        ("name", feed.name),
        ("state", feed.state),
        ("namespace", spec.namespace),
        ("keys", show_keys(spec.keys())),
        ("sink", f"{spec.sink}, {options.concurrency} at a time, {options.batch_records:,} a batch{rate}"),
        ("checkpoint", show_version(feed.checkpoint) + snapshot),
        ("until", "for ever" if spec.until is None else show_version(spec.until)),
        ("lag", show_lag(measured.checkpoint_lag_ms)),
        ("ranges", f"{len(feed.ranges):,} of at most {spec.ranges:,}"),
        ("run by", measured.holder or "none"),
        *_check_pairs(measured),
        ("at a swap", None if spec.on_generation is OnGeneration.FAIL else spec.on_generation),
        ("damaged", damage if spec.on_corrupt is not OnCorrupt.FAIL or feed.skipped_count else None),
        ("left out", [f"{show_bytes(each.key)} at {each.version}" for each in feed.skipped]),
        ("description", spec.description or None),
        ("error", None if feed.error is None else feed.error.text),
    ]
    output.result(_fields(feed, measured), pairs)


@commands.command()
def pause(site: OpenSite, output: Output, name: Name) -> None:
    """Stop a feed; its runner ends within about a second.

    Changes that it has not delivered are kept for another 24 hours.
    """
    site.feeds.pause(name)
    show(site, output, name)


@commands.command()
def resume(site: OpenSite, output: Output, name: Name, since: SinceOption = None) -> None:
    """Let a feed go on from its checkpoint, or from somewhere else.

    --since is for a feed that failed. snapshot delivers every key again, and later changes; give
    the feed an empty sink then (feed update --sink), because a snapshot has no deletions. With a
    version, the changes between the checkpoint and it are not delivered.

    Examples:
      floodmark feed resume data/oslo lake
      floodmark feed resume data/oslo lake --since snapshot
      floodmark feed resume data/oslo lake --since 467077993267200001
    """
    site.feeds.resume(name, since=since)
    show(site, output, name)


@commands.command()
def update(
    site: OpenSite,
    output: Output,
    name: Name,
    numbers: SinkNumbers,
    sink: SinkUri = None,
    until: Target = None,
    no_until: Annotated[bool, "Remove the end of the feed."] = False,
    description: Description = None,
    ranges: Annotated[int | None, "NUMBER", _RANGES_HELP] = None,
    on_corrupt: OnCorruptOption = None,
    on_generation: OnGenerationUpdate = None,
) -> None:
    """Change a feed that does not run.

    Pause it first. Options that are not named stay, and so do the keys that it delivers.

    Examples:
      floodmark feed update data/oslo lake --ranges 8 --batch-records 10000
      floodmark feed update data/oslo lake --no-until
    """
    if until is not None and no_until:
        raise Usage("--until and --no-until exclude each other", "name one of them")
    changes = given(
        sink=sink,
        until=until,
        description=description,
        ranges=ranges,
        on_corrupt=on_corrupt,
        on_generation=on_generation,
    )
    if no_until:
        changes["until"] = None
    before = site.feeds.show(name).spec.options
    options = numbers.replace(before)
    if options != before:
        changes["options"] = options
    if not changes:
        raise Usage("nothing to change", "floodmark feed update --help")
    site.feeds.update(name, **changes)
    show(site, output, name)


@commands.command()
def remove(site: OpenSite, output: Output, name: Name) -> None:
    """Remove a feed: garbage collection waits for it no longer.  What was delivered stays."""
    site.feeds.remove(name)
    output.result({"name": name, "removed": True}, f"removed {name}")


@commands.command()
def rebalance(site: OpenSite, output: Output, name: Name) -> None:
    """Cut a feed into ranges anew, along the partitions."""
    site.feeds.rebalance(name)
    show(site, output, name)


@commands.command()
def statistics(site: OpenSite, output: Output, name: Name) -> None:
    """Show how far a feed lags behind its site.

    The checkpoint lag is how much would be missing at the sink if the site were lost now; the
    resolved lag is the part of it that lies in the site itself.

    Example:
      floodmark feed statistics data/oslo lake --json
    """
    measured = site.feeds.statistics(name)
    pairs = [
        ("name", measured.name),
        ("state", measured.state),
        ("checkpoint", show_version(measured.checkpoint)),
        ("checkpoint lag", show_lag(measured.checkpoint_lag_ms)),
        ("resolved", show_version(measured.resolved_version)),
        ("resolved lag", show_lag(measured.resolved_lag_ms)),
        ("ranges", measured.ranges),
        ("run by", measured.holder or "none"),
    ]
    output.result(plain(measured), [*pairs, *_check_pairs(measured)])


@commands.command()
def run(
    location: Location,
    name: Name,
    spark: SparkChoice,
    monitoring: MetricsOptions,
    once: Annotated[bool, "End when everything up to the present is delivered."] = False,
    no_wait: Annotated[
        bool, "Fail if another process runs the feed, instead of waiting to take over."
    ] = False,
    allow: Annotated[
        list[str] | None,
        "URI",
        "Allow sinks whose URI begins with this. May be given several times.",
    ] = None,
    runner: Annotated[str, "process|spark", "In this process, or as a Spark query."] = "process",
    on_corrupt: OnCorruptOption = None,
    json: Json = False,
) -> None:
    """Run a feed, until Ctrl-C.

    The sink is written with the rights of this process, so --allow must name it, or a directory
    above it, unless it is stdout: or blackhole:. Files with credentials are named in --allow too,
    not in the feed: SINK?password_file=FILE, and likewise tls_root_file, tls_certificate_file and
    tls_key_file.

    Ctrl-C and SIGTERM end the run cleanly: it finishes the current batch and stores the
    checkpoint. One process at a time runs a feed; a second one waits, and takes over when the
    first ends. With --json, a line a second reports the progress. With the sink stdout:, all
    other output goes to stderr.

    Examples:
      floodmark feed run data/oslo lake --allow parquet:exports
      floodmark feed run grpc://127.0.0.1:7100 lake --allow parquet:exports --metrics 127.0.0.1:9102
      floodmark feed run grpc://oslo:7100 copy --allow … --runner spark --master spark://rome:7077
    """
    if runner not in ("process", "spark"):
        raise Usage(f"--runner is process or spark, not {runner!r:.60}", "floodmark feed run --help")
    if runner == "spark" and on_corrupt is not None:
        raise Usage("--on-corrupt is for the runner process", "floodmark feed update --on-corrupt")
    if runner == "process" and spark != SparkChoice():
        raise Usage("--master, --remote and --conf are for Spark", "floodmark feed run --runner spark")
    page = FeedRunMetrics()
    if runner == "spark":
        with (
            serving_page(page, monitoring),
            reach(location) as (source,),
            spark_job(spark, "feed", in_order=True) as job,
        ):
            summary = job.run("run_feed", source, name, sinks=allow or (), once=once, watch=page.watch)
        Output(json=json).report(summary)
        code = DONE if summary.state in _SOUND else FINDING
    else:
        with serving_page(page, monitoring), open_site(location, background=True) as site:
            make = site.feeds.runner
            feed_runner = make(name, sinks=allow or (), wait_for_lease=not no_wait, on_corrupt=on_corrupt)
            page.watch(feed_runner.statistics)
            code = _run_here(site, feed_runner, site.feeds.show(name).spec, on_corrupt, once=once, json=json)
    if code:
        raise typer.Exit(code)


def _run_here(
    site: floodmark.Site,
    runner: FeedRunner,
    spec: FeedSpec,
    on_corrupt: OnCorrupt | None,
    *,
    once: bool,
    json: bool,
) -> int:
    """Run a feed until a signal stops it, and print its end; returns the exit code."""
    scheme = parse_sink(spec.sink).scheme
    # A sink that writes to stdout has it for itself.
    output = Output(json=json, stream=sys.stderr if scheme == "stdout" else sys.stdout)
    output.flushes = True
    target = site.resolved_version() if once else None
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
        yield lambda statistics: output.object(_runner_fields(statistics))
        return
    console = console_on(sys.stderr)
    if not console.is_terminal or (is_stdout_taken and sys.stdout.isatty()):
        yield lambda _: None
        return
    with Live(console=console, auto_refresh=False, transient=True) as live:
        yield lambda statistics: live.update(Text(describe(statistics)), refresh=True)


def describe(statistics: RunnerStatistics) -> str:
    """The state of a runner in one line."""
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
        output.object({**_runner_fields(statistics), "state": state.value, "ended": True})
        return
    delivered = show_count(statistics.changes, "change")
    output.line(
        f"{statistics.feed} is {state}: {delivered} delivered, up to {show_version(statistics.checkpoint)}"
    )
    if state is FeedState.STOPPED:
        note(f"the feed was paused; floodmark feed resume lets {statistics.feed} go on")
    elif statistics.problem is not None:
        note(f"the last error: {statistics.problem}")


def _runner_fields(statistics: RunnerStatistics) -> dict[str, object]:
    fields = plain(statistics)
    del fields["ranges"]
    return {**fields, "ended": False}


def _check_pairs(measured: FeedStatistics) -> list[tuple[str, object]]:
    """The result of the checks against heartbeats, and one line for each finding."""
    findings = [f"{show_time(compose(each.at_ms, 0))}: {each.text}" for each in measured.checks.findings]
    return [("checked", str(measured.checks)), ("finding", findings), ("alarm", measured.alarm)]


def _fields(feed: Feed, measured: FeedStatistics) -> dict[str, Any]:
    spec = plain(feed.spec)
    return {
        **plain(measured),
        **{field: value for field, value in spec.items() if field not in ("name", "options", "ranges")},
        **plain(feed.spec.options),
        "ranges_max": feed.spec.ranges,
        "ranges": [
            {
                "id": part.id,
                **json_bytes("start_key", part.keys.start[NAMESPACE_BYTES:]),
                "checkpoint": str(part.checkpoint),
                "resolved": str(part.resolved),
                "place": show_place(Resolved(part.checkpoint, part.snapshot)),
            }
            for part in feed.ranges
        ],
        "error": None if feed.error is None else feed.error.text,
        "skipped_count": feed.skipped_count,
        "skipped": [plain(each) for each in feed.skipped],
    }
