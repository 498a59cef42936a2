"""The contract of a runner: whatever takes the steps of links, sites end with the same bytes.

A subclass gives the fixture `run_links`: `run_links(topology, addresses, once=…, stop=…)` runs all links.
"""

import pytest
from tests.links.support import (
    NAMES,
    Replication,
    Run,
    ServeSite,
    require_equal,
    share,
    wait_checked,
    write_everywhere,
)
from tests.waiting import wait_until

from floodmark.links.driver import TopologySummary, site_addresses
from floodmark.links.pair import LinkPair
from floodmark.links.steps import plan_step, run_step
from floodmark.model.errors import InvalidConfiguration, StaleLink
from floodmark.replication.topology import Topology, parse_topology
from floodmark.site.address import SiteAddress

ROUNDS = 30


class RunnerContract:
    """What every runner does."""

    def run_once(self, run_links: Run, topology: Topology) -> TopologySummary:
        return run_links(topology, site_addresses(topology), once=True)

    def test_three_sites_with_writes_everywhere_hold_the_same_bytes(
        self, serve_site: ServeSite, run_links: Run
    ) -> None:
        served, topology = share(serve_site)
        sites = [each.site for each in served.values()]
        for turn in range(2):
            write_everywhere(sites, ROUNDS, turn * ROUNDS)
            summary = self.run_once(run_links, topology)
            require_equal(sites)
            assert (summary.wrong, sum(link.findings for link in summary.links)) == (0, 0)
            assert {(link.source, link.target) for link in summary.links} == {
                (source, target) for source in served for target in served if source != target
            }
        for site in sites:
            assert site.namespace("counts").get(b"all") == 2 * ROUNDS * len(sites)

    def test_a_run_without_changes_has_no_effect(self, serve_site: ServeSite, run_links: Run) -> None:
        served, topology = share(serve_site, NAMES[:2])
        oslo, rome = (each.site for each in served.values())
        write_everywhere([oslo, rome], 3)
        self.run_once(run_links, topology)
        before = [list(site.changes("users")) for site in (oslo, rome)]
        self.run_once(run_links, topology)
        assert [list(site.changes("users")) for site in (oslo, rome)] == before

    @pytest.mark.slow
    def test_two_runners_at_once_do_no_harm(self, serve_site: ServeSite, run_links: Run) -> None:
        served, topology = share(serve_site, NAMES[:2])
        sites = [each.site for each in served.values()]
        with Replication(run_links, topology), Replication(run_links, topology):
            write_everywhere(sites, ROUNDS)
            self.run_once(run_links, topology)
        require_equal(sites)
        for site in sites:
            assert all(link.intervals_wrong == 0 for link in site.replication().links)

    def test_a_repeated_step_is_refused_and_changes_nothing(
        self, serve_site: ServeSite, run_links: Run
    ) -> None:
        served, topology = share(serve_site, NAMES[:2])
        oslo, rome = (each.site for each in served.values())
        oslo.namespace("users").put(b"ada", b"countess")
        step = plan_step(oslo.host, rome.host, ["users"])
        self.run_once(run_links, topology)
        rome.namespace("users").delete(b"ada")
        with pytest.raises(StaleLink):
            run_step(oslo.host, rome.host, step)
        assert rome.namespace("users").get(b"ada") is None

    @pytest.mark.slow
    def test_heartbeats_arrive_on_idle_links_and_prove_that_nothing_is_lost(
        self, serve_site: ServeSite, run_links: Run
    ) -> None:
        served, topology = share(serve_site, NAMES[:2])
        oslo, rome = (each.site for each in served.values())
        with Replication(run_links, topology) as replication:
            wait_checked(rome, 2)
            write_everywhere([oslo, rome], ROUNDS)
            wait_checked(oslo, 2)
            wait_checked(rome, 2)
            for link in [*oslo.replication().links, *rome.replication().links]:
                assert link.intervals_wrong == 0
                assert link.heartbeat_age_ms is not None
        require_equal([oslo, rome])
        assert replication.summary is not None
        assert replication.summary.epoch == topology.epoch
        assert all(link.lag_ms_p99 is not None for link in replication.summary.links)

    def test_a_site_that_does_not_match_the_topology_is_refused(
        self, serve_site: ServeSite, run_links: Run
    ) -> None:
        oslo, rome = serve_site("oslo"), serve_site("rome")
        topology = parse_topology(
            f"""
            epoch = 1
            sites.oslo = {{id = {oslo.site.id}, url = "{oslo.url}"}}
            sites.bonn = {{id = {rome.site.id}, url = "{rome.url}"}}
            namespaces.users = {{}}
            """
        )
        with pytest.raises(InvalidConfiguration, match="rome"):
            self.run_once(run_links, topology)

    def test_a_pair_copies_in_one_direction_and_goes_on_where_it_was(
        self, serve_site: ServeSite, run_links: Run
    ) -> None:
        oslo, rome = serve_site("oslo"), serve_site("rome")
        users = oslo.site.create_namespace("users")
        users.put_many({b"%d" % number: b"before" for number in range(300)})
        users.delete(b"7")
        source, target = (SiteAddress(location=each.url) for each in (oslo, rome))
        for number in range(2):
            users.put(b"new-%d" % number, b"x")
            pair = LinkPair.of(source, target)
            summary = run_links(pair.topology, pair.addresses, once=True)
            assert [(link.source, link.target, link.wrong) for link in summary.links] == [("oslo", "rome", 0)]
            copy = rome.site.namespace("users")
            assert dict(copy.scan()) == dict(users.scan())
        copy.put(b"own", b"of rome")
        copy.put(b"1", b"newer")
        pair = LinkPair.of(source, target)
        assert pair.topology.epoch == 1
        run_links(pair.topology, pair.addresses, once=True)
        assert (users.get(b"own"), users.get(b"1"), copy.get(b"1")) == (None, b"before", b"newer")

    @pytest.mark.slow
    def test_a_site_that_comes_late_gets_everything(self, serve_site: ServeSite, run_links: Run) -> None:
        served, topology = share(serve_site, NAMES[:2])
        oslo, rome = served.values()
        rome.server.close()
        oslo.site.namespace("users").put(b"ada", b"countess")
        with Replication(run_links, topology):
            wait_until(
                lambda: any(link.stalled for link in oslo.site.replication().links),
                "oslo does not show why rome is silent",
            )
