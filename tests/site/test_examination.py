"""Examining a site: every fault that is planted is found, and a site without one is healthy."""

from datetime import timedelta
from pathlib import Path

import msgspec
import pytest
from tests.site.support import HookedEngine, host_of, node_of, nothing, open_memory

from floodmark.codec.changelog import encode_log_key
from floodmark.codec.ordered import encode_key, encode_namespace
from floodmark.codec.values import encode_value
from floodmark.engine import MemoryEngine, WriteRow
from floodmark.engine.base import RECOVERY_ROOM_BYTES
from floodmark.feed.named.feeds import FeedError
from floodmark.feed.subscription.subscriptions import SubscriptionSpec
from floodmark.host.examination import EXAMPLES_MAX, CheckResult, Examination, Severity, examine
from floodmark.model.errors import OutcomeUnknown, StorageFull
from floodmark.model.limits import LOG_INLINE_VALUE_BYTES_MAX, LOG_ROW_BYTES_MAX
from floodmark.model.partition import Decision, Fate, HoldKind
from floodmark.partition import FAMILIES
from floodmark.partition.families import DATA, LOG, META, PARTITIONS
from floodmark.partition.holds import HOLDS_SHOWN_MAX
from floodmark.site import Namespace, Site, open_engine
from floodmark.testing.clock import SimulatedTime

HOUR_MS = 3_600_000
CHECKS = [
    "format",
    "clock",
    "disk",
    "storage",
    "background",
    "heartbeat",
    "resolved",
    "partitions",
    "replication",
    "retention",
    "safe points",
    "feeds",
    "subscriptions",
]


def findings(site: Site, *, quick: bool = False) -> list[CheckResult]:
    """What is not well."""
    found = Examination(host_of(site)).run(quick=quick)
    return [finding for finding in found if finding.severity is not Severity.OK]


def only(site: Site, *, quick: bool = False) -> CheckResult:
    (finding,) = findings(site, quick=quick)
    return finding


def plant(site: Site, *rows: WriteRow) -> None:
    """Change what is stored behind the site's back."""
    node_of(site).engine.write(rows)


def record_key(site: Site, key: bytes, version: int) -> bytes:
    return encode_key(site.host.namespaces.find_namespace("users").id, key, version)


def log_rows(site: Site) -> list[tuple[bytes, bytes]]:
    """The rows of the partitions' logs, without the node's heartbeats."""
    rows = node_of(site).engine.scan(LOG, b"", None, rows_max=10**6, bytes_max=10**9)
    return [(key, row) for key, row in rows if row[:1] == b"\x01"]


def test_a_site_in_good_order_has_a_word_for_each_check(site: Site, users: Namespace) -> None:
    users.put(b"ada", b"countess")
    users.put(b"large", bytes(LOG_INLINE_VALUE_BYTES_MAX + 1))
    users.put_many({b"%03d" % n: bytes(LOG_INLINE_VALUE_BYTES_MAX) for n in range(300)})
    users.delete(b"ada")
    site.split("users", b"b")
    users.put(b"zoe", b"new", ttl=1)
    site.heartbeat()
    assert LOG_INLINE_VALUE_BYTES_MAX * 300 > LOG_ROW_BYTES_MAX, "the commit has several chunks"
    found = examine(host_of(site), quick=False)
    assert [finding.check for finding in found] == [*CHECKS, "records", "change log"]
    assert {(finding.severity, finding.advice) for finding in found} == {(Severity.OK, "")}
    assert found[-2].message.startswith("304 read")


def test_garbage_that_was_collected_is_no_damage(site: Site, users: Namespace, time: SimulatedTime) -> None:
    for value in (b"one", b"two", bytes(LOG_INLINE_VALUE_BYTES_MAX + 1), b"three"):
        users.put(b"ada", value)
    site.create_namespace("kept")
    site.drop_namespace("users")
    other = site.create_namespace("others", retention=timedelta(0))
    other.put(b"a", b"1")
    other.put(b"a", b"2")
    time.advance(25 * HOUR_MS)
    site.collect_garbage()
    assert findings(site) == []


def test_a_quick_examination_does_not_read_the_data(site: Site, users: Namespace) -> None:
    version = users.put(b"ada", b"countess")
    plant(site, (DATA, record_key(site, b"ada", version), b"\xff"))
    assert findings(site, quick=True) == []
    assert len(findings(site)) == 2


def test_findings_are_plain_data_that_can_travel(site: Site) -> None:
    found = examine(host_of(site), quick=True)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(found), type=list[CheckResult]) == found


def test_pages_are_told_as_they_are_read(site: Site, users: Namespace) -> None:
    users.put_many({b"%05d" % n: bytes(10) for n in range(2_500)})
    pages: list[tuple[str, int]] = []
    Examination(host_of(site), on_page=lambda what, rows, _: pages.append((what, rows))).run(quick=False)
    assert pages == [("records", 1_000), ("records", 2_000), ("records", 2_500), ("change-log rows", 1)]


# Records


@pytest.mark.parametrize("damaged", [b"", b"\xff", b"countess\x08", b"short\x01"])
def test_a_record_that_cannot_be_read_is_found_by_its_key(
    site: Site, users: Namespace, damaged: bytes
) -> None:
    version = users.put(b"ada", b"countess")
    users.put(b"bob", b"builder")
    plant(site, (DATA, record_key(site, b"ada", version), damaged))
    record, log = findings(site)
    assert (record.check, record.severity) == ("records", Severity.PROBLEM)
    assert record.message.startswith(f"1 of 2 records are damaged: b'ada' of users at version {version}: ")
    assert "floodmark put" in record.advice
    assert log.check == "change log", "it still has what was written"


@pytest.mark.parametrize("place", range(17))
def test_no_damaged_byte_of_a_key_passes(site: Site, users: Namespace, place: int) -> None:
    version = users.put(b"ada", b"countess")
    key = bytearray(record_key(site, b"ada", version))
    assert len(key) == 17
    stored = node_of(site).engine.get(DATA, bytes(key))
    plant(site, (DATA, bytes(key), None))
    key[place] ^= 0x80
    plant(site, (DATA, bytes(key), stored))
    checks = {finding.check for finding in findings(site)}
    assert "change log" in checks, "the record is gone from where it was"


def test_one_damaged_byte_of_a_value_is_found_although_it_can_be_read(site: Site, users: Namespace) -> None:
    version = users.put(b"ada", b"countess")
    plant(site, (DATA, record_key(site, b"ada", version), b"duchesse\x00"))
    finding = only(site)
    assert finding.check == "change log"
    assert f"b'ada' at version {version} is not what it says" in finding.message


def test_a_record_that_is_gone_is_missed(site: Site, users: Namespace) -> None:
    users.put(b"bob", b"builder")
    version = users.put(b"ada", bytes(LOG_INLINE_VALUE_BYTES_MAX + 1))
    plant(site, (DATA, record_key(site, b"ada", version), None))
    finding = only(site)
    assert (finding.check, finding.advice) == ("change log", "restore the site from a backup")
    assert f"names b'ada' at version {version}, and the data is gone" in finding.message


def test_a_record_of_the_future_is_damage(site: Site, users: Namespace) -> None:
    users.put(b"ada", b"countess")
    plant(site, (DATA, record_key(site, b"ada", site.now() + (1 << 40)), b"\x00"))
    assert "no such key can have been written" in only(site).message


def test_records_of_no_namespace_are_a_warning(site: Site, users: Namespace) -> None:
    version = users.put(b"ada", b"countess")
    plant(site, (DATA, encode_key(4_711, b"lost", version), b"x\x00"))
    finding = only(site)
    assert finding.severity is Severity.WARNING
    assert "1 records belong to namespaces that are gone: b'lost' of namespace #4711" in finding.message


def test_only_the_first_of_many_damaged_records_are_told(site: Site, users: Namespace) -> None:
    keys = [b"%04d" % n for n in range(1_500)]
    version = users.put_many(dict.fromkeys(keys, b"x"))
    plant(site, *[(DATA, record_key(site, key, version), b"") for key in keys])
    record = findings(site)[0]
    assert record.message.startswith("1,500 of 1,500 records are damaged")
    assert record.message.count("of users at version") == EXAMPLES_MAX
    assert record.message.endswith("; …")


# Change log


@pytest.mark.parametrize(
    "damaged", [b"", b"\x07", b"\x01\x05", b"\x02\x00", b"\x01\x01\x00\x00\x00\x06\x00\x02\x00\x00\x00abc"]
)
def test_a_row_of_the_change_log_that_cannot_be_read_is_found(
    site: Site, users: Namespace, damaged: bytes
) -> None:
    users.put(b"ada", b"countess")
    ((key, _),) = log_rows(site)
    plant(site, (LOG, key, damaged))
    finding = only(site)
    assert (finding.check, finding.severity) == ("change log", Severity.PROBLEM)
    assert f"row {key.hex()}: " in finding.message


def test_rows_in_the_wrong_place_are_found(site: Site, users: Namespace) -> None:
    version = users.put(b"ada", b"countess")
    ((key, row),) = log_rows(site)
    log = int.from_bytes(key[:4], "big")
    for misplaced, words in (
        (encode_log_key(log, site.now() + (1 << 40)), "lies outside log"),
        (encode_log_key(log, 1), "lies outside log"),
        (encode_log_key(9_999, version), "there is no log 9999"),
        (encode_log_key(log, version, 2), "comes without the one before it"),
        (b"odd", "is not 14 bytes long"),
    ):
        plant(site, (LOG, misplaced, row))
        assert words in only(site).message
        plant(site, (LOG, misplaced, None))
    assert findings(site) == []


# What the site keeps about itself


def test_a_hole_in_the_partition_map_is_found(site: Site, users: Namespace) -> None:
    site.split(users.name, b"m")
    (left, right) = site.partitions()
    plant(site, (META, PARTITIONS + left.id.to_bytes(4, "big"), None))
    assert "does not cover all keys" in only(site).message
    plant(site, (META, PARTITIONS + right.id.to_bytes(4, "big"), b"{"))
    assert "is damaged" in findings(site)[0].message


def test_a_partition_without_a_log_is_found(site: Site) -> None:
    (partition,) = site.partitions()
    key = PARTITIONS + partition.id.to_bytes(4, "big")
    stored = node_of(site).engine.get(META, key)
    assert stored is not None
    row = msgspec.json.decode(stored)
    plant(site, (META, key, msgspec.json.encode({**row, "log": 4_711})))
    assert only(site).message == f"partition {partition.id} has no log that fits it"


def test_a_safe_point_that_holds_garbage_back_for_long_is_named(
    site: Site, users: Namespace, time: SimulatedTime
) -> None:
    site.hold_safe_point("audit", users.put(b"ada", b"1"), lifetime=timedelta(days=30), namespace="users")
    time.advance(47 * HOUR_MS)
    assert findings(site) == []
    time.advance(2 * HOUR_MS)
    finding = only(site)
    assert finding.severity is Severity.WARNING
    assert finding.message == "'audit' has kept garbage collection back for 25 h"
    assert "safepoint release" in finding.advice


def test_collected_and_trimmed_never_pass_resolved(site: Site, users: Namespace) -> None:
    node = node_of(site)
    namespace = site.host.namespaces.find_namespace(users.name).id
    with node.storage.settled():
        node.retention.declare_collected({namespace: site.now() + (1 << 40)})
    finding = only(site)
    assert (finding.check, finding.severity) == ("retention", Severity.PROBLEM)
    assert "namespace 'users' was collected up to" in finding.message


# The process and its surroundings


def test_a_clock_that_was_set_back_is_a_warning(site: Site, users: Namespace, time: SimulatedTime) -> None:
    users.put(b"ada", b"1")
    time.advance(-5_000)
    finding = only(site)
    assert (finding.check, finding.severity) == ("clock", Severity.WARNING)
    assert "5,000 ms ahead" in finding.message


def prepare(site: Site, transaction: str, key: bytes) -> int:
    qualified = encode_namespace(site.host.namespaces.find_namespace("users").id) + key
    (partition,) = node_of(site).map.partitions
    return partition.prepare(transaction, [qualified], [encode_value(b"countess")])


def test_a_prepared_write_that_holds_the_resolved_version_back_is_named(
    site: Site, users: Namespace, time: SimulatedTime
) -> None:
    users.put(b"bob", b"builder")
    node_of(site).settle_by(lambda _: Fate(Decision.UNDECIDED))
    version = prepare(site, "0-7", b"ada")
    time.advance(2_000)
    assert findings(site, quick=True) == []
    assert site.statistics().held_back_by == []
    time.advance(500)
    finding = only(site, quick=True)
    assert (finding.check, finding.severity) == ("resolved", Severity.WARNING)
    assert finding.message == (
        f"the prepared write of transaction 0-7 has held the resolved version at {version - 1} for 2.5 s"
    )
    assert "floodmark txn abort 0-7" in finding.advice
    (hold,) = site.statistics().held_back_by
    assert (hold.kind, hold.transaction, hold.age_ms) == (HoldKind.PREPARED, "0-7", 2_500)
    assert hold.version == site.resolved_version()


def test_unsynced_commits_and_failed_ones_that_hold_it_back_are_named(
    site: Site, users: Namespace, engine: HookedEngine, time: SimulatedTime
) -> None:
    time.advance(HOUR_MS)
    users.put(b"ada", b"countess", durability="async")
    assert site.statistics().held_back_by == [], "however long ago the version is at which it stands"
    time.advance(2_001)
    assert [hold.kind for hold in site.statistics().held_back_by] == [HoldKind.UNSYNCED]
    assert "a commit that is not synced to disk" in only(site, quick=True).message
    site.sync()
    assert site.statistics().held_back_by == []

    def fail(operation: str) -> None:
        if operation in ("sync", "recover"):
            raise OutcomeUnknown("the disk hangs")

    engine.before = fail
    with pytest.raises(OutcomeUnknown):
        users.put(b"ada", b"countess")
    assert node_of(site).holds.long() == []
    time.advance(2_001)
    assert [hold.kind for hold in node_of(site).holds.long()] == [HoldKind.COMMIT]
    engine.before = nothing


@pytest.mark.usefixtures("users")
def test_only_the_oldest_of_many_holds_are_named(site: Site, time: SimulatedTime) -> None:
    node_of(site).settle_by(lambda _: Fate(Decision.UNDECIDED))
    for number in range(HOLDS_SHOWN_MAX + 1):
        prepare(site, f"0-{number}", b"%d" % number)
        time.advance(1)
    time.advance(3_000)
    shown = [hold.transaction for hold in site.statistics().held_back_by]
    assert shown == [f"0-{number}" for number in range(HOLDS_SHOWN_MAX)]


def test_heartbeats_that_stay_away_are_a_problem(site: Site, time: SimulatedTime) -> None:
    site.heartbeat()
    assert findings(site) == []
    time.advance(11_000)
    finding = only(site)
    assert (finding.check, finding.message[:25]) == ("heartbeat", "the last one was 11 s ago")


def test_background_errors_and_recoveries_are_told(site: Site) -> None:
    host = host_of(site)
    host.background.error = "the disk is on fire"
    assert only(site).message == "heartbeats or garbage collection fail: the disk is on fire"
    host.background.error = None
    host.node.storage.stop()
    assert "has not recovered yet" in only(site, quick=True).message
    with host.node.storage.settled():
        pass
    assert "failed and recovered 1 times" in only(site).message


def test_a_disk_that_is_nearly_full_is_told_by_its_figures(tmp_path: Path) -> None:
    with open_engine(MemoryEngine(FAMILIES), site="oslo", disk=tmp_path, disk_reserve_bytes=1 << 60) as site:
        finding = only(site)
        assert (finding.check, finding.severity) == ("disk", Severity.PROBLEM)
        assert "bytes left, and 1,152,921,504,606,846,976 are kept free" in finding.message
        with pytest.raises(StorageFull):
            site.create_namespace("users")


def test_little_room_is_a_warning_before_writes_are_refused(site: Site, tmp_path: Path) -> None:
    def disk(reserve: int) -> CheckResult:
        found = Examination(host_of(site), disk=tmp_path, disk_reserve_bytes=reserve).run(quick=True)
        (finding,) = (finding for finding in found if finding.check == "disk")
        return finding

    assert disk(1).severity is Severity.OK
    assert disk(1 << 60).severity is Severity.WARNING
    assert f"{RECOVERY_ROOM_BYTES:,} are kept free" in disk(RECOVERY_ROOM_BYTES).message


# Those who read


def test_a_feed_that_nobody_runs_is_a_warning_when_it_lags(
    site: Site, users: Namespace, time: SimulatedTime
) -> None:
    site.feeds.create("lake", users.name, "blackhole:")
    time.advance(4 * 60_000)
    assert findings(site) == []
    time.advance(2 * 60_000)
    finding = only(site)
    assert (finding.check, finding.message) == ("feeds", "feed 'lake' is 6 min behind")
    assert finding.advice == "no process runs it: floodmark feed run lake"
    site.host.feeds.acquire("lake", "ada", 60)
    assert only(site).advice.startswith("ada runs it; ")
    site.feeds.pause("lake")
    assert findings(site) == []
    time.advance(12 * HOUR_MS)
    assert "and paused; after 24 hours" in only(site).message


def test_a_feed_in_trouble_and_one_that_failed_are_told_apart(site: Site, users: Namespace) -> None:
    site.feeds.create("lake", users.name, "blackhole:")
    site.host.feeds.acquire("lake", "ada", 60)
    site.host.feeds.report("lake", "ada", [], FeedError(text="no room"))
    finding = only(site)
    assert (finding.severity, finding.message) == (
        Severity.WARNING,
        "feed 'lake' is in trouble: no room",
    )
    site.host.feeds.report("lake", "ada", [], FeedError(text="gone", collected=True))
    finding = only(site)
    assert (finding.severity, finding.message) == (Severity.PROBLEM, "feed 'lake' has failed: gone")
    assert "feed resume lake --since" in finding.advice


def test_readers_whose_changes_were_collected_are_told_before_they_find_out(
    site: Site, users: Namespace, time: SimulatedTime
) -> None:
    site.update_namespace("users", retention=timedelta(0))
    users.put(b"ada", b"1")
    site.feeds.create("lake", "users", "blackhole:")
    site.host.subscriptions.open(SubscriptionSpec(name="indexer", namespace="users"), 0, "ada", 60)
    site.feeds.pause("lake")
    time.advance(25 * HOUR_MS)
    users.put(b"ada", b"2")
    site.collect_garbage()
    feed, subscription = findings(site)
    assert feed.message == "changes that feed 'lake' has not delivered were collected"
    assert subscription.message == "changes that subscription 'indexer' has not acknowledged were collected"
    assert {feed.severity, subscription.severity} == {Severity.PROBLEM}


def test_a_subscription_without_a_consumer_is_a_warning_before_it_is_given_up(
    site: Site, users: Namespace, time: SimulatedTime
) -> None:
    users.put(b"ada", b"1")
    site.host.subscriptions.open(SubscriptionSpec(name="indexer", namespace="users"), 0, "ada", 60)
    assert findings(site) == []
    time.advance(13 * HOUR_MS)
    finding = only(site)
    assert (finding.check, finding.severity) == ("subscriptions", Severity.WARNING)
    assert "'indexer' has no consumer and is 13 h behind" in finding.message


def test_it_looks_at_a_site_that_is_opened_again(engine: HookedEngine, time: SimulatedTime) -> None:
    with open_memory(engine, time) as first:
        first.create_namespace("users").put(b"ada", b"1")
        first.heartbeat()
    with open_memory(engine, time) as again:
        assert findings(again) == []
