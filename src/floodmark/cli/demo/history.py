"""Steps about time: reading the past, values that expire, and following the changes."""

from datetime import timedelta
from itertools import islice
from threading import Event, Thread
from typing import Final

from floodmark.cli.demo.stage import ORDERS, Stage, percentile, wait_until
from floodmark.cli.text import align, show_bytes, show_time
from floodmark.clock import system_time_ms
from floodmark.model import Change, ChangeType
from floodmark.model.errors import FloodmarkError
from floodmark.model.version import moment_of, physical_ms

FOLLOWED: Final = 100
FOLLOW_SECONDS_MAX: Final = 10.0
EXPIRE_SECONDS_MAX: Final = 3.0


def travel_in_time(stage: Stage) -> None:
    """The same key at three moments."""
    stage.begin("history", "Every version of a key can be read, by version or by time")
    orders, key = stage.orders, b"order-of-ada"
    placed = orders.put(key, b"placed")
    # A moment names its whole millisecond: let it pass, so that the next write is in another.
    wait_until(lambda: physical_ms(stage.site.now()) > physical_ms(placed), EXPIRE_SECONDS_MAX)
    shipped = orders.put(key, b"shipped")
    now, then = orders.get(key), orders.get(key, at=placed)
    at_moment, before = orders.get(key, at=moment_of(placed)), orders.get(key, at=placed - 1)
    readings = [
        ("now", _show(now)),
        (f"at {show_time(placed)}", _show(at_moment)),
        (f"at version {placed}", _show(then)),
        (f"at version {placed - 1}", _show(before)),
    ]
    for line in align(readings):
        stage.say(line)
    stage.check("the present is the last write", now == b"shipped")
    stage.check("a version shows the past", then == b"placed" and before is None)
    stage.check("so does a time", at_moment == b"placed" and placed < shipped)


def expire(stage: Stage) -> None:
    """A value with a time to live, seen before and after."""
    stage.begin("ttl", "A value with a time to live goes by itself")
    orders, key = stage.orders, b"basket-of-grace"
    version = orders.put(key, b"3 items", ttl=timedelta(seconds=1))
    at_once = orders.get(key)
    started_ms = system_time_ms()
    with stage.working("waiting for a value to expire"):
        gone = wait_until(lambda: orders.get(key) is None, EXPIRE_SECONDS_MAX)
    waited_ms = system_time_ms() - started_ms
    past = orders.get(key, at=version)
    stage.say(f"written with a ttl of 1 s: {_show(at_once)}")
    stage.say(f"{waited_ms / 1000:.1f} s later: {_show(orders.get(key))}; in the past: {_show(past)}")
    stage.figures(expired_after_ms=waited_ms)
    stage.check("it was there at first", at_once == b"3 items")
    stage.check("it is gone, and no delete was needed", gone)
    stage.check("the past still has it", past == b"3 items")


def follow_changes(stage: Stage) -> None:
    """A second thread that sees each change as it is committed."""
    stage.begin("changes", "A second thread follows the changes as they happen")
    follower = _Follower(stage)
    written = [_write(stage, number) for number in range(FOLLOWED)]
    with stage.working("following the changes"):
        arrived = follower.wait()
    seen = [(change.key, change.type, change.value) for change, _ in follower.seen]
    versions = [change.version for change, _ in follower.seen]
    for change, _ in follower.seen[:2] + follower.seen[-1:]:
        value = "" if change.value is None else f" = {show_bytes(change.value)}"
        stage.say(f"{show_time(change.version)}  {change.type.value} {show_bytes(change.key)}{value}")
    if follower.seen:
        delays = [max(0, at_ms - physical_ms(change.version)) for change, at_ms in follower.seen]
        typical, longest = percentile(delays, 0.5), max(delays)
        stage.say(f"{len(seen)} changes, typically {typical} ms behind their commit, at most {longest} ms")
        stage.figures(changes=len(seen), delay_ms_typical=typical, delay_ms_max=longest)
    stage.check("the follower saw every change, puts and deletes", arrived and seen == written)
    stage.check("in commit order", versions == sorted(versions))


class _Follower:
    """Reads changes in a thread of its own until it has seen as many as are written."""

    def __init__(self, stage: Stage) -> None:
        self.seen: list[tuple[Change, int]] = []
        self.error: FloodmarkError | None = None
        self._done = Event()
        self._changes = stage.site.changes(ORDERS, since=stage.site.now(), follow=True, prefix=b"live-")
        Thread(target=self._run, daemon=True).start()

    def wait(self) -> bool:
        """Whether it has seen enough within reasonable time."""
        done = self._done.wait(FOLLOW_SECONDS_MAX)
        if self.error is not None:
            raise self.error
        return done

    def _run(self) -> None:
        try:
            for change in islice(self._changes, FOLLOWED):
                self.seen.append((change, system_time_ms()))
        except FloodmarkError as error:
            self.error = error
        self._done.set()


def _write(stage: Stage, number: int) -> tuple[bytes, ChangeType, bytes | None]:
    """A put, or now and then a delete of the key before; what a follower must see."""
    if number % 10 == 9:
        key = _key(number - 1)
        stage.orders.delete(key)
        return key, ChangeType.DELETE, None
    key, value = _key(number), f"step {number}".encode()
    stage.orders.put(key, value)
    return key, ChangeType.UPSERT, value


def _key(number: int) -> bytes:
    return f"live-{number:04}".encode()


def _show(value: bytes | None) -> str:
    return "nothing" if value is None else show_bytes(value)
