"""The commit path at its seams: where a round begins, fails, is interrupted, or meets another.

Each test puts one thread exactly between two steps of another, by doing the other's work in a hook.
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from queue import SimpleQueue
from threading import Thread

import pytest
from tests.site.support import HookedEngine, node_of, nothing, open_memory, watch_line
from tests.waiting import HANG_SECONDS

from floodmark.clock import HybridClock
from floodmark.codec.ordered import encode_prefixes
from floodmark.engine import WriteRow
from floodmark.engine.rocks import RocksEngine
from floodmark.model.batch import mint_batch
from floodmark.model.errors import (
    Conflict,
    OutcomeUnknown,
    PartitionStopped,
    Retryable,
    StorageFailed,
    StorageFull,
    TransactionEnded,
)
from floodmark.model.limits import BATCH_AGE_MS_MAX
from floodmark.model.partition import ReadSet
from floodmark.model.ranges import KeyRange
from floodmark.model.version import Version, physical_ms
from floodmark.partition import FAMILIES, META, Node
from floodmark.partition.commit.commit import Commit, Mint, RoundStep, Writes
from floodmark.partition.commit.turn import TurnToken
from floodmark.partition.committer import commit_together
from floodmark.partition.deciding import Decided
from floodmark.partition.prepared.outcomes import NamedCommit
from floodmark.partition.validating import Validation
from floodmark.site import Namespace, Site, open_engine
from floodmark.testing.clock import SimulatedTime


@pytest.fixture(autouse=True)
def unhook(engine: HookedEngine) -> Iterator[None]:
    """Take the hooks away before the site is closed."""
    yield
    engine.before = engine.after = nothing


def fail(wanted: str, error: BaseException, *, times: int = 1) -> Callable[[str], None]:
    """A hook that raises the first few times that an operation comes by."""
    left = times

    def hook(operation: str) -> None:
        nonlocal left
        if operation == wanted and left:
            left -= 1
            raise error

    return hook


def both(*hooks: Callable[[str], None]) -> Callable[[str], None]:
    def hook(operation: str) -> None:
        for each in hooks:
            each(operation)

    return hook


class SlowClock(HybridClock):
    """A clock between whose reading and use something may happen, once."""

    meanwhile: Callable[[], object] | None = None

    @property
    def latest(self) -> Version:
        value, meanwhile = self._latest, self.meanwhile
        if meanwhile is not None:
            self.meanwhile = None
            meanwhile()
        return value

    @latest.setter
    def latest(self, value: Version) -> None:
        self._latest = value


def test_resolved_version_does_not_go_back_when_a_round_begins(
    engine: HookedEngine, time: SimulatedTime
) -> None:
    """One thread asks between another's look at the clock and its note of the floor."""
    clock = SlowClock(time)
    node = Node(engine, clock, site_id=7)
    announced: list[Version] = []

    def announce(operation: str = "sync") -> None:
        if operation == "sync":
            announced.append(node.resolved_version())

    clock.meanwhile = announce
    engine.before = announce
    node.map.route(b"\0\0\1key").put([b"\0\0\1key"], [b"value\0"], durable=True)
    engine.before = nothing
    announce()
    assert len(announced) == 3
    assert announced == sorted(announced)


def test_writer_that_looked_before_another_failed_recovers_first(
    site: Site, users: Namespace, engine: HookedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One thread sees that all is well; before it has the turn, another's write ends in the dark."""
    users.put(b"warm", b"up")
    turn = node_of(site).committer._turn
    take = turn.try_take
    operations: list[str] = []

    def fail_another() -> None:
        engine.before = both(
            fail("sync", OutcomeUnknown("no answer")), fail("recover", OutcomeUnknown("no answer"))
        )
        with pytest.raises(OutcomeUnknown):
            users.put(b"dark", b"1")
        engine.before = operations.append

    def slow_take() -> TurnToken | None:
        monkeypatch.setattr(turn, "try_take", take)
        fail_another()
        return take()

    monkeypatch.setattr(turn, "try_take", slow_take)
    users.put(b"light", b"1")
    assert "recover" in operations
    assert operations.index("recover") < operations.index("write")


def test_leader_leaves_alone_who_steps_forward_when_the_first_in_line_leaves(
    site: Site, users: Namespace
) -> None:
    """Behind the first stands one who wants the turn for itself; it must get it, not be written."""
    users.put(b"warm", b"up")
    node = node_of(site)
    partition = node.map.partitions[0]
    qualified = b"\0\0\1key"
    writes = Writes([qualified], [b"prefix"], [b"value\0"], 10)
    leaving, alone = Commit(partition, writes, durable=True), Commit(None, None, durable=True)
    for waiter in (leaving, alone):
        waiter.mail = SimpleQueue()

    class RestlessLine(type(node.committer._turn.line)):  # type: ignore[misc]
        def __getitem__(self, index: int) -> Commit:
            first: Commit = super().__getitem__(index)
            if first is leaving:
                self.remove(first)
            return first

    node.committer._turn.line = RestlessLine([leaving, alone])
    partition.put([qualified, qualified + b"2"], [b"1\0", b"1\0"], durable=True)
    token = alone.mail.get_nowait()
    assert token is not None
    node.committer._turn.line.clear()
    node.committer._turn.pass_on(token)


@pytest.mark.parametrize("lost", [False, True], ids=["happened", "lost"])
def test_write_of_unknown_outcome_holds_the_resolved_version_until_it_is_settled(
    site: Site, users: Namespace, engine: HookedEngine, lost: bool
) -> None:
    before = users.put(b"key", b"old")

    def recover(operation: str) -> None:
        if operation == "recover" and lost:
            engine.lose_unsynced()

    engine.before = both(
        fail("sync", OutcomeUnknown("no answer")), fail("recover", OutcomeUnknown("no answer")), recover
    )
    with pytest.raises(OutcomeUnknown):
        users.put(b"key", b"new")
    assert site.resolved_version() < site.now()
    held = site.resolved_version()
    seen = list(site.changes("users", since=before))
    assert [change.value for change in seen] == ([] if lost else [b"new"])
    assert users.get(b"key") == (b"old" if lost else b"new")
    assert site.resolved_version() > held
    assert all(change.version > held for change in seen)


def test_snapshot_that_was_read_while_an_outcome_was_open_does_not_change(
    site: Site, users: Namespace, engine: HookedEngine
) -> None:
    users.put(b"key", b"old")

    def lose(operation: str) -> None:
        if operation == "recover":
            engine.lose_unsynced()

    engine.before = both(
        fail("sync", OutcomeUnknown("no answer")), fail("recover", OutcomeUnknown("no answer")), lose
    )
    with pytest.raises(OutcomeUnknown):
        users.put(b"key", b"new")
    at = site.now()
    try:
        seen = users.get(b"key", at=at)
    except Retryable:
        seen = None
    users.put(b"other", b"1")
    assert seen in (None, users.get(b"key", at=at))


@pytest.mark.parametrize("operation", ["write", "sync"])
@pytest.mark.parametrize("error", [StorageFailed("no"), OutcomeUnknown("no answer")], ids=["no", "unknown"])
def test_failed_write_tells_the_truth_once_storage_has_recovered(
    site: Site, users: Namespace, engine: HookedEngine, operation: str, error: StorageFailed | OutcomeUnknown
) -> None:
    users.put(b"key", b"old")
    engine.before = fail(operation, error)
    happened = operation == "sync"
    if happened:
        users.put(b"key", b"new")
    else:
        with pytest.raises((StorageFailed, PartitionStopped)):
            users.put(b"key", b"new")
    assert users.get(b"key") == (b"new" if happened else b"old")
    assert [change.value for change in site.changes("users")] == [b"old", b"new"][: 1 + happened]


@pytest.mark.parametrize("place", ["before write", "after write", "after sync"])
@pytest.mark.parametrize("reshape", ["split", "merge"])
def test_interrupted_reshape_loses_no_later_change(
    engine: HookedEngine, time: SimulatedTime, place: str, reshape: str
) -> None:
    """Were the old log still written after its seal, readers from the seal on would never see it."""
    site = open_memory(engine, time)
    users = site.create_namespace("users")
    left, right = site.split("users", b"m")
    moment, operation = place.split()
    hook = fail(operation, KeyboardInterrupt())
    setattr(engine, moment, hook)
    with pytest.raises(KeyboardInterrupt):
        site.split("users", b"c") if reshape == "split" else site.merge(left, right)
    setattr(engine, moment, nothing)
    versions = [users.put(key, b"1") for key in (b"a", b"d", b"x")]
    assert [change.version for change in site.changes("users")] == versions
    site.close()
    with open_memory(engine, time) as again:
        assert [change.version for change in again.changes("users")] == versions
        for position, version in enumerate(versions):
            later = again.changes("users", since=version - 1)
            assert [change.version for change in later] == versions[position:]


def test_interrupted_write_is_settled_before_the_next(
    site: Site, users: Namespace, engine: HookedEngine
) -> None:
    users.put(b"key", b"old")
    engine.before = fail("sync", KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        users.put(b"key", b"new")
    held = site.resolved_version()
    operations: list[str] = []
    engine.before = operations.append
    users.put(b"other", b"1")
    # The engine has not failed: what was written is made durable, and nothing is reopened.
    assert operations[0] == "sync"
    assert "recover" not in operations
    assert site.resolved_version() > held
    assert [change.value for change in site.changes("users")] == [b"old", b"new", b"1"]


def test_asynchronous_writes_hold_the_resolved_version_until_they_are_synced(
    site: Site, users: Namespace, engine: HookedEngine
) -> None:
    users.put(b"durable", b"1")
    version = users.put(b"key", b"1", durability="async")
    assert engine.unsynced
    assert users.get(b"key") == b"1"
    assert site.resolved_version() < version
    site.sync()
    assert not engine.unsynced
    assert site.resolved_version() > version


def test_rocksdb_recovers_with_what_was_written(tmp_path: Path) -> None:
    engine = RocksEngine(tmp_path / "engine", FAMILIES)
    with open_engine(engine, site="oslo") as site:
        users = site.create_namespace("users")
        versions = [users.put(b"key-%d" % index, b"1") for index in range(10)]
        engine.recover()
        versions.append(users.put(b"more", b"1"))
        assert [change.version for change in site.changes("users")] == versions


class Freeing(RoundStep):
    """A step that lets something be freed, such as an acknowledgement."""

    frees = True

    def __init__(self) -> None:
        super().__init__(None)

    def take(self, mint: Mint) -> list[WriteRow]:
        self.version = mint()
        return [(META, b"freed", b"1")]


def test_on_a_full_disk_a_round_writes_only_what_frees_something(users: Namespace, site: Site) -> None:
    node, line = node_of(site), watch_line(site)
    storage = node.storage
    refusals: list[StorageFull] = []

    def put() -> None:
        try:
            users.put(b"ada", b"1")
        except StorageFull as error:
            refusals.append(error)

    threads = [Thread(target=put), Thread(target=lambda: node.take(Freeing()))]
    with storage.exclusive():
        storage.refuse(StorageFull("planned: the disk is full"))
        for number, thread in enumerate(threads, start=1):
            thread.start()
            line.wait_length(number)
    for thread in threads:
        thread.join(HANG_SECONDS)
        assert not thread.is_alive()
    storage.refuse(None)
    assert (len(refusals), users.get(b"ada"), node.engine.get(META, b"freed")) == (1, None, b"1")


def test_reader_reads_below_the_round_at_work_and_does_not_wait(
    site: Site, users: Namespace, engine: HookedEngine
) -> None:
    committer = node_of(site).committer
    users.put(b"ada", b"1")
    seen: list[bytes | None] = []

    def read(operation: str) -> None:
        if operation == "sync":
            seen.append(users.get(b"ada", at=committer.read_version()))

    engine.before = read
    users.put(b"ada", b"2")
    engine.before = nothing
    assert seen == [b"1"]
    assert users.get(b"ada", at=committer.read_version()) == b"2"


def test_floor_of_an_idle_time_is_not_read_at(
    site: Site, users: Namespace, engine: HookedEngine, time: SimulatedTime
) -> None:
    committer = node_of(site).committer
    users.put(b"ada", b"1")
    time.advance(200)
    seen: list[Version] = []

    def look(operation: str) -> None:
        if operation == "sync":
            seen.append(committer.read_version())

    engine.before = look
    users.put(b"ada", b"2")
    engine.before = nothing
    assert [physical_ms(version) for version in seen] == [time()]


def test_transactions_of_one_round_conflict_only_on_what_they_have_read(site: Site, users: Namespace) -> None:
    node = node_of(site)
    since = users.put(b"ada", b"1")
    ada, bob = users.encoding.qualify(b"ada"), users.encoding.qualify(b"bob")
    partition = node.map.route(ada)

    def transaction(read: bytes, written: bytes) -> Commit:
        validation = Validation(node.committer, node.clock, lambda: node.map, {}, ReadSet(since, [read]))
        writes = Writes([written], encode_prefixes([written]), [b"2\0"], 10)
        return Commit(partition, writes, durable=True, validation=validation)

    commits = [transaction(ada, bob), transaction(ada, ada), transaction(ada, ada), transaction(bob, ada)]
    commit_together(node.committer, commits)
    assert [type(commit.error) for commit in commits] == [type(None), type(None), Conflict, Conflict]
    assert commits[3].error is not None
    assert commits[3].error.details["key"] == b"bob"
    assert users.get(b"ada") == users.get(b"bob") == b"2"


@pytest.mark.parametrize("keys", [[b"ada"], [b"ada", b"bob"]])
def test_commit_whose_id_is_too_old_is_refused(site: Site, users: Namespace, keys: list[bytes]) -> None:
    node, qualified = node_of(site), list(map(users.encoding.qualify, keys))
    values, batch = [b"1\0"] * len(keys), len(keys) > 1
    transaction = mint_batch(node.clock.physical_ms() - BATCH_AGE_MS_MAX - 1_000)
    with pytest.raises(TransactionEnded, match="took too long"):
        node.map.route(qualified[0]).write(
            qualified, values, durable=True, batch=batch, transaction=transaction
        )
    assert list(users.scan()) == []


@pytest.mark.parametrize("in_round", [False, True])
def test_write_to_a_range_after_it_was_looked_through_is_a_conflict(
    site: Site, users: Namespace, in_round: bool
) -> None:
    node, (ada, bob) = node_of(site), map(users.encoding.qualify, (b"ada", b"bob"))
    reads = ReadSet(node.committer.now(), (), [KeyRange(ada, None)])
    validation = Validation(node.committer, node.clock, lambda: node.map, {}, reads)
    validation.look_ahead()

    def commit(key: bytes, validation: Validation | None) -> Commit:
        writes = Writes([key], encode_prefixes([key]), [b"1\0"], 10)
        return Commit(node.map.route(key), writes, durable=True, validation=validation)

    commits = [commit(bob, None), commit(ada, validation)]
    for together in [commits] if in_round else [[each] for each in commits]:
        commit_together(node.committer, together)
    assert commits[0].error is None
    assert isinstance(commits[1].error, Conflict)
    assert commits[1].error.details["key"] == b"bob"


def test_write_to_a_range_that_is_split_after_it_was_looked_through_is_a_conflict(
    site: Site, users: Namespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    site.split("users", b"m")
    transaction = site.transaction()
    assert list(transaction.scan(users, b"a", b"c")) == []
    transaction.put(users, b"zoe", b"1")
    look_ahead = Validation.look_ahead

    def write_and_split(self: Validation) -> None:
        monkeypatch.undo()
        look_ahead(self)
        users.put(b"ada", b"2")
        site.split("users", b"b")

    monkeypatch.setattr(Validation, "look_ahead", write_and_split)
    with pytest.raises(Conflict):
        transaction.commit()
    assert users.get(b"zoe") is None


@pytest.mark.parametrize("fails", [False, True])
def test_commit_that_comes_twice_in_a_round_happens_once(
    site: Site, users: Namespace, engine: HookedEngine, fails: bool
) -> None:
    node, ada = node_of(site), users.encoding.qualify(b"ada")
    named = NamedCommit(engine, mint_batch(node.clock.physical_ms()), ada)
    reads = ReadSet(node.committer.now(), [ada])
    validation = Validation(node.committer, node.clock, lambda: node.map, {}, reads)

    def commit() -> Commit:
        writes = Writes([ada], encode_prefixes([ada]), [b"1\0"], 10)
        return Commit(node.map.route(ada), writes, durable=True, validation=validation, named=named)

    commits = [commit(), commit()]
    engine.before = fail("sync", OutcomeUnknown("no answer")) if fails else nothing
    commit_together(node.committer, commits)
    assert [each.error for each in commits] == [None, None]
    assert commits[0].version == commits[1].version != 0
    assert [change.version for change in site.changes("users")] == [commits[0].version]


@pytest.mark.parametrize("fails", [False, True])
def test_batch_that_comes_twice_in_a_round_happens_once(
    site: Site, users: Namespace, engine: HookedEngine, fails: bool
) -> None:
    node, rows = node_of(site), {users.encoding.qualify(key): b"1\0" for key in (b"ada", b"bob")}
    named = NamedCommit(engine, mint_batch(node.clock.physical_ms()), min(rows))

    def write() -> Decided:
        return Decided(
            node.committer, lambda: node.map, None, lambda: rows, durable=True, batch=True, named=named
        )

    steps = [write(), write()]
    engine.before = fail("sync", OutcomeUnknown("no answer")) if fails else nothing
    commit_together(node.committer, steps)
    assert [each.error for each in steps] == [None, None]
    assert [change.version for change in site.changes("users")] == [steps[0].version, steps[1].version]


def test_transaction_whose_round_cannot_raise_the_bound_of_the_clock_fails_at_once(
    site: Site, users: Namespace, engine: HookedEngine
) -> None:
    """The round holds the turn: to wait for it in there, for a recovery, would be to wait for itself."""
    transaction = site.transaction()
    assert transaction.get(users, b"ada") is None
    for key in (b"ada", b"bob"):
        transaction.put(users, key, b"1")
    node = node_of(site)
    node.clock._bound = node.clock.latest
    engine.before = fail("write", StorageFailed("the disk refused a write; try again"))
    with pytest.raises(StorageFailed):
        transaction.commit()
    site.run_transaction(lambda t: t.put(users, b"ada", t.get(users, b"bob") or b"2"))
    assert users.get(b"ada") == b"2"
