"""What a site does by itself: heartbeats, recovery of async writes, warnings, and nothing after close."""

import logging
from datetime import timedelta
from threading import Event

import pytest
from tests.site.support import HookedEngine, host_of, node_of
from tests.waiting import HANG_SECONDS

from floodmark.model.errors import StorageFailed
from floodmark.model.ranges import KeyRange
from floodmark.site import open_engine
from floodmark.testing import SimulatedTime


def test_heartbeats_publish_async_writes_and_end_with_the_site(
    engine: HookedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("floodmark.host.background.HEARTBEAT_SECONDS", 0.01)
    with open_engine(engine, site="oslo", background=True) as site:
        version = site.create_namespace("users").put(b"key", b"1", durability="async")
        followers = node_of(site).committer.followers
        with followers.joining(KeyRange(), heartbeats=True) as follower:
            while site.resolved_version() < version:
                follower.expect()
                followers.wait(follower, HANG_SECONDS, 0)
        thread = host_of(site).background._thread
    assert not thread.is_alive()


def test_failed_tick_is_reported_and_the_next_one_mends_it(
    engine: HookedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("floodmark.host.background.HEARTBEAT_SECONDS", 0.01)
    failed, mended = Event(), Event()

    def before(operation: str) -> None:
        if operation == "write" and not failed.is_set():
            failed.set()
            raise StorageFailed("no")
        if operation == "sync" and failed.is_set():
            mended.set()

    with open_engine(engine, site="oslo", background=True) as site:
        engine.before = before
        assert mended.wait(HANG_SECONDS)
        assert site.create_namespace("users").put(b"key", b"1")


def test_clock_that_was_set_back_is_warned_of_once(
    engine: HookedEngine, time: SimulatedTime, caplog: pytest.LogCaptureFixture
) -> None:
    with open_engine(engine, site="oslo", time_source=time) as site:
        site.now()
        time.advance(-3_600_000)
        work = host_of(site).background
        with caplog.at_level(logging.WARNING, logger="floodmark.site"):
            work._tick()
            work._tick()
        assert [record.levelname for record in caplog.records] == ["WARNING"]
        assert "set back" in caplog.records[0].getMessage()


def test_garbage_is_collected_when_it_is_time(engine: HookedEngine, time: SimulatedTime) -> None:
    with open_engine(engine, site="oslo", time_source=time, collect_every=timedelta(minutes=10)) as site:
        work = host_of(site).background
        work._tick()
        assert site.statistics().garbage.runs == 0
        time.advance(600_000)
        work._tick()
        assert site.statistics().garbage.runs == 1
