"""A worker that has every mishap there is: each change has its effect exactly once.

Changes are dealt with in transactions, which are committed, aborted or left open; answers get lost, the
consumer dies, the power goes, and nobody tells the consumer how a transaction ended.
"""

from collections.abc import Callable
from random import Random

import pytest
from tests.feed.support_pending import BARE, BATCHED, NAME, losing, make_consumer_stage, settler
from tests.feed.support_subscription import positions_of, write
from tests.sizes import only

from floodmark.feed.subscription import bookkeeping
from floodmark.feed.subscription.acknowledgement import ChangePosition
from floodmark.feed.subscription.bookkeeping import SendIn
from floodmark.feed.subscription.consumer import Subscription
from floodmark.feed.subscription.store import LocalSubscriptionStore
from floodmark.log import BatchSettings
from floodmark.model.errors import AcknowledgementConflict, OutcomeUnknown
from floodmark.model.partition import Decision


class Work:
    """Takes changes, does something about each in a transaction, and has every mishap that there is."""

    def __init__(self, seed: int, settings: BatchSettings) -> None:
        self.chance = Random(seed)
        self.stage, self.desk = make_consumer_stage(settings)
        self.written: list[ChangePosition] = []
        self.fates: dict[str, Decision] = {}
        self.effects: list[ChangePosition] = []
        self.consumer: Subscription = self._subscribe()

    def run(self, steps: int) -> None:
        for number in range(steps):
            self._write()
            self._step(f"t{number}")
            if self.chance.random() < 0.1:
                self._power_cut()
            if self.chance.random() < 0.1:
                self.consumer = self._subscribe()
        self._finish()

    def _finish(self) -> None:
        """Let everything be dealt with, without any mishap."""
        self.fates = {
            each: Decision.ABORT if fate is Decision.UNDECIDED else fate for each, fate in self.fates.items()
        }
        self.desk.store.settle_pending(settler(self.fates))
        self.consumer = self._subscribe()
        for delivery in self.consumer:
            self.effects.append(delivery.position)
            delivery.acknowledge()
        self.consumer.close()
        assert self.desk.live() == []
        assert self.desk.records() == []

    def _subscribe(self) -> Subscription:
        self.stage.store = self.desk.store
        return self.stage.subscribe()

    def _write(self) -> None:
        keys = self.chance.sample([b"a", b"b", b"c", b"d"], self.chance.randrange(4))
        if keys:
            self.written += write(self.stage.users, *keys)
        self.stage.time.advance(self.chance.choice([0, 1, 1_000]))

    def _step(self, transaction: str) -> None:
        deliveries = [each for each in (next(self.consumer, None) for _ in range(3)) if each is not None]
        if not deliveries:
            self.consumer.flush()
            return
        self.fates[transaction] = Decision.UNDECIDED
        through = self.chance.random() < 0.2
        send: SendIn = self.desk.store.acknowledge_in
        if self.chance.random() < 0.1:
            send = losing(send, after=self.chance.random() < 0.5)
        try:
            self.consumer.acknowledge_in(send, transaction, deliveries, through=through)
        except OutcomeUnknown:
            # Whoever does not know cannot commit.
            self._end(transaction, Decision.ABORT, [])
        except AcknowledgementConflict:
            assert through, "these were delivered to nobody else"
            self._end(transaction, Decision.ABORT, [])
        else:
            covered = [
                position
                for position in self.desk.pending()[transaction]
                if through or position in positions_of(deliveries)
            ]
            decision = self.chance.choice([Decision.COMMIT, Decision.COMMIT, Decision.ABORT])
            self._end(transaction, decision, covered)

    def _end(self, transaction: str, decision: Decision, covered: list[ChangePosition]) -> None:
        """Decide; then tell the site, the consumer, both or neither."""
        if self.chance.random() < 0.1:
            return
        committed = decision is Decision.COMMIT
        self.fates[transaction] = decision
        if committed:
            self.effects += covered
        if self.chance.random() < 0.8:
            end = self.desk.store.commit_pending if committed else self.desk.store.abort_pending
            end(NAME, transaction)
            self.consumer.settle(transaction, self.chance.choice([committed, None]))

    def _power_cut(self) -> None:
        self.desk.power_cut(self.chance.randint(0, self.desk.engine.unsynced))
        self.desk.store.settle_pending(settler(self.fates))
        self.consumer = self._subscribe()


@pytest.mark.parametrize("settings", [BATCHED, BARE], ids=["batched", "bare"])
@pytest.mark.parametrize("first", only([0], range(0, 40, 10)))
def test_each_change_has_its_effect_once(first: int, settings: BatchSettings) -> None:
    for seed in range(first, first + 10):
        work = Work(seed, settings)
        work.run(30)
        assert sorted(work.effects) == work.written, f"seed {seed}"


def deliver_what_is_pending(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bookkeeping, "_find_pending", lambda *_: {})


def take_a_commit_for_an_abort(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LocalSubscriptionStore, "commit_pending", LocalSubscriptionStore.abort_pending)


def take_an_abort_for_a_commit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LocalSubscriptionStore, "abort_pending", LocalSubscriptionStore.commit_pending)


@pytest.mark.parametrize(
    "plant", [deliver_what_is_pending, take_a_commit_for_an_abort, take_an_abort_for_a_commit]
)
def test_the_work_notices_a_planted_fault(
    plant: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch)
    with pytest.raises(AssertionError):
        test_each_change_has_its_effect_once(0, BATCHED)
