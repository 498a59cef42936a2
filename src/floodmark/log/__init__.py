"""Ledgers: append-only lists of entries, written in batches and trimmed record by record."""

from floodmark.log.acknowledgement import Acknowledgements, holds_batches
from floodmark.log.base import EntryId, Ledger, LedgerSettings, Marks, Position, RecordFormat, Segment
from floodmark.log.statistics import Histogram, LogStatistics, Trigger
from floodmark.log.stored import FAMILY, Store, StoredLedger, list_ledgers
from floodmark.log.writer import BatchedWriter, BatchSettings, OpenLog, Promise, open_log

__all__ = [
    "Acknowledgements",
    "BatchSettings",
    "BatchedWriter",
    "EntryId",
    "FAMILY",
    "Histogram",
    "Ledger",
    "LedgerSettings",
    "LogStatistics",
    "Marks",
    "OpenLog",
    "Position",
    "Promise",
    "RecordFormat",
    "Segment",
    "Store",
    "StoredLedger",
    "Trigger",
    "holds_batches",
    "list_ledgers",
    "open_log",
]
