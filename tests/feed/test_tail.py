"""The live tail: what followers take from memory is what the log has, at every seam.

Each interleaving is forced: a hook does the reader's work between two steps of the writer.
"""

import gc
from collections.abc import Callable, Sequence
from contextlib import suppress
from queue import SimpleQueue
from threading import Event
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.feed.support import HUGE, Follower, World, delivered, open_world, request_of
from tests.site.support import host_of, nothing
from tests.waiting import HANG_SECONDS, run_threads

from floodmark.engine import MemoryEngine
from floodmark.model.change import Change
from floodmark.model.errors import FloodmarkError, OutcomeUnknown, StorageFailed
from floodmark.model.stream import Way
from floodmark.model.version import VERSION_MAX, Version
from floodmark.partition import FAMILIES, Storage, TailEntry
from floodmark.partition.commit import tail as tail_module
from floodmark.partition.commit.tail import LiveTail
from floodmark.partition.committer import Committer

# How long a hook holds the disk up: more than enough for a reader to look around.


def committer_of(world: World) -> Committer:
    return host_of(world.site).node.committer


def collect_garbage() -> None:
    gc.collect()


def versions_of(changes: Any) -> list[Version]:
    return [change.version for change in changes]


# The window itself


@given(
    sizes=st.lists(st.integers(0, 3000), max_size=60),
    bytes_max=st.sampled_from([1, 1_000, 5_000, 50_000]),
    since=st.integers(90, 170),
    until=st.integers(90, 170),
)
def test_window_gives_all_that_lies_between_or_says_that_it_cannot(
    sizes: list[int], bytes_max: int, since: Version, until: Version
) -> None:
    tail = LiveTail(Storage(MemoryEngine(FAMILIES)), bytes_max)
    with tail.following(lambda: 100):
        for version, size in enumerate(sizes, start=101):
            tail.add(version, 1, (b"key",), (b"x" * size,))
        found = tail.between(since, until)
        wanted = [version for version in range(101, 101 + len(sizes)) if since < version <= until]
        if found is None:
            assert since < 100 or sum(sizes) + 403 * len(sizes) > bytes_max
        else:
            assert since >= 100
            assert [entry.version for entry in found] == wanted


@given(
    st.lists(
        st.tuples(
            st.integers(1, 2),
            st.integers(0, 5),
            st.dictionaries(
                st.integers(0, 9), st.dictionaries(st.sampled_from("abc"), st.none() | st.text())
            ),
        ),
        max_size=12,
    )
)
def test_window_takes_commits_in_below_others(
    inserts: list[tuple[int, int, dict[int, dict[str, str | None]]]],
) -> None:
    """Commits at 10, 20, … of two partitions in turn, and others that come late and change what is above."""
    tail = LiveTail(Storage(MemoryEngine(FAMILIES)))
    model: dict[Version, tuple[int, dict[bytes, bytes]]] = {}
    with tail.following(lambda: 5):
        for number in range(1, 10):
            model[10 * number] = number % 2 + 1, {b"a": b"%d" % number, b"b": b""}
            tail.add(10 * number, number % 2 + 1, *_columns(model[10 * number][1]))
        for late, (partition, place, corrections) in enumerate(inserts):
            version = 10 * place + 1 + late % 9
            if version in model:
                continue
            corrected = {
                10 * number: {
                    key.encode(): None if to is None else to.encode() for key, to in changes.items()
                }
                for number, changes in corrections.items()
                if number > place
            }
            for at, changes in corrected.items():
                if at in model and model[at][0] == partition:
                    values = {key: changes.get(key, value) for key, value in model[at][1].items()}
                    model[at] = partition, {key: value for key, value in values.items() if value is not None}
            if version > 5:
                model[version] = partition, {b"late": b"%d" % late}
            tail.insert(TailEntry(version, partition, [b"late"], [b"%d" % late]), corrected)
            found = tail.between(5, 1_000)
            assert found is not None
            expected = [
                TailEntry(at, owner, *_columns(pairs))
                for at, (owner, pairs) in sorted(model.items())
                if pairs
            ]
            assert [
                entry._replace(keys=list(entry.keys), values=list(entry.values)) for entry in found
            ] == expected
            assert tail._bytes == sum(tail_module._size(entry.keys, entry.values) for entry in found)


def _columns(pairs: dict[bytes, bytes]) -> tuple[list[bytes], list[bytes]]:
    return list(pairs), list(pairs.values())


def test_to_take_a_commit_in_below_others_costs_nothing_for_those_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tail = LiveTail(Storage(MemoryEngine(FAMILIES)))
    with tail.following(lambda: 100):
        for version in range(101, 1_101):
            tail.add(version, 1, (b"key",), (b"value",))
        measured: list[Sequence[bytes]] = []
        size = tail_module._size

        def measure(keys: Sequence[bytes], values: Sequence[bytes]) -> int:
            measured.append(keys)
            return size(keys, values)

        monkeypatch.setattr(tail_module, "_size", measure)
        tail.insert(TailEntry(1_099, 2, [b"key"], [b"value"]), {1_100: {b"key": None}})
        assert len(measured) < 5


def test_window_stays_within_its_bytes() -> None:
    tail = LiveTail(Storage(MemoryEngine(FAMILIES)), 100_000)
    with tail.following(lambda: 0):
        for version in range(1, 5_000):
            tail.add(version, 1, (b"key",) * (version % 3 + 1), (b"x" * (version % 700),) * (version % 3 + 1))
            held = tail.between(tail._since, VERSION_MAX) or ()
            assert sum(sum(map(len, entry.values)) + 400 for entry in held) <= 100_000
        assert len(held) > 20


def test_commit_larger_than_the_window_is_not_kept() -> None:
    tail = LiveTail(Storage(MemoryEngine(FAMILIES)), 1_000)
    with tail.following(lambda: 0):
        tail.add(1, 1, (b"key",), (b"small",))
        tail.add(2, 1, (b"key",), (b"x" * 2_000,))
        assert tail.between(0, 2) is None
        assert tail.between(1, 2) is None
        assert tail.between(2, 2) == []
        tail.add(3, 1, (b"key",), (b"small",))
        kept = tail.between(2, 3)
        assert kept is not None
        assert [entry.version for entry in kept] == [3]


def test_last_follower_that_leaves_empties_the_window() -> None:
    with open_world() as world:
        tail = committer_of(world).tail
        world.users.put(b"key", b"unseen")
        assert not tail.is_open
        first, second = Follower(world.site), Follower(world.site, "users")
        first.catch_up()
        second.catch_up()
        world.users.put(b"key", b"1")
        first.close()
        assert tail.is_open
        second.catch_up()
        assert delivered(world.site)[Way.TAIL] == 1
        second.close()
        assert not tail.is_open
        assert tail._entries == []
        world.users.put(b"key", b"2")
        assert tail._entries == []
        third = Follower(world.site, "users", since=second.checkpoint)
        third.catch_up()
        assert [change.value for change in third.changes] == [b"2"]


def test_stream_that_does_not_follow_opens_no_window() -> None:
    with open_world() as world:
        world.users.put(b"key", b"1")
        stream = world.site.changes("users", resolved_markers=True)
        next(stream)
        assert not committer_of(world).tail.is_open


# Followers


def test_follower_that_keeps_up_never_touches_the_log() -> None:
    with open_world() as world:
        follower = Follower(world.site, "users")
        follower.catch_up()
        reads: list[str] = []
        world.engine.before = lambda operation: reads.append(operation) if "scan" in operation else None
        for index in range(50):
            world.users.put(b"key", b"%d" % index)
            follower.catch_up()
        assert len(follower.changes) == 50
        assert reads == []


@pytest.mark.parametrize("bytes_max", [1, 2_000, 20_000])
def test_follower_that_falls_out_of_the_window_reads_the_log_and_comes_back(bytes_max: int) -> None:
    with open_world() as world:
        committer_of(world).tail._bytes_max = bytes_max
        followers = [Follower(world.site, "users") for _ in range(3)]
        written = []
        for index in range(120):
            written.append(world.users.put(b"key-%d" % (index % 7), b"x" * (index * 37 % 900)))
            for pace, follower in zip((1, 10, 50), followers, strict=True):
                if index % pace == 0:
                    follower.catch_up()
        for follower in followers:
            follower.catch_up()
            assert versions_of(follower.changes) == written
        ways = set(delivered(world.site))
        assert ways == ({Way.LOG} if bytes_max == 1 else {Way.LOG, Way.TAIL})


def test_followers_from_different_beginnings_get_the_same_end() -> None:
    with open_world() as world:
        written = [world.users.put(b"key", b"%d" % index) for index in range(10)]
        beginnings = [0, written[3], written[9], "now", "beginning"]
        followers = [Follower(world.site, "users", since=since) for since in beginnings]
        written += [world.users.put(b"key", b"%d" % index) for index in range(10)]
        for follower in followers:
            follower.catch_up()
        written += [world.users.put(b"key", b"%d" % index) for index in range(10)]
        for follower, skipped in zip(followers, (0, 4, 10, 10, 0), strict=True):
            follower.catch_up()
            assert versions_of(follower.changes) == written[skipped:]


def test_follower_that_leaves_in_a_thread_that_writes_does_not_stop_the_site(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A stream in a reference cycle ends whenever the collector runs: also in the middle of a commit."""
    unraisable: list[object] = []
    monkeypatch.setattr("sys.unraisablehook", lambda error: unraisable.append(error.exc_value))
    with open_world() as world:
        follower = Follower(world.site, "users")
        follower.catch_up()
        cycle: list[Any] = [follower.stream]
        cycle.append(cycle)
        del cycle, follower.stream
        world.engine.before = lambda operation: collect_garbage() if operation == "write" else None
        world.users.put(b"key", b"1")
        world.engine.before = nothing
        gc.collect()
        assert unraisable == []
        assert not committer_of(world).tail.is_open
        assert world.users.put(b"key", b"2")


def test_statistics_are_not_stopped_by_a_follower_that_leaves_meanwhile() -> None:
    """The collector may run wherever something is allocated, also while the streams are being counted."""

    class CollectingDict(dict[Any, Any]):
        """Collects garbage whenever it is looked at."""

        def keys(self) -> Any:
            gc.collect()
            return super().keys()

        def __iter__(self) -> Any:
            gc.collect()
            return super().__iter__()

    with open_world() as world:
        follower = Follower(world.site, "users")
        follower.catch_up()
        reader = host_of(world.site).reader
        reader._delivered = CollectingDict(reader._delivered)
        cycle: list[Any] = [follower.stream]
        cycle.append(cycle)
        del cycle, follower.stream
        run_threads(world.site.statistics)
        assert world.site.statistics().readers.open == []


class LeavingKeys(tuple[bytes, ...]):
    """Keys of a commit during whose entry into the tail something happens, once."""

    meanwhile: Callable[[], object] | None = None

    def __len__(self) -> int:
        meanwhile, self.meanwhile = self.meanwhile, None
        if meanwhile is not None:
            meanwhile()
        return super().__len__()


@pytest.mark.parametrize("bytes_max", [700, 100_000], ids=["full", "has room"])
def test_last_follower_may_leave_while_a_commit_is_being_entered(bytes_max: int) -> None:
    """Nothing of it reaches the writer, whose commit is already on disk, and nothing is kept for nobody."""
    tail = LiveTail(Storage(MemoryEngine(FAMILIES)), bytes_max)
    following = tail.following(lambda: 100)
    following.__enter__()
    tail.add(101, 1, (b"key",), (b"1",))
    keys = LeavingKeys((b"key",))
    keys.meanwhile = lambda: following.__exit__(None, None, None)
    tail.add(102, 1, keys, (b"2",))
    assert not tail.is_open
    with tail.following(lambda: 200):
        assert tail.between(150, 300) is None
        tail.add(201, 1, (b"key",), (b"3",))
        found = tail.between(200, 300)
        assert found is not None
        assert [entry.version for entry in found] == [201]


# Seams


class LateTail(LiveTail):
    """The canary: a tail into which commits are entered when they are already published."""

    def __init__(self, storage: Storage) -> None:
        super().__init__(storage)
        self.late: list[tuple[Any, ...]] = []

    def add(self, version: Version, partition: int, keys: Sequence[bytes], values: Sequence[bytes]) -> None:
        self.late.append((version, partition, keys, values))

    def enter_late(self) -> None:
        for entry in self.late:
            super().add(*entry)
        self.late = []


def look_at_publication(world: World, look: Callable[[], None], monkeypatch: pytest.MonkeyPatch) -> None:
    """Call `look` in the moment when a commit has just been published, once for each."""
    committer = committer_of(world)
    settle_floors = committer._settle_floors
    looking = False

    def settle_and_look(*, synced: bool) -> None:
        nonlocal looking
        settle_floors(synced=synced)
        if synced and not looking:
            looking = True
            look()
            looking = False

    monkeypatch.setattr(committer, "_settle_floors", settle_and_look)


@pytest.mark.parametrize("late", [False, True], ids=["real", "canary"])
@pytest.mark.parametrize("kind", ["put", "put_many", "delete", "compare_and_set"])
def test_commit_is_in_the_tail_before_it_is_published(
    late: bool, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with open_world() as world:
        committer = committer_of(world)
        if late:
            committer.tail = LateTail(host_of(world.site).node.storage)
        follower = Follower(world.site, "users")
        follower.catch_up()
        tail = committer.tail

        def look() -> None:
            follower.catch_up()
            if isinstance(tail, LateTail):
                tail.enter_late()

        look_at_publication(world, look, monkeypatch)
        if kind == "put":
            world.users.put(b"key", b"1")
        elif kind == "put_many":
            world.users.put_many({b"key": b"1"} | {b"key-2": b"2"})
        elif kind == "delete":
            world.users.delete(b"key")
        else:
            assert world.users.compare_and_set(b"key", None, b"1")
        follower.catch_up()
        expected = list(world.site.changes("users"))
        assert expected
        assert (follower.changes == expected) is not late


@pytest.mark.parametrize("operation", ["write", "sync"])
@pytest.mark.parametrize("moment", ["before", "after"])
def test_follower_sees_nothing_of_a_commit_under_way(operation: str, moment: str) -> None:
    with open_world() as world:
        follower = Follower(world.site, "users")
        follower.catch_up()
        world.site.now()
        announced: list[Version] = []

        def look(done: str) -> None:
            if done == operation:
                follower.catch_up()
                announced.append(follower.checkpoint)
                assert follower.changes == follower.ahead == []

        setattr(world.engine, moment, look)
        version = world.users.put(b"key", b"1")
        setattr(world.engine, moment, nothing)
        assert announced
        assert max(announced) < version
        follower.catch_up()
        assert versions_of(follower.changes) == [version]


@pytest.mark.parametrize("error", [StorageFailed("no"), OutcomeUnknown("no answer")], ids=["no", "unknown"])
@pytest.mark.parametrize("operation", ["write", "sync"])
@pytest.mark.parametrize("lost", [False, True], ids=["kept", "lost"])
@pytest.mark.parametrize("unsynced", [0, 3])
def test_follower_agrees_with_the_log_after_a_failure(
    error: FloodmarkError, operation: str, lost: bool, unsynced: int
) -> None:
    """What was in the tail without being durable may be gone after a recovery."""
    with open_world() as world:
        follower = Follower(world.site, "users")
        follower.catch_up()
        failures = [error]

        def fail(coming: str) -> None:
            if coming == operation and failures:
                raise failures.pop()
            if coming == "recover" and lost:
                world.engine.lose_unsynced()

        world.users.put(b"first", b"1")
        for index in range(unsynced):
            world.users.put(b"async-%d" % index, b"1", durability="async")
        world.engine.before = fail
        with suppress(FloodmarkError):
            world.users.put(b"failing", b"1")
        world.engine.before = nothing
        world.users.put(b"last", b"1")
        follower.catch_up()
        assert follower.changes == list(world.site.changes("users"))
        assert (follower.changes[0].key, follower.changes[-1].key) == (b"first", b"last")


def test_follower_is_woken_by_a_commit_and_not_by_time() -> None:
    """With more patience than the test has, only being woken explains that it is there at once."""
    with open_world() as world, pytest.MonkeyPatch.context() as patch:
        patch.setattr("floodmark.feed.reading.reader.FOLLOW_SECONDS", HANG_SECONDS * 10)
        received: SimpleQueue[Version] = SimpleQueue()

        def read() -> None:
            for item in world.site.changes("users", follow=True, resolved_markers=True):
                received.put(item.version)
                if isinstance(item, Change):
                    return

        def write() -> None:
            received.get(timeout=HANG_SECONDS)
            version = world.users.put(b"key", b"1")
            while received.get(timeout=HANG_SECONDS) != version:
                pass

        run_threads(read, write)


def test_follower_can_look_around_while_storage_is_stuck() -> None:
    """It gets empty batches, so that it can leave, though nothing is resolved for a long time."""
    with open_world() as world:
        batches = host_of(world.site).changes(request_of(world.site, "users", follow=True))
        next(batches)
        stuck, released = Event(), Event()

        def hold(operation: str) -> None:
            if operation == "sync":
                stuck.set()
                released.wait(HANG_SECONDS)

        def read() -> None:
            assert stuck.wait(HANG_SECONDS)
            looked = [next(batches) for _ in range(3)]
            released.set()
            assert [list(batch.keys) for batch in looked] == [[], [], []], "it could not look around in time"

        world.engine.before = hold
        run_threads(read, lambda: world.users.put(b"key", b"1"))


def test_large_commits_go_through_the_window_in_order() -> None:
    with open_world() as world:
        follower = Follower(world.site, "users")
        follower.catch_up()
        commit = {key: HUGE[key] for key in sorted(HUGE)[:300]}
        for _ in range(12):
            world.users.put_many(commit)
            world.users.put(b"small", b"1")
        follower.catch_up()
        assert follower.changes == list(world.site.changes("users"))
        assert len(follower.changes) == 12 * 301
