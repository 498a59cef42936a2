"""Sites whose clocks are 499 ms apart copy each other in order; a little further, and the link stops.

Promises 2 and 8: the versions of a key grow, wherever it is written, and all sites hold the same in the end.
"""

import pytest
from tests.replication.support_links import open_one, topology_of

from floodmark.clock.hybrid import SKEW_MS_MAX
from floodmark.engine import MemoryEngine
from floodmark.links.steps import plan_step, run_step
from floodmark.model.errors import ClockSkew
from floodmark.partition import FAMILIES
from floodmark.testing.clock import START_MS, SimulatedTime

NAMES = ("oslo", "rome", "bonn")


class Skewed:
    """Sites under clocks of their own: Oslo's is right, Rome's ahead of it, Bonn's in between."""

    def __init__(self, apart_ms: int) -> None:
        self.times = {
            name: SimulatedTime(START_MS + offset_ms)
            for name, offset_ms in zip(NAMES, (0, apart_ms, apart_ms // 2), strict=True)
        }
        self.sites = {name: open_one(MemoryEngine(FAMILIES), name, self.times[name]) for name in NAMES}
        for site in self.sites.values():
            site.create_namespace("users")
            site.set_topology(topology_of(*NAMES))

    def pass_time(self, milliseconds: int) -> None:
        for time in self.times.values():
            time.advance(milliseconds)

    def put(self, name: str, value: bytes) -> int:
        return self.sites[name].namespace("users").put(b"key", value)

    def get(self, name: str) -> bytes | None:
        return self.sites[name].namespace("users").get(b"key")

    def link(self, source: str, target: str) -> None:
        hosts = self.sites[source].host, self.sites[target].host
        run_step(*hosts, plan_step(*hosts, ("users",)))

    def link_all(self) -> None:
        for source in NAMES:
            for target in NAMES:
                if source != target:
                    self.link(source, target)


def test_whoever_has_heard_of_a_write_writes_above_it_though_its_clock_is_499_ms_behind() -> None:
    skewed = Skewed(SKEW_MS_MAX - 1)
    versions = []
    for number, name in enumerate(NAMES * 4):
        value = b"%d" % number
        versions.append(skewed.put(name, value))
        skewed.link_all()
        assert {skewed.get(each) for each in NAMES} == {value}
        skewed.pass_time(number % 3)
    assert versions == sorted(versions)


def test_sites_that_are_499_ms_apart_and_write_at_once_come_to_hold_the_same() -> None:
    skewed = Skewed(SKEW_MS_MAX - 1)
    last = dict.fromkeys(NAMES, 0)
    for number in range(10):
        stamps = {}
        for name in NAMES:
            version = skewed.put(name, b"%s %d" % (name.encode(), number))
            assert version > last[name]
            last[name] = stamps[name] = version
        skewed.link_all()
        winner = max(NAMES, key=lambda name: stamps[name])
        assert {skewed.get(each) for each in NAMES} == {b"%s %d" % (winner.encode(), number)}
        skewed.pass_time(7)


def test_a_link_between_clocks_that_are_further_apart_stops_and_drops_nothing() -> None:
    skewed = Skewed(SKEW_MS_MAX + 1)
    version = skewed.put("rome", b"early")
    for _ in range(3):
        with pytest.raises(ClockSkew):
            skewed.link("rome", "oslo")
    assert skewed.get("oslo") is None
    skewed.times["oslo"].advance(1)
    skewed.link("rome", "oslo")
    assert skewed.get("oslo") == b"early"
    assert skewed.put("oslo", b"later") > version
