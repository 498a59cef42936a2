"""Verify again and again, reading only what has changed since the last time.

A key that was the same at all sites, and that nobody has written to since, is still the same.  So after a
first pass over everything, it is enough to look at the keys that stand in the change logs since then, and at
those that were open: what lagged may have arrived or turn out to be lost, and what has drifted stays so until
it is repaired.  What goes bad at rest is in no log, and is found by the next whole pass.
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
from floodmark.codec.ordered import NAMESPACE_BYTES, encode_namespace
from floodmark.divergence import Drift, Pair, Tally, Vantage, compare_keys
from floodmark.divergence.comparing import Finding
from floodmark.host.catalog import NamespaceRow
from floodmark.model.errors import FloodmarkError, Unreachable, VersionCollected
from floodmark.model.ranges import KeyRange
from floodmark.model.stream import ChangesRequest
from floodmark.model.version import Version
from floodmark.site.arguments import qualify_range
from floodmark.site.site import Site
from floodmark.spark.jobs.safepoints import LIFETIME, release
from floodmark.spark.jobs.verifying.comparing import KeyDoubts, RangeReport, add_tallies, pair_tallies
from floodmark.spark.jobs.verifying.sites import ComparedSites, Look
from floodmark.spark.jobs.verifying.verify import MAX_LAG, SAMPLE, Verification, VerifySummary, summarize
from floodmark.spark.runtime.progress import Progress
from floodmark.spark.session import use_session
from floodmark.spark.source.address import SiteAddress
from floodmark.spark.source.reading import READERS

EVERY: Final = timedelta(seconds=10)
WHOLE_EVERY: Final = timedelta(hours=24)

# More keys than this are not looked up one by one: reading everything is as quick.
KEYS_MAX: Final = 1_000_000
# Of one range, so many open keys are remembered.
OPEN_KEYS_MAX: Final = 100_000
# So many keys are looked up in one call.
_PORTION: Final = 2_000


@dataclass(frozen=True)
class Standing:
    """How far a namespace was looked at: up to which version of each site, and which keys are open."""

    versions: dict[str, Version]
    open_keys: frozenset[bytes]


class _StartOver(Exception):
    """What has changed cannot be told, or is too much."""


def watch(
    addresses: Sequence[SiteAddress],
    namespaces: Sequence[str] | None = None,
    *,
    every: timedelta = EVERY,
    whole_every: timedelta = WHOLE_EVERY,
    sample: int = SAMPLE,
    max_lag: timedelta = MAX_LAG,
    spark: SparkSession | None = None,
    progress: Progress | None = None,
    stop: Event | None = None,
) -> Generator[VerifySummary, None, None]:
    """Compare sites again and again, with a pause in between, until `stop` is set.

    The first pass reads everything, and so does one now and then; the others what has changed.
    """
    ended = stop or Event()
    with use_session(spark, "floodmark verify") as session:
        watcher = Watcher(addresses, namespaces, session, whole_every, progress)
        try:
            while not ended.is_set():
                yield watcher.take_pass(sample, max_lag)
                ended.wait(every.total_seconds())
        finally:
            watcher.close()


class Watcher:
    """Remembers what the last pass has seen."""

    def __init__(
        self,
        addresses: Sequence[SiteAddress],
        namespaces: Sequence[str] | None,
        spark: SparkSession,
        whole_every: timedelta,
        progress: Progress | None,
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
        """Compare once more: what has changed, or everything if that is due."""
        with ComparedSites(self._addresses) as sites:
            verification = Verification(
                sites, self._spark, sample=sample, max_lag=max_lag, progress=self._progress
            )
            if not self._is_whole_due():
                try:
                    return self._look_at_changes(verification)
                except (_StartOver, VersionCollected):
                    sites.begin_anew()
                except Unreachable as error:
                    sites.doubts.append(f"the comparison did not come to its end: {error}")
                    return summarize(verification, [], [], whole=False, began_ms=monotonic_ms())
            return self._look_at_everything(verification)

    def _is_whole_due(self) -> bool:
        return self._whole_at_ms is None or monotonic_ms() - self._whole_at_ms >= self._whole_every_ms

    def close(self) -> None:
        """Let garbage collection go on."""
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
            # Without a report, with too many open keys, or where a site is gone meanwhile, the next pass is a
            # whole one again.
            if told and len(keys) == len(told):
                with suppress(Unreachable, VersionCollected):
                    self._remember(
                        look, {each.site: each.version for each in look.vantages}, frozenset().union(*keys)
                    )
        self._whole_at_ms = monotonic_ms() if len(self._standings) == len(looks) else None
        return summary

    def _remember(self, look: Look, versions: dict[str, Version], open_keys: frozenset[bytes]) -> None:
        """Keep where the next pass goes on from, also from garbage collection."""
        for site, row in zip(look.sites, look.rows, strict=True):
            name = f"{self._name}-{row.id}"
            site.host.retention.hold_safe_point(name, versions[site.name], LIFETIME, look.namespace)
            self._held.setdefault(site.name, set()).add(name)
        self._standings[look.namespace] = Standing(versions, open_keys)

    # What has changed

    def _look_at_changes(self, verification: Verification) -> VerifySummary:
        began_ms = monotonic_ms()
        looks = verification.look(self._namespaces)
        reports: list[RangeReport] = []
        for look in looks:
            try:
                reports.append(self._compare_changes(look, verification.sample))
            except VersionCollected:
                raise
            except FloodmarkError as error:
                # The standing stays as it was, so that the next pass looks at the same keys again.
                verification.sites.doubts.append(
                    f"what has changed in {look.namespace!r} was not compared: {error}"
                )
        return summarize(verification, looks, reports, whole=False, began_ms=began_ms)

    def _compare_changes(self, look: Look, sample: int) -> RangeReport:
        standing = self._standings.get(look.namespace)
        if standing is None or standing.versions.keys() != {site.name for site in look.sites}:
            raise _StartOver
        keys, versions = set(standing.open_keys), {}
        for site, row, vantage in zip(look.sites, look.rows, look.vantages, strict=True):
            changed, through = _changed_keys(site, row, vantage, standing.versions[site.name])
            keys |= changed
            versions[site.name] = through
            if len(keys) > KEYS_MAX:
                raise _StartOver
        findings, tallies = _compare_portions(look, sorted(keys))
        drifts = [finding for finding in findings if isinstance(finding, Drift)]
        doubts = KeyDoubts(look.namespace)
        for finding in findings:
            doubts.add(finding)
        self._remember(look, versions, frozenset(finding.key for finding in findings))
        return RangeReport(
            namespace=look.namespace,
            tallies=pair_tallies(tallies),
            sample=drifts[:sample],
            doubts=doubts.told,
        )


def _compare_portions(look: Look, keys: Sequence[bytes]) -> tuple[list[Finding], dict[Pair, Tally]]:
    """Compare some keys, as many portions at a time as there are sites, so that all of them have work."""
    hosts = [site.host for site in look.sites]

    def compare_portion(start: int) -> tuple[list[Finding], dict[Pair, Tally]]:
        portion = keys[start : start + _PORTION]
        comparison = compare_keys(hosts, look.namespace, portion, look.vantages)
        return list(comparison), comparison.tallies

    findings: list[Finding] = []
    tallies: dict[Pair, Tally] = {}
    with ThreadPoolExecutor(len(hosts)) as pool:
        for found, counted in pool.map(compare_portion, range(0, max(1, len(keys)), _PORTION)):
            findings += found
            tallies = add_tallies(tallies, counted)
    return findings, tallies


def _changed_keys(
    site: Site, row: NamespaceRow, vantage: Vantage, since: Version
) -> tuple[set[bytes], Version]:
    """The keys that were written to at a site since a version, and up to which version that is told."""
    keys = qualify_range(encode_namespace(row.id), KeyRange())
    request = ChangesRequest(keys=keys, namespace=row.id, since=since, until=vantage.version, keys_only=True)
    changed: set[bytes] = set()
    through = since
    for batch in site.host.changes(request):
        changed.update(key[NAMESPACE_BYTES:] for key in batch.keys)
        through = max(through, batch.through)
        if len(changed) > KEYS_MAX:
            raise _StartOver
    return changed, through
