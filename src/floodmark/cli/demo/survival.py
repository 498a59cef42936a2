"""The last steps: a process is killed, changes are accounted for, and garbage is collected."""

import subprocess
import sys
from collections.abc import Iterable
from datetime import timedelta
from itertools import islice
from threading import Timer
from typing import Final

from floodmark.cli.demo.stage import ORDERS, Stage, crash_key, run_threads, wait_until
from floodmark.clock import system_time_ms
from floodmark.codec.digest import digest_change
from floodmark.codec.values import encode_value
from floodmark.model import Change, ChangeType, Tally
from floodmark.model.errors import VersionCollected
from floodmark.model.version import physical_ms

ACKNOWLEDGED: Final = 200
THREADS: Final = 4
COUNTED: Final = 50
REWRITES: Final = 100
WAIT_SECONDS_MAX: Final = 10.0


def kill_a_writer(stage: Stage) -> None:
    """kill -9 in the middle of writing, and a look at what is left."""
    stage.begin("crash", "A process is killed (kill -9) in the middle of writing")
    stage.close()
    with stage.working("letting another process write"):
        acknowledged = _write_and_kill(stage)
    stage.open(background=False)
    found = dict(stage.orders.scan(prefix=b"crash-"))
    kept = [number for number in acknowledged if found.get(crash_key(number)) == str(number).encode()]
    beyond = len(found) - len(kept)
    stage.say(f"{len(acknowledged):,} writes were acknowledged before the kill, {len(kept):,} are there")
    stage.say(f"beyond them, {beyond} that were on disk but not acknowledged yet")
    stage.figures(acknowledged=len(acknowledged), kept=len(kept), beyond=beyond)
    stage.check("everything acknowledged is there", 0 < len(acknowledged) == len(kept))
    stage.check("and nothing with a hole before it", set(found) == {crash_key(n) for n in range(len(found))})


def account_for_changes(stage: Stage) -> None:
    """A heartbeat's sums against the changes that a reader got."""
    stage.begin("heartbeat", "A heartbeat proves that a reader has every change")
    first = stage.site.heartbeat()
    run_threads(THREADS, lambda thread: _write_some(stage, thread))
    second = stage.site.heartbeat()
    changes = list(stage.site.changes(ORDERS, since=first.through, until=second.through))
    namespace = next(each.id for each in stage.site.statistics().namespaces if each.name == ORDERS)
    promised, got = second.sums[namespace].all, tally(changes)
    stage.say(f"the heartbeat says  {promised.changes:>4} changes, digest {promised.digest:016x}")
    stage.say(f"the reader got      {got.changes:>4} changes, digest {got.digest:016x}")
    without_one = tally(changes[:-1])
    stage.figures(changes=got.changes, digest=f"{got.digest:016x}")
    stage.check(
        "nothing is missing and nothing is changed", got == promised and second.since == first.through
    )
    stage.check("with one change left out, the sums would tell", without_one != promised)


def collect_garbage(stage: Stage) -> None:
    """Old versions go when nobody needs them any more, and not before."""
    stage.begin("garbage", "Old versions are collected, unless a safe point keeps them")
    site = stage.site
    scratch = site.create_namespace("scratch", retention=timedelta(0))
    versions = [scratch.put(b"note", f"draft {number}".encode()) for number in range(REWRITES)]
    site.hold_safe_point("reader", versions[REWRITES // 2], namespace="scratch")
    with stage.working("collecting garbage"):
        # A clock that starts again after a crash runs a little ahead; what it stamps is not yet past.
        wait_until(lambda: system_time_ms() > physical_ms(versions[-1]), WAIT_SECONDS_MAX)
        held = site.collect_garbage()
        middle = scratch.get(b"note", at=versions[REWRITES // 2])
        site.release_safe_point("reader")
        released = site.collect_garbage()
    stage.say(f"one key, written {REWRITES} times, with a safe point at its middle:")
    stage.say(
        f"{held.versions_removed} versions went, and {released.versions_removed} more after its release"
    )
    stage.figures(removed_while_held=held.versions_removed, removed_after=released.versions_removed)
    stage.check("the safe point kept what its reader sees", middle == f"draft {REWRITES // 2}".encode())
    stage.check("the newest version stays", scratch.get(b"note") == f"draft {REWRITES - 1}".encode())
    removed = held.versions_removed + released.versions_removed
    stage.check("all others are gone", removed == REWRITES - 1)
    try:
        scratch.get(b"note", at=versions[0])
    except VersionCollected:
        refused = True
    else:
        refused = False
    stage.check("reading what is gone is an error, never a wrong answer", refused)


def tally(changes: Iterable[Change]) -> Tally:
    """What a reader counts: the same sums as a heartbeat's."""
    total = Tally()
    for change in changes:
        content = encode_value(change.value or b"", change.expires_at, change.type is ChangeType.DELETE)
        total = total.plus(
            Tally(1, digest_change(change.stamp.version, change.stamp.site, change.key, content))
        )
    return total


def _write_and_kill(stage: Stage) -> list[int]:
    """Let a child write, kill it when it is well under way; the writes that it was told are done."""
    command = [sys.executable, "-m", "floodmark.cli.demo.crash_writer", str(stage.directory)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True) as child:
        assert child.stdout is not None
        patience = Timer(WAIT_SECONDS_MAX, child.kill)
        patience.start()
        try:
            lines = list(islice(child.stdout, ACKNOWLEDGED))
        finally:
            patience.cancel()
            child.kill()
        # A line that the kill cut short was not an acknowledgement.
        lines += [line for line in child.stdout if line.endswith("\n")]
    return [int(line) for line in lines]


def _write_some(stage: Stage, thread: int) -> None:
    for number in range(COUNTED):
        stage.orders.put(f"counted-{thread}-{number:03}".encode(), str(number).encode())
    stage.orders.delete(f"counted-{thread}-000".encode())
    stage.orders.put(f"counted-{thread}-001".encode(), b"for an hour", ttl=timedelta(hours=1))
