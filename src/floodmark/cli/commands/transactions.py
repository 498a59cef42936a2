"""txn list, show, abort, batch-log and log: the transactions of a site, and how their logs are written."""

from dataclasses import dataclass
from datetime import timedelta
from typing import Annotated

from floodmark.cli.arguments import Commands, OpenSite
from floodmark.cli.failures import Usage
from floodmark.cli.render.output import Output, plain
from floodmark.cli.render.text import show_lag, show_time, show_version
from floodmark.host.transaction_port import BatchUpdate, LogKind, LogReport
from floodmark.log import BatchSettings
from floodmark.model.transaction import Participant, ParticipantKind
from floodmark.model.version import COUNTER_BITS

commands = Commands("txn")
logs = Commands(help="List and show the logs of transactions.")
commands.add_typer(logs, name="log")

Id = Annotated[str, "ID", "The transaction's id, as `txn list` shows it."]


@commands.command("list")
def list_transactions(
    site: OpenSite,
    output: Output,
    slow: Annotated[
        timedelta | None, "DURATION", "Only transactions that began at least this long ago, such as 30s."
    ] = None,
) -> None:
    """List the transactions that have not ended, the oldest first.

    Only transactions with a coordinator are listed: those that acknowledge changes or span
    nodes. Any other exists at the site only for the moment of its commit. A transaction that
    is decided waits for participants, which are named.

    Examples:
      floodmark txn list grpc://oslo:7100
      floodmark txn list grpc://oslo:7100 --slow 30s
    """
    output.rows(
        site.transactions.list(slow or timedelta(0)),
        {
            "id": "id",
            "state": "state",
            "age": "age_ms",
            "time left": lambda each: show_lag(each.remaining_ms) if each.remaining_ms else "",
            "participants": lambda each: str(len(each.participants)),
            "waits for": lambda each: ", ".join(
                show_participant(waiting.participant) for waiting in each.waiting_for
            ),
        },
    )


@commands.command()
def show(site: OpenSite, output: Output, transaction: Id) -> None:
    """Show a transaction, also one that has ended lately.

    Only transactions with a coordinator are known: those that acknowledge changes or span nodes.

    Example:
      floodmark txn show grpc://oslo:7100 0-470491275818434560-5f2b9c7de014
    """
    output.details(
        site.transactions.show(transaction),
        {
            "id": "id",
            "coordinator": "coordinator",
            "state": lambda each: f"{each.state} ({each.reason})" if each.reason else str(each.state),
            "version": lambda each: show_version(each.version) if each.version else None,
            "age": lambda each: show_lag(each.age_ms) if each.age_ms else None,
            "time left": lambda each: show_lag(each.remaining_ms) if each.remaining_ms else None,
            "participant": lambda each: [show_participant(one) for one in each.participants],
            "waits for": lambda each: [
                f"{show_participant(one.participant)}, told {one.attempts} times: {one.error}"
                for one in each.waiting_for
                if one.attempts
            ],
        },
    )


@commands.command()
def abort(
    site: OpenSite,
    output: Output,
    transaction: Id,
    reason: Annotated[
        str, "TEXT", "The reason to report to the owner of the transaction."
    ] = "by an operator",
) -> None:
    """Abort a transaction that is open: nothing of it takes effect.

    Changes that it acknowledged are delivered again. A transaction that is decided cannot be
    aborted.

    Example:
      floodmark txn abort grpc://oslo:7100 0-470491275818434560-5f2b9c7de014
    """
    site.transactions.abort(transaction, reason)
    show(site, output, transaction)


@dataclass(frozen=True, kw_only=True)
class BatchOptions:
    """The options for the fields of a `BatchUpdate`."""

    enabled: Annotated[
        bool | None, "Whether several records share an entry.", {"name": "--enable/--disable"}
    ] = None
    max_records: Annotated[int | None, "N", "Maximum records of an entry."] = None
    max_bytes: Annotated[int | None, "N", "Maximum bytes of an entry."] = None
    max_delay_ms: Annotated[
        int | None, "N", "Count a flush as late if its oldest record has waited for longer."
    ] = None
    max_bytes_in_flight: Annotated[
        int | None, "N", "Bytes of unfinished appends above which further appends wait."
    ] = None


@commands.command("batch-log")
def batch_log(
    site: OpenSite,
    output: Output,
    options: BatchOptions,
    log: Annotated[
        LogKind | None, "coordinator|pending-ack", "The kind of log; --status shows both by default."
    ] = None,
    status: Annotated[bool, "Show each log, and whether batched entries are left in it."] = False,
) -> None:
    """Set how the logs of transactions batch their records.

    Batching is switched at once, and the setting is stored. Limits apply to logs that are opened
    afterwards.

    A program that reads only bare entries can read the logs once batching is disabled for both
    kinds and `--status` reports that no batched entry is left.

    Examples:
      floodmark txn batch-log grpc://oslo:7100 --status
      floodmark txn batch-log grpc://oslo:7100 --log coordinator --disable
      floodmark txn batch-log grpc://oslo:7100 --log pending-ack --enable --max-records 256
    """
    update = BatchUpdate(**{name: each for name, each in vars(options).items() if each is not None})
    if update == BatchUpdate():
        status = True
    elif log is None:
        raise Usage("say which log: --log coordinator or --log pending-ack", "floodmark txn batch-log --help")
    else:
        site.transactions.set_batching(log, update)
    # Both kinds, whichever is named: what a reader of bare entries can read depends on all logs.
    settings = {kind: site.transactions.batching(kind) for kind in LogKind}
    reports = site.transactions.logs()
    kinds = list(LogKind) if log is None else [log]
    named = [report for report in reports if report.log in kinds]
    if output.json:
        shown = {kind.value: plain(settings[kind]) for kind in kinds}
        output.object({"settings": shown, "logs": [_batching_fields(report) for report in named]})
        return
    for kind in kinds:
        output.line(_describe(kind, settings[kind]))
    if status and named:
        output.rows(
            named,
            {
                "log": "log",
                "of": _show_owner,
                "batching": lambda report: "enabled" if report.settings.enabled else "disabled",
                "batched entries left": "holds_batches",
            },
        )
    if not all(settings[kind].enabled for kind in kinds):
        output.line(_say_readable(settings, reports))


@logs.command("list")
def list_logs(site: OpenSite, output: Output) -> None:
    """List the logs, their sizes, and how much of each is still needed.

    Example:
      floodmark txn log list grpc://oslo:7100
    """
    output.rows(
        site.transactions.logs(),
        {
            "log": "log",
            "of": "owner",
            "segments": lambda report: len(report.segments),
            "entries": lambda report: sum(segment.entries for segment in report.segments),
            "bytes": lambda report: sum(segment.bytes for segment in report.segments),
            "live records": "live_records",
            "oldest live entry": "oldest_live",
        },
        _log_fields,
    )


@logs.command("show")
def show_log(
    site: OpenSite,
    output: Output,
    log: Annotated[LogKind, "coordinator|pending-ack", "Which kind of log."],
    owner: Annotated[str, "OWNER", "A coordinator's number, or a subscription's name."],
    limit: Annotated[int, "N", "Show at most N records.", {"min": 0}] = 20,
) -> None:
    """Show the segments of a log, and its first live records.

    Examples:
      floodmark txn log show grpc://oslo:7100 coordinator 0
      floodmark txn log show grpc://oslo:7100 pending-ack indexer --limit 100
    """
    records = site.transactions.log_records(log, owner, limit)
    report = next(each for each in site.transactions.logs() if (each.log, each.owner) == (log, owner))
    if output.json:
        output.object({**_log_fields(report), "records": [plain(record) for record in records]})
        return
    output.rows(
        report.segments,
        {
            "segment": "id",
            "first entry": "first",
            "entries": "entries",
            "bytes": "bytes",
            "opened": lambda segment: show_time(segment.opened_ms << COUNTER_BITS),
        },
    )
    if records:
        output.line()
        output.rows(
            records,
            {
                "entry": "entry",
                "record": lambda record: f"{record.batch_index + 1} of {record.batch_size}",
                "transaction": "transaction",
                "what": "kind",
                "": "detail",
            },
        )


def _log_fields(report: LogReport) -> dict[str, object]:
    return {**plain(report), "segments": [segment._asdict() for segment in report.segments]}


def _show_owner(report: LogReport) -> str:
    return f"coordinator {report.owner}" if report.log is LogKind.COORDINATOR else report.owner


def show_participant(participant: Participant) -> str:
    """A participant of a transaction, for people."""
    if participant.kind is ParticipantKind.PARTITION:
        return f"the partition of key {participant.name}"
    return f"subscription {participant.name}"


def _batching_fields(report: LogReport) -> dict[str, object]:
    return {
        "log": report.log.value,
        "owner": report.owner,
        "enabled": report.settings.enabled,
        "holds_batches": report.holds_batches,
    }


def _describe(kind: LogKind, settings: BatchSettings) -> str:
    return (
        f"{kind}: batching is {'enabled' if settings.enabled else 'disabled'}, at most "
        f"{settings.max_records:,} records and {settings.max_bytes:,} bytes to an entry, "
        f"{settings.max_delay_ms:,} ms, at most {settings.max_bytes_in_flight:,} bytes in flight"
    )


def _say_readable(settings: dict[LogKind, BatchSettings], reports: list[LogReport]) -> str:
    """Whether a reader of bare entries can read all logs from now on; if not, what to do first."""
    missing = [f"disable {kind} as well" for kind, each in settings.items() if each.enabled]
    if any(report.holds_batches for report in reports):
        missing.append("wait until the transactions have ended")
    if not missing:
        return "a reader of bare entries can read these logs"
    return f"a reader of bare entries cannot read these logs yet: {' and '.join(missing)}"
