"""The account of a reader: whether it has got exactly the changes that the heartbeats speak of.

Whoever passes a namespace's changes on counts them as it goes, and when a heartbeat comes by, what was
counted must be what the heartbeat says.  A change that was lost, doubled or altered on the way shows at the
next heartbeat; a heartbeat that was lost with its changes shows at the one after it, because each names
where the one before it ended.

    changes     a b c       d e         f             g h
    heartbeats          |          S          |             |
                     through    a log is    through      through
                                 sealed

A log that is sealed ends with a heartbeat of its own, S, and its node's next one leaves out what S has told:
both together must give what was counted.

Some intervals prove nothing, and that is said: the first, whose beginning the reader has not seen; one whose
changes the node itself has lost count of, after a failed write or a start; and one that was caught up by a
scan, which finds what is stored and not what was logged.

Who is given whole records where only parts of them were written, as users are of fields and counters, cannot
tell what was written; then the changes are counted, and their digests are left out.

An account is about one namespace and one node's changes.  It is part of the reader's checkpoint: store its
state in the same commit, or the next reader begins with an interval that proves nothing.
"""

from enum import StrEnum
from typing import TypeAlias

import msgspec

from floodmark.model.change import NamespaceBeat, Tally
from floodmark.model.version import Version


class Doubt(StrEnum):
    """Why an interval proves nothing."""

    FIRST = "first interval"
    RECOUNT = "the node lost count in it"
    SCAN = "caught up by a scan"
    AHEAD = "changes behind the heartbeat were counted before it came"
    RECUT = "it was cut into other ranges in it"
    SNAPSHOT = "it began with a snapshot"
    UNCOUNTED = "some of it was delivered by a runner that does not count"


class Checked(msgspec.Struct, frozen=True, tag=True):
    """All changes in `(since, through]` came, each once."""

    since: Version
    through: Version
    changes: int


class Unchecked(msgspec.Struct, frozen=True, tag=True):
    """Nothing can be said about the interval that ends at `through`."""

    through: Version
    reason: Doubt


class Finding(msgspec.Struct, frozen=True, tag=True):
    """What was counted in `(since, through]` is not what was written.

    `expected` is None where the heartbeat that should have told is itself missing.
    """

    since: Version
    through: Version
    expected: Tally | None
    got: Tally

    def __str__(self) -> str:
        span = f"between version {self.since} and {self.through}"
        if self.expected is None:
            return f"a heartbeat {span} is missing, and maybe changes with it: {self.got.changes:,} came"
        missing = self.expected.changes - self.got.changes
        if missing > 0:
            return f"{missing:,} of {self.expected.changes:,} changes {span} are missing"
        if missing < 0:
            return f"{-missing:,} more changes {span} came than the {self.expected.changes:,} written"
        return f"of {self.expected.changes:,} changes {span} some came altered, or others than were written"


Verdict: TypeAlias = Checked | Unchecked | Finding


class AccountState(msgspec.Struct, frozen=True, array_like=True):
    """What an account knows between two heartbeats.

    `pending` was counted since `counted_since`, up to the version `latest`; `sealed` is what logs that were
    sealed meanwhile have told.  With a doubt the interval under way will prove nothing.
    """

    counted_since: Version = 0
    latest: Version = 0
    pending: Tally = Tally()
    sealed: Tally = Tally()
    doubt: Doubt | None = Doubt.FIRST
    # Whether all that is pending came with its digest.
    digested: bool = True


class Account:
    """Counts changes and holds them against heartbeats, both in the order of their versions.

    With `own` only changes that were first written at the source are counted, as a link does.
    """

    def __init__(self, state: AccountState | None = None, *, own: bool) -> None:
        self.state = state or AccountState()
        self._own = own

    def add(self, version: Version, tally: Tally, *, digested: bool = True) -> None:
        """Count changes, the highest of which has this version, by their digests if these are known."""
        state = self.state
        self.state = msgspec.structs.replace(
            state,
            latest=max(state.latest, version),
            pending=state.pending.plus(tally),
            digested=state.digested and digested,
        )

    def doubt(self, reason: Doubt) -> None:
        """Let the interval under way prove nothing."""
        self.state = msgspec.structs.replace(self.state, doubt=reason)

    def close(self, beat: NamespaceBeat) -> Verdict | None:
        """Hold what was counted against a heartbeat.

        None if it says nothing new: it came again, or is that of a sealed log, which its node's next
        heartbeat completes.
        """
        state = self.state
        if beat.through <= state.counted_since:
            return None
        if beat.log is not None:
            self.state = msgspec.structs.replace(state, sealed=state.sealed.plus(self._tally(beat)))
            return None
        doubt = state.doubt or self._find_doubt(beat)
        # What lies behind the heartbeat and was counted already belongs to the next interval, and nobody
        # can tell the two apart any more.
        is_ahead = state.latest > beat.through
        self.state = AccountState(
            counted_since=beat.through,
            latest=state.latest,
            doubt=Doubt.AHEAD if is_ahead else None,
        )
        if doubt is not None:
            return Unchecked(beat.through, doubt)
        if beat.since != state.counted_since:
            return Finding(state.counted_since, beat.through, None, state.pending)
        expected = state.sealed.plus(self._tally(beat))
        if not state.digested:
            expected = Tally(expected.changes, state.pending.digest)
        if state.pending != expected:
            return Finding(state.counted_since, beat.through, expected, state.pending)
        return Checked(state.counted_since, beat.through, expected.changes)

    def _find_doubt(self, beat: NamespaceBeat) -> Doubt | None:
        if beat.since == 0:
            return Doubt.RECOUNT
        return Doubt.AHEAD if self.state.latest > beat.through else None

    def _tally(self, beat: NamespaceBeat) -> Tally:
        return beat.own if self._own else beat.all
