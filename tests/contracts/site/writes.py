"""The site's contract: single keys and many keys, written and read back, and their times to live."""

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
from tests.contracts.site.base import (
    HOUR,
    SITE_ID,
    START_MS,
    SiteContractBase,
    check_rows,
    fill,
    refused,
)

from floodmark.merge.policies import MergePolicy
from floodmark.model.change import Stamp
from floodmark.model.errors import CommitTooLarge, PartlyDone, StorageFailed
from floodmark.model.limits import COMMIT_BYTES_MAX, MIB, VALUE_BYTES_MAX
from floodmark.model.record import Versioned
from floodmark.model.version import physical_ms
from floodmark.partition import FAMILIES
from floodmark.site import Namespace, Site
from floodmark.testing.clock import SimulatedTime
from floodmark.testing.engine import Fault, FaultPlan, FaultyEngine, Operation

COMMITS = frozenset({Operation.WRITE})


class WriteContract(SiteContractBase):
    """What is put is there, whole and in order, until it is deleted or its time is over."""

    # One key

    def test_put_get_and_delete(self, users: Namespace) -> None:
        assert users.get(b"ada") is None
        first = users.put(b"ada", b"countess")
        assert users.get(b"ada") == b"countess"
        second = users.put(b"ada", b"programmer")
        assert users.get(b"ada") == b"programmer"
        third = users.delete(b"ada")
        assert users.get(b"ada") is None
        assert type(first) is type(third) is int
        assert physical_ms(first) >= START_MS
        assert first < second < third

    def test_key_that_is_not_there_can_be_deleted(self, users: Namespace) -> None:
        version = users.delete(b"nobody")
        assert version > 0
        assert users.get(b"nobody") is None

    def test_empty_value_is_a_value(self, users: Namespace) -> None:
        users.put(b"ada", b"")
        assert users.get(b"ada") == b""
        assert list(users.scan()) == [(b"ada", b"")]

    def test_keys_may_hold_every_byte(self, users: Namespace) -> None:
        every = bytes(range(256))
        keys = [every, *(bytes([byte]) for byte in every), *(b"k" + bytes([byte]) * 8 for byte in every)]
        users.put_many({key: key[::-1] for key in keys})
        assert users.get_many(keys) == [key[::-1] for key in keys]
        assert list(users.scan()) == [(key, key[::-1]) for key in sorted(keys)]
        for key in (b"\x00", b"\xff", b"\x00\xff\x00", every):
            users.put(key, b"alone")
            assert users.get(key) == b"alone"

    def test_largest_keys_and_values_are_taken(self, users: Namespace) -> None:
        key, value = b"\xff" * self.key_bytes_max, bytes(range(256)) * (VALUE_BYTES_MAX // 256)
        users.put(key, value)
        users.put_many({b"other": value})
        assert users.compare_and_set(b"third", None, value)
        assert users.get(key) == value
        assert users.get_many([b"third", b"other"]) == [value, value]
        assert dict(users.scan()) == {key: value, b"other": value, b"third": value}

    def test_record_tells_all_about_a_key(self, site: Site, users: Namespace) -> None:
        version = users.put(b"ada", b"countess", ttl=60)
        record = users.record(b"ada")
        assert record == Versioned(
            key=b"ada",
            value=b"countess",
            version=version,
            stamp=Stamp(version, SITE_ID),
            expires_at=START_MS // 1000 + 61,
        )
        assert type(record) is Versioned
        assert type(record.stamp) is Stamp
        plain = users.put(b"ada", b"programmer")
        assert users.record(b"ada") == Versioned(
            key=b"ada", value=b"programmer", version=plain, stamp=Stamp(plain, site.id), expires_at=None
        )
        assert users.record(b"ada", at=version) == record
        assert users.record(b"nobody") is None
        users.delete(b"ada")
        assert users.record(b"ada") is None

    # Many keys

    def test_get_many_answers_in_the_order_of_the_keys(self, users: Namespace) -> None:
        users.put_many({b"a": b"1", b"b": b"2", b"c": b""})
        users.delete(b"b")
        keys = [b"c", b"x", b"a", b"b", b"c", b"a"]
        assert users.get_many(keys) == [b"", None, b"1", None, b"", b"1"]
        assert users.get_many(iter(keys)) == [b"", None, b"1", None, b"", b"1"]
        assert users.get_many([]) == []

    def test_get_many_of_very_many_keys(self, site: Site, users: Namespace) -> None:
        rows = fill(users, 12_345)
        site.split("users", b"key-06000")
        keys = [*rows, b"nobody", *reversed(rows)]
        check_rows(users.get_many(keys), map(rows.get, keys))

    def test_get_many_of_large_values(self, users: Namespace) -> None:
        rows = {b"%d" % index: bytes([index]) * MIB for index in range(20)}
        users.put_many(rows)
        check_rows(users.get_many(reversed(rows)), reversed(rows.values()))

    def test_put_many_takes_pairs_of_any_shape(self, users: Namespace) -> None:
        pairs = [(b"a", b"1"), (b"b", b"2")]
        shapes: list[Any] = [dict(pairs), pairs, tuple(pairs), iter(pairs), [list(pair) for pair in pairs]]
        for shape in shapes:
            users.put_many(shape)
            assert list(users.scan()) == pairs
            assert users.delete_range() == 2

    def test_of_a_key_that_comes_twice_the_last_value_counts(self, site: Site, users: Namespace) -> None:
        users.put_many([(b"a", b"1"), (b"b", b"2"), (b"a", b"3")])
        assert list(users.scan()) == [(b"a", b"3"), (b"b", b"2")]
        assert len(list(site.changes("users"))) == 2

    def test_put_many_of_nothing_is_nothing(self, site: Site, users: Namespace) -> None:
        assert users.put_many({}) == 0
        assert users.put_many([]) == 0
        assert list(site.changes("users")) == []

    def test_put_many_is_one_commit_per_partition(self, site: Site, users: Namespace) -> None:
        site.split("users", b"m")
        rows = {b"%c%d" % (letter, index): b"x" for letter in b"anz" for index in range(40)}
        highest = users.put_many(rows)
        versions = {(change.key >= b"m", change.version) for change in site.changes("users")}
        assert len(versions) == 2
        assert max(version for _, version in versions) == highest
        assert dict(users.scan()) == rows

    def test_commit_over_the_limit_is_refused_before_anything_is_written(
        self, site: Site, users: Namespace
    ) -> None:
        left, _ = site.split("users", b"m")
        large = {b"n%02d" % index: bytes(MIB) for index in range(64)}
        # Three bytes of namespace in each key, and one of flags in each value.
        size = 64 * (3 + 3 + MIB + 1) + (3 + 1 + len(b"would fit") + 1)
        error = refused(
            CommitTooLarge,
            lambda: users.put_many({b"a": b"would fit", **large}),
            partition=left,
            size=size,
        )
        assert f"65 pairs for partition {left} make {size:,} bytes" in str(error)
        assert list(users.scan()) == []
        assert list(site.changes("users")) == []

    def test_commit_of_exactly_the_limit_is_taken(self, users: Namespace) -> None:
        keys = [b"%02d" % index for index in range(64)]
        values = [bytes(MIB)] * 63
        values.append(bytes(COMMIT_BYTES_MAX - 63 * MIB - 64 * (3 + 2 + 1)))
        users.put_many(zip(keys, values, strict=True))
        assert list(users.get_many([keys[0], keys[-1]])) == [values[0], values[-1]]
        values[-1] += b"x"
        with pytest.raises(CommitTooLarge, match=f"{COMMIT_BYTES_MAX + 1:,} bytes"):
            users.put_many(zip(keys, values, strict=True))

    # Failures

    def test_writes_to_several_partitions_that_fail_at_once_leave_nothing(self, time: SimulatedTime) -> None:
        engine = FaultyEngine(FAMILIES)
        with self.open_on(engine, time) as site:
            users = site.create_namespace("users")
            site.split("users", b"m")
            engine.arm(FaultPlan(at=1, kind=Fault.TRANSIENT, counts=COMMITS))
            rows = {b"a": b"1", b"b": b"2", b"z": b"3"}
            refused(StorageFailed, lambda: users.put_many(rows))
            assert list(users.scan()) == []
            users.put_many(rows)
            assert dict(users.scan()) == rows

    @pytest.mark.parametrize("merge", ["last_write", "fields"])
    def test_writes_to_several_partitions_are_one_commit_that_fails_as_a_whole(
        self, time: SimulatedTime, merge: MergePolicy
    ) -> None:
        engine = FaultyEngine(FAMILIES)
        with self.open_on(engine, time) as site:
            users = site.create_namespace("users", merge=merge)
            site.split("users", b"m")
            rows: dict[bytes, bytes] = dict.fromkeys((b"a", b"b", b"z"), b'{"name":"x"}')
            writes: list[Callable[[], object]] = [lambda: users.put_many(rows), users.delete_range]
            for write in writes:
                before = list(users.scan())
                engine.arm(FaultPlan(at=1, kind=Fault.TRANSIENT, counts=COMMITS))
                error = refused(StorageFailed, write)
                assert str(error).startswith("planned: write, operation 1, failed")
                assert list(users.scan()) == before
                since = site.now()
                write()
                assert len({change.version for change in site.changes("users", since=since)}) == 1
                assert [key for key, _ in users.scan()] == ([] if before else list(rows))

    def test_range_whose_deletion_fails_halfway_says_how_many_were_deleted(self, time: SimulatedTime) -> None:
        engine = FaultyEngine(FAMILIES)
        with self.open_on(engine, time) as site:
            users = site.create_namespace("users")
            fill(users, 2_500)
            engine.arm(FaultPlan(at=2, kind=Fault.TRANSIENT, counts=COMMITS))
            error = refused(PartlyDone, users.delete_range, deleted=1_000)
            assert "1,000 keys were deleted before it failed (planned: write" in str(error)
            assert users.delete_range() == 1_500

    def test_failure_of_storage_is_told_as_what_it_is(self, time: SimulatedTime) -> None:
        engine = FaultyEngine(FAMILIES)
        with self.open_on(engine, time) as site:
            users = site.create_namespace("users")
            writes: list[Callable[[], object]] = [
                lambda: users.put(b"ada", b"countess"),
                lambda: users.put_many({b"ada": b"countess"}),
                lambda: users.compare_and_set(b"ada", None, b"countess"),
                lambda: users.delete(b"ada"),
                lambda: site.create_namespace("orders"),
                lambda: site.split("users", b"m"),
            ]
            for write in writes:
                engine.arm(FaultPlan(at=1, kind=Fault.TRANSIENT, counts=COMMITS))
                error = refused(StorageFailed, write)
                assert str(error).startswith("planned: write, operation 1, failed")
                assert engine.fired
            engine.heal()
            assert site.namespaces() == ["users"]
            assert list(users.scan()) == []
            assert users.put(b"ada", b"countess") > 0

    # Times to live

    def test_time_to_live_is_rounded_up_to_whole_seconds(self, users: Namespace) -> None:
        second = START_MS // 1000
        lives: list[tuple[timedelta | float, int]] = [
            (0.000001, second + 1),
            (0.9, second + 1),
            (0.901, second + 2),
            (1, second + 2),
            (1.9, second + 2),
            (timedelta(milliseconds=900), second + 1),
            (timedelta(microseconds=900_001), second + 2),
            (timedelta(days=36_500), second + 36_500 * 86_400 + 1),
        ]
        for ttl, expected in lives:
            users.put(b"put", b"x", ttl=ttl)
            users.put_many({b"many": b"x"}, ttl=ttl)
            assert users.compare_and_set(b"%r" % ttl, None, b"x", ttl=ttl)
            with users.writer() as writer:
                writer.put(b"writer", b"x", ttl=ttl)
            records = [users.record(key) for key in (b"put", b"many", b"%r" % ttl, b"writer")]
            assert [record and record.expires_at for record in records] == [expected] * 4

    def test_record_is_there_until_its_second_comes(self, users: Namespace, time: SimulatedTime) -> None:
        version = users.put(b"ada", b"countess", ttl=5)
        users.put(b"bob", b"builder")
        time.set(START_MS // 1000 * 1000 + 5_999)
        assert users.get(b"ada") == b"countess"
        assert dict(users.scan()) == {b"ada": b"countess", b"bob": b"builder"}
        time.advance(1)
        assert users.get(b"ada") is None
        assert users.record(b"ada") is None
        assert users.get_many([b"ada", b"bob"]) == [None, b"builder"]
        assert list(users.scan()) == [(b"bob", b"builder")]
        assert users.get(b"ada", at=version) == b"countess"
        assert users.compare_and_set(b"ada", None, b"again")

    def test_namespace_has_a_time_to_live_for_writes_that_name_none(
        self, site: Site, time: SimulatedTime
    ) -> None:
        brief = site.create_namespace("brief", ttl=timedelta(seconds=10))
        brief.put(b"usual", b"x")
        brief.put_many({b"usual too": b"x"})
        brief.put(b"longer", b"x", ttl=HOUR)
        assert brief.compare_and_set(b"usual as well", None, b"x")
        time.advance(11_000)
        assert [key for key, _ in brief.scan()] == [b"longer"]

    def test_time_to_live_begins_at_the_time_of_the_site(self, users: Namespace, time: SimulatedTime) -> None:
        for step_ms in (0, 1_000, 59_000, HOUR // timedelta(milliseconds=1)):
            time.advance(step_ms)
            users.put(b"ada", b"countess", ttl=60)
            record = users.record(b"ada")
            assert record is not None
            assert record.expires_at == time() // 1000 + 61

    # Durability

    def test_write_is_durable_when_it_returns(self, site: Site, users: Namespace) -> None:
        writes: list[Callable[[], int]] = [
            lambda: users.put(b"ada", b"countess", durability="fsync"),
            lambda: users.put_many({b"ada": b"countess"}),
            lambda: users.delete(b"ada"),
        ]
        for write in writes:
            version = write()
            assert site.resolved_version() >= version

    def test_asynchronous_write_is_visible_at_once_and_durable_after_sync(
        self, site: Site, users: Namespace
    ) -> None:
        version = users.put(b"ada", b"countess", durability="async")
        assert users.get(b"ada") == b"countess"
        assert site.resolved_version() < version
        site.sync()
        assert site.resolved_version() >= version

    def test_every_write_may_be_asynchronous(self, site: Site, users: Namespace) -> None:
        users.put_many({b"a": b"1", b"b": b"2", b"c": b"3"}, durability="async")
        users.delete(b"a", durability="async")
        assert users.compare_and_set(b"b", b"2", b"4", durability="async")
        assert users.delete_range(b"c", durability="async") == 1
        with users.writer(durability="async") as writer:
            writer.put(b"d", b"5")
        assert list(users.scan()) == [(b"b", b"4"), (b"d", b"5")]
        site.sync()
        assert site.resolved_version() >= writer.version

    # Comparing and setting

    def test_compare_and_set_writes_only_what_was_expected(self, site: Site, users: Namespace) -> None:
        steps: list[tuple[bytes | None, bytes | None, bool]] = [
            (b"1", b"2", False),
            (b"", b"2", False),
            (b"1", None, False),
            (None, None, True),
            (None, b"1", True),
            (None, b"2", False),
            (None, None, False),
            (b"2", b"3", False),
            (b"", None, False),
            (b"1", b"", True),
            (None, b"2", False),
            (b"", b"2", True),
            (b"3", None, False),
            (b"2", None, True),
            (b"2", b"3", False),
        ]
        present: bytes | None = None
        for expected, value, holds in steps:
            before = site.now()
            assert users.compare_and_set(b"ada", expected, value) is holds, (expected, value)
            present = value if holds else present
            assert users.get(b"ada") == present
            assert len(list(site.changes("users", since=before))) == holds

    def test_expectation_that_is_too_large_for_a_value_is_never_met(self, users: Namespace) -> None:
        users.put(b"ada", bytes(VALUE_BYTES_MAX))
        for size in (VALUE_BYTES_MAX + 1, 10 * MIB):
            assert users.compare_and_set(b"ada", bytes(size), b"x") is False
        assert users.compare_and_set(b"ada", bytes(VALUE_BYTES_MAX), b"x") is True

    # Deleting ranges

    def test_delete_range_is_half_open_and_counts(self, users: Namespace) -> None:
        keys = [b"a", b"b", b"b\x00", b"ba", b"c", b"\xff", b"\xff\xff"]
        users.put_many(dict.fromkeys(keys, b"x"))
        assert users.delete_range(b"b", b"c") == 3
        assert [key for key, _ in users.scan()] == [b"a", b"c", b"\xff", b"\xff\xff"]
        assert users.delete_range(b"b", b"c") == 0
        assert users.delete_range(prefix=b"\xff") == 2
        assert users.delete_range(b"c", b"c") == 0
        assert users.delete_range(b"b", prefix=b"a") == 0
        assert users.delete_range() == 2
        assert list(users.scan()) == []

    def test_delete_range_of_many_keys_in_several_partitions(self, site: Site, users: Namespace) -> None:
        rows = fill(users, 2_600)
        site.split("users", b"key-00700")
        site.split("users", b"key-01900")
        assert users.delete_range(b"key-00001", b"key-02599") == 2_598
        assert list(users.scan()) == [(b"key-00000", b"x"), (b"key-02599", b"x")]
        assert len(list(site.changes("users"))) == len(rows) + 2_598
