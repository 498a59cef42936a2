"""Publications over a storage that fails at every one of their operations, and over power cuts."""

import pytest

from floodmark import Site
from floodmark.host.examination import Severity
from floodmark.model.errors import FloodmarkError
from floodmark.partition import FAMILIES
from floodmark.site.embedding import open_engine
from floodmark.testing import Fault, FaultPlan, FaultyEngine, SimulatedCrash

OLD = {b"ada": b"1", b"bob": b"1", b"late": b"2"}
NEW = {b"bob": b"3", b"cyd": b"3", b"late": b"2"}


def publish(site: Site, base: int) -> None:
    site.generations.publish("users", {b"bob": b"3", b"cyd": b"3"}, base=base)


def prepare(engine: FaultyEngine) -> tuple[Site, int]:
    site = open_engine(engine, site="oslo", site_id=7, background=False)
    users = site.create_namespace("users")
    base = users.put_many({b"ada": b"1", b"bob": b"1"})
    users.put(b"late", b"2")
    return site, base


def check(site: Site) -> bool:
    """Whether the data set is read; the old records are if it is not."""
    users = site.namespace("users")
    found = dict(users.scan())
    assert found in (OLD, NEW)
    assert {key: value for key in OLD | NEW if (value := users.get(key)) is not None} == found
    users.put(b"more", b"4")
    assert users.get(b"more") == b"4"
    states = [each.state.value for each in site.generations.list("users")]
    assert states.count("current") == 1
    results = site.host.verification.examine(False)
    assert [result for result in results if result.severity is Severity.PROBLEM] == []
    return found == NEW


@pytest.mark.parametrize(
    "kind",
    [Fault.TRANSIENT, Fault.UNKNOWN_APPLIED, Fault.UNKNOWN_SKIPPED, Fault.UNKNOWN_LOST, Fault.CRASH],
)
def test_a_publication_over_failing_storage_happens_whole_or_not_at_all(kind: Fault) -> None:
    outcomes = set()
    for at in range(1, 100):
        engine = FaultyEngine(FAMILIES)
        site, base = prepare(engine)
        engine.arm(FaultPlan(at=at, kind=kind))
        is_told = True
        try:
            publish(site, base)
        except (FloodmarkError, SimulatedCrash):
            is_told = False
        fired = engine.fired
        if kind is Fault.CRASH and fired:
            site = open_engine(engine.crash(keep=at % 2), site="oslo", site_id=7, background=False)
        else:
            engine.heal()
        is_new = check(site)
        assert is_new or not is_told, "a publication that returned is gone"
        outcomes.add(is_new)
        if not fired:
            break
        # Another one goes through afterwards.
        for generation in site.generations.list("users"):
            if generation.state == "loading":
                site.generations.drop("users", generation.number)
        site.generations.publish("users", {b"end": b"5"})
        assert dict(site.namespace("users").scan()) == {b"end": b"5"}
        site.close()
    assert not fired
    assert outcomes == {True, False}
