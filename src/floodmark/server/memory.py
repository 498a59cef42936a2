"""Gives freed memory back to the system.

Streams take megabytes each, in threads that come and go, and the C library keeps what they free.  It is told
to keep little, except what a batch of writes is made of, and to give back the rest after large uses.
"""

import ctypes
from typing import Final

import pyarrow

from floodmark.clock import TimeSource
from floodmark.model.limits import MIB

GIVE_BACK_EVERY_MS: Final = 2_000

# The numbers of three settings of the C library of most Linux systems; others give back by themselves.
_TRIM_THRESHOLD: Final = -1
_MMAP_THRESHOLD: Final = -3
_ARENAS_MAX: Final = -8

_SETTINGS: Final = {_TRIM_THRESHOLD: 4 * MIB, _MMAP_THRESHOLD: 2 * MIB, _ARENAS_MAX: 2}

_library: Final = ctypes.CDLL(None)
_set = getattr(_library, "mallopt", None)
_trim = getattr(_library, "malloc_trim", None)


def keep_little() -> None:
    """Let the C library keep little of what is freed, in this process and from now on."""
    if _set is not None:
        for setting, value in _SETTINGS.items():
            _set(setting, value)


def give_back() -> None:
    """Give everything that is free back to the system."""
    pyarrow.default_memory_pool().release_unused()
    if _trim is not None:
        _trim(0)


class FreedMemory:
    """Gives freed memory back to the system after large uses, and not too often."""

    def __init__(self, time_source: TimeSource) -> None:
        self._time_source = time_source
        self._given_back_at_ms = time_source()
        self._much_used = False

    def note_much_used(self) -> None:
        """Note that a caller has used much memory and freed it again."""
        self._much_used = True

    def give_back_if_due(self) -> None:
        """Give back what is free.  Called again and again."""
        now_ms = self._time_source()
        if self._much_used and now_ms - self._given_back_at_ms >= GIVE_BACK_EVERY_MS:
            self._much_used = False
            self._given_back_at_ms = now_ms
            give_back()
