"""The bookkeeping of acknowledgements against sets of positions, and what a consumer tells its site."""

from collections.abc import Callable

import msgspec
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test
from tests.sizes import SEARCH

from floodmark.feed.subscription.acknowledgement import (
    Acknowledgement,
    ChangePosition,
    Deliveries,
    DeliveryAccount,
    LiveCommit,
    Progress,
)
from floodmark.model.errors import InvalidArgument
from floodmark.model.limits import REQUEST_BYTES_MAX, UNACKED_MAX

INDEXES = st.integers(0, 12)


def one(version: int, index: int) -> Acknowledgement:
    return Acknowledgement(positions=[ChangePosition(version, index)])


def through(version: int, index: int) -> Acknowledgement:
    return Acknowledgement(through=ChangePosition(version, index))


def live_positions(deliveries: Deliveries) -> list[ChangePosition]:
    return [
        ChangePosition(commit.version, index)
        for commit in deliveries.live()
        for index in range(commit.count)
        if commit.is_live(index)
    ]


# Runs


def commit_of(live: set[int], count: int) -> LiveCommit:
    commit = LiveCommit(7, 0, [])
    commit.extend(count, [0, count])
    for index in set(range(count)) - live:
        commit.acknowledge(index, index + 1)
    return commit


@given(live=st.sets(INDEXES), start=INDEXES, length=st.integers(0, 13))
@example(live={3, 4, 5}, start=4, length=1)
@example(live={3, 4, 5}, start=0, length=13)
def test_runs_are_a_set_of_indexes(live: set[int], start: int, length: int) -> None:
    commit = commit_of(live, 13)
    gone = live & set(range(start, start + length))
    assert commit.unacked == len(live)
    assert commit.acknowledge(start, start + length) == len(gone)
    assert {index for index in range(20) if commit.is_live(index)} == live - gone
    assert commit.unacked == len(live - gone)


@given(live=st.sets(INDEXES))
def test_runs_take_no_more_room_than_what_is_live(live: set[int]) -> None:
    assert len(commit_of(live, 13).runs) <= 2 * len(live)


@given(known=st.sets(INDEXES), told=st.sets(st.integers(0, 25)), count=st.integers(0, 26))
def test_a_commit_that_grows_keeps_what_is_known_of_its_first_changes(
    known: set[int], told: set[int], count: int
) -> None:
    commit = commit_of(known, 13)
    told = {index for index in told if index < count}
    commit.extend(count, commit_of(told, count).runs if count else [])
    added = {index for index in told if index >= 13}
    assert {index for index in range(40) if commit.is_live(index)} == known | added
    assert commit.count == max(count, 13)
    assert all(earlier < later for earlier, later in zip(commit.runs, commit.runs[1:], strict=False))


# Deliveries


def delivered(*positions: tuple[int, int], complete: int = 0) -> Deliveries:
    deliveries = Deliveries(0)
    for version, index in positions:
        deliveries.deliver(ChangePosition(version, index))
    deliveries.complete(complete)
    return deliveries


def test_a_commit_is_complete_when_the_next_one_begins() -> None:
    deliveries = delivered((5, 0), (5, 1))
    assert deliveries.through == 4
    deliveries.deliver(ChangePosition(9, 0))
    assert deliveries.through == 8


def test_a_commit_that_is_being_delivered_is_remembered_even_if_nothing_of_it_is_live() -> None:
    deliveries = delivered((5, 0), (5, 1))
    deliveries.acknowledge(through(5, 1))
    assert deliveries.live() == [LiveCommit(5, 2, [])]
    assert deliveries.is_delivered(ChangePosition(5, 1))
    assert not deliveries.is_delivered(ChangePosition(5, 2))
    deliveries.complete(5)
    assert deliveries.live() == []
    assert deliveries.is_delivered(ChangePosition(5, 1))


def test_acknowledging_through_a_position_leaves_what_comes_after_it() -> None:
    deliveries = delivered((3, 0), (5, 0), (5, 1), (5, 2), (6, 0), complete=6)
    assert deliveries.acknowledge(through(5, 1)) == 3
    assert live_positions(deliveries) == [ChangePosition(5, 2), ChangePosition(6, 0)]
    assert deliveries.unacked == 2


@pytest.mark.parametrize(("version", "index"), [(5, 2), (6, 0), (5, -1), (0, -1)])
def test_what_was_never_delivered_cannot_be_acknowledged(version: int, index: int) -> None:
    deliveries = delivered((5, 0), (5, 1))
    for wanted in (one(version, index), through(version, index)):
        with pytest.raises(InvalidArgument, match="was not delivered"):
            deliveries.require_delivered(wanted)


def test_a_commit_out_of_order_is_refused() -> None:
    deliveries = delivered((5, 0), (9, 0))
    deliveries.through = 1
    with pytest.raises(InvalidArgument, match="out of order"):
        deliveries.learn(Progress(through=9, delivered=[LiveCommit(7, 1, [0, 1])]))


@pytest.mark.parametrize(
    "commits",
    [
        [LiveCommit(5, 1, [0, 1]), LiveCommit(5, 1, [0, 1])],
        [LiveCommit(6, 1, [0, 1]), LiveCommit(5, 1, [0, 1])],
        [LiveCommit(10, 1, [0, 1]), LiveCommit(11, 1, [0, 1])],
        [LiveCommit(5, 0, [])],
        [LiveCommit(0, 1, [0, 1])],
        [LiveCommit(5, 2, [0, 3])],
        [LiveCommit(5, 2, [0])],
        [LiveCommit(5, 2, [1, 1])],
        [LiveCommit(5, 2, [-1, 1])],
    ],
)
def test_deliveries_that_nobody_can_have_meant_are_refused(commits: list[LiveCommit]) -> None:
    with pytest.raises(InvalidArgument, match="commit by commit"):
        Progress(through=9, delivered=commits).require_sound()


def test_the_last_commit_may_be_incomplete() -> None:
    Progress(through=9, delivered=[LiveCommit(5, 1, [0, 1]), LiveCommit(10, 1, [])]).require_sound()


# What a consumer tells


def test_a_consumer_that_acknowledges_one_after_the_other_tells_only_how_far_it_is() -> None:
    account = DeliveryAccount(0)
    for version in range(10, 1_000, 10):
        account.deliver(ChangePosition(version, 0))
        account.acknowledge(one(version, 0))
    account.deliveries.complete(1_000)
    assert account.take() == Progress(through=1_000)
    assert account.take() is None


def test_only_what_the_site_knows_of_is_acknowledged_by_position() -> None:
    account = DeliveryAccount(0)
    account.deliver(ChangePosition(5, 0))
    account.take()
    account.deliver(ChangePosition(5, 1))
    account.deliver(ChangePosition(5, 2))
    for index in range(2):
        account.acknowledge(one(5, index))
    progress = account.take()
    assert progress is not None
    assert progress.delivered == [LiveCommit(5, 3, [2, 3])]
    assert progress.acknowledgement.positions == [ChangePosition(5, 0)]


def test_an_acknowledgement_that_changes_nothing_is_not_told() -> None:
    account = DeliveryAccount(9)
    account.acknowledge(one(5, 0))
    account.acknowledge(through(9, 3))
    assert account.untold == 0
    assert account.take() is None


def test_the_most_that_a_consumer_can_have_to_tell_fits_into_one_request() -> None:
    first, step = (1 << 63) + 1, 1 << 20
    account = DeliveryAccount(first)
    for number in range(2 * UNACKED_MAX):
        account.deliver(ChangePosition(first + number * step, 0))
        if number == UNACKED_MAX - 1:
            account.take()
            # Acknowledged one by one while the site cannot be reached.
            for earlier in range(UNACKED_MAX):
                account.acknowledge(one(first + earlier * step, 0))
    progress = account.take()
    assert progress is not None
    assert len(progress.delivered) == len(progress.acknowledgement.positions) == UNACKED_MAX
    assert len(msgspec.msgpack.encode(progress)) < REQUEST_BYTES_MAX


class Telling(RuleBasedStateMachine):
    """A consumer and its site, whose answers get lost: the site must end up with what the consumer has."""

    @initialize()
    def begin(self) -> None:
        self.account = DeliveryAccount(0)
        self.site = Deliveries(0)
        self.unanswered: Progress | None = None
        self.last = ChangePosition(0, 0)
        self.delivered: list[ChangePosition] = []
        self.live: set[ChangePosition] = set()

    @rule(step=st.integers(0, 2))
    def deliver(self, step: int) -> None:
        if step or self.last.version <= self.account.deliveries.through:
            self.last = ChangePosition(max(self.last.version, self.account.deliveries.through) + step + 1, 0)
        else:
            self.last = ChangePosition(self.last.version, self.last.index + 1)
        self.account.deliver(self.last)
        self.delivered.append(self.last)
        self.live.add(self.last)

    @rule()
    def complete(self) -> None:
        self.account.deliveries.complete(self.last.version)

    @rule(data=st.data(), cumulative=st.booleans())
    def acknowledge(self, data: st.DataObject, cumulative: bool) -> None:
        if self.delivered:
            position = data.draw(st.sampled_from(self.delivered))
            if cumulative:
                self.account.acknowledge(Acknowledgement(through=position))
                self.live = {other for other in self.live if other > position}
            else:
                self.account.acknowledge(Acknowledgement(positions=[position]))
                self.live.discard(position)

    @rule(arrives=st.booleans(), answered=st.booleans())
    def tell(self, arrives: bool, answered: bool) -> None:
        self.unanswered = self.unanswered or self.account.take()
        if self.unanswered is not None and arrives:
            self._receive(self.unanswered)
            if answered:
                self.unanswered = None

    def _receive(self, progress: Progress) -> None:
        progress.require_sound()
        # A site keeps rows, not objects.
        self.site = Deliveries(self.site.through, self.site.live())
        self.site.learn(progress)
        self.site.require_delivered(progress.acknowledgement)
        self.site.acknowledge(progress.acknowledgement)

    @rule()
    def tell_all(self) -> None:
        if self.unanswered is not None:
            self._receive(self.unanswered)
        self.unanswered = self.account.take()
        if self.unanswered is not None:
            self._receive(self.unanswered)
        self.unanswered = None
        assert live_positions(self.site) == sorted(self.live)
        assert self.site.through == self.account.deliveries.through
        assert self.site.live() == self.account.deliveries.live()

    @invariant()
    def consumer_knows_what_is_live(self) -> None:
        if hasattr(self, "account"):
            assert live_positions(self.account.deliveries) == sorted(self.live)
            assert self.account.deliveries.unacked == len(self.live)

    @invariant()
    def site_never_takes_as_done_what_is_live(self) -> None:
        if hasattr(self, "account"):
            for position in self.live:
                assert self.site.is_live(position) or not self.site.is_delivered(position)


TestTelling = Telling.TestCase
TestTelling.settings = settings(stateful_step_count=30)


def forget_positions(account: DeliveryAccount) -> None:
    account._positions = []


def forget_deliveries(account: DeliveryAccount) -> None:
    account._grown = {}


@pytest.mark.parametrize("forget", [forget_positions, forget_deliveries])
def test_the_machine_notices_a_consumer_that_forgets(
    forget: Callable[[DeliveryAccount], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    take = DeliveryAccount.take

    def take_less(account: DeliveryAccount) -> Progress | None:
        forget(account)
        return take(account)

    monkeypatch.setattr(DeliveryAccount, "take", take_less)
    with pytest.raises(AssertionError):
        run_state_machine_as_test(Telling, settings=SEARCH)


def test_what_was_taken_in_or_handed_out_does_not_change() -> None:
    given = [LiveCommit(5, 3, [0, 3]), LiveCommit(10, 1, [0, 1])]
    deliveries = Deliveries(9, given)
    handed_out, copied = deliveries.live(), deliveries.copy()
    deliveries.deliver(ChangePosition(10, 1))
    deliveries.learn(Progress(through=9, delivered=[LiveCommit(10, 4, [2, 4])]))
    deliveries.acknowledge(Acknowledgement(positions=[ChangePosition(5, 1)], through=ChangePosition(5, 0)))
    assert deliveries.live() == [LiveCommit(5, 3, [2, 3]), LiveCommit(10, 4, [0, 4])]
    for kept in (given, handed_out, copied.live()):
        assert kept == [LiveCommit(5, 3, [0, 3]), LiveCommit(10, 1, [0, 1])]
    assert (copied.through, copied.unacked, deliveries.unacked) == (9, 4, 5)


def test_a_commit_is_copied_once_after_it_was_handed_out_however_much_is_delivered_of_it() -> None:
    given = LiveCommit(5, 10, list(range(10)))
    deliveries = Deliveries(0, [given])
    for hand_out in (lambda: None, deliveries.live, deliveries.copy):
        before = deliveries.find(5)
        hand_out()
        count = before.count if before is not None else 0
        deliveries.deliver(ChangePosition(5, count))
        own = deliveries.find(5)
        assert own is not before
        for index in range(count + 1, count + 10):
            deliveries.deliver(ChangePosition(5, index))
            deliveries.acknowledge(Acknowledgement(positions=[ChangePosition(5, index)]))
        assert deliveries.find(5) is own
    assert given == LiveCommit(5, 10, list(range(10)))
    assert deliveries.unacked == 5 + 3


def test_an_account_forgets_what_it_told_of_commits_that_are_done_with() -> None:
    account = DeliveryAccount(0)
    for version in range(1, 1_001):
        account.deliver(ChangePosition(version, 0))
        account.take()
        account.acknowledge(Acknowledgement(positions=[ChangePosition(version, 0)]))
        account.take()
    assert len(account._told) <= 3
