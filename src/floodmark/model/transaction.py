"""Transactions as their callers see them: states, participants and progress.

    OPEN ──> COMMITTING ──> COMMITTED
      └────> ABORTING ────> ABORTED

There are no other transitions.  The step out of OPEN is one record in the coordinator's log, and final; after
it the coordinator only sends the decision to the participants.
"""

from enum import StrEnum
from typing import Final, Literal

import msgspec

from floodmark.model.version import Version


class TransactionState(StrEnum):
    """The state of a transaction."""

    OPEN = "open"
    COMMITTING = "committing"
    COMMITTED = "committed"
    ABORTING = "aborting"
    ABORTED = "aborted"


class ParticipantKind(StrEnum):
    """The kinds of participants of a transaction."""

    PARTITION = "partition"
    SUBSCRIPTION = "subscription"


class Participant(msgspec.Struct, frozen=True, array_like=True, order=True):
    """A participant of a transaction.

    A subscription is identified by its name.  Partitions are split and merged, so a partition is identified
    by a qualified key that the transaction writes there, in hexadecimal.
    """

    kind: ParticipantKind
    name: str


class Waiting(msgspec.Struct, frozen=True, kw_only=True):
    """A participant that has not confirmed yet, and the error of the last attempt."""

    participant: Participant
    attempts: int
    error: str


class TransactionStatistics(msgspec.Struct, frozen=True, kw_only=True):
    """A transaction at this moment; `wrote` is true if a partition takes part."""

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
    """The outcome of a transaction, with the version of a commit.

    An aborted transaction is never committed later.  The outcome is unknown once the site has forgotten it.
    """

    state: Literal["committed", "aborted", "unknown"]
    version: Version = 0


ABORTED: Final = TransactionOutcome("aborted")
UNKNOWN: Final = TransactionOutcome("unknown")
