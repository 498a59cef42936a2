"""A site that falls silent, or a second driver, holds up no other link and raises no alarm of its own."""

import socket
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from threading import Event
from typing import NamedTuple

import pytest
from pyspark.sql import SparkSession
from tests.links.support import Replication, Served, ServeSite, SiteProcess, describe, share
from tests.waiting import HANG_SECONDS, wait_until

from floodmark.links.connections import SiteConnections, attend
from floodmark.links.planning import LinkOptions, Planner, plan_all
from floodmark.links.reading import Piece
from floodmark.links.steps import run_step
from floodmark.model.errors import Unreachable
from floodmark.model.ranges import KeyRange
from floodmark.replication.step import LinkStep
from floodmark.replication.topology import parse_topology
from floodmark.site import Site
from floodmark.site.address import SiteAddress
from floodmark.spark import links as spark_links
from floodmark.spark.jobs import replicate_topology
from floodmark.spark.links import (
    WORKER_SITES,
    AppliedPart,
    LinkPart,
    LinksReader,
    LinksWriter,
    StepOfLink,
)


@pytest.fixture
def silent() -> Iterator[SiteAddress]:
    """An address that takes connections and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as hole:
        yield SiteAddress(location=f"grpc://127.0.0.1:{hole.getsockname()[1]}")


class SlowSites(SiteConnections):
    """SiteConnections to sites, some of which do not answer until the test lets them."""

    def __init__(self, *slow: SiteAddress) -> None:
        super().__init__()
        self._slow = slow
        self.may_answer = Event()
        self.gave_up = False

    def get(self, address: SiteAddress) -> Site:
        if address in self._slow:
            self.gave_up |= not self.may_answer.wait(HANG_SECONDS)
        return super().get(address)


class Pair(NamedTuple):
    """Two sites that answer, and the link from one to the other."""

    oslo: Site
    rome: Site
    link: LinkOptions

    def plan(self) -> LinkStep:
        """The next step, of something that was written just now."""
        self.oslo.namespace("users").put(b"ada", b"countess")
        return plan_now([Planner(self.link, SiteConnections())])

    def position(self) -> int:
        (position,) = self.rome.host.replication.link_positions(self.oslo.id, ["users"])
        return position.through

    def stalled(self) -> list[str]:
        return [link.stalled for link in self.rome.replication().links if link.stalled is not None]


@pytest.fixture
def pair(serve_site: ServeSite) -> Pair:
    served, _ = share(serve_site, ("oslo", "rome"))
    oslo, rome = served.values()
    link = LinkOptions(
        source_id=oslo.site.id, source=_address(oslo), target=_address(rome), namespaces=("users",)
    )
    return Pair(oslo.site, rome.site, link)


def _address(served: Served) -> SiteAddress:
    return SiteAddress(location=served.url)


def plan_now(planners: list[Planner]) -> LinkStep:
    """The next step of the first link, also if it takes a while."""
    found: list[LinkStep] = []

    def is_planned() -> bool:
        found.extend(step for place, step in plan_all(planners) if place == 0)
        return bool(found)

    wait_until(is_planned, "no step was planned")
    return found[0]


# Planning


def test_a_silent_site_does_not_hold_up_the_plans_of_others(pair: Pair, silent: SiteAddress) -> None:
    to_silent = LinkOptions(
        source_id=pair.oslo.id, source=pair.link.source, target=silent, namespaces=("users",)
    )
    from_silent = LinkOptions(source_id=99, source=silent, target=pair.link.target, namespaces=("users",))
    sites = SlowSites(silent)
    planners = [Planner(link, sites) for link in (pair.link, to_silent, from_silent)]
    for number in range(5):
        pair.oslo.namespace("users").put(b"%d" % number, b"x")
        run_step(pair.oslo.host, pair.rome.host, plan_now(planners))
    assert pair.stalled() == []
    sites.close()
    # None of this took as long as a site may be silent.
    assert not sites.gave_up
    sites.may_answer.set()


def test_a_plan_that_comes_late_is_used_when_it_comes(pair: Pair) -> None:
    sites = SlowSites(pair.link.source, pair.link.target)
    planner = Planner(pair.link, sites)
    pair.oslo.namespace("users").put(b"ada", b"countess")
    assert plan_all([planner]) == []
    # It is neither begun nor waited for a second time.
    assert planner.begin() is None
    sites.may_answer.set()
    step = plan_now([planner])
    run_step(pair.oslo.host, pair.rome.host, step)
    assert pair.rome.namespace("users").get(b"ada") == b"countess"


# Tasks and commits


def test_work_is_left_behind_when_a_site_falls_silent_and_goes_on_while_all_answer(
    pair: Pair, silent: SiteAddress
) -> None:
    ended = Event()

    def work() -> str:
        ended.wait(HANG_SECONDS)
        return "done"

    with pytest.raises(Unreachable, match=silent.location):
        attend(work, SiteConnections(), [silent, pair.link.source], look_seconds=0.01, answer_seconds=0.5)

    class CountingSites(SiteConnections):
        asked = 0

        def get(self, address: SiteAddress) -> Site:
            self.asked += 1
            if self.asked == 5:
                ended.set()
            return super().get(address)

    answering = [pair.link.source, pair.link.target]
    done = attend(work, CountingSites(), answering, look_seconds=0.01, answer_seconds=HANG_SECONDS)
    assert done == "done"


def write_step(link: LinkOptions, step: LinkStep, place: int = 0) -> AppliedPart:
    """What a task says that reads and applies a step of a link, which stands at a place among the others."""
    links = [link] * (place + 1)
    part = LinkPart(StepOfLink(place, step, pieces=(Piece(0, KeyRange()),)))
    return LinksWriter(links).write(LinksReader(links).read(part))


@pytest.mark.slow
def test_a_commit_leaves_a_silent_target_behind(
    pair: Pair, silent: SiteAddress, monkeypatch: pytest.MonkeyPatch
) -> None:
    sites = SlowSites(silent)
    monkeypatch.setattr(spark_links, "WORKER_SITES", sites)
    to_silent = LinkOptions(
        source_id=pair.oslo.id, source=pair.link.source, target=silent, namespaces=("users",)
    )
    step = pair.plan()
    writer = LinksWriter([to_silent, pair.link])
    failed = AppliedPart(StepOfLink(0, step), failure="the site does not answer")
    writer.commit([failed, write_step(pair.link, step, place=1)], 0)
    wait_until(lambda: pair.position() == step.namespaces[0].until, "the step was not noted")
    assert not sites.gave_up
    sites.may_answer.set()


def test_a_stale_step_is_planned_again_without_an_alarm_and_keeps_its_connections(pair: Pair) -> None:
    step = pair.plan()
    run_step(pair.oslo.host, pair.rome.host, step)
    connected = [WORKER_SITES.get(address) for address in (pair.link.source, pair.link.target)]
    part = write_step(pair.link, step)
    assert (part.failure, part.applied) == (None, None)
    LinksWriter([pair.link]).commit([part], 0)
    assert pair.stalled() == []
    assert [WORKER_SITES.get(address) for address in (pair.link.source, pair.link.target)] == connected
    # What fails for any other reason is told.
    LinksWriter([pair.link]).commit([AppliedPart(StepOfLink(0, step), failure="it rains")], 1)
    assert pair.stalled() == ["it rains"]


# All of it


@pytest.mark.slow
def test_changes_go_on_between_the_others_when_a_site_is_stopped(
    serve_site: ServeSite, spark: SparkSession, tmp_path: Path
) -> None:
    oslo, rome = serve_site("oslo"), serve_site("rome")
    bonn = SiteProcess(tmp_path / "bonn", 77)
    urls = {"oslo": oslo.url, "rome": rome.url, "bonn": bonn.url}
    topology = parse_topology(describe(urls, {"oslo": oslo.site.id, "rome": rome.site.id, "bonn": 77}))

    def bring(key: bytes) -> None:
        """Write at one site, and wait for it at the other."""
        oslo.site.namespace("users").put(key, b"x")
        wait_until(lambda: rome.site.namespace("users").get(key) is not None, f"{key!r}")

    with Replication(partial(replicate_topology, spark=spark), topology):
        try:
            wait_until(
                lambda: all("users" in each.site.namespaces() for each in (oslo, rome)),
                "the topology is not in force",
            )
            bring(b"before")
            bonn.stop()
            for number in range(10):
                bring(b"%d" % number)
        finally:
            bonn.kill()
