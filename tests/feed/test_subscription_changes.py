"""Changes of a subscription: stored in rounds that all subscriptions share, and compacted."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import count
from threading import Event, Thread
from typing import Final

import msgspec
import pytest
from tests.feed.support_pending import NAME, Desk, make_desk, settler
from tests.site.support import WatchedLine
from tests.waiting import HANG_SECONDS

from floodmark.engine import Guard, WriteRow
from floodmark.feed.subscription import rows as subscription_changes
from floodmark.feed.subscription.acknowledgement import Acknowledgement, ChangePosition, LiveCommit, Progress
from floodmark.feed.subscription.subscriptions import SubscriptionSpec
from floodmark.model.errors import Corruption, FloodmarkError, LeaseHeld
from floodmark.model.limits import PAGE_BYTES_MAX
from floodmark.model.partition import Decision
from floodmark.partition import FAMILIES, META
from floodmark.testing import Fault, FaultPlan, FaultyEngine, SimulatedCrash

MANY: Final = 29_000
A, B, C = (ChangePosition(10, index) for index in range(3))
D, E = (ChangePosition(20, index) for index in range(2))


class MeasuredEngine(FaultyEngine):
    """Counts syncs and the bytes of writes.  While its gate is shut, syncs wait there, but for some."""

    def __init__(self) -> None:
        super().__init__(FAMILIES)
        self.syncs = self.bytes = self.let_through = 0
        self.gate, self.arrived = Event(), Event()
        self.gate.set()

    def write(self, rows: Iterable[WriteRow], guards: Sequence[Guard] = ()) -> bool:
        listed = list(rows)
        self.bytes += sum(len(key) + len(value or b"") for _, key, value in listed)
        return super().write(listed, guards)

    def sync(self) -> None:
        self.syncs += 1
        if not self.gate.is_set():
            self.let_through -= 1
            if self.let_through < 0:
                self.arrived.set()
                assert self.gate.wait(HANG_SECONDS)
        super().sync()


def change_rows(desk: Desk) -> list[tuple[bytes, bytes]]:
    return desk.engine.scan(
        META, b"subscription-changes/", b"subscription-changes0", rows_max=10_000, bytes_max=PAGE_BYTES_MAX
    )


def deliver_one(desk: Desk, name: str) -> None:
    """Open a subscription, and deliver a change that a transaction of the same name acknowledges."""
    epoch = desk.store.open(SubscriptionSpec(name=name, namespace="users"), 0, "one", 30.0).epoch
    progress = Progress(through=10, delivered=[LiveCommit(10, 1, [0, 1])])
    desk.store.acknowledge_in(name, name, epoch, progress, Acknowledgement(positions=[A]))


def watch(desk: Desk) -> WatchedLine:
    """Make the line of those who wait for the turn one that can be waited for."""
    line = WatchedLine()
    desk.store._storage.turn.line = line
    return line


def test_the_ends_of_transactions_share_a_sync_over_all_subscriptions() -> None:
    engine = MeasuredEngine()
    desk = Desk(engine=engine)
    names = [f"consumer-{number}" for number in range(9)]
    for name in names:
        deliver_one(desk, name)
    line = watch(desk)
    engine.gate.clear()
    before = engine.syncs
    threads = [Thread(target=desk.store.commit_pending, args=(name, name)) for name in names]
    threads[0].start()
    assert engine.arrived.wait(HANG_SECONDS)
    for thread in threads[1:]:
        thread.start()
    line.wait_length(len(names) - 1)
    engine.gate.set()
    for thread in threads:
        thread.join(HANG_SECONDS)
        assert not thread.is_alive()
    # The first one's, and one for all who came while it was at work.
    assert engine.syncs - before == 2
    assert all(row.live == [] for row in desk.image(0).store.list())


def test_what_a_transaction_acknowledges_is_written_and_not_what_others_left() -> None:
    engine = MeasuredEngine()
    desk = Desk(engine=engine)
    spec = SubscriptionSpec(name=NAME, namespace="users", unacked_max=MANY)
    epoch = desk.store.open(spec, 0, "one", 30.0).epoch
    delivered = [LiveCommit(version, 1, [0, 1]) for version in range(1, MANY + 1)]
    desk.store.acknowledge(NAME, epoch, Progress(through=MANY, delivered=delivered))
    desk.acknowledge_in("mine", ChangePosition(7, 0))
    before = engine.bytes
    desk.store.commit_pending(NAME, "mine")
    assert 0 < engine.bytes - before < 1_000
    assert len(desk.image(0).live()) == MANY - 1


def test_changes_are_compacted_before_there_are_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subscription_changes, "CHANGES_MAX", 5)
    desk = make_desk(counts=(30,))
    for index in range(30):
        desk.acknowledge(ChangePosition(10, index))
        assert len(change_rows(desk)) < 5
        assert desk.image(0).store.find(NAME) == desk.store.find(NAME)
    assert desk.live() == []


def test_changes_are_compacted_before_they_are_long(monkeypatch: pytest.MonkeyPatch) -> None:
    desk = make_desk(counts=(30,))
    monkeypatch.setattr(subscription_changes, "CHANGES_BYTES_MAX", 500)
    for index in range(30):
        desk.acknowledge(ChangePosition(10, index))
        assert sum(len(value) for _, value in change_rows(desk)) < 500
        assert desk.image(0).store.find(NAME) == desk.store.find(NAME)


def test_what_moves_or_ends_a_subscription_leaves_no_changes() -> None:
    desk = make_desk()
    desk.acknowledge(A)
    assert change_rows(desk)
    desk.store.seek(NAME, 5, desk.epoch)
    assert change_rows(desk) == []
    desk.deliver(1, after=5)
    desk.store.release(NAME, desk.epoch)
    assert change_rows(desk) == []
    assert desk.image(0).store.find(NAME) == desk.store.find(NAME)
    desk.open()
    desk.acknowledge()
    desk.time.advance(30_000)
    desk.store.remove(NAME)
    assert change_rows(desk) == []


def test_changes_that_a_row_includes_are_not_read_again() -> None:
    """A crash cannot leave them behind, but a tombstone that is lost in a repair could."""
    desk = make_desk()
    [*_, (key, encoded)] = change_rows(desk)
    desk.acknowledge(A, B, C, D, E)
    desk.store.release(NAME, desk.epoch)
    desk.engine.write([(META, key, encoded)])
    desk.engine.sync()
    assert desk.image(0).store.find(NAME) == desk.store.find(NAME)


def test_a_row_from_before_there_were_changes_is_read() -> None:
    desk = make_desk()
    desk.store.release(NAME, desk.epoch)
    [(key, stored)] = desk.engine.scan(
        META, b"subscriptions/", b"subscriptions0", rows_max=10, bytes_max=10_000
    )
    fields = msgspec.json.decode(stored, type=dict[str, object])
    del fields["changed"]
    desk.engine.write([(META, key, msgspec.json.encode(fields))])
    desk.engine.sync()
    assert desk.image(0).store.find(NAME) == desk.store.find(NAME)


def test_a_change_that_is_damaged_is_not_ignored() -> None:
    desk = make_desk()
    [*_, (key, encoded)] = change_rows(desk)
    desk.engine.write([(META, key, encoded[:-1])])
    desk.engine.sync()
    with pytest.raises(Corruption, match="Restore the site from a backup"):
        desk.image(0)


def test_a_consumer_that_comes_while_another_takes_over_is_refused() -> None:
    """It is judged where it is written: there, its successor has the subscription already."""
    engine = MeasuredEngine()
    desk = Desk(engine=engine)
    epoch = desk.open()
    desk.deliver(3)
    errors: list[FloodmarkError] = []

    def acknowledge() -> None:
        try:
            progress = Progress(through=10, acknowledgement=Acknowledgement(positions=[A]))
            desk.store.acknowledge(NAME, epoch, progress)
        except FloodmarkError as error:
            errors.append(error)

    # The safe point is set first; then comes the row.
    line = watch(desk)
    engine.let_through = 1
    engine.gate.clear()
    successor, zombie = Thread(target=desk.open), Thread(target=acknowledge)
    successor.start()
    assert engine.arrived.wait(HANG_SECONDS)
    zombie.start()
    line.wait_length(1)
    engine.gate.set()
    for thread in (successor, zombie):
        thread.join(HANG_SECONDS)
        assert not thread.is_alive()
    assert [type(error) for error in errors] == [LeaseHeld]
    assert desk.live() == desk.image(0).live() == [A, B, C]


# A failure at each write, where each change is compacted


def renew(desk: Desk) -> None:
    desk.store.acknowledge(NAME, desk.epoch, Progress(through=0))


def steps() -> Iterator[tuple[str, Callable[[Desk], None], list[ChangePosition]]]:
    yield "acknowledge", lambda desk: desk.acknowledge(A, D), [B, C, E]
    yield "commit", lambda desk: desk.store.commit_pending(NAME, "mine"), [A, B, C, E]
    yield "renew", renew, [A, B, C, D, E]


@pytest.mark.parametrize("kind", Fault)
@pytest.mark.parametrize(("operation", "run", "after"), list(steps()))
def test_a_change_is_there_whole_or_not_at_all(
    operation: str,
    run: Callable[[Desk], None],
    after: list[ChangePosition],
    kind: Fault,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(subscription_changes, "CHANGES_MAX", 1)
    for at in count(1):
        desk = make_desk(counts=(3, 2))
        if operation == "commit":
            desk.acknowledge_in("mine", D)
        before = desk.live()
        desk.engine.arm(FaultPlan(at=at, kind=kind))
        allowed = [after]
        try:
            run(desk)
        except (FloodmarkError, SimulatedCrash):
            allowed = [before, after]
        fired = desk.engine.fired
        for keep in range(desk.engine.unsynced + 1):
            image = desk.image(keep)
            assert image.live() in allowed
            image.store.settle_pending(settler({"mine": Decision.COMMIT}))
            assert image.live() in allowed
        if not fired:
            break
        if kind is not Fault.CRASH:
            desk.engine.heal()
            run(desk)
            assert desk.live() == desk.image(0).live() == after
    assert at > 1, "nothing was written"
