"""Layers beside the plain calls that they are built on.

make bench-layers                                      all of it, on a quiet machine: some minutes
make bench-layers ARGS="--parts append --repeat 3"     a look
"""

import argparse
import subprocess
import sys
import tempfile
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from filecmp import cmp
from io import BytesIO
from pathlib import Path
from random import Random
from time import perf_counter
from typing import Final

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.floodmark_peer import ServedSite
from benchmarks.harness import (
    MICROSECONDS,
    VALUE_BYTES,
    Measure,
    Row,
    Target,
    compare,
    describe_machine,
    make_pairs,
    render,
    state,
    take_turns,
    tell,
)
from benchmarks.peers.base import LOOPBACK, free_port, server_process

import floodmark
from floodmark.layers import LargeValues, ObjectHistory, OrderedLog
from floodmark.layers.large_values import CHUNK_BYTES, COMMIT_CHUNKS
from floodmark.model.errors import Unreachable
from floodmark.model.limits import MIB

PARTITIONS: Final = 8
INTERVALS: Final = 10
THREADS: Final = 4
ENTRY: Final = bytes(VALUE_BYTES)
SPANS: Final = 10_000


def append_for(log: OrderedLog, seconds: float) -> None:
    """Append from several threads, as fast as they can."""
    until = perf_counter() + seconds

    def run(_: int) -> None:
        while perf_counter() < until:
            log.append(ENTRY)

    with ThreadPoolExecutor(THREADS) as pool:
        list(pool.map(run, range(THREADS)))


def spread_rows(directory: Path, options: argparse.Namespace) -> Iterator[Row]:
    tell(f"appends over {PARTITIONS} partitions, and conflicts")
    interval = timedelta(seconds=options.seconds / INTERVALS)
    with floodmark.open(directory / "spread", site="bench") as site:
        shares = {}
        logs = {
            "with": OrderedLog(site, "with", interval=interval),
            "without": OrderedLog(site, "without", bucketing=False),
            "conflicts": OrderedLog(site, "conflicts", interval=interval, ordering="conflicts"),
        }
        for name, log in logs.items():
            keys = log.split_keys(PARTITIONS)
            for key in keys:
                site.split(name, key)
            append_for(log, options.seconds)
            found = Counter(bisect_right(keys, key) for key, _ in log.stored.scan(prefix=b"e"))
            shares[name] = max(found.values()) * PARTITIONS / found.total()
        least = Target(limit=1.3, unit="x even")
        yield state(
            f"busiest of {PARTITIONS} partitions, {INTERVALS} intervals",
            "x even",
            shares["with"],
            least,
            f"an interval of {interval} becomes one of {logs['with'].interval}",
        )
        yield state("  without buckets", "x even", shares["without"])
        appends, conflicts = logs["conflicts"].statistics
        yield state(
            f"conflicts by ordering, {THREADS} threads",
            "%",
            conflicts / appends * 100,
            Target(limit=1, unit="%"),
            f"{conflicts:,} of {appends:,} appends",
        )


def append_rows(directory: Path, options: argparse.Namespace) -> Iterator[Row]:
    tell("append beside put")
    samples: dict[str, list[float]] = {"put": [], "append": []}
    with floodmark.open(directory / "append", site="bench") as site:
        plain, log = site.create_namespace("plain"), OrderedLog(site, "log")
        pairs, put = make_pairs(options.puts, 7), plain.put
        for _ in range(options.repeat):
            seconds = take_turns(
                pairs,
                {
                    "put": lambda chunk: [put(key, value) for key, value in chunk],
                    "append": lambda chunk: [log.append(value) for _, value in chunk],
                },
            )
            for side, took in seconds.items():
                samples[side].append(len(pairs) / took)
    yield compare(
        "append beside put, fsync",
        "calls/s",
        Measure.of(samples["put"]),
        Measure.of(samples["append"]),
        Target(limit=0.9, unit="x put", at_least=True),
    )


def read_rows(directory: Path, options: argparse.Namespace) -> Iterator[Row]:
    tell(f"reading {options.entries:,} entries in order")
    samples: dict[str, list[float]] = {"scan": [], "read": []}
    with floodmark.open(directory / "read", site="bench") as site:
        plain, log = site.create_namespace("plain"), OrderedLog(site, "log")
        for start in range(0, options.entries, 1_000):
            plain.put_many((b"%014d" % number, ENTRY) for number in range(start, start + 1_000))
            site.run_transaction(lambda t: [log.append(ENTRY, transaction=t) for _ in range(1_000)])
        for _ in range(options.repeat):
            for side, rows in (("scan", plain.scan), ("read", log.read)):
                begun = perf_counter()
                found = sum(1 for _ in rows())
                samples[side].append(found / (perf_counter() - begun))
                assert found == options.entries
    yield compare(
        f"ordered read of {options.entries:,} entries beside a scan",
        "entries/s",
        Measure.of(samples["scan"]),
        Measure.of(samples["read"]),
        Target(limit=0.9, unit="x scan", at_least=True),
    )


def large_rows(directory: Path, options: argparse.Namespace) -> Iterator[Row]:
    for megabytes in options.megabytes:
        tell(f"a large value of {megabytes:,} MB")
        with floodmark.open(directory / f"large-{megabytes}", site="bench") as site:
            sides = _sides(site, megabytes * MIB)
            # An even number, so that each side is first as often as second.
            samples = {name: list[float]() for name in sides}
            for repetition in range(2 * options.repeat if megabytes < 500 else 2):
                order = [*sides][:: -1 if repetition % 2 else 1]
                for name in sorted(order, key=lambda name: name.startswith("read")):
                    begun = perf_counter()
                    sides[name](b"%d" % repetition)
                    samples[name].append(megabytes / (perf_counter() - begun))
        for work in ("write", "read"):
            yield compare(
                f"{work} {megabytes:,} MB beside put_many and scan",
                "MB/s",
                Measure.of(samples[f"{work} plain"]),
                Measure.of(samples[work]),
                Target(limit=0.8, unit="x plain", at_least=True),
            )


def _sides(site: floodmark.Site, size: int) -> dict[str, Callable[[bytes], object]]:
    """Functions that write and read a value by plain calls with the same chunks, and by the layer."""
    value = b"".join(
        bytes([place // CHUNK_BYTES % 251]) * min(CHUNK_BYTES, size - place)
        for place in range(0, size, CHUNK_BYTES)
    )
    plain, blobs = site.create_namespace("plain"), LargeValues(site, "blobs")
    portion = CHUNK_BYTES * COMMIT_CHUNKS

    def write_plain(key: bytes) -> None:
        for start in range(0, size, portion):
            places = range(start, min(size, start + portion), CHUNK_BYTES)
            plain.put_many(
                (b"%b/%012d" % (key, place), value[place : place + CHUNK_BYTES]) for place in places
            )

    def read_plain(key: bytes) -> None:
        assert sum(len(chunk) for _, chunk in plain.scan(prefix=key + b"/")) == size

    def read(key: bytes) -> None:
        with blobs.open(key) as stream:
            assert sum(map(len, iter(lambda: stream.read(CHUNK_BYTES), b""))) == size

    return {
        "write plain": write_plain,
        "write": lambda key: blobs.put(key, BytesIO(value)),
        "read plain": read_plain,
        "read": read,
    }


def memory_rows(directory: Path, options: argparse.Namespace) -> Iterator[Row]:
    size = options.served_megabytes
    tell(f"{size:,} MB through a server, to and fro, by the command")
    source, copy, home = directory / "source", directory / "copy", directory / "served"
    home.mkdir()
    with source.open("wb") as file:
        for number in range(size):
            file.write(Random(number).randbytes(MIB))
    command = [sys.executable, "-m", "floodmark.cli"]
    listen = f"{LOOPBACK}:{free_port()}"
    serve: list[str | Path] = [*command, "serve", home / "site", "--site", "bench", "--listen", listen]
    with server_process("floodmark", serve, home) as server:
        served = ServedSite(url=f"grpc://{listen}")
        server.wait_until_ready(served.facts, (Unreachable,))
        with served.opened() as site:
            site.create_namespace("blobs", large_values=True)
        for work, file_name in (("put", source), ("get", copy)):
            call = [*command, work, served.url, "blobs", "key", "--file", str(file_name)]
            yield state(
                f"{size:,} MB by {work} --file: the client's peak memory",
                "MiB",
                _peak_memory(subprocess.Popen(call, stdout=subprocess.DEVNULL)) / MIB,
                Target(limit=200, unit="MiB"),
            )
            peak = _memory(server.process.pid)
            yield state("  the server's peak so far", "MiB", peak / MIB, Target(limit=200, unit="MiB"))
    if not cmp(source, copy, shallow=False):
        raise AssertionError("what was read is not what was written")


def _peak_memory(process: "subprocess.Popen[bytes]") -> int:
    """Wait until a process has ended; returns its peak resident bytes."""
    peak = 0
    while process.poll() is None:
        peak = max(peak, _memory(process.pid))
        with suppress(subprocess.TimeoutExpired):
            process.wait(0.1)
    if process.returncode:
        raise AssertionError(f"the command ended with {process.returncode}")
    return peak


def _memory(pid: int) -> int:
    """The peak resident bytes of a process so far; 0 if it has ended."""
    status = Path(f"/proc/{pid}/status").read_text()
    return next((int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("VmHWM:")), 0)


def history_rows(directory: Path, options: argparse.Namespace) -> Iterator[Row]:
    tell(f"one object with {SPANS:,} spans")
    noon = datetime(2026, 1, 31, 12, tzinfo=UTC)
    samples: dict[str, list[float]] = {"get": [], "at": []}
    with floodmark.open(directory / "history", site="bench", durability="async") as site:
        plain = site.create_namespace("plain", codec="json")
        devices: ObjectHistory[dict[str, int]] = ObjectHistory(site, "devices")
        for number in range(SPANS):
            devices.set("router", {"number": number}, at=noon + timedelta(minutes=number))
            plain.put(f"router-{number}", {"number": number})
        numbers = [number * 7_919 % SPANS for number in range(options.puts)]
        moments = [noon + timedelta(minutes=number) for number in range(SPANS)]
        for _ in range(options.repeat):
            seconds = take_turns(
                numbers,
                {
                    "get": lambda chunk: [plain.get(f"router-{number}") for number in chunk],
                    "at": lambda chunk: [devices.at("router", moments[number]) for number in chunk],
                },
            )
            for side, took in seconds.items():
                samples[side].append(took / len(numbers) * MICROSECONDS)
    yield compare(
        f"devices.at, {SPANS:,} spans, beside get",
        "us",
        Measure.of(samples["get"]),
        Measure.of(samples["at"]),
        Target(limit=2, unit="x get"),
    )


PARTS: Final = {
    "spread": spread_rows,
    "append": append_rows,
    "read": read_rows,
    "history": history_rows,
    "large": large_rows,
    "memory": memory_rows,
}


def main() -> None:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--repeat", type=int, default=5, help="repetitions of each work")
    parser.add_argument("--seconds", type=float, default=10, help="how long each log is appended to")
    parser.add_argument("--puts", type=int, default=2_000, help="calls of a repetition")
    parser.add_argument("--entries", type=int, default=1_000_000, help="entries of the ordered read")
    parser.add_argument("--megabytes", type=int, nargs="*", default=[1, 100, 1_000], help="large values")
    parser.add_argument("--served-megabytes", type=int, default=2_048, help="the value that is served")
    parser.add_argument("--parts", nargs="*", default=[*PARTS], choices=PARTS, help="what to measure")
    parser.add_argument("--directory", type=Path, help="where to measure; else a temporary directory")
    options = parser.parse_args()
    machine, rows = describe_machine(), list[Row]()
    with tempfile.TemporaryDirectory(dir=options.directory) as directory:
        for part in options.parts:
            rows += PARTS[part](Path(directory), options)
    print(render(machine, rows))


if __name__ == "__main__":
    main()
