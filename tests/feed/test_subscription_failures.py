"""What a consumer goes through: answers that get lost, readers that fail, successors, and the end."""

from collections.abc import Iterator

import pytest
from tests.feed.support_subscription import Stage, keys_of, make_stage, take, write

from floodmark.feed.subscription.acknowledgement import Progress
from floodmark.feed.subscription.consumer import SubscriptionOptions
from floodmark.feed.subscription.subscriptions import SubscriptionRow, SubscriptionStore
from floodmark.model.errors import Closed, InvalidArgument, LeaseHeld, OutcomeUnknown, Unreachable
from floodmark.model.stream import ChangeBatch


@pytest.fixture
def stage() -> Stage:
    return make_stage()


def test_a_reader_that_fails_loses_nothing_and_repeats_nothing(stage: Stage) -> None:
    write(stage.users, b"a", b"b", b"c")
    failures = [2, 1]

    def fail_after(batches: Iterator[ChangeBatch]) -> Iterator[ChangeBatch]:
        left = failures.pop() if failures else 100
        for batch in batches:
            if not left:
                raise Unreachable("planned: the server is away")
            left -= 1
            yield batch

    stage.cut = 1
    open_changes = stage.open_changes
    stage.open_changes = lambda request: fail_after(open_changes(request))  # type: ignore[method-assign]
    subscription = stage.subscribe()
    keys = keys_of(take(subscription, 1))
    with pytest.raises(Unreachable):
        next(subscription)
    keys += keys_of(take(subscription, 1))
    with pytest.raises(Unreachable):
        next(subscription)
    assert keys + keys_of(list(subscription)) == [b"a", b"b", b"c"]


class Unlucky:
    """A store whose answers get lost, before or after it has done what it was asked."""

    def __init__(self, store: SubscriptionStore) -> None:
        self._store = store
        self.failures: list[str] = []
        self.told: list[Progress] = []

    def __getattr__(self, name: str) -> object:
        return getattr(self._store, name)

    def acknowledge(self, name: str, epoch: int, progress: Progress) -> None:
        self.told.append(progress)
        self._fail("before")
        self._store.acknowledge(name, epoch, progress)
        self._fail("after")

    def seek(
        self, name: str, version: int, epoch: int | None = None, snapshot: bool = False
    ) -> SubscriptionRow:
        self._fail("before")
        row = self._store.seek(name, version, epoch, snapshot)
        self._fail("after")
        return row

    def _fail(self, when: str) -> None:
        if self.failures and self.failures[0] == when:
            del self.failures[0]
            raise OutcomeUnknown("planned: no answer")


@pytest.fixture
def unlucky(stage: Stage) -> Unlucky:
    store = Unlucky(stage.subscriptions)
    stage.store = store  # type: ignore[assignment]
    return store


@pytest.mark.parametrize("when", ["before", "after"])
def test_what_got_no_answer_is_told_again_before_anything_else(
    stage: Stage, unlucky: Unlucky, when: str
) -> None:
    write(stage.users, b"a", b"b", b"c")
    subscription = stage.subscribe()
    first, second, _third = subscription
    first.acknowledge()
    unlucky.failures = [when]
    with pytest.raises(OutcomeUnknown):
        subscription.flush()
    second.acknowledge()
    subscription.close()
    assert unlucky.told[0] == unlucky.told[1]
    assert len(unlucky.told) == 3
    assert keys_of(list(stage.subscribe())) == [b"c"]


@pytest.mark.parametrize(("when", "left"), [("before", [b"b"]), ("after", [b"a", b"b"])])
def test_after_a_seek_of_unknown_outcome_nothing_is_lost(
    stage: Stage, unlucky: Unlucky, when: str, left: list[bytes]
) -> None:
    write(stage.users, b"a", b"b")
    subscription = stage.subscribe()
    first, second = subscription
    first.acknowledge()
    subscription.flush()
    unlucky.failures = [when]
    with pytest.raises(OutcomeUnknown):
        subscription.seek("beginning")
    if when == "after":
        # It has moved, and what this consumer knows is void.
        second.acknowledge()
        with pytest.raises(LeaseHeld):
            subscription.flush()
    assert keys_of(list(stage.subscribe())) == left


def test_a_consumer_that_was_replaced_is_told_at_every_turn(stage: Stage) -> None:
    write(stage.users, b"a", b"b")
    subscription = stage.subscribe()
    first, second = subscription
    stage.time.advance(30_000)
    successor = stage.subscribe(holder="two")
    first.acknowledge()
    for call in (
        subscription.flush,
        subscription.redeliver,
        second.acknowledge,
        subscription.statistics,
        subscription.close,
        lambda: next(subscription),
    ):
        with pytest.raises((LeaseHeld, Closed)):
            call()
    assert keys_of(list(successor)) == [b"a", b"b"]


def test_closing_tells_of_acknowledgements_that_were_lost(stage: Stage) -> None:
    write(stage.users, b"a")
    subscription = stage.subscribe()
    next(subscription).acknowledge()
    stage.time.advance(30_000)
    stage.subscribe(holder="two")
    with pytest.raises(LeaseHeld), subscription:
        pass


def test_an_error_in_the_block_is_not_hidden_by_one_of_closing(stage: Stage, unlucky: Unlucky) -> None:
    write(stage.users, b"a")
    subscription = stage.subscribe()
    next(subscription).acknowledge()
    unlucky.failures = ["before"]
    with pytest.raises(ValueError, match="the consumer's own trouble"), subscription:
        raise ValueError("the consumer's own trouble")
    assert unlucky.failures == []


def test_closing_hands_over_at_once_and_twice_is_harmless(stage: Stage) -> None:
    subscription = stage.subscribe()
    subscription.close()
    subscription.close()
    stage.subscribe(holder="two")
    for call in (subscription.flush, subscription.redeliver, lambda: next(subscription)):
        with pytest.raises(Closed, match="subscribe again"):
            call()


@pytest.mark.parametrize("options", [{"flush_count": 0}, {"flush_seconds": -1}, {"flush_seconds": 3_601}])
def test_options_that_cannot_be_used_are_refused(options: dict[str, int]) -> None:
    with pytest.raises(InvalidArgument):
        SubscriptionOptions(**options)  # type: ignore[arg-type]
