"""The account of a reader: whether it got exactly the changes that the heartbeats sum up.

A reader counts a namespace's changes, and compares its count with each heartbeat.  A change that was lost,
doubled or altered shows at the next heartbeat; a heartbeat that was lost with its changes shows at the one
after it, because each names the version at which the one before it ended.

    changes     a b c       d e         f             g h
    heartbeats          |          S          |             |
                     through    a log is    through      through
                                 sealed

A sealed log ends with a heartbeat of its own, S, and its node's next one, which ends above S, leaves out the
changes of S: the sum of both must equal the count.

Some intervals prove nothing, and are reported as unchecked: the first, whose beginning the reader has not
seen; one in which the node lost count, after a failed write or a start; and one in which the reader caught up
by a scan, which finds stored records and not logged changes.

A reader of fields or counters gets whole records where only parts were written.  Its changes are counted
without their digests.

An account covers one namespace and one node's changes.  It is part of the reader's checkpoint: store its
state in the same commit, or the next reader begins with an unchecked interval.
"""

from enum import StrEnum
from typing import TypeAlias

import msgspec

from floodmark.model.change import NamespaceBeat, Tally
from floodmark.model.version import Version


class Doubt(StrEnum):
    """The reason why an interval proves nothing."""

    FIRST = "first interval"
    RECOUNT = "the node lost count in it"
    SCAN = "caught up by a scan"
    AHEAD = "changes behind the heartbeat were counted before it came"
    RECUT = "it was cut into other ranges in it"
    SNAPSHOT = "it began with a snapshot"
    UNCOUNTED = "some of it was delivered by a runner that does not count"


class Checked(msgspec.Struct, frozen=True, tag=True):
    """Every change in `(since, through]` arrived exactly once."""

    since: Version
    through: Version
    changes: int


class Unchecked(msgspec.Struct, frozen=True, tag=True):
    """The interval that ends at `through` proves nothing."""

    through: Version
    reason: Doubt


class Finding(msgspec.Struct, frozen=True, tag=True):
    """The count over `(since, through]` differs from that of the heartbeat.

    `expected` is None if the heartbeat itself is missing.
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
    """An account between two heartbeats.

    `pending` was counted since `counted_since`, up to the version `latest`; `sealed` is the sum of logs that
    were sealed meanwhile.  With a `doubt` the current interval proves nothing.
    """

    counted_since: Version = 0
    latest: Version = 0
    pending: Tally = Tally()
    sealed: Tally = Tally()
    doubt: Doubt | None = Doubt.FIRST
    # Whether all pending changes came with their digests.
    digested: bool = True


class Account:
    """Counts changes and compares them with heartbeats, both in the order of their versions.

    With `own` only changes first written at the source are counted, as a link does.
    """

    def __init__(self, state: AccountState | None = None, *, own: bool) -> None:
        self.state = state or AccountState()
        self._own = own

    def add(self, version: Version, tally: Tally, *, digested: bool = True) -> None:
        """Count changes up to a version; `digested` says whether their digests are known."""
        state = self.state
        self.state = msgspec.structs.replace(
            state,
            latest=max(state.latest, version),
            pending=state.pending.plus(tally),
            digested=state.digested and digested,
        )

    def doubt(self, reason: Doubt) -> None:
        """Mark the current interval as unchecked."""
        self.state = msgspec.structs.replace(self.state, doubt=reason)

    def close(self, beat: NamespaceBeat) -> Verdict | None:
        """Compare the count with a heartbeat.

        None for a repeated heartbeat, and for that of a sealed log, which its node's next one completes.
        """
        state = self.state
        if beat.through <= state.counted_since:
            return None
        if beat.log is not None:
            self.state = msgspec.structs.replace(state, sealed=state.sealed.plus(self._tally(beat)))
            return None
        doubt = state.doubt or self._find_doubt(beat)
        # Changes above the heartbeat belong to the next interval, but were counted into this one.
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
