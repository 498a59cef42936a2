"""The checks of a stage against heartbeats, and their findings.

A stage reads all changes of a namespace and delivers them: a named feed, an export, a Spark query.  Its
checks are stored in the same commit as its checkpoint.  A stage that was killed delivers again from its
checkpoint, and counts again from there, so every change counts once.
"""

import logging
from collections.abc import Sequence
from typing import Final

import msgspec
from msgspec.structs import replace

from floodmark.accounting.account import Account, AccountState, Checked, Doubt, Finding, Unchecked, Verdict
from floodmark.accounting.counting import Counted, CountedRun, compact, go_on_with, join_beats, thin
from floodmark.model.change import NamespaceBeat
from floodmark.model.version import Version

FINDINGS_KEPT: Final = 16
# How long a finding raises an alarm; it is stored longer.
FINDING_MS_MAX: Final = 24 * 60 * 60_000

PARTLY_READ: Final = "it reads only some of the namespace's keys, and heartbeats count all"

_log = logging.getLogger("floodmark.feed")


class FoundInterval(msgspec.Struct, frozen=True, kw_only=True):
    """An interval in which changes are missing, doubled or altered, and the time at which that was found.

    The expected count is None if the heartbeat itself is missing.  Digests are text, because many readers of
    JSON round numbers of 64 bits.
    """

    at_ms: int
    since: Version
    through: Version
    expected_changes: int | None
    expected_digest: str | None
    got_changes: int
    got_digest: str
    text: str

    @classmethod
    def of(cls, finding: Finding, at_ms: int) -> "FoundInterval":
        """A finding as it is stored and shown."""
        expected, got = finding.expected, finding.got
        return cls(
            at_ms=at_ms,
            since=finding.since,
            through=finding.through,
            expected_changes=None if expected is None else expected.changes,
            expected_digest=None if expected is None else f"{expected.digest:016x}",
            got_changes=got.changes,
            got_digest=f"{got.digest:016x}",
            text=str(finding),
        )


class Checks(msgspec.Struct, frozen=True, kw_only=True):
    """The checks of a stage so far.  `checked`, `unchecked` and `wrong` count intervals between heartbeats.

    `beats` are heartbeats that not all parts of the stage have passed.  Intervals at or below `doubted` prove
    nothing, for the reason `doubt`.  `rest` are the entries above the last heartbeat of a stage that works in
    steps.  `reason` is why the last unchecked interval was not checked.
    """

    account: AccountState = AccountState()
    beats: tuple[NamespaceBeat, ...] = ()
    doubted: Version = 0
    doubt: Doubt = Doubt.SCAN
    rest: tuple[CountedRun, ...] = ()
    checked: int = 0
    unchecked: int = 0
    wrong: int = 0
    reason: Doubt | None = None
    findings: tuple[FoundInterval, ...] = ()

    def hear(self, counted: Counted) -> "Checks":
        """Add the heartbeats that a part of the stage has passed."""
        beats = go_on_with(self.beats, counted.beats, self.account.counted_since)
        heard = replace(self, beats=tuple(thin(beats)))
        return heard.doubt_through(counted.scanned, Doubt.SCAN)

    def doubt_through(self, version: Version, reason: Doubt) -> "Checks":
        """Mark all intervals up to a version as unchecked."""
        return replace(self, doubted=version, doubt=reason) if version > self.doubted else self

    def begin_anew(self) -> "Checks":
        """Drop the counts and keep the findings."""
        return replace(self, account=AccountState(), beats=(), doubted=0, rest=())

    def settle(
        self, parts: Sequence[Sequence[CountedRun]], through: Version, now_ms: int
    ) -> "tuple[Checks, list[list[CountedRun]]]":
        """Compare the counts of all parts with the heartbeats up to the version that all have reached.

        Returns the checks after that, and the unchecked entries of each part.
        """
        account = Account(self.account, own=False)
        beats, left = list(self.beats), [list(part) for part in parts]
        verdicts: list[Verdict] = []
        while beats and beats[0].version <= through:
            beat = beats[0]
            if beat.log is None and _is_dividing(beat, left):
                if not _join_with_next(beats):
                    break
                continue
            del beats[0]
            if beat.log is None:
                left = [_enter(account, part, beat.through) for part in left]
                if self.doubted > account.state.counted_since:
                    account.doubt(self.doubt)
            verdict = account.close(beat)
            if verdict is not None:
                verdicts.append(verdict)
        settled = replace(self, account=account.state, beats=tuple(beats))
        return settled._take(verdicts, now_ms), [compact(part, beats) for part in left]

    def _take(self, verdicts: Sequence[Verdict], now_ms: int) -> "Checks":
        unchecked = [verdict for verdict in verdicts if isinstance(verdict, Unchecked)]
        wrong = [FoundInterval.of(verdict, now_ms) for verdict in verdicts if isinstance(verdict, Finding)]
        return replace(
            self,
            checked=self.checked + sum(isinstance(verdict, Checked) for verdict in verdicts),
            unchecked=self.unchecked + len(unchecked),
            wrong=self.wrong + len(wrong),
            reason=unchecked[-1].reason if unchecked else self.reason,
            findings=(*self.findings, *wrong)[-FINDINGS_KEPT:],
        )


def check_step(checks: Checks, counted: Counted, through: Version, now_ms: int) -> Checks:
    """The checks of a stage that works in steps, after a step that counted everything up to `through`."""
    settled, (rest,) = checks.hear(counted).settle([[*checks.rest, *counted.entries]], through, now_ms)
    return replace(settled, rest=tuple(rest))


def report_findings(stage: str, before: Checks | None, after: Checks | None, **extra: str) -> None:
    """Log the findings that are new in `after` as errors, so that they raise alarms."""
    if after is not None:
        new = after.wrong - (0 if before is None else before.wrong)
        for finding in after.findings[-new:] if new else ():
            _log.error("%s: %s", stage, finding.text, extra=extra)


class CheckStatistics(msgspec.Struct, frozen=True, kw_only=True):
    """The statistics of a stage's checks.

    `unchecked_reason` is why nothing is checked, or why the last unchecked interval was not.
    """

    intervals_checked: int = 0
    intervals_unchecked: int = 0
    intervals_wrong: int = 0
    unchecked_reason: str | None = None
    findings: list[FoundInterval] = []

    @classmethod
    def of(cls, checks: Checks | None) -> "CheckStatistics":
        """The statistics of checks; pass None for a stage that reads only some of the keys."""
        if checks is None:
            return cls(unchecked_reason=PARTLY_READ)
        return cls(
            intervals_checked=checks.checked,
            intervals_unchecked=checks.unchecked,
            intervals_wrong=checks.wrong,
            unchecked_reason=None if checks.reason is None else str(checks.reason),
            findings=list(checks.findings),
        )

    def __str__(self) -> str:
        """A summary in a few words.

        >>> str(CheckStatistics(intervals_checked=1200, intervals_unchecked=2, unchecked_reason="a scan"))
        '1,200 intervals right, 2 unchecked (the last: a scan)'
        >>> str(CheckStatistics(unchecked_reason="it reads some keys"))
        'no: it reads some keys'
        """
        counts = ((self.intervals_unchecked, "unchecked"), (self.intervals_wrong, "wrong"))
        if not self.intervals_checked and not any(count for count, _ in counts):
            return f"no: {self.unchecked_reason or 'no heartbeat has come yet'}"
        parts = [f"{self.intervals_checked:,} intervals right"]
        for count, word in counts:
            if count:
                reason = f" (the last: {self.unchecked_reason})" if word == "unchecked" else ""
                parts.append(f"{count:,} {word}{reason}")
        return ", ".join(parts)

    def alarm(self, now_ms: int) -> str | None:
        """A recent finding, as the text of an alarm; None if there is none."""
        late = [finding for finding in self.findings if now_ms - finding.at_ms <= FINDING_MS_MAX]
        return f"{late[-1].text}; compare its sink with the site" if late else None


def _is_dividing(beat: NamespaceBeat, parts: Sequence[Sequence[CountedRun]]) -> bool:
    return any(entry.first <= beat.through < entry.last for part in parts for entry in part)


def _join_with_next(beats: list[NamespaceBeat]) -> bool:
    """Join the first heartbeat with the next ordinary one; False if that has not arrived yet."""
    place = next((number for number, beat in enumerate(beats[1:], 1) if beat.log is None), None)
    if place is None:
        return False
    beats[place] = join_beats(beats[0], beats[place])
    del beats[0]
    return True


def _enter(account: Account, part: Sequence[CountedRun], through: Version) -> list[CountedRun]:
    """Enter a part's counts up to a version into the account; returns the entries above it."""
    for entry in part:
        if entry.last <= through:
            account.add(entry.last, entry.tally, digested=entry.digest is not None)
    return [entry for entry in part if entry.last > through]
