"""Checks the writes to a site's disk against the versions that the site announces: promises 2 and 3.

Every commit is a row of a change log, so a witness at the disk sees each one before any reader does, also
those with an unknown outcome.  A version must be above all versions ever written here, and above every
announced resolved version; and an announced version must not depend on an unsynced write.  A prepared write
has its version from its prepare on, and may be overtaken until it is committed.

A witness also stores its findings, because the site that it interrupts may handle the error as a disk
failure.
"""

from collections.abc import Iterable, Sequence

from floodmark.codec.changelog import decode_log_key
from floodmark.engine import WriteRow
from floodmark.model.version import Version
from floodmark.partition.families import LOG, META
from floodmark.partition.prepared.writes import PREPARED
from floodmark.testing.simulation.history import Violation, show_version


class VersionWitness:
    """Remembers the highest version written and announced at one site, through all its crashes."""

    def __init__(self, site: str) -> None:
        self._site = site
        self.written: Version = 0
        self.announced: Version = 0
        self.found: Violation | None = None

    def writing(self, rows: Sequence[WriteRow]) -> None:
        """Check a batch that is about to be written."""
        versions = log_versions(rows)
        if not versions:
            return
        lowest = min(versions)
        if lowest <= self.announced:
            self.found = Violation(
                "3",
                self._site,
                f"a change is written at {show_version(lowest)}, and {show_version(self.announced)} was "
                "announced as resolved",
                version=lowest,
            )
        elif lowest <= self.written and not _ends_prepared(rows):
            self.found = Violation(
                "2",
                self._site,
                f"version {show_version(lowest)} is given out after {show_version(self.written)}",
                version=lowest,
            )
        if self.found is not None:
            raise self.found
        self.written = max(self.written, *versions)

    def announce(self, resolved: Version, unsynced: Iterable[WriteRow]) -> None:
        """Check and record a resolved version that the site announces."""
        if resolved < self.announced:
            raise Violation("3", self._site, f"resolved went back to {show_version(resolved)}")
        if early := [version for version in log_versions(unsynced) if version <= resolved]:
            raise Violation(
                "1",
                self._site,
                f"resolved is {show_version(resolved)}, and {show_version(early[0])} is not on disk",
                version=early[0],
            )
        self.announced = resolved


def _ends_prepared(rows: Iterable[WriteRow]) -> bool:
    return any(family == META and key.startswith(PREPARED) and value is None for family, key, value in rows)


def log_versions(rows: Iterable[WriteRow]) -> list[Version]:
    """The versions of the change-log rows among some rows that are written."""
    return [decode_log_key(key)[1] for family, key, value in rows if family == LOG and value is not None]
