"""Transactions as a server begins them for a client, which outlives the process of the site."""

from datetime import timedelta

from floodmark.site import Site, Transaction
from floodmark.site.coordinated import PACE, Coordinated
from floodmark.site.watching import Watches


def begin_for_client(site: Site, timeout: timedelta, *, owner: str = "c" * 16) -> Transaction:
    """A transaction that a coordinator of the site knows of."""
    began = site.transactions.begin(timeout, 0, owner=owner)
    coordinated = Coordinated(site.transactions, began, timeout=timeout, pace=PACE)
    return Transaction(
        site.host, lambda: coordinated, Watches(site.host), durable=True, begun=coordinated, pace=PACE
    )
