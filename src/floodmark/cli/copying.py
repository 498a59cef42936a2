"""replicate and export: changes on their way to another site, or into a lakehouse table."""

from pathlib import Path
from typing import Annotated

import typer

from floodmark.cli.arguments import Json, Location, NamespaceName, parse
from floodmark.cli.failures import Usage
from floodmark.cli.jobs import Conf, Master, Remote, SparkChoice, print_summary, reach, spark_job
from floodmark.cli.opening import ConnectionOptions, connection_options
from floodmark.cli.output import Output
from floodmark.model import Version
from floodmark.model.text import read_at

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
Once = Annotated[bool, typer.Option("--once", help="End when everything up to the present is there.")]


def replicate(
    source: Location,
    target: Annotated[
        str, typer.Argument(metavar="TARGET", help="The other site: its directory, or its server's URL.")
    ],
    checkpoint: Annotated[
        str,
        typer.Option(
            "--checkpoint", metavar="DIRECTORY", help="Where Spark keeps how far it is: one for each pair."
        ),
    ],
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
    """Copy the changes of a site to another one, until Ctrl-C.

    Every change keeps its stamp and is stored where that stamp is the highest, so it does no harm
    to begin anew, to copy twice, or to write at the target meanwhile: the last write wins.

    \b
    Examples:
      floodmark replicate grpc://oslo:7100 grpc://rome:7100 --checkpoint state/oslo-rome
      floodmark replicate data/oslo data/rome --namespace users --checkpoint state/oslo-rome --once
    """
    own = ConnectionOptions(
        token_file=target_token_file,
        tls_root=target_tls_root,
        tls_certificate=target_tls_certificate,
        tls_key=target_tls_key,
        timeout=connection_options.get().timeout,
    )
    has_own = any((target_token_file, target_tls_root, target_tls_certificate, target_tls_key))
    choice = SparkChoice(master=master, remote=remote, conf=conf)
    with reach(source, target, target=own if has_own else None) as (source_site, target_site):
        names = namespace
        if not names:
            with source_site.connect() as site:
                names = site.namespaces()
        if not names:
            raise Usage(f"{source} has no namespace to copy", "floodmark namespace create SITE NAME")
        with spark_job(choice, "replicate") as job:
            summary = job.functions.replicate(
                source_site,
                target_site,
                names,
                checkpoint=checkpoint,
                once=once,
                spark=job.session,
                progress=job.progress,
                stop=job.stop,
            )
    print_summary(Output(json=json), summary)


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
    with reach(location) as (source,), spark_job(choice, "export") as job:
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
