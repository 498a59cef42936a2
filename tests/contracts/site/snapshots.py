"""The site's contract: streams that begin with a snapshot, so that nothing is missing that lives."""

from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pyarrow.parquet
import pytest
from tests.contracts.site.base import (
    SITE_ID,
    SiteContractBase,
    age,
    check_rows,
    fill,
    oldest,
    refused,
    state_after,
)

from floodmark.feed.named.feeds import FeedState
from floodmark.feed.subscription.acknowledgement import ChangePosition
from floodmark.feed.subscription.consumer import SubscriptionOptions
from floodmark.model.change import Change, ChangeType, Heartbeat, Resolved, Stamp
from floodmark.model.errors import VersionCollected, VersionInFuture
from floodmark.model.stream import Way
from floodmark.model.version import compose
from floodmark.site import Namespace, Site
from floodmark.testing.clock import SimulatedTime

# More than two pages of records.
MANY = 20_000
# Ends at the present, and has no thread of its own.
BY_HAND = SubscriptionOptions(follow=False, background=False)


def show(changes: Iterator[Change]) -> list[tuple[bytes, bytes | None, bool]]:
    """Keys, values, and whether they are of a snapshot."""
    return [(change.key, change.value, change.snapshot) for change in changes]


class SnapshotContract(SiteContractBase):
    """Every key as of one version, and then every change above it."""

    def test_snapshot_has_every_live_key_though_its_changes_are_gone(
        self, site: Site, users: Namespace, time: SimulatedTime
    ) -> None:
        first = users.put(b"ada", b"countess")
        users.put(b"bob", b"builder")
        users.put(b"cem", b"cook")
        users.delete(b"bob")
        age(site, time)
        last = users.put(b"dan", b"dancer")
        found = list(site.changes("users", since="snapshot"))
        assert [(change.key, change.value) for change in found] == list(users.scan())
        assert {change.type for change in found} == {ChangeType.UPSERT}
        assert {change.snapshot for change in found} == {True}
        (version,) = {change.version for change in found}
        assert last <= version <= site.resolved_version()
        assert found[0].stamp == Stamp(first, SITE_ID)
        assert site.statistics().readers.changes[Way.SNAPSHOT] == 3

    def test_changes_follow_exactly_where_the_snapshot_ends(self, site: Site, users: Namespace) -> None:
        rows = fill(users, MANY)
        stream = site.changes("users", since="snapshot", follow=True)
        begun = [next(stream) for _ in range(10)]
        users.delete(b"key-00003")
        users.put(b"key-19999", b"new")
        last = users.put(b"zoe", b"new")
        found = [*begun]
        while found[-1].version < last:
            found.append(next(stream))
        snapshot, changes = found[:MANY], found[MANY:]
        check_rows(((each.key, each.value) for each in snapshot), rows.items())
        assert all(each.snapshot for each in snapshot)
        assert show(iter(changes)) == [
            (b"key-00003", None, False),
            (b"key-19999", b"new", False),
            (b"zoe", b"new", False),
        ]
        assert begun[0].version < changes[0].version
        after = state_after((each.key, each.value) for each in found)
        assert dict(users.scan()) == after

    def test_snapshot_goes_on_from_every_marker(self, site: Site, users: Namespace) -> None:
        fill(users, MANY)
        users.delete(b"key-00007")
        items = list(site.changes("users", since="snapshot", resolved_markers=True))
        markers = [item for item in items if isinstance(item, Resolved)]
        assert len([marker for marker in markers if marker.snapshot is not None]) > 2
        last = users.put(b"zoe", b"new")
        whole = [item for item in items if isinstance(item, Change)]
        for marker in markers:
            rest = list(site.changes("users", since=marker))
            got = sum(isinstance(item, Change) for item in items[: items.index(marker)])
            assert rest[-1].version == last
            check_rows(rest[:-1], whole[got:])

    def test_snapshot_is_kept_while_it_is_read(
        self, site: Site, users: Namespace, time: SimulatedTime
    ) -> None:
        rows = fill(users, MANY)
        stream = site.changes("users", since="snapshot")
        found = [next(stream)]
        users.put_many(dict.fromkeys(rows, b"new"))
        users.delete(b"key-19998")
        age(site, time)
        found += stream
        snapshot = [change for change in found if change.snapshot]
        check_rows(((change.key, change.value) for change in snapshot), rows.items())
        assert len(snapshot) == MANY

    def test_partitions_may_be_cut_and_joined_while_a_snapshot_is_read(
        self, site: Site, users: Namespace
    ) -> None:
        rows = fill(users, MANY)
        stream = site.changes("users", since="snapshot")
        found = [next(stream)]
        left, right = site.split("users", b"key-15000")
        found += [next(stream) for _ in range(9_000)]
        site.merge(left, right)
        found += stream
        check_rows(((change.key, change.value) for change in found), rows.items())

    def test_expiry_is_judged_at_the_version_of_the_snapshot(
        self, site: Site, users: Namespace, time: SimulatedTime
    ) -> None:
        users.put(b"a", b"gone", ttl=timedelta(seconds=1))
        users.put(b"b", b"going", ttl=timedelta(seconds=30))
        users.put(b"c", b"staying", ttl=timedelta(days=2))
        time.advance(10_000)
        (marker, *_) = [
            item
            for item in site.changes("users", since="snapshot", resolved_markers=True)
            if isinstance(item, Resolved)
        ]
        found = list(site.changes("users", since="snapshot"))
        assert [(change.key, change.value) for change in found] == [(b"b", b"going"), (b"c", b"staying")]
        assert all(change.expires_at is not None for change in found)
        time.advance(60_000)
        # What has expired since comes as a delete: a copy must not bring it back to life.
        again = list(site.changes("users", since=Resolved(marker.version, b"")))
        assert [(change.key, change.type) for change in again] == [
            (b"b", ChangeType.DELETE),
            (b"c", ChangeType.UPSERT),
        ]

    def test_records_that_are_merged_come_whole(self, site: Site, time: SimulatedTime) -> None:
        profiles = site.create_namespace("profiles", merge="fields")
        visits = site.create_namespace("visits", merge="counter")
        profiles.put(b"ada", b'{"name":"Ada","city":"Oslo"}')
        profiles.update(b"ada", {"city": "Bergen"})
        for _ in range(3):
            visits.add(b"ada", 2)
        time.advance(10 * 24 * 3_600_000)
        site.collect_garbage()
        for namespace in (profiles, visits):
            (change,) = site.changes(namespace.name, since="snapshot")
            assert (change.value, change.snapshot) == (namespace.stored.get(b"ada"), True)

    def test_snapshot_of_all_namespaces_leaves_out_what_was_dropped(
        self, site: Site, users: Namespace
    ) -> None:
        gone, others = site.create_namespace("gone"), site.create_namespace("others")
        users.put(b"ada", b"1")
        gone.put(b"bob", b"2")
        others.put(b"ada", b"3")
        site.drop_namespace("gone")
        found = [(change.namespace, change.key) for change in site.changes(since="snapshot")]
        assert found == [("users", b"ada"), ("others", b"ada")]

    def test_snapshot_of_some_keys_has_only_those(self, site: Site, users: Namespace) -> None:
        fill(users, 30)
        ranges = [
            {"prefix": b"key-0001"},
            {"start_key": b"key-00005", "end_key": b"key-00008"},
            {"prefix": b"nothing"},
        ]
        for keys in ranges:
            wanted = [
                (change.key, change.value)
                for change in site.changes("users", **keys)  # type: ignore[call-overload]
            ]
            found = show(site.changes("users", since="snapshot", **keys))  # type: ignore[call-overload]
            assert found == [(key, value, True) for key, value in wanted]

    def test_snapshot_with_before_images_is_of_inserts(self, site: Site, users: Namespace) -> None:
        users.put(b"ada", b"1")
        users.put(b"ada", b"2")
        stream = site.changes("users", since="snapshot", before_images=True, follow=True)
        found = [next(stream)]
        users.put(b"ada", b"3")
        found += [next(stream), next(stream)]
        assert [(change.type, change.value, change.snapshot) for change in found] == [
            (ChangeType.INSERT, b"2", True),
            (ChangeType.UPDATE_PREIMAGE, b"2", False),
            (ChangeType.UPDATE_POSTIMAGE, b"3", False),
        ]

    def test_snapshot_is_not_younger_than_the_end(self, site: Site, users: Namespace) -> None:
        users.put(b"ada", b"1")
        until = users.put(b"bob", b"1")
        users.delete(b"ada")
        found = list(site.changes("users", since="snapshot", until=until))
        assert show(iter(found)) == [(b"ada", b"1", True), (b"bob", b"1", True)]
        assert {change.version for change in found} == {until}

    def test_snapshot_of_nothing_is_complete_at_once(self, site: Site, users: Namespace) -> None:
        items = list(site.changes("users", since="snapshot", resolved_markers=True))
        assert [type(item) for item in items] == [Resolved] * len(items)
        assert items[-1].snapshot is None  # type: ignore[union-attr]

    def test_heartbeats_come_behind_the_snapshot(self, site: Site, users: Namespace) -> None:
        users.put(b"ada", b"1")
        stream = site.changes("users", since="snapshot", heartbeats=True, follow=True)
        first = next(stream)
        assert isinstance(first, Change)
        assert first.snapshot
        beat = site.heartbeat()
        assert next(item for item in stream if isinstance(item, Heartbeat)).version == beat.version

    # What is not to be had

    def test_the_beginning_is_refused_where_it_is_gone(
        self, site: Site, users: Namespace, time: SimulatedTime
    ) -> None:
        users.put(b"ada", b"1")
        assert len(list(site.changes("users", since="beginning"))) == 1
        created_at = site.host.namespaces.find_namespace("users").created_at
        age(site, time)
        details = {"version": created_at, "oldest": oldest(site)}
        error = refused(VersionCollected, lambda: site.changes("users", since="beginning"), **details)
        assert "snapshot" in str(error)
        with pytest.raises(VersionCollected):
            site.changes(since="beginning")
        with pytest.raises(VersionCollected):
            site.feeds.create("copy", "users", "blackhole:", since="beginning")
        assert (site.feeds.list(), site.safe_points()) == ([], [])

    def test_a_snapshot_that_was_collected_does_not_go_on(
        self, site: Site, users: Namespace, time: SimulatedTime
    ) -> None:
        users.put(b"ada", b"1")
        (marker, *_) = [
            item
            for item in site.changes("users", since="snapshot", resolved_markers=True)
            if isinstance(item, Resolved)
        ]
        age(site, time)
        details = {"version": marker.version, "oldest": oldest(site)}
        refused(VersionCollected, lambda: site.changes("users", since=marker), **details)

    def test_a_snapshot_in_the_future_is_refused(
        self, site: Site, users: Namespace, time: SimulatedTime
    ) -> None:
        future = compose(time() + 10_000, 0)
        refused(VersionInFuture, lambda: site.changes("users", since=Resolved(future, b"")), version=future)

    # Feeds

    def test_new_feed_delivers_every_live_key_and_then_what_comes(
        self, site: Site, users: Namespace, time: SimulatedTime, tmp_path: Path
    ) -> None:
        rows = fill(users, 50)
        users.delete(b"key-00007")
        site.split("users", b"key-00020")
        age(site, time)
        target = tmp_path / "lake"
        feed = site.feeds.create("lake", "users", f"parquet:{target}?batch_records=7")
        assert feed.is_at_snapshot
        until = users.put(b"zoe", b"new")
        site.feeds.pause("lake")
        site.feeds.update("lake", until=until)
        site.feeds.resume("lake")
        assert site.feeds.runner("lake", sinks=[f"parquet:{tmp_path}"]).run() is FeedState.FINISHED
        found = pyarrow.parquet.read_table(target).to_pylist()
        snapshot = sorted((row["key"], row["value"]) for row in found if row["_snapshot"])
        assert snapshot == sorted(row for row in rows.items() if row[0] != b"key-00007")
        assert {row["_commit_version"] for row in found if row["_snapshot"]} == {feed.checkpoint}
        assert [row["key"] for row in found if not row["_snapshot"]] == [b"zoe"]
        finished = site.feeds.show("lake")
        assert (finished.checkpoint, finished.is_at_snapshot) == (until, False)

    def test_feed_may_have_only_a_snapshot_to_deliver(self, site: Site, users: Namespace) -> None:
        until = users.put_many({b"ada": b"1", b"bob": b"2"})
        users.delete(b"ada")
        site.feeds.create("copy", "users", "blackhole:", until=until)
        runner = site.feeds.runner("copy")
        assert runner.run() is FeedState.FINISHED
        assert runner.statistics().changes == 2

    def test_interval_of_a_snapshot_is_not_checked(self, site: Site, users: Namespace) -> None:
        users.put(b"ada", b"1")
        site.heartbeat()
        site.feeds.create("copy", "users", "blackhole:")
        users.put(b"bob", b"1")
        site.heartbeat()
        users.put(b"cem", b"1")
        site.heartbeat()
        site.feeds.pause("copy")
        site.feeds.update("copy", until=users.put(b"dan", b"1"))
        site.feeds.resume("copy")
        assert site.feeds.runner("copy").run() is FeedState.FINISHED
        checks = site.feeds.statistics("copy").checks
        found = checks.intervals_unchecked, checks.intervals_checked, checks.intervals_wrong
        assert found == (1, 1, 0), str(checks)

    # Subscriptions

    def test_new_subscription_begins_with_every_live_key(
        self, site: Site, users: Namespace, time: SimulatedTime
    ) -> None:
        users.put_many({b"ada": b"1", b"bob": b"2", b"cem": b"3"})
        users.delete(b"bob")
        age(site, time)
        with site.subscribe("indexer", "users", options=BY_HAND) as subscription:
            last = users.put(b"ada", b"4")
            found = list(subscription)
            assert [(each.change.key, each.change.value, each.change.snapshot) for each in found] == [
                (b"ada", b"1", True),
                (b"cem", b"3", True),
                (b"ada", b"4", False),
            ]
            assert found[0].position == ChangePosition(found[0].change.version, 0)
            assert found[-1].position == ChangePosition(last, 0)
            subscription.acknowledge_through(found[-1])
        statistics = site.subscriptions.statistics("indexer")
        assert (statistics.backlog, statistics.through >= last) == (0, True)

    def test_subscription_goes_on_in_the_middle_of_its_snapshot(
        self, site: Site, users: Namespace, time: SimulatedTime
    ) -> None:
        rows = fill(users, MANY)
        done: dict[bytes, bytes | None] = {}
        with site.subscribe("indexer", "users", options=BY_HAND) as subscription:
            for number, delivery in zip(range(15_000), subscription, strict=False):
                # A few are left, at the beginning and at the end of what was delivered.
                if number not in (3, 9_000, 14_999):
                    done[delivery.change.key] = delivery.change.value
                    delivery.acknowledge()
        row = site.subscriptions.show("indexer")
        assert (row.live[0].version, row.live[0].count) == (row.snapshot, 15_000)
        assert site.subscriptions.statistics("indexer").backlog == MANY - 15_000 + 3
        users.put_many(dict.fromkeys(rows, b"new"))
        age(site, time)
        found: list[tuple[bytes, bytes | None, bool]] = []
        with site.subscribe("indexer", "users", options=BY_HAND) as subscription:
            for delivery in subscription:
                found.append((delivery.change.key, delivery.change.value, delivery.is_redelivered))
                done[delivery.change.key] = delivery.change.value
                delivery.acknowledge()
        wanted = [(b"key-%05d" % number, b"x", True) for number in (3, 9_000, 14_999)]
        wanted += [(b"key-%05d" % number, b"x", False) for number in range(15_000, MANY)]
        wanted += [(key, b"new", False) for key in rows]
        check_rows(found, wanted)
        assert done == dict(users.scan())
        assert site.subscriptions.statistics("indexer").backlog == 0

    def test_what_is_done_of_a_snapshot_is_not_read_again(self, site: Site, users: Namespace) -> None:
        fill(users, MANY)
        with site.subscribe("indexer", "users", options=BY_HAND) as subscription:
            for _, delivery in zip(range(18_000), subscription, strict=False):
                delivery.acknowledge()
        row = site.subscriptions.show("indexer")
        assert row.mark is not None
        assert row.mark.index > 10_000

    def test_subscription_may_begin_anew_with_a_snapshot(self, site: Site, users: Namespace) -> None:
        users.put(b"ada", b"1")
        with site.subscribe("indexer", "users", start="end", options=BY_HAND) as subscription:
            assert list(subscription) == []
            subscription.seek("snapshot")
            (delivery,) = subscription
            assert (delivery.change.key, delivery.change.snapshot) == (b"ada", True)
            subscription.seek("end")
            assert list(subscription) == []
        row = site.subscriptions.seek("indexer", "snapshot")
        assert (row.snapshot, row.live) == (row.through + 1, [])
        with site.subscribe("indexer", "users", options=BY_HAND) as subscription:
            assert [each.change.key for each in subscription] == [b"ada"]

    def test_subscription_of_a_namespace_whose_past_is_not_kept_begins(
        self, site: Site, time: SimulatedTime
    ) -> None:
        brief = site.create_namespace("brief", retention=timedelta(0))
        brief.put(b"ada", b"1")
        site.collect_garbage()
        with site.subscribe("indexer", "brief", options=BY_HAND) as subscription:
            time.advance(1)
            brief.put(b"ada", b"2")
            site.collect_garbage()
            assert [each.change.value for each in subscription] == [b"1", b"2"]

    def test_snapshot_is_acknowledged_in_transactions(self, site: Site, users: Namespace) -> None:
        users.put_many({b"ada": b"1", b"bob": b"2"})
        counts = site.create_namespace("counts", merge="counter")
        with site.subscribe("indexer", "users", options=BY_HAND) as subscription:
            first, second = subscription
            with site.transaction() as transaction:
                transaction.add(counts, b"rows", 1)
                transaction.acknowledge(first)
            aborted = site.transaction()
            aborted.acknowledge(second)
            aborted.abort()
            (again,) = subscription
            assert (again.change.key, again.is_redelivered) == (b"bob", True)
            again.acknowledge()
        assert counts.get(b"rows") == 1
        assert site.subscriptions.statistics("indexer").backlog == 0
