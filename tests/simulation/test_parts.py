"""The parts that a simulated world is made of do what the checks rely on."""

from random import Random

import pytest

from floodmark.codec.changelog import encode_log_key
from floodmark.codec.values import encode_value
from floodmark.engine import WriteRow
from floodmark.model.errors import Unreachable
from floodmark.testing import SimulatedTime
from floodmark.testing.simulation.chronicle import Chronicle, Intent, SeenChange, WriteOutcome
from floodmark.testing.simulation.clocks import Schedule
from floodmark.testing.simulation.disk import SimulatedDisk
from floodmark.testing.simulation.history import Key, RunHistory, Violation
from floodmark.testing.simulation.network import Network, Weather
from floodmark.testing.simulation.witness import VersionWitness

ADA, BEN = Key("users", b"ada"), Key("users", b"ben")


def log_row(version: int) -> WriteRow:
    return "log", encode_log_key(7, version), b"row"


def put(version: int, key: Key, value: bytes = b"1") -> SeenChange:
    return SeenChange(version, key, encode_value(value), 64, exact=True)


def intent(
    key: Key, low: int, high: int, outcome: WriteOutcome = WriteOutcome.DONE, *, durable: bool = True
) -> Intent:
    return Intent(
        operation="put",
        outcome=outcome,
        durable=durable,
        low=low,
        high=high,
        era=(1, 0),
        expected={key: lambda _, logged: logged == encode_value(b"1")},
    )


def chronicle(*intents: Intent) -> Chronicle:
    return Chronicle("oslo", 1, intents=list(intents))


class Nobody:
    """A watcher that looks away."""

    def writing(self, rows: object) -> None:
        pass

    def syncing(self) -> None:
        pass


# The witness


def test_a_version_must_lie_above_all_that_were_written() -> None:
    witness = VersionWitness("oslo")
    witness.writing([log_row(5), log_row(6)])
    with pytest.raises(Violation, match="promise 2"):
        witness.writing([log_row(6)])


def test_nothing_may_be_written_at_or_below_a_resolved_version() -> None:
    witness = VersionWitness("oslo")
    witness.announce(9, [])
    with pytest.raises(Violation, match="promise 3"):
        witness.writing([log_row(9)])


def test_what_is_resolved_must_be_synced() -> None:
    witness = VersionWitness("oslo")
    witness.announce(9, [log_row(10)])
    with pytest.raises(Violation, match="promise 1"):
        witness.announce(10, [log_row(10)])


# The chronicle


def test_a_reading_that_tells_the_same_is_fine() -> None:
    told = [put(5, ADA), put(6, BEN)]
    book = chronicle(intent(ADA, 0, 5), intent(BEN, 5, 6))
    book.extend(told, 10)
    book.compare(told[1:], 5, 10, None)


@pytest.mark.parametrize(
    ("told", "promise"),
    [([], "4"), ([put(6, BEN, b"2")], "4"), ([put(5, BEN)], "4"), ([put(6, BEN), put(7, BEN)], "3")],
)
def test_a_reading_that_tells_something_else_is_found(told: list[SeenChange], promise: str) -> None:
    book = chronicle(intent(BEN, 5, 6))
    book.extend([put(6, BEN)], 10)
    with pytest.raises(Violation, match=f"promise {promise}"):
        book.compare(told, 4, 10, None)


def test_an_acknowledged_write_that_is_missing_is_found() -> None:
    with pytest.raises(Violation, match="was acknowledged, and is not there"):
        chronicle(intent(ADA, 0, 5)).extend([], 10)


def test_a_refused_write_that_is_there_is_found() -> None:
    with pytest.raises(Violation, match="a refused write left"):
        chronicle(intent(ADA, 0, 5, WriteOutcome.REFUSED)).extend([put(5, ADA)], 10)


def test_of_asynchronous_writes_only_the_last_may_be_missing() -> None:
    first, second = intent(ADA, 0, 5, durable=False), intent(BEN, 5, 6, durable=False)
    chronicle(first, second).extend([put(5, ADA)], 10)
    with pytest.raises(Violation, match="came after one that a crash took"):
        chronicle(first, second).extend([put(6, BEN)], 10)


def test_a_change_that_nobody_wrote_is_found() -> None:
    with pytest.raises(Violation, match="no writer wrote users/ada"):
        chronicle().extend([put(5, ADA)], 10)


# The network


def test_a_call_is_lost_made_late_or_made_twice() -> None:
    time = SimulatedTime(0)
    schedule = Schedule(time)
    network = Network(Random(1), schedule)
    network.weather = Weather(loss=0.3, duplication=0.3, late_ms_max=50)
    made: list[int] = []
    answered = []
    for number in range(200):
        try:
            network.call("oslo", "rome", lambda number=number: made.append(number))  # type: ignore[misc]
            answered.append(number)
        except Unreachable:
            pass
    at_once = set(made)
    time.advance(50)
    while (action := schedule.next_due()) is not None:
        action()
    assert set(answered) < at_once, "some calls are made, and their answers lost"
    assert at_once < set(made), "some calls come late"
    assert len(set(made)) < 200, "some calls are lost"
    assert len(made) > len(set(made)), "some calls are made twice"


def test_a_site_that_cannot_call_another_can_still_be_called_by_it() -> None:
    network = Network(Random(1), Schedule(SimulatedTime(0)))
    network.cut("oslo", "rome")
    with pytest.raises(Unreachable):
        network.call("oslo", "rome", lambda: 1)
    assert network.call("rome", "oslo", lambda: 1) == 1
    network.mend("oslo", "rome")
    assert network.call("oslo", "rome", lambda: 1) == 1


# The disk


def test_a_disk_that_starts_again_has_what_was_synced_and_as_much_more_as_was_kept() -> None:
    disk = SimulatedDisk(Nobody())
    disk.write([("meta", b"synced", b"1")])
    disk.sync()
    disk.write([("meta", b"first", b"1")])
    disk.write([("meta", b"second", b"1")])
    assert [key for _, key, _ in disk.unsynced_rows()] == [b"first", b"second"]
    after = disk.restart(keep=1)
    assert [after.get("meta", key) for key in (b"synced", b"first", b"second")] == [b"1", b"1", None]


# The history


def test_the_history_of_a_finding_leaves_out_other_keys() -> None:
    history = RunHistory()
    history.add(1, "oslo", "started")
    history.add(2, "oslo", "put", keys=[ADA], version=5)
    history.add(3, "oslo", "put", keys=[BEN], version=6)
    told = history.concerning(Violation("2", "oslo", "wrong", keys=[ADA]))
    assert [event.split()[3] for event in told] == ["started", "put"]
    assert "users/ada" in told[1]
