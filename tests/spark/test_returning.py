"""A site is built up from backups by Spark, whatever its namespaces merge by, and all hold the same then."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest
from pyspark.sql import SparkSession
from tests.links.support import POLICIES, Served, ServeSite, require_equal, share, write_everywhere
from tests.server.support import LOOPBACK
from tests.spark.support_backup import address_of

import floodmark
from floodmark.model.errors import InvalidArgument, InvalidConfiguration, Rejoining
from floodmark.replication.topology import MemberSite, Topology
from floodmark.server import serve
from floodmark.spark.jobs import ReturnSummary, backup, join, rejoin, replicate_topology, site_addresses

ROUNDS = 12


def back_up(served: Served, spark: SparkSession, target: Path) -> None:
    for namespace in POLICIES:
        backup(address_of(served.url), namespace, str(target / namespace), spark=spark)


def changed(topology: Topology, name: str, site: MemberSite) -> Topology:
    return msgspec.structs.replace(topology, epoch=topology.epoch + 1, sites={**topology.sites, name: site})


@contextmanager
def serving(directory: Path, name: str, site_id: int) -> Iterator[Served]:
    """A site without data."""
    site = floodmark.open(directory, site=name, site_id=site_id)
    with serve(site, LOOPBACK) as server:
        yield Served(site=site, server=server, directory=directory)


def replicate_once(topology: Topology, spark: SparkSession) -> None:
    summary = replicate_topology(topology, site_addresses(topology), once=True, spark=spark)
    assert sum(link.findings for link in summary.links) == 0


@pytest.mark.soak
def test_site_that_lost_its_data_comes_back_with_what_others_know(
    serve_site: ServeSite, spark: SparkSession, tmp_path: Path
) -> None:
    served, topology = share(serve_site, ("oslo", "rome"))
    oslo, rome = served["oslo"], served["rome"]
    write_everywhere([oslo.site, rome.site], ROUNDS)
    replicate_once(topology, spark)
    write_everywhere([oslo.site], ROUNDS, ROUNDS)
    back_up(oslo, spark, tmp_path / "backups")
    write_everywhere([rome.site], ROUNDS, ROUNDS)
    # Some of what was written behind the backup is known at Rome.
    oslo.site.namespace("counts").add(b"all", 100)
    replicate_once(topology, spark)
    with serving(tmp_path / "reborn", "oslo", oslo.site.id) as reborn:
        entry = msgspec.structs.replace(topology.sites["oslo"], incarnation=2, url=reborn.url)
        topology = changed(topology, "oslo", entry)
        addresses = site_addresses(topology)

        def build_up(namespace: str) -> ReturnSummary:
            place = str(tmp_path / "backups" / namespace)
            return rejoin(
                place, addresses["oslo"], namespace, topology=topology, addresses=addresses, spark=spark
            )

        assert build_up("counts").missing == ["profiles", "users"]
        assert build_up("counts").resumed
        with pytest.raises(Rejoining):
            reborn.site.namespace("counts").add(b"all")
        assert build_up("users").missing == ["profiles"]
        assert build_up("profiles").missing == []
        with pytest.raises(InvalidArgument, match="increment its `incarnation`"):
            build_up("counts")
        reborn.site.namespace("counts").add(b"all", 1000)
        replicate_once(topology, spark)
        require_equal([reborn.site, rome.site])
        assert rome.site.namespace("counts").get(b"all") == 4 * ROUNDS + 1100


@pytest.mark.soak
def test_new_site_goes_on_from_the_backup_that_it_was_built_from(
    serve_site: ServeSite, spark: SparkSession, tmp_path: Path
) -> None:
    served, topology = share(serve_site, ("oslo", "rome"))
    sites = [each.site for each in served.values()]
    write_everywhere(sites, ROUNDS)
    replicate_once(topology, spark)
    with serving(tmp_path / "lund", "lund", 77) as lund:
        with pytest.raises(InvalidConfiguration, match="does not share 'users'"):
            join(str(tmp_path), address_of(lund.url), "users", spark=spark)
        topology = changed(topology, "lund", MemberSite(id=77, url=lund.url))
        for site in [*sites, lund.site]:
            site.set_topology(topology)
        back_up(served["rome"], spark, tmp_path / "backups")
        write_everywhere(sites, ROUNDS, ROUNDS)
        for namespace in POLICIES:
            summary = join(
                str(tmp_path / "backups" / namespace), address_of(lund.url), namespace, spark=spark
            )
            assert summary.verified
        write_everywhere([lund.site], 1)
        replicate_once(topology, spark)
        require_equal([*sites, lund.site])
        assert lund.site.namespace("counts").get(b"all") == 4 * ROUNDS + 1
