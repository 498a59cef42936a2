"""The parts of a site's interface for named feeds and for subscriptions."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from floodmark.feed.named.feeds import Feed, FeedSpec, FeedStatistics, FeedUpdate, SinkOptions
from floodmark.feed.named.round import Surroundings, ThreadRound
from floodmark.feed.named.runner import FeedRunner
from floodmark.feed.named.store import FeedStore
from floodmark.feed.reading.items import OnCorrupt
from floodmark.feed.sinks.base import AllowedSinks, require_sink
from floodmark.feed.subscription.subscriptions import (
    SubscriptionRow,
    SubscriptionStatistics,
    SubscriptionStore,
)
from floodmark.host.ports import Host
from floodmark.model.change import Resolved
from floodmark.model.names import require_name
from floodmark.model.stream import OnGeneration
from floodmark.site.arguments import At, Reaction, Since, to_reaction, to_version
from floodmark.site.beginning import begin_at, decoder_of


class Feeds:
    """Creates, changes and runs named feeds: `site.feeds`."""

    def __init__(self, host: Callable[[], Host], holder: str) -> None:
        # Raise Closed now if the site is closed.
        host()
        self._host = host
        self._holder = holder

    def create(
        self,
        name: str,
        namespace: str,
        sink: str,
        *,
        since: Since = "snapshot",
        until: At | None = None,
        start_key: bytes = b"",
        end_key: bytes | None = None,
        prefix: bytes | None = None,
        description: str = "",
        ranges: int = 2,
        options: SinkOptions | None = None,
        on_corrupt: OnCorrupt = OnCorrupt.FAIL,
        on_generation: Reaction = OnGeneration.FAIL,
    ) -> Feed:
        """Create a feed that writes a namespace's changes to a sink, a URI such as `parquet:exports/users`.

        It begins with a snapshot, or after `since`: a version, a moment, "beginning" or "now".  It ends at
        `until`, or never, and holds a safe point from now on.  At the publication of a data set it fails, or
        follows `on_generation`, as for `Site.changes`.

        Raises `VersionCollected` if changes after `since` have been collected, and `InvalidArgument` if the
        kind of sink is not installed in this process.
        """
        require_name(namespace, "namespace")
        require_sink(sink)

        def create(start: Resolved) -> Feed:
            spec = FeedSpec(
                name=name,
                namespace=namespace,
                sink=sink,
                since=start.version,
                until=None if until is None else to_version(until),
                start_key=start_key,
                end_key=end_key,
                prefix=prefix,
                description=description,
                ranges=ranges,
                options=options or SinkOptions(),
                on_corrupt=on_corrupt,
                snapshot=start.snapshot is not None,
                on_generation=to_reaction(on_generation),
            )
            return self._host().feeds.create(spec)

        return begin_at(self._host(), since, create, until=until)

    def list(self) -> list[Feed]:
        """All feeds, in order of their names."""
        return self._host().feeds.list()

    def show(self, name: str) -> Feed:
        """The feed with this name.  Raises FeedNotFound."""
        return self._store(name).find(name)

    def pause(self, name: str) -> Feed:
        """Pause a feed.  Its runner stops within about a second."""
        return self._store(name).pause(name)

    def resume(self, name: str, *, since: Since | None = None) -> Feed:
        """Resume a feed from its checkpoint, or from `since`; "snapshot" starts it anew."""
        if since is None:
            return self._store(name).resume(name)
        spec = self.show(name).spec

        def resume(start: Resolved) -> Feed:
            return self._host().feeds.resume(name, start.version, start.snapshot is not None)

        return begin_at(self._host(), since, resume, until=spec.until)

    def update(self, name: str, **changes: Any) -> Feed:
        """Change settings of a feed that is not running; the names are the fields of `FeedUpdate`."""
        store = self._store(name)
        if changes.get("until") is not None:
            changes["until"] = to_version(changes["until"])
        if "on_generation" in changes:
            changes["on_generation"] = to_reaction(changes["on_generation"])
        if "sink" in changes:
            require_sink(changes["sink"])
        return store.update(name, FeedUpdate(**changes))

    def remove(self, name: str) -> None:
        """Delete a feed with its checkpoint, and release its safe point."""
        self._store(name).remove(name)

    def rebalance(self, name: str) -> Feed:
        """Divide a feed into ranges again, along the current partitions."""
        return self._store(name).rebalance(name)

    def statistics(self, name: str) -> FeedStatistics:
        """How far a feed lags behind the site."""
        return self._store(name).statistics(name)

    def runner(
        self,
        name: str,
        *,
        sinks: Sequence[str] = (),
        wait_for_lease: bool = False,
        holder: str | None = None,
        on_corrupt: OnCorrupt | None = None,
    ) -> FeedRunner:
        """A runner that executes a feed in this process when its `run` is called.

        It writes only to `sinks`, given as prefixes of URIs such as `parquet:exports` or
        `kafka://broker:9092?password_file=secret`, whose parameters are added to the feed's.  For any other
        sink `run` raises `NotAllowed`.  A feed has one runner at a time: a second one raises `LeaseHeld`, or
        with `wait_for_lease` waits and takes over.  `on_corrupt` overrides the feed's setting for damaged
        changes.
        """
        return FeedRunner(
            self._store(name),
            name,
            partial(ThreadRound, surroundings_of(self._host(), sinks, on_corrupt)),
            holder=holder or self._holder,
            wait_for_lease=wait_for_lease,
            time_source=self._host().physical_ms,
        )

    def _store(self, name: str) -> FeedStore:
        """The store of feeds, after a check that `name` is a valid name."""
        require_name(name, "feed")
        return self._host().feeds


class Subscriptions:
    """Lists, seeks and removes existing subscriptions: `site.subscriptions`."""

    def __init__(self, host: Callable[[], Host]) -> None:
        host()
        self._host = host

    def list(self) -> list[SubscriptionRow]:
        """All subscriptions, in order of their names."""
        return self._host().subscriptions.list()

    def show(self, name: str) -> SubscriptionRow:
        """The subscription with this name.  Raises SubscriptionNotFound."""
        return self._store(name).find(name)

    def seek(self, name: str, since: Since) -> SubscriptionRow:
        """Set where the next consumer of a subscription begins.  It must have no consumer now."""
        store = self._store(name)

        def seek(start: Resolved) -> SubscriptionRow:
            return store.seek(name, start.version, None, start.snapshot is not None)

        return begin_at(self._host(), since, seek)

    def remove(self, name: str) -> None:
        """Delete a subscription with its acknowledgements, and release its safe point."""
        self._store(name).remove(name)

    def statistics(self, name: str) -> SubscriptionStatistics:
        """The progress of a subscription, and the changes that it has still to deliver."""
        return self._store(name).statistics(name)

    def _store(self, name: str) -> SubscriptionStore:
        require_name(name, "subscription")
        return self._host().subscriptions


def surroundings_of(host: Host, sinks: Sequence[str], on_corrupt: OnCorrupt | None = None) -> Surroundings:
    """The site's functions and settings that the workers of its feeds use."""
    return Surroundings(
        site=host.identity.site,
        site_id=host.identity.site_id,
        open_changes=host.changes,
        decode=decoder_of(host).decode,
        open_sink=AllowedSinks(sinks).open,
        on_corrupt=on_corrupt,
    )
