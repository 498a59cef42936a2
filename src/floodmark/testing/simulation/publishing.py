"""Publishers of data sets: they replace all that `users` holds at every site that they reach, now and then.

A publisher runs what `Site.generations.publish` runs.  Between any two of its calls others write, read, cut
and crash, and it may die.  Then it goes on with the same rows, or begins with others.  Sites that it leaves
out, or that fail when others have swapped, get the data set by their links.
"""

from collections.abc import Callable, Iterator, Sequence
from random import Random
from typing import Any, Final, TypeVar

from floodmark.codec.values import encode_value
from floodmark.host.catalog import GenerationRow
from floodmark.host.ports import Host
from floodmark.model.errors import (
    ClockSkew,
    PartlyDone,
    PublicationConflict,
    VersionCollected,
    VersionInFuture,
)
from floodmark.site.generations import Generations
from floodmark.testing.simulation.chronicle import NAMESPACES, DataSet
from floodmark.testing.simulation.copies import DistantMember
from floodmark.testing.simulation.history import Violation
from floodmark.testing.simulation.network import Carrier
from floodmark.testing.simulation.sites import TROUBLE, SimulatedSite
from floodmark.testing.simulation.workload import KEYS

Result = TypeVar("Result")

PUBLISHER: Final = "nightly"
# The place of publishers, for the network.
PLACE: Final = "publisher"
DIES: Final = 0.02
AWAY: Final = 0.2
BASE_AGE_MAX: Final = 3 << 18
# What a publisher is told when clocks are apart, sites fail, or another is at work.
EXPECTED: Final = (*TROUBLE, ClockSkew, PartlyDone, PublicationConflict, VersionCollected, VersionInFuture)
# Rounds of all links after which each site has what any has, and the newest data set.
ROUNDS: Final = 3


class Died(BaseException):
    """The publisher's process ended here."""


class Publisher:
    """Publishes one data set after the other.  `act` lets something else happen."""

    def __init__(
        self, sites: Sequence[SimulatedSite], network: Carrier, random: Random, act: Callable[[], None]
    ) -> None:
        self.data_sets: dict[bytes, DataSet] = {}
        """All that were begun, by the stamp of their rows."""
        self._sites = sites
        self._network = network
        self._random = random
        self._act = act
        self._number = 0
        self._rows: DataSet = {}
        self._is_left = False
        self._is_busy = False

    def poll(self) -> None:
        """Publish something, or go on with what was left."""
        if self._is_busy:
            return
        random = self._random
        first, *rest = [_DistantPlace(self._network, site, self) for site in random.sample(self._sites, 3)]
        away = [each for each in rest if random.random() < AWAY]
        others = [each for each in rest if each not in away]
        self._is_busy = True
        try:
            base = None
            if not self._is_left or random.random() < 0.4:
                self._drop_left(first)
                self._number += 1
                names = random.sample(KEYS, random.randrange(len(KEYS) + 1))
                self._rows = dict.fromkeys(names, encode_value(b"set %d" % self._number))
                if random.random() < 0.5:
                    base = first.versions.read_version() - random.randrange(BASE_AGE_MAX)
            self._is_left = True
            Generations(lambda: first.host, PUBLISHER).publish(
                NAMESPACES[0],
                self._read_rows(),
                base=base,
                publisher=PUBLISHER,
                others=others,
                without=[each.site.name for each in away],
            )
            self._is_left = False
            first.site.note(f"published set {self._number} without {[each.site.name for each in away]}")
            first.site.count("published")
        except Died:
            first.site.note(f"the publisher of set {self._number} died")
            first.site.count("publishers died")
        except EXPECTED as error:
            first.site.note(f"set {self._number} is not published: {type(error).__name__}")
            first.site.count(f"not published: {type(error).__name__}")
        finally:
            self._is_busy = False

    def meanwhile(self) -> None:
        """Let others act, and die now and then."""
        if self._is_busy:
            if self._random.random() < 0.5:
                self._act()
            if self._random.random() < DIES:
                raise Died

    def finish(self) -> None:
        """When everything is healed, drop what is left, as garbage collection does after an hour."""
        for site in self._sites:
            self._drop_left(site)

    def newest(self) -> tuple[bytes, DataSet]:
        """The data set that all sites hold in the end, with the stamp of its rows."""
        stamps = {site.name: _present(site).stamp for site in self._sites}
        if len(set(stamps.values())) > 1:
            raise Violation("8", "all sites", f"all has arrived, and the data sets are {stamps}")
        return (stamp := max(stamps.values())), self.data_sets.get(stamp, {})

    def _read_rows(self) -> Iterator[tuple[bytes, bytes]]:
        for key, stored in self._rows.items():
            self.meanwhile()
            yield key, stored[:-1]

    def _drop_left(self, site: "SimulatedSite | _DistantPlace") -> None:
        def drop(host: Host) -> None:
            left = host.namespaces.find_namespace(NAMESPACES[0]).loading
            if left is not None:
                host.generations.drop_generation(NAMESPACES[0], left.number)

        (site.ask if isinstance(site, _DistantPlace) else site.call_host)(drop)

    def note(self, generation: GenerationRow) -> None:
        """Remember which rows have a stamp."""
        self.data_sets[generation.stamp] = self._rows


class _DistantPlace(DistantMember):
    """A site as a publisher reaches it."""

    def __init__(self, network: Carrier, site: SimulatedSite, publisher: Publisher) -> None:
        super().__init__(network, PLACE, site)
        self._publisher = publisher

    def ask(self, action: Callable[[Host], Result]) -> Result:
        """Have the host of the site do something."""
        return super()._ask(action)

    def _ask(self, action: Callable[[Host], Any]) -> Any:
        self._publisher.meanwhile()
        answer = super()._ask(action)
        if isinstance(answer, GenerationRow):
            self._publisher.note(answer)
        return answer


def _present(site: SimulatedSite) -> GenerationRow:
    return site.call_host(lambda host: host.namespaces.find_namespace(NAMESPACES[0]).present)
