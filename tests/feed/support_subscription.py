"""What the tests of subscriptions share: a site in memory, and consumers whose batches are cut small."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Final

from tests.site.support import host_of

from floodmark.engine import MemoryEngine
from floodmark.feed.subscription.acknowledgement import ChangePosition
from floodmark.feed.subscription.consumer import (
    Delivery,
    Since,
    Subscription,
    SubscriptionOptions,
    open_subscription,
)
from floodmark.feed.subscription.store import LocalSubscriptionStore
from floodmark.feed.subscription.subscriptions import SubscriptionSpec, SubscriptionStore
from floodmark.model.ranges import KeyRange
from floodmark.model.stream import ChangeBatch, ChangesRequest
from floodmark.model.version import Version
from floodmark.partition import FAMILIES
from floodmark.site import Namespace, Site, open_engine
from floodmark.site.beginning import begin_at, decoder_of
from floodmark.testing import FaultyEngine, SimulatedTime

# Nothing happens unless the test does it, and iterating ends.
BY_HAND: Final = SubscriptionOptions(follow=False, background=False, flush_count=1_000_000)

EVERYTHING: Final = KeyRange()

Engine = MemoryEngine | FaultyEngine


@dataclass(kw_only=True)
class Stage:
    """A site with a namespace, and a way to subscribe to it.

    Batches are cut after `cut` changes, in the middle of commits as well.  Where the change log is kept for
    less time than versions are, what is behind it is read by scanning.  `store`, if it is set, stands
    between the consumers and the site.
    """

    site: Site
    time: SimulatedTime
    engine: Engine
    cut: int | None = None
    log_retention: timedelta | None = None
    store: SubscriptionStore | None = None

    @property
    def users(self) -> Namespace:
        return self.site.namespace("users")

    @property
    def subscriptions(self) -> LocalSubscriptionStore:
        return host_of(self.site).subscriptions

    def subscribe(
        self,
        name: str = "indexer",
        *,
        holder: str = "one",
        start: Since = "beginning",
        keys: KeyRange = EVERYTHING,
        unacked_max: int = 10_000,
        options: SubscriptionOptions = BY_HAND,
    ) -> Subscription:
        """Consume the namespace `users`."""
        return open_subscription(
            self.store or self.subscriptions,
            SubscriptionSpec(name=name, namespace="users", keys=keys, unacked_max=unacked_max),
            start=start,
            holder=holder,
            options=options,
            open_changes=self.open_changes,
            decode=decoder_of(self.site.host).decode,
            begin=lambda since, begin: begin_at(self.site.host, since, begin),
        )

    def open_changes(self, request: ChangesRequest) -> Iterator[ChangeBatch]:
        batches = host_of(self.site).changes(request)
        return batches if self.cut is None else cut_batches(batches, self.cut)

    def to_version(self, since: Since) -> Version:
        return begin_at(self.site.host, since, lambda place: place.version)

    def power_cut(self) -> None:
        """Lose the process, and with it everything that is not on disk."""
        assert isinstance(self.engine, FaultyEngine)
        self.engine = self.engine.crash(keep=0)
        self.site = _open_site(self.engine, self.time, self.log_retention)


def make_stage(
    engine: Engine | None = None, *, cut: int | None = None, log_retention: timedelta | None = None
) -> Stage:
    """A fresh site with an empty namespace."""
    time = SimulatedTime()
    engine = engine or MemoryEngine(FAMILIES)
    site = _open_site(engine, time, log_retention)
    site.create_namespace("users")
    return Stage(site=site, time=time, engine=engine, cut=cut, log_retention=log_retention)


def _open_site(engine: Engine, time: SimulatedTime, log_retention: timedelta | None) -> Site:
    return open_engine(engine, site="oslo", site_id=7, time_source=time, log_retention=log_retention)


def cut_batches(batches: Iterator[ChangeBatch], size: int) -> Iterator[ChangeBatch]:
    """The same changes in batches of at most `size`."""
    for batch in batches:
        count = len(batch.versions)
        for start in range(0, max(count, 1), size):
            end = min(start + size, count)
            # What comes next begins a commit, or goes on with one.
            if batch.snapshot is not None:
                through, place = batch.through, batch.keys[end - 1] if count else batch.snapshot
            else:
                place = None
                through = batch.through if end == count else min(batch.versions[end] - 1, batch.through)
            yield replace(
                batch,
                through=through,
                snapshot=place,
                versions=batch.versions[start:end],
                partitions=batch.partitions[start:end],
                keys=batch.keys[start:end],
                values=batch.values[start:end],
            )


def write(users: Namespace, *keys: bytes) -> list[ChangePosition]:
    """Put keys in one commit; the positions of its changes."""
    version = users.put_many({key: b"value of " + key for key in keys})
    return [ChangePosition(version, index) for index in range(len(set(keys)))]


def take(subscription: Subscription, count: int) -> list[Delivery]:
    """The next deliveries, of which there must be so many."""
    return [next(subscription) for _ in range(count)]


def keys_of(deliveries: list[Delivery]) -> list[bytes]:
    return [delivery.change.key for delivery in deliveries]


def positions_of(deliveries: list[Delivery]) -> list[ChangePosition]:
    return [delivery.position for delivery in deliveries]
