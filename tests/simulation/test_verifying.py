"""At the end of a run, when all sites agree, something is broken at one of them behind its back.

Exactly that key must be found, by a whole look and by a look at single keys, between that site and each of
the others; and repair must mend it so that all agree again, before and after everything was copied once more.
A record that the others have deleted, and forgotten since, must be left to an operator, who deletes it.
"""

from collections.abc import Callable, Generator
from typing import NamedTuple

import pytest
from tests.simulation.support_stage import Stage, Stored, find_stored
from tests.sizes import only

from floodmark.codec.values import decode_value, encode_value
from floodmark.divergence import rules
from floodmark.divergence.comparing import Drift, compare_keys
from floodmark.divergence.repairing import repair
from floodmark.divergence.rules import Verdict
from floodmark.model.change import Stamp
from floodmark.testing.simulation import first_failure
from floodmark.testing.simulation.history import Key
from floodmark.testing.simulation.verifiers import VisitedSite, check_agreement, find_all
from floodmark.testing.simulation.world import STEPS

SEEDS = 16
GROUP = 4
SHORT_STEPS = 40
SOAK_SEEDS = 1_000
SOAK_GROUP = 100


class Fault(NamedTuple):
    """What is to be planted: under which key, and what who compares (sound, broken) must call it."""

    key: Key
    planted: Stored | None
    verdict: Verdict
    part: str | int | None = None
    is_forgotten: bool = False


# Writes something, once or twice.  Each time all that was written arrives everywhere before it goes on.
Plot = Generator[None, None, Fault]


def dropped(stage: Stage) -> Plot:
    key = Key("users", b"dropped")
    stage.writer.call(lambda site: site.namespace("users").put(key.key, b"1"))
    yield
    return Fault(key, None, Verdict.MISSING_RIGHT)


def last_update_lost(stage: Stage) -> Plot:
    key = Key("users", b"updated")
    stage.writer.call(lambda site: site.namespace("users").put(key.key, b"1"))
    yield
    before = stage.stored(key)
    stage.writer.call(lambda site: site.namespace("users").put(key.key, b"2"))
    yield
    return Fault(key, before, Verdict.VALUE_MISMATCH)


def delete_lost(stage: Stage) -> Plot:
    key = Key("users", b"deleted")
    stage.writer.call(lambda site: site.namespace("users").put(key.key, b"1"))
    yield
    before = stage.stored(key)
    stage.writer.call(lambda site: site.namespace("users").delete(key.key))
    yield
    return Fault(key, before, Verdict.MISSING_LEFT)


def corrupted_at_rest(stage: Stage) -> Plot:
    key = Key("users", b"corrupted")
    stage.writer.call(lambda site: site.namespace("users").put(key.key, b"bytes"))
    yield
    version, stored = stage.stored(key)
    return Fault(key, (version, b"b\x00" + stored[2:]), Verdict.VALUE_MISMATCH)


def resolved_the_wrong_way(stage: Stage) -> Plot:
    key = Key("users", b"conflict")
    first = stage.writer.call(lambda site: site.namespace("users").put(key.key, b"one"))
    second = stage.other.call(lambda site: site.namespace("users").put(key.key, b"other"))
    yield
    version, stored = stage.stored(key)
    loser = min((Stamp(first, stage.writer.id), b"one"), (Stamp(second, stage.other.id), b"other"))
    assert decode_value(stored).value != loser[1]
    return Fault(key, (version, encode_value(loser[1], origin=loser[0])), Verdict.VALUE_MISMATCH)


def resurrected(stage: Stage) -> Plot:
    key = Key("users", b"risen")
    stage.writer.call(lambda site: site.namespace("users").put(key.key, b"1"))
    yield
    before = stage.stored(key)
    stage.other.call(lambda site: site.namespace("users").delete(key.key))
    yield
    return Fault(key, before, Verdict.MISSING_LEFT, is_forgotten=True)


def increment_lost(stage: Stage) -> Plot:
    key = Key("counts", b"counted")
    stage.writer.call(lambda site: site.namespace("counts").add(key.key, 2))
    stage.other.call(lambda site: site.namespace("counts").add(key.key, 5))
    yield
    before = stage.stored(key)
    stage.writer.call(lambda site: site.namespace("counts").add(key.key, 3))
    yield
    return Fault(key, before, Verdict.VALUE_MISMATCH, stage.writer.id)


def field_lost(stage: Stage) -> Plot:
    key = Key("profiles", b"field")
    stage.writer.call(lambda site: site.namespace("profiles").put(key.key, b'{"city":"Oslo"}'))
    yield
    before = stage.stored(key)
    stage.writer.call(lambda site: site.namespace("profiles").update(key.key, b'{"name":"Ada"}'))
    yield
    return Fault(key, before, Verdict.VALUE_MISMATCH, "name")


PLOTS: list[Callable[[Stage], Plot]] = [
    dropped,
    last_update_lost,
    delete_lost,
    corrupted_at_rest,
    resolved_the_wrong_way,
    increment_lost,
    field_lost,
]


def prepare(stage: Stage, *plots: Callable[[Stage], Plot]) -> list[Fault]:
    """Let the world come to where something can be broken."""
    running, faults = [plot(stage) for plot in plots], []
    while running:
        for plot in list(running):
            try:
                next(plot)
            except StopIteration as end:
                faults.append(end.value)
                running.remove(plot)
        stage.drain()
    return faults


def check_fault(stage: Stage, fault: Fault) -> None:
    """Break it, find it, and mend it, if no deletion that was forgotten says otherwise."""
    stage.plant(fault.key, fault.planted)
    sites, namespace = [*stage.sound, stage.broken], fault.key.namespace
    visited = [VisitedSite(site) for site in sites]
    whole = find_all(sites, namespace)
    drifts = [finding for finding in whole if isinstance(finding, Drift)]
    assert len(drifts) == len(whole), "all has arrived, and nothing is lag"
    assert {drift.key for drift in drifts} == {fault.key.key}
    found = {(drift.left.site, drift.right.site): (drift.verdict, drift.part) for drift in drifts}
    assert found == {(sound.name, stage.broken.name): (fault.verdict, fault.part) for sound in stage.sound}
    hosts = [site.host for site in visited]
    single = list(compare_keys(hosts, namespace, [fault.key.key, b"key-0", b"nowhere"]))
    assert [(each.key, type(each)) for each in single] == [(fault.key.key, Drift)] * len(stage.sound)
    summary = repair(hosts, namespace, drifts)
    assert (summary.repaired, summary.changed_meanwhile, summary.impossible) == (
        (0, 0, 1) if fault.is_forgotten else (1, 0, 0)
    )
    if fault.is_forgotten:
        assert all(find_stored(site, fault.key) is None for site in stage.sound)
        stage.broken.call(lambda site: site.namespace(namespace).delete(fault.key.key))
    assert find_all(sites, namespace) == []


def check_world(stage: Stage) -> None:
    (risen,) = prepare(stage, resurrected)
    stage.collect()
    assert all(find_stored(site, risen.key) is None for site in stage.world.sites)
    check_fault(stage, risen)
    for fault in prepare(stage, *PLOTS):
        check_fault(stage, fault)
    # What was repaired is a change like others, and harms nobody who copies and counts them.
    stage.drain()
    check_agreement(stage.world.sites)
    for site in stage.world.sites:
        site.check_links()


def check_seeds(seeds: range, steps: int) -> None:
    for seed in seeds:
        try:
            check_world(Stage(seed, steps))
        except AssertionError as error:
            raise AssertionError(f"seed {seed}: {error}") from error


@pytest.mark.parametrize("first", only([0], range(0, SEEDS, GROUP)))
def test_every_planted_drift_is_found_and_mended(first: int) -> None:
    check_seeds(range(first, first + GROUP), SHORT_STEPS)


@pytest.mark.soak
@pytest.mark.parametrize("first", range(0, SOAK_SEEDS, SOAK_GROUP))
def test_every_planted_drift_is_found_and_mended_in_many_worlds(first: int) -> None:
    check_seeds(range(first, first + SOAK_GROUP), STEPS)


def test_a_verifier_that_takes_lag_for_drift_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rules, "_has_come", lambda *_: True)
    failure = first_failure(range(50))
    assert failure is not None
    assert failure.violation.promise == "9"
