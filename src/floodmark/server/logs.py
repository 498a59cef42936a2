"""Logs as one JSON object a line, always ASCII; a value that JSON does not know becomes text.

Only the logger "floodmark" is configured: other loggers belong to the program that runs the server.
"""

import json
import logging
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime
from itertools import islice
from logging.handlers import WatchedFileHandler
from pathlib import Path
from threading import Lock
from typing import Final, TextIO

import msgspec

from floodmark.clock import TimeSource, monotonic_ms
from floodmark.model.actions import Action
from floodmark.model.errors import InvalidConfiguration, NotAuthenticated
from floodmark.server.access import Caller
from floodmark.server.counters import outcome_of

CONTEXT: Final = ("site", "node", "partition", "feed", "caller", "role", "action", "arguments", "outcome")
TEXT_CHARACTERS_MAX: Final = 1_000
ITEMS_MAX: Final = 100
DEPTH_MAX: Final = 4
REFUSED_EVERY_MS: Final = 1_000

_SECRETS: Final = ("token", "password", "secret", "credential", "authorization", "private", "tls_key")
# Many readers of JSON keep numbers as floats and would round larger ones, such as versions.
_EXACT_INTEGER_MAX: Final = 1 << 53

_audit = logging.getLogger("floodmark.audit")
_log = logging.getLogger("floodmark.server")


class JsonFormatter(logging.Formatter):
    """Writes a record as one JSON object, with `context` and the record's `extra=`.

    In a mapping, values whose name sounds like a secret are left out; a message is written as it is.
    """

    def __init__(self, context: Mapping[str, object] | None = None) -> None:
        super().__init__()
        self._context = dict(context or {})

    def format(self, record: logging.LogRecord) -> str:
        """One line, without its end."""
        fields: dict[str, object] = {
            "time": _show_time(record.created),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": _text(_message(record)),
        }
        for name in CONTEXT:
            value = record.__dict__.get(name, self._context.get(name))
            if value is not None:
                fields[name] = _plain(value)
        if record.exc_info and record.exc_info[0] is not None:
            fields["exception"] = _text(self.formatException(record.exc_info))
        if record.stack_info:
            fields["stack"] = _text(record.stack_info)
        return json.dumps(fields, separators=(",", ":"))


def configure_logging(
    *,
    site: str | None = None,
    level: str = "info",
    stream: TextIO | Path | None = None,
) -> Callable[[], None]:
    """Send Floodmark's logs to stderr, a stream or a file, and no longer where an earlier call sent them.

    Returns a function that undoes this.  A file that log rotation has moved away is opened anew.
    """
    try:
        number = logging.getLevelNamesMapping()[level.upper()]
    except KeyError:
        raise InvalidConfiguration(
            f"{level!r} is no level of logs; use debug, info, warning, error or critical"
        ) from None
    handler = _open_handler(stream)
    handler.setFormatter(JsonFormatter({"site": site}))
    logger = logging.getLogger("floodmark")
    for other in _ours(logger):
        _remove(logger, other)
    before = logger.level, logger.propagate
    logger.addHandler(handler)
    logger.setLevel(number)
    # A program that has set up the root logger as well would log every record twice.
    logger.propagate = False

    def undo() -> None:
        if handler in logger.handlers:
            _remove(logger, handler)
            logger.setLevel(before[0])
            logger.propagate = before[1]

    return undo


class RefusedCallers:
    """Logs callers whose token or certificate is refused, at most one a second, to bound the log."""

    def __init__(self, time_source: TimeSource = monotonic_ms) -> None:
        self._time_source = time_source
        self._lock = Lock()
        self._logged_at_ms: int | None = None
        self._others = 0

    def note(self, address: str, action: str, error: NotAuthenticated) -> None:
        """Log a refusal, with the number of those since the last line; or count it."""
        with self._lock:
            now_ms = self._time_source()
            if self._logged_at_ms is not None and now_ms - self._logged_at_ms < REFUSED_EVERY_MS:
                self._others += 1
                return
            others, self._others, self._logged_at_ms = self._others, 0, now_ms
        more = f"; {others:,} others since the last line" if others else ""
        _log.warning("refused a caller from %s at %s: %s%s", address, action, error, more)


@contextmanager
def auditing(
    caller: Caller, name: str, action: Action, arguments: Mapping[str, object], *, lasts: bool = False
) -> Iterator[None]:
    """Log an audited action with its outcome when the block ends, and one that `lasts` when it begins, too.

    Arguments that hold values, or may be secret, are left out.
    """
    if not action.audited:
        yield
        return
    said = {key: value for key, value in arguments.items() if key not in action.unsaid}
    with auditing_administration(caller, name, said, lasts=lasts or action.lengthy):
        yield


@contextmanager
def auditing_administration(
    caller: Caller, action: str, arguments: Mapping[str, object], *, lasts: bool = False
) -> Iterator[None]:
    """Like `auditing`, for an action that no port declares."""

    def log(outcome: str) -> None:
        said = {"caller": caller.name, "role": str(caller.role), "action": action, "arguments": arguments}
        _audit.info("%s: %s: %s", caller.name, action, outcome, extra={**said, "outcome": outcome})

    if lasts:
        log("begun")
    failure: BaseException | None = None
    try:
        yield
    except BaseException as error:
        failure = error
        raise
    finally:
        log(outcome_of(failure))


def _open_handler(stream: TextIO | Path | None) -> logging.Handler:
    if not isinstance(stream, Path):
        return logging.StreamHandler(stream)
    try:
        return WatchedFileHandler(stream, encoding="utf-8")
    except OSError as error:
        raise InvalidConfiguration(
            f"cannot write logs to {stream}: {error.strerror}; choose another file", path=str(stream)
        ) from error


def _ours(logger: logging.Logger) -> list[logging.Handler]:
    return [handler for handler in logger.handlers if isinstance(handler.formatter, JsonFormatter)]


def _remove(logger: logging.Logger, handler: logging.Handler) -> None:
    logger.removeHandler(handler)
    handler.close()


def _message(record: logging.LogRecord) -> str:
    try:
        return record.getMessage()
    except Exception:
        # A slip in a log call must not cost the record.
        return f"{_show(record.msg)} (arguments that do not fit: {_show(record.args)})"


def _show_time(seconds: float) -> str:
    moment = datetime.fromtimestamp(seconds, UTC)
    return f"{moment:%Y-%m-%dT%H:%M:%S}.{moment.microsecond // 1000:03}Z"


def _plain(value: object, depth: int = 0) -> object:
    """A value as JSON can hold it, no larger than a line of a log should be, and without secrets."""
    match value:
        case None | bool():
            return value
        case int():
            return int(value) if abs(value) <= _EXACT_INTEGER_MAX else _show(value)
        case float():
            return value if math.isfinite(value) else str(value)
        case Mapping() | list() | tuple() | set() | frozenset() | msgspec.Struct() if depth == DEPTH_MAX:
            return f"({type(value).__name__} too deep to show)"
        case msgspec.Struct():
            return _plain(msgspec.structs.asdict(value), depth)
        case Mapping():
            items = islice(value.items(), ITEMS_MAX)
            return dict(_plain_item(name, item, depth) for name, item in items)
        case list() | tuple() | set() | frozenset():
            return [_plain(item, depth + 1) for item in islice(value, ITEMS_MAX)]
        case _:
            return _shortened(_show(value))


def _plain_item(name: object, value: object, depth: int) -> tuple[str, object]:
    shown = _shortened(_show(name))
    secret = any(word in shown.lower() for word in _SECRETS)
    return shown, "(left out)" if secret else _plain(value, depth + 1)


def _show(value: object) -> str:
    """A text for any value, even one whose `str` raises."""
    if isinstance(value, bytes | bytearray):
        return value[: TEXT_CHARACTERS_MAX + 1].decode("utf-8", "backslashreplace")
    try:
        return _text(str(value))
    except Exception:
        return f"({type(value).__name__} that cannot be shown)"


def _text(text: str) -> str:
    # Half of a surrogate pair is no character, and strict readers of JSON refuse the whole line.
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


def _shortened(text: str) -> str:
    return text if len(text) <= TEXT_CHARACTERS_MAX else f"{text[:TEXT_CHARACTERS_MAX]}…"
