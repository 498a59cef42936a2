"""Writes and streams from any thread of the program, and not only from the one that made the session.

Spark's Java looks the format of a write up in the session that is active in the calling thread.  A session is
active in the thread that made it.  In any other, as web servers, notebooks and schedulers have them, Java
knows of none, and the write of a Python data source fails with DATA_SOURCE_NOT_FOUND.  PySpark calls none
of ours before the lookup; but `df.write.format(...)` knows the session of its DataFrame: it makes
that active.
"""

from collections.abc import Callable
from functools import wraps
from typing import Any, Final

from pyspark.sql import DataFrameWriter, SparkSession
from pyspark.sql.streaming.readwriter import DataStreamWriter

_WRITERS: Final = (DataFrameWriter, DataStreamWriter)


def make_active(session: SparkSession) -> None:
    """Make a session the active one of this thread.  On Spark Connect the server does that."""
    if isinstance(session, SparkSession):
        java = SparkSession._get_j_spark_session_class(session._jvm)
        java.setActiveSession(session._jsparkSession)


def follow_threads(source: str) -> None:
    """Let writers of a format work in threads that have no active session.  Done once for a process."""
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
