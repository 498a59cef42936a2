"""Leases keep the versions that clients read from garbage collection, until they are released or expire.

A client renews the lease of a version between its streams, and while it pauses.  Leases are not stored: after
a restart, a client takes a new one.
"""

import secrets
from collections import Counter
from contextlib import ExitStack
from threading import Lock
from typing import Final, NamedTuple

from floodmark.clock import TimeSource
from floodmark.host.ports import Host
from floodmark.model.errors import Retryable
from floodmark.model.limits import LEASES_MAX, LEASES_PER_CALLER_MAX
from floodmark.model.version import Version

LEASE_MS: Final = 60_000


class _Lease(NamedTuple):
    caller: str
    expires_at_ms: int
    held: ExitStack


class Leases:
    """The leases of a server.  `time_source` measures how long they last."""

    def __init__(self, host: Host, time_source: TimeSource, *, lease_ms: int = LEASE_MS) -> None:
        self._host = host
        self._time_source = time_source
        self._lease_ms = lease_ms
        self._leases: dict[int, _Lease] = {}
        self._held_by: Counter[str] = Counter()
        self._lock = Lock()

    def __len__(self) -> int:
        return len(self._leases)

    def hold(self, caller: str, version: Version, namespace: int, earlier: int | None) -> int:
        """Hold a version of a namespace, then release the earlier lease; returns the new lease's number.

        Raises Retryable if the clients together, or the caller alone, hold too many leases.
        """
        if len(self._leases) >= LEASES_MAX:
            raise Retryable(f"clients hold {LEASES_MAX:,} versions, and no more can be held; try again later")
        renewed = None if earlier is None else self._leases.get(earlier)
        is_renewal = renewed is not None and renewed.caller == caller
        if not is_renewal and self._held_by[caller] >= LEASES_PER_CALLER_MAX:
            raise Retryable(
                f"{caller!r} holds {LEASES_PER_CALLER_MAX:,} versions, and may hold no more; close some "
                "scans and readers, or try again later"
            )
        held = ExitStack()
        held.enter_context(self._host.reading(version, namespace))
        number = secrets.randbits(62)
        with self._lock:
            expires_at_ms = self._time_source() + self._lease_ms
            self._leases[number] = _Lease(caller, expires_at_ms, held)
            self._held_by[caller] += 1
        if earlier is not None:
            self.release(caller, earlier)
        return number

    def release(self, caller: str, number: int) -> None:
        """Release a lease.  Does nothing if it has expired or belongs to another caller."""
        with self._lock:
            lease = self._leases.get(number)
            if lease is None or lease.caller != caller:
                return
            self._remove(number)
        lease.held.close()

    def expire(self) -> None:
        """Release every lease that was not renewed in time."""
        now_ms = self._time_source()
        with self._lock:
            over = [number for number, lease in self._leases.items() if lease.expires_at_ms <= now_ms]
            leases = [self._remove(number) for number in over]
        for lease in leases:
            lease.held.close()

    def close(self) -> None:
        """Release every lease."""
        with self._lock:
            leases = [self._remove(number) for number in list(self._leases)]
        for lease in leases:
            lease.held.close()

    def _remove(self, number: int) -> _Lease:
        lease = self._leases.pop(number)
        self._held_by[lease.caller] -= 1
        self._held_by += Counter()
        return lease
