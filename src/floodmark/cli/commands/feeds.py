"""feed create, list, show, pause, resume, update, remove, rebalance, statistics and run."""

from typing import Annotated, Any, Final

import msgspec
import typer

import floodmark
from floodmark.cli.arguments import (
    EndKey,
    Json,
    Location,
    NamespaceName,
    Prefix,
    SinceOption,
    StartKey,
    text_option,
    version_option,
)
from floodmark.cli.commands.changes import OnCorruptOption
from floodmark.cli.commands.feed_run import run_feed, run_feed_on_spark
from floodmark.cli.commands.subscriptions import show_keys
from floodmark.cli.failures import Usage
from floodmark.cli.jobs import Conf, Master, Remote, SparkChoice
from floodmark.cli.opening import open_site
from floodmark.cli.render.fields import plain, show_cell
from floodmark.cli.render.output import Output, note
from floodmark.cli.render.text import (
    json_bytes,
    show_bytes,
    show_count,
    show_lag,
    show_place,
    show_time,
    show_version,
)
from floodmark.codec.ordered import NAMESPACE_BYTES
from floodmark.feed.named.feeds import Feed, FeedStatistics, SinkOptions, measure
from floodmark.feed.reading.items import OnCorrupt
from floodmark.model import Resolved, Version
from floodmark.model.version import compose

commands = typer.Typer(help="Deliver changes elsewhere: create, run, list, change and remove feeds.")

RANGES: Final = 2

_SINK_HELP: Final = "Where to: parquet:directory, stdout: or blackhole:."
_UNTIL_HELP: Final = "Finish when everything up to this is delivered; without it, never."
_RANGES_HELP: Final = "How many parts, along partitions, to cut it into; 1 delivers all in commit order."
_ALLOW_HELP: Final = "A sink that may be written to: the beginning of its URI. May be given several times."


def _number(name: str, help_text: str, **more: Any) -> Any:
    return text_option(name, "NUMBER", help_text, **more)


Name = Annotated[str, typer.Argument(metavar="NAME", help="The feed's name.")]
SinkUri = Annotated[str | None, text_option("--sink", "URI", _SINK_HELP)]
Target = Annotated[Version | None, version_option("--until", _UNTIL_HELP)]
Description = Annotated[str | None, text_option("--description", "TEXT", "What it is for, for people.")]
Ranges = Annotated[int | None, _number("--ranges", _RANGES_HELP, show_default=str(RANGES))]
Concurrency = Annotated[int | None, _number("--concurrency", "How many ranges write at a time.")]
BatchRecords = Annotated[int | None, _number("--batch-records", "Changes in a batch, about.")]
BackoffMs = Annotated[
    int | None, _number("--backoff-ms", "Pause before a failed write is repeated; it doubles.")
]
LingerMs = Annotated[int | None, _number("--linger-ms", "How long a batch that is not full waits for more.")]
RateBytesMax = Annotated[int | None, _number("--rate-bytes-max", "At most so many bytes a second.")]


@commands.command()
def create(
    location: Location,
    name: Name,
    namespace: NamespaceName,
    sink: SinkUri = None,
    since: SinceOption = None,
    until: Target = None,
    start_key: StartKey = None,
    end_key: EndKey = None,
    prefix: Prefix = None,
    description: Description = None,
    ranges: Ranges = None,
    concurrency: Concurrency = None,
    batch_records: BatchRecords = None,
    backoff_ms: BackoffMs = None,
    linger_ms: LingerMs = None,
    rate_bytes_max: RateBytesMax = None,
    on_corrupt: OnCorruptOption = None,
    json: Json = False,
) -> None:
    """Create a feed of a namespace's changes.

    From now on the site keeps the changes that the feed has not delivered. Without --since the
    feed begins with a snapshot, which has every key of the namespace, and goes on with the changes
    after it. `floodmark feed run` runs it. The URI of the sink is stored and shown, so it holds no
    secret: files with credentials are named by the runner, with feed run --allow.

    At a damaged change the feed stops, unless --on-corrupt lets it go on. `floodmark feed show`
    lists the changes that it leaves out.

    \b
    Examples:
      floodmark feed create data/oslo lake users --sink parquet:exports/users
      floodmark feed create data/oslo lake users --sink parquet:exports --since now
    """
    if sink is None:
        raise Usage("a feed needs a sink", "--sink parquet:directory, or another of feed create --help")
    options = _options(SinkOptions(), concurrency, batch_records, backoff_ms, linger_ms, rate_bytes_max)
    with open_site(location) as site:
        site.feeds.create(
            name,
            namespace,
            sink,
            since="snapshot" if since is None else since,
            until=until,
            start_key=start_key or b"",
            end_key=end_key,
            prefix=prefix,
            description=description or "",
            ranges=RANGES if ranges is None else ranges,
            options=options,
            on_corrupt=on_corrupt or OnCorrupt.FAIL,
        )
        _print_one(site, name, json=json)


@commands.command("list")
def list_feeds(location: Location, json: Json = False) -> None:
    """List the feeds of a site, with how far they are.

    The lag is how much would be missing at the sink if the site were lost now.

    \b
    Example:
      floodmark feed list data/oslo
    """
    with open_site(location) as site:
        resolved, now_ms = site.resolved_version(), site.host.physical_ms()
        found = [(feed, measure(feed, resolved, now_ms)) for feed in site.feeds.list()]
    Output(json=json).rows(
        found,
        {
            "name": lambda each: each[0].name,
            "state": lambda each: each[0].state.value,
            "checkpoint": lambda each: show_cell(each[0], "checkpoint"),
            "lag": lambda each: show_lag(each[1].checkpoint_lag_ms),
            "sink": lambda each: each[0].spec.sink,
            "run by": lambda each: each[1].holder or "none",
        },
        lambda each: _fields(*each),
    )
    for feed, statistics in found:
        if statistics.alarm is not None and not json:
            note(f"alarm of {feed.name}: {statistics.alarm}")


@commands.command()
def show(location: Location, name: Name, json: Json = False) -> None:
    """Show a feed: what it does, and how far it is.

    \b
    Example:
      floodmark feed show data/oslo lake
    """
    with open_site(location) as site:
        _print_one(site, name, json=json)


@commands.command()
def pause(location: Location, name: Name, json: Json = False) -> None:
    """Stop a feed; its runner ends within about a second.

    Changes that it has not delivered are kept for another 24 hours.

    \b
    Example:
      floodmark feed pause data/oslo lake
    """
    with open_site(location) as site:
        site.feeds.pause(name)
        _print_one(site, name, json=json)


@commands.command()
def resume(location: Location, name: Name, since: SinceOption = None, json: Json = False) -> None:
    """Let a feed go on from its checkpoint, or from somewhere else.

    --since is for a feed that failed. snapshot delivers every key again, and later changes; give
    the feed an empty sink then (feed update --sink), because a snapshot has no deletions. With a
    version, the changes between the checkpoint and it are not delivered.

    \b
    Examples:
      floodmark feed resume data/oslo lake
      floodmark feed resume data/oslo lake --since snapshot
      floodmark feed resume data/oslo lake --since 467077993267200001
    """
    with open_site(location) as site:
        site.feeds.resume(name, since=since)
        _print_one(site, name, json=json)


@commands.command()
def update(
    location: Location,
    name: Name,
    sink: SinkUri = None,
    until: Target = None,
    no_until: Annotated[bool, typer.Option("--no-until", help="Let it go on for ever.")] = False,
    description: Description = None,
    ranges: Ranges = None,
    concurrency: Concurrency = None,
    batch_records: BatchRecords = None,
    backoff_ms: BackoffMs = None,
    linger_ms: LingerMs = None,
    rate_bytes_max: RateBytesMax = None,
    on_corrupt: OnCorruptOption = None,
    json: Json = False,
) -> None:
    """Change a feed that does not run.

    Pause it first. Options that are not named stay, and so do the keys that it delivers.

    \b
    Examples:
      floodmark feed update data/oslo lake --ranges 8 --batch-records 10000
      floodmark feed update data/oslo lake --no-until
    """
    if until is not None and no_until:
        raise Usage("--until and --no-until exclude each other", "name one of them")
    named = {
        "sink": sink,
        "until": until,
        "description": description,
        "ranges": ranges,
        "on_corrupt": on_corrupt,
    }
    changes: dict[str, object] = {name: value for name, value in named.items() if value is not None}
    if no_until:
        changes["until"] = None
    with open_site(location) as site:
        before = site.feeds.show(name).spec.options
        options = _options(before, concurrency, batch_records, backoff_ms, linger_ms, rate_bytes_max)
        if options != before:
            changes["options"] = options
        if not changes:
            raise Usage("nothing to change", "floodmark feed update --help")
        site.feeds.update(name, **changes)
        _print_one(site, name, json=json)


@commands.command()
def remove(location: Location, name: Name, json: Json = False) -> None:
    """Remove a feed: garbage collection waits for it no longer.  What was delivered stays.

    \b
    Example:
      floodmark feed remove data/oslo lake
    """
    with open_site(location) as site:
        site.feeds.remove(name)
    Output(json=json).result({"name": name, "removed": True}, f"removed {name}")


@commands.command()
def rebalance(location: Location, name: Name, json: Json = False) -> None:
    """Cut a feed into ranges anew, along the partitions.

    \b
    Example:
      floodmark feed rebalance data/oslo lake
    """
    with open_site(location) as site:
        site.feeds.rebalance(name)
        _print_one(site, name, json=json)


@commands.command()
def statistics(location: Location, name: Name, json: Json = False) -> None:
    """Show how far a feed lags behind its site.

    The checkpoint lag is how much would be missing at the sink if the site were lost now; the
    resolved lag is the part of it that lies in the site itself.

    \b
    Example:
      floodmark feed statistics data/oslo lake --json
    """
    with open_site(location) as site:
        measured = site.feeds.statistics(name)
    Output(json=json).result(
        plain(measured),
        [
            ("name", measured.name),
            ("state", measured.state.value),
            ("checkpoint", show_version(measured.checkpoint)),
            ("checkpoint lag", show_lag(measured.checkpoint_lag_ms)),
            ("resolved", show_version(measured.resolved_version)),
            ("resolved lag", show_lag(measured.resolved_lag_ms)),
            ("ranges", f"{measured.ranges:,}"),
            ("run by", measured.holder or "none"),
            *_check_pairs(measured),
        ],
    )


@commands.command()
def run(
    location: Location,
    name: Name,
    once: Annotated[
        bool, typer.Option("--once", help="End when everything up to the present is delivered.")
    ] = False,
    no_wait: Annotated[
        bool,
        typer.Option("--no-wait", help="Fail if another process runs it, instead of waiting to take over."),
    ] = False,
    allow: Annotated[list[str] | None, text_option("--allow", "URI", _ALLOW_HELP)] = None,
    runner: Annotated[
        str, text_option("--runner", "process|spark", "In this process, or as a Spark query.")
    ] = "process",
    master: Master = None,
    remote: Remote = None,
    conf: Conf = None,
    on_corrupt: OnCorruptOption = None,
    json: Json = False,
) -> None:
    """Run a feed, until Ctrl-C.

    The feed's sink is written with the rights of this process, so it must be allowed here, unless
    it is stdout: or blackhole:. --allow names a place, and covers what lies below it. Files with
    credentials are named here as well, and not by the feed: kafka://…?password_file=FILE, and
    likewise tls_root_file, tls_certificate_file and tls_key_file.

    Ctrl-C and SIGTERM end it cleanly: the current batch is finished, and the checkpoint is
    stored. One process at a time runs a feed; another waits, and takes over when the first is
    gone. With --json, a line a second says how far it is. The sink stdout: has stdout for
    itself, and everything else then goes to stderr.

    \b
    Examples:
      floodmark feed run data/oslo lake --allow parquet:exports
      floodmark feed run grpc://127.0.0.1:7100 lake --allow parquet:exports
      floodmark feed run grpc://127.0.0.1:7100 copy --allow … --runner spark --master spark://rome:7077
    """
    if runner not in ("process", "spark"):
        raise Usage(f"--runner is process or spark, not {runner!r:.60}", "floodmark feed run --help")
    choice = SparkChoice(master=master, remote=remote, conf=conf)
    if runner == "spark" and on_corrupt is not None:
        raise Usage("--on-corrupt is for the runner process", "floodmark feed update --on-corrupt")
    if runner == "spark":
        code = run_feed_on_spark(location, name, choice, sinks=allow or (), once=once, json=json)
    elif choice != SparkChoice(master=None, remote=None, conf=None):
        raise Usage("--master, --remote and --conf are for Spark", "floodmark feed run --runner spark")
    else:
        with open_site(location, background=True) as site:
            code = run_feed(
                site,
                name,
                sinks=allow or (),
                once=once,
                wait_for_lease=not no_wait,
                on_corrupt=on_corrupt,
                json=json,
            )
    if code:
        raise typer.Exit(code)


def _options(
    before: SinkOptions,
    concurrency: int | None,
    batch_records: int | None,
    backoff_ms: int | None,
    linger_ms: int | None,
    rate_bytes_max: int | None,
) -> SinkOptions:
    named = {
        "concurrency": concurrency,
        "batch_records": batch_records,
        "backoff_ms": backoff_ms,
        "linger_ms": linger_ms,
        "rate_bytes_max": rate_bytes_max,
    }
    given = {option: number for option, number in named.items() if number is not None}
    return msgspec.structs.replace(before, **given)


def _print_one(site: floodmark.Site, name: str, *, json: bool) -> None:
    feed = site.feeds.show(name)
    measured = measure(feed, site.resolved_version(), site.host.physical_ms())
    spec, options = feed.spec, feed.spec.options
    rate = "" if options.rate_bytes_max is None else f", at most {options.rate_bytes_max:,} bytes/s"
    pairs = [
        ("name", feed.name),
        ("state", feed.state.value),
        ("namespace", spec.namespace),
        ("keys", show_keys(spec.keys())),
        ("sink", f"{spec.sink}, {options.concurrency} at a time, {options.batch_records:,} a batch{rate}"),
        ("checkpoint", show_version(feed.checkpoint) + (", at its snapshot" if feed.is_at_snapshot else "")),
        ("until", "for ever" if spec.until is None else show_version(spec.until)),
        ("lag", show_lag(measured.checkpoint_lag_ms)),
        ("ranges", f"{len(feed.ranges):,} of at most {spec.ranges:,}"),
        ("run by", measured.holder or "none"),
        *_check_pairs(measured),
    ]
    if spec.on_corrupt is not OnCorrupt.FAIL or feed.skipped_count:
        pairs.append(("damaged", f"{spec.on_corrupt}, {show_count(feed.skipped_count, 'change')} left out"))
        pairs += [("left out", f"{show_bytes(each.key)} at {each.version}") for each in feed.skipped]
    if spec.description:
        pairs.append(("description", spec.description))
    if feed.error is not None:
        pairs.append(("error", feed.error.text))
    Output(json=json).result(_fields(feed, measured), pairs)


def _check_pairs(measured: FeedStatistics) -> list[tuple[str, str]]:
    """What heartbeats have shown, and one line for each finding."""
    pairs = [("checked", str(measured.checks))]
    for finding in measured.checks.findings:
        pairs.append(("finding", f"{show_time(compose(finding.at_ms, 0))}: {finding.text}"))
    return pairs if measured.alarm is None else [*pairs, ("alarm", measured.alarm)]


def _fields(feed: Feed, measured: FeedStatistics) -> dict[str, object]:
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
        "skipped": [
            {**json_bytes("key", each.key), "version": str(each.version), "reason": each.reason}
            for each in feed.skipped
        ],
    }
