"""The site becomes a server: another process writes, follows, and exports what changes."""

import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Event, Thread, Timer
from typing import Final

import msgspec

import floodmark
from floodmark.cli.demo.stage import ORDERS, Stage
from floodmark.clock import monotonic_ms
from floodmark.feed.feeds import FeedState

WRITTEN: Final = 20_000
WAIT_SECONDS_MAX: Final = 30.0


def serve_to_others(stage: Stage) -> None:
    """A server process, a client that streams writes, one that follows, and a feed into Parquet files."""
    stage.begin("server", "The site becomes a server, and changes flow out of it")
    stage.close()
    exports = stage.directory.parent / "exports"
    with stage.working("starting a server"), _serving(stage.directory) as url:
        stage.say(f"floodmark serve oslo --listen 127.0.0.1:0    listens at {url}")
        with floodmark.connect(url) as site, floodmark.connect(url) as other:
            _write_and_follow(stage, site, other)
            _export(stage, site, exports)
    stage.open(background=False)
    kept = sum(1 for _ in stage.orders.scan(prefix=b"stream-"))
    stage.check("after the server has stopped, every acknowledged write is in the site", kept == WRITTEN)


def _write_and_follow(stage: Stage, site: floodmark.Site, other: floodmark.Site) -> None:
    seen: list[bytes] = []
    complete = Event()
    changes = other.changes(ORDERS, since="now", follow=True, prefix=b"stream-")

    def follow() -> None:
        for change in changes:
            seen.append(change.key)
            if len(seen) == WRITTEN:
                complete.set()
                return

    follower = Thread(target=follow, daemon=True)
    follower.start()
    started_ms = monotonic_ms()
    with site.namespace(ORDERS).writer() as writer:
        for number in range(WRITTEN):
            writer.put(b"stream-%06d" % number, b"on its way")
    written_ms = monotonic_ms() - started_ms
    complete.wait(WAIT_SECONDS_MAX)
    behind_ms = monotonic_ms() - started_ms - written_ms
    rate = WRITTEN * 1000 // max(1, written_ms)
    stage.say(f"one client streamed {WRITTEN:,} writes, {rate:,} a second, each on disk when acknowledged")
    stage.say(f"another followed, and had seen the last of them {behind_ms} ms later")
    stage.figures(writes_per_second=rate, behind_ms=behind_ms)
    stage.check("the follower saw every change, in order", seen == sorted(seen) and len(seen) == WRITTEN)


def _export(stage: Stage, site: floodmark.Site, exports: Path) -> None:
    site.feeds.create(
        "export", ORDERS, f"parquet:{exports}", until=site.resolved_version(), prefix=b"stream-", ranges=1
    )
    state = site.feeds.runner("export").run()
    files = sorted(exports.rglob("*.parquet"))
    stage.say(f"a feed named export wrote them to {len(files)} Parquet file(s), and is {state}")
    stage.figures(parquet_files=len(files))
    stage.check("the feed reached its target", state is FeedState.FINISHED and bool(files))


@contextmanager
def _serving(directory: Path) -> Iterator[str]:
    """A server process on a free port of this machine; it is told to stop, and waited for."""
    command = [sys.executable, "-m", "floodmark.cli", "serve", str(directory), "--listen", "127.0.0.1:0"]
    with subprocess.Popen(
        [*command, "--json"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, start_new_session=True
    ) as server:
        assert server.stdout is not None
        patience = Timer(WAIT_SECONDS_MAX, server.kill)
        patience.start()
        try:
            ready = msgspec.json.decode(server.stdout.readline())
            patience.cancel()
            yield ready["url"]
        finally:
            patience.cancel()
            server.send_signal(signal.SIGTERM)
            try:
                server.wait(WAIT_SECONDS_MAX)
            except subprocess.TimeoutExpired:
                server.kill()
