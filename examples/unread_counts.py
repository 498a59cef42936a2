"""Unread messages, counted exactly once however often the worker that counts them is killed.

    python examples/unread_counts.py URL

Each message is read, counted and acknowledged in one transaction.  A worker that dies in the middle leaves
nothing half done: its transaction is aborted, and the message is delivered to the next worker.
"""

import sys
from datetime import timedelta

import floodmark
from floodmark import Delivery, Namespace, SubscriptionOptions, Transaction

# How long a worker may take for one message, and its successor has to wait for those that it had begun with.
TIMEOUT = timedelta(seconds=5)


def count(transaction: Transaction, unread: Namespace, delivery: Delivery) -> None:
    """A message `<recipient>/<number>` was sent, or deleted because it was read."""
    recipient, _, _ = delivery.change.key.partition(b"/")
    transaction.add(unread, recipient, 1 if delivery.change.value is not None else -1)
    transaction.acknowledge(delivery)


def run(site: floodmark.Site, *, follow: bool = True) -> None:
    """Count messages as they come; without `follow`, those that there are."""
    unread = site.namespace("unread")
    options = SubscriptionOptions(follow=follow)
    # Whoever comes with the same name takes over at once.
    with site.subscribe("unread-counts", "messages", holder="counter", options=options) as messages:
        for delivery in messages:
            with site.transaction(timeout=TIMEOUT) as transaction:
                count(transaction, unread, delivery)


if __name__ == "__main__":
    with floodmark.connect(sys.argv[1]) as site:
        run(site)
