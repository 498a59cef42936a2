"""A backup holds everything as of one version, says so, and notices when it does not any more."""

from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from uuid import uuid4

import msgspec
import pyarrow.parquet
import pytest
from pyspark.sql import SparkSession
from tests.links.support import Served, ServeSite
from tests.replication.support_links import IDS, Mesh
from tests.spark.support_backup import (
    address_of,
    contents,
    fill,
    held_for,
    stored_contents,
    stored_rows,
    writing,
)
from tests.spark.support_garbage import collect_old

from floodmark.files.directory import directory_at
from floodmark.model.access import Role
from floodmark.model.errors import (
    BackupDamaged,
    FormatTooNew,
    InvalidArgument,
    InvalidOption,
    NamespaceNotFound,
    NotAllowed,
    Rejoining,
    Unreachable,
    VersionCollected,
)
from floodmark.replication.topology import MemberSite, SharedNamespace, Topology
from floodmark.site import Namespace, Site
from floodmark.site.address import SiteAddress
from floodmark.spark.jobs.backups.backup import PLAN, backup, find_position, list_backups
from floodmark.spark.jobs.backups.manifest import (
    FORMAT,
    MANIFEST,
    PartKind,
    Plan,
    encode_document,
    read_manifests,
)
from floodmark.spark.jobs.backups.parts import check_backup
from floodmark.spark.jobs.backups.restore import restore


@pytest.fixture
def users(site: Site) -> Namespace:
    users = site.create_namespace("users", ttl=None, retention=timedelta(hours=1))
    fill(users)
    return users


@pytest.fixture
def oslo(served: Served, users: Namespace) -> Served:
    """The site with its users."""
    assert users.get(b"00001")
    return served


@pytest.fixture
def target(tmp_path: Path) -> Path:
    return tmp_path / "backups"


class Recorder:
    """Remembers what was reported."""

    def __init__(self) -> None:
        self.reports: list[tuple[str, int, int | None]] = []

    def report(self, stage: str, done: int, total: int | None) -> None:
        self.reports.append((stage, done, total))


def collect(site: Site) -> None:
    """Collect everything but the newest versions, whoever has read them."""
    for point in site.safe_points():
        if not point.name.startswith("spark/backup-"):
            site.host.retention.release_safe_point(point.name)
    site.update_namespace("users", retention=timedelta(0))
    collect_old(site)


# Full


def test_a_full_backup_holds_every_record_dead_or_alive(
    spark: SparkSession, served: Served, users: Namespace, target: Path
) -> None:
    with writing(users):
        summary = backup(address_of(served.url), "users", str(target), spark=spark)
    expected = contents(served.site, "users", summary.version)
    (manifest,) = list_backups(str(target))
    assert stored_contents(target, manifest) == expected
    dead = sum(kept.deleted for kept in expected.values())
    assert summary.rows == manifest.sums.counts
    assert summary.rows.tombstones == dead > 0
    assert summary.rows.live == len(list(users.scan(at=summary.version)))
    assert summary.rows.total == len(expected)
    assert not summary.resumed
    assert summary.note is None
    assert sorted(path.name for path in target.iterdir()) == [manifest.part]


def test_a_manifest_tells_everything_that_a_restore_needs(
    spark: SparkSession, served: Served, users: Namespace, target: Path
) -> None:
    before = datetime.now(UTC)
    summary = backup(address_of(served.url), "users", str(target), spark=spark)
    (manifest,) = list_backups(str(target))
    assert (manifest.format, manifest.kind, manifest.since) == (FORMAT, PartKind.FULL, 0)
    assert (manifest.site, manifest.site_id) == (served.site.name, served.site.id)
    assert manifest.namespace.name == "users"
    assert manifest.namespace.settings == users.settings
    assert manifest.watermark == {served.site.id: summary.version}
    assert manifest.collected_horizon == served.site.statistics().namespaces[0].collected_horizon
    assert abs(manifest.created_at - before) < timedelta(minutes=5)
    assert {file.name for file in manifest.files} == {
        str(path.relative_to(target / manifest.part)) for path in (target / manifest.part).rglob("*.parquet")
    }
    assert [column.name for column in manifest.columns][:3] == ["key", "value", "_change_type"]


def test_a_record_that_expired_is_counted_as_such(
    spark: SparkSession, served: Served, site: Site, target: Path
) -> None:
    users = site.create_namespace("users")
    users.put(b"gone", b"1", ttl=timedelta(milliseconds=1))
    users.put(b"here", b"1", ttl=timedelta(days=1))
    while users.get(b"gone") is not None:
        pass
    summary = backup(address_of(served.url), "users", str(target), spark=spark)
    rows = summary.rows
    assert (rows.live, rows.tombstones, rows.expired, rows.total) == (1, 0, 1, 2)
    (manifest,) = list_backups(str(target))
    assert stored_contents(target, manifest)[b"gone"].value == b"1"


@pytest.mark.slow
def test_an_empty_namespace_can_be_backed_up(
    spark: SparkSession, served: Served, site: Site, target: Path
) -> None:
    site.create_namespace("users")
    summary = backup(address_of(served.url), "users", str(target), spark=spark)
    assert summary.rows.total == 0
    assert check_backup(str(target), spark=spark).findings == []


@pytest.mark.slow
def test_progress_is_reported_to_the_end(spark: SparkSession, oslo: Served, target: Path) -> None:
    recorder = Recorder()
    backup(address_of(oslo.url), "users", str(target), spark=spark, progress=recorder)
    stage, done, total = recorder.reports[-1]
    assert recorder.reports[0] == (stage, 0, None)
    assert done == total
    assert done > 0
    check_backup(str(target), spark=spark, progress=recorder)
    assert recorder.reports[-1] == ("check parts", 1, 1)


# Incremental


@pytest.mark.slow
def test_an_incremental_backup_holds_every_change_in_between(
    spark: SparkSession, served: Served, users: Namespace, target: Path
) -> None:
    full = backup(address_of(served.url), "users", str(target), spark=spark)
    with writing(users):
        backup(address_of(served.url), "users", str(target), incremental=True, spark=spark)
        backup(address_of(served.url), "users", str(target), incremental=True, spark=spark)
    _, first, second = list_backups(str(target))
    assert (first.since, second.since) == (full.version, first.version)
    changes = list(served.site.changes("users", since=full.version, until=second.version))
    found = [row for part in (first, second) for row in stored_rows(target, part)]
    assert len(changes) > 10
    assert sorted((row["_commit_version"], row["key"], row["value"]) for row in found) == sorted(
        (change.version, change.key, change.value) for change in changes
    )
    assert check_backup(str(target), spark=spark).findings == []


def test_changes_need_something_that_they_follow(spark: SparkSession, oslo: Served, target: Path) -> None:
    with pytest.raises(InvalidArgument, match=r"no complete backup at .*; take a full one first"):
        backup(address_of(oslo.url), "users", str(target), incremental=True, spark=spark)


@pytest.mark.slow
def test_the_changes_for_the_next_time_are_held_and_nothing_else(
    spark: SparkSession, oslo: Served, target: Path
) -> None:
    full = backup(address_of(oslo.url), "users", str(target), spark=spark, hold=timedelta(hours=2))
    assert held_for(oslo.site, "spark/backup-") == {full.safe_point: full.version}
    changes = backup(address_of(oslo.url), "users", str(target), incremental=True, spark=spark)
    assert held_for(oslo.site, "spark/backup-") == {changes.safe_point: changes.version}
    last = backup(address_of(oslo.url), "users", str(target), spark=spark, hold=timedelta(0))
    assert last.safe_point is None
    assert held_for(oslo.site, "spark/backup-") == {}


@pytest.mark.slow
def test_changes_that_were_collected_call_for_a_full_backup(
    spark: SparkSession, served: Served, users: Namespace, target: Path
) -> None:
    backup(address_of(served.url), "users", str(target), spark=spark, hold=timedelta(0))
    users.put(b"later", b"1")
    collect(served.site)
    with pytest.raises(VersionCollected, match="take a full backup"):
        backup(address_of(served.url), "users", str(target), incremental=True, spark=spark)
    assert sorted(path.name for path in target.iterdir()) == [list_backups(str(target))[0].part]
    again = backup(address_of(served.url), "users", str(target), spark=spark)
    assert again.kind == "full"


def test_position_of_a_backup_has_the_watermark_as_of_its_version() -> None:
    mesh = Mesh("oslo", "rome", "bonn")
    mesh.put("oslo", b"ada")
    mesh.exchange()
    row = mesh["rome"].host.namespaces.find_namespace("users")
    version, watermark = find_position(mesh["rome"], row)
    assert watermark == mesh.watermark("rome") | {IDS["rome"]: version}
    assert watermark.keys() == set(IDS.values())
    before = mesh.watermark("rome", version)
    mesh.exchange()
    assert mesh.watermark("rome", version) == before != mesh.watermark("rome")


# Plans


def leave_plan(site: Site, target: Path, kind: PartKind, version: int, safe_point: str | None = None) -> Plan:
    """What a backup that was killed leaves behind."""
    plan = Plan(
        id=uuid4().hex,
        kind=kind,
        site=site.name,
        site_id=site.id,
        namespace=site.host.namespaces.find_namespace("users"),
        since=0,
        version=version,
        watermark={site.id: version},
        safe_point=safe_point or f"spark/backup-{uuid4().hex}",
    )
    directory_at(str(target)).publish(PLAN, encode_document(plan))
    return plan


def test_a_plan_whose_version_was_collected_is_given_up_and_that_is_said(
    spark: SparkSession, served: Served, users: Namespace, target: Path
) -> None:
    plan = leave_plan(served.site, target, PartKind.FULL, served.site.now())
    users.put(b"later", b"1")
    collect(served.site)
    summary = backup(address_of(served.url), "users", str(target), spark=spark)
    assert summary.version > plan.version
    assert not summary.resumed
    assert summary.note is not None
    assert f"version {plan.version}" in summary.note
    assert "collected" in summary.note


def test_a_plan_of_another_kind_is_given_up_and_that_is_said(
    spark: SparkSession, oslo: Served, target: Path
) -> None:
    leave_plan(oslo.site, target, PartKind.CHANGES, oslo.site.now())
    summary = backup(address_of(oslo.url), "users", str(target), spark=spark)
    assert summary.kind == "full"
    assert summary.note is not None
    assert "'changes'" in summary.note


@pytest.mark.slow
def test_a_plan_that_was_carried_out_does_not_stand_in_for_another_kind_of_backup(
    spark: SparkSession, oslo: Served, target: Path
) -> None:
    full = backup(address_of(oslo.url), "users", str(target), spark=spark)
    leave_plan(oslo.site, target, PartKind.FULL, full.version, full.safe_point)
    changes = backup(address_of(oslo.url), "users", str(target), incremental=True, spark=spark)
    assert (changes.kind, changes.since, changes.note) == ("changes", full.version, None)
    assert held_for(oslo.site, "spark/backup-") == {changes.safe_point: changes.version}
    assert not (target / PLAN).exists()


def test_a_directory_with_a_backup_of_something_else_is_refused(
    spark: SparkSession, oslo: Served, target: Path
) -> None:
    backup(address_of(oslo.url), "users", str(target), spark=spark)
    oslo.site.create_namespace("other")
    with pytest.raises(InvalidArgument, match="holds a backup of namespace 'users'"):
        backup(address_of(oslo.url), "other", str(target), spark=spark)
    oslo.site.drop_namespace("users")
    oslo.site.create_namespace("users")
    with pytest.raises(InvalidArgument, match="holds a backup of namespace 'users'"):
        backup(address_of(oslo.url), "users", str(target), incremental=True, spark=spark)


# Refusals


def test_what_cannot_be_backed_up_is_refused_before_anything_is_written(
    spark: SparkSession, served: Served, target: Path
) -> None:
    with pytest.raises(NamespaceNotFound):
        backup(address_of(served.url), "users", str(target), spark=spark)
    with pytest.raises(InvalidOption, match="floodmark serve"):
        backup(SiteAddress(location=str(served.directory)), "users", str(target), spark=spark)
    with pytest.raises(InvalidArgument, match="timedelta"):
        backup(address_of(served.url), "users", str(target), hold=timedelta(-1), spark=spark)
    nowhere = SiteAddress(location="grpc://127.0.0.1:1", timeout=timedelta(seconds=1))
    with pytest.raises(Unreachable):
        backup(nowhere, "users", str(target), spark=spark)
    assert not target.exists()


def test_whoever_may_read_may_back_up(
    spark: SparkSession, guarded: Served, token_file: Callable[..., Path], target: Path
) -> None:
    fill(guarded.site.create_namespace("users"))
    reader = SiteAddress(location=guarded.url, token_file=str(token_file(Role.READ)))
    summary = backup(reader, "users", str(target), spark=spark)
    assert summary.rows.total == len(contents(guarded.site, "users"))
    stranger = SiteAddress(location=guarded.url)
    with pytest.raises(NotAllowed):
        backup(stranger, "users", str(target), spark=spark)


# Check


@pytest.fixture
def chain(spark: SparkSession, served: Served, users: Namespace, target: Path) -> Path:
    """A sound backup of two parts."""
    backup(address_of(served.url), "users", str(target), spark=spark)
    users.put(b"later", b"1")
    backup(address_of(served.url), "users", str(target), incremental=True, spark=spark)
    return target


@pytest.mark.slow
def test_a_sound_backup_has_no_findings(spark: SparkSession, chain: Path) -> None:
    summary = check_backup(str(chain), spark=spark)
    assert summary.findings == []
    assert summary.parts == 2
    assert summary.rows == sum(each.sums.counts.total for each in list_backups(str(chain)))
    assert summary.newest_version == list_backups(str(chain))[-1].version


def data_file(target: Path) -> Path:
    """The largest file of the full part."""
    manifest = list_backups(str(target))[0]
    return target / manifest.part / max(manifest.files, key=lambda file: file.bytes).name


def drop(file: Path) -> None:
    file.unlink()


def truncate(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-1])


def flip(file: Path) -> None:
    """Change one bit in the middle of the values."""
    values = pyarrow.parquet.read_metadata(file).row_group(0).column(1)
    content = bytearray(file.read_bytes())
    content[values.data_page_offset + values.total_compressed_size // 2] ^= 1
    file.write_bytes(content)


def flip_without_checksum(file: Path) -> None:
    """As on a file system that keeps no checksums of its own."""
    flip(file)
    (file.parent / f".{file.name}.crc").unlink()


def add(file: Path) -> None:
    (file.parent / "part-more.parquet").write_bytes(file.read_bytes())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (drop, "{name} is missing"),
        (truncate, "{name} has "),
        (add, "part-more.parquet does not belong to it"),
        (flip, "{name} cannot be read"),
        (flip_without_checksum, "{name} cannot be read"),
    ],
)
def test_every_damage_is_found_and_named_and_of_a_damaged_backup_nothing_is_restored(
    spark: SparkSession, served: Served, chain: Path, damage: Callable[[Path], None], message: str
) -> None:
    file = data_file(chain)
    damage(file)
    (finding,) = check_backup(str(chain), spark=spark).findings
    assert finding.part == list_backups(str(chain))[0].part
    assert message.format(name=file.name) in finding.message
    refusal = None
    try:
        restore(str(chain), address_of(served.url), "restored", spark=spark)
    except BackupDamaged as error:
        refusal = str(error)
    if damage is add:
        # It is not read, so it harms nothing.
        assert refusal is None
    else:
        assert file.name in str(refusal)
        assert "restored" not in served.site.namespaces()


@pytest.mark.slow
def test_rows_that_are_not_those_of_the_manifest_are_found(spark: SparkSession, chain: Path) -> None:
    place = directory_at(str(chain))
    manifest = read_manifests(place)[0]
    counts = manifest.sums.counts
    wrong = {
        "the hash of its rows": msgspec.structs.replace(manifest.sums, digest=manifest.sums.digest ^ 1),
        "rows instead of": msgspec.structs.replace(
            manifest.sums, counts=msgspec.structs.replace(counts, total=counts.total + 1)
        ),
    }
    for message, sums in wrong.items():
        changed = msgspec.structs.replace(manifest, sums=sums)
        place.directory(manifest.part).publish(MANIFEST, encode_document(changed))
        (finding,) = check_backup(str(chain), spark=spark).findings
        assert message in finding.message


@pytest.mark.slow
def test_a_damaged_manifest_is_found(spark: SparkSession, chain: Path) -> None:
    part = list_backups(str(chain))[0].part
    manifest = chain / part / MANIFEST
    manifest.write_bytes(manifest.read_bytes().replace(b'"live":', b'"live": '))
    damaged, gap = check_backup(str(chain), spark=spark).findings
    assert damaged.part == part
    assert "does not match its content" in damaged.message
    assert "no complete part leads" in gap.message


@pytest.mark.slow
def test_a_missing_part_is_found_and_an_unfinished_one_is_not_wrong(spark: SparkSession, chain: Path) -> None:
    full, changes = list_backups(str(chain))
    (chain / full.part / MANIFEST).unlink()
    summary = check_backup(str(chain), spark=spark)
    assert summary.unfinished == [full.part]
    assert [finding.part for finding in summary.findings] == [changes.part]


@pytest.mark.slow
def test_a_format_that_is_not_known_is_refused(spark: SparkSession, chain: Path) -> None:
    place = directory_at(str(chain))
    manifest = read_manifests(place)[0]
    newer = msgspec.structs.replace(manifest, format=FORMAT + 1)
    place.directory(manifest.part).publish(MANIFEST, encode_document(newer))
    with pytest.raises(FormatTooNew):
        check_backup(str(chain), spark=spark)


def test_where_there_is_no_backup_nothing_can_be_checked(spark: SparkSession, tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match="no backup at"):
        check_backup(str(tmp_path / "nothing"), spark=spark)
    assert list_backups(str(tmp_path / "nothing")) == []


def test_two_sites_do_not_share_a_directory(
    spark: SparkSession, oslo: Served, serve_site: ServeSite, target: Path
) -> None:
    backup(address_of(oslo.url), "users", str(target), spark=spark)
    rome = serve_site("rome")
    rome.site.create_namespace("users")
    with pytest.raises(InvalidArgument, match="of site 'oslo'"):
        backup(address_of(rome.url), "users", str(target), spark=spark)


def test_a_backup_names_incarnations_and_a_site_that_is_half_way_back_makes_none(
    serve_site: ServeSite, spark: SparkSession, target: Path
) -> None:
    oslo = serve_site("oslo")
    sites = {"oslo": MemberSite(id=oslo.site.id, incarnation=2), "rome": MemberSite(id=200)}
    oslo.site.set_topology(Topology(epoch=1, sites=sites, namespaces={"users": SharedNamespace()}))
    with pytest.raises(Rejoining, match="takes no part before it has its data back"):
        backup(address_of(oslo.url), "users", str(target), spark=spark)
    membership = oslo.site.host.membership
    membership.declare_loaded("users")
    membership.adopt_watermark("users", {oslo.site.id: 1}, 0)
    assert membership.finish_rejoining() == []
    backup(address_of(oslo.url), "users", str(target), spark=spark)
    assert [each.incarnations for each in list_backups(str(target))] == [{oslo.site.id: 2, 200: 1}]
