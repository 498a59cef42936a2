"""Jobs over a site of several nodes go on over swaps that happen while they run, and others write."""

from collections.abc import Callable, Iterator
from pathlib import Path
from threading import Event
from typing import Any

import pyarrow
import pytest
from pyspark.sql import SparkSession
from tests.server.support import LOOPBACK
from tests.site.support_swaps import Row, World, link, linked_world, swapping_world
from tests.spark.support_backup import address_of
from tests.waiting import HANG_SECONDS

from floodmark.divergence.outcome import Outcome
from floodmark.engine import MemoryEngine
from floodmark.partition import FAMILIES
from floodmark.server import serve
from floodmark.site.embedding import open_engine
from floodmark.spark.jobs import backup, check_backup, export, read_export, restore, verify
from floodmark.testing.clock import SimulatedTime


@pytest.fixture
def world() -> Iterator[World]:
    with swapping_world() as world:
        yield world


def run_over_swaps(world: World, job: Callable[[], object], *work: Callable[[], object], turns: str) -> None:
    """Run a job again and again, so that each swap happens while it runs, and once behind the last one."""
    begun = Event()

    def repeat() -> None:
        is_last = False
        while not is_last:
            is_last = world.ended.is_set()
            begun.set()
            job()

    def wait_begun() -> None:
        begun.clear()
        assert begun.wait(HANG_SECONDS)

    world.run(repeat, *work, turns=turns, between=wait_begun)


def rows_of(target: Path) -> list[Row]:
    rows: list[dict[str, Any]] = pyarrow.table(read_export(str(target)).to_table()).to_pylist()
    return sorted(Row(row["_commit_version"], row["key"], row["_change_type"], row["value"]) for row in rows)


def test_an_export_gets_everything_once(spark: SparkSession, world: World, tmp_path: Path) -> None:
    address, target = address_of(world.cluster.url), tmp_path / "lake"

    def work() -> None:
        assert export(address, "users", str(target), format="parquet", spark=spark).wrong == 0

    work()
    run_over_swaps(world, work, turns="pr")
    # An export has no row for the swap itself.
    world.check(sorted([*rows_of(target), *world.model.markers()]), "difference")


@pytest.mark.slow
def test_incremental_backups_hold_every_moment(spark: SparkSession, world: World, tmp_path: Path) -> None:
    address, parts = address_of(world.cluster.url), [0]

    def work() -> None:
        summary = backup(address, "users", str(tmp_path), incremental=bool(parts[0]), spark=spark)
        parts.append(summary.version)

    work()
    parts[0] = 1
    run_over_swaps(world, work, turns="prp")
    assert check_backup(str(tmp_path), spark=spark).findings == []
    world.tick()
    swaps = [swap.version + step for swap in world.model.swaps for step in (-1, 0)]
    for number, at in enumerate([*swaps, *parts[2:]]):
        restored = restore(str(tmp_path), address, f"copy-{number}", at=at, spark=spark)
        assert restored.verified, restored.note
        world.tick()
        assert dict(world.client.namespace(f"copy-{number}").scan()) == world.model.state_at(at)


@pytest.mark.slow
def test_a_comparison_with_a_site_of_one_node_finds_no_drift(spark: SparkSession) -> None:
    time = SimulatedTime()
    rome = open_engine(MemoryEngine(FAMILIES), site="rome", site_id=2, background=False, time_source=time)
    with serve(rome, LOOPBACK) as server, linked_world(rome, time) as world:
        addresses = [address_of(world.cluster.url), address_of(server.url)]

        def compare() -> None:
            assert verify(addresses, ["users"], spark=spark).drift == 0

        run_over_swaps(world, compare, lambda: link(world), turns="prp")
        world.tick()
        summary = verify(addresses, ["users"], spark=spark)
        state = world.model.merged(world.client.id)
        assert dict(world.client.namespace("users").scan()) == dict(rome.namespace("users").scan()) == state
        (pair,) = summary.pairs
        assert (summary.outcome, summary.lag, pair.agree) == (Outcome.AGREE, 0, pair.compared)
        assert pair.agree >= len(state)
