"""Storage fails at every position, in every way, while a reader follows.

The follower never sees a write that did not happen, never misses one that did, and never sees one before
it is on disk.  An error may end its stream; it then resumes at its last marker.
"""

from collections.abc import Callable
from datetime import timedelta
from typing import NamedTuple

import pytest
from tests.feed.support import LARGE, Follower, impatient_followers, open_on
from tests.site.support import START_MS, node_of
from tests.sizes import only

from floodmark.codec.ordered import encode_namespace, encode_prefix, encode_version
from floodmark.codec.values import encode_value
from floodmark.model.change import Change, Stamp
from floodmark.model.errors import FloodmarkError, OutcomeUnknown
from floodmark.model.version import Version
from floodmark.partition import FAMILIES
from floodmark.site import Namespace, Site
from floodmark.testing import (
    READS,
    UNKNOWN_FAULTS,
    WRITES,
    Fault,
    FaultPlan,
    FaultyEngine,
    Operation,
    SimulatedCrash,
    SimulatedTime,
)

Work = Callable[[Site, Namespace], object]


class Outcome(NamedTuple):
    """What a writer was told: its values are in, out, or it may be either."""

    values: set[bytes]
    happened: bool | None


def apply_foreign(site: Site, users: Namespace) -> object:
    """Write what came from another site."""
    key = encode_namespace(users.id) + b"foreign"
    stored = encode_value(b"9", origin=Stamp(site.now(), 3))
    return node_of(site).map.route(key).apply([key], [stored], durable=True)


def merge_first(site: Site) -> object:
    """Join the first two partitions, if there are two."""
    partitions = site.partitions()
    return site.merge(partitions[0].id, partitions[1].id) if len(partitions) > 1 else None


# Each piece of work, and the values that it writes.
WORK: list[tuple[Work, set[bytes]]] = [
    (lambda _, users: users.put(b"a", b"1"), {b"1"}),
    (lambda _, users: users.put(b"b", b"2", durability="async"), {b"2"}),
    (lambda _, users: users.put(b"z", b"3", durability="async"), {b"3"}),
    (lambda _, users: users.put_many({b"c": b"4", b"d": b"4-more"}), {b"4", b"4-more"}),
    (lambda site, _: site.split("users", b"m"), set()),
    (lambda _, users: users.put_many({b"x": b"5", b"y": LARGE}, durability="async"), {b"5", LARGE}),
    (lambda site, _: site.heartbeat(), set()),
    (lambda _, users: users.put(b"f", b"6", durability="async"), {b"6"}),
    (apply_foreign, {b"9"}),
    (lambda site, _: merge_first(site), set()),
    (lambda _, users: users.put(b"g", b"7", ttl=timedelta(days=1)), {b"7"}),
    (lambda site, _: site.sync(), set()),
    (lambda _, users: users.put(b"h", b"8"), {b"8"}),
]
DURABLE = [b"1", b"7", b"8", b"9"]


class Observer:
    """A follower that outlives errors, and checks each change against the disk when it comes."""

    def __init__(self, engine: FaultyEngine, site: Site) -> None:
        self._engine = engine
        self._site = site
        self.follower = Follower(site, "users")
        self._checked = 0
        self._broken = False

    def look(self) -> None:
        """Take what there is.  An error ends the stream, and the next look resumes."""
        try:
            if self._broken:
                self.follower.resume()
            self.follower.catch_up()
            self._broken = False
        except FloodmarkError:
            self._broken = True
        self.check_durable()

    def check_durable(self) -> None:
        changes = self.follower.changes
        if len(changes) == self._checked:
            return
        disk = self._engine.crash(keep=0)
        prefix = encode_namespace(self._site.namespace("users").id)
        for change in changes[self._checked :]:
            engine_key = encode_prefix(prefix + change.key) + encode_version(change.version)
            assert disk.get("data", engine_key) is not None, f"{change} was seen before it was on disk"
        self._checked = len(changes)


def run(site: Site, observer: Observer, pace: int = 1) -> list[Outcome]:
    """Do all the work with an observer that looks now and then; what the writers were told."""
    users = site.namespace("users")
    outcomes = []
    for number, (work, values) in enumerate(WORK):
        try:
            work(site, users)
            outcomes.append(Outcome(values, True))
        except OutcomeUnknown:
            outcomes.append(Outcome(values, None))
        except FloodmarkError:
            outcomes.append(Outcome(values, False))
        if number % pace == 0:
            observer.look()
    return outcomes


def values_of(changes: list[Change]) -> list[bytes]:
    return [change.value or b"" for change in changes]


def check(outcomes: list[Outcome], seen: list[Change], lost: bool) -> None:
    """Nothing that was refused is there, and everything that was promised is."""
    values = set(values_of(seen))
    for outcome in outcomes:
        if outcome.happened is False:
            assert not outcome.values & values, "a write that did not happen was seen"
        elif outcome.happened and (not lost or outcome.values & set(DURABLE)):
            assert outcome.values <= values, "a write that happened was missed"
        assert outcome.values & values in (set(), outcome.values), "half of a commit was seen"


CASES = [
    *((kind, WRITES, 0) for kind in (Fault.TRANSIENT, Fault.PERSISTENT)),
    *((kind, WRITES, failures) for kind in sorted(UNKNOWN_FAULTS) for failures in (0, 2)),
    *((kind, READS, 0) for kind in (Fault.TRANSIENT, Fault.PERSISTENT)),
]


@pytest.mark.parametrize("pace", only([1], [1, 3]), ids=["always there", "now and then"])
@pytest.mark.parametrize(
    ("kind", "counts", "failures"),
    CASES,
    ids=[f"{kind} {min(counts)}, {failures} failed recoveries" for kind, counts, failures in CASES],
)
def test_follower_agrees_with_the_log_whatever_fails(
    kind: Fault, counts: frozenset[Operation], failures: int, pace: int
) -> None:
    positions = 0
    fired = True
    while fired:
        positions += 1
        plan = FaultPlan(at=positions, kind=kind, counts=counts, recover_failures=failures)
        engine = FaultyEngine(FAMILIES)
        with impatient_followers(), open_on(engine, SimulatedTime(START_MS)) as site:
            users = site.create_namespace("users")
            users.put(b"a", b"first")
            if counts == READS:
                # As at a node of several: the follower reads the log and not the tail.
                node_of(site).committer.tail.share()
            observer = Observer(engine, site)
            observer.look()
            engine.arm(plan)
            outcomes = run(site, observer, pace)
            fired = engine.fired
            engine.heal()
            observer.look()
            users.put(b"end", b"end")
            observer.look()
            observer.look()
            expected = list(site.changes("users"))
            assert observer.follower.changes == expected, f"at {plan}"
            check(outcomes, expected, lost=kind is Fault.UNKNOWN_LOST)
            observer.follower.close()
    assert positions > 20


def test_follower_resumes_over_a_crash_at_every_position() -> None:
    """What it has is in the survivor's log, whichever writes the power cut took, and the rest follows."""
    for at in range(1, 10_000):
        engine, time = FaultyEngine(FAMILIES), SimulatedTime(START_MS)
        with impatient_followers():
            site = open_on(engine, time)
            users = site.create_namespace("users")
            users.put(b"a", b"first")
            observer = Observer(engine, site)
            observer.look()
            engine.arm(FaultPlan(at=at, kind=Fault.CRASH))
            try:
                run(site, observer)
                site.close()
                break
            except SimulatedCrash:
                pass
            for keep in {0, engine.unsynced // 2, engine.unsynced}:
                check_survivor(engine.crash(keep), time, observer.follower)
    assert at > 20


def check_survivor(engine: FaultyEngine, time: SimulatedTime, follower: Follower) -> None:
    with open_on(engine, time) as survivor:
        last: Version = survivor.namespace("users").put(b"end", b"end")
        resumed = list(survivor.changes("users", since=follower.checkpoint))
        assert follower.changes + resumed == list(survivor.changes("users"))
        assert resumed[-1].version == last
