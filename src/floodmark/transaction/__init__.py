"""Transactions: the coordinator, and the log of its decisions."""

from floodmark.transaction.coordinator import TransactionCoordinator
from floodmark.transaction.opening import LEDGERS, open_coordinator, start_sweeping
from floodmark.transaction.ports import Participants

__all__ = ["LEDGERS", "Participants", "TransactionCoordinator", "open_coordinator", "start_sweeping"]
