"""Ctrl-C and SIGTERM, while a command is at work on Spark: jobs that go on end in order, others at once."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Event
from typing import Any

import pytest
from tests.cli.support import running
from tests.links.support import ServeSite
from tests.spark.support_verify import World
from tests.waiting import HANG_SECONDS, wait_until

from floodmark.partition.partition import LocalPartition

pytestmark = pytest.mark.slow


@pytest.fixture
def world(serve_site: ServeSite) -> World:
    world = World(serve_site)
    world.fill()
    return world


@contextmanager
def stalling(monkeypatch: pytest.MonkeyPatch) -> Iterator[Event]:
    """Sites whose records cannot be read inside the block; an event says that somebody has tried."""
    tried, go_on = Event(), Event()
    scan_records = LocalPartition.scan_records

    def stall(self: LocalPartition, *arguments: Any, **options: Any) -> Any:
        tried.set()
        go_on.wait(HANG_SECONDS)
        return scan_records(self, *arguments, **options)

    with monkeypatch.context() as patch:
        patch.setattr(LocalPartition, "scan_records", stall)
        try:
            yield tried
        finally:
            go_on.set()


@pytest.mark.parametrize(
    ("command", "number", "code"),
    [
        ("verify", signal.SIGINT, 130),
        ("backup", signal.SIGTERM, 143),
    ],
)
def test_job_that_has_nothing_to_tell_yet_is_cancelled_at_once(
    command: str, number: int, code: int, world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = {
        "verify": ["verify", *world.urls],
        "backup": ["backup", world.urls[0], "users", str(tmp_path / "backup")],
    }[command]
    with stalling(monkeypatch) as tried, running(*arguments) as process:
        assert tried.wait(HANG_SECONDS)
        process.send_signal(number)
        # The sites answer again only when this is over.
        printed, errors = process.communicate(timeout=HANG_SECONDS)
    assert (process.returncode, printed, errors) == (code, b"", b"")
    # A backup keeps what it needs to be taken up again.
    held = [point for site in world.sites.values() for point in site.host.retention.safe_points()]
    assert len(held) == (1 if command == "backup" else 0)


def test_watch_ends_with_what_the_last_pass_said(world: World) -> None:
    with running("verify", *world.urls, "--watch", "--every", "1h") as process:
        assert process.stdout is not None
        while (line := process.stdout.readline()) != b"the sites agree\n":
            assert line, process.communicate()
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=HANG_SECONDS)
    assert (process.returncode, errors) == (0, b"")
    assert [site.host.retention.safe_points() for site in world.sites.values()] == [[], []]


def test_export_that_follows_ends_in_order_and_tells_what_it_has_done(world: World, tmp_path: Path) -> None:
    table = tmp_path / "table"
    command = ["export", world.urls[0], "users", str(table), "--format", "parquet", "--json"]
    with running(*command) as process:
        wait_until(lambda: any(table.rglob("*.parquet")), "nothing was exported")
        process.send_signal(signal.SIGINT)
        printed, errors = process.communicate(timeout=HANG_SECONDS)
    assert (process.returncode, errors) == (0, b"")
    assert b'"rows"' in printed
