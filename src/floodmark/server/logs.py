"""Logs as one JSON object a line, always ASCII; a value that JSON does not know becomes text.

Only the logger "floodmark" is configured: other loggers belong to the program that runs the server.
"""

import json
import logging
import math
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from itertools import islice
from logging.handlers import WatchedFileHandler
from pathlib import Path
from typing import Final, TextIO

import msgspec

from floodmark.model.actions import Action
from floodmark.model.errors import InvalidConfiguration
from floodmark.server.access import Caller

CONTEXT: Final = ("site", "node", "partition", "feed", "caller", "role", "action", "arguments")
TEXT_CHARACTERS_MAX: Final = 1_000
ITEMS_MAX: Final = 100
DEPTH_MAX: Final = 4

_SECRETS: Final = ("token", "password", "secret", "credential", "authorization", "private", "tls_key")
# Many readers of JSON keep numbers as floats and would round larger ones, such as versions.
_EXACT_INTEGER_MAX: Final = 1 << 53

_audit = logging.getLogger("floodmark.audit")


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
    """Send Floodmark's logs to stderr, a stream or a file, in the place of an earlier call; returns its undo.

    A file that log rotation has moved away is opened anew.
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


def log_action(caller: Caller, name: str, action: Action, arguments: Mapping[str, object]) -> None:
    """Note that a caller was let do what it asked for.  Arguments that hold values are left out."""
    said = {key: value for key, value in arguments.items() if key not in action.unsaid}
    log_administration(caller, name, said)


def log_administration(caller: Caller, action: str, arguments: Mapping[str, object]) -> None:
    """Note who has done what to the site.  Arguments that may be secret are left out."""
    _audit.info(
        "%s: %s",
        caller.name,
        action,
        extra={
            "caller": caller.name,
            "role": str(caller.role),
            "action": action,
            "arguments": arguments,
        },
    )


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
    """Text of anything, even of what cannot say what it is."""
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
