"""Work that goes on beside everything else."""

from collections.abc import Callable
from concurrent.futures import Future
from threading import Thread
from typing import TypeVar

Result = TypeVar("Result")


def beside(name: str, work: Callable[[], Result]) -> "Future[Result]":
    """Do something in a thread of its own, which keeps no process alive that has come to its end."""
    outcome: Future[Result] = Future()

    def run() -> None:
        try:
            outcome.set_result(work())
        except BaseException as error:
            outcome.set_exception(error)

    Thread(target=run, name=name, daemon=True).start()
    return outcome
