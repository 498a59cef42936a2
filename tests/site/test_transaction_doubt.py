"""A commit that got no answer: its owner hears what became of it, or that nobody knows, and nothing else."""

from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any, TypeAlias

import pytest
from tests.site.support import HookedEngine

from floodmark.codec.ordered import encode_namespace
from floodmark.host.coordination import LocalTransactions
from floodmark.host.transaction_port import NamespaceWrites
from floodmark.model.errors import (
    Closed,
    Conflict,
    FloodmarkError,
    NamespaceNotFound,
    OutcomeUnknown,
    PartlyDone,
    Retryable,
    TransactionEnded,
    TransactionNotFound,
    Unreachable,
)
from floodmark.model.partition import ReadSet
from floodmark.model.transaction import TransactionStatistics
from floodmark.site import Site, open_engine
from floodmark.site.coordinated import Coordinated, Pace
from floodmark.site.rivals import Rivals
from floodmark.site.transaction import Transaction, run_transaction
from floodmark.site.watching import Watches
from floodmark.testing import SimulatedCrash
from floodmark.transaction import TransactionCoordinator, book

HOUR = timedelta(hours=1)
Writes: TypeAlias = list[NamespaceWrites]
Reads: TypeAlias = ReadSet | None


class Line:
    """The way to a site, on which a test decides what is heard of each commit."""

    def __init__(self) -> None:
        self.engine = HookedEngine()
        self.site = self.open()
        self.site.create_namespace("counts", merge="counter")
        self.commits = 0
        # What happens with each commit in turn; those that come later go through.
        self.plan: list[Callable[[str, Writes, Reads], int]] = []
        self.abort_failures: list[FloodmarkError] = []
        self.show_failures: list[FloodmarkError] = []
        # The time of the caller, which passes while it sleeps.
        self.seconds = 0.0
        self.pauses: list[float] = []
        self.pace = Pace(time_seconds=lambda: self.seconds, sleep=self.sleep, random=lambda: 1.0)

    def sleep(self, seconds: float) -> None:
        self.pauses.append(seconds)
        self.seconds += seconds

    def open(self) -> Site:
        return open_engine(self.engine, site="oslo", site_id=7, background=False)

    def restart(self) -> None:
        self.site.close()
        self.engine.reopen()
        self.site = self.open()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.site.transactions, name)

    def commit(self, transaction: str, writes: Writes, reads: Reads = None) -> int:
        self.commits += 1
        step = self.plan.pop(0) if self.plan else self.site.transactions.commit
        return step(transaction, writes, reads)

    def abort(self, transaction: str, reason: str) -> None:
        if self.abort_failures:
            raise self.abort_failures.pop(0)
        self.site.transactions.abort(transaction, reason)

    def show(self, transaction: str) -> TransactionStatistics:
        if self.show_failures:
            raise self.show_failures.pop(0)
        return self.site.transactions.show(transaction)

    # What may happen with a commit

    def lose_answer(
        self, transaction: str, writes: list[NamespaceWrites], reads: ReadSet | None = None
    ) -> int:
        self.site.transactions.commit(transaction, writes, reads)
        raise OutcomeUnknown("the connection was lost")

    def lose_question(
        self, transaction: str, writes: list[NamespaceWrites], reads: ReadSet | None = None
    ) -> int:
        raise OutcomeUnknown("the connection was lost")

    def refuse(self, transaction: str, writes: Writes, reads: Reads = None) -> int:
        raise Unreachable("nobody is there")

    def refuse_for_good(
        self, transaction: str, writes: list[NamespaceWrites], reads: ReadSet | None = None
    ) -> int:
        self.seconds += HOUR.total_seconds()
        raise Unreachable("nobody is there")

    def lose_for_good(
        self, transaction: str, writes: list[NamespaceWrites], reads: ReadSet | None = None
    ) -> int:
        self.seconds += HOUR.total_seconds()
        raise OutcomeUnknown("the connection was lost")

    def cut_off(self, transaction: str, writes: Writes, reads: Reads = None) -> int:
        """The server is killed between the prepared write and the decision, and started again."""

        def kill(*_: object, **__: object) -> int:
            raise SimulatedCrash("kill -9")

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(TransactionCoordinator, "commit", kill)
            with pytest.raises(SimulatedCrash):
                self.site.transactions.commit(transaction, writes, reads)
        self.restart()
        raise OutcomeUnknown("the connection was lost")

    def conflict_unheard(self, transaction: str, writes: Writes, reads: Reads = None) -> int:
        """Another client has written what was read, and the answer that says so is lost."""
        counts, before = self.site.namespace("counts"), self.site.now()
        counts.add(b"bob")
        stale = ReadSet(before, keys=[encode_namespace(counts.id) + b"bob"])
        with pytest.raises(Conflict):
            self.site.transactions.commit(transaction, writes, stale)
        raise OutcomeUnknown("the connection was lost")

    def lose_partition(self, transaction: str, writes: Writes, reads: Reads = None) -> int:
        """A partition does not say whether it has prepared the writes, so that they are given up."""

        def lose(*_: object, **__: object) -> int:
            raise OutcomeUnknown("the partition does not answer")

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(LocalTransactions, "_prepare", lose)
            return self.site.transactions.commit(transaction, writes, reads)

    def begin_counting(self, number: int = 1) -> Transaction:
        # As a server begins it, for a client that outlives a restart.
        began = self.site.transactions.begin(HOUR, 0, owner="c" * 16)
        coordinated = Coordinated(self, began, timeout=HOUR, pace=self.pace)
        watches = Watches(self.site.host)
        transaction = Transaction(
            self.site.host, lambda: coordinated, watches, durable=True, begun=coordinated, pace=self.pace
        )
        transaction.add(self.site.namespace("counts"), b"ada", number)
        return transaction

    @property
    def counted(self) -> int | None:
        found: int | None = self.site.namespace("counts").get(b"ada")
        return found


@pytest.fixture
def line() -> Iterator[Line]:
    line = Line()
    yield line
    line.site.close()


def test_an_answer_that_was_lost_is_got_by_asking_again(line: Line) -> None:
    line.plan = [line.lose_answer]
    transaction = line.begin_counting()
    assert transaction.commit() == transaction.version > 0
    assert (line.commits, line.counted) == (2, 1)


def test_it_is_asked_for_again_until_its_time_is_over_with_growing_pauses(line: Line) -> None:
    line.plan = [line.lose_question, line.refuse] * 10
    assert line.begin_counting().commit() > 0
    assert line.pauses == [min(1.0, 0.01 * 2**number) for number in range(20)]
    assert (line.commits, line.counted) == (21, 1)
    line.plan = [line.lose_question, line.lose_for_good]
    with pytest.raises(OutcomeUnknown, match="the connection was lost"):
        line.begin_counting().commit()
    line.plan = [line.refuse, line.refuse_for_good]
    with pytest.raises(Unreachable):
        line.begin_counting().commit()
    assert line.counted == 1


def test_one_that_a_restart_cut_off_is_aborted_and_not_unknown(line: Line) -> None:
    line.plan = [line.cut_off]
    with pytest.raises(TransactionEnded, match="restarted in the middle of its commit") as raised:
        line.begin_counting().commit()
    assert raised.value.details["again"]
    assert line.counted is None


@pytest.mark.parametrize("way", ["cut_off", "conflict_unheard", "lose_partition"])
def test_work_that_a_restart_or_another_cut_off_is_done_again(line: Line, way: str) -> None:
    line.plan = [getattr(line, way)]
    assert (
        run_transaction(lambda _: line.begin_counting(), lambda _: "done", pace=line.pace, rivals=Rivals())
        == "done"
    )
    assert line.counted == 1


def test_work_that_met_others_is_done_again_after_pauses_that_differ_at_random(line: Line) -> None:
    randomness = iter([0.0, 1.0, 0.5])
    attempts: list[Transaction] = []

    def meet_others(transaction: Transaction) -> str:
        attempts.append(transaction)
        if len(attempts) <= 3:
            raise Retryable("another transaction is in the way")
        return "done"

    pace = Pace(sleep=line.sleep, random=lambda: next(randomness))
    assert run_transaction(lambda _: line.begin_counting(), meet_others, pace=pace, rivals=Rivals()) == "done"
    assert line.pauses == pytest.approx([0.001, 0.004, 0.006])
    assert line.counted == 1


def test_work_that_an_operator_ended_is_not_done_again(line: Line) -> None:
    def end(transaction: Transaction) -> None:
        line.site.transactions.abort(transaction.id, "by an operator")

    with pytest.raises(TransactionEnded, match="by an operator"):
        run_transaction(lambda _: line.begin_counting(), end, pace=line.pace, rivals=Rivals())
    assert line.counted is None


@pytest.mark.parametrize("by_another", [False, True])
def test_a_commit_that_can_no_longer_be_asked_for_is_confirmed(line: Line, by_another: bool) -> None:
    def commit_without_writes(transaction: str, *_: object) -> int:
        line.site.transactions.commit(transaction, [])
        raise OutcomeUnknown("the connection was lost")

    def drop(*_: object) -> int:
        raise NamespaceNotFound("it was dropped since")

    line.plan = [commit_without_writes if by_another else line.lose_answer, drop]
    transaction = line.begin_counting()
    if by_another:
        with pytest.raises(OutcomeUnknown, match="to ask again failed"):
            transaction.commit()
    else:
        assert transaction.commit() == line.site.transactions.show(transaction.id).version
    assert line.counted == (None if by_another else 1)


def test_one_that_the_site_has_forgotten_by_a_restart_is_unknown_and_not_missing(line: Line) -> None:
    def lose_answer_and_restart(
        transaction: str, writes: list[NamespaceWrites], reads: ReadSet | None = None
    ) -> int:
        line.site.transactions.commit(transaction, writes, reads)
        line.restart()
        raise OutcomeUnknown("the server went away")

    line.plan = [lose_answer_and_restart]
    transaction = line.begin_counting()
    with pytest.raises(OutcomeUnknown, match=r"does not know of it any more.*Read what it writes before"):
        transaction.commit()
    assert line.counted == 1
    with pytest.raises(Closed):
        transaction.commit()


def test_one_that_the_site_has_forgotten_over_later_ones_is_unknown(
    line: Line, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(book, "ENDED_REMEMBERED", 3)
    line.plan = [line.lose_answer, line.lose_question, line.lose_for_good]
    transaction = line.begin_counting()
    with pytest.raises(OutcomeUnknown, match="the connection was lost"):
        transaction.commit()
    for _ in range(3):
        line.site.transaction(coordinator=0).abort()
    with pytest.raises(OutcomeUnknown, match="does not know of it any more"):
        transaction.commit()
    assert line.counted == 1


def test_one_that_was_never_in_doubt_is_missing(line: Line) -> None:
    transaction = line.begin_counting()
    line.restart()
    line.site.transactions.abort(transaction.id, "by an operator")
    line.restart()
    with pytest.raises(TransactionNotFound):
        transaction.commit()
    assert line.counted is None


def test_to_fail_to_ask_again_does_not_make_it_undone(line: Line) -> None:
    """Whoever heard `Unreachable` would do it all again, and count twice."""
    line.plan = [line.lose_answer, line.refuse_for_good]
    line.abort_failures = [Unreachable("nobody is there")]
    line.show_failures = [Unreachable("nobody is there")]
    transaction = line.begin_counting()
    with pytest.raises(OutcomeUnknown, match=r"to ask again failed.*commit it once more to find out"):
        transaction.commit()
    assert transaction.commit() > 0, "and then it can be found out"
    assert line.counted == 1


def test_work_that_may_be_done_is_not_done_again(line: Line) -> None:
    line.plan = [line.lose_answer, line.refuse_for_good]
    line.abort_failures = [Unreachable("nobody is there")]
    line.show_failures = [Unreachable("nobody is there")]
    begun: list[Transaction] = []

    def begin(_: int) -> Transaction:
        begun.append(line.begin_counting())
        return begun[-1]

    with pytest.raises(OutcomeUnknown):
        run_transaction(begin, lambda _: None, pace=line.pace, rivals=Rivals())
    assert len(begun) == 1
    assert line.counted == 1


@pytest.mark.parametrize("partly", [True, False])
def test_an_abort_makes_sure_that_it_was_not_done(line: Line, partly: bool) -> None:
    line.plan = [line.lose_question, line.refuse_for_good]
    if partly:
        line.abort_failures = [PartlyDone("it is aborting, and stays so")]
    transaction = line.begin_counting()
    with pytest.raises(Unreachable):
        transaction.commit()
    with pytest.raises(Closed):
        transaction.commit()
    assert line.counted is None


def test_an_interrupted_commit_is_in_doubt_too(line: Line) -> None:
    def interrupt(transaction: str, writes: Writes, reads: Reads = None) -> int:
        line.site.transactions.commit(transaction, writes, reads)
        line.restart()
        raise KeyboardInterrupt

    line.plan = [interrupt]
    transaction = line.begin_counting()
    with pytest.raises(KeyboardInterrupt):
        transaction.commit()
    with pytest.raises(OutcomeUnknown, match="does not know of it any more"):
        transaction.commit()


def test_what_was_refused_is_in_doubt_no_more(line: Line) -> None:
    line.plan = [line.refuse_for_good]
    line.abort_failures = [Unreachable("nobody is there")]
    with pytest.raises(Retryable):
        line.begin_counting().commit()
    line.plan = [line.lose_question]
    transaction = line.begin_counting()
    line.site.transactions.abort(transaction.id, "by an operator")
    with pytest.raises(TransactionEnded, match="by an operator"):
        transaction.commit()
