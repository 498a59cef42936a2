"""Sites compared in Spark's tasks: each takes a range of keys and reads it at all sites side by side.

All sites give their records in order of keys, so nothing is shuffled or joined: a task holds a window of each
(`divergence/alignment.py`).  What travels is thin, and records that are equal never become objects.  The
driver fixes the vantage of every site before the tasks begin; a task asks its sites only for their collected
horizons, when it has read everything.

A task tells what it found in one row, its report.  If somebody wants them, one row comes before that for each
key that has drifted.  Repairs are made where the drift was found: each goes by what was seen, so it does no
harm that Spark may run a task twice.

A task always gives its report.  Whatever fails in it is a doubt, and what could be compared counts: the
sites that answer are compared, and one that leaves is left out from there on.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from itertools import combinations
from typing import Final

import msgspec
import pyarrow

from floodmark.codec.ordered import encode_namespace
from floodmark.divergence import (
    Comparison,
    Difference,
    Drift,
    DriftSide,
    Lag,
    Pair,
    RepairSummary,
    Tally,
    Vantage,
    compare,
    compare_keys,
    read_horizon,
    repair,
    walk_histories,
)
from floodmark.divergence.comparing import WAITING_MAX, Finding
from floodmark.divergence.repairing import PROBLEMS_TOLD, divide
from floodmark.host.ports import Host
from floodmark.model.errors import FloodmarkError, Unreachable
from floodmark.model.partition import Content
from floodmark.model.ranges import KeyRange
from floodmark.model.version import Version
from floodmark.site.arguments import qualify_range
from floodmark.site.site import Site
from floodmark.spark.jobs.verifying.histories import CHANGES_MAX, HistoryTooLong, read_history
from floodmark.spark.runtime.patience import PAUSES, ask_patiently
from floodmark.spark.source.address import SiteAddress

SITES_MIN: Final = 2
# A site that does not answer is not waited for long if there are others to compare.
_BRIEF: Final = (0.05, 0.1, 0.25, 0.5, 1.0)

# Drifted keys that are repaired, and looked at again, at a time.
REPAIRED_AT_ONCE: Final = 1_000
# Rows of drifted keys that travel together.
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

_SQL_TYPES: Final = {
    pyarrow.string(): "string",
    pyarrow.binary(): "binary",
    pyarrow.bool_(): "boolean",
    pyarrow.int32(): "int",
    pyarrow.int64(): "bigint",
    pyarrow.map_(pyarrow.int32(), pyarrow.int64()): "map<int, bigint>",
}
ROWS: Final = ", ".join(f"{field.name} {_SQL_TYPES[field.type]}" for field in _ROWS)


class PairTally(msgspec.Struct, frozen=True):
    """What was counted of two sites."""

    left: str
    right: str
    tally: Tally


class RangeReport(msgspec.Struct, frozen=True, kw_only=True):
    """What came of a range: numbers for each pair of sites, and the first keys that have drifted.

    `open_keys` are the keys that have drifted or lag, if somebody asked for them and they are not too many
    and all of them known.
    `left` are the numbers of the second look at what was repaired.  `doubts` say why the rest of the range
    was not compared, or its history not walked, and which keys may do more than lag.
    """

    namespace: str
    tallies: list[PairTally]
    sample: list[Drift] = []
    open_keys: list[bytes] | None = None
    repair: RepairSummary | None = None
    left: list[PairTally] = []
    differences: list[Difference] = []
    differences_found: int = 0
    doubts: list[str] = []


@dataclass(frozen=True, kw_only=True)
class SiteView:
    """A site from its vantage, as it travels to the tasks."""

    address: SiteAddress
    site: str
    site_id: int
    namespace_id: int
    version: Version
    mark: dict[int, Version]

    def vantage(self, host: Host, namespace: str) -> Vantage:
        """The vantage, with a way to learn the collected horizon."""
        horizon_of = partial(read_horizon, host, namespace, tuple(self.mark))
        return Vantage(self.site, self.site_id, self.version, self.mark, horizon_of)

    def qualify(self, keys: KeyRange) -> KeyRange:
        """A range of users' keys as the site has it."""
        return qualify_range(encode_namespace(self.namespace_id), keys)


@dataclass(frozen=True, kw_only=True)
class NamespaceViews:
    """A namespace at all sites, and the version after which their histories are walked, if they are."""

    namespace: str
    views: Sequence[SiteView]
    history_since: Version | None = None


@dataclass(frozen=True, kw_only=True)
class RangeWork:
    """A range of users' keys of a namespace that is to be compared."""

    namespace: NamespaceViews
    keys: KeyRange


@dataclass(frozen=True, kw_only=True)
class Comparing:
    """What Spark's tasks do: the ranges of the numbers that come to them."""

    ranges: Sequence[RangeWork]
    sample: int
    open_keys_max: int = 0
    rows: bool = False
    repair: bool = False

    def __call__(self, batches: Iterable[pyarrow.RecordBatch]) -> Iterator[pyarrow.RecordBatch]:
        """Rows of `ROWS`."""
        for batch in batches:
            for number in batch.column(0).to_pylist():
                yield from self._compare(self.ranges[number])

    def _compare(self, work: RangeWork) -> Iterator[pyarrow.RecordBatch]:
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
    """Connect to the sites, or say why not.  They are waited for only as long as it is needed."""
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


def compare_range(work: RangeWork, hosts: Sequence[Host], *, waiting_max: int = WAITING_MAX) -> Comparison:
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
    work: RangeWork, hosts: Sequence[Host], since: Version, *, changes_max: int = CHANGES_MAX
) -> Iterator[Difference]:
    """Walk through the histories of a range, each site's with each other's, in parts that fit into memory."""
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
    """The first keys of a namespace of which it cannot be told whether they only lag."""

    def __init__(self, namespace: str) -> None:
        self._namespace = namespace
        self._doubts: dict[bytes, str] = {}
        self._is_cut = False

    def add(self, finding: Finding) -> None:
        """Take down what speaks against lag."""
        if isinstance(finding, Drift) or finding.doubt is None or finding.key in self._doubts:
            return
        if len(self._doubts) == PROBLEMS_TOLD:
            self._is_cut = True
            return
        place = f"{self._namespace!r} at {finding.left} or {finding.right}"
        self._doubts[finding.key] = f"{finding.key!r} of {place} {finding.doubt}"

    @property
    def told(self) -> list[str]:
        """What is to be said of the keys."""
        more = [f"more keys of {self._namespace!r} are in doubt"] if self._is_cut else []
        return [*self._doubts.values(), *more]


class _Findings:
    """What a task has found so far in its range."""

    def __init__(self, work: Comparing, range_work: RangeWork, hosts: Sequence[Host]) -> None:
        # A key is repaired once, so that all that is found of it must come together.
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
        self._left: dict[Pair, Tally] = {}
        self._differences: list[Difference] = []
        self._differences_found = 0

    def windows(self) -> Iterator[list[Finding]]:
        """What is found.  Why there is not more is taken down."""
        try:
            yield from self._comparison.windows()
        except FloodmarkError as error:
            failures = self._comparison.failures or {"some site": error}
            for site, failure in failures.items():
                self.doubts.append(f"not all of {self._namespace!r} of {site} was compared: {failure}")

    @property
    def unrepaired(self) -> int:
        """How many differences have to be repaired."""
        return len(self._unrepaired)

    def add(self, finding: Finding) -> None:
        """Take down a key that is not the same at all sites."""
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
        """Repair what has drifted and was not repaired yet, and look at it again."""
        drifts, self._unrepaired = self._unrepaired, []
        if not drifts:
            return
        self._repair = add_repairs(self._repair, repair(self._hosts, self._namespace, drifts))
        for keys, seen in divide(sorted({drift.key for drift in drifts}), self._look_again):
            if not isinstance(seen, FloodmarkError):
                self._left = add_tallies(self._left, seen)
                continue
            self.doubts.append(f"what was repaired of {self._namespace!r} was not seen again: {seen}")
            unseen = set(keys)
            self._left = add_tallies(self._left, _tallies_of([each for each in drifts if each.key in unseen]))

    def _look_again(self, keys: list[bytes]) -> dict[Pair, Tally]:
        again = compare_keys(self._hosts, self._namespace, keys)
        for _ in again:
            pass
        return again.tallies

    def walk(self) -> None:
        """Walk through the histories, if somebody asked for that."""
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
            self.doubts.append(f"not all of the history of {self._namespace!r} was walked: {error}")

    def take_rows(self) -> pyarrow.RecordBatch:
        """The rows of drifted keys that have come together, or as many of them as travel at once."""
        drifts, self.rows = self.rows[:_ROWS_AT_ONCE], self.rows[_ROWS_AT_ONCE:]
        rows = [_row_of(self._namespace, drift) for drift in drifts]
        return pyarrow.RecordBatch.from_pylist(rows, schema=_ROWS)

    def report(self) -> pyarrow.RecordBatch:
        """The last row of a range."""
        report = RangeReport(
            namespace=self._namespace,
            tallies=pair_tallies(self._comparison.tallies),
            sample=self._sample,
            open_keys=None if self._open_keys is None or self.doubts else sorted(self._open_keys),
            repair=self._repair if self._work.repair else None,
            left=pair_tallies(self._left),
            differences=self._differences,
            differences_found=self._differences_found,
            doubts=[*self.doubts, *self._key_doubts.told],
        )
        return pyarrow.RecordBatch.from_pylist([{REPORT: msgspec.msgpack.encode(report)}], schema=_ROWS)


def pair_tallies(tallies: dict[Pair, Tally]) -> list[PairTally]:
    """Tallies as they travel."""
    return [PairTally(*pair, tally) for pair, tally in tallies.items()]


def add_tallies(known: dict[Pair, Tally], more: dict[Pair, Tally]) -> dict[Pair, Tally]:
    """The tallies of disjoint sets of keys as one."""
    return {pair: known.get(pair, Tally()).plus(tally) for pair, tally in more.items()} | {
        pair: tally for pair, tally in known.items() if pair not in more
    }


def _tallies_of(drifts: Iterable[Drift]) -> dict[Pair, Tally]:
    """The numbers of keys as they were found."""
    tallies: dict[Pair, Tally] = {}
    for drift in drifts:
        found = Tally(compared=1, **{str(drift.verdict): 1})
        tallies = add_tallies(tallies, {Pair(drift.left.site, drift.right.site): found})
    return tallies


def add_repairs(known: RepairSummary, more: RepairSummary) -> RepairSummary:
    """What was done to disjoint sets of keys as one."""
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
    """Spark knows no unsigned numbers: the same bits, signed.  A stamp that is damaged may be any number."""
    return number if number < _INT64_END else number - 2 * _INT64_END
