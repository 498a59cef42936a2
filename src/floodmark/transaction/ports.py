"""What a coordinator needs of those who take part in its transactions."""

from typing import Protocol

from floodmark.model.transaction import Participant
from floodmark.model.version import Version


class Participants(Protocol):
    """The way to the participants.

    Each call may be repeated, and does nothing where its work was done before; so does one about a
    participant that is not there any more.  Whatever else is wrong is raised, and the call comes again.
    """

    def commit(self, participant: Participant, transaction: str, version: Version) -> None:
        """Let a participant make its part of a transaction effective, at a version."""
        ...

    def abort(self, participant: Participant, transaction: str) -> None:
        """Let a participant forget its part of a transaction."""
        ...
