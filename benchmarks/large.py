"""A large site: the time to open it, the memory that a full scan adds, and the space of a record.

Loading, opening and scanning run in separate processes, so that none inherits the memory of another.  Each
prints a line of JSON:

    python -m benchmarks.large DIRECTORY --build N
    python -m benchmarks.large DIRECTORY
    python -m benchmarks.large DIRECTORY --scan
"""

import argparse
import json
import random
import resource
import subprocess
import sys
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from itertools import islice
from pathlib import Path
from time import perf_counter
from typing import Any, Final

from benchmarks.harness import BATCH, KEY_BYTES, NAMESPACE, VALUE_BYTES, Pair, Row, Target, state, tell
from benchmarks.newest import FIRST_VERSION, LOG_ID

import floodmark
from floodmark.codec.changelog import encode_commit, encode_log_key, encode_single
from floodmark.codec.ordered import encode_key, encode_namespace
from floodmark.codec.values import encode_value
from floodmark.model.limits import MIB

USER_BYTES: Final = KEY_BYTES + VALUE_BYTES

_ROOT: Final = Path(__file__).resolve().parent.parent
_STATUS: Final = Path("/proc/self/status")
_CLEAR_PEAK: Final = Path("/proc/self/clear_refs")


def large_site(path: Path, records: int) -> Iterator[Row]:
    """Build a site of `records` records and measure it."""
    tell(f"a site of {records:,} records: building it")
    seconds = _in_a_child(path, "--build", str(records))["build_seconds"]
    yield state(f"build {records:,} records, put_many async", "records/s", records / seconds)
    tell("a site of many records: opening and scanning it")
    first, second = _in_a_child(path), _in_a_child(path, "--scan")
    under_a_second = Target(limit=1, unit="s", strictly=True)
    yield state(
        f"open {records:,} records",
        "s",
        first["open_seconds"],
        under_a_second,
        "the first opening after the load and an orderly close",
    )
    yield state("  open once more", "s", second["open_seconds"], under_a_second)
    if second["rows"] != records:
        raise AssertionError(f"the scan gave {second['rows']:,} rows of {records:,}")
    yield state(
        "full scan: memory added",
        "MiB",
        (second["memory_peak"] - second["memory_before"]) / MIB,
        Target(limit=64, unit="MiB", strictly=True),
        f"peak of the process while scanning, over the {second['memory_before'] / MIB:.0f} MiB that it had "
        "after opening; blocks that the scan leaves in RocksDB's cache are in it",
    )
    yield state("  rate", "rows/s", second["rows"] / second["scan_seconds"])
    how = "SST files and memtables by site.statistics() after reopening, not compacted"
    for name, stored in (("data", second["data_bytes"]), ("change log", second["log_bytes"])):
        beyond = stored / records - USER_BYTES
        yield state(f"space beyond key and value: {name}", "bytes/record", beyond, remark=how)


def encoded_overheads() -> Iterator[Row]:
    """What the encoding adds to key and value, before RocksDB adds or saves anything."""
    key, value = bytes(KEY_BYTES), bytes(VALUE_BYTES)
    engine_key, stored = encode_key(1, key, FIRST_VERSION), encode_value(value)
    qualified = encode_namespace(1) + key
    log_key = len(encode_log_key(LOG_ID, FIRST_VERSION))
    single = log_key + len(encode_single(qualified, stored))
    chunks = encode_commit([qualified] * BATCH, [stored] * BATCH)
    many = sum(log_key + len(row) for row in chunks) / BATCH
    yield state(
        "encoding beyond key and value: data",
        "bytes/record",
        len(engine_key) + len(stored) - USER_BYTES,
        remark=f"engine key {len(engine_key)} for {len(key)}, stored value {len(stored)} for {len(value)}; "
        "computed, uncompressed",
    )
    remark = f"computed, uncompressed; the log holds the {USER_BYTES} bytes of key and value once more"
    yield state("encoding beyond key and value: log, put", "bytes/record", single - USER_BYTES, remark=remark)
    yield state(
        f"encoding beyond key and value: log, put_many of {BATCH:,}",
        "bytes/record",
        many - USER_BYTES,
        remark=remark,
    )


def _in_a_child(path: Path, *arguments: str) -> dict[str, Any]:
    command = [sys.executable, "-m", "benchmarks.large", str(path.resolve()), *arguments]
    done = subprocess.run(command, cwd=_ROOT, stdout=subprocess.PIPE, text=True, check=True)
    measured: dict[str, Any] = json.loads(done.stdout)
    return measured


# The child


def _main() -> None:
    parser = argparse.ArgumentParser(description="Build a site, or open it and perhaps scan it.")
    parser.add_argument("directory", type=Path)
    parser.add_argument("--build", type=int, metavar="RECORDS")
    parser.add_argument("--scan", action="store_true")
    options = parser.parse_args()
    if options.build is not None:
        measured = _build(options.directory, options.build)
    else:
        measured = _open(options.directory, scanned=options.scan)
    print(json.dumps(measured))


def _build(path: Path, records: int) -> dict[str, float]:
    begun = perf_counter()
    pairs = _generate(random.Random(5), records)
    with floodmark.open(path, site="large", durability="async") as site:
        namespace = site.create_namespace(NAMESPACE)
        while batch := list(islice(pairs, BATCH)):
            namespace.put_many(batch)
    return {"build_seconds": perf_counter() - begun}


def _generate(randomness: random.Random, records: int) -> Iterator[Pair]:
    for _ in range(records):
        record = randomness.randbytes(USER_BYTES)
        yield record[:KEY_BYTES], record[KEY_BYTES:]


def _open(path: Path, *, scanned: bool) -> dict[str, float]:
    begun = perf_counter()
    with floodmark.open(path) as site:
        measured = {"open_seconds": perf_counter() - begun}
        if scanned:
            statistics = site.statistics()
            measured |= {"data_bytes": statistics.data_bytes, "log_bytes": statistics.log_bytes}
            measured |= _scan(site.namespace(NAMESPACE))
    return measured


def _scan(namespace: floodmark.Namespace) -> dict[str, float]:
    with suppress(OSError):
        _CLEAR_PEAK.write_text("5")
    before = _memory("VmRSS")
    begun = perf_counter()
    last = deque(enumerate(namespace.scan(), start=1), maxlen=1)
    seconds = perf_counter() - begun
    return {
        "rows": last[0][0] if last else 0,
        "scan_seconds": seconds,
        "memory_before": before,
        "memory_peak": _memory("VmHWM"),
    }


def _memory(field: str) -> int:
    """Resident bytes, current (VmRSS) or peak (VmHWM).  Without /proc, always the peak."""
    if _STATUS.exists():
        for line in _STATUS.read_text().splitlines():
            if line.startswith(f"{field}:"):
                return int(line.split()[1]) * 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


if __name__ == "__main__":
    _main()
