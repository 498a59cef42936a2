"""Text for people and programs: bytes, durations, versions and moments on a command line or in an option.

A key or a value is UTF-8 text, or hexadecimal after `0x`.  A version is a number, or a moment in ISO 8601; a
moment without a time zone is refused, because it is ambiguous.
"""

import re
from base64 import b64encode
from datetime import datetime, timedelta
from typing import Final

from floodmark.model.version import Version, version_at

# In milliseconds.
DURATION_UNITS: Final = {
    "w": 604_800_000,
    "d": 86_400_000,
    "h": 3_600_000,
    "m": 60_000,
    "s": 1_000,
    "ms": 1,
}
_DURATION: Final = re.compile(r"(\d+(?:\.\d+)?)(ms|s|m|h|d|w)")


def read_bytes(text: str) -> bytes:
    """A key or value as it was typed.

    >>> read_bytes("ada"), read_bytes("0x00ff")
    (b'ada', b'\\x00\\xff')
    """
    if not text.startswith("0x"):
        # Arguments that are not UTF-8 arrive with their odd bytes escaped.
        return text.encode("utf-8", "surrogateescape")
    if re.fullmatch(r"0x([0-9a-fA-F]{2})*", text) is None:
        raise ValueError(
            f"{text!r:.60} starts with 0x but is not whole bytes of hexadecimal; for text that starts "
            f"with 0x, type it as hexadecimal: 0x{text.encode('utf-8', 'surrogateescape').hex():.40}"
        )
    return bytes.fromhex(text[2:])


def show_bytes(data: bytes) -> str:
    """Bytes for people, in the form that `read_bytes` takes.

    >>> show_bytes(b"ada"), show_bytes(b"a\\nb"), show_bytes(b"0x1")
    ('ada', '0x610a62', '0x307831')
    """
    try:
        text = data.decode()
    except UnicodeDecodeError:
        return "0x" + data.hex()
    return text if text.isprintable() and not text.startswith("0x") else "0x" + data.hex()


def read_duration(text: str) -> timedelta:
    """A length of time such as `90s`, `24h`, `7d` or `1h30m`.

    >>> read_duration("1h30m"), read_duration("250ms")
    (datetime.timedelta(seconds=5400), datetime.timedelta(microseconds=250000))
    """
    parts = _DURATION.findall(text)
    if not parts or "".join(number + unit for number, unit in parts) != text:
        raise ValueError(f"{text!r:.60} is not a duration; write for example 90s, 24h, 7d or 1h30m")
    try:
        return sum(
            (timedelta(milliseconds=float(n) * DURATION_UNITS[unit]) for n, unit in parts), timedelta()
        )
    except OverflowError as error:
        raise ValueError(f"{text!r:.60} is longer than can be counted; give at most 999999999d") from error


def read_at(text: str) -> Version:
    """A version, or the version of a moment in ISO 8601 with its time zone.

    >>> read_at("411225436913926252"), read_at("2026-01-02T04:04:05+01:00")
    (411225436913926252, 463293132308742143)
    """
    if text.isascii() and text.isdigit():
        return int(text)
    try:
        moment = datetime.fromisoformat(text)
    except ValueError as error:
        raise ValueError(
            f"{text!r:.60} is neither a version nor a time; write for example 2026-01-31T12:00:00Z"
        ) from error
    if moment.tzinfo is None:
        raise ValueError(f"{text!r} has no time zone; add Z for UTC, or an offset such as +02:00")
    return version_at(moment)


def json_bytes(name: str, data: bytes | None) -> dict[str, str | None]:
    """Bytes for programs: one field, whose name shows how they are encoded.

    >>> json_bytes("key", b"ada"), json_bytes("key", bytes([255])), json_bytes("value", None)
    ({'key': 'ada'}, {'key_base64': '/w=='}, {'value': None})
    """
    if data is None:
        return {name: None}
    try:
        return {name: data.decode()}
    except UnicodeDecodeError:
        return {f"{name}_base64": b64encode(data).decode()}
