"""The faulty engine fails as planned, and knows what a power cut would leave."""

import pytest

from floodmark.engine import Guard
from floodmark.model.errors import Closed, OutcomeUnknown, StorageFailed
from floodmark.testing import READS, UNKNOWN_FAULTS, WRITES, Fault, FaultPlan, FaultyEngine, SimulatedCrash
from floodmark.testing import Operation as Kind

DATA = "data"


def faulty(kind: Fault, at: int = 1, recover_failures: int = 0) -> FaultyEngine:
    """An engine with one synced and one unsynced row, whose next operations follow a plan."""
    engine = FaultyEngine((DATA,))
    put(engine, b"synced")
    engine.sync()
    put(engine, b"unsynced")
    engine.arm(FaultPlan(at=at, kind=kind, recover_failures=recover_failures))
    return engine


def put(engine: FaultyEngine, key: bytes) -> None:
    engine.write([(DATA, key, b"1"), (DATA, key + b"-too", b"1")])


def batches(engine: FaultyEngine) -> list[bytes]:
    """The batches that are there; each must be there as a whole."""
    keys = [key for key, _ in engine.contents()[DATA]]
    firsts = [key for key in keys if not key.endswith(b"-too")]
    assert len(keys) == 2 * len(firsts)
    return firsts


def survivors(engine: FaultyEngine) -> list[list[bytes]]:
    """What each possible power cut leaves, from the worst to the mildest."""
    return [batches(engine.crash(keep=keep)) for keep in range(engine.unsynced + 1)]


def test_the_nth_operation_fails_once_and_does_nothing() -> None:
    engine = faulty(Fault.TRANSIENT, at=2)
    put(engine, b"a")
    with pytest.raises(StorageFailed, match="write, operation 2"):
        put(engine, b"b")
    put(engine, b"c")
    assert batches(engine) == [b"a", b"c", b"synced", b"unsynced"]


def test_every_kind_of_write_counts_and_no_read_does() -> None:
    engine = FaultyEngine((DATA,), FaultPlan(at=9, kind=Fault.TRANSIENT))
    put(engine, b"a")
    engine.write([], [Guard(DATA, b"a", b"never")])
    engine.delete_range(DATA, b"a", b"b")
    engine.sync()
    engine.get(DATA, b"a")
    engine.scan(DATA, b"", None, rows_max=1, bytes_max=1)
    engine.close()
    assert engine.operations == 5
    assert set(Kind) == READS | WRITES


def test_reads_fail_when_they_count() -> None:
    engine = FaultyEngine((DATA,), FaultPlan(at=2, kind=Fault.PERSISTENT, counts=READS))
    engine.get(DATA, b"a")
    put(engine, b"a")
    for _ in range(2):
        with pytest.raises(StorageFailed, match="read"):
            engine.ceiling(DATA, b"a")
    engine.heal()
    assert engine.get(DATA, b"a") == b"1"


def test_a_persistent_fault_lasts_until_it_is_healed() -> None:
    engine = faulty(Fault.PERSISTENT)
    for _ in range(2):
        with pytest.raises(StorageFailed):
            put(engine, b"a")
        with pytest.raises(StorageFailed):
            engine.sync()
        with pytest.raises(StorageFailed):
            engine.recover()
    engine.heal()
    put(engine, b"b")
    assert batches(engine) == [b"b", b"synced", b"unsynced"]


@pytest.mark.parametrize(
    ("kind", "left"),
    [
        (Fault.UNKNOWN_APPLIED, [b"a", b"synced", b"unsynced"]),
        (Fault.UNKNOWN_SKIPPED, [b"synced", b"unsynced"]),
        (Fault.UNKNOWN_LOST, [b"synced"]),
    ],
)
def test_an_unknown_write_shows_when_the_engine_has_recovered(kind: Fault, left: list[bytes]) -> None:
    engine = faulty(kind)
    with pytest.raises(OutcomeUnknown, match="no answer"):
        put(engine, b"a")
    assert batches(engine) == [b"synced", b"unsynced"]
    engine.recover()
    assert batches(engine) == left
    engine.sync()
    assert survivors(engine) == [left]


@pytest.mark.parametrize(
    ("kind", "durable", "left"),
    [
        (Fault.UNKNOWN_APPLIED, [b"synced", b"unsynced"], [b"synced", b"unsynced"]),
        (Fault.UNKNOWN_SKIPPED, [b"synced"], [b"synced", b"unsynced"]),
        (Fault.UNKNOWN_LOST, [b"synced"], [b"synced"]),
    ],
)
def test_an_unknown_sync_may_have_synced_or_not(kind: Fault, durable: list[bytes], left: list[bytes]) -> None:
    engine = faulty(kind)
    with pytest.raises(OutcomeUnknown):
        engine.sync()
    assert survivors(engine)[0] == durable
    engine.recover()
    assert batches(engine) == left


@pytest.mark.parametrize("kind", sorted(UNKNOWN_FAULTS))
def test_an_engine_of_unknown_outcome_refuses_to_write_until_it_has_recovered(kind: Fault) -> None:
    engine = faulty(kind, recover_failures=1)
    with pytest.raises(OutcomeUnknown):
        put(engine, b"a")
    with pytest.raises(StorageFailed, match="recover"):
        engine.recover()
    with pytest.raises(OutcomeUnknown, match="until it has recovered"):
        put(engine, b"b")
    with pytest.raises(OutcomeUnknown, match="until it has recovered"):
        engine.delete_range(DATA, b"a", b"b")
    with pytest.raises(OutcomeUnknown, match="until it has recovered"):
        engine.sync()
    assert engine.get(DATA, b"synced") == b"1"
    engine.recover()
    put(engine, b"b")


def test_a_power_cut_keeps_a_prefix_of_whole_writes() -> None:
    engine = faulty(Fault.TRANSIENT, at=99)
    put(engine, b"a")
    engine.delete_range(DATA, b"synced", b"t")
    assert survivors(engine) == [
        [b"synced"],
        [b"synced", b"unsynced"],
        [b"a", b"synced", b"unsynced"],
        [b"a", b"unsynced"],
    ]
    assert batches(engine.crash()) == [b"a", b"unsynced"]


def test_what_survives_a_power_cut_is_durable_and_free_of_faults() -> None:
    image = faulty(Fault.PERSISTENT).crash()
    put(image, b"a")
    assert survivors(image) == [[b"synced", b"unsynced"], [b"a", b"synced", b"unsynced"]]


@pytest.mark.parametrize("operation", ["write", "sync", "close"])
def test_a_crash_ends_the_process_and_the_last_write_is_whole_or_gone(operation: str) -> None:
    engine = faulty(Fault.CRASH)
    uses = {"write": lambda: put(engine, b"a"), "sync": engine.sync, "close": engine.close}
    with pytest.raises(SimulatedCrash):
        uses[operation]()
    for use in (*uses.values(), lambda: engine.get(DATA, b"a"), engine.recover):
        with pytest.raises(SimulatedCrash, match="has ended"):
            use()
    last = [[b"a", b"synced", b"unsynced"]] if operation == "write" else []
    assert survivors(engine) == [[b"synced"], [b"synced", b"unsynced"], *last]


@pytest.mark.parametrize("kind", [kind for kind in Fault if kind is not Fault.CRASH])
def test_a_close_that_fails_lets_go_all_the_same(kind: Fault) -> None:
    engine = faulty(kind)
    with pytest.raises(OutcomeUnknown if kind in UNKNOWN_FAULTS else StorageFailed):
        engine.close()
    engine.close()
    with pytest.raises(Closed):
        engine.get(DATA, b"synced")
    synced = [[b"synced", b"unsynced"]]
    assert survivors(engine) == (synced if kind is Fault.UNKNOWN_APPLIED else [[b"synced"], *synced])


def test_closing_before_recovery_syncs_nothing() -> None:
    engine = faulty(Fault.UNKNOWN_SKIPPED)
    with pytest.raises(OutcomeUnknown):
        put(engine, b"a")
    with pytest.raises(OutcomeUnknown, match="closed before"):
        engine.close()
    assert survivors(engine)[0] == [b"synced"]


def test_images_of_the_same_writes_have_the_same_fingerprint() -> None:
    first, second = faulty(Fault.TRANSIENT), faulty(Fault.UNKNOWN_SKIPPED)
    assert first.fingerprint() == second.fingerprint() == first.crash().fingerprint()
    assert first.fingerprint(keep=0) == first.crash(keep=0).fingerprint() != first.fingerprint()
    second.heal()
    put(second, b"a")
    assert first.fingerprint() == second.fingerprint(keep=1) != second.fingerprint()


def test_a_plan_that_makes_no_sense_is_refused() -> None:
    with pytest.raises(ValueError, match="counted from 1"):
        FaultPlan(at=0, kind=Fault.TRANSIENT)
    with pytest.raises(ValueError, match="nothing to recover from"):
        FaultPlan(at=1, kind=Fault.CRASH, recover_failures=1)
