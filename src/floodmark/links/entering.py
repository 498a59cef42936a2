"""Puts the topology of the links in force at every site, and retries at unreachable sites.

Sites that have a topology get the new one first, and new sites last.  Until the others know a new site, they
collect deletions without waiting for it, and would have to refuse its writes (`Links.horizon`).
"""

import logging
from collections.abc import Mapping
from concurrent.futures import Future

from floodmark.host.statistics import LinkStatistics
from floodmark.links.connections import Rest, at_once, begin
from floodmark.model.errors import FloodmarkError, Retryable
from floodmark.replication.topology import Topology
from floodmark.site.address import SiteAddress

_log = logging.getLogger("floodmark.replication")


class Entering:
    """Puts a topology in force at its active sites.

    `before` has the links of each site at the time when the topology was put in force there.  `returning` has
    what is missing at each restored site that takes no part yet.
    """

    def __init__(self, topology: Topology, addresses: Mapping[str, SiteAddress]) -> None:
        self.before: dict[str, list[LinkStatistics]] = {}
        self.returning: dict[str, str] = {}
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
        if not failures or not (there or self.before):
            for name in [name for name, answer in answers.items() if answer is None]:
                failure = self._enter(name)
                if failure is not None:
                    failures.append(failure)
                if failure is not None and not isinstance(failure, Retryable):
                    break
        return min(failures, key=lambda failure: isinstance(failure, Retryable), default=None)

    def go_on(self) -> None:
        """Retry at intervals, without blocking, until all sites have the topology."""
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
                replication = host.status.replication()
                self.before[name] = replication.links
                if replication.returning is not None:
                    self.returning[name] = replication.returning
        except FloodmarkError as failure:
            return failure
        del self._left[name]
        return None
