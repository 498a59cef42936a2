"""Decodes batches of stored bytes into the changes that users see.

Records are checked on their way into a partition, so a damaged change comes from a disk, or from a release
that checked less.  A reader that must go on leaves it out and reports it: its sink lacks the change until the
key is written again.
"""

import logging
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from enum import StrEnum
from itertools import repeat
from typing import Final, TypeAlias

import msgspec
from msgspec.structs import replace

from floodmark.clock.hybrid import SKEW_MS_MAX
from floodmark.codec.ordered import NAMESPACE_BYTES, encode_namespace
from floodmark.codec.states import render_value
from floodmark.codec.values import PLAIN, decode_value
from floodmark.feed.reading.columns import moment_before
from floodmark.model.change import Change, ChangeType, Heartbeat, Resolved, Stamp
from floodmark.model.errors import Corruption
from floodmark.model.record import Record
from floodmark.model.stream import ChangeBatch
from floodmark.model.version import Version, physical_ms

Item: TypeAlias = Change | Resolved | Heartbeat
_Images: TypeAlias = tuple[tuple[ChangeType, Record], ...]
_DEAD: Final = Record(b"", deleted=True)

# How many skipped changes a feed lists; the log has all.
SKIPPED_KEPT: Final = 100
_REASON_CHARACTERS_MAX: Final = 200

_log = logging.getLogger("floodmark.feed")

# Called with the error of a damaged change.  The change is skipped unless this raises.
OnDamaged: TypeAlias = Callable[[Corruption], object]


class OnCorrupt(StrEnum):
    """The reaction of a reader to a damaged change."""

    # The reader raises `Corruption`.
    FAIL = "fail"
    # The change is skipped and listed, and logged as an error.
    REPORT = "report"
    # The change is skipped and listed.
    SKIP = "skip"


class SkippedChange(msgspec.Struct, frozen=True):
    """A damaged change that was skipped."""

    key: bytes
    version: Version
    reason: str = ""

    @classmethod
    def of(cls, error: Corruption) -> "SkippedChange":
        """The skipped change of an error."""
        key, version = error.details.get("key"), error.details.get("version")
        return cls(
            key if isinstance(key, bytes) else b"",
            version if isinstance(version, int) else 0,
            str(error)[:_REASON_CHARACTERS_MAX],
        )


class Damage:
    """The damaged changes of one range of a feed."""

    def __init__(self, feed: str, policy: OnCorrupt) -> None:
        self._feed = feed
        self._policy = policy
        self._skipped: deque[SkippedChange] = deque(maxlen=SKIPPED_KEPT)

    def __call__(self, error: Corruption) -> None:
        """Record a damaged change, or raise its error."""
        if self._policy is OnCorrupt.FAIL:
            raise error
        level = logging.ERROR if self._policy is OnCorrupt.REPORT else logging.INFO
        _log.log(level, "feed %s leaves out: %s", self._feed, error, extra={"feed": self._feed})
        self._skipped.append(SkippedChange.of(error))

    def skipped(self) -> tuple[SkippedChange, ...]:
        return tuple(self._skipped)


def join_skipped(known: Sequence[SkippedChange], told: Iterable[SkippedChange]) -> list[SkippedChange]:
    """All skipped changes, each once; a runner reports some repeatedly."""
    return list(dict.fromkeys([*known, *told]))


class Decoder:
    """Decodes batches into changes.

    A put that has expired when it is read becomes a delete, as does the expiry itself: a reader that copies
    them must not bring the record back to life.  Such a delete has an `expires_at`.  Changes of a namespace
    whose name is no longer known are left out.
    """

    def __init__(
        self, site_id: int, names: Callable[[], Mapping[int, str]], physical_ms: Callable[[], int]
    ) -> None:
        self._site_id = site_id
        self._load_names = names
        self._physical_ms = physical_ms
        self._names: dict[bytes, str | None] = {}

    def decode(self, batch: ChangeBatch, on_damaged: OnDamaged | None = None) -> list[Change]:
        """The changes of a batch, in its order.

        A damaged change is passed to `on_damaged` as an error, and skipped unless that raises.  Without
        `on_damaged`, `Corruption` is raised.
        """
        if not batch.keys:
            return []
        if batch.is_marker:
            return self._decode_marker(batch)
        flags = [stored[-1:] for stored in batch.values]
        if batch.befores is None and flags.count(PLAIN) == len(flags):
            plain = self._decode_plain(batch)
            if plain is not None:
                return plain
        return list(self._decode_rows(batch, on_damaged))

    def _decode_plain(self, batch: ChangeBatch) -> list[Change] | None:
        """`decode` of puts of one namespace, with no expiry or origin, which most batches consist of.

        Column by column, without a line of Python for each change.  None if they are of several namespaces.
        """
        encoded = min(batch.keys)[:NAMESPACE_BYTES]
        if not max(batch.keys).startswith(encoded):
            return None
        name = self._name(encoded)
        if name is None:
            return []
        return list(
            map(
                Change,
                repeat(name),
                [key[NAMESPACE_BYTES:] for key in batch.keys],
                [stored[:-1] for stored in batch.values],
                repeat(ChangeType.UPSERT),
                repeat(batch.at) if batch.is_snapshot else batch.versions,
                map(Stamp, batch.versions, repeat(self._site_id)),
                batch.partitions,
                repeat(None),
                repeat(batch.is_snapshot),
            )
        )

    def _decode_marker(self, batch: ChangeBatch) -> list[Change]:
        """The marker of a swap, as a change of type `generation`."""
        [key], [version] = batch.keys, batch.versions
        name, stamp = self._name(key), Stamp(version, self._site_id)
        if name is None:
            return []
        kind, is_snapshot = ChangeType.GENERATION, batch.is_snapshot
        return [Change(name, b"", None, kind, version, stamp, 0, snapshot=is_snapshot)]

    def items(
        self, batch: ChangeBatch, *, resolved_markers: bool, on_damaged: OnDamaged | None = None
    ) -> Iterator[Item]:
        """The changes and heartbeats in version order and, if asked for, a `Resolved` marker at the end."""
        changes = self.decode(batch, on_damaged)
        if batch.heartbeats:
            merged: list[Change | Heartbeat] = [*changes, *batch.heartbeats]
            yield from sorted(merged, key=_version)
        else:
            yield from changes
        if resolved_markers:
            yield Resolved(batch.through, batch.snapshot)

    def _decode_rows(self, batch: ChangeBatch, on_damaged: OnDamaged | None) -> Iterator[Change]:
        now_ms = self._physical_ms()
        befores = [None] * len(batch.keys) if batch.befores is None else batch.befores
        for version, partition, key, stored, before in zip(
            batch.versions, batch.partitions, batch.keys, batch.values, befores, strict=True
        ):
            name = self._name(key[:NAMESPACE_BYTES])
            if name is None:
                continue
            user_key, at_ms = key[NAMESPACE_BYTES:], judged_ms(version, now_ms)
            record = _decode(user_key, version, stored, at_ms, on_damaged)
            earlier = None
            if before is not None:
                earlier = _decode(user_key, version, before, moment_before(version, stored), on_damaged)
            if record is None:
                continue
            is_dead = record.is_dead_at(at_ms)
            if batch.befores is None:
                images: _Images = ((ChangeType.DELETE if is_dead else ChangeType.UPSERT, record),)
            elif is_dead:
                # An absent or damaged record has no image.
                images = ((ChangeType.DELETE, earlier or _DEAD),)
            elif earlier is None or earlier.deleted:
                images = ((ChangeType.INSERT, record),)
            else:
                images = ((ChangeType.UPDATE_PREIMAGE, earlier), (ChangeType.UPDATE_POSTIMAGE, record))
            for kind, image in images:
                yield Change(
                    name,
                    user_key,
                    None if image.deleted or (image is record and is_dead) else image.value,
                    kind,
                    batch.at if batch.is_snapshot else version,
                    record.origin or Stamp(version, self._site_id),
                    partition,
                    image.expires_at,
                    batch.is_snapshot,
                    version if record.batched else None,
                )

    def _name(self, encoded: bytes) -> str | None:
        if encoded not in self._names:
            known = {encode_namespace(namespace): name for namespace, name in self._load_names().items()}
            self._names.update(known)
            self._names.setdefault(encoded, None)
        return self._names[encoded]


def judged_ms(version: Version, now_ms: int) -> int:
    """The time at which to judge the expiry of a change: now, or its version's time if slightly later.

    >>> judged_ms(5_000 << 18, 4_800), judged_ms(5_000 << 18, 6_000)
    (5000, 6000)
    """
    return max(now_ms, min(physical_ms(version), now_ms + SKEW_MS_MAX))


def snapshot_ms(version: Version, now_ms: int) -> int:
    """The time at which to judge expiry in a snapshot: that of its version, unless this is far ahead.

    It is ahead if the site's clock was set back, and then the site judges by the clock.

    >>> snapshot_ms(5_000 << 18, 4_800), snapshot_ms(5_000 << 18, 6_000), snapshot_ms(5_000 << 18, 1_000)
    (5000, 5000, 1500)
    """
    return min(physical_ms(version), now_ms + SKEW_MS_MAX)


def _version(item: Change | Heartbeat) -> Version:
    return item.version


def _decode(
    user_key: bytes, version: Version, stored: bytes, at_ms: int, on_damaged: OnDamaged | None
) -> Record | None:
    """The decoded record without the fields that have expired at a time; None if it is damaged."""
    if stored[-1:] == PLAIN:
        return Record(stored[:-1])
    try:
        record = decode_value(stored)
        if record.stamps is None or record.is_dead_at(at_ms):
            return record
        return replace(record, value=render_value(record, at_ms))
    except Corruption as error:
        damaged = Corruption(
            f"the change of {user_key!r:.60} at version {version} is damaged: {error}. Restore it from a "
            "backup or from a peer, or overwrite it; a reader gets past it with --on-corrupt skip",
            key=user_key,
            version=version,
        )
        if on_damaged is None:
            raise damaged from error
        on_damaged(damaged)
        return None
