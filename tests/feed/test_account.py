"""An account finds every loss, doubling and alteration at the next heartbeat, and nothing else."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final, TypeAlias

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from floodmark.accounting.account import (
    Account,
    AccountState,
    Checked,
    Doubt,
    Finding,
    Unchecked,
    Verdict,
)
from floodmark.model.change import NamespaceBeat, Tally
from floodmark.model.version import Version

_DIGESTS: Final = 0x9E3779B97F4A7C15


@dataclass(frozen=True)
class Written:
    """A change as a reader counts it."""

    version: Version
    tally: Tally


Row: TypeAlias = Written | NamespaceBeat


@dataclass
class Source:
    """What a node does, in numbers: logs with tallies, heartbeats over all of them, seals and restarts."""

    rows: list[Row] = field(default_factory=list)
    version: Version = 0
    counted_through: Version = 0
    logs: dict[int, Tally] = field(default_factory=lambda: {1: Tally()})
    next_log: int = 2

    def write(self, which: int) -> None:
        version = self._mint()
        log = self._log(which)
        tally = Tally(1, version * _DIGESTS % (1 << 64))
        self.logs[log] = self.logs[log].plus(tally)
        self.rows.append(Written(version, tally))

    def beat(self) -> None:
        through = self._mint()
        tally = Tally()
        for log in self.logs:
            tally, self.logs[log] = tally.plus(self.logs[log]), Tally()
        self._tell(through, tally, None)
        self.counted_through = through

    def split(self, which: int) -> None:
        self._seal([self._log(which)], self._mint(), 2)

    def merge(self, which: int) -> None:
        if len(self.logs) > 1:
            first = which % (len(self.logs) - 1)
            self._seal(list(self.logs)[first : first + 2], self._mint(), 1)

    def restart(self) -> None:
        self.logs = dict.fromkeys(self.logs, Tally())
        self.counted_through = 0

    def _seal(self, sealed: Iterable[int], version: Version, into: int) -> None:
        for log in sealed:
            self._tell(version, self.logs.pop(log), log)
        for _ in range(into):
            self.logs[self.next_log] = Tally()
            self.next_log += 1

    def _tell(self, through: Version, tally: Tally, log: int | None) -> None:
        version = through if log is not None else self._mint()
        self.rows.append(
            NamespaceBeat(
                site=1,
                node=0,
                version=version,
                wall_ms=0,
                since=self.counted_through,
                through=through,
                log=log,
                own=tally,
            )
        )

    def _log(self, which: int) -> int:
        return list(self.logs)[which % len(self.logs)]

    def _mint(self) -> Version:
        self.version += 1
        return self.version


def history_of(steps: Sequence[tuple[str, int]]) -> list[Row]:
    source = Source()
    for name, which in steps:
        if name in ("beat", "restart"):
            getattr(source, name)()
        else:
            getattr(source, name)(which)
    source.beat()
    return source.rows


def read(rows: Iterable[Row]) -> dict[Version, Verdict]:
    """What a reader says at each heartbeat.  It is begun anew from its stored state before every row."""
    verdicts: dict[Version, Verdict] = {}
    stored = msgspec.msgpack.encode(AccountState())
    for row in rows:
        account = Account(msgspec.msgpack.decode(stored, type=AccountState), own=True)
        if isinstance(row, Written):
            account.add(row.version, row.tally)
        elif (verdict := account.close(row)) is not None:
            verdicts[row.version] = verdict
        stored = msgspec.msgpack.encode(account.state)
    return verdicts


def is_node_beat(row: Row) -> bool:
    return isinstance(row, NamespaceBeat) and row.log is None


def next_beat(rows: Sequence[Row], index: int) -> Version:
    return next(row.version for row in rows[index + 1 :] if is_node_beat(row))


NAMES: Final = ("write", "write", "write", "write", "beat", "beat", "split", "merge", "restart")
STEPS: Final = st.lists(st.tuples(st.sampled_from(NAMES), st.integers(0, 9)), max_size=60)


@given(STEPS)
def test_a_history_that_comes_whole_is_checked_and_nothing_is_found(steps: list[tuple[str, int]]) -> None:
    rows = history_of(steps)
    verdicts = read(rows)
    beats = [row for row in rows if isinstance(row, NamespaceBeat) and row.log is None]
    assert list(verdicts) == [beat.version for beat in beats]
    assert not any(isinstance(verdict, Finding) for verdict in verdicts.values())
    for number, beat in enumerate(beats):
        is_proof = number > 0 and beat.since > 0
        assert isinstance(verdicts[beat.version], Checked if is_proof else Unchecked)
    proven = sum(verdict.changes for verdict in verdicts.values() if isinstance(verdict, Checked))
    proofs = [beat for beat in beats if beat.since > 0]
    written = [row.version for row in rows if isinstance(row, Written)]
    assert proven == sum(any(beat.since < each <= beat.through for beat in proofs) for each in written)


@given(STEPS, st.sampled_from(["lose", "double", "alter"]), st.data())
def test_every_fault_in_a_proven_interval_is_found_at_the_next_heartbeat(
    steps: list[tuple[str, int]], fault: str, data: st.DataObject
) -> None:
    rows = history_of(steps)
    places = [index for index, row in enumerate(rows) if isinstance(row, Written)]
    if not places:
        return
    place = data.draw(st.sampled_from(places))
    change = rows[place]
    assert isinstance(change, Written)
    altered = Written(change.version, Tally(1, change.tally.digest ^ 1))
    instead: Sequence[Row] = {"lose": [], "double": [change, change], "alter": [altered]}[fault]
    whole, faulty = read(rows), read([*rows[:place], *instead, *rows[place + 1 :]])
    at = next_beat(rows, place)
    assert isinstance(faulty[at], Finding if isinstance(whole[at], Checked) else Unchecked)
    assert {**faulty, at: None} == {**whole, at: None}


@given(STEPS, st.data())
def test_a_heartbeat_that_is_lost_with_its_changes_shows_at_the_one_after_it(
    steps: list[tuple[str, int]], data: st.DataObject
) -> None:
    rows = history_of([("beat", 0), *steps, ("beat", 0), ("write", 0)])
    beats = [index for index, row in enumerate(rows) if is_node_beat(row)]
    number = data.draw(st.integers(1, len(beats) - 2))
    first, last = data.draw(st.integers(beats[number - 1] + 1, beats[number])), beats[number]
    whole, faulty = read(rows), read([*rows[:first], *rows[last + 1 :]])
    at = next_beat(rows, last)
    if isinstance(whole[at], Checked):
        finding = faulty[at]
        assert isinstance(finding, Finding)
        assert finding.expected is None
    assert all(isinstance(faulty[each], type(whole[each])) for each in faulty if each != at)


@given(STEPS, st.data())
def test_the_heartbeat_of_a_sealed_log_is_missed_if_it_told_of_changes(
    steps: list[tuple[str, int]], data: st.DataObject
) -> None:
    rows = history_of([("beat", 0), *steps, ("write", 0), ("split", 0)])
    places = [
        index
        for index, row in enumerate(rows)
        if isinstance(row, NamespaceBeat) and row.log is not None and row.own.changes
    ]
    if not places:
        return
    place = data.draw(st.sampled_from(places))
    whole, faulty = read(rows), read([*rows[:place], *rows[place + 1 :]])
    at = next_beat(rows, place)
    assert isinstance(faulty[at], Finding if isinstance(whole[at], Checked) else Unchecked)


def test_a_heartbeat_that_comes_again_says_nothing() -> None:
    rows = history_of([("write", 0), ("beat", 0), ("write", 0), ("beat", 0)])
    doubled = [copy for row in rows for copy in ([row, row] if is_node_beat(row) else [row])]
    assert read(doubled) == read(rows)


def test_a_scan_leaves_its_interval_and_the_next_unproven() -> None:
    beats = [row for row in history_of([("beat", 0)] * 4) if isinstance(row, NamespaceBeat)]
    account = Account(own=True)
    account.close(beats[0])
    assert isinstance(account.close(beats[1]), Checked)
    account.doubt(Doubt.SCAN)
    assert account.close(beats[3]) == Unchecked(beats[3].through, Doubt.SCAN)
    assert isinstance(account.close(beats[4]), Checked)


def test_changes_that_were_counted_before_a_heartbeat_below_them_are_a_doubt_and_no_finding() -> None:
    def beat(version: Version, since: Version, through: Version, changes: int) -> NamespaceBeat:
        return NamespaceBeat(
            site=1, node=0, version=version, wall_ms=0, since=since, through=through, all=Tally(changes, 0)
        )

    account = Account(own=False)
    account.close(beat(2, 0, 1, 0))
    account.add(10, Tally(3, 0))
    assert account.close(beat(12, 1, 8, 2)) == Unchecked(8, Doubt.AHEAD)
    assert account.close(beat(14, 8, 13, 1)) == Unchecked(13, Doubt.AHEAD)
    account.add(16, Tally(1, 0))
    assert account.close(beat(18, 13, 17, 1)) == Checked(13, 17, 1)


def test_a_finding_says_what_is_wrong() -> None:
    assert "1 of 3 changes" in str(Finding(1, 2, Tally(3, 0), Tally(2, 0)))
    assert "2 more changes" in str(Finding(1, 2, Tally(3, 0), Tally(5, 0)))
    assert "altered" in str(Finding(1, 2, Tally(3, 0), Tally(3, 1)))
    assert "heartbeat" in str(Finding(1, 2, None, Tally(3, 1)))
