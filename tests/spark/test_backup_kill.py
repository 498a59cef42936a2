"""kill -9 in the middle of a backup or a restore: the next run ends as if nothing had been."""

import random
import sys
from pathlib import Path

import pytest
from pyspark.sql import SparkSession
from tests.links.support import Served, ServeSite
from tests.spark.support_backup import address_of, contents, fill, held_for, stored_contents, writing
from tests.spark.support_kill import Arguments, Point, run_job

from floodmark.files.directory import directory_at
from floodmark.site import Namespace, Site
from floodmark.spark.jobs.backups.backup import PLAN, backup, list_backups
from floodmark.spark.jobs.backups.manifest import Plan, decode_document
from floodmark.spark.jobs.backups.parts import check_backup
from floodmark.spark.jobs.backups.restore import restore

KEYS = 4_000


@pytest.fixture
def users(site: Site) -> Namespace:
    """Records in several partitions, so that Spark has several tasks."""
    users = site.create_namespace("users")
    fill(users, KEYS)
    for number in range(0, KEYS, KEYS // 6):
        site.split("users", b"%05d" % (number + 1))
    return users


@pytest.fixture
def target(tmp_path: Path) -> Path:
    return tmp_path / "backups"


def read_plan(target: Path) -> Plan:
    content = directory_at(str(target)).read(PLAN)
    assert content is not None
    return decode_document(content, Plan, PLAN)


@pytest.mark.parametrize(
    "points",
    [
        pytest.param(["writing"], marks=pytest.mark.soak),
        pytest.param(["planned", "writing", "written"], marks=pytest.mark.soak),
    ],
)
def test_a_backup_that_is_killed_ends_like_one_that_was_not(
    spark: SparkSession, served: Served, users: Namespace, target: Path, points: list[Point]
) -> None:
    plans = []
    with writing(users, KEYS):
        for point in points:
            outcome = run_job(Arguments(job="backup", url=served.url, directory=str(target), point=point))
            assert outcome.killed, outcome.said
            assert list_backups(str(target)) == []
            plans.append(read_plan(target))
        summary = backup(address_of(served.url), "users", str(target), spark=spark)
    assert plans == [plans[0]] * len(points)
    assert summary.resumed
    assert summary.version == plans[0].version
    (manifest,) = list_backups(str(target))
    assert stored_contents(target, manifest) == contents(served.site, "users", summary.version)
    assert sorted(path.name for path in target.iterdir()) == [manifest.part]
    assert held_for(served.site, "spark/backup-") == {summary.safe_point: summary.version}
    assert check_backup(str(target), spark=spark).findings == []


@pytest.mark.soak
def test_changes_that_were_complete_when_the_backup_was_killed_are_not_taken_twice(
    spark: SparkSession, served: Served, users: Namespace, target: Path
) -> None:
    full = backup(address_of(served.url), "users", str(target), spark=spark)
    with writing(users, KEYS):
        arguments = Arguments(
            job="backup", url=served.url, directory=str(target), incremental=True, point="complete"
        )
        assert run_job(arguments).killed
        again = backup(address_of(served.url), "users", str(target), incremental=True, spark=spark)
    _, changes = list_backups(str(target))
    assert again.resumed
    assert (again.since, again.version) == (full.version, changes.version)
    assert held_for(served.site, "spark/backup-") == {again.safe_point: again.version}
    assert not (target / PLAN).exists()


@pytest.mark.soak
def test_a_restore_that_is_killed_again_and_again_ends_like_one_that_was_not(
    spark: SparkSession, served: Served, users: Namespace, serve_site: ServeSite, target: Path
) -> None:
    saved = backup(address_of(served.url), "users", str(target), spark=spark)
    rome = serve_site("rome")
    with writing(users, KEYS):
        for point in ("writing", "written"):
            outcome = run_job(Arguments(job="restore", url=rome.url, directory=str(target), point=point))
            assert outcome.killed, outcome.said
            assert contents(rome.site, "users")
        summary = restore(str(target), address_of(rome.url), "users", spark=spark)
    assert (summary.resumed, summary.verified) == (True, True)
    assert contents(rome.site, "users") == contents(served.site, "users", saved.version)
    assert held_for(rome.site, "spark/restore-") == {}


@pytest.mark.soak
@pytest.mark.skipif(sys.platform == "win32", reason="the size of files cannot be limited here")
def test_a_full_disk_is_told_and_the_backup_goes_on_when_there_is_room(
    spark: SparkSession, served: Served, users: Namespace, target: Path
) -> None:
    dice = random.Random(1)
    users.put_many((b"large %d" % number, dice.randbytes(100_000)) for number in range(20))
    limited = Arguments(job="backup", url=served.url, directory=str(target), file_bytes_max=500_000)
    outcome = run_job(limited)
    assert outcome.said.startswith("StorageFull: there is no room left at"), outcome
    assert "Make room, then run it again" in outcome.said
    plan = read_plan(target)
    summary = backup(address_of(served.url), "users", str(target), spark=spark)
    assert summary.resumed
    assert summary.version == plan.version
    (manifest,) = list_backups(str(target))
    assert stored_contents(target, manifest) == contents(served.site, "users", summary.version)
