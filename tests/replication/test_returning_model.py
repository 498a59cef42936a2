"""A small random model of the rule that refuses a backup: sites join, forget, are lost and come back.

Versions are a counter, a link copies a source's log from a position, and collection removes tombstones that
every member has.  The rules are the real ones (`why_too_old`, `find_restored`).  With them all sites end
equal; without a part of them some histories do not; and a rule that takes a missing entry for 0 refuses
backups that lack nothing.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from random import Random
from typing import Any, NamedTuple, TypeAlias

import pytest

from floodmark.links.returning import PeerFacts, find_restored, why_too_old

HISTORIES = 1_000
# A canary ends with the first history that finds its fault.
HISTORIES_MAX = 5_000
ACTIONS = 80
KEYS = "ab"

Stamp: TypeAlias = tuple[int, int]
Rule: TypeAlias = Callable[[Mapping[int, int], set[int], Mapping[str, PeerFacts]], str | None]
FindRestored: TypeAlias = Callable[[Mapping[int, int], Mapping[int, int]], int | None]


class Record(NamedTuple):
    """The newest write of a key."""

    stamp: Stamp
    is_deleted: bool


class Logged(NamedTuple):
    """A row of a site's log: a write of its own, at a version of the log."""

    version: int
    key: str
    record: Record


@dataclass
class ModelSite:
    """One namespace of a site."""

    id: int
    began: int
    life: int = 1
    records: dict[str, Record] = field(default_factory=dict)
    log: list[Logged] = field(default_factory=list)
    watermark: dict[int, int] = field(default_factory=dict)
    horizon: int = 0
    # The log holds all own writes above this; own writes up to `told` are in no log.
    collected: int = 0
    told: int = 0

    def take(self, key: str, record: Record) -> None:
        if key not in self.records or self.records[key].stamp < record.stamp:
            self.records[key] = record

    def start(self, position: int) -> int | None:
        """Where a link from a position begins to read; None if it comes too late."""
        return None if position < self.told else max(position, self.began)

    def facts(self, watermark: Mapping[int, int]) -> PeerFacts:
        start = self.start(watermark.get(self.id, 0))
        return PeerFacts(self.id, self.horizon, self.collected, start)


class Backup(NamedTuple):
    """A site's records, watermark and collected horizon, and the incarnations of all sites."""

    records: dict[str, Record]
    watermark: dict[int, int]
    horizon: int
    lives: dict[int, int]


class ModelWorld:
    """Two sites, and a third that joins."""

    def __init__(self, random: Random, rule: Rule, find_restored: FindRestored) -> None:
        self._random = random
        self._rule = rule
        self._find_restored = find_restored
        self._now = 1
        self.sites = {number: ModelSite(number, began=1) for number in (1, 2)}
        self._backups: list[Backup] = []
        self.refused = 0
        self.restored = 0

    def run(self) -> None:
        actions = [self.write, self.write, *[self.link] * 8, *[self.collect] * 3, self.back_up]
        for _ in range(ACTIONS):
            self._now += 1
            self._random.choice([*actions, *([self.lose] if self._random.random() < 0.5 else [self.join])])()
        for _ in range(4):
            self._now += 1
            for source in self.sites.values():
                for target in self.sites.values():
                    self.copy(source, target)

    def _any(self) -> ModelSite:
        return self._random.choice([*self.sites.values()])

    def write(self) -> None:
        site, key = self._any(), self._random.choice(KEYS)
        record = Record((self._now, site.id), is_deleted=self._random.random() < 0.4)
        site.log.append(Logged(self._now, key, record))
        site.take(key, record)

    def link(self) -> None:
        self.copy(self._any(), self._any())

    def copy(self, source: ModelSite, target: ModelSite) -> None:
        start = source.start(target.watermark.get(source.id, 0))
        if source is target or start is None or start < source.collected:
            return
        for row in source.log:
            if row.version > start:
                target.take(row.key, row.record)
        target.watermark[source.id] = self._now

    def collect(self) -> None:
        """Remove tombstones that all members have, and at times what no link needs of the log."""
        site = self._any()
        restored = [each for each in self.sites.values() if each.life > 1 and each is not site]
        if any(site.watermark.get(each.id, 0) <= each.began for each in restored):
            # Its heartbeats count after the writes that it logs again have arrived.
            return
        settled = min(
            self._now if holder is source else holder.watermark.get(source.id, 0)
            for holder in self.sites.values()
            for source in self.sites.values()
        )
        for key, record in [*site.records.items()]:
            if record.is_deleted and record.stamp[0] <= settled:
                del site.records[key]
                site.horizon = max(site.horizon, record.stamp[0])
        if self._random.random() < 0.8:
            return
        read = [each.watermark.get(site.id, 0) for each in self.sites.values() if each is not site]
        site.collected = max(site.collected, min(read, default=0))
        site.log = [row for row in site.log if row.version > site.collected]

    def back_up(self) -> None:
        site = self._any()
        watermark = {**site.watermark, site.id: self._now}
        lives = {number: each.life for number, each in self.sites.items()}
        self._backups.append(Backup({**site.records}, watermark, site.horizon, lives))

    def join(self) -> None:
        """A third site begins with a copy of another, taken now."""
        if 3 in self.sites:
            return
        other = self._any()
        self.sites[3] = ModelSite(
            3,
            began=self._now,
            collected=self._now,
            records={**other.records},
            watermark={**other.watermark, other.id: self._now},
            horizon=other.horizon,
        )

    def lose(self) -> None:
        """A site comes back from a backup, of its own or of another site."""
        if not self._backups:
            return
        backup, lost = self._random.choice(self._backups), self._any()
        present = {number: site.life for number, site in self.sites.items()}
        if self._find_restored(backup.lives, present) is not None:
            return
        peers = {number: site for number, site in self.sites.items() if number != lost.id}
        facts = {str(number): site.facts(backup.watermark) for number, site in peers.items()}
        if self._rule(backup.watermark, set(self.sites), facts) is not None:
            self.refused += 1
            return
        self.restored += 1
        known = min(site.watermark.get(lost.id, 0) for site in peers.values())
        back = ModelSite(lost.id, began=self._now, life=lost.life + 1, told=known, horizon=backup.horizon)
        back.collected = self._now
        back.watermark = {site: at for site, at in backup.watermark.items() if site != lost.id}
        self._now += 1
        written = backup.watermark.get(lost.id, 0)
        parts = [(backup.records, known), *((site.records, written) for site in peers.values())]
        for records, above in parts:
            for key, record in records.items():
                if record.stamp[1] == lost.id and record.stamp[0] > above:
                    back.log.append(Logged(self._now, key, record))
                    back.take(key, record)
        for key, record in backup.records.items():
            back.take(key, record)
        self.sites[lost.id] = back

    def is_equal(self) -> bool:
        live = [
            {key: record for key, record in site.records.items() if not record.is_deleted}
            for site in self.sites.values()
        ]
        return all(each == live[0] for each in live)


def run_history(seed: int, rule: Rule, find_restored: FindRestored = find_restored) -> ModelWorld:
    world = ModelWorld(Random(seed), rule, find_restored)
    world.run()
    return world


def test_sites_end_equal_whatever_they_were_restored_from() -> None:
    worlds = [run_history(seed, why_too_old) for seed in range(HISTORIES)]
    assert [seed for seed, world in enumerate(worlds) if not world.is_equal()] == []
    assert sum(world.restored for world in worlds) > HISTORIES / 2


def believing(**believed: Callable[[PeerFacts], Any]) -> Rule:
    """The rule, with other facts about the peers."""

    def rule(watermark: Mapping[int, int], sources: set[int], peers: Mapping[str, PeerFacts]) -> str | None:
        others = {
            name: peer._replace(**{fact: believe(peer) for fact, believe in believed.items()})
            for name, peer in peers.items()
        }
        return why_too_old(watermark, sources, others)

    return rule


@pytest.mark.parametrize(
    "rule",
    [
        pytest.param(believing(collected_horizon=lambda _: 0), id="collected deletions do not matter"),
        pytest.param(believing(oldest_version=lambda _: 0, start=lambda _: 0), id="nor collected changes"),
    ],
)
def test_each_part_of_the_rule_is_needed(rule: Rule) -> None:
    assert not all(run_history(seed, rule).is_equal() for seed in range(HISTORIES_MAX))


def test_backup_from_before_a_site_was_restored_must_be_refused() -> None:
    def forget(_: Mapping[int, int], __: Mapping[int, int]) -> None:
        return None

    assert not all(run_history(seed, why_too_old, forget).is_equal() for seed in range(HISTORIES_MAX))


def test_missing_entry_that_counts_as_nothing_refuses_backups_that_lack_nothing() -> None:
    def rule(watermark: Mapping[int, int], sources: set[int], peers: Mapping[str, PeerFacts]) -> str | None:
        older = {name: peer._replace(start=watermark.get(peer.site, 0)) for name, peer in peers.items()}
        return why_too_old(watermark, sources, older)

    refused = [sum(run_history(seed, each).refused for seed in range(100)) for each in (rule, why_too_old)]
    assert refused[0] > refused[1]
