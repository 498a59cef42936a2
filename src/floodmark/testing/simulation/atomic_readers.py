"""Atomic readers of several keys, with writes between the reads of two keys: promise 6.

Each result is compared with the chronicle as soon as the chronicle covers it.  A read of writes that a crash
has lost is dropped, because no later reader can confirm it.
"""

from collections.abc import Callable, Iterator
from itertools import groupby
from operator import attrgetter
from random import Random
from typing import Final, NamedTuple

from floodmark.codec.states import live_value
from floodmark.codec.values import IN_BATCH
from floodmark.model.limits import BATCH_CACHE_BYTES_MAX
from floodmark.model.version import Version
from floodmark.partition.node import Node
from floodmark.site import Site
from floodmark.testing.atomicity import SeenVersions, find_fracture, locate
from floodmark.testing.simulation.chronicle import NAMESPACES, POLICIES
from floodmark.testing.simulation.history import Key, Violation, show_version
from floodmark.testing.simulation.sites import Down, SimulatedSite, embedded
from floodmark.testing.simulation.workload import KEYS, choose_batch, choose_write

READS: Final = 3
SECOND_MS: Final = 1_000
_LARGE: Final = bytes(BATCH_CACHE_BYTES_MAX + 1)


class AtomicRead(NamedTuple):
    """The result of an atomic read, which ran from `began_ms` to `ended_ms`, with nothing above `until`."""

    found: dict[Key, bytes | None]
    began_ms: int
    ended_ms: int
    until: Version
    era: tuple[int, int]


def forget_siblings(node: Node) -> None:
    """Push all siblings out of a node's cache, as later batches do."""
    node.committer.place.batches.remember(0, (_LARGE,))


class AtomicReader:
    """Reads a few keys of all namespaces atomically, while the site is written to."""

    def __init__(
        self,
        site: SimulatedSite,
        random: Random,
        numbers: Iterator[int],
        pass_time: Callable[[int], None],
    ) -> None:
        self.site = self._site = site
        self._random = random
        self._numbers = numbers
        self._pass_time = pass_time
        self._pending: list[AtomicRead] = []

    def poll(self) -> None:
        """Check the earlier reads, and read again."""
        self.check()
        for _ in range(READS):
            self._read()
        self.check()

    def _read(self) -> None:
        random, site = self._random, self._site
        # Merged records lead to snapshots, and hide what the second round does.
        namespaces = random.choice((NAMESPACES, NAMESPACES[:1]))
        keys = [Key(random.choice(namespaces), random.choice(KEYS)) for _ in range(random.randint(3, 6))]
        node = site.call_host(lambda host: embedded(host).node)
        # A recovery while it reads may lose what it has seen.
        life, era, began_ms = site.life, site.era, node.clock.physical_ms()
        disk = site.disk
        disk.is_backward = random.random() < 0.5
        disk.meanwhile = lambda: self._let_others_act(life, node)
        try:
            found = site.call(lambda each: _read_keys(each, keys))
        finally:
            disk.meanwhile = None
        site.count("atomic reads")
        ended_ms, until = node.clock.physical_ms(), node.clock.latest
        read = AtomicRead(dict(zip(keys, found, strict=True)), began_ms, ended_ms, until, era)
        self._pending.append(read)

    def _let_others_act(self, life: int, node: Node) -> None:
        random, site = self._random, self._site
        if random.random() < 0.2:
            self._pass_time(random.randint(0, 5))
        if random.random() < 0.6 and site.is_up:
            choose = choose_batch if random.random() < 0.7 else choose_write
            site.write(choose(random, next(self._numbers), site.id, POLICIES))
        if random.random() < 0.2:
            forget_siblings(node)
        if not site.is_up or site.life != life:
            raise Down(f"{site.name} is down")

    def check(self) -> None:
        """Compare the reads with the chronicle, as far as it reaches."""
        if not self._pending:
            return
        self._site.extend_chronicle()
        pending, self._pending = self._pending, []
        for read in pending:
            if read.until > self._site.chronicle.through:
                self._pending.append(read)
            elif read.era == self._site.era:
                self._check_read(read)

    def _check_read(self, read: AtomicRead) -> None:
        chronicle = self._site.chronicle
        changes = chronicle.between(0, read.until)
        seconds = range(read.began_ms - read.began_ms % SECOND_MS, read.ended_ms, SECOND_MS)
        moments = {read.began_ms, *seconds[1:], read.ended_ms}
        seen: dict[Key, SeenVersions] = {}
        for key, value in read.found.items():
            history = [
                (change.version, live_value(change.whole, at_ms))
                for change in changes
                if change.key == key
                for at_ms in moments
            ]
            located = locate(history, value, merged=POLICIES[key.namespace] != "last_write")
            if located is not None:
                seen[key] = located
            elif not chronicle.forgotten:
                finding = f"an atomic read found {value!r} under {key}, which never had it"
                raise Violation("6", self._site.name, finding, keys=[key])
        batched = [change for change in changes if change.stored[-1] & IN_BATCH]
        batches = [
            {change.key: version for change in commit}
            for version, commit in groupby(batched, attrgetter("version"))
        ]
        # A data set is found as a whole, too.
        swaps = [each.version for each in chronicle.swaps if each.version <= read.until]
        batches += [{each.key: swap for each in changes if each.version == swap} for swap in swaps]
        fracture = find_fracture(seen, batches)
        if fracture is not None:
            raise Violation(
                "6",
                self._site.name,
                f"an atomic read saw the batch at {show_version(fracture.version)} in {fracture.shown}, and "
                f"not in {fracture.lacking}: {read.found}",
                keys=(fracture.shown, fracture.lacking),
                version=fracture.version,
            )


def _read_keys(site: Site, keys: list[Key]) -> list[bytes | None]:
    return site.read_atomic([(site.namespace(key.namespace).stored, key.key) for key in keys])
