"""Gives freed memory back to the system.

Streams take megabytes each, in short-lived threads, and the C library keeps the memory that they free.  It is
configured to keep little beyond the blocks of a batch of writes, and to return the rest after large uses.
"""

import ctypes
from typing import Final

import pyarrow

from floodmark.clock import TimeSource
from floodmark.model.limits import MIB

GIVE_BACK_EVERY_MS: Final = 2_000

# The numbers of three settings of the C library of most Linux systems; others return memory without them.
_TRIM_THRESHOLD: Final = -1
_MMAP_THRESHOLD: Final = -3
_ARENAS_MAX: Final = -8

_SETTINGS: Final = {_TRIM_THRESHOLD: 4 * MIB, _MMAP_THRESHOLD: 2 * MIB, _ARENAS_MAX: 2}

_library: Final = ctypes.CDLL(None)
_set = getattr(_library, "mallopt", None)
_trim = getattr(_library, "malloc_trim", None)


def keep_little() -> None:
    """Configure the C library to keep little freed memory, in this process and from now on."""
    if _set is not None:
        for setting, value in _SETTINGS.items():
            _set(setting, value)


def give_back() -> None:
    """Return all free memory to the system."""
    pyarrow.default_memory_pool().release_unused()
    if _trim is not None:
        _trim(0)


class FreedMemory:
    """Returns freed memory to the system after large uses, at most every GIVE_BACK_EVERY_MS."""

    def __init__(self, time_source: TimeSource) -> None:
        self._time_source = time_source
        self._given_back_at_ms = time_source()
        self._much_used = False

    def note_much_used(self) -> None:
        """Note that a caller has used much memory and freed it again."""
        self._much_used = True

    def give_back_if_due(self) -> None:
        """Return free memory if a caller has used much and enough time has passed.  Called periodically."""
        now_ms = self._time_source()
        if self._much_used and now_ms - self._given_back_at_ms >= GIVE_BACK_EVERY_MS:
            self._much_used = False
            self._given_back_at_ms = now_ms
            give_back()
