"""Verify that sites agree, and repair the keys that have drifted.

Each site is read as of one version with its watermark at that version, so writes may go on: changes under
way count as lag, and drift is a difference that does not go away by waiting (`divergence/`).  Sites send
digests, not values.  The outcome is that the sites agree, that they have drifted, or that there are doubts.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Final, TypeAlias
from uuid import uuid4

import msgspec
from pyspark.sql import Observation, SparkSession
from pyspark.sql import functions as F

from floodmark.clock import monotonic_ms
from floodmark.divergence.comparing import ComparedTally, Drift, Pair, Vantage, take_vantage
from floodmark.divergence.histories import Difference
from floodmark.divergence.outcome import (
    Compared,
    Outcome,
    SiteDoubt,
    conclude,
    find_overdue,
    tell_doubts,
)
from floodmark.divergence.repairing import RepairSummary
from floodmark.feed import at_present
from floodmark.files.directory import directory_at
from floodmark.host.comparisons import ComparisonNote
from floodmark.host.ports import Host
from floodmark.model.errors import (
    Corruption,
    FloodmarkError,
    InvalidArgument,
    InvalidConfiguration,
    NamespaceNotFound,
    Rejoining,
    Unreachable,
    VersionCollected,
    WireMismatch,
)
from floodmark.model.ranges import KeyRange
from floodmark.model.text import show_bytes
from floodmark.model.version import Version
from floodmark.site.address import SiteAddress
from floodmark.site.site import Site
from floodmark.spark.jobs.common import holding, release
from floodmark.spark.jobs.verifying.comparing import (
    REPORT,
    ROWS,
    SITES_MIN,
    Comparing,
    ComparisonReport,
    RangeComparison,
    SiteView,
    add_repairs,
    add_tallies,
)
from floodmark.spark.runtime.failures import raising_floodmark_errors
from floodmark.spark.runtime.progress import JobProgress, watch_tasks
from floodmark.spark.session import open_session
from floodmark.spark.source.planning import users_keys
from floodmark.spark.source.reading import READERS, ServedReader, plan_records

SAMPLE: Final = 20
MAX_LAG: Final = timedelta(seconds=60)

# Ranges are estimates: several for each core even out their sizes.
_TASKS_PER_CORE: Final = 4
_TASKS_ELSEWHERE: Final = 32
_STAGE: Final = "compare"
_REPORTS: Final = "reports"
_TELL_EVERY_MS: Final = 2_000
# A namespace of a site with one of these errors is in doubt, and the other sites are compared.
_CANNOT_LOOK: Final = (InvalidConfiguration, NamespaceNotFound, Rejoining, Unreachable, VersionCollected)

_Tallies: TypeAlias = dict[Pair, ComparedTally]


class PairSummary(ComparedTally, frozen=True, kw_only=True):
    """The result of comparing a namespace at two sites, in numbers of keys."""

    namespace: str
    left: str
    right: str


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
    with open_session(name="floodmark verify", spark=spark) as session, ComparedSites(addresses) as sites:
        work = Verification(sites, session, sample=sample, max_lag=max_lag, progress=progress)
        summary, _, _ = work.compare_all(namespaces, report=report, history=history, repair=repair)
        sites.tell(summary)
        return summary


@dataclass(frozen=True, kw_only=True)
class Look:
    """A namespace at all sites that can be compared, as of a version of each."""

    namespace: str
    sites: Sequence[Site]
    views: Sequence[SiteView]

    @property
    def vantages(self) -> list[Vantage]:
        """The vantages of the sites."""
        return [
            view.vantage(site.host, self.namespace) for site, view in zip(self.sites, self.views, strict=True)
        ]


class ComparedSites:
    """The sites that answer, and doubts about the others.

    A site that cannot be read is a doubt, and the others are still compared: its absence must not hide that
    two others have drifted.
    """

    def __init__(self, addresses: Sequence[SiteAddress]) -> None:
        if len(addresses) < SITES_MIN:
            raise InvalidArgument("name two sites or more: one alone agrees with itself")
        self.doubts: list[str | SiteDoubt] = []
        self.sites: list[Site] = []
        self._addresses: dict[str, SiteAddress] = {}
        self._name = f"{READERS}verify-{uuid4()}"
        with ExitStack() as stack:
            for address in addresses:
                address.require_url("compared")
                try:
                    site = stack.enter_context(address.connect())
                except (Unreachable, WireMismatch) as error:
                    self.doubts.append(f"{address.name or address.location} cannot be compared: {error}")
                    continue
                if site.name in self._addresses:
                    raise InvalidArgument(f"site {site.name!r} is named twice; name sites that may differ")
                self.sites.append(site)
                self._addresses[site.name] = address
            if len({site.id for site in self.sites}) < len(self.sites):
                raise InvalidArgument(
                    "two of the sites have the same id, so that their writes cannot be told apart"
                )
            self._open_sites = stack.pop_all()
        self._unanswered = tuple(self.doubts)

    def begin_anew(self) -> None:
        """Drop the doubts of earlier looks, and keep those about sites that did not answer."""
        self.doubts[:] = self._unanswered

    def __enter__(self) -> "ComparedSites":
        return self

    def __exit__(self, *_: object) -> None:
        self._open_sites.close()

    def tell(self, summary: VerifySummary) -> None:
        """Report the result to the sites, for their overviews."""
        totals = {
            name: sum(getattr(pair, name) for pair in summary.pairs) for name in ("compared", "agree", "lag")
        }
        sample = [f"{found.namespace}/{show_bytes(found.drift.key)}" for found in summary.sample]
        self.note(
            ComparisonNote(
                sites=summary.sites,
                namespaces=sorted({pair.namespace for pair in summary.pairs}),
                whole=summary.whole,
                outcome=summary.outcome.value,
                drift=summary.drift_left + summary.differences_found,
                sample=sample if summary.drift_left else [],
                doubts=summary.doubts,
                seconds=summary.seconds,
                **totals,
            )
        )

    def note(self, report: ComparisonNote) -> None:
        """Send a report to the sites.  A caller that may only read, or an earlier release, is no error."""
        for site in self.sites:
            with suppress(FloodmarkError):
                site.host.verification.note_comparison(report)

    def shared_namespaces(self) -> dict[str, list[Site]]:
        """The namespaces that two or more of the sites share, by any of their topologies, and these sites."""
        members: dict[str, set[str]] = {}
        for site in self.sites:
            try:
                topology = site.topology()
            except Unreachable as error:
                self.doubts.append(f"the topology of {site.name} could not be read: {error}")
                continue
            if topology is not None:
                for name in topology.namespaces:
                    members.setdefault(name, set()).update(topology.active_members(name))
        sharing = {
            name: [site for site in self.sites if site.name in members[name]] for name in sorted(members)
        }
        return {name: sites for name, sites in sharing.items() if len(sites) >= SITES_MIN}

    def look(self, namespace: str, sites: Sequence[Site]) -> Look | None:
        """Take and hold the vantages of some sites; None if fewer than two can be compared."""
        found: list[tuple[Site, str, SiteView]] = []
        for site in sites:
            try:
                row = site.host.namespaces.find_namespace(namespace)
                at_present(
                    site.host.versions.read_version,
                    partial(self._hold, self._open_sites, site, str(row.id), namespace),
                )
                vantage = take_vantage(site.host, namespace)
            except _CANNOT_LOOK as error:
                self.doubts.append(SiteDoubt(site.name, namespace, str(error)))
                continue
            view = SiteView(
                address=self._addresses[site.name],
                site=site.name,
                site_id=site.id,
                namespace_id=row.id,
                version=vantage.version,
                mark=dict(vantage.mark),
                data_set=vantage.data_set,
            )
            found.append((site, row.merge, view))
        policies = Counter(merge for _, merge, _ in found)
        if len(policies) > 1:
            said = ", ".join(f"{site.name} by {merge}" for site, merge, _ in found)
            self.doubts.append(f"{namespace!r} has several merge policies: {said}")
            # The sites with the most common policy can still be compared.
            policy = policies.most_common(1)[0][0]
            found = [each for each in found if each[1] == policy]
        if len(found) < SITES_MIN:
            return None
        return Look(
            namespace=namespace, sites=[site for site, _, _ in found], views=[view for _, _, view in found]
        )

    def _hold(self, stack: ExitStack, site: Site, suffix: str, namespace: str, version: Version) -> None:
        """Hold a version until a stack is closed.  If the release fails, the safe point expires."""
        name = f"{self._name}-{suffix}"
        stack.enter_context(holding(site, name, version, namespace))
        stack.callback(_release_quietly, site, name)

    def _hold_history(self, look: Look) -> Version | None:
        """The version above which all sites have their histories, held until the sites are closed."""

        def hold(since: Version) -> Version:
            with ExitStack() as stack:
                for site, view in zip(look.sites, look.views, strict=True):
                    self._hold(stack, site, f"history-{view.namespace_id}", look.namespace, since)
                self._open_sites.push(stack.pop_all())
            return since

        try:
            return at_present(
                lambda: max(
                    _first_version(site.host, look.namespace, view.version)
                    for site, view in zip(look.sites, look.views, strict=True)
                ),
                hold,
            )
        except (Unreachable, VersionCollected) as error:
            self.doubts.append(f"the history of {look.namespace!r} cannot be compared: {error}")
            return None

    def plan(self, look: Look, tasks_min: int, *, history: bool) -> list[RangeComparison]:
        """A namespace cut into ranges of users' keys, by the site with the most ranges."""
        since = self._hold_history(look) if history else None
        plans = [_plan_site(*each, tasks_min) for each in zip(look.sites, look.views, strict=True)]
        return [
            RangeComparison(namespace=look.namespace, views=look.views, keys=keys, history_since=since)
            for keys in max(plans, key=len)
        ]


def _plan_site(site: Site, view: SiteView, tasks_min: int) -> list[KeyRange]:
    whole = view.qualify(KeyRange())
    try:
        ranges = plan_records(ServedReader(site), whole, view.version, tasks_min)
    except (Corruption, Unreachable):
        # The task that compares the range raises the error; another site may give the ranges.
        return [KeyRange()]
    return [users_keys(keys) for keys in ranges]


def _first_version(host: Host, namespace: str, at: Version) -> Version:
    """The version above which all sites should have the same history.

    Changes older than the data set that is read at `at` were replaced by it, whether they arrived or not.
    """
    return max(
        host.retention.oldest_version(namespace),
        host.membership.shared_since(namespace, 0),
        host.namespaces.find_namespace(namespace).at(at).base,
    )


def _release_quietly(site: Site, name: str) -> None:
    with suppress(FloodmarkError):
        release(site, name)


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
        explained = {site.name for look in looks for site in look.sites}
        explained |= {doubt.site for doubt in self.sites.doubts if isinstance(doubt, SiteDoubt)}
        for site in self.sites.sites:
            if named and site.name not in explained:
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
            progress = _ToldProgress(
                self.sites, sorted({each.namespace for each in work.ranges}), self._progress
            )
            with raising_floodmark_errors(), watch_tasks(self._spark, progress, _STAGE):
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
        # A Connect server does not report its number of cores.
        return _TASKS_ELSEWHERE


class _ToldProgress:
    """Passes progress on, and reports it to the sites as well, at most every `_TELL_EVERY_MS`."""

    def __init__(self, sites: ComparedSites, namespaces: list[str], then: JobProgress | None) -> None:
        self._sites, self._namespaces, self._then = sites, namespaces, then
        self._told_ms: int | None = None

    def report(self, stage: str, done: int, total: int | None) -> None:
        if self._then is not None:
            self._then.report(stage, done, total)
        now_ms = monotonic_ms()
        if self._told_ms is None or now_ms - self._told_ms >= _TELL_EVERY_MS:
            self._told_ms = now_ms
            names = [site.name for site in self._sites.sites]
            self._sites.note(ComparisonNote(sites=names, namespaces=self._namespaces, done=done, total=total))


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
    found = _sum(looks, ((each.namespace, each.tallies) for each in told))
    left = _sum(looks, ((each.namespace, each.left) for each in told))
    mended = RepairSummary()
    for each in told:
        mended = mended if each.repair is None else add_repairs(mended, each.repair)
    compared = [Compared(look.namespace, look.vantages, found[look.namespace]) for look in looks]
    overdue = find_overdue(compared, verification.max_lag)
    drifts = [DriftFound(each.namespace, drift) for each in told for drift in each.sample]
    differences = [DifferenceFound(each.namespace, one) for each in told for one in each.differences]
    return VerifySummary(
        sites=[site.name for site in verification.sites.sites],
        pairs=_pairs(found),
        sample=drifts[: verification.sample],
        doubts=tell_doubts(
            [*verification.sites.doubts, *overdue, *(doubt for each in told for doubt in each.doubts)]
        ),
        repair=mended if repair else None,
        left=_pairs(left),
        differences=differences[: verification.sample],
        differences_found=sum(each.differences_found for each in told),
        report=report,
        whole=whole,
        seconds=(monotonic_ms() - began_ms) / 1000,
    )


def _sum(looks: Sequence[Look], told: Iterable[tuple[str, _Tallies]]) -> dict[str, _Tallies]:
    """The tallies of each namespace over all its ranges."""
    sums: dict[str, _Tallies] = {look.namespace: {} for look in looks}
    for namespace, tallies in told:
        sums[namespace] = add_tallies(sums[namespace], tallies)
    return sums


def _pairs(sums: dict[str, _Tallies]) -> list[PairSummary]:
    return [
        PairSummary(namespace=namespace, left=pair.left, right=pair.right, **msgspec.structs.asdict(tally))
        for namespace, tallies in sums.items()
        for pair, tally in tallies.items()
    ]
