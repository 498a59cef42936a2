"""The site's contract: changes, in commit order, from anywhere, and never silently fewer than there are."""

from collections.abc import Callable, Iterator
from datetime import timedelta
from random import Random
from threading import Event

import pytest
from tests.contracts.site.base import (
    HOUR_MS,
    SITE_ID,
    START_MS,
    SiteContractBase,
    age,
    check_rows,
    fill,
    oldest,
    refused,
    state_after,
)
from tests.contracts.site.scans import reshape
from tests.waiting import HANG_SECONDS, run_threads, wait_until

from floodmark.model.change import Change, ChangeType, Heartbeat, Resolved, Stamp
from floodmark.model.errors import Closed, VersionCollected, VersionInFuture
from floodmark.model.version import COUNTER_BITS, Version, compose, moment_of
from floodmark.site import Namespace, Site
from floodmark.testing.clock import SimulatedTime

# Too large to stand in the change log, which names it instead.
LARGE = b"large" * 2_000


def versions(changes: Iterator[Change]) -> list[Version]:
    """The versions of changes, in their order."""
    return [change.version for change in changes]


class ChangeContract(SiteContractBase):
    """One ordered, resumable stream of everything that happened."""

    def test_change_tells_all_about_its_write(self, site: Site, users: Namespace) -> None:
        first = users.put(b"ada", b"countess", ttl=timedelta(seconds=5))
        second = users.delete(b"ada")
        partition = site.partitions()[0].id
        changes = site.changes("users")
        assert isinstance(changes, Iterator)
        found = list(changes)
        assert found == [
            Change(
                namespace="users",
                key=b"ada",
                value=b"countess",
                type=ChangeType.UPSERT,
                version=first,
                stamp=Stamp(first, SITE_ID),
                partition=partition,
                expires_at=START_MS // 1000 + 6,
            ),
            Change(
                namespace="users",
                key=b"ada",
                value=None,
                type=ChangeType.DELETE,
                version=second,
                stamp=Stamp(second, SITE_ID),
                partition=partition,
            ),
        ]
        assert [type(change) for change in found] == [Change, Change]
        assert [type(change.type) for change in found] == [ChangeType, ChangeType]

    def test_no_changes_are_an_empty_stream(self, site: Site, users: Namespace) -> None:
        assert list(site.changes("users")) == []
        assert list(site.changes()) == []
        assert list(site.changes("users", follow=True, until=site.resolved_version())) == []

    # From where to where

    def test_since_is_exclusive_and_until_is_inclusive(self, site: Site, users: Namespace) -> None:
        first, second, third, fourth = (users.put(b"key", b"%d" % index) for index in range(4))
        assert versions(site.changes("users")) == [first, second, third, fourth]
        assert versions(site.changes("users", since=0)) == [first, second, third, fourth]
        assert versions(site.changes("users", since=first)) == [second, third, fourth]
        assert versions(site.changes("users", since=first - 1)) == [first, second, third, fourth]
        assert versions(site.changes("users", until=second)) == [first, second]
        assert versions(site.changes("users", since=first, until=third)) == [second, third]
        assert versions(site.changes("users", since=first, until=third - 1)) == [second]
        assert versions(site.changes("users", since=second, until=second)) == []
        assert versions(site.changes("users", since=fourth)) == []

    def test_moments_are_places_to_begin_and_to_end(
        self, site: Site, users: Namespace, time: SimulatedTime
    ) -> None:
        first = users.put(b"key", b"1")
        time.advance(10)
        second = users.put(b"key", b"2")
        assert versions(site.changes("users", since=moment_of(first))) == [second]
        assert versions(site.changes("users", until=moment_of(first))) == [first]
        assert versions(site.changes("users", since=moment_of(first) - timedelta(days=1))) == [first, second]

    def test_beginning_and_now_are_places_to_begin(
        self, site: Site, users: Namespace, time: SimulatedTime
    ) -> None:
        first = users.put(b"key", b"1")
        assert versions(site.changes("users", since="beginning")) == [first]
        assert versions(site.changes(since="beginning")) == [first]
        assert versions(site.changes("users", since="now")) == []
        assert versions(site.changes("users", since="end")) == []
        time.advance(10)
        second = users.put(b"key", b"2")
        assert versions(site.changes("users", since="beginning")) == [first, second]
        assert versions(site.changes(since="beginning")) == [first, second]

    def test_reading_may_go_on_from_any_change(self, site: Site, users: Namespace) -> None:
        site.split("users", b"key-00040")
        written: list[tuple[bytes, bytes]] = []
        for batch in range(5):
            rows = {b"key-%05d" % index: b"%d" % batch for index in range(batch, 100, 7)}
            users.put_many(rows)
            written += rows.items()
        everything = list(site.changes("users"))
        assert sorted((change.key, change.value) for change in everything) == sorted(written)
        for version in {change.version for change in everything}:
            rest = [change for change in everything if change.version > version]
            assert list(site.changes("users", since=version)) == rest

    def test_version_in_the_future_is_no_place_to_begin(
        self, site: Site, users: Namespace, time: SimulatedTime
    ) -> None:
        users.put(b"key", b"1")
        future = compose(time() + 10_000, 0)
        refused(VersionInFuture, lambda: site.changes("users", since=future), version=future)
        refused(VersionInFuture, lambda: site.changes("users", since=future, follow=True), version=future)

    # Which changes

    @pytest.mark.parametrize("split", [False, True], ids=["one partition", "three partitions"])
    def test_key_ranges_and_prefixes_choose_changes(self, site: Site, users: Namespace, split: bool) -> None:
        if split:
            site.split("users", b"ab")
            site.split("users", b"b")
        keys = [b"a", b"ab", b"ab\xff", b"abc", b"ac", b"b", b"\xff", b"\xff\xff"]
        for key in keys:
            users.put(key, b"1")
        users.put_many(dict.fromkeys(keys, b"2"))

        def chosen(start: bytes = b"", end: bytes | None = None, prefix: bytes | None = None) -> set[bytes]:
            found = list(site.changes("users", start_key=start, end_key=end, prefix=prefix))
            assert len(found) == 2 * len({change.key for change in found})
            return {change.key for change in found}

        assert chosen() == set(keys)
        assert chosen(b"ab", b"b") == {b"ab", b"ab\xff", b"abc", b"ac"}
        assert chosen(b"b") == {b"b", b"\xff", b"\xff\xff"}
        assert chosen(prefix=b"ab") == {b"ab", b"ab\xff", b"abc"}
        assert chosen(prefix=b"\xff") == {b"\xff", b"\xff\xff"}
        assert chosen(b"abc", prefix=b"ab") == {b"abc", b"ab\xff"}
        assert chosen(b"b", prefix=b"ab") == set()
        assert chosen(b"ab", b"ab") == set()

    def test_changes_of_all_namespaces_come_in_one_order(self, site: Site, users: Namespace) -> None:
        orders = site.create_namespace("orders")
        written = [(space.name, space.put(b"key", b"%d" % n)) for n in range(5) for space in (users, orders)]
        assert [(change.namespace, change.version) for change in site.changes()] == written
        assert versions(site.changes("orders")) == [version for name, version in written if name == "orders"]

    def test_changes_of_several_partitions_come_in_commit_order(self, site: Site, users: Namespace) -> None:
        for boundary in (b"c", b"f", b"m"):
            site.split("users", boundary)
        written = [users.put(key, b"%d" % n) for n in range(5) for key in (b"z", b"a", b"d", b"k")]
        found = list(site.changes("users"))
        assert [change.version for change in found] == written
        serving = {partition.id for partition in site.partitions()}
        assert {change.partition for change in found} == serving

    def test_changes_of_a_commit_come_in_order_of_keys(self, site: Site, users: Namespace) -> None:
        users.put_many({b"c": b"1", b"a": b"2", b"b": b"3"})
        assert [change.key for change in site.changes("users")] == [b"a", b"b", b"c"]

    def test_put_whose_time_is_over_is_a_delete(
        self, site: Site, users: Namespace, time: SimulatedTime
    ) -> None:
        users.put(b"ada", b"countess", ttl=5)
        users.put_many({b"bob": b"builder"}, ttl=50)
        assert [change.type for change in site.changes("users")] == [ChangeType.UPSERT, ChangeType.UPSERT]
        time.advance(10_000)
        ada, bob = site.changes("users")
        assert (ada.type, ada.value, ada.expires_at) == (ChangeType.DELETE, None, START_MS // 1000 + 6)
        assert (bob.type, bob.value) == (ChangeType.UPSERT, b"builder")

    # Large ones

    def test_large_values_are_there(self, site: Site, users: Namespace) -> None:
        users.put(b"one", LARGE)
        users.put_many({b"small": b"1", b"three": LARGE + b"!", b"two": LARGE})
        users.put(b"one", b"overwritten")
        assert [(change.key, change.value) for change in site.changes("users")] == [
            (b"one", LARGE),
            (b"small", b"1"),
            (b"three", LARGE + b"!"),
            (b"two", LARGE),
            (b"one", b"overwritten"),
        ]

    def test_large_commits_come_whole(self, site: Site, users: Namespace) -> None:
        pairs = {b"key-%04d" % index: b"%04d" % index * 900 for index in range(2_000)}
        version = users.put_many(pairs)
        after = users.put(b"after", b"x")
        found = list(site.changes("users"))
        check_rows([(change.key, change.value) for change in found[:-1]], pairs.items())
        assert len(found) == len(pairs) + 1
        assert {change.version for change in found[:-1]} == {version}
        assert found[-1].version == after
        middle = list(site.changes("users", prefix=b"key-10"))
        assert [change.key for change in middle] == [b"key-10%02d" % index for index in range(100)]

    # What was before

    def test_before_images_tell_what_a_change_replaced(
        self, site: Site, users: Namespace, time: SimulatedTime
    ) -> None:
        users.put(b"ada", b"countess")
        users.put(b"ada", LARGE)
        users.put(b"ada", b"", ttl=5)
        users.delete(b"ada")
        users.delete(b"ada")
        users.put(b"ada", b"again")
        users.put(b"bob", b"brief", ttl=5)
        time.advance(10_000)
        users.put(b"bob", b"later")
        found = list(site.changes("users", before_images=True))
        insert, before, after, delete = (
            ChangeType.INSERT,
            ChangeType.UPDATE_PREIMAGE,
            ChangeType.UPDATE_POSTIMAGE,
            ChangeType.DELETE,
        )
        # Puts whose time was over when they were read are deletes, and a delete tells what it removed.
        assert [(change.key, change.type, change.value) for change in found] == [
            (b"ada", insert, b"countess"),
            (b"ada", before, b"countess"),
            (b"ada", after, LARGE),
            (b"ada", delete, LARGE),
            (b"ada", delete, b""),
            (b"ada", delete, None),
            (b"ada", insert, b"again"),
            (b"bob", delete, None),
            (b"bob", insert, b"later"),
        ]
        assert [
            (change.key, change.type) for change in site.changes("users", before_images=True, prefix=b"b")
        ] == [
            (b"bob", delete),
            (b"bob", insert),
        ]

    # Markers and heartbeats

    def test_markers_are_checkpoints(self, site: Site, users: Namespace) -> None:
        written = [users.put(b"key", b"%d" % index) for index in range(5)]
        items = list(site.changes("users", resolved_markers=True))
        assert isinstance(items[-1], Resolved)
        assert items[-1].version >= written[-1]
        seen: list[Version] = []
        for item in items:
            if isinstance(item, Resolved):
                assert seen == [version for version in written if version <= item.version]
                assert versions(site.changes("users", since=item.version)) == written[len(seen) :]
            else:
                assert isinstance(item, Change)
                seen.append(item.version)
        assert seen == written

    def test_marker_comes_although_nothing_happened(self, site: Site, users: Namespace) -> None:
        version = users.put(b"key", b"1")
        markers = list(site.changes("users", since=version, resolved_markers=True))
        assert [type(marker) for marker in markers] == [Resolved] * len(markers)
        assert markers[-1].version >= version

    def test_heartbeats_stand_at_their_places(self, site: Site, users: Namespace) -> None:
        first = users.put(b"key", b"1")
        beat = site.heartbeat()
        second = users.put_many({b"key": b"2", b"other": b"3"})
        other = site.heartbeat()
        assert type(beat) is Heartbeat
        found = list(site.changes("users", heartbeats=True))
        kinds = [(type(item), item.version) for item in found]
        assert kinds == [
            (Change, first),
            (Heartbeat, beat.version),
            (Change, second),
            (Change, second),
            (Heartbeat, other.version),
        ]
        assert [item for item in found if isinstance(item, Heartbeat)] == [beat, other]
        assert versions(site.changes("users")) == [first, second, second]

    # Following

    def test_follow_ends_at_until(self, site: Site, users: Namespace) -> None:
        version = users.put(b"key", b"1")
        assert versions(site.changes("users", until=version, follow=True)) == [version]
        assert versions(site.changes("users", since=version, until=version, follow=True)) == []

    def test_follow_sees_what_another_thread_writes(self, site: Site, users: Namespace) -> None:
        before = [users.put(b"key", b"%d" % index) for index in range(3)]
        caught_up = Event()
        seen: list[Version] = []
        written: list[Version] = []
        # A node of several gives each 64th version.
        last = site.now() + 200 * (before[-1] - before[-2])

        def write() -> None:
            assert caught_up.wait(HANG_SECONDS)
            while (version := users.put(b"key", b"more")) <= last:
                written.append(version)

        def read() -> None:
            for change in site.changes("users", until=last, follow=True):
                seen.append(change.version)
                if change.version == before[-1]:
                    caught_up.set()

        run_threads(read, write)
        assert seen == before + written
        assert written

    def test_follow_from_now_sees_only_what_comes(self, site: Site, users: Namespace) -> None:
        users.put(b"key", b"before")
        following = site.changes("users", since="now", follow=True)
        written = [users.put(b"key", b"%d" % index) for index in range(3)]
        assert [next(following).version for _ in written] == written
        following.close()  # type: ignore[attr-defined]

    def test_follow_gives_markers_while_nothing_happens(
        self, site: Site, users: Namespace, time: SimulatedTime
    ) -> None:
        version = users.put(b"key", b"1")
        following = site.changes("users", follow=True, resolved_markers=True)
        assert next(item for item in following if isinstance(item, Change)).version == version
        time.advance(1_000)
        marker = next(item for item in following if item.version > version)
        assert isinstance(marker, Resolved)
        following.close()  # type: ignore[attr-defined]

    def test_follow_ends_with_an_error_when_the_site_is_closed(self, site: Site, users: Namespace) -> None:
        version = users.put(b"key", b"1")
        waiting = Event()

        def read() -> None:
            following = site.changes("users", follow=True)
            assert next(following).version == version
            waiting.set()
            refused(Closed, lambda: next(following))

        def close() -> None:
            assert waiting.wait(HANG_SECONDS)
            site.close()

        run_threads(read, close)

    def test_asynchronous_writes_are_delivered_too(self, site: Site, users: Namespace) -> None:
        version = users.put(b"key", b"1", durability="async")
        assert versions(site.changes("users")) == [version]
        following = site.changes("users", since=version, follow=True)
        later = users.put(b"key", b"2", durability="async")
        assert next(following).version == later
        following.close()  # type: ignore[attr-defined]

    # What is gone

    def test_changes_that_are_gone_are_an_error_at_once(
        self, site: Site, users: Namespace, time: SimulatedTime
    ) -> None:
        first = users.put(b"key", b"1")
        time.advance(2 * HOUR_MS)
        last = users.put(b"key", b"2")
        site.collect_garbage()
        kept = oldest(site)
        assert first < kept < last
        asks: list[tuple[Version, Callable[[], object]]] = [
            (first, lambda: site.changes("users", since=first)),
            (kept - 1, lambda: site.changes("users", since=kept - 1)),
            (first, lambda: site.changes("users", since=first, follow=True)),
            (first, lambda: site.changes("users", since=first, before_images=True)),
            (first, lambda: site.changes("users", since=first, until=last)),
            (first, lambda: site.changes(since=first)),
        ]
        for version, ask in asks:
            with pytest.raises(VersionCollected) as caught:
                ask()
            assert dict(caught.value.details) == {"version": version, "oldest": kept}
            assert 'Begin with a snapshot (since="snapshot")' in str(caught.value)
        with pytest.raises(VersionCollected):
            site.changes("users")
        assert versions(site.changes("users", since=kept)) == [last]

    def test_namespace_that_is_younger_than_what_is_gone_is_read_from_its_beginning(
        self, site: Site, users: Namespace, time: SimulatedTime
    ) -> None:
        users.put(b"key", b"1")
        age(site, time)
        version = site.create_namespace("orders").put(b"key", b"1")
        assert versions(site.changes("orders")) == [version]
        site.collect_garbage()
        assert versions(site.changes("orders")) == [version]

    def test_changes_of_a_dropped_namespace_are_left_to_its_name(self, site: Site, users: Namespace) -> None:
        users.put(b"key", b"old")
        site.drop_namespace("users")
        version = site.create_namespace("users").put(b"key", b"new")
        assert versions(site.changes("users")) == [version]

    # What a reader needs is held from the call on

    @pytest.mark.parametrize("begun", [False, True])
    def test_open_reader_keeps_what_it_has_to_read(
        self, site: Site, users: Namespace, time: SimulatedTime, begun: bool
    ) -> None:
        written = [users.put(b"key", b"%d" % index + LARGE) for index in range(30)]
        reader = site.changes("users")
        found = [next(reader)] if begun else []
        users.put(b"key", b"later")
        age(site, time)
        found += [change for change in reader if change.version <= written[-1]]
        assert [change.version for change in found] == written
        assert [change.value for change in found] == [b"%d" % index + LARGE for index in range(30)]

    @pytest.mark.parametrize("follow", [False, True])
    @pytest.mark.parametrize("end", ["closed", "forgotten"])
    def test_reader_that_has_ended_keeps_nothing(
        self, site: Site, users: Namespace, time: SimulatedTime, follow: bool, end: str
    ) -> None:
        for index in range(20):
            fill(users, 300, b"%03d" % index * 1_000)
        reader = site.changes("users", follow=follow)
        next(reader)
        if end == "closed":
            reader.close()  # type: ignore[attr-defined]
        del reader
        time.advance(2 * HOUR_MS)
        expected = (time() - HOUR_MS) << COUNTER_BITS

        def let_go() -> bool:
            site.collect_garbage()
            return oldest(site) == expected

        wait_until(let_go, "the reader still holds its version")

    def test_open_readers_are_told_in_the_statistics(self, site: Site, users: Namespace) -> None:
        users.put(b"key", b"1")
        assert site.statistics().readers.open == []
        following = site.changes("users", follow=True)
        next(following)
        (reader,) = site.statistics().readers.open
        assert reader.follow
        assert reader.position <= site.resolved_version()
        following.close()  # type: ignore[attr-defined]
        wait_until(lambda: site.statistics().readers.open == [], "the reader is still open")
        assert sum(site.statistics().readers.changes.values()) >= 1

    # Partitions that change

    @pytest.mark.parametrize("seed", range(2))
    def test_changes_across_splits_and_merges_come_once_and_in_order(
        self, site: Site, users: Namespace, seed: int
    ) -> None:
        chance = Random(seed)
        written = []
        for step in range(60):
            key = b"key-%05d" % chance.randrange(3_300)
            written.append((users.put(key, b"%d" % step), key))
            if chance.random() < 0.2:
                reshape(site, chance)
        found = []
        for number, change in enumerate(site.changes("users")):
            found.append((change.version, change.key))
            if number % 10 == 0:
                reshape(site, chance)
                users.put(b"later", b"x")
        assert found == written
        state = state_after((change.key, change.value) for change in site.changes("users"))
        assert dict(users.scan()) == state
