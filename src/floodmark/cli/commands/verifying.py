"""verify: do sites agree, and if not, where?"""

from collections.abc import Iterator
from contextlib import closing, contextmanager, nullcontext
from datetime import timedelta
from pathlib import Path
from threading import Event
from typing import TYPE_CHECKING, Annotated, Any, Final

import msgspec
import typer

from floodmark.cli.arguments import InsecureMetrics, Json, duration_option, text_option
from floodmark.cli.commands.verify_metrics import VerifyMetrics
from floodmark.cli.failures import DONE, FINDING, UNKNOWN, Usage
from floodmark.cli.jobs import (
    Conf,
    Job,
    Master,
    Remote,
    SparkChoice,
    load_functions,
    reach,
    shared_credentials,
    spark_job,
)
from floodmark.cli.opening import read_topology
from floodmark.cli.render.output import Output, note
from floodmark.cli.render.verification import print_verification
from floodmark.divergence.outcome import Outcome
from floodmark.replication.topology import Topology
from floodmark.server.access import require_safe_metrics
from floodmark.server.health import HealthServer
from floodmark.server.serving import parse_listen

if TYPE_CHECKING:
    from collections.abc import Generator

    from floodmark.spark import SiteAddress
    from floodmark.spark.jobs import VerifySummary

SITES_MIN: Final = 2
EXIT_CODES: Final = {Outcome.AGREE: DONE, Outcome.DRIFT: FINDING, Outcome.UNKNOWN: UNKNOWN}

Locations = Annotated[
    list[str] | None, typer.Argument(metavar="SITE", help="Sites: their directories, or their servers' URLs.")
]
TopologyFile = Annotated[
    Path | None, text_option("--topology", "FILE", "Compare all sites of a topology, in TOML.")
]
Namespaces = Annotated[
    list[str] | None,
    text_option(
        "--namespace", "NAMESPACE", "May be given several times; all that the sites share if not said."
    ),
]
Repair = Annotated[bool, typer.Option("--repair", help="Give every key that has drifted its winner back.")]
History = Annotated[
    bool, typer.Option("--history", help="Walk the change logs too, for what was lost and written over.")
]
Report = Annotated[
    str | None, text_option("--report", "DIRECTORY", "Parquet with a row for each key that has drifted.")
]
Sample = Annotated[int, text_option("--sample", "N", "Print so many keys that have drifted.", min=0)]
MaxLag = Annotated[
    timedelta | None,
    duration_option(
        "--max-lag",
        "Lag is not believed where a site has not heard of another for so long.",
        show_default="60s",
    ),
]
Watch = Annotated[
    bool, typer.Option("--watch", help="Compare again and again what has changed, until Ctrl-C.")
]
Every = Annotated[
    timedelta | None,
    duration_option("--every", "With --watch: the pause between two passes.", show_default="10s"),
]
WholeEvery = Annotated[
    timedelta | None,
    duration_option("--whole-every", "With --watch: how often everything is read.", show_default="24h"),
]
Metrics = Annotated[
    str | None,
    text_option("--metrics", "HOST:PORT", "With --watch: where to serve /metrics and /health over HTTP."),
]


def verify(
    locations: Locations = None,
    topology: TopologyFile = None,
    namespace: Namespaces = None,
    repair: Repair = False,
    history: History = False,
    report: Report = None,
    sample: Sample = 20,
    max_lag: MaxLag = None,
    watch: Watch = False,
    every: Every = None,
    whole_every: WholeEvery = None,
    metrics: Metrics = None,
    insecure_metrics: InsecureMetrics = False,
    master: Master = None,
    remote: Remote = None,
    conf: Conf = None,
    json: Json = False,
) -> None:
    """Say whether sites agree, and which keys have drifted apart.

    Every record is compared, by digests, while writes go on. What is under way between the sites
    counts as lag and is never reported as drift: a key has drifted if each site has heard of all
    that the other holds, and they hold something else.

    --repair gives such a key the record that should have won, under the stamp that it was written
    with, unless the key has changed meanwhile; then it is compared again.

    The exit code is 0 if the sites agree, 1 if they have drifted apart, and 2 if it could not be
    told: a site does not answer, does not share the namespace, or replication does not run.
    With --watch it is that of the last pass.

    \b
    Examples:
      floodmark verify grpc://oslo:7100 grpc://rome:7100
      floodmark verify data/oslo data/rome --namespace users --report reports/users
      floodmark verify --topology topology.toml --repair
      floodmark verify --topology topology.toml --watch --every 30s --metrics 127.0.0.1:9100
    """
    named = locations or []
    if (topology is None) == (not named) or 0 < len(named) < SITES_MIN:
        raise Usage("name two sites or more, or a topology", "floodmark verify --help")
    of_one_pass = repair or history or report is not None
    _check_options(watch=watch, of_one_pass=of_one_pass, of_watching=any((every, whole_every, metrics)))
    members = None if topology is None else read_topology(topology)
    asked: dict[str, Any] = {"sample": sample, **_given(max_lag=max_lag)}
    choice, output = SparkChoice(master=master, remote=remote, conf=conf), Output(json=json, flush=watch)
    found, doubts = VerifyMetrics(), list[str]()
    with (
        nullcontext() if metrics is None else _serve(found, metrics, insecure=insecure_metrics),
        reach(*named, doubts=doubts) as reached,
    ):
        if doubts and len(reached) < SITES_MIN:
            raise typer.Exit(_tell_doubts(output, doubts))
        with _telling_of_repairs(repair), spark_job(choice, "verify") as job:
            asked |= {"spark": job.session, "progress": job.progress}
            addresses = reached if members is None else _member_addresses(job, members)
            if watch:
                asked |= {"stop": job.stop, **_given(every=every, whole_every=whole_every)}
                passes = job.functions.watch(addresses, namespace, **asked)
                outcome = _watch(passes, output, found, job.stop, doubts)
            else:
                asked |= {"report": report, "history": history, "repair": repair}
                summary = _with(doubts, job.functions.verify(addresses, namespace, **asked))
                outcome = summary.outcome
    if not watch:
        print_verification(output, summary)
    raise typer.Exit(EXIT_CODES[outcome])


@contextmanager
def _telling_of_repairs(repair: bool) -> Iterator[None]:
    """Warn of keys that a repair may have changed before a signal ended it."""
    try:
        yield
    except typer.Exit:
        if repair:
            note("some keys may have been repaired already; verify again to see which are left")
        raise


def _check_options(*, watch: bool, of_one_pass: bool, of_watching: bool) -> None:
    if watch and of_one_pass:
        raise Usage(
            "--watch only looks; --repair, --history and --report belong to a single pass",
            "floodmark verify SITE SITE --repair",
        )
    if of_watching and not watch:
        raise Usage("--every, --whole-every and --metrics belong to --watch", "floodmark verify --help")


def _member_addresses(job: Job, members: Topology) -> list["SiteAddress"]:
    return list(job.functions.site_addresses(members, **shared_credentials()).values())


def _given(**options: timedelta | None) -> dict[str, Any]:
    """The options that were given; the job has defaults for the others."""
    return {name: value for name, value in options.items() if value is not None}


def _with(doubts: list[str], summary: "VerifySummary") -> "VerifySummary":
    """A summary with the doubts about sites that could not be opened."""
    return msgspec.structs.replace(summary, doubts=[*doubts, *summary.doubts])


def _tell_doubts(output: Output, doubts: list[str]) -> int:
    """Print why no sites can be compared; the exit code."""
    summary = load_functions().VerifySummary(sites=[], pairs=[], doubts=doubts)
    print_verification(output, summary)
    return EXIT_CODES[summary.outcome]


def _watch(
    passes: "Generator[VerifySummary, None, None]",
    output: Output,
    found: VerifyMetrics,
    stop: Event,
    doubts: list[str],
) -> Outcome:
    """Print pass after pass; the outcome of the last complete one."""
    outcome = None
    try:
        with closing(passes):
            for summary in (_with(doubts, each) for each in passes):
                found.add(summary)
                print_verification(output, summary)
                outcome = summary.outcome
    except Exception:
        if outcome is None or not stop.is_set():
            raise
    return outcome or Outcome.UNKNOWN


def _serve(found: VerifyMetrics, listen: str, *, insecure: bool = False) -> HealthServer:
    where = parse_listen(listen)
    require_safe_metrics(where.host, insecure=insecure)
    server = HealthServer(
        where.host,
        where.port,
        metrics=found.render,
        is_healthy=lambda: None,
        is_ready=lambda: None if found.has_looked else "the first pass is under way",
        find_alarms=found.find_alarms,
    )
    note("metrics on http://{}:{}/metrics".format(*server.address))
    return server
