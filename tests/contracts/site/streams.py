"""The site's contract: streams from outside, their epochs, and readers that go in steps."""

from collections.abc import Mapping
from contextlib import closing
from functools import partial
from itertools import pairwise

import pytest
from tests.contracts.site.base import HOUR_MS, SITE_ID, SiteContractBase, age, refused
from tests.waiting import HANG_SECONDS, run_threads

from floodmark.codec.ordered import encode_namespace
from floodmark.codec.values import TOMBSTONE, encode_value
from floodmark.model.change import Change, Stamp
from floodmark.model.errors import (
    ClockSkew,
    Closed,
    InvalidArgument,
    InvalidName,
    InvalidVersion,
    LimitExceeded,
    NamespaceNotFound,
    VersionCollected,
)
from floodmark.model.limits import EPOCH_STREAM_IDLE_MAX, EPOCHS_REMEMBERED_MAX
from floodmark.model.partition import ApplyStream, PutStream, PutUnchangedStream, StreamCommand
from floodmark.model.version import VERSION_MAX, Version, compose
from floodmark.site import Namespace, Site
from floodmark.testing.clock import SimulatedTime

ELSEWHERE = 9


def qualify(namespace: Namespace, rows: Mapping[bytes, bytes]) -> dict[bytes, bytes]:
    """Rows as a write stream takes them."""
    prefix = encode_namespace(namespace.id)
    return {prefix + key: stored for key, stored in rows.items()}


def send(
    site: Site,
    namespace: Namespace,
    rows: Mapping[bytes, bytes],
    *,
    apply: bool = False,
    unchanged_since: Version | None = None,
) -> int:
    """Send one batch over a stream of its own, and wait for the answer."""
    unchanged = None if unchanged_since is None else PutUnchangedStream(True, unchanged_since)
    stream = site.host.write_stream(unchanged or (ApplyStream(True) if apply else PutStream(True)))
    with closing(stream):
        return stream.send(qualify(namespace, rows)).result(HANG_SECONDS)


def plain(*keys: bytes, value: bytes = b"x") -> dict[bytes, bytes]:
    """Keys with one value, as stored."""
    return dict.fromkeys(keys, encode_value(value))


def cut(
    site: Site,
    since: Version,
    changes_max: int | None = None,
    *,
    until: Version | None = None,
    at_heartbeat: bool = False,
    namespace: str = "users",
) -> tuple[Version, int | None]:
    """A step of a reader: up to which version, and with how many changes."""
    found = site.host.versions.cut_changes(namespace, since, changes_max, until, at_heartbeat)
    assert found.version <= max(found.resolved, since)
    return found.version, found.changes


def read(site: Site, since: Version, until: Version, namespace: str = "users") -> list[Change]:
    """The changes of a step."""
    return list(site.changes(namespace, since=since, until=until))


class StreamContract(SiteContractBase):
    """What replays without harm, and where readers stop."""

    # Where unchanged

    def test_keys_that_were_changed_since_a_version_are_left_alone(
        self, site: Site, users: Namespace
    ) -> None:
        users.put_many({b"before": b"1", b"deleted before": b"1"})
        users.delete(b"deleted before")
        since = site.now()
        users.put(b"after", b"1")
        users.put(b"deleted after", b"1")
        users.delete(b"deleted after")
        rows = plain(b"after", b"before", b"deleted after", b"deleted before", b"new")
        assert send(site, users, rows, unchanged_since=since) == 3
        expected = {b"after": b"1", b"before": b"x", b"deleted before": b"x", b"new": b"x"}
        assert dict(users.scan()) == expected
        assert send(site, users, rows, unchanged_since=since) == 0
        assert dict(users.scan()) == expected

    def test_batch_of_what_is_unchanged_is_one_commit_with_stamps_of_its_own(
        self, site: Site, users: Namespace
    ) -> None:
        since = site.now()
        assert send(site, users, plain(b"c", b"a", b"b"), unchanged_since=since) == 3
        found = list(site.changes("users"))
        assert [change.key for change in found] == [b"a", b"b", b"c"]
        (version,) = {change.version for change in found}
        assert version > since
        assert {change.stamp for change in found} == {Stamp(version, SITE_ID)}

    def test_stamp_decides_and_not_the_version_of_the_copy(self, site: Site, users: Namespace) -> None:
        early = site.now()
        since = site.now()
        late = site.now()
        copies = {
            b"early": encode_value(b"copy", origin=Stamp(early, ELSEWHERE)),
            b"at": encode_value(b"copy", origin=Stamp(since, ELSEWHERE)),
            b"late": encode_value(b"copy", origin=Stamp(late, ELSEWHERE)),
        }
        assert send(site, users, copies, apply=True) > late
        assert send(site, users, plain(b"early", b"at", b"late"), unchanged_since=since) == 2
        assert dict(users.scan()) == {b"early": b"x", b"at": b"x", b"late": b"copy"}

    def test_deletions_and_expiries_are_put_where_unchanged(
        self, site: Site, users: Namespace, time: SimulatedTime
    ) -> None:
        users.put_many({b"gone": b"1", b"brief": b"1"})
        since = site.now()
        expires_at = time() // 1000 + 100
        rows = {b"gone": TOMBSTONE, b"brief": encode_value(b"2", expires_at=expires_at)}
        assert send(site, users, rows, unchanged_since=since) == 2
        assert dict(users.scan()) == {b"brief": b"2"}
        time.advance(200_000)
        assert dict(users.scan()) == {}
        assert send(site, users, plain(b"gone", b"brief"), unchanged_since=since) == 0

    def test_before_everything_only_what_is_absent_is_put(self, site: Site, users: Namespace) -> None:
        users.put(b"there", b"1")
        assert send(site, users, plain(b"there", b"new"), unchanged_since=0) == 1
        assert dict(users.scan()) == {b"there": b"1", b"new": b"x"}

    def test_version_from_a_clock_that_is_ahead_is_moved_past(
        self, site: Site, users: Namespace, time: SimulatedTime
    ) -> None:
        ahead = compose(time() + 400, 5)
        assert send(site, users, plain(b"key"), unchanged_since=ahead) == 1
        record = users.record(b"key")
        assert record is not None
        assert record.version > ahead
        assert send(site, users, plain(b"key"), unchanged_since=ahead) == 0
        far = compose(time() + 60_000, 0)
        with pytest.raises(ClockSkew):
            send(site, users, plain(b"other"), unchanged_since=far)
        assert users.get(b"other") is None

    def test_batches_of_what_is_unchanged_are_divided_among_partitions(
        self, site: Site, users: Namespace
    ) -> None:
        users.put(b"z", b"1")
        since = site.now()
        site.split("users", b"m")
        users.put(b"y", b"1")
        rows = plain(b"a", b"b", b"y", b"z")
        assert send(site, users, rows, unchanged_since=since) == 3
        assert len({change.partition for change in read(site, since, site.now())}) == 2
        left, right = site.statistics().partitions
        site.merge(left.id, right.id)
        assert send(site, users, rows, unchanged_since=since) == 0
        assert dict(users.scan()) == {b"a": b"x", b"b": b"x", b"y": b"1", b"z": b"x"}

    # By stamp

    def test_changes_of_another_site_are_applied_where_their_stamp_wins(
        self, site: Site, users: Namespace
    ) -> None:
        stamps = [site.now() for _ in range(3)]
        first, second, third = (
            {b"key": encode_value(b"%d" % number, origin=Stamp(stamp, ELSEWHERE))}
            for number, stamp in enumerate(stamps)
        )
        assert send(site, users, second, apply=True) > stamps[1]
        assert send(site, users, first, apply=True) == 0
        assert send(site, users, second, apply=True) == 0
        assert users.get(b"key") == b"1"
        assert send(site, users, third, apply=True)
        record = users.record(b"key")
        assert record is not None
        assert (record.value, record.stamp) == (b"2", Stamp(stamps[2], ELSEWHERE))

    def test_stream_of_one_kind_refuses_records_of_another(self, site: Site, users: Namespace) -> None:
        with pytest.raises(InvalidArgument):
            send(site, users, plain(b"key"), apply=True)
        for version in (-1, VERSION_MAX + 1):
            refused(InvalidVersion, partial(PutUnchangedStream, True, version))
        assert list(users.scan()) == []

    def test_no_rows_are_no_commit(self, site: Site, users: Namespace) -> None:
        before = site.statistics().commits
        assert send(site, users, {}, apply=True) == send(site, users, {}, unchanged_since=1) == 0
        assert site.statistics().commits == before

    # Epochs

    def test_epoch_has_one_version_above_all_that_was_written(self, site: Site, users: Namespace) -> None:
        host = site.host
        written = users.put(b"key", b"1")
        version = host.versions.open_epoch("users", "spark/query", 3)
        assert version > written
        later = users.put(b"key", b"2")
        assert later > version
        assert [host.versions.open_epoch("users", "spark/query", 3) for _ in range(3)] == [version] * 3

    def test_epochs_of_other_streams_and_namespaces_are_others(self, site: Site, users: Namespace) -> None:
        site.create_namespace("orders")
        opened = [
            site.host.versions.open_epoch(namespace, stream, epoch)
            for namespace in ("users", "orders")
            for stream in ("spark/one", "spark/two")
            for epoch in (0, 1)
        ]
        assert opened == sorted(set(opened))

    def test_last_epochs_are_remembered_and_older_ones_are_refused(
        self, site: Site, users: Namespace
    ) -> None:
        host = site.host
        opened = {epoch: host.versions.open_epoch("users", "s", epoch) for epoch in range(0, 60, 2)}
        last = dict(list(opened.items())[-EPOCHS_REMEMBERED_MAX:])
        assert {epoch: host.versions.open_epoch("users", "s", epoch) for epoch in last} == last
        # What is older, or was left out, would overwrite what came after it.
        for epoch in (0, 26, 57):
            refused(
                LimitExceeded,
                lambda epoch=epoch: host.versions.open_epoch("users", "s", epoch),  # type: ignore[misc]
                stream="s",
                epoch=epoch,
            )
        assert host.versions.open_epoch("users", "s", 59) > opened[58]

    def test_stream_that_nobody_uses_is_forgotten_after_a_month(
        self, site: Site, users: Namespace, time: SimulatedTime
    ) -> None:
        host = site.host
        idle_ms = int(EPOCH_STREAM_IDLE_MAX.total_seconds()) * 1000
        first = {stream: host.versions.open_epoch("users", stream, 7) for stream in ("used", "idle")}
        time.advance(idle_ms // 2)
        assert host.versions.open_epoch("users", "used", 7) == first["used"]
        time.advance(idle_ms // 2)
        host.versions.open_epoch("users", "new", 0)
        assert host.versions.open_epoch("users", "used", 7) == first["used"]
        assert host.versions.open_epoch("users", "idle", 7) > first["idle"]

    def test_all_who_open_an_epoch_at_once_get_one_version(self, site: Site, users: Namespace) -> None:
        found: list[tuple[int, Version]] = []

        def open_some() -> None:
            for epoch in range(5):
                found.append((epoch, site.host.versions.open_epoch("users", "s", epoch)))

        run_threads(*[open_some] * 4)
        assert len(set(found)) == 5

    def test_epoch_that_cannot_be_is_refused(self, site: Site, users: Namespace) -> None:
        host = site.host
        for stream in ("", "a b", "a//b", "/a", "x" * 129):
            refused(InvalidName, lambda stream=stream: host.versions.open_epoch("users", stream, 0))  # type: ignore[misc]
        for epoch in (-1, 1 << 63):
            refused(InvalidArgument, lambda epoch=epoch: host.versions.open_epoch("users", "s", epoch))  # type: ignore[misc]
        refused(NamespaceNotFound, lambda: host.versions.open_epoch("nobody", "s", 0), namespace="nobody")
        site.drop_namespace("users")
        refused(NamespaceNotFound, lambda: host.versions.open_epoch("users", "s", 0), namespace="users")

    def test_name_that_returns_has_no_epochs_of_the_one_before(self, site: Site, users: Namespace) -> None:
        host = site.host
        first = host.versions.open_epoch("users", "s", 9)
        site.drop_namespace("users")
        site.create_namespace("users")
        assert host.versions.open_epoch("users", "s", 9) > first

    def test_epoch_that_is_written_again_changes_nothing(self, site: Site, users: Namespace) -> None:
        version = site.host.versions.open_epoch("users", "s", 0)
        assert send(site, users, plain(b"a", b"b"), unchanged_since=version) == 2
        users.put(b"b", b"later")
        users.delete(b"a")
        before = list(site.changes("users"))
        again = site.host.versions.open_epoch("users", "s", 0)
        assert send(site, users, plain(b"a", b"b"), unchanged_since=again) == 0
        assert list(site.changes("users")) == before

    # Steps

    def test_steps_end_between_commits_and_have_the_changes_they_say(
        self, site: Site, users: Namespace
    ) -> None:
        since = site.now()
        for size in (1, 1, 4, 1, 2, 2, 1):
            users.put_many({b"%d" % index: b"x" for index in range(size)})
        until = site.resolved_version()
        sizes = []
        while since < until:
            version, changes = cut(site, since, 3, until=until)
            found = read(site, since, version)
            assert len(found) == changes
            sizes.append(len(found))
            since = version
        assert sizes == [2, 4, 3, 3]

    def test_step_goes_as_far_as_it_may(self, site: Site, users: Namespace) -> None:
        since = site.now()
        first = users.put(b"a", b"1")
        second = users.put(b"b", b"1")
        assert cut(site, since, 1) == (second - 1, 1)
        assert cut(site, since, 1, until=first) == (first, 1)
        version, changes = cut(site, since, 2)
        assert changes == 2
        assert second <= version <= site.resolved_version()

    def test_without_a_limit_it_is_only_seen_whether_there_is_a_change(
        self, site: Site, users: Namespace
    ) -> None:
        since = site.now()
        version, changes = cut(site, since)
        assert version > since
        assert changes == 0
        last = [users.put(b"a", b"%d" % number) for number in range(3)][-1]
        version, changes = cut(site, since)
        assert version >= last
        assert changes
        assert cut(site, version, 10)[1] == 0

    def test_changes_of_other_namespaces_do_not_count(self, site: Site, users: Namespace) -> None:
        orders = site.create_namespace("orders")
        since = site.now()
        orders.put_many({b"%d" % number: b"x" for number in range(50)})
        assert cut(site, since, 10)[1] == cut(site, since)[1] == 0
        users.put(b"a", b"1")
        version, changes = cut(site, since, 10)
        assert changes == len(read(site, since, version)) == 1
        assert cut(site, since, 100, namespace="orders")[1] == 50

    def test_step_never_goes_back_nor_beyond_its_end(self, site: Site, users: Namespace) -> None:
        version = users.put(b"a", b"1")
        now = site.now()
        assert cut(site, now, 10, until=version) == (now, 0)
        assert cut(site, version, 10, until=version) == (version, 0)
        assert cut(site, 0, 10, until=version) == (version, 1)
        assert cut(site, 0, 10, until=VERSION_MAX)[0] <= site.resolved_version()

    def test_asynchronous_writes_are_published_before_the_step_is_chosen(
        self, site: Site, users: Namespace
    ) -> None:
        since = site.now()
        users.put(b"a", b"1", durability="async")
        version, changes = cut(site, since, 10)
        assert changes == len(read(site, since, version)) == 1

    def test_step_ends_at_a_heartbeat_if_that_is_wanted(self, site: Site, users: Namespace) -> None:
        since = site.now()
        users.put(b"a", b"1")
        assert cut(site, since, 10, at_heartbeat=True)[1] == 1
        beats = []
        for number in range(3):
            beats.append(site.heartbeat())
            users.put(b"a", b"%d" % number)
        assert cut(site, since, 10, at_heartbeat=True) == (beats[2].through, 3)
        assert cut(site, since, 2, at_heartbeat=True) == (beats[1].through, 2)
        assert cut(site, since, at_heartbeat=True)[0] == beats[2].through
        # There is a change, but none before the heartbeat.
        assert cut(site, beats[1].version, at_heartbeat=True)[1]
        users.put(b"b", b"1")
        assert cut(site, beats[2].version, 10, at_heartbeat=True)[1] == 2

    def test_step_from_what_was_collected_is_refused(
        self, site: Site, users: Namespace, time: SimulatedTime
    ) -> None:
        since = users.put(b"a", b"1")
        users.put(b"a", b"2")
        age(site, time, hours=30 * 24)
        with pytest.raises(VersionCollected):
            cut(site, since, 10)

    def test_step_that_cannot_be_is_refused(self, site: Site, users: Namespace) -> None:
        for changes_max in (0, -1):
            refused(InvalidArgument, lambda changes_max=changes_max: cut(site, 0, changes_max))  # type: ignore[misc]
        refused(NamespaceNotFound, lambda: cut(site, 0, 1, namespace="nobody"), namespace="nobody")

    def test_steps_over_splits_and_merges_lose_nothing(self, site: Site, users: Namespace) -> None:
        since = start = site.now()
        for number in range(12):
            users.put_many({b"%02d" % index: b"%d" % number for index in range(number, number + 3)})
            if number % 4 == 1:
                site.split("users", b"%02d" % number)
            if number % 4 == 3:
                left, right = site.statistics().partitions[-2:]
                site.merge(left.id, right.id)
        until = site.resolved_version()
        found: list[Change] = []
        while since < until:
            version, changes = cut(site, since, 4, until=until)
            step = read(site, since, version)
            assert len(step) == changes
            found += step
            since = version
        assert found == read(site, start, until)
        assert len(found) == 36
        assert all(earlier.version <= later.version for earlier, later in pairwise(found))

    # Safe points of readers

    def test_reader_holds_and_releases_a_safe_point_of_its_own(
        self, site: Site, users: Namespace, time: SimulatedTime
    ) -> None:
        host = site.host
        version = users.put(b"a", b"1")
        users.put(b"a", b"2")
        point = host.retention.hold_safe_point("spark/reader", version, EPOCH_STREAM_IDLE_MAX, "users")
        assert host.retention.safe_points() == [point]
        time.advance(20 * HOUR_MS)
        site.collect_garbage()
        assert users.get(b"a", at=version) == b"1"
        host.retention.release_safe_point("spark/reader")
        site.collect_garbage()
        with pytest.raises(VersionCollected):
            users.get(b"a", at=version)

    def test_closed_site_takes_no_stream_of_any_kind(self, site: Site, users: Namespace) -> None:
        rows = qualify(users, plain(b"key"))
        site.close()

        def write(command: StreamCommand) -> int:
            return site.host.write_stream(command).send(rows).result(HANG_SECONDS)

        refused(Closed, lambda: write(ApplyStream(True)))
        refused(Closed, lambda: write(PutUnchangedStream(True, 1)))
