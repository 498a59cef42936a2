"""From the decision to the end: the coordinator retries every participant until it confirms.

A participant may get a decision any number of times, and decisions in any order.  When all have confirmed,
the records of the transaction are acknowledged together, so that the log keeps only unfinished transactions.
"""

import logging
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import partial
from typing import Final, Protocol, TypeAlias

from floodmark.log import BatchedWriter
from floodmark.model.errors import Closed, PartlyDone
from floodmark.model.transaction import Participant, TransactionState, Waiting
from floodmark.model.version import Version
from floodmark.transaction.book import HeldTransaction, TransactionBook
from floodmark.transaction.records import Record

_ERROR_CHARACTERS_MAX: Final = 500
_log = logging.getLogger("floodmark.transaction")

# Makes calls that raise nothing, and returns their results when all have ended.
AtOnce: TypeAlias = Callable[[Sequence[Callable[[], str | None]]], Sequence[str | None]]


def one_by_one(calls: Sequence[Callable[[], str | None]]) -> list[str | None]:
    """Make calls in this thread."""
    return [call() for call in calls]


class Participants(Protocol):
    """Sends decisions to participants.

    Calls are idempotent and succeed for a participant that no longer exists.  After any error the coordinator
    calls again.
    """

    def commit(self, participant: Participant, transaction: str, version: Version) -> None:
        """Make a participant's part of a transaction effective at a version."""

    def abort(self, participant: Participant, transaction: str) -> None:
        """Discard a participant's part of a transaction."""


class Ending:
    """Brings decided transactions to their end.  Safe to use from many threads."""

    def __init__(
        self, book: TransactionBook, log: BatchedWriter[Record], participants: Participants, at_once: AtOnce
    ) -> None:
        self._book = book
        self._log = log
        self._participants = participants
        self._at_once = at_once

    def tell(self, decided: Iterable[HeldTransaction]) -> None:
        """Send the decisions on some transactions to their participants; end those that all confirm.

        Skips a transaction whose decision another thread is sending.
        """
        telling: list[HeldTransaction] = []
        told: list[HeldTransaction] = []
        try:
            with self._book.lock:
                for held in decided:
                    if held.is_quiet and not held.is_open:
                        held.is_telling = True
                        telling.append(held)
            for held in telling:
                # Closing does not wait for the other transactions: recovery finds them.
                if self._book.is_closed:
                    break
                if self._tell(held):
                    told.append(held)
        finally:
            with self._book.lock:
                for held in telling:
                    held.is_telling = False
                    self._book.release(held)
            self._end(told)

    def finish(self, held: HeldTransaction, seconds_max: float) -> None:
        """Send the decision on a transaction to its participants, and return when it has ended."""
        self.tell([held])
        book = self._book
        with book.lock:
            book.wait_for(held.id, lambda each: each.id not in book.held, seconds_max)
            if held.id in book.held:
                raise _unfinished(held, is_closed=book.is_closed)

    def _tell(self, held: HeldTransaction) -> bool:
        """Send the decision to the participants that have not confirmed; returns whether all have now."""
        waiting = [(participant, before.attempts + 1) for participant, before in held.waiting.items()]
        errors = self._at_once([partial(self._tell_one, held, *each) for each in waiting])
        for (participant, attempts), error in zip(waiting, errors, strict=True):
            if error is None:
                del held.waiting[participant]
            else:
                held.waiting[participant] = Waiting(participant=participant, attempts=attempts, error=error)
        if held.waiting:
            held.retry_later(self._book.growing_ms())
        return not held.waiting

    def _tell_one(self, held: HeldTransaction, participant: Participant, attempts: int) -> str | None:
        """Send the decision to one participant; returns its error, or None if it confirms."""
        try:
            if held.state is TransactionState.COMMITTING:
                self._participants.commit(participant, held.id, held.version)
            else:
                self._participants.abort(participant, held.id)
        except Exception as error:
            # Even a bug in one participant must not keep the others waiting, or end the sweeps.
            message = (str(error) or repr(error))[:_ERROR_CHARACTERS_MAX]
            _log.warning(
                "transaction %s is %s, but %s %s has not confirmed after %d attempts: %s",
                *(held.id, held.state, participant.kind, participant.name, attempts, message),
            )
            return message
        return None

    def _end(self, told: Sequence[HeldTransaction]) -> None:
        with self._book.lock:
            ended = [held for held in told if self._book.end(held)]
        # A closed log keeps the records: recovery finds them, and the transactions end once more.
        with suppress(Closed):
            self._log.acknowledge(position for held in ended for position in held.positions)


def _unfinished(held: HeldTransaction, *, is_closed: bool) -> PartlyDone:
    names = ", ".join(f"{each.kind} {each.name}" for each in list(held.waiting))
    what_next = "the coordinator keeps trying. floodmark txn show says what is wrong"
    if is_closed:
        what_next = "open the site again, and it is told"
    return PartlyDone(
        f"transaction {held.id} is {held.state}, and stays so, but {names} has not confirmed yet; "
        f"{what_next}",
        transaction=held.id,
        state=str(held.state),
    )
