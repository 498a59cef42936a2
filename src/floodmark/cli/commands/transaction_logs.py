"""txn log list and show: the logs that transactions are written to, and what is in them."""

from typing import Annotated

import typer

from floodmark.cli.arguments import Json, Location
from floodmark.cli.opening import open_site
from floodmark.cli.render.fields import plain
from floodmark.cli.render.output import Output
from floodmark.cli.render.text import show_time
from floodmark.host.ports.transactions import LogKind, LogReport
from floodmark.model.version import COUNTER_BITS

commands = typer.Typer(help="See what is in the logs of transactions.")


@commands.command("list")
def list_logs(location: Location, json: Json = False) -> None:
    """List the logs, how large they are, and what is still needed.

    \b
    Example:
      floodmark txn log list grpc://oslo:7100
    """
    output = Output(json=json)
    with open_site(location) as site:
        reports = site.transactions.logs()
    if json:
        for report in reports:
            output.object(_fields(report))
        return
    output.table(
        ("log", "of", "segments", "entries", "bytes", "live records", "oldest live entry"),
        [
            (
                report.log,
                report.owner,
                f"{len(report.segments):,}",
                f"{sum(segment.entries for segment in report.segments):,}",
                f"{sum(segment.bytes for segment in report.segments):,}",
                f"{report.live_records:,}",
                "" if report.oldest_live is None else f"{report.oldest_live:,}",
            )
            for report in reports
        ],
    )


@commands.command("show")
def show_log(
    location: Location,
    log: Annotated[LogKind, typer.Argument(metavar="coordinator|pending-ack", help="Which kind of log.")],
    owner: Annotated[
        str, typer.Argument(metavar="OWNER", help="A coordinator's number, or a subscription's name.")
    ],
    limit: Annotated[int, typer.Option("--limit", metavar="N", min=0, help="Show at most N records.")] = 20,
    json: Json = False,
) -> None:
    """Show the segments of a log, and its first live records.

    \b
    Examples:
      floodmark txn log show grpc://oslo:7100 coordinator 0
      floodmark txn log show grpc://oslo:7100 pending-ack indexer --limit 100
    """
    output = Output(json=json)
    with open_site(location) as site:
        records = site.transactions.log_records(log, owner, limit)
        report = next(each for each in site.transactions.logs() if (each.log, each.owner) == (log, owner))
    if json:
        output.object({**_fields(report), "records": [plain(record) for record in records]})
        return
    _print_segments(output, report)
    if records:
        output.line()
        output.table(
            ("entry", "record", "transaction", "what", ""),
            [
                (
                    f"{record.entry:,}",
                    f"{record.batch_index + 1} of {record.batch_size}",
                    record.transaction,
                    record.kind,
                    record.detail,
                )
                for record in records
            ],
        )


def _fields(report: LogReport) -> dict[str, object]:
    return {**plain(report), "segments": [segment._asdict() for segment in report.segments]}


def _print_segments(output: Output, report: LogReport) -> None:
    output.table(
        ("segment", "first entry", "entries", "bytes", "opened"),
        [
            (
                f"{segment.id:,}",
                f"{segment.first:,}",
                f"{segment.entries:,}",
                f"{segment.bytes:,}",
                show_time(segment.opened_ms << COUNTER_BITS),
            )
            for segment in report.segments
        ],
    )
