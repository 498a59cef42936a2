"""Renders bytes, versions and durations as text.

Text for people can be pasted back (`model/text.py`): bytes that are not plain printable text, or
that would be mistaken for hexadecimal, are shown as `0x…`.

In JSON, bytes that are UTF-8 are text under their name (`key`), all others base64 under the name with the
suffix `_base64` (`key_base64`).  Versions are strings: they need 64 bits, and many JSON readers round numbers
above 2**53, which would move a checkpoint.
"""

from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from typing import Final

from rich.cells import cell_len

from floodmark.model import KeyRange, Resolved, Version
from floodmark.model.text import DURATION_UNITS, show_bytes
from floodmark.model.version import MOMENT_SECONDS_MAX, moment_of

BARS: Final = " ▁▂▃▄▅▆▇█"
PLAIN_BARS: Final = " .:-=+*#@"


def show_text(text: str) -> str:
    r"""A text that other users may have written, on one line, with control characters as escapes.

    >>> print(show_text("a\x1b[2Jb"), show_text("one\ntwo"), show_text("blåbær"))
    a\x1b[2Jb one\ntwo blåbær
    """
    if text.isprintable():
        return text
    return "".join(
        character if character.isprintable() else character.encode("unicode_escape").decode()
        for character in text
    )


def show_duration(duration: timedelta | None) -> str:
    """A length of time, in the form that `read_duration` takes; `none` for None.

    >>> show_duration(timedelta(hours=36)), show_duration(timedelta(seconds=90)), show_duration(None)
    ('1d12h', '1m30s', 'none')
    """
    if duration is None:
        return "none"
    left = duration // timedelta(milliseconds=1)
    shown = ""
    for unit, size in list(DURATION_UNITS.items())[1:]:
        count, left = divmod(left, size)
        shown += f"{count}{unit}" if count else ""
    return shown or "0s"


def show_keys(keys: KeyRange) -> str:
    """A range of user keys.

    >>> show_keys(KeyRange()), show_keys(KeyRange(b"a", b"b"))
    ('from the first to the last', 'from a to before b')
    """
    start = f"from {show_bytes(keys.start)}" if keys.start else "from the first"
    return f"{start} to the last" if keys.end is None else f"{start} to before {show_bytes(keys.end)}"


def show_place(place: Resolved) -> str:
    """A place in a stream of changes, in the form that `read_since` takes.

    >>> show_place(Resolved(411225436913926252, b"")), show_place(Resolved(411225436913926252))
    ('411225436913926252@0x', '411225436913926252')
    """
    return str(place.version) if place.snapshot is None else f"{place.version}@0x{place.snapshot.hex()}"


def show_moment(moment: datetime) -> str:
    """A moment in UTC, to the millisecond.

    >>> show_moment(datetime(2026, 1, 2, tzinfo=UTC))
    '2026-01-02T00:00:00.000Z'
    """
    return moment.astimezone(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def show_time(version: Version) -> str:
    """The moment of a version."""
    return show_moment(moment_of(version))


def show_version(version: Version) -> str:
    """A version with its moment; 0 stands for "from the beginning"."""
    return f"{version}  {show_time(version)}" if version else "0  from the beginning"


def show_lag(lag_ms: int) -> str:
    """A lag, with a precision that fits its length.

    >>> show_lag(7), show_lag(12_345), show_lag(90_061_000)
    ('7 ms', '12.3 s', '1d1h1m1s')
    """
    if lag_ms < 1_000:
        return f"{lag_ms} ms"
    if lag_ms < 60_000:
        return f"{lag_ms / 1000:.1f} s"
    return show_duration(timedelta(seconds=lag_ms // 1000))


def show_expiry(expires_at: int | None) -> str | None:
    """The second at which a record expires, as a moment in UTC."""
    if expires_at is None:
        return None
    seconds = min(expires_at, MOMENT_SECONDS_MAX)
    return datetime.fromtimestamp(seconds, UTC).isoformat().replace("+00:00", "Z")


def show_size(size: int) -> str:
    """A number of bytes.

    >>> show_size(999), show_size(1536), show_size(3 * 1024**3)
    ('999 bytes', '1.5 KiB', '3.0 GiB')
    """
    if size < 1024:
        return f"{size} bytes"
    amount = float(size)
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if amount < 1024:
            return f"{amount:.1f} {unit}"
        amount /= 1024
    return f"{amount:.1f} TiB"


def show_count(count: int, one: str) -> str:
    """A number and the thing that it counts.

    >>> show_count(1, "key"), show_count(2000, "key")
    ('1 key', '2,000 keys')
    """
    return f"{count:,} {one}{'' if count == 1 else 's'}"


def align(rows: Sequence[Sequence[str]]) -> list[str]:
    """Rows as lines with their columns under each other.

    >>> align([("a", "bc", "d"), ("aaa", "b", "")])
    ['a    bc  d', 'aaa  b']
    """
    widths = [max(map(cell_len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            cell + " " * (width - cell_len(cell)) for cell, width in zip(row, widths, strict=True)
        ).rstrip()
        for row in rows
    ]


def draw_bar(value: float, top: float, width: int, bars: str = BARS) -> str:
    """A bar as long as the value's share of the top; a value above 0 has at least one cell.

    >>> draw_bar(3, 4, 8), draw_bar(1, 1000, 8), draw_bar(0, 4, 8)
    ('██████', '█', '')
    """
    length = round(value / top * width) if top > 0 else 0
    return bars[-1] * (max(1, length) if value > 0 else 0)


def draw_sparkline(values: Sequence[float], top: float, bars: str = BARS) -> str:
    """Values as a row of small bars, one a value.

    >>> draw_sparkline([0, 1, 4, 8], 8)
    ' ▁▄█'
    """
    steps = len(bars) - 1
    heights = [max(1, round(value / top * steps)) if value > 0 and top > 0 else 0 for value in values]
    return "".join(bars[min(height, steps)] for height in heights)
