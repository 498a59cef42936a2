"""The turn is never lost: not when someone in line leaves, at whatever moment that is.

An interrupt can hit a waiting thread before its gate opens, while it opens, and just after.  A gate with
a trick puts it at each of these places, so that one thread plays all the parts.
"""

import signal
from collections.abc import Callable
from functools import partial
from threading import Event, Lock, Thread, main_thread

import pytest
from tests.site.support import HANG_SECONDS, HookedEngine, run_threads, watch_line

from floodmark.model.errors import OutcomeUnknown, PartitionStopped
from floodmark.partition import turn as turn_module
from floodmark.partition.turn import Turn, Waiter, chain, wake
from floodmark.site import Namespace, Site

# How often a signal is sent until it has come through.
SIGNAL_SECONDS = 0.01


class TrickGate:
    """A gate at which something happens to the one who waits."""

    def __init__(self, meanwhile: Callable[[], object], *, enters: bool) -> None:
        self._lock = Lock()
        self._meanwhile = meanwhile
        self._enters = enters

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        if timeout == -1:
            return self._lock.acquire(blocking)
        self._meanwhile()
        if self._enters:
            assert self._lock.acquire(timeout=1), "nobody opened the gate"
        raise KeyboardInterrupt

    def release(self) -> None:
        self._lock.release()


@pytest.fixture
def turn() -> Turn[Waiter]:
    """A turn that somebody has."""
    turn: Turn[Waiter] = Turn()
    assert turn.try_take()
    return turn


def stand_behind(turn: Turn[Waiter]) -> Waiter:
    """Put someone in line who is asleep at its gate."""
    waiter = Waiter()
    waiter.gate = Lock()
    waiter.gate.acquire()
    turn.line.append(waiter)
    return waiter


def is_awake(waiter: Waiter) -> bool:
    return waiter.gate.acquire(blocking=False)


def interrupt(
    turn: Turn[Waiter],
    monkeypatch: pytest.MonkeyPatch,
    waiter: Waiter,
    meanwhile: Callable[[], object],
    *,
    enters: bool,
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(turn_module, "Lock", lambda: TrickGate(meanwhile, enters=enters))
        with pytest.raises(KeyboardInterrupt):
            turn.wait(waiter)


def test_first_in_line_leads_when_the_turn_is_given_back(turn: Turn[Waiter]) -> None:
    first, second = stand_behind(turn), stand_behind(turn)
    turn.pass_on()
    assert (is_awake(first), first.leads, is_awake(second)) == (True, True, False)
    turn.pass_on()
    assert (is_awake(second), second.leads) == (True, True)
    turn.pass_on()
    assert turn.try_take()


def test_one_who_leaves_the_line_is_not_waited_for(
    turn: Turn[Waiter], monkeypatch: pytest.MonkeyPatch
) -> None:
    interrupt(turn, monkeypatch, Waiter(), lambda: None, enters=False)
    assert not turn.line
    behind = stand_behind(turn)
    turn.pass_on()
    assert is_awake(behind)


@pytest.mark.parametrize("enters", [False, True], ids=["before the gate", "behind the gate"])
def test_one_who_is_interrupted_when_given_the_turn_passes_it_on(
    turn: Turn[Waiter], monkeypatch: pytest.MonkeyPatch, enters: bool
) -> None:
    behind: list[Waiter] = []

    def give_turn() -> None:
        behind.append(stand_behind(turn))
        turn.pass_on()

    interrupt(turn, monkeypatch, Waiter(), give_turn, enters=enters)
    assert is_awake(behind[0]), "the turn is lost"
    assert behind[0].leads


def test_one_who_left_before_its_turn_came_is_passed_over(
    turn: Turn[Waiter], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its leader takes it out of line, it leaves, and only then its gate is opened."""
    gone = Waiter()
    interrupt(turn, monkeypatch, gone, turn.next_in_line, enters=False)
    behind = stand_behind(turn)
    wake(chain([gone, behind]))
    assert is_awake(behind)


@pytest.mark.parametrize("enters", [False, True], ids=["before the gate", "behind the gate"])
def test_one_who_is_interrupted_when_woken_wakes_the_next(
    turn: Turn[Waiter], monkeypatch: pytest.MonkeyPatch, enters: bool
) -> None:
    woken = Waiter()
    behind = stand_behind(turn)
    turn.line.clear()

    def do_its_work() -> None:
        turn.next_in_line()
        wake(chain([woken, behind]))

    interrupt(turn, monkeypatch, woken, do_its_work, enters=enters)
    assert is_awake(behind), "the chain is broken"


def test_waiting_too_long_for_work_that_has_not_begun_can_be_tried_again(
    turn: Turn[Waiter], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(turn_module, "WAIT_SECONDS_MAX", 0.001)
    with pytest.raises(PartitionStopped):
        turn.wait(Waiter())
    assert not turn.line
    turn.pass_on()
    assert turn.try_take()


def test_waiting_too_long_for_work_that_has_begun_is_an_unknown_outcome(
    turn: Turn[Waiter], monkeypatch: pytest.MonkeyPatch
) -> None:
    class TakenGate(TrickGate):
        def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
            if timeout != -1:
                turn.next_in_line()
                return False
            return super().acquire(blocking)

    monkeypatch.setattr(turn_module, "Lock", lambda: TakenGate(lambda: None, enters=False))
    with pytest.raises(OutcomeUnknown):
        turn.wait(Waiter())


def test_turn_goes_round_under_many_threads() -> None:
    turn: Turn[Waiter] = Turn()
    total = 0

    def work() -> None:
        nonlocal total
        for _ in range(500):
            waiter = Waiter()
            if turn.try_take() or turn.wait(waiter):
                total += 1
                turn.pass_on()

    run_threads(*[work] * 6)
    assert total == 3000
    assert turn.try_take()


def test_keyboard_interrupt_of_a_waiting_writer_leaves_the_others_alone(
    site: Site, users: Namespace, engine: HookedEngine
) -> None:
    """A real signal: the main thread waits for its commit behind one whose sync is slow."""
    line = watch_line(site)
    syncing, interrupted = Event(), Event()

    def hold_first_sync(operation: str) -> None:
        if operation == "sync" and not syncing.is_set():
            syncing.set()
            interrupted.wait(HANG_SECONDS)

    def interrupt_once(*_: object) -> None:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        raise KeyboardInterrupt

    def send_signal() -> None:
        line.wait_length(1)
        # A signal that comes just before a thread goes to sleep does not wake it.
        while not interrupted.wait(SIGNAL_SECONDS):
            signal.pthread_kill(main_thread().ident or 0, signal.SIGINT)

    users.put(b"warm", b"up")
    handler = signal.signal(signal.SIGINT, interrupt_once)
    engine.before = hold_first_sync
    slow = Thread(target=users.put, args=(b"slow", b"1"), daemon=True)
    slow.start()
    syncing.wait(HANG_SECONDS)
    sender = Thread(target=send_signal, daemon=True)
    sender.start()
    with pytest.raises(KeyboardInterrupt):
        users.put(b"main", b"1")
    interrupted.set()
    sender.join(HANG_SECONDS)
    signal.signal(signal.SIGINT, handler)
    slow.join(HANG_SECONDS)
    run_threads(*(partial(users.put, b"key-%d" % index, b"1") for index in range(4)))
    keys = {change.key for change in site.changes("users")}
    assert keys == {b"warm", b"slow", b"key-0", b"key-1", b"key-2", b"key-3"}
