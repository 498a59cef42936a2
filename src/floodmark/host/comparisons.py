"""What comparisons of this site with others have found, as the jobs that compare tell it.

The last whole comparison is stored, so that "never compared" is told from "compared before the restart".
The progress of a running one, and passes over changed keys alone, are kept in memory.
"""

from typing import Final

import msgspec
from msgspec.structs import replace

from floodmark.model.limits import REPORTED_CHARACTERS_MAX
from floodmark.partition import META, Storage, load_metadata

REPORTED_MAX: Final = 20
# A job that has told nothing for so long was killed.
RUNNING_MS_MAX: Final = 60_000

_ROW: Final = b"comparison"


class ComparisonNote(msgspec.Struct, frozen=True, kw_only=True):
    """A comparison of sites: without `outcome` it runs still.

    `done` of `total` steps are finished.  The numbers are of keys; `sample` names the first that differ, and
    `doubts` say what could not be compared.
    """

    sites: list[str]
    namespaces: list[str] = []
    whole: bool = True
    outcome: str | None = None
    done: int = 0
    total: int | None = None
    compared: int = 0
    agree: int = 0
    lag: int = 0
    drift: int = 0
    sample: list[str] = []
    doubts: list[str] = []
    seconds: float = 0.0

    def cut(self) -> "ComparisonNote":
        """The same with no more text than a site keeps."""
        lists = {
            name: [each[:REPORTED_CHARACTERS_MAX] for each in getattr(self, name)[:REPORTED_MAX]]
            for name in ("sites", "namespaces", "sample", "doubts")
        }
        return replace(self, **lists)


class ToldComparison(msgspec.Struct, frozen=True):
    """A comparison, and the site's time when it told of itself."""

    at_ms: int
    report: ComparisonNote


class Comparisons:
    """The last comparisons of a site."""

    def __init__(self, storage: Storage) -> None:
        self._storage = storage
        self._running: ToldComparison | None = None
        self._last: ToldComparison | None = None
        self._whole: ToldComparison | None = None
        self._load()
        storage.on_recovery.append(self._load)

    def _load(self) -> None:
        self._whole = next(iter(load_metadata(self._storage.engine, _ROW, ToldComparison)), None)

    def note(self, report: ComparisonNote, now_ms: int) -> None:
        """Take in what a comparison tells of itself."""
        told = ToldComparison(now_ms, report.cut())
        if report.outcome is None:
            self._running = told
            return
        self._running, self._last = None, told
        if report.whole:
            with self._storage.settled():
                self._storage.store([(META, _ROW, msgspec.json.encode(told))])
            self._whole = told

    def whole(self) -> ToldComparison | None:
        """The last comparison of everything."""
        return self._whole

    def last(self) -> ToldComparison | None:
        """The last comparison, whole or not."""
        return self._last or self._whole

    def running(self, now_ms: int) -> ToldComparison | None:
        """The one that runs now."""
        running = self._running
        return None if running is None or now_ms - running.at_ms > RUNNING_MS_MAX else running
