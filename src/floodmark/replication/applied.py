"""The result of a step: the number and age of its changes, and the sums to check against heartbeats.

Each task that applies a part of a step returns one.  Their sum goes to the target with the step, and into the
account that the target keeps of the link.
"""

from typing import Final

import msgspec

from floodmark.accounting.account import Account, Doubt, Verdict
from floodmark.model.change import NamespaceBeat, Tally
from floodmark.model.version import Version
from floodmark.replication.lag import LagCounts


class NamespaceApplied(msgspec.Struct, kw_only=True):
    """The applied changes of one namespace, for its account.

    `tallies` holds, for each `through` of the ordinary heartbeats in `beats`, the tally since the one before;
    `rest` is the tally after the last.  While a write is prepared at the source, several heartbeats have the
    same `through`.  `latest` is the highest version counted.  After a scan the sums prove nothing.
    """

    changes: int = 0
    latest: Version = 0
    tallies: list[tuple[Version, Tally]] = []
    rest: Tally = Tally()
    beats: list[NamespaceBeat] = []
    scanned: bool = False
    lags: LagCounts = msgspec.field(default_factory=LagCounts)

    def count(self, through: Version, tally: Tally) -> None:
        """Add the tally before a heartbeat; heartbeats come in their order."""
        if self.tallies and self.tallies[-1][0] == through:
            tally = self.tallies.pop()[1].plus(tally)
        self.tallies.append((through, tally))

    def plus(self, other: "NamespaceApplied") -> "NamespaceApplied":
        """The sum of two parts of one step, of different keys."""
        beats = {(beat.version, beat.log): beat for beat in [*self.beats, *other.beats]}
        tallies = dict(self.tallies)
        for through, tally in other.tallies:
            tallies[through] = tallies.get(through, Tally()).plus(tally)
        return NamespaceApplied(
            changes=self.changes + other.changes,
            latest=max(self.latest, other.latest),
            tallies=sorted(tallies.items()),
            rest=self.rest.plus(other.rest),
            beats=sorted(
                beats.values(), key=lambda beat: (beat.version, -1 if beat.log is None else beat.log)
            ),
            scanned=self.scanned or other.scanned,
            lags=self.lags.plus(other.lags),
        )

    def enter(self, account: Account) -> list[Verdict]:
        """Add the sums of a whole step to the account of the link; return the verdicts of its heartbeats."""
        verdicts: list[Verdict] = []
        tallies = dict(self.tallies)
        for beat in self.beats:
            if self.scanned:
                account.doubt(Doubt.SCAN)
            if beat.log is None:
                account.add(beat.through, tallies.pop(beat.through, Tally()))
            verdict = account.close(beat)
            if verdict is not None:
                verdicts.append(verdict)
        if self.scanned:
            account.doubt(Doubt.SCAN)
        if self.rest.changes:
            account.add(self.latest, self.rest)
        return verdicts


class Applied(msgspec.Struct):
    """The applied changes of a step, or of a part of one, by namespace."""

    namespaces: dict[str, NamespaceApplied] = {}

    @property
    def changes(self) -> int:
        """The number of applied changes, including those that lost to newer ones."""
        return sum(namespace.changes for namespace in self.namespaces.values())

    def plus(self, other: "Applied") -> "Applied":
        """The sum of two parts of one step."""
        return Applied(
            {
                name: self.namespaces.get(name, _NOTHING).plus(other.namespaces.get(name, _NOTHING))
                for name in {**self.namespaces, **other.namespaces}
            }
        )


_NOTHING: Final = NamespaceApplied()
