"""A hybrid clock: close to real time, never going back, and later than everything it has seen.

A version is one integer with the physical part on top, so the rules of a hybrid logical clock become
plain arithmetic: take physical time if it is ahead, else the last version plus one.  When the counter
is full, the carry moves the physical part on; when physical time jumps back, the counter goes on.

A clock that restarts must not mint a version twice.  It therefore keeps an upper bound on stable
storage, a little ahead of what it has handed out, and starts again from there.  The lead is kept below
the skew that peers tolerate, so that a site that crashed is not refused for running ahead.
"""

from threading import Lock
from typing import Final, Protocol

from floodmark.clock.sources import TimeSource, system_time_ms
from floodmark.model.errors import ClockSkew, FloodmarkError
from floodmark.model.version import COUNTER_BITS, VERSION_MAX, Version, physical_ms

SKEW_MS_MAX: Final = 500
# How far ahead a version to read at may be: less than peers tolerate, so that they accept later writes.
READ_SKEW_MS_MAX: Final = 250
BOUND_LEAD_MS: Final = 250


class UpperBound(Protocol):
    """Stable storage for the version that no version may exceed."""

    def load(self) -> Version:
        """The stored bound, 0 if there is none."""
        ...

    def store(self, bound: Version) -> None:
        """Store the bound.  It is on disk when this returns."""
        ...


class HybridClock:
    """Mints versions.  Safe to use from many threads.

    `step` and `offset` let several nodes mint disjoint versions: each version is congruent to
    `offset` modulo `step`.

    >>> clock = HybridClock(lambda: 1000)
    >>> first, second = clock.now(), clock.now()
    >>> first == 1000 << 18, second - first
    (True, 1)
    """

    def __init__(
        self,
        time_source: TimeSource = system_time_ms,
        *,
        step: int = 1,
        offset: int = 0,
        skew_ms_max: int = SKEW_MS_MAX,
        upper_bound: UpperBound | None = None,
    ) -> None:
        if step < 1 or not 0 <= offset < step:
            raise ValueError(f"step {step} and offset {offset} need 0 <= offset < step")
        if skew_ms_max < 0:
            raise ValueError(f"skew_ms_max must not be negative, but is {skew_ms_max}")
        self.time_source = time_source
        self._step = step
        self._offset = offset
        self._skew_ms_max = skew_ms_max
        self._upper_bound = upper_bound
        self._bound = VERSION_MAX if upper_bound is None else upper_bound.load()
        self._lock = Lock()
        # The highest version minted or seen.  Read without the lock: it only grows.
        self.latest: Version = 0 if upper_bound is None else self._bound

    @property
    def bound(self) -> Version:
        """The stored bound, at or above all versions that were minted or seen."""
        return self._bound

    def now(self) -> Version:
        """Mint a version above all that were minted or observed here."""
        with self._lock:
            version = self.time_source() << COUNTER_BITS
            latest = self.latest
            if version <= latest:
                version = latest + 1
            if self._step > 1:
                version += (self._offset - version) % self._step
            if version > self._bound:
                self._raise_bound(version)
            self.latest = version
            return version

    def observe(self, version: Version, *, skew_ms_max: int | None = None) -> None:
        """Move past a version from elsewhere.  Refuses one that is too far ahead of physical time.

        This holds also for a version of the clock's own millisecond, if that is too far ahead already: with a
        full counter, the next version would begin another millisecond, and callers in turn would drive the
        clock on without end.  `skew_ms_max` tolerates less than the clock's own limit.
        """
        if version <= self.latest:
            return
        tolerated_ms = self._skew_ms_max if skew_ms_max is None else min(skew_ms_max, self._skew_ms_max)
        ahead_ms = physical_ms(version) - self.time_source()
        with self._lock:
            if version <= self.latest:
                return
            if ahead_ms > tolerated_ms:
                raise _skewed(version, ahead_ms, tolerated_ms)
            if version > self._bound:
                self._raise_bound(version)
            self.latest = version

    def pass_version(self, version: Version) -> None:
        """Move past a version that another node of the site may have minted, however far ahead it is."""
        with self._lock:
            if version > self.latest:
                if version > self._bound:
                    self._raise_bound(version)
                self.latest = version

    def require_near(self, version: Version) -> None:
        """Refuse a version that is too far ahead of physical time, and leave the clock where it is."""
        ahead_ms = physical_ms(version) - self.time_source()
        if version > self.latest and ahead_ms > self._skew_ms_max:
            raise _skewed(version, ahead_ms, self._skew_ms_max)

    def physical_ms(self) -> int:
        """The time at which expiry is judged: real time, or that of the last version if it is a little ahead.

        If it is far ahead, as after the machine's clock was set back, nothing would expire until real time
        has caught up.
        """
        real_ms = self._real_ms()
        return min(max(real_ms, physical_ms(self.latest)), real_ms + self._skew_ms_max)

    def judged_ms(self, version: Version) -> int:
        """The time at which a reader at a version judges expiry: the version's, unless that is far ahead."""
        return min(physical_ms(version), self._real_ms() + self._skew_ms_max)

    def ahead_ms(self) -> int:
        """How far the clock runs ahead of physical time, as after a jump back; 0 in ordinary times."""
        return max(0, physical_ms(self.latest) - self._real_ms())

    def version_ms(self) -> int:
        """The time of the next version: real time, or that of the last version as long as it is ahead."""
        return max(self._real_ms(), physical_ms(self.latest))

    def _real_ms(self) -> int:
        """Real time; the last version's while the machine's clock is refused, so that reads continue."""
        try:
            return self.time_source()
        except ClockSkew:
            return physical_ms(self.latest)

    def close(self) -> None:
        """Lower the stored bound to the last version, so that a restart does not jump ahead."""
        with self._lock:
            if self._upper_bound is not None and self.latest < self._bound:
                self._upper_bound.store(self.latest)
                self._bound = self.latest

    def abandon(self, refusal: FloodmarkError) -> None:
        """Refuse to mint in a forked process.  Replaces the lock, which another thread may have held."""

        def refuse() -> int:
            raise refusal.again()

        self._lock = Lock()
        self.time_source = refuse

    def _raise_bound(self, version: Version) -> None:
        assert self._upper_bound is not None
        bound = version + (BOUND_LEAD_MS << COUNTER_BITS)
        self._upper_bound.store(bound)
        self._bound = bound


def _skewed(version: Version, ahead_ms: int, tolerated_ms: int) -> ClockSkew:
    return ClockSkew(
        f"version {version} is {ahead_ms} ms ahead of this clock; at most {tolerated_ms} ms are tolerated. "
        "Check the time on both machines",
        version=version,
        ahead_ms=ahead_ms,
    )
