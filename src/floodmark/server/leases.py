"""Versions that clients are reading, kept from garbage collection for as long as they say so.

A reader of this process holds a safe point while it is open.  A client's stream does as well, but a
client that pauses loses its stream after a while, and one that reads several partitions has none
between two of them.  So it asks to hold the version, and asks again before the lease is over; one that
has vanished holds nothing for long.  Leases are not stored: after a restart a client asks again.
"""

import secrets
from contextlib import ExitStack
from threading import Lock
from typing import Final, NamedTuple

from floodmark.clock import TimeSource
from floodmark.model.errors import Retryable
from floodmark.model.version import Version
from floodmark.site.host import Host

LEASE_MS: Final = 60_000
LEASES_MAX: Final = 10_000


class _Lease(NamedTuple):
    caller: str
    expires_at_ms: int
    held: ExitStack


class Leases:
    """The leases of a server.  `time_source` only measures how long they last."""

    def __init__(self, host: Host, time_source: TimeSource, *, lease_ms: int = LEASE_MS) -> None:
        self._host = host
        self._time_source = time_source
        self._lease_ms = lease_ms
        self._leases: dict[int, _Lease] = {}
        self._lock = Lock()

    def __len__(self) -> int:
        return len(self._leases)

    def hold(self, caller: str, version: Version, namespace: int, earlier: int | None) -> int:
        """Hold a version of a namespace, in the place of an earlier lease; the number of the new one.

        The earlier one is let go only when the new one holds, so that there is no gap between them.
        """
        if len(self._leases) >= LEASES_MAX:
            raise Retryable(f"clients hold {LEASES_MAX:,} versions, and no more can be held; try again later")
        held = ExitStack()
        held.enter_context(self._host.reading(version, namespace))
        number = secrets.randbits(62)
        with self._lock:
            expires_at_ms = self._time_source() + self._lease_ms
            self._leases[number] = _Lease(caller, expires_at_ms, held)
        if earlier is not None:
            self.release(caller, earlier)
        return number

    def release(self, caller: str, number: int) -> None:
        """Let go.  A lease that is over, or somebody else's, is left alone."""
        with self._lock:
            lease = self._leases.get(number)
            if lease is None or lease.caller != caller:
                return
            del self._leases[number]
        lease.held.close()

    def expire(self) -> None:
        """Let go of what was not renewed."""
        now_ms = self._time_source()
        with self._lock:
            over = [number for number, lease in self._leases.items() if lease.expires_at_ms <= now_ms]
            leases = [self._leases.pop(number) for number in over]
        for lease in leases:
            lease.held.close()

    def close(self) -> None:
        """Let go of everything."""
        with self._lock:
            leases, self._leases = list(self._leases.values()), {}
        for lease in leases:
            lease.held.close()
