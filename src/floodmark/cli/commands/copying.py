"""replicate and export: copy changes to another site, or into a lakehouse table."""

import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from importlib.abc import MetaPathFinder
from importlib.util import find_spec
from pathlib import Path
from threading import Event
from typing import Annotated, Final

import typer

from floodmark.cli.arguments import Location, NamespaceName
from floodmark.cli.commands.topology import read_topology
from floodmark.cli.failures import FINDING, UNREACHABLE, Usage
from floodmark.cli.jobs import Bars, SparkChoice, reach, shared_credentials, spark_job
from floodmark.cli.monitoring import MetricsOptions, ReplicateMetrics, serving_page
from floodmark.cli.opening import ConnectionOptions, connection_options, owns_process
from floodmark.cli.render.output import Output, plain
from floodmark.cli.render.progress import progress
from floodmark.cli.render.text import show_count, show_lag
from floodmark.cli.signals import on_stop_signal
from floodmark.links.driver import LinkSummary, TopologySummary, run_links, site_addresses
from floodmark.links.pair import LinkPair
from floodmark.links.process import ProcessRunner
from floodmark.model import Version
from floodmark.replication.topology import Topology
from floodmark.site.address import SiteAddress

PROCESS: Final = "process"
SPARK: Final = "spark"
_TOPOLOGY_ALONE: Final = "--topology names the sites and their namespaces"


@dataclass(frozen=True, kw_only=True)
class TargetOptions:
    """The credentials for a target that has its own."""

    target_token_file: Annotated[Path | None, "FILE", "The token for the target, if it has its own."] = None
    target_tls_root: Annotated[Path | None, "FILE", "The certificates to verify the target with."] = None
    target_tls_certificate: Annotated[Path | None, "FILE", "The client certificate for the target."] = None
    target_tls_key: Annotated[Path | None, "FILE", "Its private key."] = None

    def connection(self) -> ConnectionOptions | None:
        """The options for the target, if any is given."""
        files = {name.removeprefix("target_"): file for name, file in vars(self).items()}
        if not any(files.values()):
            return None
        return ConnectionOptions(**files, timeout=connection_options.get().timeout)


def replicate(
    output: Output,
    own: TargetOptions,
    spark: SparkChoice,
    monitoring: MetricsOptions,
    source: Annotated[
        str | None, typer.Argument(metavar="SOURCE", help="A site: its directory, or its server's URL.")
    ] = None,
    target: Annotated[
        str | None, typer.Argument(metavar="TARGET", help="Another site, which gets the changes of SOURCE.")
    ] = None,
    topology: Annotated[Path | None, "FILE", "The sites and the namespaces they share, in TOML."] = None,
    namespace: Annotated[list[str] | None, "NAMESPACE", "May be given several times; all by default."] = None,
    once: Annotated[bool, "End when all present changes have arrived."] = False,
    runner: Annotated[
        str | None,
        "process|spark",
        "Run links in this process (the default with --once, and without Spark), or on Spark.",
    ] = None,
) -> None:
    """Replicate between sites, in all directions or in one.

    Runs until Ctrl-C. With a topology, every site gets the changes that were first written at its
    sources. From SOURCE to TARGET, the target gets the changes that were first written at the
    source; both sites remember the pair as a topology with one direction.

    The targets store the positions, and check by heartbeats that no change is lost: see `floodmark status`.
    So replication may be killed, moved to another machine, or run twice.

    Examples:
      floodmark replicate --topology topology.toml --metrics 127.0.0.1:9101
      floodmark replicate grpc://oslo:7100 grpc://rome:7100 --runner process
      floodmark replicate data/oslo data/rome --namespace users --once
    """
    chosen = _choose_runner(runner, spark, once=once)
    own_options = own.connection()
    page = ReplicateMetrics()
    if topology is not None:
        if source or target or namespace or own_options:
            raise Usage(_TOPOLOGY_ALONE, "floodmark replicate --topology FILE [--once]")
        members = read_topology(topology)
        addresses = site_addresses(members, **shared_credentials())
        with serving_page(page, monitoring):
            summary = _run(members, addresses, chosen, spark, page, once=once)
    elif source is None or target is None:
        raise Usage("name a topology, or a source and a target", "floodmark replicate --help")
    else:
        with (
            serving_page(page, monitoring),
            reach(source, target, target=own_options) as (source_site, target_site),
        ):
            with progress("preparing the target; a copy of older data begins with a snapshot"):
                pair = LinkPair.of(source_site, target_site, namespace or ())
            summary = pair.complete(_run(pair.topology, pair.addresses, chosen, spark, page, once=once))
    if output.json:
        output.object(plain(summary))
    else:
        _print(output, summary)
    if summary.wrong:
        raise typer.Exit(FINDING)
    if once and any(link.stalled for link in summary.links):
        raise typer.Exit(UNREACHABLE)


def _print(output: Output, summary: TopologySummary) -> None:
    """Print how much was copied, how old it was on arrival, and what needs a look."""
    copied = show_count(summary.changes, "change")
    if summary.snapshot_records:
        copied = f"{show_count(summary.snapshot_records, 'record')} by snapshot and {copied}"
    output.line(f"copied {copied} in {show_lag(summary.elapsed_ms)}{_describe_lag(summary.links)}")
    if summary.restarts:
        output.line(f"Spark's query failed and was restarted {show_count(summary.restarts, 'time')}")
    # Links that wait for the same reason share a line.
    waiting: dict[str, list[str]] = {}
    for link in summary.links:
        if link.wrong:
            output.line(
                ("wrong   ", "red"),
                f"changes from {link.source} to {link.target} were lost or doubled; compare the sites: "
                "floodmark verify",
            )
        if link.stalled is not None:
            waiting.setdefault(link.stalled, []).append(f"{link.source} to {link.target}")
    for reason, links in waiting.items():
        output.line(("waiting ", "yellow"), f"{', '.join(links)}: {reason}")


def _describe_lag(links: Sequence[LinkSummary]) -> str:
    """The time from write to arrival, over all links that have copied changes."""
    moved = [link for link in links if link.changes]
    half = max((link.lag_ms_p50 for link in moved if link.lag_ms_p50 is not None), default=None)
    most = max((link.lag_ms_p99 for link in moved if link.lag_ms_p99 is not None), default=None)
    if half is None or most is None:
        return ""
    if half == most:
        return f"; arrived within {show_lag(most)} of the write"
    return f"; half of them arrived within {show_lag(half)} of their write, 99 % within {show_lag(most)}"


def _choose_runner(runner: str | None, choice: SparkChoice, *, once: bool) -> str:
    """The runner to use.  By default --once avoids Spark, whose start takes longer than most runs."""
    asks_for_spark = any((choice.master, choice.remote, choice.conf))
    if runner not in (None, SPARK, PROCESS):
        raise Usage(f"--runner is {SPARK} or {PROCESS}, not {runner!r:.60}", "floodmark replicate --help")
    if runner == PROCESS and asks_for_spark:
        raise Usage(f"--runner {PROCESS} does not use Spark, and takes no option of it", "--runner spark")
    if runner is None and not asks_for_spark and once:
        return PROCESS
    return runner or (SPARK if asks_for_spark or find_spec("pyspark") is not None else PROCESS)


class _WithoutPandas(MetaPathFinder):
    """Keeps pyarrow from importing pandas where it is installed: 40 MiB that links do not use."""

    def find_spec(self, name: str, path: object, target: object = None) -> None:
        if name == "pandas":
            raise ModuleNotFoundError("links do not use pandas", name=name)


def _run(
    topology: Topology,
    addresses: Mapping[str, SiteAddress],
    runner: str,
    choice: SparkChoice,
    page: ReplicateMetrics,
    *,
    once: bool,
) -> TopologySummary:
    with ExitStack() as stack:
        if runner == PROCESS:
            if owns_process.get():
                sys.meta_path.insert(0, _WithoutPandas())
            stop = Event()
            bars = stack.enter_context(Bars("replicate", "connecting"))
            stack.enter_context(on_stop_signal(stop.set))
            return run_links(
                topology, addresses, ProcessRunner(), once=once, progress=bars, watch=page.watch, stop=stop
            )
        job = stack.enter_context(spark_job(choice, "replicate", in_order=True))
        summary: TopologySummary = job.run(
            "replicate_topology", topology, addresses, once=once, watch=page.watch
        )
        return summary


def export(
    location: Location,
    namespace: NamespaceName,
    target: Annotated[str, "TABLE", "The table's directory; made if it is missing."],
    output: Output,
    spark: SparkChoice,
    format: Annotated[str, "delta|parquet", "The format of the table."] = "delta",
    view: Annotated[
        str, "history|current", "One row for each change, or one row for each live key."
    ] = "history",
    once: Annotated[bool, "End when all present changes have arrived."] = False,
    until: Annotated[Version | None, "VERSION|TIME", "Only changes up to this, inclusive."] = None,
    at_heartbeats: Annotated[
        bool, "End each step at a heartbeat, so that several exports can end at the same point in time."
    ] = False,
) -> None:
    """Export changes into a Delta or Parquet table.

    Runs until Ctrl-C, or up to --until. Each change is exported exactly once: the same command
    continues where the last one ended, also after a crash.

    Examples:
      floodmark export data/oslo users lake/users --once
      floodmark export grpc://127.0.0.1:7100 users lake/users_now --view current
    """
    for name, given, words in (
        ("--format", format, ("delta", "parquet")),
        ("--view", view, ("history", "current")),
    ):
        if given not in words:
            raise Usage(f"{name} is {' or '.join(words)}, not {given!r:.60}", "floodmark export --help")
    options: dict[str, object] = {"until": until, "at_heartbeats": at_heartbeats}
    with reach(location) as (source,), spark_job(spark, "export", in_order=True) as job:
        summary = job.run("export", source, namespace, target, format=format, view=view, once=once, **options)
    output.report(summary)
    if summary.wrong:
        raise typer.Exit(FINDING)
