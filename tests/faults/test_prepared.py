"""Fail the Nth operation of the engine under every step of a prepared write, for every N.

Whatever fails, and whatever a power cut keeps: a step has happened or it has not, the caller's answer is
true, nothing appears at or below what was resolved, and taking the step again completes it.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from itertools import chain, count
from typing import NamedTuple

import pytest
from tests.sizes import only

from floodmark.codec.changelog import CommitRow, decode_row
from floodmark.codec.ordered import encode_namespace
from floodmark.codec.states import decode_state, encode_state
from floodmark.codec.values import encode_value
from floodmark.engine import Guard, WriteRow
from floodmark.host.embedded import EmbeddedHost
from floodmark.merge.counter import add_to_counter
from floodmark.merge.fields import update_fields
from floodmark.merge.policies import MergePolicy
from floodmark.merge.states import stamp_state
from floodmark.model.batch import mint_batch
from floodmark.model.change import Stamp
from floodmark.model.errors import FloodmarkError, OutcomeUnknown
from floodmark.model.partition import Decision, Fate
from floodmark.model.ranges import KeyRange
from floodmark.model.version import VERSION_MAX, Version
from floodmark.partition import FAMILIES, LocalPartition, Node, version_of
from floodmark.partition.commit.commit import Mint, arrange
from floodmark.partition.commit.tail import LiveTail
from floodmark.partition.committer import commit_together
from floodmark.partition.prepared.outcomes import read_outcomes
from floodmark.partition.prepared.steps import AbortPrepared, CommitPrepared, Prepare
from floodmark.partition.prepared.writes import PREPARED, PreparedWrites
from floodmark.site import Site, open_engine
from floodmark.testing import Fault, FaultPlan, FaultyEngine, SimulatedCrash, SimulatedTime
from floodmark.testing.clock import START_MS
from floodmark.testing.engine import READS, UNKNOWN_FAULTS

PLAIN, FIELDS, COUNTERS = (encode_namespace(number) for number in (1, 2, 3))
WRITTEN = {
    PLAIN + b"key": encode_value(b"prepared"),
    FIELDS + b"key": update_fields(b'{"x": 1}'),
    COUNTERS + b"key": add_to_counter(5),
}
T = "transaction"
BATCH = mint_batch(START_MS)

Log = dict[tuple[Version, bytes], bytes]


class Content(NamedTuple):
    """What is in an engine: records and changes, and what is prepared, whose version is not looked at."""

    data: tuple[tuple[bytes, bytes], ...]
    log: tuple[tuple[tuple[Version, bytes], bytes], ...]
    prepared: tuple[tuple[bytes, bytes], ...]
    batches: tuple[tuple[bytes, Decision], ...]


class World:
    """A node with a follower, a copy and other newer writes above a prepared one."""

    def __init__(self, engine: FaultyEngine, time: SimulatedTime) -> None:
        self.engine = engine
        self.time = time
        self.site: Site = open_engine(engine, site="oslo", site_id=7, time_source=time)
        if not self.site.namespaces():
            kinds: dict[str, MergePolicy] = {"plain": "last_write", "fields": "fields", "counters": "counter"}
            for name, merge in kinds.items():
                self.site.create_namespace(name, merge=merge)
        assert isinstance(self.site.host, EmbeddedHost)
        self.node: Node = self.site.host.node
        self.node.committer.prepared.settler = lambda _: Fate(Decision.UNDECIDED)
        self.version: Version = 0
        self.stamp = Stamp(1, 3)
        self.announced: Version = 0
        self.seen: Log = {}
        self.stack = ExitStack()
        self.stack.enter_context(self.node.committer.tail.following(lambda: self.node.clock.latest))

    @property
    def partition(self) -> LocalPartition:
        return self.node.map.partitions[0]

    def write_history(self) -> None:
        self.partition.put([PLAIN + b"key"], [encode_value(b"old")], durable=True)
        self.partition.merge([COUNTERS + b"key"], [add_to_counter(1)], durable=True)
        self.stamp = Stamp(self.node.committer.now(), 3)

    def write_newer(self) -> None:
        """Copies of what was written elsewhere before the prepare, and adds to the counter."""
        stamp = self.stamp
        copies = {key: encode_value(b"copy", origin=stamp) for key in (PLAIN + b"key", PLAIN + b"other")}
        self.partition.apply(list(copies), list(copies.values()), durable=True)
        fields = stamp_state(update_fields(b'{"x": 2}'), None, stamp.version, stamp.site)
        copy = encode_state(decode_state(fields), stamp)
        self.partition.apply([FIELDS + b"key"], [copy], durable=True)
        for _ in range(2):
            self.partition.merge([COUNTERS + b"key"], [add_to_counter(10)], durable=False)

    def content(self) -> Content:
        families = self.engine.contents()
        return Content(
            tuple(families["data"]),
            tuple(sorted(self.read_log(0, VERSION_MAX))),
            tuple((key, value[8:]) for key, value in families["meta"] if key.startswith(PREPARED)),
            tuple((key, outcome.decision) for _, key, outcome in read_outcomes(self.engine, START_MS + 1)),
        )

    def read_log(self, since: Version, until: Version) -> Iterator[tuple[tuple[Version, bytes], bytes]]:
        for line in chain.from_iterable(self.node.read_log(since, until, KeyRange())):
            row = decode_row(version_of(line), line[1])
            assert isinstance(row, CommitRow)
            for key, value in zip(row.keys, row.values, strict=True):
                assert value is not None
                yield (version_of(line), key), value

    def follow(self) -> None:
        """Take in what is resolved, from the tail if it has it."""
        resolved = self.node.resolved_version()
        assert all(resolved < write.version for write in self.node.committer.prepared.all())
        entries = self.node.committer.tail.between(self.announced, resolved)
        logged = dict(self.read_log(self.announced, resolved))
        if entries is not None:
            tailed = {
                (entry.version, key): value
                for entry in entries
                for key, value in zip(entry.keys, entry.values, strict=True)
            }
            assert tailed == logged
        self.seen |= logged
        self.announced = resolved

    def check_told(self, seen: Log, announced: Version) -> None:
        """Nothing that was told has changed."""
        assert dict(self.read_log(0, announced)) == seen
        assert self.node.resolved_version() >= announced


class Act(NamedTuple):
    """A step, and the transaction or batch that has prepared before."""

    run: Callable[[World], object]
    prepared: str | None


def prepare(world: World, transaction: str = T) -> object:
    siblings = [min(WRITTEN)] if transaction == BATCH else []
    world.version = world.partition.prepare(transaction, list(WRITTEN), list(WRITTEN.values()), siblings)
    return world.version


def commit_and_prepare(world: World) -> None:
    """A writer's prepare comes again in the round that commits its batch."""
    place, partition, first = world.node.committer.place, world.partition, [min(WRITTEN)]
    committed = world.version + 2
    commit = CommitPrepared(place, partition, BATCH, committed)
    writes = arrange(list(WRITTEN), list(WRITTEN.values()))
    again = Prepare(place, partition, BATCH, writes, first, ())
    commit_together(world.node.committer, [commit, again])
    if commit.error is not None:
        assert again.error or again.version == world.version, "a batch is told to be committed, and is not"
        raise commit.error
    assert again.error or again.version == committed


def refuse(world: World) -> None:
    assert world.partition.ask_prepared(BATCH, min(WRITTEN)) == Fate(Decision.ABORT)


ACTS = {
    "prepare": Act(prepare, None),
    "commit": Act(lambda world: world.partition.commit_prepared(T, world.version), T),
    "commit later": Act(lambda world: world.partition.commit_prepared(T, world.version + 2), T),
    "abort": Act(lambda world: world.partition.abort_prepared(T), T),
    "prepare batch": Act(lambda world: prepare(world, BATCH), None),
    "commit batch": Act(lambda world: world.partition.commit_prepared(BATCH, world.version), BATCH),
    "abort batch": Act(lambda world: world.partition.abort_prepared(BATCH), BATCH),
    "commit and prepare batch": Act(commit_and_prepare, BATCH),
    "refuse batch": Act(refuse, None),
}


def make_world(act: Act) -> World:
    world = World(FaultyEngine(FAMILIES), SimulatedTime())
    world.write_history()
    if act.prepared is not None:
        prepare(world, act.prepared)
        # The version that "commit later" commits at.
        world.node.committer.now()
        world.node.committer.now()
    world.write_newer()
    world.follow()
    return world


def reopened(world: World, keep: int | None) -> World:
    image = World(world.engine.crash(keep), world.time)
    image.version = world.version
    return image


def complete(world: World, act: Act) -> Content:
    """Take the step again; once more changes nothing."""
    act.run(world)
    done = world.content()
    act.run(world)
    assert world.content() == done
    return done


def attempt(world: World, act: Act) -> str:
    try:
        act.run(world)
    except OutcomeUnknown:
        return "unknown"
    except FloodmarkError:
        return "refused"
    except SimulatedCrash:
        return "crashed"
    return "done"


def visit(name: str, plan: FaultPlan) -> bool:
    """Run a step under a plan and look at everything; whether the fault came to pass."""
    act = ACTS[name]
    world = make_world(act)
    unsynced = {reopened(world, keep).content() for keep in range(world.engine.unsynced + 1)}
    before = world.content()
    seen, announced = dict(world.seen), world.announced
    after = complete(reopened(make_world(act), None), act)
    world.engine.arm(plan)
    outcome = attempt(world, act)
    fired = world.engine.fired
    images = [reopened(world, keep) for keep in range(world.engine.unsynced + 1)]
    for image in images:
        image.check_told(seen, announced)
        content = image.content()
        allowed = {"done": {after}, "refused": unsynced}.get(outcome, {*unsynced, after})
        assert content in allowed, outcome
    world.engine.heal()
    if outcome != "crashed":
        assert outcome != "refused" or plan.kind is Fault.UNKNOWN_LOST or world.content() == before
        for _ in range(2):
            # The first call after a failed recovery may still be refused.
            attempt(world, act)
        world.follow()
        assert complete(world, act) == after or plan.kind is Fault.UNKNOWN_LOST
        world.follow()
        world.check_told(world.seen, world.announced)
        world.check_told({**seen, **world.seen}, world.announced)
        world.node.heartbeat()
    world.stack.close()
    return fired


WRITE_PLANS = {
    **{f"{kind} write": FaultPlan(at=1, kind=kind) for kind in Fault},
    **{
        f"{kind}, recovery fails once": FaultPlan(at=1, kind=kind, recover_failures=1)
        for kind in sorted(UNKNOWN_FAULTS)
    },
}
READ_PLANS = {
    f"{kind} read": FaultPlan(at=1, kind=kind, counts=READS) for kind in (Fault.TRANSIENT, Fault.CRASH)
}


def visit_all(name: str, plan: FaultPlan) -> None:
    """Fail at the first place, the second, and so on, until there is none left."""
    for at in count(1):
        if not visit(name, replace(plan, at=at)):
            assert at > 1, "nothing could fail"
            return


@pytest.mark.parametrize("plan", only(("crash write", "unknown, applied write"), WRITE_PLANS))
@pytest.mark.parametrize("name", ACTS)
def test_step_happens_or_not_whatever_write_fails(name: str, plan: str) -> None:
    visit_all(name, WRITE_PLANS[plan])


@pytest.mark.parametrize("plan", only(("transient read",), READ_PLANS))
@pytest.mark.parametrize("name", [name for name in ACTS if not name.startswith("abort")])
def test_step_happens_or_not_whatever_read_fails(name: str, plan: str) -> None:
    """What aborts reads nothing."""
    visit_all(name, READ_PLANS[plan])


# Canaries


def visit_plans(name: str) -> None:
    for plan in (*WRITE_PLANS.values(), *(() if name.startswith("abort") else READ_PLANS.values())):
        visit_all(name, plan)


def write_in_two(engine: FaultyEngine, rows: Iterable[WriteRow], guards: Sequence[Guard] = ()) -> bool:
    batch = list(rows)
    for part in (batch[:1], batch[1:]):
        if part:
            WRITE(engine, part, guards)
            guards = ()
    return True


def take_unsynced(step: AbortPrepared, mint: Mint) -> Sequence[WriteRow]:
    step.durable = False
    return TAKE(step, mint)


WRITE = FaultyEngine.write
TAKE = AbortPrepared.take


@pytest.mark.parametrize(
    ("name", "place", "attribute", "planted"),
    [
        ("commit", FaultyEngine, "write", write_in_two),
        ("commit", PreparedWrites, "load", lambda _: None),
        ("prepare", PreparedWrites, "load", lambda _: None),
        ("commit batch", FaultyEngine, "write", write_in_two),
        ("abort batch", FaultyEngine, "write", write_in_two),
        ("refuse batch", AbortPrepared, "take", take_unsynced),
        ("commit", LiveTail, "insert", lambda *_: None),
    ],
    ids=[
        *("split write", "not loaded after commit", "not loaded after prepare", "split commit of a batch"),
        *("split abort of a batch", "refused without a sync", "not in the tail"),
    ],
)
def test_what_is_planted_is_found(
    monkeypatch: pytest.MonkeyPatch, name: str, place: type, attribute: str, planted: object
) -> None:
    monkeypatch.setattr(place, attribute, planted)
    with pytest.raises((AssertionError, FloodmarkError)):
        visit_plans(name)
