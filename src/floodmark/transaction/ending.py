"""From the decision to the end: participants are told until all of them have done their part.

Each may be told any number of times, in any order.  When the last one has done its part, the transaction's
records are let go, in one step, and the log is as long as what is open.
"""

import logging
from collections import deque
from collections.abc import Iterable, Sequence
from contextlib import suppress
from threading import Event
from typing import Final

from floodmark.log import BatchedWriter
from floodmark.model.errors import Closed, PartlyDone
from floodmark.model.transaction import Participant, TransactionState, Waiting
from floodmark.transaction.book import TransactionBook
from floodmark.transaction.held import Held
from floodmark.transaction.ports import Participants
from floodmark.transaction.records import Record

_ERROR_CHARACTERS_MAX: Final = 500

_log = logging.getLogger("floodmark.transaction")


class Ending:
    """Brings decided transactions to their end.  Safe to use from many threads."""

    def __init__(self, book: TransactionBook, log: BatchedWriter[Record], participants: Participants) -> None:
        self._book = book
        self._log = log
        self._participants = participants

    def tell(self, decided: Iterable[Held]) -> None:
        """Tell the participants of some transactions; those that have all done their part end together."""
        telling: deque[Held] = deque()
        told: list[Held] = []
        try:
            self._begin_telling(decided, telling)
            # Whoever closes does not wait until all of many are told: the others are when it is opened again.
            while telling and not self._book.is_closed:
                if self._tell(telling[0]):
                    told.append(telling[0])
                telling.popleft()
        finally:
            try:
                self._stop_telling(held for held in telling if held not in told)
                self._end(told)
            except BaseException:
                # Whoever sweeps finds that they have nobody left to tell.
                self._stop_telling(told)
                raise

    def finish(self, held: Held, seconds_max: float) -> None:
        """Return when a decided transaction has ended; tell its participants, unless somebody does."""
        self.tell([held])
        with self._book.lock:
            if held.id not in self._book.held:
                return
            ended = held.ended = held.ended or Event()
            if self._book.is_closed:
                ended.set()
        ended.wait(seconds_max)
        with self._book.lock:
            if held.id in self._book.held:
                raise _unfinished(held, is_closed=self._book.is_closed)

    def _begin_telling(self, decided: Iterable[Held], telling: deque[Held]) -> None:
        """Take those about which nobody tells."""
        with self._book.lock:
            if self._book.is_closed:
                return
            for held in decided:
                if held.is_quiet and not held.is_open:
                    # Ctrl-C comes after a call, so it finds both or neither.
                    held.is_telling = True
                    telling.append(held)

    def _stop_telling(self, telling: Iterable[Held]) -> None:
        with self._book.lock:
            for held in telling:
                held.is_telling = False
                self._book.release(held)

    def _tell(self, held: Held) -> bool:
        """Tell the participants of a transaction; whether all of them have done their part."""
        left = dict(held.waiting)
        try:
            for participant, before in held.waiting.items():
                error = self._tell_one(held, participant, before.attempts + 1)
                if error is None:
                    del left[participant]
                else:
                    left[participant] = Waiting(
                        participant=participant, attempts=before.attempts + 1, error=error
                    )
        finally:
            held.waiting = left
            if left:
                held.retry_later(self._book.growing_ms())
                self._stop_telling([held])
        return not left

    def _tell_one(self, held: Held, participant: Participant, attempts: int) -> str | None:
        """What a participant says that has not done its part."""
        try:
            if held.state is TransactionState.COMMITTING:
                self._participants.commit(participant, held.id, held.version)
            else:
                self._participants.abort(participant, held.id)
        except Exception as error:
            # A bug in one participant must not keep the others from their part, nor end the sweeps.
            message = (str(error) or repr(error))[:_ERROR_CHARACTERS_MAX]
            _log.warning(
                "transaction %s is %s, and %s %s has not done its part after %d attempts: %s",
                *(held.id, held.state, participant.kind, participant.name, attempts, message),
            )
            return message
        return None

    def _end(self, told: Sequence[Held]) -> None:
        with self._book.lock:
            ended = [held for held in told if self._book.end(held)]
        try:
            # A closed log keeps the records: they are found again, and the transactions end once more.
            with suppress(Closed):
                self._log.acknowledge(position for held in ended for position in held.positions)
        finally:
            for held in ended:
                if held.ended is not None:
                    held.ended.set()


def _unfinished(held: Held, *, is_closed: bool) -> PartlyDone:
    names = ", ".join(f"{each.kind} {each.name}" for each in held.waiting)
    if is_closed:
        what_next = "it is told when the site is opened again"
    else:
        what_next = "it is told again and again. floodmark txn show says what is wrong"
    return PartlyDone(
        f"transaction {held.id} is {held.state}, and stays so, but {names} has not done its part yet; "
        f"{what_next}",
        transaction=held.id,
        state=str(held.state),
    )
