"""How far a subscription is, and how much is left."""

from typing import Final

from floodmark.feed.subscription.subscriptions import OpenChanges, SubscriptionRow, SubscriptionStatistics
from floodmark.model.version import VERSION_MAX, physical_ms

# Counting a backlog ends here: whoever is that far behind need not know by how much.
BACKLOG_COUNT_MAX: Final = 100_000


def measure(
    row: SubscriptionRow, unacked: int, pending: int, open_changes: OpenChanges, now_ms: int
) -> SubscriptionStatistics:
    """Count what a subscription has before it, up to a limit."""
    oldest = next((commit.version for commit in row.live if commit.runs), VERSION_MAX)
    request, delivered = row.waiting()
    waiting = -delivered
    for batch in open_changes(request):
        waiting += len(batch.versions)
        if batch.versions and waiting > 0:
            oldest = min(oldest, batch.versions[0] if batch.snapshot is None else batch.through)
        if waiting > BACKLOG_COUNT_MAX:
            break
    lease = row.lease
    backlog = unacked + min(waiting, BACKLOG_COUNT_MAX)
    return SubscriptionStatistics(
        name=row.name,
        namespace=row.spec.namespace,
        through=row.through,
        unacked=unacked,
        pending=pending,
        backlog=backlog,
        backlog_is_exact=waiting <= BACKLOG_COUNT_MAX,
        lag_ms=max(0, now_ms - physical_ms(oldest)) if backlog else 0,
        holder=lease.holder if lease is not None and lease.expires_at_ms > now_ms else None,
    )
