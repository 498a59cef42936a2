"""Acknowledgements that wait for a transaction.

A change that is acknowledged in a transaction is *pending*: still live, and not delivered again.  When the
transaction commits, it is acknowledged; when it aborts, it is available again.  Meanwhile no other caller may
acknowledge it:

- a change is pending in one transaction at most, and an acknowledged change cannot become pending;
- one transaction at most has acknowledged everything up to a position, and all changes at or below that are
  pending in it;
- an acknowledgement without a transaction is refused where it covers a pending one, because it would take
  effect even if the transaction aborted.

All this is checked before the log is written, so that the log holds only records that can be committed.
"""

from typing import Final, NamedTuple

import msgspec

from floodmark.feed.subscription.acknowledgement import Acknowledgement, ChangePosition, Deliveries
from floodmark.model.errors import AcknowledgementConflict, Corruption

# The name of a ledger of pending acknowledgements: this, and the name of the subscription.
PENDING_LEDGERS: Final = "pending-ack/"


class PendingAcknowledgement(msgspec.Struct, frozen=True):
    """The acknowledgements of an open transaction."""

    transaction: str
    acknowledgement: Acknowledgement


class PendingRecord(msgspec.Struct, frozen=True, array_like=True, tag=1):
    """An acknowledgement of a transaction, as it stands in the log.

    `epoch` is the consumer's: a record from before the subscription was moved is void.
    """

    transaction: str
    epoch: int
    acknowledgement: Acknowledgement


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(PendingRecord)


def encode_pending(record: PendingRecord) -> bytes:
    """A record as it stands in the log: a messagepack array, which no batched entry begins like.

    >>> record = PendingRecord("0-7", 3, Acknowledgement(positions=[ChangePosition(5, 1)]))
    >>> decode_pending(encode_pending(record)) == record
    True
    """
    return _encoder.encode(record)


def decode_pending(stored: bytes) -> PendingRecord:
    """Undo `encode_pending`."""
    try:
        return _decoder.decode(stored)
    except msgspec.MsgspecError as error:
        raise Corruption(
            f"a record of pending acknowledgements cannot be read ({error}); restore the site from a backup"
        ) from error


class _Through(NamedTuple):
    """The position up to which a transaction has acknowledged everything."""

    transaction: str
    position: ChangePosition


class Pending:
    """The pending acknowledgements of one subscription.

    >>> pending = Pending("indexer")
    >>> pending.add("0-7", Acknowledgement(positions=[ChangePosition(5, 1)]))
    >>> pending.owner(ChangePosition(5, 1)), pending.owner(ChangePosition(5, 0))
    ('0-7', None)
    >>> pending.remove("0-7")
    >>> bool(pending)
    False
    """

    def __init__(self, subscription: str) -> None:
        self._subscription = subscription
        # The acknowledgements of each transaction, call by call.
        self._parts: dict[str, list[Acknowledgement]] = {}
        self._owners: dict[ChangePosition, str] = {}
        self._through: _Through | None = None

    def __bool__(self) -> bool:
        return bool(self._parts)

    @property
    def transactions(self) -> list[str]:
        """The transactions with acknowledgements."""
        return list(self._parts)

    def acknowledgements(self) -> list[PendingAcknowledgement]:
        """The acknowledgements by transaction."""
        return [PendingAcknowledgement(each, self.of(each)) for each in self._parts]

    def of(self, transaction: str) -> Acknowledgement:
        """All acknowledgements of a transaction as one."""
        parts = self._parts.get(transaction, ())
        return Acknowledgement(
            positions=[position for part in parts for position in part.positions],
            through=max((part.through for part in parts if part.through is not None), default=None),
        )

    def owner(self, position: ChangePosition) -> str | None:
        """The transaction in which a change, which must be live, is pending."""
        if self._through is not None and position <= self._through.position:
            return self._through.transaction
        return self._owners.get(position)

    def count(self, deliveries: Deliveries) -> int:
        """How many of the live changes are pending."""
        left = deliveries.copy()
        return sum(left.acknowledge(part) for parts in self._parts.values() for part in parts)

    # Judging

    def find_new(
        self, transaction: str, acknowledgement: Acknowledgement, deliveries: Deliveries
    ) -> Acknowledgement | None:
        """The part of an acknowledgement that is not pending in the transaction yet; None if all of it is.

        `AcknowledgementConflict` if some of it cannot become pending.
        """
        positions = [
            position
            for position in dict.fromkeys(acknowledgement.positions)
            if not (deliveries.is_live(position) and self.owner(position) == transaction)
        ]
        for position in positions:
            self._require_free(position, deliveries)
        through = acknowledgement.through
        if through is not None and not self._is_new(transaction, through, deliveries):
            through = None
        if not positions and through is None:
            return None
        return Acknowledgement(positions=positions, through=through)

    def require_none(self, acknowledgement: Acknowledgement, deliveries: Deliveries) -> None:
        """Raise `AcknowledgementConflict` if some of it is pending."""
        if not self._parts:
            return
        for position in acknowledgement.positions:
            if deliveries.is_live(position) and (owner := self.owner(position)) is not None:
                raise self._conflict(position, f"is pending in transaction {owner}", owner)
        if acknowledgement.through is not None:
            self._require_none_below(acknowledgement.through, deliveries)

    def _require_free(self, position: ChangePosition, deliveries: Deliveries) -> None:
        if not deliveries.is_live(position):
            raise self._conflict(position, "was acknowledged before", None)
        owner = self.owner(position)
        if owner is not None:
            raise self._conflict(position, f"is pending in transaction {owner}", owner)

    def _is_new(self, transaction: str, through: ChangePosition, deliveries: Deliveries) -> bool:
        """Whether acknowledging all up to a position adds to the acknowledgements of a transaction."""
        held = self._through
        if held is not None and held.transaction != transaction:
            raise self._conflict(
                through,
                f"cannot be acknowledged with all before it: transaction {held.transaction} has acknowledged "
                f"all up to {held.position}",
                held.transaction,
            )
        self._require_none_below(through, deliveries, but=transaction)
        left = deliveries
        if held is not None:
            left = deliveries.copy()
            left.acknowledge(Acknowledgement(through=held.position))
        if left.has_live(through):
            return True
        if held is None:
            raise self._conflict(through, "was acknowledged before, with all before it", None)
        return False

    def _require_none_below(
        self, through: ChangePosition, deliveries: Deliveries, *, but: str | None = None
    ) -> None:
        """Raise `AcknowledgementConflict` if another transaction than `but` has a change up to a position."""
        owners = ((position, owner) for position, owner in self._owners.items() if position <= through)
        taken = next(((position, owner) for position, owner in owners if owner != but), None)
        held = self._through
        if taken is None and held is not None and held.transaction != but:
            position = min(held.position, through)
            taken = (position, held.transaction) if deliveries.has_live(position) else None
        if taken is not None:
            position, owner = taken
            raise self._conflict(
                through,
                f"cannot be acknowledged with all before it: {position} is pending in transaction {owner}",
                owner,
            )

    def _conflict(self, position: ChangePosition, what: str, owner: str | None) -> AcknowledgementConflict:
        return conflict(self._subscription, position, what, owner)

    # Changing

    def add(self, transaction: str, part: Acknowledgement) -> None:
        """Enter the new part of an acknowledgement."""
        self._parts.setdefault(transaction, []).append(part)
        self._enter(transaction, part)

    def take_back(self, transaction: str, part: Acknowledgement) -> None:
        """Undo `add`."""
        parts = self._parts.get(transaction, [])
        self.remove(transaction)
        for other in parts:
            if other is not part:
                self.add(transaction, other)

    def remove(self, transaction: str) -> None:
        """Drop the acknowledgements of a transaction."""
        for part in self._parts.pop(transaction, ()):
            for position in part.positions:
                self._owners.pop(position, None)
        if self._through is not None and self._through.transaction == transaction:
            self._through = None

    def _enter(self, transaction: str, part: Acknowledgement) -> None:
        self._owners.update(dict.fromkeys(part.positions, transaction))
        if part.through is not None and (self._through is None or part.through > self._through.position):
            self._through = _Through(transaction, part.through)


def conflict(
    subscription: str, position: ChangePosition, what: str, owner: str | None
) -> AcknowledgementConflict:
    """The error for acknowledging a change that a transaction holds, or that was acknowledged before."""
    advice = (
        "it needs no further acknowledgement"
        if owner is None
        else f"commit or abort that one first, or floodmark txn abort {owner}"
    )
    return AcknowledgementConflict(
        f"{position} of subscription {subscription!r} {what}; {advice}",
        subscription=subscription,
        version=position.version,
        index=position.index,
        transaction=owner,
    )
