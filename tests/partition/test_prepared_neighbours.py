"""Prepared writes beside all else that a node does: reshaping, heartbeats, garbage collection, long waits."""

import pytest
from tests.partition.test_prepared import Coordinator, coordinator, partition, prepare, qualify
from tests.site.support import HookedEngine, node_of, open_memory
from tests.waiting import HANG_SECONDS, run_threads

from floodmark.codec.values import encode_value
from floodmark.merge.counter import add_to_counter
from floodmark.model.change import Stamp
from floodmark.model.errors import LimitExceeded, Retryable, WrongPolicy
from floodmark.model.limits import COUNTER_TOTAL_MAX
from floodmark.model.partition import Decision, Fate
from floodmark.partition import LocalPartition
from floodmark.partition.prepared import settling
from floodmark.site import Namespace, Site
from floodmark.testing.clock import SimulatedTime

__all__ = ["coordinator", "partition"]

DAY_MS = 24 * 3600 * 1000


def copy(value: bytes, stamp: Stamp) -> bytes:
    return encode_value(value, origin=stamp)


# Splits and merges


@pytest.mark.parametrize("commits", [True, False])
def test_split_and_merge_settle_what_is_prepared(
    site: Site, users: Namespace, partition: LocalPartition, coordinator: Coordinator, commits: bool
) -> None:
    def decided(transaction: str, served: LocalPartition) -> None:
        version = prepare(served, users, transaction, a=b"1")
        coordinator.fates[transaction] = Fate(Decision.COMMIT, version) if commits else Fate(Decision.ABORT)

    decided("before the split", partition)
    site.split("users", b"m")
    left, right = node_of(site).map.partitions
    assert users.get(b"a") == (b"1" if commits else None)
    decided("before the merge", left)
    site.merge(left.id, right.id)
    assert len(list(site.changes("users"))) == (2 if commits else 0)
    assert node_of(site).committer.prepared.all() == []


def test_split_waits_for_what_is_undecided_and_lets_nothing_more_in(
    site: Site, users: Namespace, partition: LocalPartition, coordinator: Coordinator
) -> None:
    version = prepare(partition, users, "t", a=b"1")

    def decide() -> None:
        assert coordinator.asked.wait(HANG_SECONDS)
        with pytest.raises(Retryable, match="split or merged"):
            prepare(partition, users, "u", z=b"1")
        partition.commit_prepared("t", version)

    run_threads(lambda: site.split("users", b"m"), decide)
    assert len(node_of(site).map.partitions) == 2
    assert users.get(b"a") == b"1"
    assert prepare(node_of(site).map.route(qualify(users, b"z")), users, "u", z=b"1")


def test_split_that_waits_in_vain_is_refused_and_changes_nothing(
    site: Site, users: Namespace, partition: LocalPartition, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(settling, "ASK_SECONDS", 0.0)
    node_of(site).settle_by(lambda _: Fate(Decision.UNDECIDED))
    prepare(partition, users, "t", a=b"1")
    with pytest.raises(Retryable, match="'t' has prepared"):
        site.split("users", b"m")
    assert len(node_of(site).map.partitions) == 1
    assert prepare(partition, users, "u", z=b"1")


def test_other_partitions_split_while_something_is_prepared(site: Site, users: Namespace) -> None:
    site.split("users", b"m")
    left, right = node_of(site).map.partitions
    version = prepare(left, users, "t", a=b"1")
    users.put(b"p", b"1")
    site.split("users", b"t")
    assert right.retired
    users.put(b"p", b"2")
    left.commit_prepared("t", version)
    assert [change.value for change in site.changes("users")] == [b"1", b"1", b"2"]


# Heartbeats


def test_heartbeats_count_a_late_commit_once_and_what_it_removes_never(
    site: Site, users: Namespace, partition: LocalPartition
) -> None:
    stamp = Stamp(site.now(), 3)
    site.heartbeat()
    version = prepare(partition, users, "t", a=b"1")
    site.host.router.apply({qualify(users, key): copy(b"copy", stamp) for key in (b"a", b"b")}, durable=True)
    users.put(b"c", b"1")
    # Each of these goes through what lies before the prepared write, and folds the sums of what lies above.
    for _ in range(2):
        assert site.heartbeat().sums == {}
    users.put(b"c", b"2")
    partition.commit_prepared("t", version)
    sums = site.heartbeat().sums[users.id]
    assert (sums.own.changes, sums.all.changes) == (3, 4)
    changes = list(site.changes("users"))
    assert [(change.key, change.value) for change in changes] == [
        (b"a", b"1"),
        (b"b", b"copy"),
        (b"c", b"1"),
        (b"c", b"2"),
    ]


def test_tallies_do_not_pile_up_while_something_is_prepared(
    site: Site, users: Namespace, partition: LocalPartition
) -> None:
    site.heartbeat()
    version = prepare(partition, users, "t", a=b"1")
    for number in range(50):
        users.put(b"b", b"%d" % number)
    prepare(partition, users, "u", z=b"1")
    for number in range(50):
        users.put(b"b", b"%d" % number)
    site.heartbeat()
    assert len(partition.tallies) == 2
    partition.commit_prepared("t", version)
    assert site.heartbeat().sums[users.id].all.changes == 51
    partition.abort_prepared("u")
    assert site.heartbeat().sums[users.id].all.changes == 50


def test_heartbeat_counts_what_an_earlier_life_wrote_and_prepared(
    site: Site, users: Namespace, partition: LocalPartition, engine: HookedEngine, time: SimulatedTime
) -> None:
    last = site.heartbeat()
    version = prepare(partition, users, "t", a=b"1")
    users.put(b"b", b"1")
    with open_memory(engine.crashed(), time) as again:
        beats = [again.heartbeat() for _ in range(2)]
        assert [(beat.since, beat.sums) for beat in beats] == [(last.through, {}), (beats[0].through, {})]
        node_of(again).map.partitions[0].commit_prepared("t", version)
        whole = again.heartbeat()
        assert (whole.since, whole.sums[users.id].own.changes) == (beats[1].through, 2)


# Garbage collection


def test_garbage_collection_stays_below_what_is_prepared(
    site: Site, users: Namespace, partition: LocalPartition, time: SimulatedTime
) -> None:
    users.put(b"a", b"old")
    version = prepare(partition, users, "t", a=b"1")
    for number in range(3):
        users.put(b"a", b"%d" % number)
    time.advance(30 * DAY_MS)
    site.collect_garbage()
    assert node_of(site).retention.collected_version(users.id) < version
    assert node_of(site).retention.trimmed_version() < version
    partition.commit_prepared("t", version)
    assert [change.value for change in site.changes("users", since=version - 1)] == [b"1", b"0", b"1", b"2"]
    time.advance(30 * DAY_MS)
    assert site.collect_garbage().versions_removed == 4
    assert users.get(b"a") == b"2"


# A write that stays open for long


def test_what_would_have_to_be_rewritten_is_bounded(
    site: Site,
    partition: LocalPartition,
    coordinator: Coordinator,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A merge that would make it too much settles the prepared write first."""
    counts = site.create_namespace("counts", merge="counter")
    key = qualify(counts, b"key")
    monkeypatch.setattr(partition, "limits", partition.limits._replace(bytes_max=1_000))
    version = partition.prepare("t", [key], [add_to_counter(1_000)])
    coordinator.fates["t"] = Fate(Decision.COMMIT, version)
    added = 0
    while node_of(site).committer.prepared.all():
        counts.add(b"key", 1)
        added += 1
    assert 1 < added < 20
    assert counts.get(b"key") == 1_000 + added
    assert counts.get(b"key", at=version) == 1_000


def test_after_a_restart_merges_settle_first(
    site: Site, partition: LocalPartition, engine: HookedEngine, time: SimulatedTime
) -> None:
    """How much is above it is not known any more."""
    counts = site.create_namespace("counts", merge="counter")
    version = partition.prepare("t", [qualify(counts, b"key")], [add_to_counter(5)])
    counts.add(b"key", 1)
    with open_memory(engine.crashed(), time) as again:
        node_of(again).committer.prepared.settler = lambda _: Fate(Decision.COMMIT, version)
        again.namespace("counts").add(b"key", 1)
        assert node_of(again).committer.prepared.all() == []
        assert again.namespace("counts").get(b"key") == 7
        assert [change.value for change in again.changes("counts")] == [b"5", b"6", b"7"]


def test_heartbeat_ends_what_was_decided_and_forgotten(
    site: Site, users: Namespace, partition: LocalPartition, coordinator: Coordinator, time: SimulatedTime
) -> None:
    version = prepare(partition, users, "t", a=b"1")
    prepare(partition, users, "u", b=b"1")
    coordinator.fates["t"] = Fate(Decision.COMMIT, version)
    site.heartbeat()
    assert not coordinator.asked.is_set()
    time.advance(2_000)
    site.heartbeat()
    assert [write.transaction for write in node_of(site).committer.prepared.all()] == ["u"]
    assert users.get(b"a") == b"1"


# What a late commit meets


def test_copy_that_lost_goes_from_a_commit_of_many_chunks(
    site: Site, users: Namespace, partition: LocalPartition
) -> None:
    """The rest of that commit stays as it was: values in the log, and large ones that it only names."""
    stamp = Stamp(site.now(), 3)
    version = prepare(partition, users, "t", k0500=b"1", k1999=b"1")
    copies = {
        qualify(users, b"k%04d" % number): copy(b"x" * (5_000 if number % 10 == 0 else 1_000), stamp)
        for number in range(2_000)
    }
    site.host.router.apply(copies, durable=True)
    partition.commit_prepared("t", version)
    changes = [(change.version == version, change.key, change.value) for change in site.changes("users")]
    assert changes[:2] == [(True, b"k0500", b"1"), (True, b"k1999", b"1")]
    lost = {b"k0500", b"k1999"}
    assert changes[2:] == [
        (False, key[3:], value[:-10]) for key, value in copies.items() if key[3:] not in lost
    ]
    assert [users.get(key) for key in (b"k0500", b"k1999", b"k0501")] == [b"1", b"1", b"x" * 1_000]
    assert users.get(b"k0500", at=version) == b"1"


def test_copy_with_a_higher_stamp_stays(site: Site, users: Namespace, partition: LocalPartition) -> None:
    version = prepare(partition, users, "t", a=b"1")
    site.host.router.apply({qualify(users, b"a"): copy(b"copy", Stamp(version, 9))}, durable=True)
    partition.commit_prepared("t", version)
    assert users.get(b"a") == b"copy"
    assert users.get(b"a", at=version) == b"1"
    assert len(list(site.changes("users"))) == 2


@pytest.mark.parametrize("sign", [1, -1])
def test_total_that_would_not_fit_stays_at_the_highest(
    site: Site, partition: LocalPartition, sign: int
) -> None:
    """A decision is carried out, whatever was added meanwhile."""
    counts = site.create_namespace("counts", merge="counter")
    counts.add(b"key", -sign)
    version = partition.prepare("t", [qualify(counts, b"key")], [add_to_counter(sign * COUNTER_TOTAL_MAX)])
    counts.add(b"key", sign * 10)
    partition.commit_prepared("t", version)
    assert counts.get(b"key", at=version) == sign * (COUNTER_TOTAL_MAX - 1)
    assert counts.get(b"key") == sign * COUNTER_TOTAL_MAX


def test_what_may_not_be_merged_is_refused_at_once(
    site: Site, users: Namespace, partition: LocalPartition
) -> None:
    users.put(b"a", b"whole")
    with pytest.raises(WrongPolicy):
        partition.prepare("t", [qualify(users, b"a")], [add_to_counter(1)])
    counts = site.create_namespace("counts", merge="counter")
    counts.add(b"key", COUNTER_TOTAL_MAX)
    with pytest.raises(LimitExceeded):
        partition.prepare("t", [qualify(counts, b"key")], [add_to_counter(1)])
    assert node_of(site).committer.prepared.all() == []
    assert site.resolved_version() > site.now() - (1 << 18)
