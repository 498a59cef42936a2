"""Spark sessions in processes of their own: a process has one Java, and a Java one Spark context."""

from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from multiprocessing import get_context
from typing import Concatenate, ParamSpec, TypeVar

from pyspark.sql import SparkSession
from tests.waiting import HANG_SECONDS

from floodmark.spark.session import SparkOptions, open_session

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")

# Of the process that runs the session.
_sessions: list[SparkSession] = []
_closing = ExitStack()


class SparkProcess:
    """A process with a Spark session, in which a test runs functions of its module.

    The functions take the session first.  They, their arguments, results and errors are pickled.
    """

    def __init__(self, options: SparkOptions) -> None:
        self._pool = ProcessPoolExecutor(
            1, mp_context=get_context("spawn"), initializer=_open, initargs=(options,)
        )
        # The process is started, with the environment of now, and the session with it.
        self._pool.submit(_started).result(HANG_SECONDS)

    def run(
        self,
        work: Callable[Concatenate[SparkSession, Parameters], Result],
        *arguments: Parameters.args,
        **named: Parameters.kwargs,
    ) -> Result:
        """Run a function there; what it returns."""
        return self._pool.submit(_call, work, arguments, named).result(HANG_SECONDS)

    def close(self) -> None:
        """Stop the session and end the process."""
        self._pool.submit(_closing_time).result(HANG_SECONDS)
        self._pool.shutdown()


def _open(options: SparkOptions) -> None:
    _sessions.append(_closing.enter_context(open_session(options)))


def _started() -> None:
    assert _sessions


def _call(work: Callable[..., Result], arguments: tuple[object, ...], named: dict[str, object]) -> Result:
    try:
        return work(_sessions[0], *arguments, **named)
    finally:
        for query in _sessions[0].streams.active:
            query.stop()


def _closing_time() -> None:
    _sessions.clear()
    _closing.close()
