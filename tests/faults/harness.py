"""Fail the Nth operation of the engine, for every N, and see whether the promises hold.

`visit` runs an operation again and again on the same history; each time the engine fails one step
later, until it gets through.  Each time, and for each number of unsynced writes that a power cut could
have kept, the site is opened again and looked at.  The checkers, by the name that they give:

outcome    the caller got success or one of our errors, and nothing else
state      refused: nothing happened; unknown: all or nothing; success: all of it
settled    once a site that failed has answered, the answer stays, also after reopening
usable     when storage works, so does the site
whole      data and change log agree; no commit is split
durable    acknowledged writes are there (promise 1)
suffix     what a power cut takes is the end, never the middle (promise 1)
versions   none is given out twice, also if the clock was set back (promise 2)
resolved   nothing appears at or below a resolved version (promise 3)
accounts   heartbeats count what is there
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from enum import Enum, auto
from functools import cache, partial
from itertools import count
from typing import Final, NamedTuple, TypeAlias

from tests.faults.observation import (
    PROBE_KEY,
    PROBE_NAME,
    Layout,
    Observation,
    SeenCommit,
    Violation,
    Written,
    observe,
    reopen,
)
from tests.faults.operations import OPERATIONS, TAIL, Operation, write_history, write_tail

from floodmark.model import Version
from floodmark.model.errors import FloodmarkError, OutcomeUnknown
from floodmark.model.version import VERSION_MAX
from floodmark.partition import FAMILIES
from floodmark.site import Site, open_engine
from floodmark.testing import Fault, FaultPlan, FaultyEngine, SimulatedCrash, SimulatedTime

POSITIONS_MAX: Final = 200
BOUND_PASSED_MS: Final = 1_000

MakeEngine: TypeAlias = Callable[[], FaultyEngine]


class Outcome(Enum):
    """What the caller knows afterwards."""

    SUCCESS = auto()
    REFUSED = auto()
    UNKNOWN = auto()
    CRASHED = auto()


class Acknowledged(NamedTuple):
    """A write that returned."""

    namespace: str
    key: bytes
    value: bytes | None
    version: Version


class Promise(NamedTuple):
    """A resolved version, and all that was there at or below it when the site named it."""

    resolved: Version
    seen: Observation


def healthy_engine() -> FaultyEngine:
    """An engine that fails only as planned."""
    return FaultyEngine(FAMILIES)


# What was looked at is looked at once: most images of a run are those of the run before.
_looked_at: dict[tuple[type[FaultyEngine], int, int], Observation] = {}


def look(engine: FaultyEngine, now_ms: int, keep: int | None = None) -> Observation:
    """Open what a crash leaves, and take down what is there."""
    key = type(engine), engine.fingerprint(keep), now_ms
    if key not in _looked_at:
        try:
            _looked_at[key] = reopen(engine.crash(keep), now_ms)
        except FloodmarkError as error:
            raise Violation("usable", f"the site cannot be opened after a crash: {error!r}") from error
    return _looked_at[key]


@dataclass(kw_only=True)
class World:
    """A site with its history, and what it has said so far."""

    engine: FaultyEngine
    site: Site
    time: SimulatedTime
    acknowledged: list[Acknowledged] = field(default_factory=list)
    promises: list[Promise] = field(default_factory=list)
    highest: Version = 0

    def images(self) -> list[Observation]:
        """What is there after a power cut at this moment, for each number of writes that it keeps."""
        return [look(self.engine, self.time(), keep) for keep in range(self.engine.unsynced + 1)]

    def promise(self) -> None:
        """Ask for the resolved version, unless storage fails and it cannot be had."""
        try:
            resolved = self.site.resolved_version()
        except FloodmarkError:
            return
        self.highest = max(self.highest, resolved)
        images = self.images()
        if missing := _through(images[-1], resolved, images[0]) - _through(images[0], resolved, images[-1]):
            raise Violation("resolved", f"{resolved} covers {missing}, which a power cut can still take")
        for image in images:
            self.check_version(image)
        self.promises.append(Promise(resolved, images[-1]))

    def check_said(self, seen: Observation) -> None:
        """What a site shows must agree with all that it has said."""
        for resolved, then in self.promises:
            if late := _through(seen, resolved, then) - _through(then, resolved, seen):
                raise Violation("resolved", f"{late} appeared at or below {resolved}")
        for write in self.acknowledged:
            commit = next((commit for commit in seen.commits if commit.version == write.version), None)
            if write.version > seen.trimmed and (commit is None or Written(*write[:3]) not in commit.changes):
                raise Violation("durable", f"{write} was acknowledged and is not there")
        self.check_version(seen)

    def check_version(self, seen: Observation) -> None:
        """The next version must lie above all that the site has given out."""
        if seen.next_version <= self.highest:
            raise Violation("versions", f"{seen.next_version} comes after {self.highest} was given out")

    def check_images(self, check: Callable[[Observation], None]) -> None:
        """Check what every possible power cut at this moment leaves."""
        images = self.images()
        for image in images:
            self.check_said(image)
            commits = _above(image, images[-1].trimmed)
            if commits != _above(images[-1], image.trimmed)[: len(commits)]:
                raise Violation("suffix", f"of all that was written, {difference(image, images[-1])}")
            last = images[-1].commits[-1].version if images[-1].commits else 0
            if image.next_version <= last:
                raise Violation("versions", f"{image.next_version} comes after {last} was written")
            check(image)


def make_world(
    operation: Operation, make_engine: MakeEngine, *, bound_is_due: bool, tail: int = TAIL
) -> World:
    """The site that every run starts from, with so many unsynced writes; equal calls give equal sites.

    With `bound_is_due`, the next version first needs a new upper bound of the clock on stable storage,
    and there are more steps to fail at.
    """
    engine, time = make_engine(), SimulatedTime()
    site = open_engine(engine, site="oslo", site_id=7, time_source=time)
    world = World(engine=engine, site=site, time=time)
    world.acknowledged += [Acknowledged(*write) for write in write_history(site)]
    operation.prepare(site, time)
    write_tail(site, tail)
    world.promise()
    if bound_is_due:
        time.advance(BOUND_PASSED_MS)
    return world


class Passage(NamedTuple):
    """A site before and after an operation that nothing goes wrong with."""

    before: Observation
    after: Observation

    def steps(self, seen: Observation) -> list[tuple[Written, ...]] | None:
        """What of the operation is there, commit by commit; None if that is not all there is to see."""
        before = _above(self.before, seen.trimmed)
        commits = _above(seen, self.before.trimmed)
        return (
            [commit.changes for commit in commits[len(before) :]]
            if commits[: len(before)] == before
            else None
        )

    def is_whole(self, seen: Observation) -> bool:
        """Whether all of the operation has happened."""
        effect = [commit.changes for commit in _above(self.after, seen.trimmed)]
        effect = effect[len(_above(self.before, max(seen.trimmed, self.after.trimmed))) :]
        return self.steps(seen) == effect and seen.layout == self.after.layout

    def is_begun(self, seen: Observation) -> bool:
        """Whether some first commits of the operation have happened, and nothing else."""
        effect = [commit.changes for commit in self.after.commits[len(self.before.commits) :]]
        steps = self.steps(seen)
        return steps is not None and steps == effect[: len(steps)] and seen.layout == self.before.layout


@cache
def undisturbed(name: str, *, bound_is_due: bool, tail: int) -> Passage:
    """An operation that nothing goes wrong with, on a site that has lost all but `tail` unsynced writes."""
    world = make_world(OPERATIONS[name], healthy_engine, bound_is_due=bound_is_due, tail=tail)
    before = look(world.engine, world.time())
    OPERATIONS[name].run(world.site)
    return Passage(before, look(world.engine, world.time()))


@dataclass(frozen=True, kw_only=True)
class Expectation:
    """What may be there after an operation, given what its caller was told.

    There is one passage for each number of unsynced writes that were kept.  Where the fault itself
    `loses` such writes, the operation may have gone on without them.
    """

    operation: Operation
    passages: list[Passage]
    outcome: Outcome
    loses: bool

    def check(self, seen: Observation, *, crashed: bool = True) -> None:
        """Compare a site with the outcome; a crash may have taken unsynced writes."""
        seen = seen.without_probes()
        last = self.passages[-1:]
        untouched = any(
            alike(seen, passage.before) for passage in (self.passages if crashed or self.loses else last)
        )
        passages = self.passages if self.loses else last
        whole = any(passage.is_whole(seen) for passage in passages)
        match self.outcome:
            case Outcome.SUCCESS:
                allowed = whole or (untouched and crashed and not self.operation.durable)
            case Outcome.REFUSED:
                allowed = untouched
            case _:
                begun = not self.operation.atomic and any(passage.is_begun(seen) for passage in passages)
                allowed = untouched or whole or begun
        if not allowed:
            before, after = last[0]
            raise Violation(
                "state",
                f"the outcome was {self.outcome.name}; compared with the site before it, "
                f"{difference(seen, before)}; with the one after, {difference(seen, after)}",
            )


def alike(seen: Observation, other: Observation) -> bool:
    """Whether two sites show the same, as far back as both remember."""
    return _above(seen, other.trimmed) == _above(other, seen.trimmed) and seen.layout == other.layout


def difference(seen: Observation, other: Observation) -> str:
    """What one site shows and another does not, in words."""
    commits, others = _above(seen, other.trimmed), _above(other, seen.trimmed)
    parts = [
        *(f"{commit} is missing" for commit in others if commit not in commits),
        *(f"{commit} was added" for commit in commits if commit not in others),
        *(
            f"the {name} are {shown} instead of {wanted}"
            for name, shown, wanted in zip(Layout._fields, seen.layout, other.layout, strict=True)
            if shown != wanted
        ),
    ]
    return ", ".join(parts) or "nothing differs"


def _through(seen: Observation, version: Version, other: Observation) -> set[SeenCommit]:
    """The commits of a site at or below a version, as far back as another remembers as well."""
    return {commit for commit in _above(seen, other.trimmed) if commit.version <= version}


def _above(seen: Observation, version: Version) -> tuple[SeenCommit, ...]:
    return tuple(commit for commit in seen.commits if commit.version > max(version, seen.trimmed))


def attempt(world: World, operation: Operation) -> Outcome:
    """Run an operation, and say what its caller knows."""
    try:
        result = operation.run(world.site)
    except OutcomeUnknown:
        return Outcome.UNKNOWN
    except FloodmarkError:
        return Outcome.REFUSED
    except SimulatedCrash:
        return Outcome.CRASHED
    except Exception as error:
        raise Violation("outcome", f"the caller got {error!r}") from error
    if isinstance(result, int):
        world.highest = max(world.highest, result)
    return Outcome.SUCCESS


def require_usable(world: World, *, attempts: int, backwards: bool) -> None:
    """Write a key, hold a safe point and read: none of them may need another to bring the site back."""

    def put() -> None:
        name = "users" if "users" in world.site.namespaces() else "other"
        version = world.site.namespace(name).put(PROBE_KEY, b"usable")
        world.highest = max(world.highest, version)
        world.acknowledged.append(Acknowledged(name, PROBE_KEY, b"usable", version))

    def hold() -> None:
        world.site.hold_safe_point(PROBE_NAME, VERSION_MAX)

    def scan() -> None:
        for name in world.site.namespaces():
            list(world.site.namespace(name).scan())

    acts = (put, hold, scan)
    for act in reversed(acts) if backwards else acts:
        for left in reversed(range(attempts)):
            try:
                act()
                break
            except FloodmarkError as error:
                if not left:
                    message = f"{act.__name__} still fails {attempts} calls after the fault: {error!r}"
                    raise Violation("usable", message) from error


def check_lasting(world: World, check: Callable[[Observation], None]) -> None:
    """The process lives on: what it shows must be right, and must stay so from here on."""
    live = observe(world.site, world.site.now(), past=False)
    world.check_said(live)
    world.highest = max(world.highest, live.next_version)
    check(live)

    def check_settled(image: Observation) -> None:
        if not alike(image, live):
            raise Violation("settled", f"when opened again, {difference(image, live)}")

    world.check_images(check_settled)
    world.promise()
    world.site.heartbeat()
    world.promise()
    world.check_images(check_settled)
    world.site.close()
    world.check_images(check_settled)


def run(name: str, plan: FaultPlan, make_engine: MakeEngine, *, bound_is_due: bool) -> bool:
    """Run one operation under one plan; whether the fault came to pass."""
    operation = OPERATIONS[name]
    world = make_world(operation, make_engine, bound_is_due=bound_is_due)
    world.engine.arm(plan)
    outcome = attempt(world, operation)
    fired = world.engine.fired
    if not fired:
        world.engine.heal()
    expectation = Expectation(
        operation=operation,
        passages=[undisturbed(name, bound_is_due=bound_is_due, tail=tail) for tail in range(TAIL + 1)],
        outcome=outcome,
        loses=plan.kind is Fault.UNKNOWN_LOST,
    )
    world.check_images(expectation.check)
    if outcome is not Outcome.CRASHED and name != "close":
        world.promise()
        world.engine.heal()
        attempts = 1 if plan.kind is Fault.TRANSIENT else 2
        require_usable(world, attempts=attempts, backwards=bound_is_due)
        check_lasting(world, partial(expectation.check, crashed=False))
    return fired


def visit(name: str, plan: FaultPlan, make_engine: MakeEngine = healthy_engine) -> int:
    """Run an operation with the fault at every place; how many places there are."""
    places = 0
    for bound_is_due in (False, True):
        for at in count(1):
            assert at <= POSITIONS_MAX, "the operation does not come to an end"
            try:
                fired = run(name, replace(plan, at=at), make_engine, bound_is_due=bound_is_due)
            except Violation as violation:
                violation.add_note(f"{name}, {replace(plan, at=at)}, bound_is_due={bound_is_due}")
                raise
            if not fired:
                break
            places += 1
    return places
