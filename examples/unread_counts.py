"""Unread messages, counted exactly once however often the worker that counts them is killed.

    python examples/unread_counts.py URL

Each message is read, counted and acknowledged in one transaction.  A worker that dies in the middle leaves
nothing half done: its transaction is aborted, and the message is delivered to the next worker.
"""

import sys
from datetime import timedelta

import floodmark
from floodmark import Delivery, Namespace, SubscriptionOptions, Transaction

# Limit for one message; a successor waits at most so long for a message that a killed worker had begun.
TIMEOUT = timedelta(seconds=5)


def count(transaction: Transaction, unread: Namespace, delivery: Delivery) -> None:
    """Count a message `<recipient>/<number>` that was sent, or deleted because it was read."""
    recipient, _, _ = delivery.change.key.partition(b"/")
    transaction.add(unread, recipient, 1 if delivery.change.value is not None else -1)
    transaction.acknowledge(delivery)


def run(site: floodmark.Site, *, follow: bool = True) -> None:
    """Count messages as they arrive; without `follow`, only those that have arrived."""
    unread = site.namespace("unread")
    options = SubscriptionOptions(follow=follow)
    # A worker that subscribes with the same holder takes over at once.
    with site.subscribe("unread-counts", "messages", holder="counter", options=options) as messages:
        for delivery in messages:
            with site.transaction(timeout=TIMEOUT) as transaction:
                count(transaction, unread, delivery)


if __name__ == "__main__":
    with floodmark.connect(sys.argv[1]) as site:
        run(site)
