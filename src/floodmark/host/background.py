"""Background work of a site: heartbeats and expiries each second, garbage collection at an interval."""

import logging
import shutil
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from threading import Event, Thread
from typing import Final, TypeAlias

from floodmark.model.errors import FloodmarkError, StorageFull
from floodmark.partition import Node
from floodmark.partition.node import forget_commits
from floodmark.routing.batches import FORGET_MS

HEARTBEAT_SECONDS: Final = 1.0
CLOSE_SECONDS_MAX: Final = 60.0
CLOCK_AHEAD_MS_MAX: Final = 1_000
FORGET_EVERY_MS: Final = 60_000
# A page takes a few milliseconds; a longer pause leaves most of the machine to users.
COLLECT_PAUSE_SECONDS: Final = 0.01

# Collects garbage.  It calls its argument between pages, and ends if that returns False.
Collect: TypeAlias = Callable[[Callable[[], bool]], object]

_log = logging.getLogger("floodmark.site")


class Background:
    """A thread that ticks until it is stopped.  A failed tick is logged and retried."""

    def __init__(
        self,
        node: Node,
        collect: Collect,
        collect_every: timedelta,
        disk: Path | None,
        disk_reserve_bytes: int,
    ) -> None:
        self.error: str | None = None
        self._node = node
        self._collect = collect
        self._collect_every_ms = collect_every // timedelta(milliseconds=1)
        self._collected_at_ms = self._forgot_at_ms = node.clock.time_source()
        self._disk = disk
        self._disk_reserve_bytes = disk_reserve_bytes
        self._clock_warned = False
        node.storage.reconsider = self.watch_disk
        self._stopping = Event()
        self._thread = Thread(target=self._run, name="floodmark-background", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self) -> None:
        """End the thread and wait for it."""
        self._stopping.set()
        if self._thread.is_alive():
            self._thread.join(CLOSE_SECONDS_MAX)

    def watch_disk(self) -> bool:
        """Refuse writes, but not reads, while the disk is nearly full; return whether it is."""
        if self._disk is None:
            return False
        free = shutil.disk_usage(self._disk).free
        full = free < self._disk_reserve_bytes
        refusal = StorageFull(
            f"{self._disk} has {free:,} bytes left, and {self._disk_reserve_bytes:,} are kept free; "
            "make room, and writes go on by themselves",
            free=free,
        )
        self._node.storage.refuse(refusal if full else None)
        return full

    def _run(self) -> None:
        while not self._stopping.wait(HEARTBEAT_SECONDS):
            try:
                self._tick()
                self.error = None
            except FloodmarkError as error:
                self.error = str(error)
                _log.warning("the site's background work failed and is tried again: %s", error)
            except Exception as error:
                # A bug must not end the heartbeats for good: it is logged, and the next tick retries.
                self.error = repr(error)
                _log.exception("the site's background work failed unexpectedly")

    def _tick(self) -> None:
        full = self.watch_disk()
        self._watch_clock()
        self._node.sample_heat()
        # Before the heartbeat, which waits for the current commit round.
        self._node.holds.look()
        if not full:
            self._node.heartbeat()
            self._node.expiries.tell()
            self._forget()
        now_ms = self._node.clock.time_source()
        if now_ms - self._collected_at_ms >= self._collect_every_ms:
            self._collected_at_ms = now_ms
            self._collect(self._may_go_on)

    def _forget(self) -> None:
        """Delete the outcomes of old commits at intervals; several nodes do so together."""
        now_ms = self._node.clock.time_source()
        if not self._node.number and now_ms - self._forgot_at_ms >= FORGET_EVERY_MS:
            self._forgot_at_ms = now_ms
            forget_commits(self._node, FORGET_MS)

    def _watch_clock(self) -> None:
        ahead_ms = self._node.clock.ahead_ms()
        if ahead_ms > CLOCK_AHEAD_MS_MAX and not self._clock_warned:
            _log.warning(
                "this machine's clock lies %d ms behind versions already given; it was set back, or ran "
                "ahead before. Versions go on growing, but moments do not match real time until then",
                ahead_ms,
            )
        self._clock_warned = ahead_ms > CLOCK_AHEAD_MS_MAX

    def _may_go_on(self) -> bool:
        # A pause between two pages, for the writers and to notice a stop.
        return not self._stopping.wait(COLLECT_PAUSE_SECONDS)
