"""Many threads at once: decisions that race, traffic of all kinds, and a site that is closed under it."""

from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import partial
from random import Random
from threading import Barrier, Event, Lock
from time import sleep

import pytest
from tests.log.support import run_threads
from tests.transaction.support import ABORT, COMMIT, LONG, World, decide, partition, subscription
from tests.waiting import HANG_SECONDS, wait_until

from floodmark.clock import monotonic_ms
from floodmark.engine import Engine, MemoryEngine
from floodmark.log import FAMILY
from floodmark.model.errors import Closed, PartlyDone, Retryable, TransactionEnded, TransactionNotFound
from floodmark.model.partition import Decision
from floodmark.model.transaction import Participant
from floodmark.testing.ledgers import EngineStore
from floodmark.transaction import TransactionCoordinator, start_sweeping

P, Q, S = partition("0a"), partition("0b"), subscription("indexer")
ROUNDS = 150


class SlowEngine(MemoryEngine):
    """An engine that lets other threads run while it syncs, as a disk does."""

    def sync(self) -> None:
        sleep(0.0002)
        super().sync()


class Crowded(World):
    """A world by the real clock, whose callers are patient, with a thread that sweeps."""

    def open(self, engine: Engine | None = None) -> TransactionCoordinator:
        coordinator = TransactionCoordinator(
            7,
            EngineStore(engine or self.engine),
            self.parts,
            settings=self.settings,
            mint=lambda: next(self.names),
            time_source=self.wall,
            growing_ms=monotonic_ms,
            wait_seconds_max=HANG_SECONDS,
        )
        self.sweeping = start_sweeping(coordinator)
        return coordinator

    def close(self) -> None:
        self.coordinator.close()
        self.sweeping.join(HANG_SECONDS)
        assert not self.sweeping.is_alive()

    def wait_all_ended(self) -> None:
        wait_until(
            lambda: not self.coordinator.transactions(),
            lambda: f"these have not ended: {self.coordinator.transactions()}",
        )


@pytest.fixture(params=[True, False], ids=["batched", "bare"])
def world(request: pytest.FixtureRequest) -> Iterator[Crowded]:
    world = Crowded(SlowEngine((FAMILY,)), enabled=request.param)
    yield world
    world.close()
    assert not world.parts.wrong


def race(*calls: Callable[[], object]) -> list[object]:
    """Run calls at one moment; what each of them returned or raised."""
    barrier = Barrier(len(calls))
    heard: list[object] = [None] * len(calls)

    def run(number: int) -> None:
        barrier.wait(HANG_SECONDS)
        try:
            heard[number] = calls[number]()
        except Exception as error:
            heard[number] = error

    run_threads(run, len(calls))
    return heard


def test_of_a_commit_and_an_operators_abort_one_wins_and_both_callers_hear_which(world: Crowded) -> None:
    coordinator = world.coordinator
    wins = {COMMIT: 0, ABORT: 0}
    for _ in range(ROUNDS):
        transaction = coordinator.begin(LONG)
        coordinator.join(transaction, P)
        committed, aborted = race(
            partial(coordinator.commit, transaction, 5),
            partial(coordinator.abort, transaction, "by an operator"),
        )
        [(decision, _)] = world.parts.decisions(transaction)
        wins[decision] += 1
        assert coordinator.fate(transaction).decision is decision
        if decision is COMMIT:
            assert committed == 5
            assert isinstance(aborted, TransactionEnded)
        else:
            assert aborted is None
            assert isinstance(committed, TransactionEnded)
            assert "by an operator" in str(committed)
    assert sum(wins.values()) == ROUNDS
    assert world.live() == []


def test_all_who_commit_or_abort_at_once_hear_the_same(world: Crowded) -> None:
    coordinator = world.coordinator
    for number in range(ROUNDS // 10):
        transaction = coordinator.begin(LONG)
        coordinator.join(transaction, P)
        commits = [partial(coordinator.commit, transaction, version) for version in (1, 2, 3, 4)]
        aborts = [partial(coordinator.abort, transaction)] * 4
        heard = race(*commits, *aborts) if number % 2 else race(*commits)
        versions = {each for each in heard[:4] if isinstance(each, int)}
        refused = [each for each in heard if isinstance(each, TransactionEnded)]
        [(decision, version)] = world.parts.decisions(transaction)
        assert versions == ({version} if decision is COMMIT else set())
        assert len(refused) == (4 if len(heard) == 8 else 0)
    assert world.live() == []


def test_whoever_joins_while_it_is_decided_is_refused_or_told(world: Crowded) -> None:
    coordinator = world.coordinator
    for _ in range(ROUNDS):
        transaction = coordinator.begin(LONG)
        coordinator.join(transaction, P)
        joined, committed = race(
            partial(coordinator.join, transaction, Q),
            partial(coordinator.commit, transaction, 5),
        )
        assert committed == 5
        assert (joined is None) == ((transaction, Q) in world.parts.told)
        assert joined is None or isinstance(joined, TransactionEnded)
    assert world.live() == [], "a record that comes late would be found without its transaction"


def test_a_part_that_races_the_end_is_done_before_it_or_not_at_all(world: Crowded) -> None:
    coordinator = world.coordinator
    for _ in range(ROUNDS):
        transaction = coordinator.begin(LONG)
        undone: set[str] = set()

        def take_part(transaction: str = transaction, undone: set[str] = undone) -> None:
            with coordinator.taking_part(transaction, P):
                assert (transaction, P) not in world.parts.told
                undone.add(transaction)

        took_part, aborted = race(take_part, partial(coordinator.abort, transaction, "by an operator"))
        assert aborted is None
        assert took_part is None or isinstance(took_part, TransactionEnded | Retryable)
        if undone:
            assert (transaction, P) in world.parts.told, "nobody undoes what was done"
    assert world.live() == []


class Users:
    """Threads that have transactions of all kinds, as their seeds say, and check every answer."""

    def __init__(self, world: Crowded) -> None:
        self.world = world
        self._lock = Lock()
        self.committed: dict[str, set[Participant]] = {}
        self.aborted: dict[str, set[Participant]] = {}

    def run(self, number: int) -> None:
        randomness = Random(number)
        for _ in range(12):
            self._run_one(randomness)

    def _run_one(self, randomness: Random) -> None:
        coordinator = self.world.coordinator
        is_gone = randomness.random() < 0.5
        transaction = coordinator.begin(LONG)
        joining = set(randomness.sample([P, Q, S], randomness.randrange(4)))
        for participant in joining:
            coordinator.join(transaction, participant)
        assert coordinator.fate(transaction).decision is Decision.UNDECIDED
        is_commit = randomness.random() < 0.7
        if is_gone:
            assert decide(coordinator, transaction, 5 if is_commit else 0) == (5 if is_commit else 0)
        elif is_commit:
            assert coordinator.commit(transaction, 5) == 5
        else:
            coordinator.abort(transaction)
        if not is_gone:
            told = {
                participant for participant in joining if (transaction, participant) in self.world.parts.told
            }
            assert told == joining, "it returned before all had done their part"
        if randomness.random() < 0.1:
            coordinator.log.enabled = randomness.random() < 0.5
        with self._lock:
            (self.committed if is_commit else self.aborted)[transaction] = joining


def test_64_threads_with_participants_that_fail_now_and_then(world: Crowded) -> None:
    randomness, lock = Random(7), Lock()

    def on_call(_: Participant) -> None:
        with lock:
            fails = randomness.random() < 0.1
        if fails:
            raise ConnectionError("now and then")

    world.parts.on_call = on_call
    users = Users(world)
    run_threads(users.run, 64)
    world.wait_all_ended()
    expected = {
        **{(each, who): (COMMIT, 5) for each, joined in users.committed.items() for who in joined},
        **{(each, who): (ABORT, 0) for each, joined in users.aborted.items() for who in joined},
    }
    assert world.parts.told == expected
    assert len(users.committed) + len(users.aborted) == 64 * 12
    assert world.live() == []
    assert world.entries() == 0


def test_close_under_traffic_leaves_nothing_that_the_next_one_cannot_finish(world: Crowded) -> None:
    coordinator, started = world.coordinator, Event()
    committed: dict[str, int] = {}

    def work(number: int) -> None:
        if number == 16:
            assert started.wait(HANG_SECONDS)
            coordinator.close()
            return
        for index in range(10_000):
            try:
                transaction = coordinator.begin(LONG)
                coordinator.join(transaction, P)
                committed[transaction] = coordinator.commit(transaction, number + 1)
            except Closed:
                return
            except PartlyDone:
                committed[transaction] = number + 1
            if index == 3:
                started.set()

    run_threads(work, 17)
    world.sweeping.join(HANG_SECONDS)
    world.coordinator = world.open()
    for each in world.coordinator.transactions():
        assert each.id not in committed or each.version == committed[each.id]
        if each.id not in committed:
            world.coordinator.abort(each.id)
    world.wait_all_ended()
    for transaction, version in committed.items():
        assert world.parts.decisions(transaction) == {(COMMIT, version)}


def test_timeouts_race_commits_and_nobody_hears_both(world: Crowded) -> None:
    coordinator = world.coordinator
    ended: dict[str, Decision] = {}

    def work(number: int) -> None:
        randomness = Random(number)
        for _ in range(15):
            transaction = coordinator.begin(timedelta(milliseconds=randomness.randrange(1, 8)))
            try:
                coordinator.join(transaction, P)
                coordinator.commit(transaction, 5)
            except (TransactionEnded, TransactionNotFound):
                ended[transaction] = ABORT
            except Retryable:
                continue
            else:
                ended[transaction] = COMMIT

    run_threads(work, 16)
    world.wait_all_ended()
    for transaction, decision in ended.items():
        assert {told for told, _ in world.parts.decisions(transaction)} <= {decision}
    assert world.live() == []
