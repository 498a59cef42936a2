"""replicate and export: changes on their way to another site, or into a lakehouse table."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from floodmark.cli.arguments import Json, Location, NamespaceName
from floodmark.cli.connection import ConnectionOptions, connection_options
from floodmark.cli.failures import FINDING, Usage
from floodmark.cli.jobs import (
    Conf,
    Master,
    Remote,
    SparkChoice,
    print_summary,
    reach,
    shared_credentials,
    spark_job,
)
from floodmark.cli.opening import read_topology
from floodmark.cli.parsing import parse
from floodmark.cli.render.output import Output
from floodmark.model import Version
from floodmark.model.text import read_at

if TYPE_CHECKING:
    from floodmark.spark import SiteAddress
    from floodmark.spark.jobs import ReplicateSummary, TopologySummary

TargetTokenFile = Annotated[
    Path | None,
    typer.Option("--target-token-file", metavar="FILE", help="The token for the target, if it has its own."),
]
TargetTlsRoot = Annotated[
    Path | None,
    typer.Option("--target-tls-root", metavar="FILE", help="Certificates that vouch for the target."),
]
TargetTlsCertificate = Annotated[
    Path | None,
    typer.Option("--target-tls-certificate", metavar="FILE", help="Your own certificate for the target."),
]
TargetTlsKey = Annotated[
    Path | None, typer.Option("--target-tls-key", metavar="FILE", help="Its private key.")
]
_TOPOLOGY_ALONE = "--topology says what is copied where, and the sites keep how far they are"
Once = Annotated[bool, typer.Option("--once", help="End when everything up to the present is there.")]


def replicate(
    source: Annotated[
        str | None,
        typer.Argument(metavar="[SOURCE", help="A site: its directory, or its server's URL."),
    ] = None,
    target: Annotated[
        str | None, typer.Argument(metavar="TARGET]", help="Another site, to which its changes are copied.")
    ] = None,
    topology: Annotated[
        Path | None,
        typer.Option(
            "--topology", metavar="FILE", help="Sites and what they share, in TOML: copy in all directions."
        ),
    ] = None,
    checkpoint: Annotated[
        str | None,
        typer.Option(
            "--checkpoint",
            metavar="DIRECTORY",
            help="From SOURCE to TARGET: where Spark keeps how far it is, one for each pair.",
        ),
    ] = None,
    namespace: Annotated[
        list[str] | None,
        typer.Option("--namespace", metavar="NAMESPACE", help="May be given several times; all if not said."),
    ] = None,
    once: Once = False,
    target_token_file: TargetTokenFile = None,
    target_tls_root: TargetTlsRoot = None,
    target_tls_certificate: TargetTlsCertificate = None,
    target_tls_key: TargetTlsKey = None,
    master: Master = None,
    remote: Remote = None,
    conf: Conf = None,
    json: Json = False,
) -> None:
    """Let sites copy each other, or one another, until Ctrl-C.

    With a topology, every site gets what was first written at each of the others. The sites
    keep how far they are and check that nothing is lost: `floodmark status` shows it.

    From one site to another, all changes are copied, wherever they were first written. Either way
    a change keeps its stamp, and it does no harm to begin anew or to copy twice.

    \b
    Examples:
      floodmark replicate --topology topology.toml
      floodmark replicate grpc://oslo:7100 grpc://rome:7100 --checkpoint state/oslo-rome
      floodmark replicate data/oslo data/rome --namespace users --checkpoint state/oslo-rome --once
    """
    choice = SparkChoice(master=master, remote=remote, conf=conf)
    summary: ReplicateSummary | TopologySummary
    own = (target_token_file, target_tls_root, target_tls_certificate, target_tls_key)
    if topology is not None:
        if source or target or checkpoint or namespace or any(own):
            raise Usage(_TOPOLOGY_ALONE, "floodmark replicate --topology FILE [--once]")
        summary = _replicate_topology(topology, choice, once=once)
    elif source is None or target is None or checkpoint is None:
        raise Usage(
            "name a topology, or a source, a target and a checkpoint directory", "floodmark replicate --help"
        )
    else:
        with reach(source, target, target=_target_options(*own)) as (source_site, target_site):
            names = namespace or _all_namespaces(source_site)
            if not names:
                raise Usage(f"{source} has no namespace to copy", "floodmark namespace create SITE NAME")
            summary = _replicate_pair(source_site, target_site, names, checkpoint, choice, once=once)
    print_summary(Output(json=json), summary)
    if summary.wrong:
        raise typer.Exit(FINDING)


def _target_options(
    token_file: Path | None, tls_root: Path | None, tls_certificate: Path | None, tls_key: Path | None
) -> ConnectionOptions | None:
    if not any((token_file, tls_root, tls_certificate, tls_key)):
        return None
    return ConnectionOptions(
        token_file=token_file,
        tls_root=tls_root,
        tls_certificate=tls_certificate,
        tls_key=tls_key,
        timeout=connection_options.get().timeout,
    )


def _replicate_pair(
    source: "SiteAddress",
    target: "SiteAddress",
    names: list[str],
    checkpoint: str,
    choice: SparkChoice,
    *,
    once: bool,
) -> "ReplicateSummary":
    with spark_job(choice, "replicate", in_order=True) as job:
        summary: ReplicateSummary = job.functions.replicate(
            source,
            target,
            names,
            checkpoint=checkpoint,
            once=once,
            spark=job.session,
            progress=job.progress,
            stop=job.stop,
        )
    return summary


def _all_namespaces(address: "SiteAddress") -> list[str]:
    with address.connect() as site:
        return site.namespaces()


def _replicate_topology(file: Path, choice: SparkChoice, *, once: bool) -> "TopologySummary":
    topology = read_topology(file)
    with spark_job(choice, "replicate", in_order=True) as job:
        summary: TopologySummary = job.functions.replicate_topology(
            topology,
            job.functions.site_addresses(topology, **shared_credentials()),
            once=once,
            spark=job.session,
            progress=job.progress,
            stop=job.stop,
        )
    return summary


def export(
    location: Location,
    namespace: NamespaceName,
    target: Annotated[
        str, typer.Argument(metavar="TABLE", help="The table's directory; made if it is missing.")
    ],
    table_format: Annotated[
        str, typer.Option("--format", metavar="delta|parquet", help="The kind of table.")
    ] = "delta",
    view: Annotated[
        str,
        typer.Option(
            "--view", metavar="history|current", help="Every change a row, or one row for every live key."
        ),
    ] = "history",
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Go on as changes come, until Ctrl-C.")
    ] = False,
    until: Annotated[
        Version | None,
        typer.Option(
            "--until", metavar="VERSION|TIME", parser=parse(read_at), help="Only what came up to this."
        ),
    ] = None,
    at_heartbeats: Annotated[
        bool,
        typer.Option(
            "--at-heartbeats",
            help="End each step at a heartbeat, so that several exports can be cut at one point in time.",
        ),
    ] = False,
    master: Master = None,
    remote: Remote = None,
    conf: Conf = None,
    json: Json = False,
) -> None:
    """Bring changes into a Delta or Parquet table.

    Each change exactly once: the same command goes on where the last one ended, also after a
    crash.

    \b
    Examples:
      floodmark export data/oslo users lake/users
      floodmark export grpc://127.0.0.1:7100 users lake/users_now --view current --follow
    """
    for name, given, words in (
        ("--format", table_format, ("delta", "parquet")),
        ("--view", view, ("history", "current")),
    ):
        if given not in words:
            raise Usage(f"{name} is {' or '.join(words)}, not {given!r:.60}", "floodmark export --help")
    choice = SparkChoice(master=master, remote=remote, conf=conf)
    with reach(location) as (source,), spark_job(choice, "export", in_order=True) as job:
        summary = job.functions.export(
            source,
            namespace,
            target,
            format=table_format,
            view=view,
            once=not follow,
            until=until,
            at_heartbeats=at_heartbeats,
            spark=job.session,
            progress=job.progress,
            stop=job.stop,
        )
    print_summary(Output(json=json), summary)
    if summary.wrong:
        raise typer.Exit(FINDING)
