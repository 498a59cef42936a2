"""Storage that fails at every step, in every way, and a power cut at every moment; then recovery."""

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress

import pytest
from tests.contracts.ledger import entries_of
from tests.waiting import HANG_SECONDS

from floodmark.log import (
    FAMILY,
    Acknowledgements,
    BatchedWriter,
    EntryId,
    LedgerSettings,
    Marks,
    Position,
    Segment,
    StoredLedger,
)
from floodmark.log.base import NO_MARKS
from floodmark.model.errors import FloodmarkError, OutcomeUnknown, StorageFailed
from floodmark.testing import UNKNOWN_FAULTS, Fault, FaultPlan, FaultyEngine, SimulatedCrash
from floodmark.testing.ledgers import EngineStore


class CrowdedLedger(StoredLedger):
    """A ledger to which others come while it appends, so that batches form without threads that race."""

    def __init__(self, engine: FaultyEngine) -> None:
        super().__init__(EngineStore(engine), "log", LedgerSettings(segment_bytes_max=100))
        self.meanwhile: Callable[[], None] | None = None

    def append(self, entry: bytes, marks: Marks = NO_MARKS) -> EntryId:
        meanwhile, self.meanwhile = self.meanwhile, None
        if meanwhile is not None:
            meanwhile()
        return super().append(entry, marks)


class World:
    """A log, and what its users were told about each record."""

    def __init__(self, engine: FaultyEngine) -> None:
        self.engine = engine
        self.ledger = CrowdedLedger(engine)
        self.writer = BatchedWriter[bytes](self.ledger)
        self.written: dict[bytes, Position] = {}
        self.order: list[bytes] = []
        self.failed: set[bytes] = set()
        # Records of which nothing is known, and which no later append has settled yet.
        self.unknown: set[bytes] = set()
        self.acknowledged: list[set[bytes]] = []

    def write(self, record: bytes) -> None:
        self.order.append(record)
        self._note(record, lambda: self.writer.write(record))

    def write_batch(self, first: bytes, *others: bytes) -> None:
        futures: list[Future[Position]] = []
        self.ledger.meanwhile = lambda: futures.extend(map(self.writer.add, others))
        self.order += [first, *others]
        self._note(first, lambda: self.writer.write(first))
        for record, future in zip(others, futures, strict=True):
            self._note(record, lambda future=future: future.result(HANG_SECONDS))  # type: ignore[misc]

    def acknowledge(self, *records: bytes) -> None:
        known = [record for record in records if record in self.written]
        self.acknowledged.append(set(known))
        self.writer.acknowledge([self.written[record] for record in known])
        assert self.writer.flush(HANG_SECONDS)

    def _note(self, record: bytes, ask: Callable[[], Position]) -> None:
        try:
            position = ask()
        except OutcomeUnknown:
            self.unknown.add(record)
        except SimulatedCrash:
            # Of no record that was handed over is more known than that.
            self.unknown |= set(self.order) - set(self.written) - self.failed
            raise
        except FloodmarkError:
            self.failed.add(record)
        else:
            if self.unknown:
                self.failed |= self.unknown - {record}
                self.unknown.clear()
            self.written[record] = position

    @property
    def done(self) -> set[bytes]:
        return {record for records in self.acknowledged for record in records}


def run_script(world: World) -> None:
    world.write(b"a")
    world.write_batch(b"b", b"c", b"d", b"e")
    world.acknowledge(b"a")
    world.acknowledge(b"c", b"d")
    world.write(b"f" * 60)
    world.write_batch(b"g" * 60, b"h", b"i")
    world.acknowledge(b"e", b"i")
    world.acknowledge(b"b", b"g" * 60, b"h")
    world.write(b"j")
    world.acknowledge(b"j")


def recovered(engine: FaultyEngine) -> list[bytes]:
    return [record for _, record in Acknowledgements(CrowdedLedger(engine)).recover()]


def check_image(world: World, image: FaultyEngine, *, acknowledged: bool) -> None:
    """What a power cut may leave; if acknowledgements are known to be durable, none is undone."""
    live = recovered(image)
    assert live == sorted(live, key=world.order.index), "out of order"
    assert len(live) == len(set(live)), "a record stands there twice"
    present = set(live)
    assert not present & world.failed, "a record that failed is there"
    assert present <= set(world.written) | world.unknown
    lost = set(world.written) - world.done - present
    assert not lost, "a record is lost that was neither acknowledged nor failed"
    undone = [bool(records & present) for records in world.acknowledged if records]
    for records in world.acknowledged:
        assert records <= present or not records & present, "half of an acknowledgement is undone"
    assert undone == sorted(undone), "an acknowledgement is undone, and a later one is not"
    if acknowledged:
        assert not any(undone)
    go_on(image, live)


def go_on(image: FaultyEngine, live: Sequence[bytes]) -> None:
    """Whatever was left, the log can be used, emptied and opened again."""
    ledger = CrowdedLedger(image)
    acknowledgements = Acknowledgements(ledger)
    positions = [position for position, _ in acknowledgements.recover()]
    writer = BatchedWriter[bytes](ledger, acknowledgements=acknowledgements)
    added = writer.write(b"z")
    assert all(added.entry > position.entry for position in positions)
    writer.acknowledge(positions)
    writer.close()
    assert recovered(image) == [b"z"]
    assert [entry for entry, _ in entries_of(ledger)] == [added.entry]
    segments: list[Segment] = CrowdedLedger(image).segments()
    assert sum(segment.entries for segment in segments) == 1
    assert len(live) == len(positions)


def images_of(engine: FaultyEngine) -> list[FaultyEngine]:
    return [engine.crash(keep=keep) for keep in range(engine.unsynced + 1)]


def visit(plan: FaultPlan) -> bool:
    """Run the script under a plan; whether the plan came to anything."""
    engine = FaultyEngine((FAMILY,))
    world = World(engine)
    engine.arm(plan)
    with suppress(SimulatedCrash):
        run_script(world)
    for image in images_of(engine):
        check_image(world, image, acknowledged=False)
    if plan.kind is Fault.CRASH and engine.fired:
        return True
    engine.heal()
    world.write(b"after")
    assert b"after" in world.written, "the log goes on once storage does"
    check_image(world, engine.crash(keep=0), acknowledged=True)
    world.writer.close()
    return engine.fired


PLANS = [(kind, 0) for kind in Fault] + [(kind, 1) for kind in sorted(UNKNOWN_FAULTS)]


@pytest.mark.parametrize(("kind", "recover_failures"), PLANS)
def test_every_step_may_fail(kind: Fault, recover_failures: int) -> None:
    steps = 0
    while visit(FaultPlan(at=steps + 1, kind=kind, recover_failures=recover_failures)):
        steps += 1
    assert steps >= 15, "the script writes and syncs more often than that"


def test_an_append_of_unknown_outcome_is_taken_back_by_the_next_one() -> None:
    engine = FaultyEngine((FAMILY,))
    world = World(engine)
    world.write(b"a")
    engine.arm(FaultPlan(at=2, kind=Fault.UNKNOWN_APPLIED, recover_failures=1))
    world.write(b"commit")
    assert world.unknown == {b"commit"}
    assert recovered(engine.crash()) == [b"a", b"commit"], "it may be there"
    assert [record for _, record in entries_of(world.ledger)][1:] == [], "but nobody sees it here"
    world.write(b"abort")
    assert recovered(engine.crash(keep=0)) == [b"a", b"abort"]


def test_marks_that_a_recovery_of_the_engine_lost_are_stored_again() -> None:
    engine = FaultyEngine((FAMILY,))
    world = World(engine)
    for record in (b"a", b"b", b"c"):
        world.write(record)
    world.acknowledge(b"a")
    assert engine.unsynced == 1
    engine.arm(FaultPlan(at=1, kind=Fault.UNKNOWN_LOST))
    world.acknowledge(b"b")
    assert recovered(engine.crash(keep=0)) == [b"a", b"b", b"c"]
    world.write(b"d")
    assert recovered(engine.crash(keep=0)) == [b"c", b"d"]


def test_no_id_is_given_out_twice_where_a_lost_removal_is_stored_again() -> None:
    engine = FaultyEngine((FAMILY,))
    ledger = StoredLedger(EngineStore(engine), "log")
    given = [ledger.append(b"entry") for _ in range(3)]
    ledger.mark({given[2]: None})
    engine.arm(FaultPlan(at=2, kind=Fault.UNKNOWN_LOST))
    with pytest.raises(StorageFailed):
        ledger.append(b"lost, and with it the removal")
    engine.heal()
    # With a removal of an entry that is not the last, and of which nothing follows.
    ledger.mark({given[0]: None})
    again = StoredLedger(EngineStore(engine), "log")
    assert [number for number, _ in entries_of(again)] == [given[1]]
    assert again.append(b"later") > max(given)


def keep_doubtful_entries(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = StoredLedger._rows

    def without_doubt(ledger: StoredLedger, marks: Marks, opened: Segment | None = None) -> object:
        ledger._doubtful.clear()
        return rows(ledger, marks, opened)

    monkeypatch.setattr(StoredLedger, "_rows", without_doubt)


def forget_fresh_marks(monkeypatch: pytest.MonkeyPatch) -> None:
    remove = StoredLedger._remove

    def and_forget(ledger: StoredLedger, marks: Marks) -> None:
        remove(ledger, marks)
        ledger._fresh.clear()

    monkeypatch.setattr(StoredLedger, "_remove", and_forget)


def sync_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(EngineStore, "store", EngineStore.store_later)


@pytest.mark.parametrize("sabotage", [keep_doubtful_entries, forget_fresh_marks, sync_nothing])
def test_the_check_finds_its_canaries(
    sabotage: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    def look_everywhere() -> None:
        for kind, recover_failures in PLANS:
            test_every_step_may_fail(kind, recover_failures)

    sabotage(monkeypatch)
    with pytest.raises(AssertionError):
        look_everywhere()
