"""Puts the topology of the links in force at every site, and retries where a site is away.

Sites that have a topology get it first, and new sites last.  Until the others know of a new site, they
collect deletions without waiting for it, and would have to refuse its writes (`Links.horizon`).
"""

import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import Future

from floodmark.host.statistics import LinkStatistics
from floodmark.links.connections import Rest, at_once, begin
from floodmark.model.errors import FloodmarkError, Retryable
from floodmark.replication.topology import Topology
from floodmark.site.address import SiteAddress

_log = logging.getLogger("floodmark.replication")


class Entering:
    """Puts a topology in force at its active sites.

    `found` counts, for each site that has it, the wrong intervals that the site had found by then, by source.
    """

    def __init__(self, topology: Topology, addresses: Mapping[str, SiteAddress]) -> None:
        self.found: dict[str, Counter[str]] = {}
        self._topology = topology
        self._left = {name: each for name, each in addresses.items() if topology.sites[name].is_active}
        self._trying: Future[FloodmarkError | None] | None = None
        self._rest = Rest()
        for address in self._left.values():
            address.require_url("replicated")

    def try_all(self) -> FloodmarkError | None:
        """Put the topology in force wherever possible.  Returns the first error, refusals before absences.

        After one new site refuses it, no further new site gets it.
        """
        names = list(self._left)
        answers = dict(zip(names, at_once(self._ask, names), strict=True))
        failures = [answer for answer in answers.values() if isinstance(answer, FloodmarkError)]
        there = [name for name, answer in answers.items() if isinstance(answer, Topology)]
        failures += [failure for name in there if (failure := self._enter(name)) is not None]
        if not failures or not (there or self.found):
            for name in [name for name, answer in answers.items() if answer is None]:
                failure = self._enter(name)
                if failure is not None:
                    failures.append(failure)
                if failure is not None and not isinstance(failure, Retryable):
                    break
        return min(failures, key=lambda failure: isinstance(failure, Retryable), default=None)

    def go_on(self) -> None:
        """Try again from time to time, without blocking, until all sites have the topology."""
        if self._trying is None:
            if self._left and self._rest.is_over:
                self._trying = begin(self.try_all)
        elif self._trying.done():
            trying, self._trying = self._trying, None
            self._rest.begin()
            failure = trying.result()
            if failure is not None and not isinstance(failure, Retryable):
                _log.error("the topology cannot be put in force: %s", failure)

    def _ask(self, name: str) -> Topology | FloodmarkError | None:
        try:
            with self._left[name].connect() as site:
                return site.host.membership.topology()
        except FloodmarkError as failure:
            return failure

    def _enter(self, name: str) -> FloodmarkError | None:
        try:
            with self._left[name].connect() as site:
                host = site.host
                if host.membership.topology() != self._topology:
                    host.membership.set_topology(self._topology)
                self.found[name] = count_wrong(host.status.replication().links)
        except FloodmarkError as failure:
            return failure
        del self._left[name]
        return None


def count_wrong(links: Sequence[LinkStatistics]) -> Counter[str]:
    """The wrong intervals that a site has found, by source."""
    wrong: Counter[str] = Counter()
    for link in links:
        wrong[link.source] += link.intervals_wrong
    return wrong
