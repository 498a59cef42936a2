"""Many threads that acknowledge in transactions: they share entries of the log, and nobody waits for ever."""

from collections.abc import Callable
from functools import partial
from itertools import count
from threading import Event, Thread

import pytest
from tests.feed.support_pending import NAME, Desk, make_consumer_stage, make_desk
from tests.feed.support_subscription import write
from tests.log.support import interrupt_at, run_threads
from tests.waiting import HANG_SECONDS, wait_until

from floodmark.feed.subscription import pending as pending_ledger
from floodmark.feed.subscription.acknowledgement import ChangePosition
from floodmark.log import Promise
from floodmark.model.errors import AcknowledgementConflict, Retryable
from floodmark.partition import FAMILIES
from floodmark.testing import FaultyEngine

A, B, C = (ChangePosition(10, index) for index in range(3))
D, E = (ChangePosition(20, index) for index in range(2))
F, G, H = (ChangePosition(30, index) for index in range(3))
EVERYTHING = [A, B, C, D, E, F, G, H]


class GatedEngine(FaultyEngine):
    """An engine whose syncs wait at a gate while it is shut."""

    def __init__(self) -> None:
        super().__init__(FAMILIES)
        self.gate, self.arrived = Event(), Event()
        self.gate.set()

    def sync(self) -> None:
        if not self.gate.is_set():
            self.arrived.set()
            assert self.gate.wait(HANG_SECONDS)
        super().sync()


class Shut:
    """One transaction's acknowledgement is on its way to the log; what comes then is run by threads."""

    def __init__(self) -> None:
        self.engine = GatedEngine()
        self.desk = Desk(engine=self.engine)
        self.desk.open()
        self.desk.deliver(3, 2, 3)
        self.threads: list[Thread] = []
        self.errors: list[BaseException] = []
        self.engine.gate.clear()
        self.run(lambda: self.desk.acknowledge_in("t", A))
        assert self.engine.arrived.wait(HANG_SECONDS)

    def run(self, work: Callable[[], object]) -> None:
        def run() -> None:
            try:
                work()
            except BaseException as error:
                self.errors.append(error)

        self.threads.append(Thread(target=run))
        self.threads[-1].start()

    def wait_pending(self, count: int) -> None:
        """Return when so many transactions have something pending."""
        wait_until(lambda: len(self.desk.pending()) == count, "they do not come")

    def go_on(self) -> None:
        self.engine.gate.set()
        for thread in self.threads:
            thread.join(HANG_SECONDS)
            assert not thread.is_alive()


def test_transactions_that_acknowledge_together_share_an_entry() -> None:
    shut = Shut()
    for transaction, position in zip("uvwx", (B, C, D, E), strict=True):
        shut.run(partial(shut.desk.acknowledge_in, transaction, position))
    shut.wait_pending(5)
    with pytest.raises(AcknowledgementConflict):
        shut.desk.acknowledge_in("y", A)
    shut.go_on()
    assert not shut.errors
    [log] = shut.desk.store.pending_logs().values()
    assert sum(segment.entries for segment in log.ledger.segments()) < 5
    assert sorted(shut.desk.records()) == list("tuvwx")
    for transaction in "tuvwx":
        shut.desk.store.commit_pending(NAME, transaction)
    assert (shut.desk.live(), shut.desk.records()) == ([F, G, H], [])


@pytest.mark.parametrize(("end", "left"), [("commit_pending", EVERYTHING[1:]), ("abort_pending", EVERYTHING)])
def test_a_transaction_is_not_ended_while_it_is_written(end: str, left: list[ChangePosition]) -> None:
    shut = Shut()
    shut.run(lambda: getattr(shut.desk.store, end)(NAME, "t"))
    shut.run(lambda: getattr(shut.desk.store, end)(NAME, "t"))
    shut.go_on()
    assert not shut.errors
    # Whether the end came first or waited, ending it again leaves nothing.
    getattr(shut.desk.store, end)(NAME, "t")
    assert (shut.desk.live(), shut.desk.pending(), shut.desk.records()) == (left, {}, [])


def test_waiting_for_the_log_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pending_ledger, "WRITE_SECONDS_MAX", 0.01)
    shut = Shut()
    with pytest.raises(Retryable, match="look after the disk"):
        shut.desk.store.abort_pending(NAME, "t")
    shut.go_on()
    shut.desk.store.abort_pending(NAME, "t")
    assert shut.desk.pending() == {}


def test_the_threads_of_a_consumer_deal_with_each_change_once() -> None:
    stage, desk = make_consumer_stage()
    written: list[ChangePosition] = []
    for number in range(20):
        written += write(stage.users, *[b"%d-%d" % (number, each) for each in range(8)])
    subscription = stage.subscribe()
    effects: list[ChangePosition] = []

    def work(thread: int) -> None:
        for round_number, delivery in enumerate(subscription):
            transaction = f"{thread}-{round_number}"
            subscription.acknowledge_in(desk.store.acknowledge_in, transaction, [delivery], through=False)
            # Each change is given back once before it is dealt with.
            committed = delivery.is_redelivered
            if committed:
                effects.append(delivery.position)
            end = desk.store.commit_pending if committed else desk.store.abort_pending
            end(NAME, transaction)
            subscription.settle(transaction, committed)

    run_threads(work, 8)
    # One that gave a change back may have been the last to look.
    work(8)
    assert sorted(effects) == written
    assert (desk.live(), desk.pending(), desk.records()) == ([], {}, [])


def test_an_acknowledgement_that_is_interrupted_at_any_call_is_there_or_not_and_can_be_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whoever waited for what is on nobody's way any more would not come back."""
    monkeypatch.setattr(pending_ledger, "WRITE_SECONDS_MAX", 0)
    desk = make_desk()
    desk.acknowledge_in("other", B)
    [log] = desk.store.pending_logs().values()
    for number in count(1):
        was_interrupted = interrupt_at(
            number, "floodmark/feed/subscription/pending", lambda: desk.acknowledge_in("t", A)
        )
        assert log.writer.flush(HANG_SECONDS)
        assert ("t" in desk.pending()) == ("t" in desk.records())
        desk.store.abort_pending(NAME, "t")
        assert desk.pending() == {"other": [B]}
        if not was_interrupted:
            break
    assert number > 5
    desk.acknowledge_in("t", A)
    desk.store.commit_pending(NAME, "t")
    assert (desk.live(), desk.records()) == (EVERYTHING[1:], ["other"])


def test_an_acknowledgement_whose_caller_is_interrupted_before_it_is_written_is_taken_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shut = Shut()

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Promise, "result", interrupt)
        with pytest.raises(KeyboardInterrupt):
            shut.desk.acknowledge_in("u", B)
    assert "u" not in shut.desk.pending()
    shut.go_on()
    assert shut.desk.records() == ["t"]
