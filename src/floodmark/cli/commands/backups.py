"""backup and restore: a namespace in Parquet files, and back."""

from datetime import timedelta
from pathlib import Path
from typing import Annotated

import typer

from floodmark.cli.arguments import AtOption, KeyOptions
from floodmark.cli.commands.topology import read_topology
from floodmark.cli.failures import FINDING, Usage
from floodmark.cli.jobs import SparkChoice, reach, shared_credentials, spark_job
from floodmark.cli.render.output import Output
from floodmark.cli.render.progress import progress
from floodmark.links.driver import site_addresses
from floodmark.links.returning import return_from_peers
from floodmark.model.ranges import KeyRange
from floodmark.site.arguments import check_range


def backup(
    output: Output,
    spark: SparkChoice,
    location: Annotated[
        str | None, typer.Argument(metavar="SITE", help="The site: its directory, or its server's URL.")
    ] = None,
    namespace: Annotated[
        str | None, typer.Argument(metavar="NAMESPACE", help="The namespace's name.")
    ] = None,
    target: Annotated[
        str | None, typer.Argument(metavar="BACKUP", help="Where the backup is kept; made if missing.")
    ] = None,
    incremental: Annotated[bool, "Only add the changes since the last backup."] = False,
    hold: Annotated[
        timedelta, "DURATION", "How long the site keeps the changes for the next --incremental."
    ] = timedelta(hours=24),
    check: Annotated[str | None, "BACKUP", "Only verify all checksums of an existing backup."] = None,
) -> None:
    """Back up a namespace, as of one version, to Parquet files.

    The backup includes stamps, tombstones and times to live. Writes continue meanwhile. The same
    command resumes a backup that was interrupted. A feed that starts at the printed version
    misses nothing.

    Examples:
      floodmark backup data/oslo users backups/users
      floodmark backup grpc://127.0.0.1:7100 users backups/users --incremental
      floodmark backup --check backups/users
    """
    if check is not None:
        if location is not None:
            raise Usage("--check takes nothing but the backup", f"floodmark backup --check {check}")
        with spark_job(spark, "check") as job:
            checked = job.run("check_backup", check)
        output.report(checked)
        if checked.findings:
            raise typer.Exit(FINDING)
        return
    if location is None or namespace is None or target is None:
        raise Usage("a site, a namespace and a place for the backup are needed", "floodmark backup --help")
    with reach(location) as (source,), spark_job(spark, "backup") as job:
        summary = job.run("backup", source, namespace, target, incremental=incremental, hold=hold)
    output.report(summary)


def restore(
    source: Annotated[
        str, "[BACKUP]", "The backup: a directory, or a URL that Spark can read. Not with --from-peers."
    ],
    location: Annotated[str, "SITE", "The site to restore into: its directory, or its server's URL."],
    output: Output,
    keys: KeyOptions,
    spark: SparkChoice,
    namespace: Annotated[
        str | None, typer.Argument(metavar="NAMESPACE", help="The namespace's name.")
    ] = None,
    at: AtOption = None,
    join: Annotated[bool, "Build a new site of a topology from a backup of another site."] = False,
    rejoin: Annotated[bool, "Rebuild a site of a topology that has lost its data."] = False,
    from_peers: Annotated[
        bool, "With --rejoin: copy the present state of another site instead of a backup."
    ] = False,
    topology: Annotated[Path | None, "FILE", "With --rejoin: the topology, in TOML."] = None,
) -> None:
    """Restore a backup into a new namespace.

    Restores the newest version of the backup, or an earlier one that it contains (--at), with all
    stamps, tombstones and times to live. The same command resumes a restore that was interrupted;
    a namespace with other data is refused.

    Examples:
      floodmark restore backups/users data/oslo users-restored
      floodmark restore backups/users grpc://127.0.0.1:7100 users --at 2026-01-31T12:00:00Z --prefix eu/
      floodmark restore backups/users data/lund users --join
      floodmark restore backups/users data/oslo users --rejoin --topology topology.toml
      floodmark restore data/oslo users --rejoin --from-peers --topology topology.toml
    """
    if from_peers:
        if not rejoin or topology is None or namespace is not None:
            raise Usage(
                "--from-peers belongs to --rejoin, and takes no backup",
                "floodmark restore SITE NAMESPACE --rejoin --from-peers --topology FILE",
            )
        _restore_from_peers(output, source, location, topology)
        return
    if namespace is None:
        raise Usage("a backup, a site and a namespace are needed", "floodmark restore --help")
    wanted = check_range(keys.start_key or b"", keys.end_key, keys.prefix)
    if (join or rejoin) and (
        (join and rejoin) or at is not None or wanted != KeyRange() or rejoin is not (topology is not None)
    ):
        raise Usage(
            "a site is built up from the whole of a backup, as it is",
            "floodmark restore BACKUP SITE NAMESPACE --join, or --rejoin --topology FILE",
        )
    members = read_topology(topology) if rejoin and topology is not None else None
    credentials = shared_credentials()
    with reach(location) as (target,), spark_job(spark, "restore") as job:
        if members is not None:
            addresses = job.functions.site_addresses(members, **credentials)
            summary = job.run("rejoin", source, target, namespace, topology=members, addresses=addresses)
        elif join:
            summary = job.run("join", source, target, namespace)
        else:
            summary = job.run("restore", source, target, namespace, at=at, keys=wanted)
    output.report(summary)


def _restore_from_peers(output: Output, location: str, namespace: str, topology: Path) -> None:
    members = read_topology(topology)
    addresses = site_addresses(members, **shared_credentials())
    with reach(location) as (target,), progress(f"fetching {namespace!r} from the other sites"):
        summary = return_from_peers(target, namespace, topology=members, addresses=addresses)
    output.report(summary)
