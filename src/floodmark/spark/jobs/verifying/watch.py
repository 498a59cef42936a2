"""Verify repeatedly, reading only the keys that have changed since the last pass.

A key that was equal at all sites and was not written since is still equal.  So after a first pass over
everything it is enough to compare the keys in the change logs since then, and the open ones: those that
lagged or had drifted.  Damage at rest is in no log; the next whole pass finds it.
"""

from collections.abc import Generator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from threading import Event
from typing import Final
from uuid import uuid4

from pyspark.sql import SparkSession

from floodmark.clock import monotonic_ms
from floodmark.codec.ordered import NAMESPACE_BYTES
from floodmark.divergence.comparing import ComparedTally, Drift, Finding, Pair, compare_keys
from floodmark.model.errors import FloodmarkError, Unreachable, VersionCollected
from floodmark.model.ranges import KeyRange
from floodmark.model.stream import ChangesRequest
from floodmark.model.version import Version
from floodmark.site.address import SiteAddress
from floodmark.site.site import Site
from floodmark.spark.jobs.common import LIFETIME, release
from floodmark.spark.jobs.verifying.comparing import ComparisonReport, KeyDoubts, SiteView, add_tallies
from floodmark.spark.jobs.verifying.verify import (
    MAX_LAG,
    SAMPLE,
    ComparedSites,
    Look,
    Verification,
    VerifySummary,
    summarize,
)
from floodmark.spark.runtime.progress import JobProgress
from floodmark.spark.session import open_session
from floodmark.spark.source.reading import READERS

EVERY: Final = timedelta(seconds=10)
WHOLE_EVERY: Final = timedelta(hours=24)

# Above this, reading everything is as quick as looking keys up.
KEYS_MAX: Final = 1_000_000
# The most open keys to remember of one range.
OPEN_KEYS_MAX: Final = 100_000
# Keys to look up in one call.
_PORTION: Final = 2_000


@dataclass(frozen=True)
class Standing:
    """The progress in a namespace: the version of each site that was compared, and the open keys."""

    versions: dict[str, Version]
    open_keys: set[bytes]


class _StartOver(Exception):
    """The changed keys are unknown or too many."""


def watch(
    addresses: Sequence[SiteAddress],
    namespaces: Sequence[str] | None = None,
    *,
    every: timedelta = EVERY,
    whole_every: timedelta = WHOLE_EVERY,
    sample: int = SAMPLE,
    max_lag: timedelta = MAX_LAG,
    spark: SparkSession | None = None,
    progress: JobProgress | None = None,
    stop: Event | None = None,
) -> Generator[VerifySummary, None, None]:
    """Compare sites at an interval until `stop` is set.

    The first pass and one in each `whole_every` read everything; the others read the changed keys.
    """
    ended = stop or Event()
    with open_session(name="floodmark verify", spark=spark) as session:
        watcher = Watcher(addresses, namespaces, session, whole_every, progress)
        try:
            while not ended.is_set():
                yield watcher.take_pass(sample, max_lag)
                ended.wait(every.total_seconds())
        finally:
            watcher.close()


class Watcher:
    """Takes passes, and remembers the last one."""

    def __init__(
        self,
        addresses: Sequence[SiteAddress],
        namespaces: Sequence[str] | None,
        spark: SparkSession,
        whole_every: timedelta,
        progress: JobProgress | None,
    ) -> None:
        self._addresses = addresses
        self._namespaces = namespaces
        self._spark = spark
        self._whole_every_ms = whole_every // timedelta(milliseconds=1)
        self._progress = progress
        self._name = f"{READERS}verify-watch-{uuid4()}"
        self._standings: dict[str, Standing] = {}
        # The names of safe points, by site.
        self._held: dict[str, set[str]] = {}
        self._whole_at_ms: int | None = None

    def take_pass(self, sample: int, max_lag: timedelta) -> VerifySummary:
        """Compare the changed keys, or everything if that is due."""
        with ComparedSites(self._addresses) as sites:
            summary = self._look(sites, sample, max_lag)
            sites.tell(summary)
            return summary

    def _look(self, sites: ComparedSites, sample: int, max_lag: timedelta) -> VerifySummary:
        verification = Verification(
            sites, self._spark, sample=sample, max_lag=max_lag, progress=self._progress
        )
        if not self._is_whole_due():
            try:
                return self._look_at_changes(verification)
            except (_StartOver, VersionCollected):
                sites.begin_anew()
            except Unreachable as error:
                sites.doubts.append(f"the comparison did not finish: {error}")
                return summarize(verification, [], [], whole=False, began_ms=monotonic_ms())
        return self._look_at_everything(verification)

    def _is_whole_due(self) -> bool:
        return self._whole_at_ms is None or monotonic_ms() - self._whole_at_ms >= self._whole_every_ms

    def close(self) -> None:
        """Release the safe points."""
        with suppress(FloodmarkError), ComparedSites(self._addresses) as sites:
            for site in sites.sites:
                for name in self._held.get(site.name, ()):
                    release(site, name)

    # Everything

    def _look_at_everything(self, verification: Verification) -> VerifySummary:
        summary, looks, reports = verification.compare_all(self._namespaces, open_keys_max=OPEN_KEYS_MAX)
        self._standings.clear()
        for look in looks:
            told = [report.open_keys for report in reports if report.namespace == look.namespace]
            keys = [keys for keys in told if keys is not None]
            # Without a report, with too many open keys, or without a site, the next pass is a whole one.
            if told and len(keys) == len(told):
                with suppress(Unreachable, VersionCollected):
                    self._remember(look, {each.site: each.version for each in look.views}, set().union(*keys))
        self._whole_at_ms = monotonic_ms() if len(self._standings) == len(looks) else None
        return summary

    def _remember(self, look: Look, versions: dict[str, Version], open_keys: set[bytes]) -> None:
        """Store and hold the versions that the next pass goes on from."""
        for site, view in zip(look.sites, look.views, strict=True):
            name = f"{self._name}-{view.namespace_id}"
            site.host.retention.hold_safe_point(name, versions[site.name], LIFETIME, look.namespace)
            self._held.setdefault(site.name, set()).add(name)
        self._standings[look.namespace] = Standing(versions, open_keys)

    # Changed keys

    def _look_at_changes(self, verification: Verification) -> VerifySummary:
        began_ms = monotonic_ms()
        looks = verification.look(self._namespaces)
        reports: list[ComparisonReport] = []
        for look in looks:
            try:
                reports.append(self._compare_changes(look, verification.sample))
            except VersionCollected:
                raise
            except FloodmarkError as error:
                # The standing is unchanged, so the next pass compares the same keys again.
                verification.sites.doubts.append(
                    f"the changed keys of {look.namespace!r} were not compared: {error}"
                )
        return summarize(verification, looks, reports, whole=False, began_ms=began_ms)

    def _compare_changes(self, look: Look, sample: int) -> ComparisonReport:
        standing = self._standings.get(look.namespace)
        if standing is None or standing.versions.keys() != {site.name for site in look.sites}:
            raise _StartOver
        keys, versions = set(standing.open_keys), {}
        for site, view in zip(look.sites, look.views, strict=True):
            changed, through = _changed_keys(site, view, standing.versions[site.name])
            keys |= changed
            versions[site.name] = through
            if len(keys) > KEYS_MAX:
                raise _StartOver
        findings, tallies = _compare_portions(look, sorted(keys))
        drifts = [finding for finding in findings if isinstance(finding, Drift)]
        doubts = KeyDoubts(look.namespace)
        for finding in findings:
            doubts.add(finding)
        self._remember(look, versions, {finding.key for finding in findings})
        return ComparisonReport(
            namespace=look.namespace,
            tallies=tallies,
            sample=drifts[:sample],
            doubts=doubts.told,
        )


def _compare_portions(look: Look, keys: Sequence[bytes]) -> tuple[list[Finding], dict[Pair, ComparedTally]]:
    """Compare some keys, in as many portions at a time as there are sites."""
    hosts, vantages = [site.host for site in look.sites], look.vantages

    def compare_portion(start: int) -> tuple[list[Finding], dict[Pair, ComparedTally]]:
        portion = keys[start : start + _PORTION]
        comparison = compare_keys(hosts, look.namespace, portion, vantages)
        return list(comparison), comparison.tallies

    findings: list[Finding] = []
    tallies: dict[Pair, ComparedTally] = {}
    with ThreadPoolExecutor(len(hosts)) as pool:
        for found, counted in pool.map(compare_portion, range(0, max(1, len(keys)), _PORTION)):
            findings += found
            tallies = add_tallies(tallies, counted)
    return findings, tallies


def _changed_keys(site: Site, view: SiteView, since: Version) -> tuple[set[bytes], Version]:
    """The keys that were written at a site since a version, and the version up to which they are complete."""
    request = ChangesRequest(
        keys=view.qualify(KeyRange()),
        namespace=view.namespace_id,
        since=since,
        until=view.version,
        keys_only=True,
    )
    changed: set[bytes] = set()
    through = since
    for batch in site.host.changes(request):
        changed.update(key[NAMESPACE_BYTES:] for key in batch.keys)
        through = max(through, batch.through)
        if len(changed) > KEYS_MAX:
            raise _StartOver
    return changed, through
