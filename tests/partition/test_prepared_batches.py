"""Atomic batches that are prepared at their partitions: several on a key, refusals and outcomes."""

from collections.abc import Sequence
from datetime import timedelta
from threading import Event

import pytest
from tests.site.support import HookedEngine, node_of, open_memory

from floodmark.codec.ordered import encode_namespace
from floodmark.codec.values import encode_value
from floodmark.merge.counter import add_to_counter
from floodmark.model.batch import mint_batch
from floodmark.model.change import Change, Stamp
from floodmark.model.errors import (
    Corruption,
    InvalidArgument,
    LimitExceeded,
    PartitionMoved,
    Retryable,
    TransactionEnded,
)
from floodmark.model.limits import BATCH_AGE_MS_MAX, BATCH_PARTITIONS_MAX
from floodmark.model.partition import Decision, Fate
from floodmark.model.version import Version
from floodmark.partition import LocalPartition, Node
from floodmark.partition.commit.commit import arrange
from floodmark.partition.committer import commit_together
from floodmark.partition.node import ended_batches, forget_batches
from floodmark.partition.prepared import settling, writes
from floodmark.partition.prepared.outcomes import store_outcome
from floodmark.partition.prepared.steps import AbortPrepared, CommitPrepared, Prepare
from floodmark.routing.batches import ask_fate
from floodmark.site import Namespace, Site
from floodmark.testing.clock import SimulatedTime

REFUSED = Fate(Decision.ABORT)


class Batches:
    """Prepares and settles batches at the partitions of one node, as the nodes of a site do."""

    def __init__(self, site: Site, time: SimulatedTime) -> None:
        self.node: Node = node_of(site)
        self._time = time
        self.node.settle_by(lambda _: Fate(Decision.UNDECIDED), self.settle)

    def new(self) -> str:
        return mint_batch(self._time())

    def partition(self, key: bytes) -> LocalPartition:
        return self.node.map.route(key)

    def prepare(
        self, batch: str, key: bytes, *, siblings: Sequence[bytes] = (), value: bytes = b"1"
    ) -> Version:
        return self.partition(key).prepare(batch, [key], [encode_value(value)], siblings or [key])

    def commit(self, batch: str, key: bytes, version: Version) -> bool:
        return self.partition(key).commit_prepared(batch, version)

    def ask(self, batch: str, key: bytes) -> Fate:
        return self.partition(key).ask_prepared(batch, key)

    def settle(self, batch: str, siblings: Sequence[bytes]) -> Fate:
        return ask_fate(lambda key, call: call(self.partition(key)), batch, siblings)


@pytest.fixture
def batches(site: Site, time: SimulatedTime, monkeypatch: pytest.MonkeyPatch) -> Batches:
    monkeypatch.setattr(settling, "ASK_SECONDS", 0.0)
    return Batches(site, time)


@pytest.fixture
def keys(users: Namespace, batches: Batches) -> tuple[bytes, bytes]:
    """Two keys of one namespace, in two partitions."""
    ada, zoe = (encode_namespace(users.id) + key for key in (b"ada", b"zoe"))
    batches.node.reshaping.split(zoe)
    return ada, zoe


def changes_of(site: Site) -> list[Change]:
    return [change for change in site.changes("users") if isinstance(change, Change)]


# Several on a key


def test_batches_on_one_key_commit_in_any_order_and_the_highest_version_wins(
    batches: Batches, users: Namespace, keys: tuple[bytes, bytes]
) -> None:
    first, second, third = (batches.new() for _ in range(3))
    versions = [batches.prepare(batch, keys[0], value=batch.encode()) for batch in (first, second, third)]
    batches.commit(third, keys[0], versions[2])
    batches.commit(first, keys[0], versions[0])
    assert users.get(b"ada") == third.encode()
    batches.commit(second, keys[0], versions[1])
    history = [users.get(b"ada", at=version) for version in versions]
    assert history == [batch.encode() for batch in (first, second, third)]


def test_a_batch_and_a_transaction_do_not_wait_for_each_other(
    batches: Batches, users: Namespace, keys: tuple[bytes, bytes]
) -> None:
    batch, partition = batches.new(), batches.partition(keys[0])
    low = batches.prepare(batch, keys[0], value=b"batch")
    high = partition.prepare("t", [keys[0]], [encode_value(b"transaction")])
    with pytest.raises(Retryable, match="has prepared a write"):
        partition.prepare("u", [keys[0]], [encode_value(b"another")])
    partition.commit_prepared("t", high)
    batches.commit(batch, keys[0], low)
    assert [users.get(b"ada", at=version) for version in (low, high)] == [b"batch", b"transaction"]


def test_adds_of_several_batches_all_count(site: Site, batches: Batches) -> None:
    counts = site.create_namespace("counts", merge="counter")
    key = encode_namespace(counts.id) + b"ada"
    prepared = {batch: batches.partition(key).prepare(batch, [key], [add_to_counter(5)], [key])
                for batch in (batches.new() for _ in range(4))}  # fmt: skip
    counts.add(b"ada", 1)
    for batch, version in reversed(prepared.items()):
        batches.commit(batch, key, version)
    assert counts.get(b"ada") == 21
    assert [counts.get(b"ada", at=version) for version in prepared.values()] == [5, 10, 15, 20]


# The mark, and copies


def test_records_and_changes_of_a_committed_batch_carry_its_id(
    site: Site, batches: Batches, users: Namespace, keys: tuple[bytes, bytes]
) -> None:
    batch = batches.new()
    version = max(batches.prepare(batch, key, siblings=keys) for key in keys)
    users.put(b"ada", b"later")
    for key in keys:
        batches.commit(batch, key, version)
    told = [(change.key, change.batch) for change in changes_of(site)]
    assert told == [(b"ada", version), (b"zoe", version), (b"ada", None)]


def test_a_copy_that_loses_only_from_above_is_stored_below_its_winner(
    batches: Batches, users: Namespace, keys: tuple[bytes, bytes]
) -> None:
    node, partition, batch = batches.node, batches.partition(keys[0]), batches.new()
    old, new = Stamp(node.committer.now(), 3), Stamp(node.committer.now(), 3)
    copy = encode_value(b"old", origin=old)
    version = partition.prepare(batch, [keys[0]], [copy], [keys[0]])
    above = partition.apply([keys[0]], [encode_value(b"new", origin=new)], durable=True)
    batches.commit(batch, keys[0], version)
    assert [users.get(b"ada", at=at) for at in (version, above)] == [b"old", b"new"]


def test_a_copy_that_loses_from_below_leaves_no_trace(
    site: Site, batches: Batches, users: Namespace, keys: tuple[bytes, bytes]
) -> None:
    batch = batches.new()
    stamp = Stamp(batches.node.committer.now(), 3)
    users.put(b"zoe", b"newer")
    copies = [encode_value(b"copy", origin=stamp)]
    version = max(batches.partition(key).prepare(batch, [key], copies, keys) for key in keys)
    for key in keys:
        assert batches.commit(batch, key, version)
    assert users.get_many([b"ada", b"zoe"]) == [b"copy", b"newer"]
    assert [(change.key, change.batch) for change in changes_of(site)] == [(b"zoe", None), (b"ada", version)]


def test_garbage_collection_keeps_the_tombstone_that_a_prepared_copy_must_lose_to(
    site: Site, time: SimulatedTime, batches: Batches, users: Namespace, keys: tuple[bytes, bytes]
) -> None:
    site.update_namespace("users", retention=timedelta(0))
    partition, batch = batches.partition(keys[0]), batches.new()
    copy = encode_value(b"copy", origin=Stamp(batches.node.committer.now(), 3))
    users.delete(b"ada")
    users.delete(b"bob")
    version = partition.prepare(batch, [keys[0]], [copy], [keys[0]])
    time.advance(1_000)
    # The prepared write holds the safe point below itself, and the tombstones lie below that.
    assert site.collect_garbage().keys_removed == 1
    batches.commit(batch, keys[0], version)
    assert users.get(b"ada") is None
    time.advance(1_000)
    assert site.collect_garbage().keys_removed == 1


def test_a_batch_holds_copies_or_new_values_and_a_transaction_no_copies(
    batches: Batches, keys: tuple[bytes, bytes]
) -> None:
    copy, partition = encode_value(b"1", origin=Stamp(1, 3)), batches.partition(keys[0])
    other = keys[0] + b"/2"
    with pytest.raises(InvalidArgument, match="carries no origin"):
        partition.prepare(batches.new(), [keys[0], other], [copy, encode_value(b"2")], [keys[0]])
    with pytest.raises(InvalidArgument, match="carries an origin"):
        partition.prepare("t", [keys[0]], [copy])


# Refusals and outcomes


def test_to_ask_for_a_batch_that_is_not_prepared_refuses_it_for_good(
    batches: Batches, users: Namespace, keys: tuple[bytes, bytes]
) -> None:
    batch = batches.new()
    p = batches.prepare(batch, keys[0], siblings=keys)
    assert batches.ask(batch, keys[0]) == Fate(Decision.UNDECIDED, p)
    assert batches.ask(batch, keys[1]) == REFUSED
    with pytest.raises(TransactionEnded, match="is refused here"):
        batches.prepare(batch, keys[1], siblings=keys)
    # A reader that has to know.
    assert users.get(b"ada", at=batches.node.committer.now()) is None
    assert batches.ask(batch, keys[0]) == REFUSED
    with pytest.raises(TransactionEnded):
        batches.prepare(batch, keys[0], siblings=keys)


def test_a_reader_commits_a_batch_that_is_prepared_everywhere(
    batches: Batches, users: Namespace, keys: tuple[bytes, bytes]
) -> None:
    batch = batches.new()
    version = max(batches.prepare(batch, key, siblings=keys) for key in keys)
    assert users.get(b"zoe", at=version) == b"1"
    assert users.get(b"ada") is None
    assert batches.ask(batch, keys[1]) == Fate(Decision.COMMIT, version)
    assert users.compare_and_set(b"ada", b"1", b"2")


def test_a_reader_leaves_a_writer_time_to_commit_before_it_asks(
    batches: Batches, users: Namespace, keys: tuple[bytes, bytes]
) -> None:
    batch, asked = batches.new(), []
    version = batches.prepare(batch, keys[0])

    class CommittedMeanwhile(Event):
        def wait(self, timeout: float | None = None) -> bool:
            return batches.commit(batch, keys[0], version)

    def ask(batch: str, _: Sequence[bytes]) -> Fate:
        asked.append(batch)
        return REFUSED

    (write,) = batches.node.committer.prepared.all()
    write.ended = CommittedMeanwhile()
    batches.node.settle_by(lambda _: REFUSED, ask)
    assert users.get(b"ada", at=version) == b"1"
    assert not asked


def test_a_committed_batch_is_never_prepared_again(
    batches: Batches, users: Namespace, keys: tuple[bytes, bytes]
) -> None:
    batch = batches.new()
    version = batches.prepare(batch, keys[0])
    assert batches.commit(batch, keys[0], version)
    users.put(b"ada", b"later")
    assert batches.prepare(batch, keys[0]) == version
    assert not batches.commit(batch, keys[0], version)
    assert not batches.partition(keys[0]).abort_prepared(batch, keys[0])
    assert batches.ask(batch, keys[0]) == Fate(Decision.COMMIT, version)
    assert users.get(b"ada") == b"later"


def test_steps_of_one_round_see_each_other(batches: Batches, keys: tuple[bytes, bytes]) -> None:
    committer, partition, batch = batches.node.committer, batches.partition(keys[0]), batches.new()
    version = batches.prepare(batch, keys[0], value=b"1")
    place, again = committer.place, arrange(keys[:1], [encode_value(b"1")])
    commit = CommitPrepared(place, partition, batch, version)
    prepare = Prepare(place, partition, batch, again, keys[:1], ())
    ask = AbortPrepared(place, partition, batch, keys[0], asks=True)
    commit_together(committer, [commit, prepare, ask])
    assert [commit.version, prepare.version] == [version, version]
    assert ask.fate == Fate(Decision.COMMIT, version)


@pytest.mark.parametrize("age_ms", [BATCH_AGE_MS_MAX + 1, -BATCH_AGE_MS_MAX - 1])
def test_an_id_of_another_time_cannot_be_prepared(
    batches: Batches, time: SimulatedTime, keys: tuple[bytes, bytes], age_ms: int
) -> None:
    batch = mint_batch(time() - age_ms)
    with pytest.raises(TransactionEnded, match="took too long"):
        batches.prepare(batch, keys[0])
    time.advance(BATCH_AGE_MS_MAX)
    in_time = mint_batch(time() - BATCH_AGE_MS_MAX)
    assert batches.prepare(in_time, keys[0])


def test_an_abort_of_what_is_not_prepared_refuses_it(batches: Batches, keys: tuple[bytes, bytes]) -> None:
    batch, partition = batches.new(), batches.partition(keys[0])
    assert not partition.abort_prepared(batch)
    assert partition.abort_prepared(batch, keys[0])
    assert not partition.abort_prepared(batch, keys[0])
    with pytest.raises(TransactionEnded):
        batches.prepare(batch, keys[0])
    with pytest.raises(PartitionMoved):
        partition.abort_prepared(batch, keys[1])
    with pytest.raises(PartitionMoved):
        partition.ask_prepared(batch, keys[1])
    with pytest.raises(PartitionMoved):
        partition.ended_prepared([batch], [keys[1]])


def test_what_became_of_a_batch_is_kept_until_it_is_forgotten(
    batches: Batches, time: SimulatedTime, keys: tuple[bytes, bytes]
) -> None:
    done, refused = batches.new(), batches.new()
    version = max(batches.prepare(done, key, siblings=keys) for key in keys)
    batches.commit(done, keys[0], version)
    batches.ask(refused, keys[0])
    time.advance(1)
    batches.node.committer.now()
    found = {(batch, key): outcome for batch, key, outcome in ended_batches(batches.node, 0)}
    assert {each: (outcome.decision, outcome.version) for each, outcome in found.items()} == {
        (done, keys[0]): (Decision.COMMIT, version),
        (refused, keys[0]): REFUSED,
    }
    assert found[done, keys[0]].siblings == keys
    assert not list(ended_batches(batches.node, 1_000))
    ended = [batches.partition(key).ended_prepared([done, refused], [key, key]) for key in keys]
    assert ended == [[True, True], [False, True]]
    forget_batches(batches.node, [(refused, keys[0])])
    assert [batch for batch, *_ in ended_batches(batches.node, 0)] == [done]


def test_a_batch_names_its_partitions(batches: Batches, keys: tuple[bytes, bytes]) -> None:
    partition, value = batches.partition(keys[0]), [encode_value(b"1")]
    for batch, siblings in ((batches.new(), ()), (batches.new(), keys[1:]), ("t", keys)):
        with pytest.raises(InvalidArgument, match="names the first key of each of its partitions"):
            partition.prepare(batch, keys[:1], value, siblings)
    many = [keys[0], *(b"%d" % number for number in range(BATCH_PARTITIONS_MAX))]
    with pytest.raises(LimitExceeded, match="1,001 partitions"):
        partition.prepare(batches.new(), keys[:1], value, many)
    batch = batches.new()
    batches.prepare(batch, keys[0])
    with pytest.raises(InvalidArgument, match="has prepared other writes"):
        batches.prepare(batch, keys[0], siblings=keys)


# Partitions that change


def test_parts_of_a_batch_that_a_merge_brings_together_are_told_apart(
    batches: Batches, keys: tuple[bytes, bytes]
) -> None:
    left, right = (batches.partition(key).id for key in keys)
    batches.node.reshaping.merge(left, right)
    batch = batches.new()
    p = batches.prepare(batch, keys[0], siblings=keys)
    with pytest.raises(TransactionEnded):
        batches.prepare(batch, keys[1], siblings=keys)
    assert [batches.ask(batch, key) for key in keys] == [Fate(Decision.UNDECIDED, p), REFUSED]


def test_splits_and_merges_settle_batches_and_keep_what_became_of_them(
    batches: Batches, users: Namespace, keys: tuple[bytes, bytes]
) -> None:
    whole, half = batches.new(), batches.new()
    version = max(batches.prepare(whole, key, siblings=keys) for key in keys)
    batches.prepare(half, keys[0], siblings=keys)
    batches.node.reshaping.split(keys[0])
    batches.node.reshaping.merge(*(batches.partition(key).id for key in keys))
    assert users.get_many([b"ada", b"zoe"]) == [b"1", b"1"]
    for key in keys:
        assert batches.ask(whole, key) == Fate(Decision.COMMIT, version)
        assert batches.ask(half, key) == REFUSED
        with pytest.raises(TransactionEnded):
            batches.prepare(half, key, siblings=keys)


def test_batches_and_what_became_of_them_outlive_a_restart(
    engine: HookedEngine, time: SimulatedTime, site: Site, batches: Batches, keys: tuple[bytes, bytes]
) -> None:
    prepared, done, refused = (batches.new() for _ in range(3))
    p = max(batches.prepare(prepared, key, siblings=keys) for key in keys)
    version = batches.prepare(done, keys[0])
    batches.commit(done, keys[0], version)
    batches.ask(refused, keys[0])
    site.close()
    with open_memory(engine.crashed(0), time) as again:
        after = Batches(again, time)
        assert after.prepare(done, keys[0]) == version
        with pytest.raises(TransactionEnded):
            after.prepare(refused, keys[0])
        assert after.node.resolved_version() < p
        assert after.settle(prepared, keys) == Fate(Decision.COMMIT, p)
        assert again.namespace("users").get(b"ada", at=after.node.committer.now()) == b"1"


@pytest.mark.parametrize("row", [None, b"?"])
def test_a_batch_whose_partitions_are_not_known_is_reported(
    engine: HookedEngine,
    time: SimulatedTime,
    site: Site,
    batches: Batches,
    keys: tuple[bytes, bytes],
    row: bytes | None,
) -> None:
    batch = batches.new()
    batches.prepare(batch, keys[0])
    family, row_key, _ = store_outcome(batch, keys[0], None)
    engine.write([(family, row_key, row)])
    site.close()
    with pytest.raises(Corruption, match="atomic batch"):
        open_memory(engine, time)


def test_what_names_the_partitions_counts_among_what_is_prepared(
    batches: Batches, keys: tuple[bytes, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writes, "PREPARED_BYTES_MAX", 1_000)
    value = [encode_value(b"1")]
    with pytest.raises(Retryable, match="1,000 bytes may"):
        batches.partition(keys[0]).prepare(batches.new(), keys[:1], value, [keys[0], b"x" * 1_000])
    with pytest.raises(Retryable, match="1,000 bytes may"):
        batches.partition(keys[0]).prepare(batches.new(), keys[:1], value, keys[:1], [b"x" * 1_000])
    assert batches.prepare(batches.new(), keys[0], siblings=keys)


def test_an_open_batch_holds_back_only_the_partitions_that_it_is_in(
    batches: Batches, keys: tuple[bytes, bytes]
) -> None:
    p = batches.prepare(batches.new(), keys[0])
    assert batches.partition(keys[0]).resolved_version() < p
    assert batches.partition(keys[1]).resolved_version() > p
    assert batches.node.resolved_version() < p


def test_an_open_batch_holds_feeds_of_the_site_back_but_no_read_of_other_keys(
    batches: Batches, site: Site, keys: tuple[bytes, bytes]
) -> None:
    """A feed's checkpoint is a version of the site: what ends there must not cut a batch anywhere."""
    other = site.create_namespace("other")
    batch = batches.new()
    version = batches.prepare(batch, keys[0])
    asked: list[str] = []

    def settle(batch: str, _: Sequence[bytes]) -> Fate:
        asked.append(batch)
        return Fate(Decision.UNDECIDED)

    batches.node.settle_by(lambda _: Fate(Decision.UNDECIDED), settle)
    other.put(b"a", b"1")
    assert other.compare_and_set(b"a", b"1", b"2")
    assert dict(other.scan(at=site.now())) == {b"a": b"2"}
    assert other.get(b"a", at=site.now()) == b"2"
    assert site.read_atomic([(other, b"a")]) == [b"2"]
    assert asked == []
    assert list(site.changes("other")) == []
    batches.commit(batch, keys[0], version)
    assert [change.value for change in site.changes("other")] == [b"1", b"2"]


@pytest.mark.parametrize("first", [0, 1])
def test_a_resolved_version_never_cuts_a_batch(
    batches: Batches, site: Site, users: Namespace, keys: tuple[bytes, bytes], first: int
) -> None:
    """Feeds, exports and backups end there: half of a batch is committed, and none of them has any of it."""
    batch, cut_changes = batches.new(), site.host.versions.cut_changes
    version = max(batches.prepare(batch, key, siblings=keys) for key in keys)
    batches.commit(batch, keys[first], version)
    later = users.put(b"later", b"1")
    since, resolved = version - 1, site.resolved_version()
    assert resolved < version
    assert changes_of(site) == []
    assert cut_changes("users", since, 1, None, False).changes == 0
    batches.commit(batch, keys[1 - first], version)
    assert [change.batch for change in changes_of(site)] == [version, version, None]
    cut = cut_changes("users", since, 1, None, False)
    assert cut.changes == 2
    assert version <= cut.version < later
    assert dict(users.scan(at=site.resolved_version())) == {b"ada": b"1", b"later": b"1", b"zoe": b"1"}
    assert dict(users.scan(at=resolved)) == {}


def test_a_reader_never_meets_a_table_that_is_loaded_in_part(
    batches: Batches, keys: tuple[bytes, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    node, partition = batches.node, batches.partition(keys[0])
    lowest = batches.prepare(batches.new(), keys[0])
    batches.prepare(batches.new(), keys[0])
    add, told = writes._Index.add, []

    def look_first(index: writes._Index, write: writes.OpenWrite) -> None:
        told.append(partition.resolved_version())
        add(index, write)

    monkeypatch.setattr(writes._Index, "add", look_first)
    with node.storage.settled():
        node.committer.prepared.load()
    assert len(told) == 2
    assert all(version < lowest for version in (*told, partition.resolved_version()))
