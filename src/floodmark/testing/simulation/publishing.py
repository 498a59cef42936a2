"""Publishers of data sets, which at times replace the content of `users` at every site that they reach.

A publisher runs the code of `Site.generations.publish`.  Between any two of its calls others write, read,
split and crash, and it may die.  Then it resumes with the same rows, or begins with others.  Sites that it
leaves out, or that fail when others have swapped, get the data set over their links.  At times it rolls back
to the previous data set, and retries until the links have brought the changes that it needs.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from datetime import timedelta
from random import Random
from typing import Any, Final, NamedTuple, TypeVar

from floodmark.codec.ordered import NAMESPACE_BYTES
from floodmark.codec.stamps import NO_STAMP, encode_stamp, find_origins, stamp_version
from floodmark.codec.states import live_value
from floodmark.codec.values import TOMBSTONE, encode_value
from floodmark.host.catalog import GenerationRow
from floodmark.host.ports import Host
from floodmark.model.errors import (
    ClockSkew,
    LinkStalled,
    PartlyDone,
    PublicationConflict,
    VersionCollected,
    VersionInFuture,
)
from floodmark.model.partition import ApplyStream, GenerationStream, WriteStream
from floodmark.model.stream import ChangeBatch, ChangesRequest
from floodmark.model.version import Version, physical_ms
from floodmark.site.generations import Generations
from floodmark.testing.simulation.chronicle import NAMESPACES, Chronicle, DataSet, SeenChange
from floodmark.testing.simulation.copies import DistantMember
from floodmark.testing.simulation.history import Key, Violation
from floodmark.testing.simulation.network import Carrier
from floodmark.testing.simulation.sites import TROUBLE, SimulatedSite
from floodmark.testing.simulation.workload import KEYS

Result = TypeVar("Result")

PUBLISHER: Final = "nightly"
# The place of publishers, for the network.
PLACE: Final = "publisher"
DIES: Final = 0.01
AWAY: Final = 0.2
GOES_BACK: Final = 0.5
TRIES: Final = 6
# A rollback makes many calls, so less happens between two of them.
SLOW: Final = 0.05
BASE_AGE_MAX: Final = 3 << 18
# The errors that a publisher gets if clocks differ, sites fail, or another publisher is at work.
EXPECTED: Final = (
    *TROUBLE,
    ClockSkew,
    LinkStalled,
    PartlyDone,
    PublicationConflict,
    VersionCollected,
    VersionInFuture,
)
# Rounds of all links after which all sites hold the same changes and the newest data set.
ROUNDS: Final = 3


class Died(BaseException):
    """The end of the publisher's process."""


class Publisher:
    """Publishes one data set after another.  `act` runs a random action of the world."""

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
        self._pace = 1.0
        self._rollbacks: list[_Rollback] = []

    def poll(self) -> None:
        """Publish a data set, or resume an unfinished publication."""
        if self._is_busy:
            return
        random = self._random
        first, *rest = [_DistantPlace(self._network, site, self) for site in random.sample(self._sites, 3)]
        away = [each for each in rest if random.random() < AWAY]
        others = [each for each in rest if each not in away]
        without = [each.site.name for each in away]
        self._is_busy = True
        try:
            self._try_often(lambda: self._publish(first, others, without))
            if random.random() < GOES_BACK:
                first, *others = random.sample([first, *others], 1 + len(others))
                self._go_back(first, others, without)
        except Died:
            first.site.note(f"the publisher of set {self._number} died")
            first.site.count("publishers died")
        except EXPECTED as error:
            first.site.note(f"set {self._number} is not published: {type(error).__name__}")
            first.site.count(f"not published: {type(error).__name__}")
        finally:
            self._is_busy = False

    def _publish(
        self, first: "_DistantPlace", others: Sequence["_DistantPlace"], without: Sequence[str]
    ) -> None:
        random, base = self._random, None
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
            without=without,
        )
        self._is_left = False
        first.site.note(f"published set {self._number} without {without}")
        first.site.count("published")

    def _go_back(
        self, first: "_DistantPlace", others: Sequence["_DistantPlace"], without: Sequence[str]
    ) -> None:
        near, self._pace = [each.site for each in (first, *others)], SLOW
        try:
            generation = self._try_often(lambda: self._roll_back(first, others, without))
        finally:
            self._pace = 1
        self._rollbacks.append(_Rollback(near, generation.stamp, self._rows, first.reads))
        first.site.note(f"set {self._number} is an earlier one, without {without}")
        first.site.count("rolled back")

    def _roll_back(
        self, first: "_DistantPlace", others: Sequence["_DistantPlace"], without: Sequence[str]
    ) -> GenerationRow:
        self._drop_left(first)
        self._number += 1
        self._rows = first.rows = dict[bytes, bytes]()
        first.reads = []
        return Generations(lambda: first.host, PUBLISHER).rollback(
            NAMESPACES[0], others=others, without=without, wait=timedelta(0)
        )

    def _try_often(self, action: Callable[[], Result]) -> Result:
        """Retry an action while links lag and sites fail."""
        for _ in range(TRIES):
            with suppress(LinkStalled, *TROUBLE):
                return action()
            for _ in range(2 * TRIES):
                self._act()
        return action()

    def meanwhile(self) -> None:
        """Run actions of others, and die sometimes."""
        if self._is_busy:
            if self._random.random() < self._pace * 0.5:
                self._act()
            if self._random.random() < self._pace * DIES:
                raise Died

    def finish(self) -> None:
        """Drop unfinished generations at the end of the run, as garbage collection does after an hour."""
        for site in self._sites:
            self._drop_left(site)

    def check(self) -> None:
        """Check the rollbacks, after the chronicles are complete."""
        for rollback in self._rollbacks:
            rollback.check()

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


class _Rollback(NamedTuple):
    """A rollback: the sites that were not away, the stamp and the rows, and what was read at the first."""

    near: Sequence[SimulatedSite]
    stamp: bytes
    rows: DataSet
    reads: Sequence[ChangesRequest]

    def check(self) -> None:
        """Check that the rows are the earlier data set with all later changes of all sites up to the base."""
        chronicle, since, until = self.near[0].chronicle, self.reads[0].since, self.reads[-1].until
        assert until is not None
        records = chronicle.records(NAMESPACES[0], since - 1)
        records |= {seen.key.key: seen.stored for seen in _changes(chronicle, since, until)}
        now_ms = physical_ms(until)
        for key in KEYS:
            found, expected = (live_value(each.get(key, TOMBSTONE), now_ms) for each in (self.rows, records))
            if found != expected:
                raise self._violation(key, f"is {found!r} after a rollback, and was {expected!r}")
        newest: dict[bytes, bytes] = {}
        for seen in _changes(chronicle, 0, until):
            stamp = find_origins([seen.stored])[0] or encode_stamp(seen.version, chronicle.site_id)
            newest[seen.key.key] = max(stamp, newest.get(seen.key.key, NO_STAMP))
        # Changes older than the present data set may be missing.
        oldest = stamp_version(chronicle.data_set_at(until))
        for site in self.near:
            for seen in _changes(site.chronicle, oldest, stamp_version(self.stamp)):
                is_own = not find_origins([seen.stored])[0]
                if is_own and newest.get(seen.key.key, NO_STAMP) < encode_stamp(seen.version, site.id):
                    raise self._violation(seen.key.key, f"was written at {site.name}, and a rollback lost it")

    def _violation(self, key: bytes, what: str) -> Violation:
        name = Key(NAMESPACES[0], key)
        return Violation("8", self.near[0].name, f"{name} {what}", keys=[name])


def _changes(chronicle: Chronicle, since: Version, until: Version) -> Iterator[SeenChange]:
    """The changes in `(since, until]` of what is published, without what came at swaps."""
    swaps = {swap.version for swap in chronicle.swaps}
    for seen in chronicle.between(since, until):
        if seen.key.namespace == NAMESPACES[0] and seen.version not in swaps:
            yield seen


class _DistantPlace(DistantMember):
    """A site as reached by a publisher."""

    # What was read there for a rollback, and the rows that were loaded.
    reads: list[ChangesRequest]
    rows: dict[bytes, bytes] | None = None

    def __init__(self, network: Carrier, site: SimulatedSite, publisher: Publisher) -> None:
        super().__init__(network, PLACE, site)
        self._publisher = publisher

    def changes(self, request: ChangesRequest) -> Iterator[ChangeBatch]:
        """Read changes, and remember which."""
        self.reads.append(request)
        return super().changes(request)

    def write_stream(self, command: ApplyStream | GenerationStream) -> WriteStream:
        """A stream whose rows are remembered, if they are those of a rollback."""
        stream = super().write_stream(command)
        return stream if self.rows is None else _Noting(stream, self.rows)

    def ask(self, action: Callable[[Host], Result]) -> Result:
        """Have the host of the site do something."""
        return super()._ask(action)

    def _ask(self, action: Callable[[Host], Any]) -> Any:
        self._publisher.meanwhile()
        answer = super()._ask(action)
        if isinstance(answer, GenerationRow):
            self._publisher.note(answer)
        return answer


class _Noting:
    """A stream of writes that remembers rows by user key."""

    def __init__(self, stream: WriteStream, rows: dict[bytes, bytes]) -> None:
        self._stream = stream
        self._rows = rows

    def send(self, rows: Mapping[bytes, bytes]) -> "Future[int]":
        """Send rows."""
        self._rows |= {key[NAMESPACE_BYTES:]: stored for key, stored in rows.items()}
        return self._stream.send(rows)

    def close(self) -> None:
        """End the stream."""
        self._stream.close()


def _present(site: SimulatedSite) -> GenerationRow:
    return site.call_host(lambda host: host.namespaces.find_namespace(NAMESPACES[0]).present)
