"""The site's contract: versions, partitions, safe points, garbage collection and statistics."""

from collections.abc import Callable
from datetime import UTC, datetime, timedelta

from tests.contracts.site.base import (
    HOUR,
    HOUR_MS,
    SITE,
    SITE_ID,
    START_MS,
    SiteContractBase,
    age,
    oldest,
    refused,
)

from floodmark.feed import ChangeStatistics
from floodmark.host.statistics import NamespaceStatistics, PartitionHeat, PartitionStatistics
from floodmark.model.actions import SITE_OWNER
from floodmark.model.change import Heartbeat, Sums, Tally
from floodmark.model.errors import (
    InvalidArgument,
    InvalidName,
    PartitionNotFound,
    SafePointNotFound,
    VersionCollected,
)
from floodmark.model.format import FORMAT
from floodmark.model.ranges import KeyRange
from floodmark.model.version import COUNTER_BITS, Version, moment_of, physical_ms, version_at
from floodmark.partition import HeatSample
from floodmark.site import GarbageReport, Namespace, SafePoint, Site, SiteStatistics
from floodmark.testing.clock import SimulatedTime

DAY_MS = 24 * HOUR_MS


def namespace_key(site: Site, name: str, key: bytes) -> bytes:
    """A key as partitions know it: three bytes of namespace, then the user's."""
    identity = next(row.id for row in site.statistics().namespaces if row.name == name)
    return identity.to_bytes(3, "big") + key


class AdministrationContract(SiteContractBase):
    """What a site does with itself when it is told to, and what it says about itself."""

    # Versions

    def test_now_is_above_everything_that_the_site_has_seen(
        self, site: Site, users: Namespace, time: SimulatedTime
    ) -> None:
        seen = [site.now(), users.put(b"ada", b"countess"), site.now(), site.now()]
        time.advance(1_000)
        seen += [site.now(), users.delete(b"ada")]
        time.advance(-10_000)
        seen += [site.now(), users.put(b"ada", b"countess"), site.now()]
        assert seen == sorted(set(seen))
        assert all(type(version) is int for version in seen)
        assert physical_ms(seen[0]) == START_MS

    def test_version_that_was_read_at_is_seen(self, site: Site, users: Namespace) -> None:
        ahead = site.now() + 1_000
        users.get(b"ada", at=ahead)
        assert users.put(b"ada", b"countess") > ahead

    def test_resolved_version_covers_what_was_written_and_follows_the_time(
        self, site: Site, users: Namespace, time: SimulatedTime
    ) -> None:
        version = users.put(b"ada", b"countess")
        resolved = site.resolved_version()
        assert resolved >= version
        time.advance(1_000)
        assert physical_ms(site.resolved_version()) >= START_MS + 1_000
        assert users.put(b"ada", b"programmer") > resolved

    def test_sync_of_nothing_is_harmless(self, site: Site) -> None:
        site.sync()
        site.sync()

    def test_heartbeats_account_for_changes(self, site: Site, users: Namespace, time: SimulatedTime) -> None:
        first = site.heartbeat()
        assert type(first) is Heartbeat
        users.put_many({b"ada": b"countess", b"bob": b"builder"})
        version = users.delete(b"ada")
        time.advance(1_000)
        second = site.heartbeat()
        assert (second.since, second.wall_ms, second.log) == (first.through, time(), None)
        assert first.version < version <= second.through < second.version
        (sums,) = second.sums.values()
        assert sums == Sums(own=Tally(3, sums.own.digest), all=Tally(3, sums.own.digest))
        assert (type(sums), type(sums.own)) == (Sums, Tally)
        assert site.statistics().last_heartbeat == moment_of(second.version)

    # Partitions

    def test_site_begins_with_one_partition(self, site: Site) -> None:
        (partition,) = site.partitions()
        assert type(partition) is PartitionStatistics
        assert partition.range == KeyRange(b"", None)
        assert (partition.writes, partition.reads, partition.bytes_written) == (0, 0, 0)

    def test_partitions_are_split_and_merged(self, site: Site, users: Namespace) -> None:
        users.put_many({b"a": b"1", b"m": b"2", b"z": b"3"})
        halves = site.split("users", b"m")
        assert type(halves) is tuple
        left, right = halves
        boundary = namespace_key(site, "users", b"m")
        found = site.partitions()
        assert [(partition.id, partition.range) for partition in found] == [
            (left, KeyRange(b"", boundary)),
            (right, KeyRange(boundary, None)),
        ]
        assert type(found[0].range) is KeyRange
        users.put(b"b", b"4")
        joined = site.merge(left, right)
        (partition,) = site.partitions()
        assert (partition.id, partition.range) == (joined, KeyRange())
        assert dict(users.scan()) == {b"a": b"1", b"b": b"4", b"m": b"2", b"z": b"3"}
        assert len(list(site.changes("users"))) == 4

    def test_impossible_splits_and_merges_are_refused(self, site: Site, users: Namespace) -> None:
        left, right = site.split("users", b"m")
        middle, last = site.split("users", b"t")
        asks: list[tuple[int, Callable[[], object]]] = [
            (middle, lambda: site.split("users", b"m")),
            (left, lambda: site.merge(middle, left)),
            (left, lambda: site.merge(left, left)),
            (last, lambda: site.merge(left, last)),
            (right, lambda: site.merge(left, right)),
            (999, lambda: site.merge(left, 999)),
            (999, lambda: site.merge(999, left)),
        ]
        for partition, ask in asks:
            refused(PartitionNotFound, ask, partition=partition)
        assert [partition.id for partition in site.partitions()] == [left, middle, last]

    def test_partitions_may_span_namespaces(self, site: Site, users: Namespace) -> None:
        orders = site.create_namespace("orders")
        left, right = site.split("orders", b"m")
        users.put(b"z", b"1")
        orders.put(b"a", b"2")
        orders.put(b"z", b"3")
        assert [change.partition for change in site.changes()] == [left, left, right]
        assert list(orders.scan(reverse=True)) == [(b"z", b"3"), (b"a", b"2")]
        assert list(users.scan()) == [(b"z", b"1")]

    def test_heat_tells_what_each_partition_did(
        self, site: Site, users: Namespace, time: SimulatedTime
    ) -> None:
        left, right = site.split("users", b"m")
        users.put(b"a", b"12345")
        users.put_many({b"b": b"1", b"z": b"3"})
        for _ in range(3):
            users.get(b"a")
        time.advance(400)
        heats = site.heat()
        assert [(type(heat), heat.id) for heat in heats] == [(PartitionHeat, left), (PartitionHeat, right)]
        # Three bytes of namespace in each key, and one of flags in each value.
        (sample,) = heats[0].samples
        assert sample == HeatSample(
            from_ms=START_MS, to_ms=START_MS + 400, writes=2, reads=3, bytes_written=10 + 6
        )
        (other,) = heats[1].samples
        assert (other.writes, other.reads, other.bytes_written) == (1, 0, 6)
        assert [(part.writes, part.reads) for part in site.partitions()] == [(2, 3), (1, 0)]

    # Safe points

    def test_safe_point_keeps_a_version_until_it_is_released(
        self, site: Site, users: Namespace, time: SimulatedTime
    ) -> None:
        versions = [users.put(b"key", b"%d" % index) for index in range(4)]
        held = site.hold_safe_point("second", versions[1])
        assert held == SafePoint("second", versions[1], START_MS + DAY_MS, None, SITE_OWNER)
        assert type(held) is SafePoint
        site.hold_safe_point("first", versions[2], lifetime=HOUR * 3)
        assert site.safe_points() == [
            SafePoint("first", versions[2], START_MS + 3 * HOUR_MS, None, SITE_OWNER),
            held,
        ]
        age(site, time)
        assert oldest(site) == versions[1]
        assert [users.get(b"key", at=version) for version in versions[1:]] == [b"1", b"2", b"3"]
        site.release_safe_point("second")
        site.collect_garbage()
        assert oldest(site) == versions[2]
        # The other one is over by itself.
        age(site, time, 1)
        assert site.safe_points() == []
        assert oldest(site) > versions[3]

    def test_holding_again_renews_and_moves(self, site: Site, users: Namespace, time: SimulatedTime) -> None:
        first, second = users.put(b"key", b"1"), users.put(b"key", b"2")
        site.hold_safe_point("reader", first, lifetime=3 * HOUR)
        age(site, time, 2)
        site.hold_safe_point("reader", first, lifetime=3 * HOUR)
        age(site, time, 2)
        assert oldest(site) == first
        site.hold_safe_point("reader", second)
        site.collect_garbage()
        assert oldest(site) == second
        assert len(site.safe_points()) == 1

    def test_safe_point_may_hold_one_namespace_and_be_named_by_a_moment(
        self, site: Site, users: Namespace, time: SimulatedTime
    ) -> None:
        orders = site.create_namespace("orders", retention=HOUR)
        version = users.put(b"key", b"1")
        orders.put(b"key", b"1")
        held = site.hold_safe_point("reader", moment_of(version), namespace="users")
        assert held.version == version_at(moment_of(version))
        assert held.namespace is not None
        age(site, time)
        assert oldest(site, "users") == held.version
        assert oldest(site, "orders") > held.version
        site.hold_safe_point("ünïcode", site.now())
        site.release_safe_point("ünïcode")

    def test_safe_point_that_comes_too_late_is_told(
        self, site: Site, users: Namespace, time: SimulatedTime
    ) -> None:
        version = users.put(b"key", b"1")
        age(site, time)
        for namespace in ("users", None):
            refused(
                VersionCollected,
                lambda namespace=namespace: site.hold_safe_point("late", version, namespace=namespace),  # type: ignore[misc]
                version=version,
                oldest=oldest(site),
            )
        assert site.safe_points() == []
        site.hold_safe_point("punctual", oldest(site))

    def test_unknown_safe_point_and_bad_lifetime_are_refused(self, site: Site, users: Namespace) -> None:
        version = users.put(b"key", b"1")
        site.hold_safe_point("reader", version)
        error = refused(SafePointNotFound, lambda: site.release_safe_point("nobody"), name="nobody")
        assert "no safe point 'nobody'; there are: reader" in str(error)
        for lifetime in (timedelta(0), timedelta(seconds=-1), timedelta(days=36_501)):
            refused(
                InvalidArgument,
                lambda lifetime=lifetime: site.hold_safe_point("new", version, lifetime=lifetime),  # type: ignore[misc]
            )
        assert [point.name for point in site.safe_points()] == ["reader"]

    def test_safe_points_of_feeds_and_subscriptions_go_only_with_these(
        self, site: Site, users: Namespace
    ) -> None:
        users.put(b"key", b"1")
        site.feeds.create("copy", "users", "blackhole:")
        site.subscribe("indexer", "users").close()
        points = site.safe_points()
        assert [point.name for point in points] == ["feed/copy", "subscription/indexer"]
        for point in points:
            refused(InvalidName, lambda name=point.name: site.release_safe_point(name))  # type: ignore[misc]
            refused(InvalidName, lambda name=point.name: site.hold_safe_point(name, site.now()))  # type: ignore[misc]
        assert site.safe_points() == points
        site.feeds.remove("copy")
        site.subscriptions.remove("indexer")
        assert site.safe_points() == []

    # Garbage collection

    def test_garbage_collection_removes_what_nobody_can_ask_for(
        self, site: Site, users: Namespace, time: SimulatedTime
    ) -> None:
        for key in (b"deleted", b"kept"):
            for index in range(5):
                users.put(key, b"%d" % index)
        tombstone = users.delete(b"deleted")
        time.advance(2 * HOUR_MS)
        users.put(b"kept", b"young")
        report = site.collect_garbage()
        kept = (time() - HOUR_MS) << COUNTER_BITS
        assert report == GarbageReport(
            runs=1,
            versions_read=12,
            versions_removed=10,
            keys_removed=1,
            namespaces_removed=0,
            log_trimmed_version=kept,
        )
        assert type(report) is GarbageReport
        assert oldest(site) == kept
        assert (users.get(b"kept", at=kept), users.get(b"kept")) == (b"4", b"young")
        assert users.get(b"deleted", at=kept) is None
        (statistics,) = site.statistics().namespaces
        assert statistics.collected_horizon == tombstone
        again = site.collect_garbage()
        assert (again.runs, again.versions_removed) == (1, 0)
        assert site.statistics().garbage.runs == 2
        assert site.statistics().garbage.versions_removed == 10

    def test_retention_is_each_namespaces_own(
        self, site: Site, users: Namespace, time: SimulatedTime
    ) -> None:
        keepers = site.create_namespace("keepers", retention=10 * HOUR)
        versions: dict[str, Version] = {}
        for space in (users, keepers):
            versions[space.name] = space.put(b"key", b"1")
            space.put(b"key", b"2")
        age(site, time)
        refused(
            VersionCollected,
            lambda: users.get(b"key", at=versions["users"]),
            version=versions["users"],
            oldest=oldest(site),
        )
        assert keepers.get(b"key", at=versions["keepers"]) == b"1"
        site.update_namespace("keepers", retention=HOUR)
        site.collect_garbage()
        assert oldest(site, "keepers") > versions["keepers"]

    def test_dropped_namespace_is_removed_when_nobody_can_ask_for_it(
        self, site: Site, users: Namespace, time: SimulatedTime
    ) -> None:
        users.put(b"key", b"x")
        time.advance(2 * HOUR_MS)
        site.drop_namespace("users")
        assert site.collect_garbage().namespaces_removed == 0
        time.advance(2 * HOUR_MS)
        assert site.collect_garbage().namespaces_removed == 1
        assert site.collect_garbage().namespaces_removed == 0

    # Statistics

    def test_statistics_tell_what_the_site_has_done(
        self, site: Site, users: Namespace, time: SimulatedTime
    ) -> None:
        empty = site.statistics()
        assert type(empty) is SiteStatistics
        users.put(b"ada", b"countess")
        version = users.put_many({b"ada": b"programmer", b"bob": b"builder"})
        users.delete(b"bob")
        found = site.statistics()
        assert (found.site, found.site_id, found.format) == (SITE, SITE_ID, FORMAT)
        assert min(found.version, found.resolved_version) >= version
        assert found.commits - empty.commits == 3
        assert (found.changes, found.recoveries, found.clock_ahead_ms) == (4, 0, 0)
        assert found.bytes_written > empty.bytes_written
        assert (found.last_heartbeat, found.background_error) == (None, None)
        assert found.partitions == site.partitions()
        (namespace,) = found.namespaces
        assert namespace == NamespaceStatistics(
            name="users", id=namespace.id, merge="last_write", oldest_version=0, collected_horizon=0
        )
        assert found.garbage == GarbageReport()
        assert type(found.readers) is ChangeStatistics
        site.heartbeat()
        beat = site.statistics().last_heartbeat
        assert isinstance(beat, datetime)
        assert beat == datetime.fromtimestamp(time() / 1000, UTC)
        time.advance(-5_000)
        assert site.statistics().clock_ahead_ms == 5_000
