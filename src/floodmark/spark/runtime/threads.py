"""Writes and streams from any thread, not only the one that created the session.

Spark's Java looks up the format of a write in the active session of the calling thread, which only the
thread that created the session has.  In threads of web servers, notebooks and schedulers the write of a
Python data source fails with DATA_SOURCE_NOT_FOUND.  So `df.write.format(...)` first makes the session of
its DataFrame the active one.
"""

from collections.abc import Callable
from functools import wraps
from typing import Any, Final

from pyspark.sql import DataFrameWriter, SparkSession
from pyspark.sql.streaming.readwriter import DataStreamWriter

_WRITERS: Final = (DataFrameWriter, DataStreamWriter)


def make_active(session: SparkSession) -> None:
    """Make a session the active one of this thread.  With Spark Connect the server does that."""
    if isinstance(session, SparkSession):
        java = SparkSession._get_j_spark_session_class(session._jvm)
        java.setActiveSession(session._jsparkSession)


def follow_threads(source: str) -> None:
    """Let writers of a format work in threads without an active session.  Done once per process."""
    for writer in _WRITERS:
        if source not in getattr(writer.format, "sources", ()):
            # Assigned by name: to a type checker a method is not a variable.
            setattr(writer, "format", _activating(writer.format, source))  # noqa: B010


def _activating(choose: Callable[[Any, str], Any], source: str) -> Callable[[Any, str], Any]:
    @wraps(choose)
    def activate(writer: Any, chosen: str) -> Any:
        if chosen.lower() == source:
            make_active(writer._spark)
        return choose(writer, chosen)

    activate.__dict__["sources"] = frozenset({source, *getattr(choose, "sources", ())})
    return activate
