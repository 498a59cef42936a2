"""The turn is never lost: not when someone in line leaves, at whatever moment that is.

An interrupt can hit a waiting thread before its mail comes, when it is there, and just after.  A mailbox with
a trick puts it at each of these places, so that one thread plays all the parts.
"""

import gc
import signal
from collections.abc import Callable
from functools import partial
from queue import SimpleQueue
from threading import Event, Thread, main_thread

import pytest
from tests.site.support import HookedEngine, watch_line
from tests.waiting import HANG_SECONDS, run_threads

from floodmark.model.errors import OutcomeUnknown, PartitionStopped
from floodmark.partition.commit import turn as turn_module
from floodmark.partition.commit.turn import Turn, TurnToken, Waiter, chain, wake
from floodmark.site import Namespace, Site

# How often a signal is sent until it has come through.
SIGNAL_SECONDS = 0.01


class TrickMail(SimpleQueue[TurnToken | None]):
    """A mailbox at which something happens to the one who waits, before or after it has taken its mail."""

    def __init__(self, meanwhile: Callable[[], object], *, takes: bool) -> None:
        self._meanwhile = meanwhile
        self._takes = takes

    def get(self, block: bool = True, timeout: float | None = None) -> TurnToken | None:
        self._meanwhile()
        if self._takes:
            super().get(timeout=1)
        raise KeyboardInterrupt


class Led:
    """A turn that somebody has."""

    def __init__(self, **seconds: float) -> None:
        self.turn: Turn[Waiter] = Turn(**seconds)
        token = self.turn.try_take()
        assert token is not None
        self._tokens = [token]

    def pass_on(self) -> None:
        self.turn.pass_on(self._tokens.pop())


@pytest.fixture
def led() -> Led:
    return Led()


@pytest.fixture
def turn(led: Led) -> Turn[Waiter]:
    return led.turn


def stand_behind(turn: Turn[Waiter]) -> Waiter:
    """Put someone in line who is asleep."""
    waiter = Waiter()
    waiter.mail = SimpleQueue()
    turn.line.append(waiter)
    return waiter


def leads(turn: Turn[Waiter], waiter: Waiter) -> TurnToken | None:
    """The turn, if someone in line has got it."""
    if waiter.mail.empty():
        return None
    token = waiter.mail.get()
    if token is not None:
        turn.line.remove(waiter)
    return token


def is_told(waiter: Waiter) -> bool:
    """Whether someone has heard that its work is done."""
    return waiter.served and not waiter.mail.empty() and waiter.mail.get() is None


def interrupt(
    turn: Turn[Waiter],
    monkeypatch: pytest.MonkeyPatch,
    waiter: Waiter,
    meanwhile: Callable[[], object],
    *,
    takes: bool,
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(turn_module, "SimpleQueue", lambda: TrickMail(meanwhile, takes=takes))
        with pytest.raises(KeyboardInterrupt):
            turn.wait(waiter)
        # The traceback is gone, and what it kept.
        gc.collect()


def test_first_in_line_leads_when_the_turn_is_given_back(led: Led) -> None:
    turn = led.turn
    first, second = stand_behind(turn), stand_behind(turn)
    led.pass_on()
    assert leads(turn, second) is None
    token = leads(turn, first)
    assert token is not None
    turn.pass_on(token)
    token = leads(turn, second)
    assert token is not None
    turn.pass_on(token)
    assert turn.try_take()


def test_there_is_one_turn_however_often_it_goes_round(turn: Turn[Waiter], led: Led) -> None:
    led.pass_on()
    for _ in range(3):
        token = turn.try_take()
        assert token is not None
        assert turn.try_take() is None
        turn.pass_on(token)


def test_turn_that_is_dropped_is_there_again() -> None:
    turn: Turn[Waiter] = Turn()
    assert turn.try_take()
    token = turn.try_take()
    assert token is not None
    assert turn.try_take() is None
    del token
    assert turn.try_take()


def test_one_who_leaves_the_line_is_not_waited_for(led: Led, monkeypatch: pytest.MonkeyPatch) -> None:
    turn = led.turn
    interrupt(turn, monkeypatch, Waiter(), lambda: None, takes=False)
    assert not turn.line
    behind = stand_behind(turn)
    led.pass_on()
    assert leads(turn, behind)


@pytest.mark.parametrize("takes", [False, True], ids=["before taking it", "after taking it"])
def test_one_who_is_interrupted_when_given_the_turn_does_not_keep_it(
    led: Led, monkeypatch: pytest.MonkeyPatch, takes: bool
) -> None:
    turn = led.turn
    behind: list[Waiter] = []

    def give_turn() -> None:
        behind.append(stand_behind(turn))
        led.pass_on()

    interrupt(turn, monkeypatch, Waiter(), give_turn, takes=takes)
    # What an interrupt has kept from being told, it finds when it looks.
    turn.lead_next()
    assert leads(turn, behind[0]), "the turn is lost"


def test_one_who_left_before_its_turn_came_is_passed_over(
    turn: Turn[Waiter], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its leader takes it out of line, it leaves, and only then it is told."""
    gone = Waiter()
    interrupt(turn, monkeypatch, gone, lambda: turn.take_line(lambda _: True), takes=False)
    behind = stand_behind(turn)
    wake(chain([gone, behind]))
    assert is_told(behind)


@pytest.mark.parametrize("takes", [False, True], ids=["before hearing it", "after hearing it"])
def test_one_who_is_interrupted_when_woken_wakes_the_next(
    turn: Turn[Waiter], monkeypatch: pytest.MonkeyPatch, takes: bool
) -> None:
    woken = Waiter()
    behind = stand_behind(turn)
    turn.line.clear()

    def do_its_work() -> None:
        turn.take_line(lambda _: True)
        wake(chain([woken, behind]))

    interrupt(turn, monkeypatch, woken, do_its_work, takes=takes)
    assert is_told(behind), "the chain is broken"


def test_one_who_was_never_told_finds_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its leader was interrupted after it had done the work, or after it had given the turn back."""
    led = Led(look_seconds=0.001)
    turn = led.turn
    served, leading = Waiter(), Waiter()

    class DoneUnheard(SimpleQueue[TurnToken | None]):
        def get(self, block: bool = True, timeout: float | None = None) -> TurnToken | None:
            turn.take_line(lambda _: True)
            served.served = True
            return super().get(block, timeout)

    with monkeypatch.context() as patch:
        patch.setattr(turn_module, "SimpleQueue", DoneUnheard)
        assert turn.wait(served) is None

    class GivenBackUnheard(SimpleQueue[TurnToken | None]):
        def get(self, block: bool = True, timeout: float | None = None) -> TurnToken | None:
            if led._tokens:
                turn.give_back(led._tokens.pop())
            return super().get(block, timeout)

    with monkeypatch.context() as patch:
        patch.setattr(turn_module, "SimpleQueue", GivenBackUnheard)
        assert turn.wait(leading) is not None


def test_waiting_too_long_for_work_that_has_not_begun_can_be_tried_again() -> None:
    led = Led(wait_seconds_max=0.001)
    with pytest.raises(PartitionStopped):
        led.turn.wait(Waiter())
    assert not led.turn.line
    led.pass_on()
    assert led.turn.try_take()


def test_waiting_too_long_for_work_that_has_begun_is_an_unknown_outcome(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    led = Led(wait_seconds_max=0.001)
    turn = led.turn

    class Taken(SimpleQueue[TurnToken | None]):
        def get(self, block: bool = True, timeout: float | None = None) -> TurnToken | None:
            turn.take_line(lambda _: True)
            return super().get(block, timeout)

    monkeypatch.setattr(turn_module, "SimpleQueue", Taken)
    with pytest.raises(OutcomeUnknown):
        turn.wait(Waiter())


def test_turn_goes_round_under_many_threads() -> None:
    turn: Turn[Waiter] = Turn()
    total = 0

    def work() -> None:
        nonlocal total
        for _ in range(500):
            token = turn.try_take() or turn.wait(Waiter())
            assert token is not None
            total += 1
            turn.pass_on(token)

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
