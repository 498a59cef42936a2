"""The common harness: raw rocksdict beside a site, timing in turns, and the table of results.

A repetition cuts its work into chunks.  All sides do each chunk in turn, and the side that begins rotates,
so that a noisy neighbour slows all of them.  A repetition yields one number for each side; the table shows
their median, minimum and maximum over the repetitions, and the ratio of the medians.
"""

import gc
import os
import platform
import random
import shlex
import statistics
import sys
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from importlib.metadata import version
from itertools import cycle
from pathlib import Path
from threading import Barrier
from time import perf_counter
from types import TracebackType
from typing import Final, Self, TypeAlias, TypeVar

from rocksdict import Cache, Rdict

import floodmark
from floodmark.engine.rocks import BLOCK_CACHE_BYTES, rocks_options
from floodmark.partition import FAMILIES

KEY_BYTES: Final = 16
VALUE_BYTES: Final = 100
BATCH: Final = 1_000
NAMESPACE: Final = "bench"
MICROSECONDS: Final = 1e6

_CHUNKS: Final = 20
_BUSY: Final = (
    "rocksdb.mem-table-flush-pending",
    "rocksdb.num-running-flushes",
    "rocksdb.compaction-pending",
    "rocksdb.num-running-compactions",
)

Pair: TypeAlias = tuple[bytes, bytes]
Put: TypeAlias = Callable[[bytes, bytes], object]
Item = TypeVar("Item")


# Results


@dataclass(frozen=True, kw_only=True)
class Measure:
    """The median, minimum and maximum over the repetitions."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, samples: Sequence[float]) -> "Measure":
        return cls(median=statistics.median(samples), low=min(samples), high=max(samples))


@dataclass(frozen=True, kw_only=True)
class Target:
    """The bound for the ratio of a row, or for its number if the row has no raw side."""

    limit: float
    unit: str = "x raw"
    at_least: bool = False
    strictly: bool = False
    hope: float | None = None

    def __str__(self) -> str:
        word = "at least" if self.at_least else "under" if self.strictly else "at most"
        hope = "" if self.hope is None else f" ({self.hope:g} if it can)"
        return f"{word} {self.limit:g} {self.unit}{hope}"

    def verdict(self, number: float) -> str:
        if self.at_least:
            return "met" if number >= self.limit else "missed"
        if number == self.limit:
            return "missed" if self.strictly else "met"
        return "met" if number < self.limit else "missed"


@dataclass(frozen=True, kw_only=True)
class Row:
    """One row of the table."""

    work: str
    unit: str
    raw: Measure | None
    ours: Measure
    ratio: float | None
    target: str = ""
    verdict: str = ""
    remark: str = ""


def compare(
    work: str,
    unit: str,
    raw: Measure,
    ours: Measure,
    target: Target | None = None,
    remark: str = "",
) -> Row:
    """A row with both sides; the target applies to the ratio of ours to raw."""
    ratio = ours.median / raw.median
    return Row(
        work=work,
        unit=unit,
        raw=raw,
        ours=ours,
        ratio=ratio,
        target="" if target is None else str(target),
        verdict="" if target is None else target.verdict(ratio),
        remark=remark,
    )


def state(work: str, unit: str, number: float, target: Target | None = None, remark: str = "") -> Row:
    """A row of one number without a raw side; the target applies to the number."""
    return Row(
        work=work,
        unit=unit,
        raw=None,
        ours=Measure.of([number]),
        ratio=None,
        target="" if target is None else str(target),
        verdict="" if target is None else target.verdict(number),
        remark=remark,
    )


# Work


def make_pairs(count: int, seed: int) -> list[Pair]:
    """Random keys and values, which do not compress; always the same for a seed."""
    randomness = random.Random(seed)
    return [(randomness.randbytes(KEY_BYTES), randomness.randbytes(VALUE_BYTES)) for _ in range(count)]


def in_batches(pairs: Sequence[Pair]) -> list[Sequence[Pair]]:
    """The pairs in slices of `BATCH`."""
    return [pairs[start : start + BATCH] for start in range(0, len(pairs), BATCH)]


def take_turns(
    items: Sequence[Item],
    sides: Mapping[str, Callable[[Sequence[Item]], object]],
    clock: Callable[[], float] = perf_counter,
) -> dict[str, float]:
    """Let the sides process the items chunk by chunk, in turn; returns the total seconds of each side."""
    order = deque(sides)
    seconds = dict.fromkeys(sides, 0.0)
    size = max(1, len(items) // _CHUNKS)
    for start in range(0, len(items), size):
        chunk = items[start : start + size]
        for name in order:
            begun = clock()
            sides[name](chunk)
            seconds[name] += clock() - begun
        order.rotate(-1)
    return seconds


def timing_each(put: Put, times: list[float]) -> Callable[[Sequence[Pair]], None]:
    """A side that appends the seconds of each put to `times`."""

    def run(pairs: Sequence[Pair]) -> None:
        for key, value in pairs:
            begun = perf_counter()
            put(key, value)
            times.append(perf_counter() - begun)

    return run


def puts_per_second(put: Put, pairs: Sequence[Pair], threads: int, seconds: float) -> float:
    """The puts a second of all threads together."""
    begun: list[float] = []
    barrier = Barrier(threads, action=lambda: begun.append(perf_counter()))

    def work(share: Sequence[Pair]) -> tuple[int, float]:
        barrier.wait()
        deadline = begun[0] + seconds
        for count, (key, value) in enumerate(cycle(share), start=1):
            put(key, value)
            now = perf_counter()
            if now >= deadline:
                return count, now
        raise AssertionError("a thread was given no pairs")

    with ThreadPoolExecutor(threads) as pool:
        done = list(pool.map(work, [pairs[first::threads] for first in range(threads)]))
    return sum(count for count, _ in done) / (max(end for _, end in done) - begun[0])


# Databases


class Database:
    """Raw rocksdict with a site's options and a cache of the same size."""

    def __init__(self, path: Path, families: Iterable[str] = ()) -> None:
        # Objects that are closed but not collected yet may still hold the files of a database.
        gc.collect()
        path.parent.mkdir(parents=True, exist_ok=True)
        cache = Cache(BLOCK_CACHE_BYTES)
        self.rows = Rdict(
            os.fspath(path),
            rocks_options(cache),
            column_families={name: rocks_options(cache) for name in families},
        )
        self.families = {name: self.rows.get_column_family(name) for name in families}
        self.handles = {name: self.rows.get_column_family_handle(name) for name in families}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for family in self.families.values():
            family.close()
        # A handle keeps the database open, as an open column family does.
        self.families, self.handles = {}, {}
        self.rows.close()

    def settle(self) -> None:
        """Wait until no flush and no compaction is pending or running."""
        columns = (self.rows, *self.families.values())
        while any(column.property_int_value(name) for column in columns for name in _BUSY):
            os.sched_yield()


class Peers:
    """A raw database and a site, side by side in a directory."""

    def __init__(self, directory: Path) -> None:
        with ExitStack() as stack:
            self.raw = stack.enter_context(Database(directory / "raw")).rows
            self.site = stack.enter_context(floodmark.open(directory / "site", site="bench"))
            there = NAMESPACE in self.site.namespaces()
            self.ours = self.site.namespace(NAMESPACE) if there else self.site.create_namespace(NAMESPACE)
            self._stack = stack.pop_all()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._stack.close()
        del self.raw, self.site, self.ours, self._stack


def settle_peers(directory: Path) -> None:
    """Open the closed peers and wait for their flushes and compactions, which would disturb later reads."""
    with Database(directory / "raw") as raw:
        raw.settle()
    with Database(directory / "site" / "engine", FAMILIES) as engine:
        engine.settle()


# Output


def describe_machine() -> dict[str, str]:
    """The machine, its load, the versions and the command of this run."""
    return {
        "machine": f"{os.cpu_count()} cores, {platform.system()} {platform.machine()}",
        "load at the start": " ".join(f"{load:.1f}" for load in os.getloadavg()),
        "python": platform.python_version(),
        "rocksdict": version("rocksdict"),
        "command": shlex.join(sys.orig_argv),
    }


def tell(progress: str) -> None:
    """Print progress to stderr; the results go to stdout."""
    print(f"... {progress}", file=sys.stderr, flush=True)


def as_data(machine: Mapping[str, str], rows: Sequence[Row]) -> dict[str, object]:
    """The results in a form that `json.dumps` accepts."""
    return {"machine": dict(machine), "rows": [asdict(row) for row in rows]}


def render(machine: Mapping[str, str], rows: Sequence[Row]) -> str:
    """The table as text, below the description of the machine and above the remarks."""
    head = ("work", "unit", "raw", "raw min-max", "ours", "ours min-max", "ratio", "target", "")
    lines = [head, *(_cells(row) for row in rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(head))]
    texts = [f"{name}: {text}" for name, text in machine.items()] + [""]
    for line in lines:
        cells = [
            cell.rjust(width) if 2 <= column <= 6 else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(line, widths, strict=True))
        ]
        texts.append("  ".join(cells).rstrip())
    remarks = [f"{row.work.strip()}: {row.remark}" for row in rows if row.remark]
    return "\n".join([*texts, "", *remarks])


def _cells(row: Row) -> tuple[str, ...]:
    return (
        row.work,
        row.unit,
        "" if row.raw is None else _number(row.raw.median),
        "" if row.raw is None else _spread(row.raw),
        _number(row.ours.median),
        _spread(row.ours),
        "" if row.ratio is None else f"{row.ratio:.2f}",
        row.target,
        row.verdict,
    )


def _spread(measure: Measure) -> str:
    if measure.low == measure.high:
        return ""
    return f"{_number(measure.low)}-{_number(measure.high)}"


def _number(number: float) -> str:
    return f"{number:,.0f}" if abs(number) >= 1000 else f"{number:,.2f}"
