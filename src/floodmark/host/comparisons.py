"""The results of comparisons of this site with others, as the comparing jobs report them.

The last whole comparison is stored, to distinguish "never compared" from "compared before the restart".  The
progress of a running comparison, and passes over changed keys only, are kept in memory.
"""

from typing import Final

import msgspec
from msgspec.structs import replace

from floodmark.model.limits import REPORTED_CHARACTERS_MAX
from floodmark.partition import META, Storage, load_metadata

REPORTED_MAX: Final = 20
# A job that has not reported for this long is considered dead.
RUNNING_MS_MAX: Final = 60_000

_ROW: Final = b"comparison"


class ComparisonNote(msgspec.Struct, frozen=True, kw_only=True):
    """A report about a comparison of sites; without `outcome` it is still running.

    `done` of `total` steps are finished.  The numbers count keys; `sample` has the first keys that differ,
    and `doubts` the reasons why something could not be compared.
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
        """The same report with its texts shortened to what a site keeps."""
        lists = {
            name: [each[:REPORTED_CHARACTERS_MAX] for each in getattr(self, name)[:REPORTED_MAX]]
            for name in ("sites", "namespaces", "sample", "doubts")
        }
        return replace(self, **lists)


class ToldComparison(msgspec.Struct, frozen=True):
    """A report about a comparison, and the site's time when it arrived."""

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
        """Keep the report of a comparison, and store it if it is about a whole one."""
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
        """The last comparison of all keys."""
        return self._whole

    def last(self) -> ToldComparison | None:
        """The last comparison, whole or not."""
        return self._last or self._whole

    def running(self, now_ms: int) -> ToldComparison | None:
        """The comparison that is running, or None."""
        running = self._running
        return None if running is None or now_ms - running.at_ms > RUNNING_MS_MAX else running
