"""The logs of transactions, kept in the engine of the site, so that a backup has them."""

from itertools import islice
from threading import Lock
from typing import Any, Final
from weakref import WeakSet

import msgspec
from msgspec import UNSET, structs

from floodmark.clock import monotonic_ms
from floodmark.feed.subscription.pending import PENDING_LEDGERS, PendingRecord, decode_pending, encode_pending
from floodmark.host.transaction_port import BatchUpdate, LogKind, LogRecord, LogReport
from floodmark.log import (
    Acknowledgements,
    BatchedWriter,
    BatchSettings,
    OpenLog,
    holds_batches,
    list_ledgers,
    open_log,
)
from floodmark.model.errors import InvalidArgument, Retryable
from floodmark.model.limits import LEDGER_RECORDS_READ_MAX
from floodmark.model.version import COUNTER_BITS, moment_of
from floodmark.partition import META, Node, load_metadata
from floodmark.transaction.coordinator import LEDGERS
from floodmark.transaction.records import Aborting, Begun, Committing, Joined, decode_record

# How long a change of settings waits for records taken under the old ones.
FLUSH_MS_MAX: Final = 10_000
# How long a report waits for records and acknowledgements that are being written.
REPORT_SECONDS_MAX: Final = 1.0

_SETTINGS: Final = b"transactions/settings"


class TransactionSettings(msgspec.Struct, frozen=True, kw_only=True):
    """The stored batch settings of the logs."""

    coordinator: BatchSettings = BatchSettings()
    pending_ack: BatchSettings = BatchSettings()

    def of(self, log: LogKind) -> BatchSettings:
        """The settings of a kind of log."""
        return self.coordinator if log is LogKind.COORDINATOR else self.pending_ack


class TransactionLogs:
    """Opens the logs of a node, with the settings that are stored for their kind."""

    def __init__(self, node: Node) -> None:
        self._node = node
        self.store = node.storage
        self._lock = Lock()
        # The writers of the open logs.
        self._writers: dict[LogKind, WeakSet[BatchedWriter[Any]]] = {kind: WeakSet() for kind in LogKind}
        stored = next(iter(load_metadata(node.engine, _SETTINGS, TransactionSettings)), None)
        self.settings = stored or TransactionSettings()

    def opened(self, log: LogKind, writer: BatchedWriter[Any]) -> None:
        """Register a newly opened log, and apply settings that have changed since it was opened."""
        with self._lock:
            self._writers[log].add(writer)
            writer.enabled = self.settings.of(log).enabled

    def change(self, log: LogKind, update: BatchUpdate) -> BatchSettings:
        """Store changed settings, and return when all records accepted under the old ones are written."""
        changed = self._change(log, update)
        until_ms = monotonic_ms() + FLUSH_MS_MAX
        with self._lock:
            writers = list(self._writers[log])
        for writer in writers:
            if not writer.flush(max(0, until_ms - monotonic_ms()) / 1_000):
                raise Retryable(
                    f"the settings of the {log} logs are changed for what comes, but records that came "
                    f"before have been on their way for more than {FLUSH_MS_MAX / 1_000:g} s; look after the "
                    "disk, then try again"
                )
        return changed

    def _change(self, log: LogKind, update: BatchUpdate) -> BatchSettings:
        changes = {
            name: value
            for name in BatchSettings.__struct_fields__
            if (value := getattr(update, name)) is not UNSET
        }
        with self._lock:
            changed = structs.replace(self.settings.of(log), **changes)
            changed.require_sound()
            name = log.value.replace("-", "_")
            settings = structs.replace(self.settings, **{name: changed})
            with self._node.storage.settled():
                self._node.storage.store([(META, _SETTINGS, msgspec.json.encode(settings))])
                self.settings = settings
            for writer in self._writers[log]:
                writer.enabled = changed.enabled
        return changed

    def open_pending(self, subscription: str) -> OpenLog[PendingRecord]:
        """The log of a subscription."""
        log = open_log(
            self.store,
            f"{PENDING_LEDGERS}{subscription}",
            self.settings.pending_ack,
            encode=encode_pending,
            decode=decode_pending,
            time_source=self._node.clock.time_source,
        )
        self.opened(LogKind.PENDING_ACK, log.writer)
        return log

    def coordinators(self) -> list[int]:
        """The numbers of the coordinators that have written something."""
        names = list_ledgers(self.store.engine)
        return [int(name.removeprefix(LEDGERS)) for name in names if name.startswith(LEDGERS)]

    def report(self, log: LogKind, owner: str, writer: BatchedWriter[Any]) -> LogReport:
        """The state of a log, after a short wait for acknowledgements to be stored."""
        writer.flush(REPORT_SECONDS_MAX)
        _, live_records = writer.acknowledgements.count_live()
        return LogReport(
            log=log,
            owner=owner,
            settings=structs.replace(self.settings.of(log), enabled=writer.enabled),
            holds_batches=holds_batches(writer.ledger),
            segments=writer.ledger.segments(),
            live_records=live_records,
            oldest_live=writer.acknowledgements.oldest,
            statistics=writer.statistics(),
        )


def read_log(log: LogKind, writer: BatchedWriter[Any], limit: int) -> list[LogRecord]:
    """The first live records of a log, as they are stored."""
    writer.flush(REPORT_SECONDS_MAX)
    if not 0 <= limit <= LEDGER_RECORDS_READ_MAX:
        raise InvalidArgument(f"ask for 0 to {LEDGER_RECORDS_READ_MAX:,} records of a log, not for {limit}")
    return [
        LogRecord(
            entry=position.entry,
            batch_size=position.batch_size,
            batch_index=position.batch_index,
            **_describe(log, record),
        )
        for position, record in islice(Acknowledgements(writer.ledger).recover(), limit)
    ]


def _describe(log: LogKind, stored: bytes) -> dict[str, str]:
    record = decode_record(stored) if log is LogKind.COORDINATOR else decode_pending(stored)
    match record:
        case Begun():
            detail = f"until {moment_of(record.deadline_ms << COUNTER_BITS).isoformat()}"
        case Joined():
            detail = f"{record.participant.kind} {record.participant.name}"
        case Committing():
            detail = f"at {record.version}"
        case Aborting():
            detail = record.reason
        case _:
            detail = _describe_acknowledgement(record)
    return {"transaction": record.transaction, "kind": type(record).__name__.lower(), "detail": detail}


def _describe_acknowledgement(record: PendingRecord) -> str:
    acknowledgement = record.acknowledgement
    positions = [f"{position.version}/{position.index}" for position in acknowledgement.positions]
    if acknowledgement.through is not None:
        positions.append(f"through {acknowledgement.through.version}/{acknowledgement.through.index}")
    return ", ".join(positions)
