"""A power cut after any step of a random history: what is lost is a suffix, and never what was promised.

Unlike a killed process, a machine that stops takes along what was written but not synced.  The engine
in memory knows all states that this can leave behind, and each of them is opened and checked.
"""

from random import Random

import pytest
from tests.site.support import START_MS, HookedEngine, open_memory, state_after, stored_versions
from tests.sizes import only

from floodmark.model.change import Change
from floodmark.model.version import Version
from floodmark.site import Namespace, Site
from floodmark.testing.clock import SimulatedTime

Fact = tuple[Version, bytes, bytes | None]
KEYS = [b"key-%d" % index for index in range(10)]


class Ledger:
    """What was acknowledged, in commit order, how much of it is on disk, and what was announced."""

    def __init__(self, site: Site) -> None:
        self.site = site
        self.facts: list[Fact] = []
        self.durable = 0
        self.resolved: Version = 0

    def enter(self, facts: list[Fact], *, durable: bool) -> None:
        self.facts += sorted(facts)
        if durable:
            self.durable = len(self.facts)
        self.resolved = max(self.resolved, self.site.resolved_version())

    def check(self, survivor: Site) -> None:
        """Compare what a power cut has left."""
        changes = sorted(fact(change) for change in survivor.changes("users"))
        assert changes == self.facts[: len(changes)], "not a prefix of what was written"
        assert len(changes) >= self.durable, "a durable write is gone"
        announced = [known for known in self.facts if known[0] <= self.resolved]
        assert changes[: len(announced)] == announced, "a published change is gone"
        users = survivor.namespace("users")
        assert {(key, version) for version, key, _ in changes} == stored_versions(survivor, "users")
        assert state_after(survivor.changes("users")) == dict(users.scan())
        version = users.put(b"after", b"1")
        assert all(version > known[0] for known in self.facts), "a version was given twice"
        assert survivor.resolved_version() > self.resolved


def fact(change: Change) -> Fact:
    return change.version, change.key, change.value


def do_something(site: Site, users: Namespace, ledger: Ledger, chance: Random, step: int) -> None:
    key, value = chance.choice(KEYS), b"%d" % step
    durable = chance.random() < 0.3
    durability = "fsync" if durable else "async"
    kind = chance.choice(["put", "put", "delete", "many", "range", "split", "merge", "heartbeat", "sync"])
    partitions = site.partitions()
    facts: list[Fact] = []
    if kind == "put":
        facts = [(users.put(key, value, durability=durability), key, value)]  # type: ignore[arg-type]
    elif kind == "delete":
        facts = [(users.delete(key, durability=durability), key, None)]  # type: ignore[arg-type]
    elif kind == "many":
        keys = chance.sample(KEYS, 4)
        users.put_many(dict.fromkeys(keys, value), durability=durability)  # type: ignore[arg-type]
        records = [users.record(key) for key in keys]
        facts = [(record.version, record.key, value) for record in records if record]
    elif kind == "range":
        before = site.now()
        users.delete_range(key)
        facts = [fact(change) for change in site.changes("users", since=before)]
        durable = True
    elif kind == "split" and b"\0\0\1" + key not in [part.range.start for part in partitions]:
        site.split("users", key)
        durable = True
    elif kind == "merge" and len(partitions) > 1:
        site.merge(partitions[0].id, partitions[1].id)
        durable = True
    elif kind == "heartbeat":
        site.heartbeat()
        durable = True
    elif kind == "sync":
        site.sync()
        durable = True
    else:
        durable = False
    ledger.enter(facts, durable=durable)


@pytest.mark.parametrize("seed", only(range(5), range(12)))
def test_power_cut_takes_a_suffix_of_what_was_not_promised(seed: int) -> None:
    chance = Random(seed)
    engine, time = HookedEngine(), SimulatedTime(START_MS)
    with open_memory(engine, time) as site:
        users = site.create_namespace("users")
        ledger = Ledger(site)
        for step in range(40):
            do_something(site, users, ledger, chance, step)
            time.advance(chance.choice([0, 1, 200, -1000]))
            for kept in range(engine.unsynced + 1):
                with open_memory(engine.crashed(kept), SimulatedTime(time())) as survivor:
                    ledger.check(survivor)


def test_ledger_finds_a_write_that_was_promised_and_lost() -> None:
    """The canary: an engine whose sync does nothing."""

    class ForgetfulEngine(HookedEngine):
        def sync(self) -> None:
            if not self.forgetful:
                super().sync()

        forgetful = False

    engine, time = ForgetfulEngine(), SimulatedTime(START_MS)
    with open_memory(engine, time) as site:
        users = site.create_namespace("users")
        ledger = Ledger(site)
        engine.forgetful = True
        ledger.enter([(users.put(b"key", b"1"), b"key", b"1")], durable=True)
        with (
            open_memory(engine.crashed(), SimulatedTime(time())) as survivor,
            pytest.raises(AssertionError, match="a durable write is gone"),
        ):
            ledger.check(survivor)
