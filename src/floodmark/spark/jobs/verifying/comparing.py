"""Sites compared in Spark's tasks: each task reads a range of keys at all sites side by side.

All sites give their records in order of keys, so nothing is shuffled or joined: a task holds a window of
each (`divergence/alignment.py`).  Only keys, stamps and digests travel, and equal records never become
objects.  The driver fixes the vantage of every site before the tasks begin; a task asks its sites only for
their collected horizons, after it has read everything.

The last row of a task is its report.  If asked for, a row for each drifted key comes before it.  A task
repairs the drift that it finds, and only records that still are as it saw them, so Spark may run a task
twice.

A task always returns its report.  An error in it becomes a doubt: the sites that answer are compared, and a
site that fails is left out from there on.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from itertools import combinations
from typing import Final

import msgspec
import pyarrow
from pyspark.sql.pandas.types import from_arrow_schema

from floodmark.codec.ordered import NAMESPACE_BYTES, qualify_range
from floodmark.codec.states import decode_state
from floodmark.codec.thin import digest_record
from floodmark.codec.values import decode_value
from floodmark.divergence.comparing import (
    WAITING_MAX,
    ComparedTally,
    Drift,
    DriftSide,
    Finding,
    Pair,
    Vantage,
    compare,
    compare_keys,
    read_horizon,
)
from floodmark.divergence.histories import Difference, History, HistoryChange, part_stamps, walk_histories
from floodmark.divergence.outcome import SiteDoubt
from floodmark.divergence.repairing import PROBLEMS_TOLD, RepairSummary, divide, repair
from floodmark.host.ports import Host
from floodmark.model.change import Stamp
from floodmark.model.errors import FloodmarkError, GenerationSwapped, LimitExceeded, Unreachable
from floodmark.model.partition import Content
from floodmark.model.ranges import KeyRange
from floodmark.model.stream import ChangeBatch, ChangesRequest, Way
from floodmark.model.version import Version
from floodmark.site.address import SiteAddress
from floodmark.site.site import Site
from floodmark.spark.runtime.patience import PAUSES, ask_patiently

SITES_MIN: Final = 2
# The pauses of retries while two other sites can be compared.
_BRIEF: Final = (0.05, 0.1, 0.25, 0.5, 1.0)

# Drifted keys to repair and compare again at a time.
REPAIRED_AT_ONCE: Final = 1_000
# The changes of a history, which is held in memory.
CHANGES_MAX: Final = 200_000
# Rows of drifted keys in a batch.
_ROWS_AT_ONCE: Final = 1_000
_INT64_END: Final = 1 << 63

_SIDE: Final[Sequence[tuple[str, pyarrow.DataType]]] = (
    ("site", pyarrow.string()),
    ("version", pyarrow.int64()),
    ("origin_site", pyarrow.int32()),
    ("origin_version", pyarrow.int64()),
    ("mark", pyarrow.map_(pyarrow.int32(), pyarrow.int64())),
    ("digest", pyarrow.int64()),
    ("deleted", pyarrow.bool_()),
)
DRIFT_ROWS: Final = pyarrow.schema(
    [
        ("namespace", pyarrow.string()),
        ("key", pyarrow.binary()),
        ("verdict", pyarrow.string()),
        ("part", pyarrow.string()),
        *((f"{side}_{name}", kind) for side in ("left", "right") for name, kind in _SIDE),
    ]
)
REPORT: Final = "report"
_ROWS: Final = pyarrow.schema([pyarrow.field(REPORT, pyarrow.binary()), *DRIFT_ROWS])

ROWS: Final = from_arrow_schema(_ROWS)


class ComparisonReport(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a range: the tallies of each pair of sites, and a sample of the drifted keys.

    `open_keys` are the keys that drifted or lag; None if they were not asked for, are too many, or are not
    all known.  `left` are the tallies of the repaired keys, compared again.  `doubts` say why a part of the
    range or of its history was not compared, and which keys may do more than lag.
    """

    namespace: str
    tallies: dict[Pair, ComparedTally]
    sample: list[Drift] = []
    open_keys: list[bytes] | None = None
    repair: RepairSummary | None = None
    left: dict[Pair, ComparedTally] = {}
    differences: list[Difference] = []
    differences_found: int = 0
    doubts: Sequence[str | SiteDoubt] = ()


@dataclass(frozen=True, kw_only=True)
class SiteView:
    """A namespace at a site as of a version, for the tasks."""

    address: SiteAddress
    site: str
    site_id: int
    namespace_id: int
    version: Version
    mark: Mapping[int, Version]
    data_set: bytes = b""

    def vantage(self, host: Host, namespace: str) -> Vantage:
        """The vantage, with a function that reads the collected horizon."""
        horizon_of = partial(read_horizon, host, namespace, tuple(self.mark))
        return Vantage(self.site, self.site_id, self.version, self.mark, horizon_of, self.data_set)

    def qualify(self, keys: KeyRange) -> KeyRange:
        """A range of users' keys with the namespace's prefix at this site."""
        return qualify_range(self.namespace_id, keys)


@dataclass(frozen=True, kw_only=True)
class RangeComparison:
    """A range of users' keys of a namespace to compare, and the version above which to walk the histories."""

    namespace: str
    views: Sequence[SiteView]
    keys: KeyRange
    history_since: Version | None = None


@dataclass(frozen=True, kw_only=True)
class Comparing:
    """Compares, in Spark's tasks, the ranges whose numbers arrive as rows."""

    ranges: Sequence[RangeComparison]
    sample: int
    open_keys_max: int = 0
    rows: bool = False
    repair: bool = False

    def __call__(self, batches: Iterable[pyarrow.RecordBatch]) -> Iterator[pyarrow.RecordBatch]:
        """Rows of `ROWS`."""
        for batch in batches:
            for number in batch.column(0).to_pylist():
                with ExitStack() as stack:
                    yield from _Findings(self, self.ranges[number], stack).run()


def _connect(stack: ExitStack, views: Sequence[SiteView]) -> list[Site | FloodmarkError]:
    """Connect to the sites, or return their errors.  Retries for long only if too few sites answer."""

    def connect(view: SiteView, pauses: Sequence[float]) -> Site | FloodmarkError:
        try:
            return stack.enter_context(ask_patiently(view.address.connect, pauses=pauses))
        except FloodmarkError as error:
            return error

    answers = [connect(view, _BRIEF) for view in views]
    if sum(isinstance(site, Site) for site in answers) < SITES_MIN:
        answers = [
            connect(view, PAUSES) if isinstance(site, Unreachable) else site
            for view, site in zip(views, answers, strict=True)
        ]
    return answers


class KeyDoubts:
    """The first keys of a namespace that may do more than lag."""

    def __init__(self, namespace: str) -> None:
        self._namespace = namespace
        self._doubts: dict[bytes, str] = {}
        self._is_cut = False

    def add(self, finding: Finding) -> None:
        """Note the doubt of a finding, if it has one."""
        if isinstance(finding, Drift) or finding.doubt is None or finding.key in self._doubts:
            return
        if len(self._doubts) == PROBLEMS_TOLD:
            self._is_cut = True
            return
        place = f"{self._namespace!r} at {finding.left} or {finding.right}"
        self._doubts[finding.key] = f"{finding.key!r} of {place} {finding.doubt}"

    @property
    def told(self) -> list[str]:
        """The doubts, as messages."""
        more = [f"more keys of {self._namespace!r} are in doubt"] if self._is_cut else []
        return [*self._doubts.values(), *more]


class _Findings:
    """The findings of a task in its range."""

    def __init__(self, task: Comparing, work: RangeComparison, stack: ExitStack) -> None:
        self._task = task
        self._namespace = work.namespace
        answers = list(zip(work.views, _connect(stack, work.views), strict=True))
        self._views = [view for view, site in answers if isinstance(site, Site)]
        self._hosts = [site.host for _, site in answers if isinstance(site, Site)]
        self._work = replace(work, views=self._views)
        self._doubts: list[str | SiteDoubt] = [
            SiteDoubt(view.site, self._namespace, str(site))
            for view, site in answers
            if isinstance(site, FloodmarkError)
        ]
        pairs = list(zip(self._views, self._hosts, strict=True))
        self._comparison = compare(
            [view.vantage(host, work.namespace) for view, host in pairs],
            [
                host.router.scan_records(
                    view.qualify(work.keys), view.version, dead=True, content=Content.THIN
                )
                for view, host in pairs
            ],
            # A key is repaired once, so all its findings must come together.
            waiting_max=0 if task.repair else WAITING_MAX,
        )
        self._rows: list[Drift] = []
        self._sample: list[Drift] = []
        self._key_doubts = KeyDoubts(self._namespace)
        self._open_keys: set[bytes] | None = set() if task.open_keys_max else None
        self._unrepaired: list[Drift] = []
        self._repair = RepairSummary()
        self._left: dict[Pair, ComparedTally] = {}
        self._differences: list[Difference] = []
        self._differences_found = 0

    def run(self) -> Iterator[pyarrow.RecordBatch]:
        """Compare and repair.  Yields the rows of drifted keys, and at last the report."""
        for window in self._windows():
            for finding in window:
                self._add(finding)
            while len(self._rows) >= _ROWS_AT_ONCE:
                yield self._take_rows()
            if len(self._unrepaired) >= REPAIRED_AT_ONCE:
                self._mend()
        if self._rows:
            yield self._take_rows()
        self._mend()
        if self._work.history_since is not None:
            self._walk(self._work.history_since)
        yield self._report()

    def _windows(self) -> Iterator[list[Finding]]:
        """The findings.  An error becomes a doubt."""
        try:
            yield from self._comparison.windows()
        except FloodmarkError as error:
            failures = self._comparison.failures or {"some site": error}
            for site, failure in failures.items():
                self._doubts.append(f"not all of {self._namespace!r} of {site} was compared: {failure}")

    def _add(self, finding: Finding) -> None:
        if self._open_keys is not None:
            self._open_keys.add(finding.key)
            if len(self._open_keys) > self._task.open_keys_max:
                self._open_keys = None
        if not isinstance(finding, Drift):
            self._key_doubts.add(finding)
            return
        if len(self._sample) < self._task.sample:
            self._sample.append(finding)
        if self._task.rows:
            self._rows.append(finding)
        if self._task.repair:
            self._unrepaired.append(finding)

    def _mend(self) -> None:
        """Repair the drifted keys since the last call, and compare them again."""
        drifts, self._unrepaired = self._unrepaired, []
        if not drifts:
            return
        self._repair = add_repairs(self._repair, repair(self._hosts, self._namespace, drifts))
        for keys, seen in divide(sorted({drift.key for drift in drifts}), self._look_again):
            if not isinstance(seen, FloodmarkError):
                self._left = add_tallies(self._left, seen)
                continue
            self._doubts.append(f"repaired keys of {self._namespace!r} were not compared again: {seen}")
            unseen = set(keys)
            for drift in drifts:
                if drift.key in unseen:
                    tally = ComparedTally(compared=1, **{str(drift.verdict): 1})
                    self._left = add_tallies(self._left, {Pair(drift.left.site, drift.right.site): tally})

    def _look_again(self, keys: list[bytes]) -> dict[Pair, ComparedTally]:
        again = compare_keys(self._hosts, self._namespace, keys)
        for _ in again:
            pass
        return again.tallies

    def _walk(self, since: Version) -> None:
        """Compare the histories of the sites that still answer."""
        failures = self._comparison.failures
        pairs = [
            (view, host)
            for view, host in zip(self._views, self._hosts, strict=True)
            if not isinstance(failures.get(view.site), Unreachable)
        ]
        work = replace(self._work, views=[view for view, _ in pairs])
        try:
            for difference in walk_range(work, [host for _, host in pairs], since):
                self._differences_found += 1
                if len(self._differences) < self._task.sample:
                    self._differences.append(difference)
        except FloodmarkError as error:
            self._doubts.append(f"not all of the history of {self._namespace!r} was compared: {error}")

    def _take_rows(self) -> pyarrow.RecordBatch:
        drifts, self._rows = self._rows[:_ROWS_AT_ONCE], self._rows[_ROWS_AT_ONCE:]
        rows = [
            {
                "namespace": self._namespace,
                "key": drift.key,
                "verdict": str(drift.verdict),
                "part": None if drift.part is None else str(drift.part),
                **_side_of("left", drift.left),
                **_side_of("right", drift.right),
            }
            for drift in drifts
        ]
        return pyarrow.RecordBatch.from_pylist(rows, schema=_ROWS)

    def _report(self) -> pyarrow.RecordBatch:
        report = ComparisonReport(
            namespace=self._namespace,
            tallies=self._comparison.tallies,
            sample=self._sample,
            open_keys=None if self._open_keys is None or self._doubts else sorted(self._open_keys),
            repair=self._repair if self._task.repair else None,
            left=self._left,
            differences=self._differences,
            differences_found=self._differences_found,
            doubts=[*self._doubts, *self._key_doubts.told],
        )
        return pyarrow.RecordBatch.from_pylist([{REPORT: msgspec.msgpack.encode(report)}], schema=_ROWS)


def add_tallies(
    known: dict[Pair, ComparedTally], more: dict[Pair, ComparedTally]
) -> dict[Pair, ComparedTally]:
    """The sums of the tallies of disjoint sets of keys."""
    return known | {pair: known.get(pair, ComparedTally()).plus(tally) for pair, tally in more.items()}


def add_repairs(known: RepairSummary, more: RepairSummary) -> RepairSummary:
    """The sum of the repairs of disjoint sets of keys."""
    return RepairSummary(
        repaired=known.repaired + more.repaired,
        changed_meanwhile=known.changed_meanwhile + more.changed_meanwhile,
        impossible=known.impossible + more.impossible,
        problems=(*known.problems, *more.problems)[:PROBLEMS_TOLD],
    )


def _side_of(name: str, side: DriftSide) -> dict[str, object]:
    stamp, digest = side.stamp, side.digest
    values = (
        side.site,
        side.version,
        None if stamp is None else stamp.site,
        None if stamp is None else _signed(stamp.version),
        list(side.mark.items()),
        None if digest is None else _signed(digest),
        side.deleted,
    )
    return {f"{name}_{column}": value for (column, _), value in zip(_SIDE, values, strict=True)}


def _signed(number: int) -> int:
    """The same 64 bits as a signed number: Spark has no unsigned ones, and a damaged stamp may be any."""
    return number if number < _INT64_END else number - 2 * _INT64_END


# Histories


class _HistoryTooLong(Exception):
    """A range has too many changes for memory; cut it at `middle`, a user's key."""

    def __init__(self, middle: bytes) -> None:
        super().__init__(middle)
        self.middle = middle


def walk_range(
    work: RangeComparison, hosts: Sequence[Host], since: Version, *, changes_max: int = CHANGES_MAX
) -> Iterator[Difference]:
    """Compare the histories of a range pair by pair, in parts that fit into memory.

    `since` is the same for all sites.  Then no earlier record has a higher stamp than the changes in the
    histories, and earlier records need not be read.
    """
    try:
        histories = [
            _read_history(host, view, work.keys, since, changes_max)
            for view, host in zip(work.views, hosts, strict=True)
        ]
    except _HistoryTooLong as error:
        for keys in (KeyRange(work.keys.start, error.middle), KeyRange(error.middle, work.keys.end)):
            yield from walk_range(replace(work, keys=keys), hosts, since, changes_max=changes_max)
        return
    for pair in combinations(histories, 2):
        yield from walk_histories(*pair)


def _read_history(host: Host, view: SiteView, keys: KeyRange, since: Version, changes_max: int) -> History:
    """The changes with stamps above `since` to a range of keys, and the watermarks since then."""
    request = ChangesRequest(
        keys=view.qualify(keys),
        namespace=view.namespace_id,
        since=since,
        until=view.version,
        heartbeats=True,
        partial=True,
    )
    changes: list[HistoryChange] = []
    marks: list[tuple[Version, Mapping[int, Version]]] = []
    for batch in _read_past_swaps(host, request):
        # A repair may write a change that is older than the history.
        changes += [change for change in _changes_of(batch, view.site_id) if change.stamp.version > since]
        marks += [(beat.version, beat.watermark.get(view.namespace_id, {})) for beat in batch.heartbeats]
        if len(changes) > changes_max:
            found = sorted({change.key for change in changes})
            if len(found) > 1:
                raise _HistoryTooLong(found[len(found) // 2])
            raise LimitExceeded(
                f"the history of {found[0]!r:.60} has more than {changes_max:,} changes, too many to "
                "compare; a shorter retention of its namespace makes it shorter"
            )
    return History(view.site, view.site_id, changes, marks)


def _read_past_swaps(host: Host, request: ChangesRequest) -> Iterator[ChangeBatch]:
    """The changes of a log without the data sets that were published, whose rows are in no log."""
    while True:
        try:
            yield from host.changes(request)
        except GenerationSwapped as error:
            behind = error.details["oldest"]
            assert isinstance(behind, int)
            request = msgspec.structs.replace(request, since=behind)
        else:
            return


def _changes_of(batch: ChangeBatch, site_id: int) -> Iterator[HistoryChange]:
    for version, key, stored in zip(batch.versions, batch.keys, batch.values, strict=True):
        record = decode_value(stored)
        stamp = record.origin or Stamp(version, site_id)
        parts = None if record.stamps is None else part_stamps(decode_state(stored))
        # A scan and a repair give merged records as a whole, and not the fields of one write.
        exact = parts is None or (batch.way is not Way.SCAN and {stamp, *parts.values()} == {stamp})
        yield HistoryChange(version, key[NAMESPACE_BYTES:], stamp, digest_record(stored), exact, parts)
