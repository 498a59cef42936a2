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
from floodmark.engine import WriteRow
from floodmark.engine.rocks import RocksEngine
from floodmark.model.errors import OutcomeUnknown, PartitionStopped, Retryable, StorageFailed, StorageFull
from floodmark.model.version import Version
from floodmark.partition import FAMILIES, META, Node
from floodmark.partition.commit.commit import Commit, Mint, RoundStep, Writes
from floodmark.partition.commit.turn import TurnToken
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
