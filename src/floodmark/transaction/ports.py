"""The port through which a coordinator reaches the participants of its transactions."""

from typing import Protocol

from floodmark.model.transaction import Participant
from floodmark.model.version import Version


class Participants(Protocol):
    """Tells participants the decision.

    Calls are idempotent and succeed for a participant that no longer exists.  After any error the coordinator
    calls again.
    """

    def commit(self, participant: Participant, transaction: str, version: Version) -> None:
        """Make a participant's part of a transaction effective at a version."""
        ...

    def abort(self, participant: Participant, transaction: str) -> None:
        """Discard a participant's part of a transaction."""
        ...
