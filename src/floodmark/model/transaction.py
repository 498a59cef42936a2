"""Transactions as their callers see them: states, participants and progress.

    OPEN ──> COMMITTING ──> COMMITTED
      └────> ABORTING ────> ABORTED

There is no other way.  The step out of OPEN is one record in the coordinator's log, and nothing takes it
back; what follows is only a matter of telling the participants.
"""

from enum import StrEnum
from typing import Final, Literal

import msgspec

from floodmark.model.version import Version


class TransactionState(StrEnum):
    """How far a transaction is."""

    OPEN = "open"
    COMMITTING = "committing"
    COMMITTED = "committed"
    ABORTING = "aborting"
    ABORTED = "aborted"


class ParticipantKind(StrEnum):
    """What can have a part in a transaction."""

    PARTITION = "partition"
    SUBSCRIPTION = "subscription"


class Participant(msgspec.Struct, frozen=True, array_like=True, order=True):
    """Something that has a part in a transaction.

    A subscription is known by its name.  Partitions are split and merged, keys stay: a partition is known by
    a qualified key that the transaction writes there, in hexadecimal.
    """

    kind: ParticipantKind
    name: str


class Waiting(msgspec.Struct, frozen=True, kw_only=True):
    """A participant that has not done its part yet, and what it said when it was last told."""

    participant: Participant
    attempts: int
    error: str


class TransactionStatistics(msgspec.Struct, frozen=True, kw_only=True):
    """A transaction at this moment; `wrote` says whether a partition has a part in it."""

    id: str
    coordinator: int
    state: TransactionState
    age_ms: int
    remaining_ms: int
    version: Version
    reason: str
    participants: list[Participant]
    waiting_for: list[Waiting]
    wrote: bool = False


class TransactionOutcome(msgspec.Struct, frozen=True):
    """How a transaction has ended, and the version of a commit.

    An aborted one is never committed later.  The outcome is unknown when the site has forgotten it.
    """

    state: Literal["committed", "aborted", "unknown"]
    version: Version = 0


ABORTED: Final = TransactionOutcome("aborted")
UNKNOWN: Final = TransactionOutcome("unknown")
