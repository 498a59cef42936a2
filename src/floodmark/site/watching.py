"""Watches: futures that complete when a key changes.

For each namespace with watched keys, a site object has one thread that follows the changes in one stream,
however many watches there are.  The thread ends with the last watch.

A watch is registered while its transaction is open, but the version above which changes count is known only
at the commit: it is the read version, or the commit version if the transaction writes the key itself.  Until
`arm` sets it, changes are only recorded.

Publishing a data set changes the keys whose values differ in it.
"""

from concurrent.futures import Future
from contextlib import closing
from threading import Lock, Thread
from typing import Any

from floodmark.codec.ordered import qualify_range
from floodmark.host.ports import Host
from floodmark.model.errors import Closed, LimitExceeded, Retryable
from floodmark.model.limits import WATCHES_MAX
from floodmark.model.ranges import KeyRange, after
from floodmark.model.stream import ChangeBatch, ChangesRequest, OnGeneration
from floodmark.model.version import VERSION_MAX, Version
from floodmark.site.coordinated import PACE, Pace
from floodmark.site.gathering import AnyNamespace


class Watch:
    """One watched key, qualified by its namespace."""

    def __init__(self, follower: "_Follower", key: bytes) -> None:
        self.follower = follower
        self.key = key
        self.future: Future[Version] = Future()
        # The version above which changes count (set by `arm`), and the version of the last change.
        self.since = VERSION_MAX
        self.seen: Version = 0


class _Follower:
    """The watches of one namespace, and the position of the thread that follows its changes."""

    def __init__(self, namespace: int, position: Version) -> None:
        self.namespace = namespace
        self.position = position
        # The position within the difference at a swap of generations; None outside of one.
        self.place: bytes | None = None
        self.watches: dict[bytes, set[Watch]] = {}


class Watches:
    """The watches of a site object.  Safe to use from many threads."""

    def __init__(self, host: Host, *, pace: Pace = PACE) -> None:
        self._host = host
        self._pace = pace
        self._lock = Lock()
        self._followers: dict[int, _Follower] = {}
        self._count = 0
        self._closed = False

    def open(self, namespace: AnyNamespace, key: bytes | str, since: Version) -> Watch:
        """Watch a key for changes above `since`.  The future completes only after `arm`."""
        qualified = namespace.encoding.qualify(key)
        with self._lock:
            if self._closed:
                raise Closed("the site was closed; open it again")
            if self._count >= WATCHES_MAX:
                raise LimitExceeded(
                    f"{WATCHES_MAX:,} watches are open; cancel some, or follow the changes of the namespace"
                )
            follower = self._followers.get(namespace.id)
            if follower is None:
                follower = self._followers[namespace.id] = _Follower(namespace.id, since)
                Thread(target=self._follow, args=(follower,), name="floodmark-watches", daemon=True).start()
            watch = Watch(follower, qualified)
            follower.watches.setdefault(qualified, set()).add(watch)
            self._count += 1
            # Within the difference at a swap, the changes of that version were seen only in part.
            position = follower.position + (follower.place is not None)
        watch.future.add_done_callback(lambda _: self._remove(watch))
        try:
            # The thread has already read these changes, so read them here for this key.
            if since < position:
                for batch in self._changes(KeyRange(qualified, after(qualified)), follower, since, position):
                    self._take(follower, batch)
        except BaseException:
            watch.future.cancel()
            raise
        return watch

    def arm(self, watch: Watch, since: Version) -> None:
        """Complete the watch at the first change above `since`, at once if one has been recorded."""
        with self._lock:
            watch.since = since
            is_due = watch.seen > since
        if is_due:
            self._complete(watch)

    def close(self) -> None:
        """Cancel all watches."""
        with self._lock:
            self._closed = True
        for follower in [*self._followers.values()]:
            self._end(follower, None)

    # The thread that follows a namespace

    def _follow(self, follower: _Follower) -> None:
        keys, pauses = qualify_range(follower.namespace), self._pace.pauses()
        while self._is_needed(follower):
            try:
                with closing(
                    self._changes(keys, follower, follower.position, place=follower.place)
                ) as batches:
                    while self._is_needed(follower):
                        self._take(follower, next(batches), follows=True)
            except Retryable:
                next(pauses)
            except Exception as error:
                self._end(follower, error)

    def _changes(
        self,
        keys: KeyRange,
        follower: _Follower,
        since: Version,
        until: Version | None = None,
        *,
        place: bytes | None = None,
    ) -> Any:
        """The changes of a key range, as an iterator of batches that can be closed."""
        namespace = follower.namespace
        request = ChangesRequest(
            keys=keys,
            namespace=namespace,
            since=since,
            until=until,
            follow=True,
            keys_only=True,
            snapshot=place,
            on_generation=OnGeneration.DIFFERENCE,
        )
        return self._host.changes(request)

    def _take(self, follower: _Follower, batch: ChangeBatch, *, follows: bool = False) -> None:
        """Record the changes of a batch, and complete the watches that wait for them.

        `follows` marks a batch that the namespace's thread has read.
        """
        due: dict[Watch, None] = {}
        with self._lock:
            for key, version in zip(batch.keys, batch.versions, strict=True):
                for watch in follower.watches.get(key, ()):
                    watch.seen = max(watch.seen, version)
                    if version > watch.since:
                        due[watch] = None
            follower.position = max(follower.position, batch.through)
            if follows:
                follower.place = batch.snapshot
        for watch in due:
            self._complete(watch)

    def _is_needed(self, follower: _Follower) -> bool:
        """Whether any watch is open; if not, unregister the thread, so that the next watch starts another."""
        with self._lock:
            if not follower.watches and self._followers.get(follower.namespace) is follower:
                del self._followers[follower.namespace]
            return bool(follower.watches)

    def _complete(self, watch: Watch) -> None:
        if self._remove(watch) and watch.future.set_running_or_notify_cancel():
            watch.future.set_result(watch.seen)

    def _end(self, follower: _Follower, error: Exception | None) -> None:
        """End all watches of a namespace with an error, or cancel them if the site was closed."""
        with self._lock:
            watches = [watch for group in follower.watches.values() for watch in group]
        for watch in watches:
            if error is None or isinstance(error, Closed):
                watch.future.cancel()
            elif self._remove(watch) and watch.future.set_running_or_notify_cancel():
                watch.future.set_exception(error)

    def _remove(self, watch: Watch) -> bool:
        """Remove a watch; return whether it was open."""
        watches = watch.follower.watches
        with self._lock:
            group = watches.get(watch.key, set())
            if watch not in group:
                return False
            group.discard(watch)
            if not group:
                del watches[watch.key]
            self._count -= 1
            return True
