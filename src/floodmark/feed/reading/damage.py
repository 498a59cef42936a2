"""Damaged changes: whether a feed stops at one, and which ones it left out.

Records are checked on their way into a partition, so damage comes from a disk, or from a release that checked
less.  A reader that must go on leaves the change out and reports it: the sink lacks it until the key is
written again.
"""

import logging
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from enum import StrEnum
from typing import Final, TypeAlias

import msgspec

from floodmark.model.errors import Corruption
from floodmark.model.version import Version

# How many skipped changes a feed lists; the log has all.
SKIPPED_KEPT: Final = 100
_REASON_CHARACTERS_MAX: Final = 200

_log = logging.getLogger("floodmark.feed")

# Called with the error of a damaged change, which is left out unless this raises.
OnDamaged: TypeAlias = Callable[[Corruption], object]


class OnCorrupt(StrEnum):
    """What a reader does at a damaged change."""

    FAIL = "fail"
    """The reader stops at it with `Corruption`."""

    REPORT = "report"
    """It is left out and listed, with an error in the log."""

    SKIP = "skip"
    """It is left out and listed."""


class SkippedChange(msgspec.Struct, frozen=True):
    """A damaged change that was left out."""

    key: bytes
    version: Version
    reason: str = ""

    @classmethod
    def of(cls, error: Corruption) -> "SkippedChange":
        """The change that an error is about."""
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
        """Note a damaged change, or raise its error."""
        if self._policy is OnCorrupt.FAIL:
            raise error
        level = logging.ERROR if self._policy is OnCorrupt.REPORT else logging.INFO
        _log.log(level, "feed %s leaves out: %s", self._feed, error, extra={"feed": self._feed})
        self._skipped.append(SkippedChange.of(error))

    def skipped(self) -> tuple[SkippedChange, ...]:
        """The last changes that were left out."""
        return tuple(self._skipped)


def join_skipped(known: Sequence[SkippedChange], told: Iterable[SkippedChange]) -> list[SkippedChange]:
    """All skipped changes, each once; a runner reports some repeatedly."""
    return list(dict.fromkeys([*known, *told]))
