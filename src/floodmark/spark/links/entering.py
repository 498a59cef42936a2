"""The topology of the links put in force at every site, however long it takes to reach all of them.

A site that is new takes part only after those who are there already know of it: until then they forget
deletions that it has not heard of, and would have to refuse what it writes (`replication/admission.py`).
"""

import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import Future

from floodmark.host.statistics import LinkStatistics
from floodmark.model.errors import FloodmarkError, Retryable
from floodmark.replication.topology import Topology
from floodmark.spark.links.sites import Rest, at_once, begin
from floodmark.spark.source.address import SiteAddress

_log = logging.getLogger("floodmark.replication")


class Entering:
    """Lets the active sites of a topology follow it.

    `found` is how many intervals those that do had found wrong by then, by their source.
    """

    def __init__(self, topology: Topology, addresses: Mapping[str, SiteAddress]) -> None:
        self.found: dict[str, Counter[str]] = {}
        self._topology = topology
        self._left = {name: addresses[name] for name, site in topology.sites.items() if site.is_active}
        self._trying: Future[FloodmarkError | None] | None = None
        self._rest = Rest()
        for address in self._left.values():
            address.require_url("replicated")

    def try_all(self) -> FloodmarkError | None:
        """Put the topology in force wherever that can be done; why it was not everywhere, if so.

        A refusal is told before a site that is away.
        """
        names = list(self._left)
        answers = dict(zip(names, at_once(self._ask, names), strict=True))
        failures = [answer for answer in answers.values() if isinstance(answer, FloodmarkError)]
        there = [name for name, answer in answers.items() if isinstance(answer, Topology)]
        failures += [failure for name in there if (failure := self._enter(name)) is not None]
        if not failures or not (there or self.found):
            new = [name for name, answer in answers.items() if answer is None]
            failures += [failure for name in new if (failure := self._enter(name)) is not None]
        return min(failures, key=lambda failure: isinstance(failure, Retryable), default=None)

    def go_on(self) -> None:
        """Try again now and then, without waiting, until all follow."""
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
    """How many intervals a site has found wrong, by their source."""
    wrong: Counter[str] = Counter()
    for link in links:
        wrong[link.source] += link.intervals_wrong
    return wrong
