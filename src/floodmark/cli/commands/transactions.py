"""txn list, show, abort, batch-log and log: the transactions of a site, and how their logs are written."""

from dataclasses import dataclass
from datetime import timedelta
from typing import Annotated, Any

import typer
from msgspec import UNSET, UnsetType

from floodmark.cli.arguments import Json, Location, duration_option, text_option
from floodmark.cli.failures import Usage
from floodmark.cli.opening import open_site
from floodmark.cli.render.fields import plain
from floodmark.cli.render.output import Output
from floodmark.cli.render.text import show_lag, show_time, show_version
from floodmark.host.ports import BatchUpdate, LogKind, LogReport
from floodmark.log import BatchSettings
from floodmark.model.transaction import Participant, ParticipantKind, TransactionStatistics
from floodmark.model.version import COUNTER_BITS

commands = typer.Typer(help="List, show and abort transactions, and see how their logs are written.")
logs = typer.Typer(help="List and show the logs of transactions.")
commands.add_typer(logs, name="log")

Id = Annotated[str, typer.Argument(metavar="ID", help="The transaction's id, as `txn list` shows it.")]


@commands.command("list")
def list_transactions(
    location: Location,
    slow: Annotated[
        Any, duration_option("--slow", "Only transactions that began at least this long ago, such as 30s.")
    ] = None,
    json: Json = False,
) -> None:
    """List the transactions that have not ended, the oldest first.

    A transaction that is decided waits for participants, which are named.

    \b
    Examples:
      floodmark txn list grpc://oslo:7100
      floodmark txn list grpc://oslo:7100 --slow 30s
    """
    with open_site(location) as site:
        found = site.transactions.list(slow or timedelta(0))
    Output(json=json).rows(
        found,
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
def show(location: Location, transaction: Id, json: Json = False) -> None:
    """Show a transaction, also one that has ended lately.

    \b
    Example:
      floodmark txn show grpc://oslo:7100 0-470491275818434560-5f2b9c7de014
    """
    with open_site(location) as site:
        _print_one(site.transactions.show(transaction), json=json)


@commands.command()
def abort(
    location: Location,
    transaction: Id,
    reason: Annotated[str, text_option("--reason", "TEXT", "What its owner is told.")] = "by an operator",
    json: Json = False,
) -> None:
    """Abort a transaction that is open: nothing of it takes effect.

    Changes that it acknowledged are delivered again. A transaction that is decided cannot be
    aborted.

    \b
    Example:
      floodmark txn abort grpc://oslo:7100 0-470491275818434560-5f2b9c7de014
    """
    with open_site(location) as site:
        site.transactions.abort(transaction, reason)
        _print_one(site.transactions.show(transaction), json=json)


@commands.command("batch-log")
def batch_log(
    location: Location,
    log: Annotated[
        LogKind | None, typer.Option("--log", help="Which kind of log; --status shows both if not said.")
    ] = None,
    enable: Annotated[
        bool | None, typer.Option("--enable/--disable", help="Whether records are put into entries together.")
    ] = None,
    status: Annotated[
        bool, typer.Option("--status", help="Show each log, and whether batched entries are left in it.")
    ] = False,
    max_records: Annotated[
        int | None, text_option("--max-records", "N", "Records in an entry at most.")
    ] = None,
    max_bytes: Annotated[int | None, text_option("--max-bytes", "N", "Bytes in an entry at most.")] = None,
    max_delay_ms: Annotated[
        int | None, text_option("--max-delay-ms", "N", "When a wait counts as long.")
    ] = None,
    max_bytes_in_flight: Annotated[
        int | None, text_option("--max-bytes-in-flight", "N", "Bytes on their way before others wait.")
    ] = None,
    json: Json = False,
) -> None:
    """Write many records of transactions at once, or each alone.

    It takes effect at once, and for good. Limits hold for logs that are opened from then on.

    A reader that knows only bare entries can read the logs when batching of both is disabled
    and `--status` says that no batched entry is left.

    \b
    Examples:
      floodmark txn batch-log grpc://oslo:7100 --status
      floodmark txn batch-log grpc://oslo:7100 --log coordinator --disable
      floodmark txn batch-log grpc://oslo:7100 --log pending-ack --enable --max-records 256
    """
    update = BatchUpdate(
        enabled=_given(enable),
        max_records=_given(max_records),
        max_bytes=_given(max_bytes),
        max_delay_ms=_given(max_delay_ms),
        max_bytes_in_flight=_given(max_bytes_in_flight),
    )
    if update == BatchUpdate():
        status = True
    elif log is None:
        raise Usage("say which log: --log coordinator or --log pending-ack", "floodmark txn batch-log --help")
    with open_site(location) as site:
        if log is not None and update != BatchUpdate():
            site.transactions.set_batching(log, update)
        # Both kinds, whichever is named: what a reader of bare entries can read depends on all logs.
        found = _Batching(
            settings={kind: site.transactions.batching(kind) for kind in LogKind},
            reports=site.transactions.logs(),
        )
    kinds = list(LogKind) if log is None else [log]
    output = Output(json=json)
    if json:
        output.object(_batching_fields(found, kinds))
    else:
        _print_batching(output, found, kinds, status=status)


@logs.command("list")
def list_logs(location: Location, json: Json = False) -> None:
    """List the logs, their sizes, and how much of each is still needed.

    \b
    Example:
      floodmark txn log list grpc://oslo:7100
    """
    with open_site(location) as site:
        reports = site.transactions.logs()
    Output(json=json).rows(
        reports,
        {
            "log": "log",
            "of": "owner",
            "segments": lambda report: f"{len(report.segments):,}",
            "entries": lambda report: f"{sum(segment.entries for segment in report.segments):,}",
            "bytes": lambda report: f"{sum(segment.bytes for segment in report.segments):,}",
            "live records": "live_records",
            "oldest live entry": "oldest_live",
        },
        _log_fields,
    )


@logs.command("show")
def show_log(
    location: Location,
    log: Annotated[LogKind, typer.Argument(metavar="coordinator|pending-ack", help="Which kind of log.")],
    owner: Annotated[
        str, typer.Argument(metavar="OWNER", help="A coordinator's number, or a subscription's name.")
    ],
    limit: Annotated[int, text_option("--limit", "N", "Show at most N records.", min=0)] = 20,
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


def _given(value: int | bool | None) -> Any | UnsetType:
    return UNSET if value is None else value


def _print_one(transaction: TransactionStatistics, *, json: bool) -> None:
    reason = f" ({transaction.reason})" if transaction.reason else ""
    pairs = [
        ("id", transaction.id),
        ("coordinator", f"{transaction.coordinator}"),
        ("state", f"{transaction.state}{reason}"),
    ]
    if transaction.version:
        pairs.append(("version", show_version(transaction.version)))
    if transaction.age_ms:
        pairs.append(("age", show_lag(transaction.age_ms)))
    if transaction.remaining_ms:
        pairs.append(("time left", show_lag(transaction.remaining_ms)))
    pairs += [("participant", show_participant(participant)) for participant in transaction.participants]
    pairs += [
        (
            "waits for",
            f"{show_participant(waiting.participant)}, told {waiting.attempts} times: {waiting.error}",
        )
        for waiting in transaction.waiting_for
        if waiting.attempts
    ]
    Output(json=json).result(plain(transaction), pairs)


@dataclass(frozen=True)
class _Batching:
    """How the logs of a site are written, and what was found in each."""

    settings: dict[LogKind, BatchSettings]
    reports: list[LogReport]


def _batching_fields(found: _Batching, kinds: list[LogKind]) -> dict[str, object]:
    return {
        "settings": {kind.value: plain(found.settings[kind]) for kind in kinds},
        "logs": [
            {
                "log": report.log.value,
                "owner": report.owner,
                "enabled": report.settings.enabled,
                "holds_batches": report.holds_batches,
            }
            for report in found.reports
            if report.log in kinds
        ],
    }


def _print_batching(output: Output, found: _Batching, kinds: list[LogKind], *, status: bool) -> None:
    for kind in kinds:
        each = found.settings[kind]
        output.line(
            f"{kind}: batching is {'enabled' if each.enabled else 'disabled'}, at most {each.max_records:,} "
            f"records and {each.max_bytes:,} bytes to an entry, {each.max_delay_ms:,} ms, at most "
            f"{each.max_bytes_in_flight:,} bytes in flight"
        )
    reports = [report for report in found.reports if report.log in kinds]
    if status and reports:
        output.rows(
            reports,
            {
                "log": "log",
                "of": _show_owner,
                "batching": lambda report: "enabled" if report.settings.enabled else "disabled",
                "batched entries left": "holds_batches",
            },
        )
    if not all(found.settings[kind].enabled for kind in kinds):
        output.line(_say_readable(found))


def _say_readable(found: _Batching) -> str:
    """Whether a reader of bare entries can read all logs from now on; if not, what to do first."""
    enabled = [f"disable {kind} as well" for kind, each in found.settings.items() if each.enabled]
    left = any(report.holds_batches for report in found.reports)
    missing = enabled + ["wait until the transactions have ended"] * left
    if not missing:
        return "a reader of bare entries can read these logs"
    return f"a reader of bare entries cannot read these logs yet: {' and '.join(missing)}"
