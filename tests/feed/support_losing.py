"""A feed that loses changes, for those who show what was found."""

from floodmark.accounting.counting import count_idle
from floodmark.feed.named.feeds import FeedStatistics, RangeProgress
from floodmark.model.stream import ChangesRequest
from floodmark.site import Site


def lose_changes(site: Site, name: str) -> FeedStatistics:
    """Let a feed lose a change in each of two intervals, of which the first proves nothing."""
    host = site.host
    feed = host.feeds.acquire(name, "loser", 10)
    for value in (b"1", b"2"):
        site.namespace(feed.spec.namespace).put(b"lost", value)
        site.heartbeat()
    through = site.resolved_version()
    host.feeds.report(name, "loser", [_pass_over(site, part, through) for part in feed.ranges], None)
    host.feeds.release(name, "loser")
    return site.feeds.statistics(name)


def _pass_over(site: Site, part: RangeProgress, through: int) -> RangeProgress:
    namespace = int.from_bytes(part.keys.start[:3], "big")
    request = ChangesRequest(
        keys=part.keys, namespace=namespace, since=part.checkpoint, until=through, heartbeats=True
    )
    counted = count_idle(
        site.host.changes(request), part.checkpoint, through, site_id=site.id, namespace=namespace
    )
    return RangeProgress(id=part.id, keys=part.keys, checkpoint=through, resolved=through, counted=counted)
