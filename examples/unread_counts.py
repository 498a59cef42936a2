"""Unread messages counted exactly once, however often the worker that counts them is killed.

    python examples/unread_counts.py URL        count what is delivered, until there is nothing new

Each message is read, counted and acknowledged in one transaction.  A worker that dies in the middle leaves
nothing half done: the transaction is aborted, and the message is delivered to the next worker.
"""

import sys
from datetime import timedelta

import floodmark
from floodmark import Delivery, Namespace, SubscriptionOptions, Transaction


def count(transaction: Transaction, unread: Namespace, delivery: Delivery) -> None:
    """A message `<recipient>/<number>` was sent, or deleted once it was read."""
    recipient, _, _ = delivery.change.key.partition(b"/")
    transaction.add(unread, recipient, 1 if delivery.change.value is not None else -1)
    transaction.acknowledge(delivery)


def count_all(site: floodmark.Site, *, follow: bool = False) -> int:
    """Count what has not been counted yet; how many messages that were."""
    counted = 0
    unread = site.namespace("unread")
    options = SubscriptionOptions(follow=follow)
    # The same name again takes over from a worker that died.
    with site.subscribe("unread-counts", "messages", holder="counter", options=options) as messages:
        for delivery in messages:
            with site.transaction(timeout=timedelta(seconds=5)) as transaction:
                count(transaction, unread, delivery)
            counted += 1
    return counted


if __name__ == "__main__":
    with floodmark.connect(sys.argv[1]) as site:
        print(count_all(site), "messages counted")
