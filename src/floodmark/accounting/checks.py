"""Whether a stage has passed on exactly what was written, as far as heartbeats tell, and what was found.

A stage is whoever reads all changes of a namespace and takes them somewhere: a named feed, an export, a copy
to another site.  Its checks are a part of its checkpoint, stored in the same commit: they say what was
counted up to there, and the next one goes on from it.  What is delivered again, because a stage was killed
before it could store its checkpoint, is counted again from that checkpoint, and so once.
"""

import logging
from collections.abc import Sequence
from typing import Final

import msgspec
from msgspec.structs import replace

from floodmark.accounting.account import Account, AccountState, Checked, Doubt, Finding, Unchecked, Verdict
from floodmark.accounting.counting import Counted, Entry, compact, go_on_with, join_beats, thin
from floodmark.model.change import NamespaceBeat
from floodmark.model.version import Version

FINDINGS_KEPT: Final = 16
# How long a finding is an alarm.  It is remembered for longer.
FINDING_MS_MAX: Final = 24 * 60 * 60_000

PARTLY_READ: Final = "it reads only some of the namespace's keys, and heartbeats tell of all"

_log = logging.getLogger("floodmark.feed")


class FoundInterval(msgspec.Struct, frozen=True, kw_only=True):
    """An interval in which something is missing, doubled or altered, and when that was noticed.

    What was expected is None where the heartbeat that should have told is missing itself.  Digests are text:
    they have 64 bits, and many readers of JSON round such numbers.
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
        """A finding as it is kept and shown."""
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
    """What a stage has checked so far.  The counts are of intervals between heartbeats.

    `beats` were heard of, but not all parts of the stage have come so far.  What lies at or below `doubted`
    proves nothing, for the reason `doubt`.  `rest` is what a stage that goes in steps has counted behind the
    last of them.  `reason` says why the last interval that proved nothing did not.
    """

    account: AccountState = AccountState()
    beats: tuple[NamespaceBeat, ...] = ()
    doubted: Version = 0
    doubt: Doubt = Doubt.SCAN
    rest: tuple[Entry, ...] = ()
    checked: int = 0
    unchecked: int = 0
    wrong: int = 0
    reason: Doubt | None = None
    findings: tuple[FoundInterval, ...] = ()

    def hear(self, counted: Counted) -> "Checks":
        """Take note of heartbeats that a part of the stage has come by."""
        beats = go_on_with(self.beats, counted.beats, self.account.counted_since)
        heard = replace(self, beats=tuple(thin(beats)))
        return heard.doubt_through(counted.scanned, Doubt.SCAN)

    def doubt_through(self, version: Version, reason: Doubt) -> "Checks":
        """Let nothing be proven up to a version."""
        return replace(self, doubted=version, doubt=reason) if version > self.doubted else self

    def begin_anew(self) -> "Checks":
        """Forget what was counted, but not what was found."""
        return replace(self, account=AccountState(), beats=(), doubted=0, rest=())

    def settle(
        self, parts: Sequence[Sequence[Entry]], through: Version, now_ms: int
    ) -> "tuple[Checks, list[list[Entry]]]":
        """Hold what all parts have counted against the heartbeats up to where all of them have come.

        The checks after that, and of each part what is still to be checked.
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
    """The checks of a stage that goes in steps, after one of them: all of it up to `through` was counted."""
    settled, (rest,) = checks.hear(counted).settle([[*checks.rest, *counted.entries]], through, now_ms)
    return replace(settled, rest=tuple(rest))


def report_findings(stage: str, before: Checks | None, after: Checks | None, **extra: str) -> None:
    """Write what was found since an earlier look into the log, where alarms are made of errors."""
    if after is not None:
        new = after.wrong - (0 if before is None else before.wrong)
        for finding in after.findings[-new:] if new else ():
            _log.error("%s: %s", stage, finding.text, extra=extra)


class CheckStatistics(msgspec.Struct, frozen=True, kw_only=True):
    """What a stage has checked, for people and programs.

    `unchecked_reason` says why nothing is checked, or why the last interval that was not could not be.
    """

    intervals_checked: int = 0
    intervals_unchecked: int = 0
    intervals_wrong: int = 0
    unchecked_reason: str | None = None
    findings: list[FoundInterval] = []

    @classmethod
    def of(cls, checks: Checks | None) -> "CheckStatistics":
        """The statistics of checks; None stands for a stage that reads only some of the keys."""
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
        """In a few words.

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
        """What somebody should look at, if something was found of late."""
        late = [finding for finding in self.findings if now_ms - finding.at_ms <= FINDING_MS_MAX]
        return f"{late[-1].text}; compare what it has with the site" if late else None


def _is_dividing(beat: NamespaceBeat, parts: Sequence[Sequence[Entry]]) -> bool:
    return any(entry.first <= beat.through < entry.last for part in parts for entry in part)


def _join_with_next(beats: list[NamespaceBeat]) -> bool:
    """Join the first heartbeat with the next ordinary one; False if that has not come yet."""
    place = next((number for number, beat in enumerate(beats[1:], 1) if beat.log is None), None)
    if place is None:
        return False
    beats[place] = join_beats(beats[0], beats[place])
    del beats[0]
    return True


def _enter(account: Account, part: Sequence[Entry], through: Version) -> list[Entry]:
    """Enter what a part has counted up to a version; what is left of it."""
    for entry in part:
        if entry.last <= through:
            account.add(entry.last, entry.tally, digested=entry.digest is not None)
    return [entry for entry in part if entry.last > through]
