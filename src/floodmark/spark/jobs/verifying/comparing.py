"""Sites compared in Spark's tasks: each task reads a range of keys at all sites side by side.

All sites give their records in order of keys, so nothing is shuffled or joined: a task holds a window of
each (`divergence/alignment.py`).  Only keys, stamps and digests travel, and equal records never become
objects.  The driver fixes the vantage of every site before the tasks begin; a task asks its sites only for
their collected horizons, after it has read everything.

The last row of a task is its report.  If asked for, a row for each drifted key comes before it.  A task
repairs the drift that it finds, and only records that still are as it saw them, so Spark may run a task
twice.

A task always gives its report.  An error in it is a doubt: the sites that answer are compared, and a site
that fails is left out from there on.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from itertools import combinations
from typing import Final

import msgspec
import pyarrow
from pyspark.sql.pandas.types import from_arrow_schema

from floodmark.codec.ordered import encode_namespace
from floodmark.divergence.comparing import (
    WAITING_MAX,
    ComparedTally,
    Comparison,
    Drift,
    DriftSide,
    Finding,
    Lag,
    Pair,
    Vantage,
    compare,
    compare_keys,
    read_horizon,
)
from floodmark.divergence.histories import Difference, walk_histories
from floodmark.divergence.repairing import PROBLEMS_TOLD, RepairSummary, divide, repair
from floodmark.host.ports import Host
from floodmark.model.errors import FloodmarkError, Unreachable
from floodmark.model.partition import Content
from floodmark.model.ranges import KeyRange
from floodmark.model.version import Version
from floodmark.site.address import SiteAddress
from floodmark.site.arguments import qualify_range
from floodmark.site.site import Site
from floodmark.spark.jobs.verifying.histories import CHANGES_MAX, HistoryTooLong, read_history
from floodmark.spark.runtime.patience import PAUSES, ask_patiently

SITES_MIN: Final = 2
# The pauses of retries while two other sites can be compared.
_BRIEF: Final = (0.05, 0.1, 0.25, 0.5, 1.0)

# Drifted keys to repair and compare again at a time.
REPAIRED_AT_ONCE: Final = 1_000
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
    doubts: list[str] = []


@dataclass(frozen=True, kw_only=True)
class SiteView:
    """A site and its vantage, for the tasks."""

    address: SiteAddress
    site: str
    site_id: int
    namespace_id: int
    version: Version
    mark: dict[int, Version]

    def vantage(self, host: Host, namespace: str) -> Vantage:
        """The vantage, with a function that reads the collected horizon."""
        horizon_of = partial(read_horizon, host, namespace, tuple(self.mark))
        return Vantage(self.site, self.site_id, self.version, self.mark, horizon_of)

    def qualify(self, keys: KeyRange) -> KeyRange:
        """A range of users' keys with the namespace's prefix at this site."""
        return qualify_range(encode_namespace(self.namespace_id), keys)


@dataclass(frozen=True, kw_only=True)
class NamespaceViews:
    """A namespace at all sites, and the version above which to walk their histories, if at all."""

    namespace: str
    views: Sequence[SiteView]
    history_since: Version | None = None


@dataclass(frozen=True, kw_only=True)
class RangeComparison:
    """A range of users' keys of a namespace to compare."""

    namespace: NamespaceViews
    keys: KeyRange


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
                yield from self._compare(self.ranges[number])

    def _compare(self, work: RangeComparison) -> Iterator[pyarrow.RecordBatch]:
        namespace = work.namespace.namespace
        with ExitStack() as stack:
            answers = _connect(stack, work.namespace.views)
            views = [view for view, site in answers if isinstance(site, Site)]
            hosts = [site.host for _, site in answers if isinstance(site, Site)]
            work = replace(work, namespace=replace(work.namespace, views=views))
            findings = _Findings(self, work, hosts)
            findings.doubts += [
                f"{namespace!r} of {view.site} cannot be compared: {site}"
                for view, site in answers
                if isinstance(site, FloodmarkError)
            ]
            yield from self._find(findings)
            findings.walk()
            yield findings.report()

    def _find(self, findings: "_Findings") -> Iterator[pyarrow.RecordBatch]:
        for window in findings.windows():
            for finding in window:
                findings.add(finding)
            while len(findings.rows) >= _ROWS_AT_ONCE:
                yield findings.take_rows()
            if findings.unrepaired >= REPAIRED_AT_ONCE:
                findings.mend()
        if findings.rows:
            yield findings.take_rows()
        findings.mend()


def _connect(stack: ExitStack, views: Sequence[SiteView]) -> list[tuple[SiteView, Site | FloodmarkError]]:
    """Connect to the sites, or return their errors.  Retries for long only if too few sites answer."""
    answers: list[tuple[SiteView, Site | FloodmarkError]] = []
    for view in views:
        answers.append((view, _try_connect(stack, view, _BRIEF)))
    if sum(isinstance(site, Site) for _, site in answers) >= SITES_MIN:
        return answers
    return [
        (view, _try_connect(stack, view, PAUSES) if isinstance(site, Unreachable) else site)
        for view, site in answers
    ]


def _try_connect(stack: ExitStack, view: SiteView, pauses: Sequence[float]) -> Site | FloodmarkError:
    try:
        return stack.enter_context(ask_patiently(view.address.connect, pauses=pauses))
    except FloodmarkError as error:
        return error


def compare_range(
    work: RangeComparison, hosts: Sequence[Host], *, waiting_max: int = WAITING_MAX
) -> Comparison:
    """Compare a range of keys at all sites."""
    namespace, views = work.namespace.namespace, work.namespace.views
    pairs = list(zip(views, hosts, strict=True))
    return compare(
        [view.vantage(host, namespace) for view, host in pairs],
        [
            host.router.scan_records(view.qualify(work.keys), view.version, dead=True, content=Content.THIN)
            for view, host in pairs
        ],
        waiting_max=waiting_max,
    )


def walk_range(
    work: RangeComparison, hosts: Sequence[Host], since: Version, *, changes_max: int = CHANGES_MAX
) -> Iterator[Difference]:
    """Compare the histories of a range pair by pair, in parts that fit into memory."""
    try:
        histories = [
            read_history(
                host,
                view.namespace_id,
                view.qualify(work.keys),
                since,
                view.version,
                changes_max=changes_max,
            )
            for view, host in zip(work.namespace.views, hosts, strict=True)
        ]
    except HistoryTooLong as error:
        for keys in (KeyRange(work.keys.start, error.middle), KeyRange(error.middle, work.keys.end)):
            yield from walk_range(replace(work, keys=keys), hosts, since, changes_max=changes_max)
        return
    for pair in combinations(histories, 2):
        yield from walk_histories(*pair)


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

    def __init__(self, work: Comparing, range_work: RangeComparison, hosts: Sequence[Host]) -> None:
        # A key is repaired once, so all its findings must come together.
        self._comparison = compare_range(range_work, hosts, waiting_max=0 if work.repair else WAITING_MAX)
        self.rows: list[Drift] = []
        self.doubts: list[str] = []
        self._work = work
        self._range = range_work
        self._namespace = range_work.namespace.namespace
        self._hosts = hosts
        self._sample: list[Drift] = []
        self._key_doubts = KeyDoubts(self._namespace)
        self._open_keys: set[bytes] | None = set() if work.open_keys_max else None
        self._unrepaired: list[Drift] = []
        self._repair = RepairSummary()
        self._left: dict[Pair, ComparedTally] = {}
        self._differences: list[Difference] = []
        self._differences_found = 0

    def windows(self) -> Iterator[list[Finding]]:
        """The findings.  An error becomes a doubt."""
        try:
            yield from self._comparison.windows()
        except FloodmarkError as error:
            failures = self._comparison.failures or {"some site": error}
            for site, failure in failures.items():
                self.doubts.append(f"not all of {self._namespace!r} of {site} was compared: {failure}")

    @property
    def unrepaired(self) -> int:
        """The number of differences to repair."""
        return len(self._unrepaired)

    def add(self, finding: Finding) -> None:
        """Note a key that differs between sites."""
        if self._open_keys is not None:
            self._open_keys.add(finding.key)
            if len(self._open_keys) > self._work.open_keys_max:
                self._open_keys = None
        if isinstance(finding, Lag):
            self._key_doubts.add(finding)
            return
        if len(self._sample) < self._work.sample:
            self._sample.append(finding)
        if self._work.rows:
            self.rows.append(finding)
        if self._work.repair:
            self._unrepaired.append(finding)

    def mend(self) -> None:
        """Repair the drifted keys since the last call, and compare them again."""
        drifts, self._unrepaired = self._unrepaired, []
        if not drifts:
            return
        self._repair = add_repairs(self._repair, repair(self._hosts, self._namespace, drifts))
        for keys, seen in divide(sorted({drift.key for drift in drifts}), self._look_again):
            if not isinstance(seen, FloodmarkError):
                self._left = add_tallies(self._left, seen)
                continue
            self.doubts.append(f"repaired keys of {self._namespace!r} were not compared again: {seen}")
            unseen = set(keys)
            self._left = add_tallies(self._left, _tallies_of([each for each in drifts if each.key in unseen]))

    def _look_again(self, keys: list[bytes]) -> dict[Pair, ComparedTally]:
        again = compare_keys(self._hosts, self._namespace, keys)
        for _ in again:
            pass
        return again.tallies

    def walk(self) -> None:
        """Compare the histories, if asked for."""
        since = self._range.namespace.history_since
        if since is None:
            return
        gone = {site for site, error in self._comparison.failures.items() if isinstance(error, Unreachable)}
        pairs = list(zip(self._range.namespace.views, self._hosts, strict=True))
        views = [view for view, _ in pairs if view.site not in gone]
        hosts = [host for view, host in pairs if view.site not in gone]
        work = replace(self._range, namespace=replace(self._range.namespace, views=views))
        try:
            for difference in walk_range(work, hosts, since):
                self._differences_found += 1
                if len(self._differences) < self._work.sample:
                    self._differences.append(difference)
        except FloodmarkError as error:
            self.doubts.append(f"not all of the history of {self._namespace!r} was compared: {error}")

    def take_rows(self) -> pyarrow.RecordBatch:
        """Take the next batch of rows of drifted keys."""
        drifts, self.rows = self.rows[:_ROWS_AT_ONCE], self.rows[_ROWS_AT_ONCE:]
        rows = [_row_of(self._namespace, drift) for drift in drifts]
        return pyarrow.RecordBatch.from_pylist(rows, schema=_ROWS)

    def report(self) -> pyarrow.RecordBatch:
        """The report of the range, which is its last row."""
        report = ComparisonReport(
            namespace=self._namespace,
            tallies=self._comparison.tallies,
            sample=self._sample,
            open_keys=None if self._open_keys is None or self.doubts else sorted(self._open_keys),
            repair=self._repair if self._work.repair else None,
            left=self._left,
            differences=self._differences,
            differences_found=self._differences_found,
            doubts=[*self.doubts, *self._key_doubts.told],
        )
        return pyarrow.RecordBatch.from_pylist([{REPORT: msgspec.msgpack.encode(report)}], schema=_ROWS)


def add_tallies(
    known: dict[Pair, ComparedTally], more: dict[Pair, ComparedTally]
) -> dict[Pair, ComparedTally]:
    """The sums of the tallies of disjoint sets of keys."""
    return known | {pair: known.get(pair, ComparedTally()).plus(tally) for pair, tally in more.items()}


def _tallies_of(drifts: Iterable[Drift]) -> dict[Pair, ComparedTally]:
    """The tallies of drifted keys."""
    tallies: dict[Pair, ComparedTally] = {}
    for drift in drifts:
        found = ComparedTally(compared=1, **{str(drift.verdict): 1})
        tallies = add_tallies(tallies, {Pair(drift.left.site, drift.right.site): found})
    return tallies


def add_repairs(known: RepairSummary, more: RepairSummary) -> RepairSummary:
    """The sum of the repairs of disjoint sets of keys."""
    return RepairSummary(
        repaired=known.repaired + more.repaired,
        changed_meanwhile=known.changed_meanwhile + more.changed_meanwhile,
        impossible=known.impossible + more.impossible,
        problems=(*known.problems, *more.problems)[:PROBLEMS_TOLD],
    )


def _row_of(namespace: str, drift: Drift) -> dict[str, object]:
    return {
        "namespace": namespace,
        "key": drift.key,
        "verdict": str(drift.verdict),
        "part": None if drift.part is None else str(drift.part),
        **_side_of("left", drift.left),
        **_side_of("right", drift.right),
    }


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
