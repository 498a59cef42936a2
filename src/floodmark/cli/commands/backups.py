"""backup and restore: a namespace in Parquet files, and back."""

from datetime import timedelta
from pathlib import Path
from typing import Annotated, Final

import typer

from floodmark.cli.arguments import (
    AtOption,
    EndKey,
    Json,
    NamespaceName,
    Prefix,
    StartKey,
    duration_option,
    text_option,
)
from floodmark.cli.failures import FINDING, Usage
from floodmark.cli.jobs import (
    Conf,
    Master,
    Remote,
    SparkChoice,
    reach,
    shared_credentials,
    spark_job,
)
from floodmark.cli.opening import read_topology
from floodmark.cli.render.output import Output
from floodmark.model.ranges import KeyRange
from floodmark.site.arguments import check_range

HOLD: Final = timedelta(hours=24)
_HOLD_HELP: Final = "How long the site keeps the changes for the next --incremental."

Backup = Annotated[
    str, typer.Argument(metavar="BACKUP", help="Where the backup is: a directory, or a URL that Spark knows.")
]
Site = Annotated[
    str | None, typer.Argument(metavar="SITE", help="The site: its directory, or its server's URL.")
]
Namespace = Annotated[str | None, typer.Argument(metavar="NAMESPACE", help="The namespace's name.")]


def backup(
    location: Site = None,
    namespace: Namespace = None,
    target: Annotated[
        str | None, typer.Argument(metavar="BACKUP", help="Where the backup is kept; made if missing.")
    ] = None,
    incremental: Annotated[
        bool, typer.Option("--incremental", help="Only what changed since the newest part.")
    ] = False,
    hold: Annotated[timedelta | None, duration_option("--hold", _HOLD_HELP, show_default="24h")] = None,
    check: Annotated[
        str | None, text_option("--check", "BACKUP", "Only compute all checksums of a backup anew.")
    ] = None,
    master: Master = None,
    remote: Remote = None,
    conf: Conf = None,
    json: Json = False,
) -> None:
    """Back up a namespace, as of one version, to Parquet files.

    It includes stamps, tombstones and times to live. Writes go on meanwhile. The same command
    resumes a backup that was interrupted. A feed that goes on at the version that is printed
    misses nothing.

    \b
    Examples:
      floodmark backup data/oslo users backups/users
      floodmark backup grpc://127.0.0.1:7100 users backups/users --incremental
      floodmark backup --check backups/users
    """
    choice = SparkChoice(master=master, remote=remote, conf=conf)
    output = Output(json=json)
    if check is not None:
        if location is not None:
            raise Usage("--check takes nothing but the backup", f"floodmark backup --check {check}")
        with spark_job(choice, "check") as job:
            checked = job.functions.check_backup(check, spark=job.session, progress=job.progress)
        output.report(checked)
        if checked.findings:
            raise typer.Exit(FINDING)
        return
    if location is None or namespace is None or target is None:
        raise Usage("a site, a namespace and a place for the backup are needed", "floodmark backup --help")
    with reach(location) as (source,), spark_job(choice, "backup") as job:
        summary = job.functions.backup(
            source,
            namespace,
            target,
            incremental=incremental,
            hold=HOLD if hold is None else hold,
            spark=job.session,
            progress=job.progress,
        )
    output.report(summary)


def restore(
    source: Backup,
    location: Annotated[
        str,
        typer.Argument(metavar="SITE", help="The site to restore into: its directory, or its server's URL."),
    ],
    namespace: NamespaceName,
    at: AtOption = None,
    start_key: StartKey = None,
    end_key: EndKey = None,
    prefix: Prefix = None,
    join: Annotated[
        bool, typer.Option("--join", help="Build up a new site of a topology, from a backup of another.")
    ] = False,
    rejoin: Annotated[
        bool, typer.Option("--rejoin", help="Build up a site of a topology again that has lost its data.")
    ] = False,
    topology: Annotated[
        Path | None, text_option("--topology", "FILE", "With --rejoin: the topology, in TOML.")
    ] = None,
    master: Master = None,
    remote: Remote = None,
    conf: Conf = None,
    json: Json = False,
) -> None:
    """Restore a backup into a new namespace.

    As of its newest version, or of an earlier one that it holds (--at). Stamps, tombstones and
    times to live come back as they were. The same command resumes a restore that was interrupted;
    a namespace that holds something else is refused.

    \b
    Examples:
      floodmark restore backups/users data/oslo users-restored
      floodmark restore backups/users grpc://127.0.0.1:7100 users --at 2026-01-31T12:00:00Z --prefix eu/
      floodmark restore backups/users data/lund users --join
      floodmark restore backups/users data/oslo users --rejoin --topology topology.toml
    """
    keys = check_range(start_key or b"", end_key, prefix)
    choice = SparkChoice(master=master, remote=remote, conf=conf)
    if join or rejoin:
        if (join and rejoin) or at is not None or keys != KeyRange() or rejoin is not (topology is not None):
            raise Usage(
                "a site is built up from the whole of a backup, as it is",
                "floodmark restore BACKUP SITE NAMESPACE --join, or --rejoin --topology FILE",
            )
        built = _build_up(source, location, namespace, topology, choice)
        Output(json=json).report(built)
        return
    with reach(location) as (target,), spark_job(choice, "restore") as job:
        summary = job.functions.restore(
            source, target, namespace, at=at, keys=keys, spark=job.session, progress=job.progress
        )
    Output(json=json).report(summary)


def _build_up(source: str, location: str, namespace: str, file: Path | None, choice: SparkChoice) -> object:
    topology = None if file is None else read_topology(file)
    credentials = shared_credentials()
    with reach(location) as (target,), spark_job(choice, "restore") as job:
        if topology is None:
            return job.functions.join(source, target, namespace, spark=job.session, progress=job.progress)
        return job.functions.rejoin(
            source,
            target,
            namespace,
            topology=topology,
            addresses=job.functions.site_addresses(topology, **credentials),
            spark=job.session,
            progress=job.progress,
        )
