"""The epochs of streams from outside, and the version of each.

A job that writes a stream into a site, such as a Kafka topic through Spark, works in epochs, and writes an
interrupted epoch again.  An epoch's version V is drawn and stored when it is first opened, and never changes:
a key that was changed since V is left alone (`put_unchanged`).
"""

from collections.abc import Callable
from datetime import timedelta
from typing import Final

import msgspec

from floodmark.clock import TimeSource
from floodmark.codec.ordered import encode_namespace
from floodmark.engine import WriteRow
from floodmark.model.actions import SITE_OWNER
from floodmark.model.errors import InvalidArgument, InvalidName, LimitExceeded, NotAllowed
from floodmark.model.limits import (
    EPOCH_STREAM_IDLE_MAX,
    EPOCH_STREAMS_MAX,
    EPOCH_STREAMS_PER_CALLER_MAX,
    EPOCHS_REMEMBERED_MAX,
    NAMESPACE_NAME_CHARACTERS_MAX,
)
from floodmark.model.names import require_name
from floodmark.model.version import VERSION_MAX, Version
from floodmark.partition import META, Storage, load_metadata

_EPOCHS: Final = b"epochs/"
_EPOCH_MAX: Final = (1 << 63) - 1
# The least interval at which a use that opens no new epoch is stored.
_NOTED_EVERY: Final = timedelta(days=1)

_IDLE_MS_MAX: Final = EPOCH_STREAM_IDLE_MAX // timedelta(milliseconds=1)
_NOTED_EVERY_MS: Final = _NOTED_EVERY // timedelta(milliseconds=1)


class StreamRow(msgspec.Struct, frozen=True):
    """A stream as stored: when it was last used, and the versions of its last epochs."""

    namespace: int
    stream: str
    used_at_ms: int
    epochs: dict[int, Version]
    # Identifies the caller that writes it.  None if it was begun by a release without owners.
    owner: str | None = None


class Epochs:
    """Opens epochs of streams.  The stored rows are cached in memory, so most calls read nothing."""

    def __init__(
        self,
        storage: Storage,
        now: Callable[[], Version],
        time_source: TimeSource,
        is_live: Callable[[int], bool],
    ) -> None:
        self._storage = storage
        self._now = now
        self._time_source = time_source
        self._is_live = is_live
        self._streams: dict[bytes, StreamRow] = {}
        self._load()
        storage.on_recovery.append(self._load)

    def _load(self) -> None:
        rows = load_metadata(self._storage.engine, _EPOCHS, StreamRow)
        self._streams = {_key(row.namespace, row.stream): row for row in rows}

    def open(self, namespace: int, stream: str, epoch: int, owner: str = SITE_OWNER) -> Version:
        """The version of an epoch, drawn if it is new.  Raises NotAllowed if the stream has another owner."""
        require_stream(stream)
        if type(epoch) is not int or not 0 <= epoch <= _EPOCH_MAX:
            raise InvalidArgument(f"an epoch of stream {stream!r} is a number from 0 on, not {epoch!r:.60}")
        key, now_ms = _key(namespace, stream), self._time_source()
        row = self._streams.get(key)
        _require_own(row, owner)
        if row is not None and epoch in row.epochs and now_ms - row.used_at_ms < _NOTED_EVERY_MS:
            return row.epochs[epoch]
        # Above all writes before the call.  If another call opens the epoch meanwhile, its version
        # counts, and this one is discarded.
        version = self._now()
        with self._storage.settled():
            self._storage.require_not_dropped((encode_namespace(namespace),))
            known = self._streams.get(key)
            _require_own(known, owner)
            epochs = {} if known is None else dict(known.epochs)
            if epoch not in epochs:
                self._storage.require_wanted()
                _require_next(stream, epoch, epochs)
                epochs[epoch] = version
            last = dict(sorted(epochs.items())[-EPOCHS_REMEMBERED_MAX:])
            # A permitted caller other than the owner, such as an administrator, does not become the owner.
            keeper = owner if known is None or known.owner is None else known.owner
            self._store(key, StreamRow(namespace, stream, now_ms, last, keeper))
            return last[epoch]

    def oldest_version(self, namespace: int) -> Version:
        """The lowest remembered version: epochs written again need the tombstones above it."""
        rows = [row for row in self._streams.values() if row.namespace == namespace and self._is_used(row)]
        return min((min(row.epochs.values()) for row in rows), default=VERSION_MAX)

    def _store(self, key: bytes, row: StreamRow) -> None:
        """Store a stream.  A new one replaces streams that are no longer used."""
        streams = dict(self._streams)
        if key not in streams:
            streams = {held: other for held, other in streams.items() if self._is_used(other)}
            of_caller = sum(other.owner == row.owner for other in streams.values())
            is_limited = row.owner != SITE_OWNER and of_caller >= EPOCH_STREAMS_PER_CALLER_MAX
            if is_limited or len(streams) >= EPOCH_STREAMS_MAX:
                raise LimitExceeded(
                    f"a site remembers the epochs of at most {EPOCH_STREAMS_MAX:,} streams, of one caller "
                    f"{EPOCH_STREAMS_PER_CALLER_MAX:,}, each until {EPOCH_STREAM_IDLE_MAX.days} days after "
                    "its last use; write fewer, or use their names again"
                )
        forgotten: list[WriteRow] = [(META, held, None) for held in self._streams.keys() - streams.keys()]
        self._storage.store_in_portions([*forgotten, (META, key, msgspec.json.encode(row))])
        self._streams = streams | {key: row}

    def _is_used(self, row: StreamRow) -> bool:
        return self._is_live(row.namespace) and self._time_source() - row.used_at_ms < _IDLE_MS_MAX


def require_stream(stream: object) -> None:
    """Check the name of a stream: one or more parts with slashes between them, such as WRITER/TOPIC."""
    if not isinstance(stream, str) or len(stream) > NAMESPACE_NAME_CHARACTERS_MAX:
        raise InvalidName(
            f"{stream!r:.200} cannot name a stream: use at most {NAMESPACE_NAME_CHARACTERS_MAX} characters"
        )
    for part in stream.split("/"):
        require_name(part, "stream")


def _require_own(row: StreamRow | None, owner: str) -> None:
    if row is None or owner == SITE_OWNER or row.owner in (None, owner):
        return
    raise NotAllowed(
        f"stream {row.stream!r} is written by another caller, and only that one, or an administrator of the "
        "whole site, opens its epochs; write under another name (in Spark, with a new checkpoint location)",
        stream=row.stream,
    )


def _require_next(stream: str, epoch: int, epochs: dict[int, Version]) -> None:
    """Refuse an earlier epoch that is not remembered: drawn now, it would overwrite later ones."""
    if epochs and epoch < max(epochs):
        raise LimitExceeded(
            f"epoch {epoch} of stream {stream!r} lies before epoch {max(epochs)}, and its version is not "
            f"known: the last {EPOCHS_REMEMBERED_MAX} epochs are remembered, here {min(epochs)} and later. "
            "To write older data again, do it under the name of a new stream (in Spark, with a new "
            "checkpoint location)",
            stream=stream,
            epoch=epoch,
        )


def _key(namespace: int, stream: str) -> bytes:
    return _EPOCHS + encode_namespace(namespace) + stream.encode()
