"""Ctrl-C at every bytecode of a write: the turn is there again, and what was acknowledged is too."""

import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import count
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from tests.site.support import HookedEngine, node_of, state_after

import floodmark
from floodmark.site import Namespace, Site

# The files whose bytecodes are interrupted: the turn, the round, and what they call in this room.
FILES = ("partition/commit/turn.py", "partition/committer.py", "partition/commit/storage.py")


def interrupt_at(number: int, step: Callable[[], object]) -> bool:
    """Run something in which Ctrl-C comes before the so-and-so-many-th bytecode; False if there are fewer."""
    codes, before = count(1), sys.gettrace()

    def trace_code(_: FrameType, event: str, __: object) -> Any:
        if event == "opcode" and next(codes) == number:
            raise KeyboardInterrupt
        return trace_code

    def trace(frame: FrameType, *_: object) -> Any:
        code = frame.f_code
        # A generator is also entered when it is thrown away, and then nobody hears of it.
        if not code.co_filename.endswith(FILES) or code.co_name in ("<genexpr>", "__del__"):
            return None
        frame.f_trace_opcodes = True
        frame.f_trace_lines = False
        return trace_code

    try:
        sys.settrace(trace)
        step()
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(before)
    return next(codes) > number


@contextmanager
def impatient(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with monkeypatch.context() as patch:
        patch.setattr("floodmark.partition.commit.turn.WAIT_SECONDS_MAX", 0.2)
        patch.setattr("floodmark.partition.commit.turn.LOOK_SECONDS", 0.1)
        yield


STEPS: dict[str, Callable[[Namespace, bytes], object]] = {
    "async put": lambda users, key: users.put(key, b"1", durability="async"),
    "put": lambda users, key: users.put(key, b"1"),
    "put_many": lambda users, key: users.put_many({key: b"1", key + b"+": b"1"}),
}


@pytest.mark.parametrize("step", STEPS)
def test_interrupt_at_any_bytecode_never_keeps_the_turn(
    site: Site, users: Namespace, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    run = STEPS[step]
    acknowledged = set()
    for number in range(1, 3_000):
        key = b"%04d" % number
        went_on = interrupt_at(number, partial(run, users, key))
        with impatient(monkeypatch):
            users.put(b"after-" + key, b"1", durability="async")
        acknowledged.add(b"after-" + key)
        turn = node_of(site).storage.turn
        assert len(turn._free) == 1, f"{len(turn._free)} turns after bytecode {number}"
        if not went_on:
            break
    else:
        pytest.fail("there is no end of it")
    assert number > 50
    site.sync()
    changes = list(site.changes("users"))
    assert acknowledged <= {change.key for change in changes}
    assert state_after(changes) == dict(users.scan())


def test_interrupt_of_a_write_does_not_reopen_the_engine(
    site: Site, users: Namespace, engine: HookedEngine
) -> None:
    operations: list[str] = []

    def interrupt(operation: str) -> None:
        if operation == "write" and not operations:
            operations.append("interrupted")
            raise KeyboardInterrupt

    engine.after = interrupt
    with pytest.raises(KeyboardInterrupt):
        users.put(b"ada", b"1")
    engine.before, engine.after = operations.append, lambda _: None
    users.put(b"grace", b"1")
    assert "recover" not in operations
    assert {change.key for change in site.changes("users")} == {b"ada", b"grace"}
    assert site.statistics().recoveries == 0


class Alarm(Exception):
    """What a program's signal handler raises."""


@pytest.mark.parametrize("call", ["put", "async", "get", "scan", "sync"])
def test_exception_of_a_signal_handler_inside_an_engine_call_reaches_the_program(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    """The handler runs when RocksDB's call returns; what it raises is not about RocksDB."""
    with floodmark.open(tmp_path, site="oslo", background=False) as site:
        users = site.create_namespace("users")
        users.put(b"ada", b"1")
        generations: Any = node_of(site).engine
        engine = generations.below

        class Interrupted:
            """RocksDB's handle, with a signal at the end of each call."""

            def __init__(self, handle: Any) -> None:
                self._handle = handle

            def __getattr__(self, name: str) -> Any:
                method = getattr(self._handle, name)

                def call_interrupted(*arguments: Any, **named: Any) -> Any:
                    result = method(*arguments, **named)
                    signal.raise_signal(signal.SIGALRM)
                    return result

                return call_interrupted

        def ring(*_: object) -> None:
            raise Alarm

        calls: dict[str, Callable[[], object]] = {
            "put": lambda: users.put(b"grace", b"1"),
            "async": lambda: users.put(b"grace", b"1", durability="async"),
            "get": lambda: users.get(b"ada"),
            "scan": lambda: list(users.scan()),
            "sync": site.sync,
        }
        users.put(b"unsynced", b"1", durability="async")
        before = signal.signal(signal.SIGALRM, ring)
        try:
            with monkeypatch.context() as patch:
                patch.setattr(engine, "_database", Interrupted(engine._database))
                patch.setattr(
                    engine,
                    "_columns",
                    {name: Interrupted(column) for name, column in engine._columns.items()},
                )
                with pytest.raises(Alarm):
                    calls[call]()
        finally:
            signal.signal(signal.SIGALRM, before)
        users.put(b"after", b"1")
        assert users.get(b"ada") == users.get(b"after") == b"1"
        assert site.statistics().recoveries == 0
