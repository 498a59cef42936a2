"""Acknowledgements with and without transactions against a plain model, through crashes of the site.

The model is a set of live changes and, for each transaction, a set of those that it has: no runs of bits, no
ledger.  After every step the site must hold exactly what the model does, and its ledger exactly one record
for each acknowledgement of an open transaction that was accepted.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

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
from tests.feed.support_pending import BARE, BATCHED, NAME, Desk, settler
from tests.sizes import SEARCH, scaled

from floodmark.feed.subscription.acknowledgement import ChangePosition
from floodmark.feed.subscription.pending import Pending, PendingLedger
from floodmark.log import BatchSettings
from floodmark.model.errors import AcknowledgementConflict, FloodmarkError
from floodmark.model.partition import Decision

TRANSACTIONS = st.sampled_from(["t", "u", "v"])


@dataclass
class Open:
    """What a transaction has, as the model knows it."""

    named: set[ChangePosition] = field(default_factory=set)
    through: ChangePosition | None = None
    records: int = 0

    def has(self, position: ChangePosition) -> bool:
        return position in self.named or (self.through is not None and position <= self.through)


class Acknowledging(RuleBasedStateMachine):
    """Delivers, acknowledges, ends transactions, crashes, and compares."""

    @initialize(batching=st.sampled_from([BATCHED, BARE]))
    def begin(self, batching: BatchSettings) -> None:
        self.desk: Desk = Desk(settings=batching)
        self.desk.open()
        self.delivered: list[ChangePosition] = []
        self.live: set[ChangePosition] = set()
        self.open: dict[str, Open] = {}
        # How transactions of this name ended last, for those who ask after a crash.
        self.ended: dict[str, Decision] = {}
        # Names are used again, as ids are not: each use gets a number.
        self.uses: dict[str, int] = {}

    # What is asked

    @rule(counts=st.lists(st.integers(1, 4), min_size=1, max_size=2))
    def deliver(self, counts: list[int]) -> None:
        after = self.delivered[-1].version if self.delivered else 0
        positions = self.desk.deliver(*counts, after=after)
        self.delivered += positions
        self.live |= set(positions)

    @precondition(lambda self: self.delivered)
    @rule(data=st.data(), name=TRANSACTIONS)
    def acknowledge_in(self, data: st.DataObject, name: str) -> None:
        positions = data.draw(st.lists(st.sampled_from(self.delivered), min_size=1, max_size=3))
        transaction = self._transaction(name)
        mine = self.open.get(transaction, Open())
        new = {position for position in positions if position not in self.live or not mine.has(position)}
        taken = any(each.has(position) for each in self._others(transaction) for position in new)
        if taken or not new <= self.live:
            self._refused(lambda: self.desk.acknowledge_in(transaction, *positions))
            return
        self.desk.acknowledge_in(transaction, *positions)
        if new:
            self.open.setdefault(transaction, mine).named |= new
            mine.records += 1

    @precondition(lambda self: self.delivered)
    @rule(data=st.data(), name=TRANSACTIONS)
    def acknowledge_through_in(self, data: st.DataObject, name: str) -> None:
        through = data.draw(st.sampled_from(self.delivered))
        transaction = self._transaction(name)
        mine = self.open.get(transaction, Open())
        below = {position for position in self.live if position <= through}
        others = self._others(transaction)
        is_refused = (
            any(each.through is not None for each in others)
            or any(position <= through for each in others for position in each.named)
            or (mine.through is None and not below)
        )
        if is_refused:
            self._refused(lambda: self.desk.acknowledge_in(transaction, through=through))
            return
        self.desk.acknowledge_in(transaction, through=through)
        if mine.through is None or any(position > mine.through for position in below):
            self.open.setdefault(transaction, mine).through = through
            mine.records += 1

    @precondition(lambda self: self.delivered)
    @rule(data=st.data())
    def acknowledge(self, data: st.DataObject) -> None:
        positions = data.draw(st.lists(st.sampled_from(self.delivered), min_size=1, max_size=3))
        self._acknowledge(set(positions), lambda: self.desk.acknowledge(*positions))

    @precondition(lambda self: self.delivered)
    @rule(data=st.data())
    def acknowledge_through(self, data: st.DataObject) -> None:
        through = data.draw(st.sampled_from(self.delivered))
        below = {position for position in self.delivered if position <= through}
        self._acknowledge(below, lambda: self.desk.acknowledge(through=through))

    def _acknowledge(self, positions: set[ChangePosition], run: Callable[[], None]) -> None:
        live = positions & self.live
        if any(each.has(position) for each in self.open.values() for position in live):
            self._refused(run)
            return
        run()
        self.live -= live

    @precondition(lambda self: self.open)
    @rule(data=st.data(), committed=st.booleans(), times=st.integers(1, 2))
    def end(self, data: st.DataObject, committed: bool, times: int) -> None:
        transaction = data.draw(st.sampled_from(sorted(self.open)))
        for _ in range(times):
            (self.desk.store.commit_pending if committed else self.desk.store.abort_pending)(
                NAME, transaction
            )
        self._note_end(transaction, committed=committed)

    def _note_end(self, transaction: str, *, committed: bool) -> None:
        mine = self.open.pop(transaction)
        if committed:
            self.live -= {position for position in self.live if mine.has(position)}
        self.ended[transaction] = Decision.COMMIT if committed else Decision.ABORT
        name = transaction[0]
        self.uses[name] = self.uses.get(name, 0) + 1

    @rule(data=st.data())
    def power_cut(self, data: st.DataObject) -> None:
        self.desk.power_cut(data.draw(st.integers(0, self.desk.engine.unsynced)))
        fates = dict.fromkeys(self.open, Decision.UNDECIDED)
        for transaction, decision in self.ended.items():
            # Its coordinator may have forgotten it: then it is unknown.
            if data.draw(st.booleans()):
                fates[transaction] = decision
        is_told_late = data.draw(st.booleans())
        if self.open and is_told_late:
            # One was committed, and the crash came before anybody was told.
            told = data.draw(st.sampled_from(sorted(self.open)))
            fates[told] = Decision.COMMIT
            self._note_end(told, committed=True)
        self.desk.store.settle_pending(settler(fates))

    @rule()
    def take_over(self) -> None:
        self.desk.time.advance(60_000)
        self.desk.open("two")

    @precondition(lambda self: self.delivered)
    @rule(data=st.data())
    def seek(self, data: st.DataObject) -> None:
        version = data.draw(st.sampled_from([0, *sorted({each.version for each in self.delivered})]))
        if self.open:
            self._refused(lambda: self.desk.store.seek(NAME, version, self.desk.epoch))
            return
        self.desk.store.seek(NAME, version, self.desk.epoch)
        self.delivered = [position for position in self.delivered if position.version <= version]
        self.live = set()

    # Shorthand

    def _transaction(self, name: str) -> str:
        return f"{name}{self.uses.get(name, 0)}"

    def _others(self, transaction: str) -> list[Open]:
        return [each for other, each in self.open.items() if other != transaction]

    def _refused(self, run: Callable[[], object]) -> None:
        with pytest.raises(AcknowledgementConflict):
            run()

    # What must hold at any time

    @invariant()
    def the_site_holds_what_the_model_does(self) -> None:
        if not hasattr(self, "desk"):
            return
        assert self.desk.live() == sorted(self.live)
        pending = {
            transaction: sorted(position for position in self.live if mine.has(position))
            for transaction, mine in self.open.items()
        }
        assert self.desk.pending() == pending
        assert self.desk.store.statistics(NAME).pending == sum(map(len, pending.values()))
        records = [transaction for transaction, mine in self.open.items() for _ in range(mine.records)]
        assert sorted(self.desk.records()) == sorted(records)


TestAcknowledging = Acknowledging.TestCase
TestAcknowledging.settings = scaled(0.5, stateful_step_count=40)


# The machine must be able to fail.


def let_anybody_have_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Pending, "owner", lambda *_: None)


def forget_what_is_below(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Pending, "_require_none_below", lambda *_, **__: None)


def keep_records(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PendingLedger, "let_go", lambda self, transaction: self.pending.remove(transaction))


@pytest.mark.parametrize("plant", [let_anybody_have_it, forget_what_is_below, keep_records])
def test_the_machine_notices_a_planted_fault(
    plant: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch)
    with pytest.raises((AssertionError, FloodmarkError, pytest.fail.Exception)):
        run_state_machine_as_test(Acknowledging, settings=SEARCH)
