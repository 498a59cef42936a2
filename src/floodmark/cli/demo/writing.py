"""The first steps: a namespace, writes that are on disk when they return, and reads."""

from typing import Final

from floodmark.cli.demo.stage import ORDERS, Stage, rate, run_threads
from floodmark.cli.text import show_duration
from floodmark.clock import system_time_ms

THREADS: Final = 8
WRITE_MS: Final = 1_500
READ_MS: Final = 500
SCAN_ROWS_MAX: Final = 20_000


def create_namespace(stage: Stage) -> None:
    """A site in a directory, and a namespace in it."""
    stage.begin("namespace", "A site is a directory, a namespace a named set of keys")
    stage.open()
    settings = stage.site.create_namespace(ORDERS).settings
    stage.say(f"site {stage.site.name} with id {stage.site.id}")
    stage.say(
        f"namespace {ORDERS}: merge {settings.merge}, history kept for {show_duration(settings.retention)}"
    )
    stage.check("the site lists its namespace", stage.site.namespaces() == [ORDERS])


def write_from_threads(stage: Stage) -> None:
    """Group commit: threads that wait for the disk share an fsync."""
    stage.begin("writes", f"{THREADS} threads write, and each write is on disk before it returns")
    before = stage.site.statistics()
    started_ms = system_time_ms()
    with stage.working("writing"):
        counts = run_threads(THREADS, lambda thread: _write(stage, thread, started_ms + WRITE_MS))
    elapsed_ms = system_time_ms() - started_ms
    after = stage.site.statistics()
    written = sum(counts)
    commits, rounds = after.commits - before.commits, after.rounds - before.rounds
    per_round = commits / max(1, rounds)
    stage.say(f"{written:,} writes in {elapsed_ms / 1000:.1f} s: {rate(written, elapsed_ms):,} a second")
    stage.say(f"{per_round:.1f} commits share one fsync: whoever waits for the disk joins the next round")
    stage.figures(
        writes=written,
        writes_per_second=rate(written, elapsed_ms),
        commits_per_round=round(per_round, 2),
    )
    stage.check("the site counted every write", after.changes - before.changes == written)
    expected = {_key(thread, number) for thread, count in enumerate(counts) for number in range(count)}
    found = dict(stage.orders.scan())
    right = all(value == _value(key) for key, value in found.items())
    stage.check("every write can be read back, with its value", found.keys() == expected and right)


def read(stage: Stage) -> None:
    """Reads of single keys, and a scan in order."""
    stage.begin("reads", "Reads find a key at once, and scan a range in order")
    started_ms = system_time_ms()
    reads = found = 0
    with stage.working("reading"):
        while system_time_ms() < started_ms + READ_MS:
            key = _key(reads % THREADS, reads % 10)
            found += stage.orders.get(key) == _value(key)
            reads += 1
    elapsed_ms = system_time_ms() - started_ms
    started_ms = system_time_ms()
    rows = list(stage.orders.scan(limit=SCAN_ROWS_MAX))
    scan_ms = system_time_ms() - started_ms
    stage.say(f"{rate(reads, elapsed_ms):,} gets a second from one thread")
    stage.say(f"{len(rows):,} rows scanned in {scan_ms} ms, all as of one version")
    stage.figures(gets_per_second=rate(reads, elapsed_ms), rows_scanned=len(rows))
    stage.check("every get found its value", 0 < reads == found)
    stage.check("the scan is in order", [key for key, _ in rows] == sorted(key for key, _ in rows))


def _write(stage: Stage, thread: int, deadline_ms: int) -> int:
    """Write until time is up, but at least what the reads look for; how many."""
    orders = stage.orders
    count = 0
    while count < 10 or system_time_ms() < deadline_ms:
        key = _key(thread, count)
        orders.put(key, _value(key))
        count += 1
    return count


def _key(thread: int, number: int) -> bytes:
    return f"order-{thread}-{number:06}".encode()


def _value(key: bytes) -> bytes:
    return b"paid:" + key
