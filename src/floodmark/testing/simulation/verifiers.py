"""Verifiers, which compare sites while everything runs: they must not report lag as drift (promise 9).

A verifier fixes the versions of the sites, reads the sites one after another, and reads their collected
horizons last.  Time passes in between, so the sites may do anything between two of its steps.  At times it
compares the keys again that have changed since or were lagging.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import timedelta
from random import Random
from typing import Final, TypeVar

import pyarrow

from floodmark.codec.ordered import qualify_range
from floodmark.divergence.comparing import (
    Comparison,
    Drift,
    Lag,
    Vantage,
    compare,
    compare_keys,
    take_vantage,
)
from floodmark.host.directory import Identity
from floodmark.host.ports import Host
from floodmark.model.errors import (
    FloodmarkError,
    InvalidConfiguration,
    NamespaceNotFound,
    VersionCollected,
)
from floodmark.model.partition import Content
from floodmark.model.ranges import KeyRange
from floodmark.model.stream import ChangesRequest, OnGeneration
from floodmark.model.version import Version
from floodmark.testing.simulation.chronicle import NAMESPACES, unqualified
from floodmark.testing.simulation.history import Key, Violation
from floodmark.testing.simulation.ports import DistantPorts
from floodmark.testing.simulation.sites import SimulatedSite

Result = TypeVar("Result")

STAGES_MAX: Final = 3

# The safe point of a verifier.  Its lifetime is short, so that a dead verifier does not hold back collection.
VERIFIER: Final = "verifier"
HELD: Final = timedelta(seconds=2)
# The errors of a site that takes no part, or that has collected the version after the safe point expired.
CANNOT_TELL: Final = (InvalidConfiguration, NamespaceNotFound, VersionCollected)


class VisitedSite(DistantPorts):
    """A simulated site as reached by a comparison, through all its restarts."""

    def __init__(self, site: SimulatedSite) -> None:
        super().__init__(site.call_host)
        self.site = site
        self.identity = Identity(site=site.name, site_id=site.id, format=1)

    def scan(self, namespace: str, at: Version) -> list[pyarrow.RecordBatch]:
        """Read all records of a namespace, without their values."""
        keys = _keys_of(namespace)
        return self._ask(
            lambda host: list(host.router.scan_records(keys, at, dead=True, content=Content.THIN))
        )

    def changed_keys(self, namespace: str, since: Version, until: Version) -> set[bytes]:
        """Read which keys were written in between."""
        request = ChangesRequest(
            keys=_keys_of(namespace),
            namespace=_number_of(namespace),
            since=since,
            until=until,
            on_generation=OnGeneration.DIFFERENCE,
        )
        batches = self._ask(lambda host: list(host.changes(request)))
        return {unqualified(key).key for batch in batches if not batch.is_marker for key in batch.keys}

    def hold(self, version: Version) -> None:
        """Keep a version for a while."""
        self.retention.hold_safe_point(VERIFIER, version, HELD, None)

    def _ask(self, action: Callable[[Host], Result]) -> Result:
        return self.site.call_host(action)


class Verifier:
    """Compares sites that are up, again and again."""

    def __init__(self, sites: Sequence[SimulatedSite], random: Random) -> None:
        self._sites = sites
        self._random = random
        self._stages = self._run()
        self.census: Counter[str] = Counter()

    def poll(self) -> None:
        """Take the next step or several.  After an error the comparison begins anew."""
        try:
            for _ in range(self._random.randint(1, STAGES_MAX)):
                next(self._stages)
        except (StopIteration, *CANNOT_TELL):
            self.begin_anew()
        except FloodmarkError:
            self.begin_anew()
            raise

    def begin_anew(self) -> None:
        """Abandon a comparison, because one of its sites has left or cannot be compared."""
        self._stages = self._run()

    def _run(self) -> Iterator[None]:
        random = self._random
        up = [site for site in self._sites if site.is_up]
        visited = [VisitedSite(site) for site in random.sample(up, min(len(up), random.randint(2, 3)))]
        namespace = random.choice(NAMESPACES)
        vantages: list[Vantage] = []
        for site in visited:
            vantages.append(take_vantage(site.host, namespace))
            site.hold(vantages[-1].version)
            yield
        streams = []
        for site, vantage in zip(visited, vantages, strict=True):
            streams.append(site.scan(namespace, vantage.version))
            yield
        keys = require_no_drift(compare(vantages, streams), namespace)
        self.census.update({"whole looks": 1, "keys in lag": len(keys)})
        while random.random() < 0.5:
            for place, site in enumerate(visited):
                vantage = take_vantage(site.host, namespace)
                keys |= site.changed_keys(namespace, vantages[place].version, vantage.version)
                site.hold(vantage.version)
                vantages[place] = vantage
                yield
            hosts = [site.host for site in visited]
            keys = require_no_drift(compare_keys(hosts, namespace, sorted(keys), vantages), namespace)
            self.census["second looks"] += 1


def require_no_drift(comparison: Comparison, namespace: str) -> set[bytes]:
    """Raise a Violation for any drift, which must be false; return the keys that lag."""
    lagging: set[bytes] = set()
    for finding in comparison:
        if isinstance(finding, Drift):
            raise Violation(
                "9",
                f"{finding.left.site} and {finding.right.site}",
                f"{Key(namespace, finding.key)} is called {finding.verdict}: {finding}",
                keys=[Key(namespace, finding.key)],
            )
        if finding.doubt is not None:
            raise Violation(
                "9",
                f"{finding.left} and {finding.right}",
                f"{Key(namespace, finding.key)} {finding.doubt}, though nothing was altered",
                keys=[Key(namespace, finding.key)],
            )
        lagging.add(finding.key)
    return lagging


def find_all(sites: Iterable[SimulatedSite], namespace: str) -> list[Drift | Lag]:
    """Compare all sites at once."""
    visited = [VisitedSite(site) for site in sites]
    vantages = [take_vantage(site.host, namespace) for site in visited]
    streams = [site.scan(namespace, vantage.version) for site, vantage in zip(visited, vantages, strict=True)]
    return list(compare(vantages, streams))


def check_agreement(sites: Iterable[SimulatedSite]) -> None:
    """Check, after all changes have arrived, that no key has drifted or lags."""
    chosen = list(sites)
    for namespace in NAMESPACES:
        for finding in find_all(chosen, namespace):
            key = Key(namespace, finding.key)
            raise Violation("9", "all sites", f"all has arrived, and there is {finding}", keys=[key])


def _number_of(namespace: str) -> int:
    return NAMESPACES.index(namespace) + 1


def _keys_of(namespace: str) -> KeyRange:
    return qualify_range(_number_of(namespace))
