"""Verify that sites agree, and repair the keys that have drifted.

Each site is read as of one version with its watermark at that version, so writes may go on: changes under
way count as lag, and drift is a difference that no waiting mends (`divergence/`).  Digests travel, no
values.  The outcome is that the sites agree, that they have drifted, or that there are doubts.
"""

from collections.abc import Iterable, Sequence
from datetime import timedelta
from typing import Final

import msgspec
from pyspark.sql import Observation, SparkSession
from pyspark.sql import functions as F

from floodmark.clock import monotonic_ms
from floodmark.divergence.comparing import ComparedTally, Drift, Pair
from floodmark.divergence.histories import Difference
from floodmark.divergence.outcome import Outcome, conclude, find_overdue
from floodmark.divergence.repairing import RepairSummary
from floodmark.files.directory import directory_at
from floodmark.model.errors import Corruption, InvalidArgument, Unreachable, VersionCollected
from floodmark.site.address import SiteAddress
from floodmark.spark.jobs.verifying.comparing import (
    REPORT,
    ROWS,
    SITES_MIN,
    Comparing,
    ComparisonReport,
    add_repairs,
    add_tallies,
)
from floodmark.spark.jobs.verifying.sites import ComparedSites, Look
from floodmark.spark.runtime.failures import raising_floodmark_errors
from floodmark.spark.runtime.progress import JobProgress, watch_tasks
from floodmark.spark.session import use_session

SAMPLE: Final = 20
MAX_LAG: Final = timedelta(seconds=60)

# Ranges are estimates: several for each core even out their sizes.
_TASKS_PER_CORE: Final = 4
_TASKS_ELSEWHERE: Final = 32
_STAGE: Final = "compare"
_REPORTS: Final = "reports"


class PairSummary(msgspec.Struct, frozen=True, kw_only=True):
    """The result of comparing a namespace at two sites, in numbers of keys."""

    namespace: str
    left: str
    right: str
    compared: int
    agree: int
    lag: int
    value_mismatch: int
    missing_left: int
    missing_right: int

    @property
    def drift(self) -> int:
        """The number of drifted keys."""
        return self.value_mismatch + self.missing_left + self.missing_right


class DriftFound(msgspec.Struct, frozen=True):
    """A key of a namespace that has drifted."""

    namespace: str
    drift: Drift


class DifferenceFound(msgspec.Struct, frozen=True):
    """A change of a namespace that one of two histories lacks."""

    namespace: str
    difference: Difference


class VerifySummary(msgspec.Struct, frozen=True, kw_only=True):
    """The result of comparing sites.

    `sample` has the first drifted keys, and `doubts` say what could not be compared and why.  After repairs,
    `left` has the numbers of the repaired keys, compared again.  `whole` is False if only the keys were
    compared that changed since the last pass or were open then.
    """

    sites: list[str]
    pairs: list[PairSummary]
    sample: list[DriftFound] = []
    doubts: list[str] = []
    repair: RepairSummary | None = None
    left: list[PairSummary] = []
    differences: list[DifferenceFound] = []
    differences_found: int = 0
    report: str | None = None
    whole: bool = True
    seconds: float = 0.0

    @property
    def drift(self) -> int:
        """The number of drifted keys, each counted once for every pair of sites."""
        return sum(pair.drift for pair in self.pairs)

    @property
    def lag(self) -> int:
        """The number of differences that changes under way explain."""
        return sum(pair.lag for pair in self.pairs)

    @property
    def outcome(self) -> Outcome:
        """The outcome for the sites as they are now, after repairs."""
        return conclude(self.drift_left + self.differences_found, self.doubts)

    @property
    def drift_left(self) -> int:
        """`drift` after repairs."""
        return sum(pair.drift for pair in (self.pairs if self.repair is None else self.left))


def verify(
    addresses: Sequence[SiteAddress],
    namespaces: Sequence[str] | None = None,
    *,
    report: str | None = None,
    sample: int = SAMPLE,
    history: bool = False,
    repair: bool = False,
    max_lag: timedelta = MAX_LAG,
    spark: SparkSession | None = None,
    progress: JobProgress | None = None,
) -> VerifySummary:
    """Compare namespaces at two sites or more; without names, all that the sites share.

    With `report`, a directory of Parquet files gets a row for each drifted key.  With `repair`, the winner of
    each drifted key is written again under its original stamp, unless the key has changed since, and the key
    is compared again.  With `history` the change logs are compared as well, which finds changes that were
    lost and then overwritten.  Lag is a doubt if a site has not heard of another for longer than `max_lag`.
    """
    with use_session(spark, "floodmark verify") as session, ComparedSites(addresses) as sites:
        work = Verification(sites, session, sample=sample, max_lag=max_lag, progress=progress)
        return work.compare_all(namespaces, report=report, history=history, repair=repair)[0]


class Verification:
    """Comparisons of the same sites."""

    def __init__(
        self,
        sites: ComparedSites,
        spark: SparkSession,
        *,
        sample: int = SAMPLE,
        max_lag: timedelta = MAX_LAG,
        progress: JobProgress | None = None,
    ) -> None:
        self.sites = sites
        self.max_lag = max_lag
        self.sample = sample
        self._spark = spark
        self._progress = progress

    def look(self, namespaces: Sequence[str] | None) -> list[Look]:
        """The namespaces that can be compared, as of now.  A site that is in none of them is a doubt."""
        if namespaces is None:
            named = self.sites.shared_namespaces()
        else:
            named = dict.fromkeys(namespaces, self.sites.sites)
        if not named and len(self.sites.sites) >= SITES_MIN:
            shown = ", ".join(site.name for site in self.sites.sites)
            self.sites.doubts.append(f"{shown} share no namespace; name those to compare, or set a topology")
        looks = [look for name, sites in named.items() if (look := self.sites.look(name, sites)) is not None]
        compared = {site.name for look in looks for site in look.sites}
        for site in self.sites.sites:
            if named and site.name not in compared:
                self.sites.doubts.append(
                    f"{site.name} was compared in no namespace: it shares none with the others that can be "
                    "compared now; leave it out, or check its topology"
                )
        return looks

    def compare_all(
        self,
        namespaces: Sequence[str] | None,
        *,
        report: str | None = None,
        history: bool = False,
        repair: bool = False,
        open_keys_max: int = 0,
    ) -> tuple[VerifySummary, list[Look], list[ComparisonReport]]:
        """Compare everything.  Returns the summary, the looks, and the reports of the tasks."""
        began_ms = monotonic_ms()
        if report is not None:
            _claim(report)
        try:
            looks = self.look(namespaces)
            ranges = [
                each for look in looks for each in self.sites.plan(look, self._tasks_min(), history=history)
            ]
        except (Unreachable, VersionCollected) as error:
            self.sites.doubts.append(f"the comparison could not begin: {error}")
            looks, ranges = [], []
        work = Comparing(
            ranges=ranges,
            sample=self.sample,
            open_keys_max=open_keys_max,
            rows=report is not None,
            repair=repair,
        )
        reports = self._run(work, report)
        summary = summarize(
            self,
            looks,
            reports,
            report=report if reports else None,
            repair=repair,
            whole=True,
            began_ms=began_ms,
        )
        return summary, looks, reports

    def _run(self, work: Comparing, report: str | None) -> list[ComparisonReport]:
        if not work.ranges:
            return []
        count = len(work.ranges)
        rows = self._spark.range(0, count, 1, count).mapInArrow(work, ROWS)
        try:
            with raising_floodmark_errors(), watch_tasks(self._spark, self._progress, _STAGE):
                if report is None:
                    told = [row[REPORT] for row in rows.select(REPORT).collect()]
                else:
                    observation = Observation()
                    observed = rows.observe(observation, F.collect_list(REPORT).alias(_REPORTS))
                    drifted = observed.where(F.col(REPORT).isNull()).drop(REPORT)
                    drifted.write.mode("append").parquet(directory_at(report).url)
                    told = observation.get[_REPORTS]
        except (Unreachable, VersionCollected, Corruption) as error:
            self.sites.doubts.append(f"the comparison did not finish: {error}")
            return []
        return [msgspec.msgpack.decode(bytes(each), type=ComparisonReport) for each in told]

    def _tasks_min(self) -> int:
        if isinstance(self._spark, SparkSession):
            return _TASKS_PER_CORE * self._spark.sparkContext.defaultParallelism
        # A Connect server does not tell its number of cores.
        return _TASKS_ELSEWHERE


def _claim(report: str) -> None:
    """Create the report's directory before the work.  Raises InvalidArgument if it holds files."""
    directory = directory_at(report)
    if directory.names():
        raise InvalidArgument(f"the report's directory {report} holds files already; name a new one")
    directory.make()


def summarize(
    verification: Verification,
    looks: Sequence[Look],
    reports: Iterable[ComparisonReport],
    *,
    report: str | None = None,
    repair: bool = False,
    whole: bool,
    began_ms: int,
) -> VerifySummary:
    """The summary of reports."""
    told = sorted(reports, key=lambda each: (each.namespace, each.sample[0].key if each.sample else b""))
    found, left, mended = _sum(told, looks), _sum(told, looks, second=True), RepairSummary()
    for each in told:
        mended = mended if each.repair is None else add_repairs(mended, each.repair)
    overdue = [
        doubt
        for look in looks
        for doubt in find_overdue(
            look.namespace, look.vantages, found.get(look.namespace, {}), verification.max_lag
        )
    ]
    drifts = [DriftFound(each.namespace, drift) for each in told for drift in each.sample]
    differences = [DifferenceFound(each.namespace, one) for each in told for one in each.differences]
    return VerifySummary(
        sites=[site.name for site in verification.sites.sites],
        pairs=_pairs(found),
        sample=drifts[: verification.sample],
        doubts=list(
            dict.fromkeys(
                [*verification.sites.doubts, *overdue, *(doubt for each in told for doubt in each.doubts)]
            )
        ),
        repair=mended if repair else None,
        left=_pairs(left),
        differences=differences[: verification.sample],
        differences_found=sum(each.differences_found for each in told),
        report=report,
        whole=whole,
        seconds=(monotonic_ms() - began_ms) / 1000,
    )


def _sum(
    reports: Sequence[ComparisonReport], looks: Sequence[Look], *, second: bool = False
) -> dict[str, dict[Pair, ComparedTally]]:
    """The tallies of each namespace over all its ranges."""
    sums: dict[str, dict[Pair, ComparedTally]] = {}
    for look in looks:
        tallies: dict[Pair, ComparedTally] = {}
        for each in reports:
            if each.namespace == look.namespace:
                tallies = add_tallies(tallies, each.left if second else each.tallies)
        if tallies:
            sums[look.namespace] = tallies
    return sums


def _pairs(sums: dict[str, dict[Pair, ComparedTally]]) -> list[PairSummary]:
    return [
        PairSummary(namespace=namespace, left=pair.left, right=pair.right, **msgspec.structs.asdict(tally))
        for namespace, tallies in sums.items()
        for pair, tally in tallies.items()
    ]
