"""Three sites under a seed: every promise holds, whatever fails, and a seed is a history."""

import os
import subprocess
import sys
from unittest.mock import patch

import pytest
from tests.sizes import only

from floodmark.partition.commit.batches import BatchCache
from floodmark.testing.engine import Fault, FaultPlan
from floodmark.testing.simulation import World, first_failure
from floodmark.testing.simulation.world import STEPS

SEEDS = 100
SHORT_STEPS = 60
SOAK_SEEDS = 5_000
GROUP = 10
SOAK_GROUP = 100


def assert_promises_hold(seeds: range, steps: int) -> None:
    failure = first_failure(seeds, steps=steps)
    assert failure is None, f"\n{failure}"


@pytest.mark.parametrize("first", only([0], range(0, SEEDS, GROUP)))
def test_every_promise_holds_in_ten_worlds(first: int) -> None:
    assert_promises_hold(range(first, first + GROUP), SHORT_STEPS)


@pytest.mark.slow
def test_siblings_that_are_forgotten_at_once_cost_rounds_and_tear_nothing() -> None:
    with patch.object(BatchCache, "remember", lambda *_: None):
        assert_promises_hold(range(3), SHORT_STEPS)


@pytest.mark.soak
@pytest.mark.parametrize("first", range(0, SOAK_SEEDS, SOAK_GROUP))
def test_every_promise_holds_in_a_hundred_worlds(first: int) -> None:
    assert_promises_hold(range(first, first + SOAK_GROUP), STEPS)


def history_in_another_process(seed: int, hash_seed: str) -> str:
    command = [sys.executable, "-m", "floodmark.testing.simulation", "--seed", str(seed), "--steps", "60"]
    environment = {**os.environ, "PYTHONHASHSEED": hash_seed}
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout


@pytest.mark.slow
def test_a_seed_is_the_same_history_in_every_process() -> None:
    first = history_in_another_process(3, "1")
    assert "every promise held" in first
    assert first == history_in_another_process(3, "2")
    assert first != history_in_another_process(4, "1")


def test_a_site_that_cannot_close_is_stopped_and_keeps_its_promises() -> None:
    world = World(0)
    site = world.sites[0]

    def stop() -> None:
        site.disk.arm(FaultPlan(at=1, kind=Fault.PERSISTENT))
        site.stop()

    world.schedule.after(1, stop)
    world.run(SHORT_STEPS)
    told = [event.what for event in world.history.events]
    assert "did not close well: StorageFailed" in told


@pytest.mark.slow
def test_what_can_go_wrong_does_go_wrong() -> None:
    worlds = [World(seed) for seed in range(11)]
    for world in worlds:
        world.run()
    told = "\n".join(event.what for world in worlds for event in world.history.events)
    for event in (
        "unsynced writes are lost",
        "stopped",
        "cannot call",
        "clock is off by",
        "fsync: done",
        "async: done",
        "refused",
        "unknown",
        "StaleLink",
        "ClockSkew",
        "Fenced",
        "takes part",
        "takes part no longer",
        "lost with all its data",
        "removed, and ended",
    ):
        assert event in told, f"in {len(worlds)} worlds, {event!r} never happened"
    census = sum((world.census() for world in worlds), start=type(worlds[0].census())())
    for what in (
        "tail",
        "log",
        "scan",
        "intervals checked",
        "versions collected",
        "keys collected",
        "whole looks",
        "second looks",
        "keys in lag",
        "atomic reads",
    ):
        assert census[what] > 0, f"in {len(worlds)} worlds there was no {what}: {census}"
