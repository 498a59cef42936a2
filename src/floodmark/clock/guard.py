"""A guard before the machine's clock: one wrong reading must not move a site into the future.

The hybrid clock never goes back, so a reading a year ahead would be kept for a year: versions would lie in
the future, peers would refuse them, and garbage collection would take every record with a time to live.
The guard compares each reading with the last that was believed and the time that has passed since, which a
clock that cannot be set has measured.  Where nothing has measured it, as between two runs of a site, it
compares with the bound that the site has stored, and tolerates what a site may have been closed for.

A jump back needs no guard: versions go on from the last one.
"""

from typing import Final

from floodmark.clock.sources import TimeSource
from floodmark.model.errors import ClockSkew
from floodmark.model.version import compose, moment_of

# How far a reading may lie ahead of what has passed: less than a day does little harm, and a machine that was
# halted and goes on is put right within it.
JUMP_MS_MAX: Final = 24 * 3_600_000
# The same where nothing has measured how much has passed.
GAP_MS_MAX: Final = 180 * 24 * 3_600_000
# A reading so little ahead of one that was believed is believed without being measured.
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
