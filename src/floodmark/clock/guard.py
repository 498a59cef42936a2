"""A guard for readings of the machine's clock: one wrong reading must not move a site into the future.

The hybrid clock never goes back, so a reading a year ahead would be kept for a year: versions would be in the
future, peers would refuse them, and garbage collection would remove every record with a time to live.
The guard compares each reading with the last accepted one plus the time that has passed since, measured by a
clock that cannot be set.  If that time is unknown, as between two runs of a site, it compares with the bound
that the site has stored, and tolerates as much time as a site may have been closed for.

A jump back needs no guard: versions continue from the last one.
"""

from typing import Final

from floodmark.clock.sources import TimeSource
from floodmark.model.errors import ClockSkew
from floodmark.model.version import compose, moment_of

# How far a reading may be ahead of the time that has passed: less than a day does little harm, and covers the
# correction of the clock of a machine that was halted and continues.
JUMP_MS_MAX: Final = 24 * 3_600_000
# How far it may be ahead if the time that has passed is unknown.
GAP_MS_MAX: Final = 180 * 24 * 3_600_000
# A reading at most this far ahead of an accepted one is accepted without a comparison.
_TRUST_MS: Final = 10_000


class GuardedTime:
    """A time source that refuses a reading too far ahead.

    >>> readings = iter([1_000, 2_000, 999_999_999_999])
    >>> time = GuardedTime(lambda: next(readings))
    >>> time(), time()
    (1000, 2000)
    >>> time()
    Traceback (most recent call last):
    ...
    floodmark.model.errors.ClockSkew: this machine's clock says 2001-09-09T01:46:39.999000+00:00, ...
    """

    def __init__(self, source: TimeSource, elapsed_source: TimeSource | None = None) -> None:
        self._source = source
        self._elapsed_source = elapsed_source
        self._believed_ms: int | None = None
        self._believed_at_ms: int | None = None
        self._trusted_ms = -1

    def __call__(self) -> int:
        reading_ms = self._source()
        if reading_ms > self._trusted_ms:
            self._judge(reading_ms)
        return reading_ms

    def start(self, stored_ms: int) -> None:
        """Begin with the time of the last version that a site has stored; 0 if it is new."""
        if stored_ms:
            self._believed_ms = stored_ms

    def _judge(self, reading_ms: int) -> None:
        at_ms = None if self._elapsed_source is None else self._elapsed_source()
        if self._believed_ms is not None:
            believed_ms, tolerated_ms = self._believed_ms, GAP_MS_MAX
            if at_ms is not None and self._believed_at_ms is not None:
                believed_ms += at_ms - self._believed_at_ms
                tolerated_ms = JUMP_MS_MAX
            ahead_ms = reading_ms - believed_ms
            if ahead_ms > tolerated_ms:
                raise _jumped(reading_ms, believed_ms, ahead_ms)
        self._believed_ms, self._believed_at_ms = reading_ms, at_ms
        self._trusted_ms = reading_ms + _TRUST_MS


def _jumped(reading_ms: int, believed_ms: int, ahead_ms: int) -> ClockSkew:
    said, expected = (moment_of(compose(ms, 0)).isoformat() for ms in (reading_ms, believed_ms))
    return ClockSkew(
        f"this machine's clock says {said}, {ahead_ms // 3_600_000:,} hours later than {expected}, which it "
        "is by the last version and the time that has passed. Nothing was written. Set the clock right; if "
        "it is right, close the site and run `floodmark doctor DIRECTORY --accept-clock`",
        ahead_ms=ahead_ms,
        reading_ms=reading_ms,
    )
