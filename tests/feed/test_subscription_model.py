"""A subscription against a plain model, through crashes of the consumer and of the site.

The model knows what was written, how far the consumer is and what is live, in its own eyes and as the
site was last told.  Every delivery must be exactly the one that the model expects next: so nothing that
was not acknowledged is lost, nothing that the site knows to be acknowledged comes again, and the order
is kept.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from tests.feed.support_subscription import BY_HAND, Stage, make_stage, positions_of, write
from tests.sizes import SEARCH, scaled

from floodmark.feed.subscription.acknowledgement import (
    ChangePosition,
    Deliveries,
    DeliveryAccount,
    LiveCommit,
    Progress,
)
from floodmark.feed.subscription.consumer import Delivery, Since, Subscription, SubscriptionOptions
from floodmark.model.errors import FloodmarkError
from floodmark.model.ranges import KeyRange
from floodmark.model.version import Version
from floodmark.partition import FAMILIES
from floodmark.testing import FaultyEngine

# The consumer reads from "b" on: what others write must not count.
KEYS = KeyRange(b"b", None)
WRITTEN_KEYS = st.lists(st.sampled_from([b"a", b"b", b"c", b"d", b"e", b"f"]), min_size=1, max_size=6)


@dataclass
class Known:
    """How far a subscription is, as somebody knows it: the changes taken, and those of them still live."""

    taken: int = 0
    live: set[ChangePosition] = field(default_factory=set)

    def copy(self) -> "Known":
        return Known(self.taken, set(self.live))


class Consuming(RuleBasedStateMachine):
    """Writes, takes, acknowledges, crashes, seeks, and compares."""

    @initialize(
        cut=st.sampled_from([None, 1, 2, 3]),
        flush_count=st.sampled_from([2, 5, 1_000]),
        log_retention=st.sampled_from([None, timedelta(0)]),
    )
    def begin(self, cut: int | None, flush_count: int, log_retention: timedelta | None) -> None:
        self.stage: Stage = make_stage(FaultyEngine(FAMILIES), cut=cut, log_retention=log_retention)
        self.options = SubscriptionOptions(follow=False, background=False, flush_count=flush_count)
        self.written: list[ChangePosition] = []
        self.seen: list[Delivery] = []
        self.consumer, self.told, self.untold = Known(), Known(), 0
        self.reopen()

    def reopen(self) -> None:
        self.subscription: Subscription = self.stage.subscribe(keys=KEYS, options=self.options)
        self.consumer, self.untold = self.told.copy(), 0
        self.again: list[ChangePosition] | None = None
        self.again_is_due = True
        self.seen = []

    # What the world does

    @rule(keys=WRITTEN_KEYS, passes_ms=st.sampled_from([0, 0, 1, 500, 70_000]))
    def write(self, keys: list[bytes], passes_ms: int) -> None:
        self.stage.time.advance(passes_ms)
        self._note_written(keys, write(self.stage.users, *keys)[0].version)

    def _note_written(self, keys: list[bytes], version: Version) -> None:
        subscribed = {key for key in keys if key >= b"b"}
        self.written += [ChangePosition(version, index) for index in range(len(subscribed))]

    @rule()
    def collect_garbage(self) -> None:
        self.stage.site.update_namespace("users", retention=timedelta(0))
        self.stage.site.collect_garbage()

    # What the consumer does

    @rule(count=st.integers(1, 8))
    def take(self, count: int) -> None:
        for _ in range(count):
            delivery = next(self.subscription, None)
            if delivery is None:
                return
            self._expect(delivery)

    @rule()
    def take_all(self) -> None:
        # A stream ends where the present was when it was opened: the second one goes on from there.
        for _ in range(2):
            for delivery in self.subscription:
                self._expect(delivery)
        assert not self._left_again()
        assert self.consumer.taken == len(self.written)

    def _expect(self, delivery: Delivery) -> None:
        self.seen.append(delivery)
        left = self._left_again()
        if left:
            assert delivery.is_redelivered
            assert delivery.position == left[0]
            assert self.again is not None
            self.again = self.again[self.again.index(left[0]) + 1 :]
            return
        assert not delivery.is_redelivered
        assert delivery.position == self.written[self.consumer.taken]
        self.consumer.taken += 1
        self.consumer.live.add(delivery.position)

    def _left_again(self) -> list[ChangePosition]:
        """What is to be delivered again, of what is still live."""
        if self.again_is_due:
            self.again, self.again_is_due = sorted(self.consumer.live), False
        return [position for position in self.again or [] if position in self.consumer.live]

    @precondition(lambda self: self.seen)
    @rule(data=st.data(), by_position=st.booleans())
    def acknowledge(self, data: st.DataObject, by_position: bool) -> None:
        for delivery in data.draw(st.lists(st.sampled_from(self.seen), min_size=1, max_size=4)):
            self.subscription.acknowledge(delivery.position if by_position else delivery)
            self._note_acknowledged({delivery.position})

    @precondition(lambda self: self.seen)
    @rule(data=st.data())
    def acknowledge_through(self, data: st.DataObject) -> None:
        delivery = data.draw(st.sampled_from(self.seen))
        self.subscription.acknowledge_through(delivery)
        self._note_acknowledged(
            {position for position in self.consumer.live if position <= delivery.position}
        )

    def _note_acknowledged(self, positions: set[ChangePosition]) -> None:
        self.untold += len(positions & self.consumer.live)
        self.consumer.live -= positions
        if self.untold >= self.options.flush_count:
            self._note_told()

    def _note_told(self) -> None:
        self.told, self.untold = self.consumer.copy(), 0

    @rule()
    def flush(self) -> None:
        self.subscription.flush()
        self._note_told()

    @rule()
    def redeliver(self) -> None:
        self.subscription.redeliver()
        self.again_is_due = True

    # The ends are one rule, so that what happens between them goes on for a while.

    @rule(how=st.sampled_from(["crash", "close", "power cut"]))
    def end(self, how: str) -> None:
        if how == "close":
            self.subscription.close()
            self._note_told()
        if how == "power cut":
            self.stage.power_cut()
        self.reopen()

    @rule(data=st.data())
    def seek(self, data: st.DataObject) -> None:
        oldest = self.stage.site.host.retention.oldest_version("users")
        places: list[Since] = [oldest, "end", *sorted({position.version for position in self.written})]
        to = data.draw(st.sampled_from(places))
        version = self.stage.to_version(to) if to else 0
        if version < oldest:
            return
        self.subscription.seek(to)
        taken = sum(position.version <= version for position in self.written)
        self.consumer = Known(taken)
        self._note_told()
        self.again, self.again_is_due, self.seen = None, False, []

    # What must hold at any time

    @invariant()
    def the_site_knows_what_it_was_told(self) -> None:
        if not hasattr(self, "stage"):
            return
        row = self.stage.subscriptions.find("indexer")
        live = {
            ChangePosition(commit.version, index)
            for commit in row.live
            for index in range(commit.count)
            if commit.is_live(index)
        }
        assert live == self.told.live

    @invariant()
    def the_safe_point_keeps_what_is_needed(self) -> None:
        if not hasattr(self, "stage"):
            return
        row = self.stage.subscriptions.find("indexer")
        held = [point for point in self.stage.site.safe_points() if point.name == "subscription/indexer"]
        assert [point.version <= row.needed_version for point in held] == [True]


TestConsuming = Consuming.TestCase
TestConsuming.settings = scaled(2, stateful_step_count=40)


# The machine must be able to fail.


def lose_a_live_change(monkeypatch: pytest.MonkeyPatch) -> None:
    live = Deliveries.live
    monkeypatch.setattr(Deliveries, "live", lambda self: live(self)[1:])


def forget_an_acknowledgement(monkeypatch: pytest.MonkeyPatch) -> None:
    take = DeliveryAccount.take

    def forgetful(account: DeliveryAccount) -> Progress | None:
        account._positions = account._positions[1:]
        return take(account)

    monkeypatch.setattr(DeliveryAccount, "take", forgetful)


def skip_a_commit_that_was_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    complete = Deliveries.complete
    monkeypatch.setattr(Deliveries, "complete", lambda self, through: complete(self, through + 1))


def deliver_what_is_done_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LiveCommit, "is_live", lambda self, index: index < self.count)


@pytest.mark.parametrize(
    "plant",
    [lose_a_live_change, forget_an_acknowledgement, skip_a_commit_that_was_cut, deliver_what_is_done_again],
)
def test_the_machine_notices_a_planted_fault(
    plant: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch)
    with pytest.raises((AssertionError, FloodmarkError)):
        run_state_machine_as_test(Consuming, settings=SEARCH)


def test_by_hand_nothing_happens_by_itself() -> None:
    stage = make_stage()
    write(stage.users, b"b")
    subscription = stage.subscribe(options=BY_HAND)
    [delivery] = list(subscription)
    delivery.acknowledge()
    del subscription
    assert positions_of(list(stage.subscribe())) == [delivery.position]
