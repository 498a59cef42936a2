"""What was backed up comes back as it was: at any version, in another place, and with the changes since."""

from datetime import timedelta
from pathlib import Path

import pytest
from msgspec.structs import replace
from pyspark.sql import SparkSession
from tests.links.support import Served, ServeSite
from tests.spark.processes import SparkProcess
from tests.spark.support_backup import Kept, address_of, contents, fill, held_for, writing

from floodmark.model.errors import (
    BackupDamaged,
    InvalidArgument,
    InvalidConfiguration,
    InvalidOption,
    InvalidVersion,
    Unreachable,
    WrongPolicy,
)
from floodmark.model.ranges import KeyRange
from floodmark.model.version import Version
from floodmark.replication.topology import MemberSite, SharedNamespace, Topology
from floodmark.site import Namespace, Site
from floodmark.site.address import SiteAddress
from floodmark.spark.jobs.backups.backup import backup
from floodmark.spark.jobs.backups.parts import check_backup
from floodmark.spark.jobs.backups.restore import restore, restoring


@pytest.fixture
def users(site: Site) -> Namespace:
    users = site.create_namespace("users", ttl=timedelta(days=30), retention=timedelta(hours=7))
    fill(users)
    return users


@pytest.fixture
def rome(serve_site: ServeSite) -> Served:
    """Another site to restore into."""
    return serve_site("rome")


@pytest.fixture
def oslo(served: Served, users: Namespace) -> Served:
    """The site with its users."""
    assert users.get(b"00001")
    return served


@pytest.fixture
def target(tmp_path: Path) -> str:
    return str(tmp_path / "backups")


def in_range(kept: dict[bytes, Kept], start: bytes, end: bytes) -> dict[bytes, Kept]:
    return {key: each for key, each in kept.items() if start <= key < end}


def test_everything_comes_back_at_another_site(
    spark: SparkSession, served: Served, users: Namespace, rome: Served, target: str
) -> None:
    with writing(users):
        saved = backup(address_of(served.url), "users", target, spark=spark)
    summary = restore(target, address_of(rome.url), "users", spark=spark)
    assert contents(rome.site, "users") == contents(served.site, "users", saved.version)
    restored = rome.site.namespace("users")
    assert dict(restored.scan()) == dict(users.scan(at=saved.version))
    assert restored.settings == users.settings
    assert (summary.version, summary.rows) == (saved.version, saved.rows)
    assert (summary.created, summary.resumed, summary.verified) == (True, False, True)
    assert held_for(rome.site, "spark/restore-") == {}


@pytest.mark.slow
def test_everything_comes_back_in_a_new_namespace_of_the_same_site(
    spark: SparkSession, served: Served, users: Namespace, target: str
) -> None:
    saved = backup(address_of(served.url), "users", target, spark=spark)
    users.put(b"00001", b"changed since")
    restore(target, address_of(served.url), "again", spark=spark)
    assert contents(served.site, "again") == contents(served.site, "users", saved.version)
    assert users.get(b"00001") == b"changed since"


@pytest.mark.slow
def test_every_version_in_the_chain_can_be_restored(
    spark: SparkSession, served: Served, users: Namespace, rome: Served, target: str
) -> None:
    source = address_of(served.url)
    backup(source, "users", target, spark=spark)
    users.put(b"00001", b"1")
    versions = [users.delete(b"00002")]
    users.put(b"00002", b"back")
    versions.append(backup(source, "users", target, incremental=True, spark=spark).version)
    versions.append(users.delete(b"00001"))
    users.put(b"added", b"1", ttl=timedelta(days=1))
    newest = backup(source, "users", target, incremental=True, spark=spark).version
    for number, version in enumerate(versions):
        summary = restore(target, address_of(rome.url), f"at-{number}", at=version, spark=spark)
        assert summary.verified
        assert contents(rome.site, f"at-{number}") == contents(served.site, "users", version)
    assert restore(target, address_of(rome.url), "newest", spark=spark).version == newest
    assert contents(rome.site, "newest") == contents(served.site, "users", newest)


@pytest.mark.parametrize("beside", [-1, 1])
def test_a_version_that_the_backup_does_not_lead_to_is_refused_with_the_range(
    spark: SparkSession, oslo: Served, rome: Served, target: str, beside: int
) -> None:
    version = backup(address_of(oslo.url), "users", target, spark=spark).version
    with pytest.raises(InvalidVersion, match=rf"every version in \[{version}, {version}\]"):
        restore(target, address_of(rome.url), "users", at=version + beside, spark=spark)
    assert rome.site.namespaces() == []


@pytest.mark.slow
def test_a_range_of_keys_can_be_restored(
    spark: SparkSession, served: Served, users: Namespace, rome: Served, target: str
) -> None:
    source = address_of(served.url)
    backup(source, "users", target, spark=spark)
    users.put(b"00101", b"changed")
    users.put(b"00301", b"changed")
    backup(source, "users", target, incremental=True, spark=spark)
    keys = KeyRange(b"00100", b"00200")
    summary = restore(target, address_of(rome.url), "some", keys=keys, spark=spark)
    assert contents(rome.site, "some") == in_range(contents(served.site, "users"), b"00100", b"00200")
    assert summary.rows.total == 100
    assert summary.verified
    restore(target, address_of(rome.url), "odd", keys=KeyRange(b"\x00", b"\x01"), spark=spark)
    assert list(contents(rome.site, "odd")) == [b"\x00\xff"]


@pytest.mark.slow
def test_an_empty_backup_gives_an_empty_namespace(
    spark: SparkSession, served: Served, site: Site, rome: Served, target: str
) -> None:
    site.create_namespace("users")
    backup(address_of(served.url), "users", target, spark=spark)
    backup(address_of(served.url), "users", target, incremental=True, spark=spark)
    summary = restore(target, address_of(rome.url), "users", spark=spark)
    assert summary.rows.total == 0
    assert summary.verified
    assert contents(rome.site, "users") == {}


# What is there already


@pytest.mark.slow
def test_a_namespace_with_other_records_is_refused_however_often_one_tries(
    spark: SparkSession, oslo: Served, rome: Served, target: str
) -> None:
    backup(address_of(oslo.url), "users", target, spark=spark)
    other = rome.site.create_namespace("users")
    other.put(b"mine", b"1")
    other.delete(b"mine")
    for _ in range(2):
        with pytest.raises(InvalidArgument, match="'users' of site 'rome' holds other records"):
            restore(target, address_of(rome.url), "users", spark=spark)
    assert list(contents(rome.site, "users")) == [b"mine"]


@pytest.mark.slow
def test_a_restore_that_is_run_again_changes_nothing(
    spark: SparkSession, oslo: Served, rome: Served, target: str
) -> None:
    backup(address_of(oslo.url), "users", target, spark=spark)
    restore(target, address_of(rome.url), "users", spark=spark)
    before, restored = contents(rome.site, "users"), rome.site.now()
    summary = restore(target, address_of(rome.url), "users", spark=spark)
    assert (summary.created, summary.resumed, summary.verified) == (False, True, True)
    assert contents(rome.site, "users") == before
    assert list(rome.site.changes("users", since=restored)) == []


@pytest.mark.slow
def test_another_restore_into_the_same_namespace_is_refused(
    spark: SparkSession, oslo: Served, rome: Served, target: str
) -> None:
    version = backup(address_of(oslo.url), "users", target, spark=spark).version
    restore(target, address_of(rome.url), "users", spark=spark)
    backup(address_of(oslo.url), "users", target, incremental=True, spark=spark)
    for at, keys in ((None, KeyRange()), (version, KeyRange(b"1", None))):
        with pytest.raises(InvalidArgument, match="holds other records"):
            restore(target, address_of(rome.url), "users", at=at, keys=keys, spark=spark)


@pytest.mark.slow
def test_what_others_wrote_meanwhile_stays_and_is_told(
    spark: SparkSession, oslo: Served, rome: Served, target: str
) -> None:
    backup(address_of(oslo.url), "users", target, spark=spark)
    restore(target, address_of(rome.url), "users", spark=spark)
    restored = rome.site.namespace("users")
    restored.put(b"00001", b"newer")
    restored.delete(b"00002")
    summary = restore(target, address_of(rome.url), "users", spark=spark)
    assert not summary.verified
    assert summary.note == "not verified: 2 records are newer than the backup"
    assert (restored.get(b"00001"), restored.get(b"00002")) == (b"newer", None)


@pytest.mark.slow
def test_an_empty_namespace_keeps_its_settings(
    spark: SparkSession, oslo: Served, rome: Served, target: str
) -> None:
    backup(address_of(oslo.url), "users", target, spark=spark)
    rome.site.create_namespace("users", retention=timedelta(minutes=3))
    summary = restore(target, address_of(rome.url), "users", spark=spark)
    assert not summary.created
    assert rome.site.namespace("users").settings.retention == timedelta(minutes=3)


# Restore, then follow


@pytest.mark.slow
def test_restore_then_follow_misses_nothing_and_doubles_nothing(
    spark: SparkSession, served: Served, users: Namespace, rome: Served, target: str, tmp_path: Path
) -> None:
    source = address_of(served.url)
    with writing(users):
        backup(source, "users", target, spark=spark)
        saved = backup(source, "users", target, incremental=True, spark=spark)
        restored = restore(target, address_of(rome.url), "users", spark=spark)
    assert restored.version == saved.version
    before = rome.site.now()
    follow(spark, served.url, rome.url, restored.version, tmp_path / "checkpoint")
    assert contents(rome.site, "users") == contents(served.site, "users")
    # Each change since the backup was applied once, and none from before it again.
    expected = [change.stamp for change in served.site.changes("users", since=saved.version)]
    applied = [change.stamp for change in rome.site.changes("users", since=before)]
    assert len(expected) > 10
    assert sorted(applied) == sorted(expected)


def follow(spark: SparkSession, source: str, target: str, since: Version, checkpoint: Path) -> None:
    """Apply all changes above a version to another site."""
    options = {"namespace": "users", "readChangeFeed": "true", "startingVersion": str(since + 1)}
    changes = spark.readStream.format("floodmark").options(**options).load(source)
    query = (
        changes.writeStream.format("floodmark")
        .options(namespace="users", stamps="keep", checkpointLocation=str(checkpoint), path=target)
        .trigger(availableNow=True)
        .start()
    )
    query.awaitTermination()


# Refusals


@pytest.mark.slow
def test_a_file_that_is_lost_while_it_is_restored_is_named(
    spark: SparkSession, oslo: Served, rome: Served, target: str
) -> None:
    saved = backup(address_of(oslo.url), "users", target, spark=spark)
    with restoring(target, address_of(rome.url), "users", spark=spark) as restoration:
        next(Path(target, saved.part).rglob("*.parquet")).unlink()
        with pytest.raises(BackupDamaged, match=r"while it was restored: .*/part-\S+ is missing"):
            restoration.write()


def test_what_cannot_be_restored_is_refused(
    spark: SparkSession, oslo: Served, rome: Served, target: str
) -> None:
    with pytest.raises(InvalidArgument, match="no complete full backup"):
        restore(target, address_of(rome.url), "users", spark=spark)
    backup(address_of(oslo.url), "users", target, spark=spark)
    with pytest.raises(InvalidOption, match="floodmark serve"):
        restore(target, SiteAddress(location=str(rome.directory)), "users", spark=spark)
    nowhere = SiteAddress(location="grpc://127.0.0.1:1", timeout=timedelta(seconds=1))
    with pytest.raises(Unreachable):
        restore(target, nowhere, "users", spark=spark)


def test_an_empty_namespace_that_other_sites_share_is_refused(
    spark: SparkSession, oslo: Served, rome: Served, target: str
) -> None:
    backup(address_of(oslo.url), "users", target, spark=spark)
    sites = {"rome": MemberSite(id=rome.site.id), "bonn": MemberSite(id=77)}
    topology = Topology(epoch=1, sites=sites, namespaces={"users": SharedNamespace()})
    rome.site.set_topology(topology)
    with pytest.raises(InvalidConfiguration, match=r"'users' is shared with bonn.*--join.*--rejoin"):
        restore(target, address_of(rome.url), "users", spark=spark)
    assert list(rome.site.changes("users")) == []
    rome.site.set_topology(replace(topology, epoch=2, namespaces={}))
    assert restore(target, address_of(rome.url), "users", spark=spark).verified


def test_a_range_of_what_a_layer_keeps_is_refused(
    spark: SparkSession, served: Served, rome: Served, target: str
) -> None:
    """Its rows have keys of their own, so that nothing would be found."""
    served.site.create_namespace("files", large_values=True).put(b"eu/readme", b"text")
    backup(address_of(served.url), "files", target, spark=spark)
    with pytest.raises(WrongPolicy, match="holds large values 1, in which a range of keys means nothing"):
        restore(target, address_of(rome.url), "files", keys=KeyRange(b"eu/", b"eu0"), spark=spark)
    assert rome.site.namespaces() == []
    assert restore(target, address_of(rome.url), "files", spark=spark).verified
    restored = rome.site.namespace("files", large_values=True)
    assert list(restored.scan(b"eu/", b"eu0")) == [(b"eu/readme", b"text")]


# Elsewhere


def there_and_back(session: SparkSession, source: str, target: str, place: str) -> tuple[int, bool]:
    backup(address_of(source), "users", place, spark=session)
    backup(address_of(source), "users", place, incremental=True, spark=session)
    reports: list[int] = []

    class Recorder:
        def report(self, stage: str, done: int, total: int | None) -> None:
            reports.append(done)

    summary = restore(place, address_of(target), "users", spark=session, progress=Recorder())
    findings = check_backup(place, spark=session).findings
    assert findings == []
    return max(reports), summary.verified


@pytest.mark.parametrize("elsewhere", ["local_cluster", "connect"])
@pytest.mark.soak
def test_backup_and_restore_work_wherever_spark_runs(
    request: pytest.FixtureRequest,
    oslo: Served,
    rome: Served,
    target: str,
    elsewhere: str,
) -> None:
    process: SparkProcess = request.getfixturevalue(elsewhere)
    tasks, verified = process.run(there_and_back, oslo.url, rome.url, target)
    assert verified
    assert tasks > 0
    assert contents(rome.site, "users") == contents(oslo.site, "users")
