"""Find the Floodmark error inside an error of Spark.

Spark runs a data source in other processes and passes their errors on as text: a Python traceback inside a
Java message, inside another one if a stream failed.  A traceback ends with `module.Class: message`, from
which the error is made again, so that a caller of a job catches the same classes as elsewhere.
"""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from floodmark.model import errors
from floodmark.model.errors import FloodmarkError

# The last line of a traceback and the rest of its message, up to the text that Python puts between two
# tracebacks, or that Spark adds: the state, the query, the Java stack.
_ERROR: Final = re.compile(
    rf"""
    ^{re.escape(errors.__name__)}\.(?P<name>\w+)
    (?::[ ](?P<message>.*?))?
    \s*
    (?: \Z
      | ^[ ]SQLSTATE:
      | ^===[ ]Streaming[ ]Query
      | ^\tat[ ]
      | ^(?:Driver|JVM)[ ]stacktrace:
      | ^(?:The[ ]above|During[ ]handling[ ]of[ ]the[ ]above)[ ]exception
    )
    """,
    re.VERBOSE | re.MULTILINE | re.DOTALL,
)


def find_error(error: BaseException) -> FloodmarkError | None:
    """The Floodmark error that caused an error of Spark; None if another one did."""
    for each in _causes(error):
        if isinstance(each, FloodmarkError):
            return each
        # The last traceback has the error that was raised.
        for found in reversed(list(_ERROR.finditer(str(each)))):
            kind = getattr(errors, found["name"], None)
            if isinstance(kind, type) and issubclass(kind, FloodmarkError):
                return kind(found["message"] or "")
    return None


@contextmanager
def raising_floodmark_errors() -> Iterator[None]:
    """Raise the Floodmark error inside an error of Spark, without Spark's text."""
    try:
        yield
    except Exception as error:
        found = find_error(error)
        if found is None or found is error:
            raise
        raise found from None


def _causes(error: BaseException) -> Iterator[BaseException]:
    cause: BaseException | None = error
    while cause is not None:
        yield cause
        # Spark keeps the cause in Java under a name of its own.
        cause = cause.__cause__ or getattr(cause, "_cause", None)
