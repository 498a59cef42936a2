"""`stdout:` prints each change as a JSON object on a line of its own, as `floodmark changes --json` does.

UTF-8 bytes are text under their name, other bytes are base64 under the name with the suffix `_base64`.
Versions are strings, because many readers of JSON round large numbers.

A change that is delivered again is printed again.  A reader recognizes it by namespace, key and version.
"""

import sys
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from threading import Lock
from typing import BinaryIO, Final

import msgspec

from floodmark.feed.sinks.base import Sink, SinkAddress, SinkContext
from floodmark.model.change import Change
from floodmark.model.errors import Closed
from floodmark.model.text import json_bytes
from floodmark.model.version import MOMENT_SECONDS_MAX, Version, moment_of

_printing: Final = Lock()


class StdoutSink:
    """Prints lines to a stream of bytes, which stays open."""

    def __init__(self, stream: BinaryIO) -> None:
        self._stream = stream
        self._closed = False

    def write(self, changes: Sequence[Change], *, since: Version, through: Version) -> None:
        if self._closed:
            raise Closed("the sink stdout: was closed; open it again")
        self._call(lambda: self._print(b"".join(map(encode_line, changes))))

    def _print(self, lines: bytes) -> None:
        left = memoryview(lines)
        # Ranges that write at the same time must not mix their lines.
        with _printing:
            while left:
                # An unbuffered stream writes only as much as the pipe takes.
                left = left[self._stream.write(left) :]

    def flush(self) -> None:
        self._call(self._stream.flush)

    def close(self) -> None:
        self._closed = True

    def _call(self, operation: Callable[[], object]) -> None:
        try:
            operation()
        except (BrokenPipeError, ValueError) as error:
            raise Closed("the output was closed by its reader; start the feed again") from error


def encode_line(change: Change) -> bytes:
    return msgspec.json.encode(change_fields(change)) + b"\n"


def change_fields(change: Change) -> dict[str, object]:
    """The fields of a change to show, by name."""
    return {
        "namespace": change.namespace,
        **json_bytes("key", change.key),
        "type": change.type.value,
        **json_bytes("value", change.value),
        "version": str(change.version),
        "time": _show(moment_of(change.version), "milliseconds"),
        "partition": change.partition,
        "origin_version": str(change.stamp.version),
        "origin_site_id": change.stamp.site,
        "expires_at": _show_expiry(change.expires_at),
        "snapshot": change.snapshot,
        "batch": None if change.batch is None else str(change.batch),
    }


def open_sink(address: SinkAddress, _context: SinkContext) -> Sink:
    address.require_empty()
    address.require_known(())
    return StdoutSink(sys.stdout.buffer)


def _show(moment: datetime, precision: str) -> str:
    return moment.isoformat(timespec=precision).replace("+00:00", "Z")


def _show_expiry(expires_at: int | None) -> str | None:
    if expires_at is None:
        return None
    return _show(datetime.fromtimestamp(min(expires_at, MOMENT_SECONDS_MAX), UTC), "seconds")
