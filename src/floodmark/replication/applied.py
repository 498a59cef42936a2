"""What was applied in a step: how much, how old it was, and the sums that its heartbeats are held against.

Tasks that apply parts of one step each hand one back; added up, they go to the target with the step, and into
the account that it keeps of the link.
"""

from typing import Final

import msgspec

from floodmark.accounting.account import Account, Doubt, Verdict
from floodmark.model.change import NamespaceBeat, Tally
from floodmark.model.version import Version
from floodmark.replication.lag import LagCounts


class NamespaceApplied(msgspec.Struct, kw_only=True):
    """What was applied of one namespace, for its account.

    `tallies` holds, for each `through` of the ordinary heartbeats in `beats`, what was counted up to there
    from the one before; `rest` is what came after the last.  While something is prepared at the source,
    several heartbeats go through the same version.  `latest` is the highest version counted.  After a scan
    the sums prove nothing.
    """

    changes: int = 0
    latest: Version = 0
    tallies: list[tuple[Version, Tally]] = []
    rest: Tally = Tally()
    beats: list[NamespaceBeat] = []
    scanned: bool = False
    lags: LagCounts = msgspec.field(default_factory=LagCounts)

    def count(self, through: Version, tally: Tally) -> None:
        """Enter what was counted before a heartbeat; heartbeats come in their order."""
        if self.tallies and self.tallies[-1][0] == through:
            tally = self.tallies.pop()[1].plus(tally)
        self.tallies.append((through, tally))

    def plus(self, other: "NamespaceApplied") -> "NamespaceApplied":
        """What two parts of one step, of different keys, have done together."""
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
        """Enter the sums of a whole step in the account of the link, and say what the heartbeats proved."""
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
    """What was applied in a step, or in a part of one, by namespace."""

    namespaces: dict[str, NamespaceApplied] = {}

    @property
    def changes(self) -> int:
        """How many changes were applied, those included that lost to newer ones."""
        return sum(namespace.changes for namespace in self.namespaces.values())

    def plus(self, other: "Applied") -> "Applied":
        """What two parts of one step have done together."""
        return Applied(
            {
                name: self.namespaces.get(name, _NOTHING).plus(other.namespaces.get(name, _NOTHING))
                for name in {**self.namespaces, **other.namespaces}
            }
        )


_NOTHING: Final = NamespaceApplied()
