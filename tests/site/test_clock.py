"""What a site makes of a machine whose clock jumps: nothing is lost, and nothing lives too long."""

from datetime import timedelta
from pathlib import Path

import pytest
from tests.cli.support import run
from tests.clock.fakes import FakeTime
from tests.site.support import HookedEngine

import floodmark
from floodmark.host.examination import CheckResult
from floodmark.model.errors import ClockSkew
from floodmark.model.version import physical_ms
from floodmark.site import Site, open_engine
from floodmark.site.opening import open_accepting

HOUR_MS = 3_600_000
DAY_MS = 24 * HOUR_MS
YEAR_MS = 365 * DAY_MS


def open_site(engine: HookedEngine, wall: FakeTime, elapsed: FakeTime) -> Site:
    engine.reopen()
    return open_engine(engine, site="oslo", site_id=7, time_source=wall, elapsed_source=elapsed)


def test_reading_a_year_ahead_takes_no_record_and_is_not_kept() -> None:
    engine, wall, elapsed = HookedEngine(), FakeTime(), FakeTime(0)
    with open_site(engine, wall, elapsed) as site:
        users = site.create_namespace("users", ttl=timedelta(days=30), retention=timedelta(hours=1))
        users.put(b"ada", b"1")
        wall.ms += YEAR_MS
        with pytest.raises(ClockSkew, match="accept-clock"):
            users.put(b"grace", b"1")
        with pytest.raises(ClockSkew):
            site.collect_garbage()
        with pytest.raises(ClockSkew):
            site.heartbeat()
        assert users.get(b"ada") == b"1"
        assert dict(users.scan()) == {b"ada": b"1"}
        assert site.statistics().recoveries == 0
        assert [finding.check for finding in node_findings(site)] == ["clock"]
        wall.ms -= YEAR_MS
        users.put(b"grace", b"1")
        assert site.statistics().clock_ahead_ms == 0
    with open_site(engine, wall, FakeTime(0)) as site:
        site.collect_garbage()
        assert dict(site.namespace("users").scan()) == {b"ada": b"1", b"grace": b"1"}


def node_findings(site: Site) -> list[CheckResult]:
    return [
        finding
        for finding in site.host.verification.examine(True)
        if finding.check == "clock" and finding.severity == "problem"
    ]


def test_what_was_put_after_a_set_back_expires_in_its_time() -> None:
    engine, wall, elapsed = HookedEngine(), FakeTime(), FakeTime(0)
    with open_site(engine, wall, elapsed) as site:
        users = site.create_namespace("users")
        users.put(b"before", b"1", ttl=timedelta(minutes=1))
        wall.ms -= HOUR_MS
        version = users.put(b"after", b"1", ttl=timedelta(minutes=1))
        assert physical_ms(version) > wall.ms + HOUR_MS - 1_000
        assert users.get(b"after") == b"1"
        assert dict(users.scan()) == {b"before": b"1", b"after": b"1"}
        assert users.get(b"after", at=version) == b"1"
        wall.ms += 62_000
        elapsed.ms += 62_000
        assert users.get(b"after") is None
        assert dict(users.scan()) == {b"before": b"1"}
        wall.ms += HOUR_MS
        elapsed.ms += HOUR_MS
        assert dict(users.scan()) == {}


def test_site_that_is_far_behind_the_clock_is_refused_until_that_is_accepted(tmp_path: Path) -> None:
    wall = FakeTime()
    with floodmark.open(tmp_path, site="oslo", background=False, time_source=wall) as site:
        site.create_namespace("users").put(b"ada", b"1")
    wall.ms += YEAR_MS
    with pytest.raises(ClockSkew, match="accept-clock"):
        floodmark.open(tmp_path, background=False, time_source=wall).namespace("users").put(b"x", b"1")
    with open_accepting(tmp_path, clock=True, time_source=wall) as site:
        site.now()
    with floodmark.open(tmp_path, background=False, time_source=wall) as site:
        assert physical_ms(site.namespace("users").put(b"ada", b"2")) == wall.ms


def test_doctor_names_the_clock_and_accepts_it(tmp_path: Path) -> None:
    """By the machine's own clock: the site was last written in 2023."""
    long_ago = FakeTime()
    with floodmark.open(tmp_path, site="oslo", background=False, time_source=long_ago) as site:
        site.create_namespace("users").put(b"ada", b"1")
    refused = run("doctor", tmp_path, "--quick")
    assert refused.code == 1
    assert "doctor DIRECTORY --accept-clock" in " ".join(refused.text.split())
    accepted = run("doctor", tmp_path, "--quick", "--accept-clock")
    assert accepted.code == 1
    assert "accepted: this machine's time" in " ".join(accepted.text.split())
    assert run("doctor", tmp_path, "--quick", "--accept-clock").code == 0
