"""Exports, feeds into Parquet and backups hold all of an atomic batch or nothing of it.

They are made before a batch begins, when each of its two partitions has prepared it, when one has committed
it, and when both have.
"""

from collections.abc import Callable
from pathlib import Path

import pyarrow.dataset
import pytest
from pyspark.sql import SparkSession
from tests.cli.support import run
from tests.links.support import Served
from tests.site.support import node_of
from tests.spark.support_backup import address_of, stored_rows
from tests.spark.support_export import exported

from floodmark.clock import system_time_ms
from floodmark.codec.ordered import encode_namespace
from floodmark.codec.values import encode_value
from floodmark.model.batch import mint_batch
from floodmark.model.errors import Retryable
from floodmark.model.partition import Decision, Fate
from floodmark.site import Site
from floodmark.spark.jobs import export
from floodmark.spark.jobs.backups.backup import backup, list_backups

# One of each partition, and one beside the batch.
ADA, ZOE, LATER = b"ada", b"zoe", b"later"


def keys_step_by_step(site: Site, copy: Callable[[], set[bytes]]) -> list[set[bytes]]:
    """The keys that copies hold before, between and after the steps of a batch that no node settles."""
    users, undecided = site.create_namespace("users"), Fate(Decision.UNDECIDED)
    site.split("users", b"m")
    node, batch = node_of(site), mint_batch(system_time_ms())
    node.settle_by(lambda _: undecided, lambda *_: undecided)
    keys = [encode_namespace(users.id) + key for key in (ADA, ZOE)]
    ada, zoe = map(node.map.route, keys)
    found = [copy()]
    value = [encode_value(b"1")]
    version = max(part.prepare(batch, [key], value, keys) for part, key in zip((ada, zoe), keys, strict=True))
    users.put(LATER, b"1")
    found.append(copy())
    zoe.commit_prepared(batch, version)
    found.append(copy())
    ada.commit_prepared(batch, version)
    found.append(copy())
    return found


@pytest.fixture
def target(tmp_path: Path) -> Path:
    return tmp_path / "copy"


def test_a_feed_never_writes_a_part_of_a_batch(served: Served, target: Path) -> None:
    def copy() -> set[bytes]:
        if not served.site.feeds.list():
            served.site.feeds.create("lake", "users", f"parquet:{target}", since="beginning")
        outcome = run("feed", "run", served.url, "lake", "--allow", f"parquet:{target}", "--once")
        assert (outcome.code, outcome.errors) == (0, "")
        files = list(target.rglob("*.parquet"))
        return set(pyarrow.dataset.dataset(files).to_table()["key"].to_pylist()) if files else set()

    assert keys_step_by_step(served.site, copy) == [set(), set(), set(), {ADA, LATER, ZOE}]


@pytest.mark.slow
def test_an_export_never_holds_a_part_of_a_batch(served: Served, spark: SparkSession, target: Path) -> None:
    def copy() -> set[bytes]:
        export(address_of(served.url), "users", str(target), format="parquet", spark=spark)
        return {row[0] for row in exported(target)}

    assert keys_step_by_step(served.site, copy) == [set(), set(), set(), {ADA, LATER, ZOE}]


@pytest.mark.slow
def test_a_current_view_never_holds_a_part_of_a_batch(
    served: Served, spark: SparkSession, target: Path
) -> None:
    def copy() -> set[bytes]:
        export(address_of(served.url), "users", str(target), format="parquet", view="current", spark=spark)
        return {row[0] for row in exported(target)}

    assert keys_step_by_step(served.site, copy) == [set(), set(), set(), {ADA, LATER, ZOE}]


@pytest.mark.slow
def test_an_incremental_backup_never_holds_a_part_of_a_batch(
    served: Served, spark: SparkSession, target: Path
) -> None:
    refused: list[str] = []

    def copy() -> set[bytes]:
        try:
            backup(address_of(served.url), "users", str(target), incremental=target.exists(), spark=spark)
        except Retryable as error:
            refused.append(str(error))
        return {row["key"] for part in list_backups(str(target)) for row in stored_rows(target, part)}

    assert keys_step_by_step(served.site, copy) == [set(), set(), set(), {ADA, LATER, ZOE}]
    # The second of them while the batch is open has no version to go on to.
    assert refused
    assert all("an atomic batch is open" in message for message in refused)
