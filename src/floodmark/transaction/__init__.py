"""Transactions: the coordinator, and the log of its decisions."""

from floodmark.transaction.coordinator import LEDGERS, TransactionCoordinator, start_sweeping
from floodmark.transaction.ending import Participants

__all__ = ["LEDGERS", "Participants", "TransactionCoordinator", "start_sweeping"]
