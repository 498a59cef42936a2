"""Storage fails at every place while a step is applied and noted.

Whoever was told that the step is noted finds it noted, whoever was told that it is not finds the link as it
was, and whoever was told neither finds one of the two.  Position and account are those of one moment, and
after every power cut the position covers nothing that is not there.
"""

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import count
from typing import Final
from unittest.mock import patch

import pytest
from tests.replication.support_links import IDS, Mesh, embedded, open_one, topology_of
from tests.sizes import only

from floodmark.engine import Guard, WriteRow
from floodmark.links.steps import run_step
from floodmark.model.errors import FloodmarkError, OutcomeUnknown
from floodmark.partition import FAMILIES, Storage
from floodmark.replication.links import LinkRow, Links
from floodmark.replication.step import LinkStep
from floodmark.site import Site
from floodmark.testing import UNKNOWN_FAULTS, Fault, FaultPlan, FaultyEngine, SimulatedCrash

POSITIONS_MAX: Final = 100
KEYS: Final = [b"%02d" % number for number in range(8)]

PLANS: Final = {
    **{str(kind): FaultPlan(at=1, kind=kind) for kind in Fault},
    **{
        f"{kind}, recovery fails once": FaultPlan(at=1, kind=kind, recover_failures=1)
        for kind in sorted(UNKNOWN_FAULTS)
    },
}


@dataclass
class Stage:
    """Two sites, the second of which fails; a step between them; and the link before and after it."""

    mesh: Mesh
    engine: FaultyEngine
    step: LinkStep
    before: LinkRow
    versions: dict[bytes, int]


def prepare() -> Stage:
    """One step was taken; half of the next changes lie before a heartbeat, and a local write is unsynced."""
    mesh = Mesh("oslo", "rome", topology=False)
    engine = FaultyEngine(FAMILIES)
    rome = mesh.sites["rome"] = open_one(engine, "rome", mesh.time)
    users = rome.create_namespace("users")
    for site in mesh.sites.values():
        site.host.membership.note_rewritten("users", site.now())
        site.set_topology(topology_of("oslo", "rome"))
    versions = {key: mesh.put("oslo", key) for key in KEYS[:2]}
    mesh.exchange()
    versions |= {key: mesh.put("oslo", key) for key in KEYS[2:5]}
    mesh.beat("oslo")
    versions |= {key: mesh.put("oslo", key) for key in KEYS[5:]}
    users.put(b"own", b"unsynced", durability="async")
    return Stage(mesh, engine, mesh.plan("oslo", "rome"), link_of(rome), versions)


def link_of(site: Site) -> LinkRow:
    namespace = site.host.namespaces.find_namespace("users").id
    return embedded(site).links.rows[namespace, IDS["oslo"]]


def note_only(stage: Stage) -> Callable[[], object]:
    """The step is applied already, and is only noted."""
    applied = stage.mesh.apply("oslo", "rome", stage.step)
    host = stage.mesh["rome"].host
    return lambda: host.replication.advance_link(stage.step, applied)


def apply_and_note(stage: Stage) -> Callable[[], object]:
    """The whole step."""
    source, target = stage.mesh["oslo"].host, stage.mesh["rome"].host
    return lambda: run_step(source, target, stage.step)


def undisturbed(act: Callable[[Stage], Callable[[], object]]) -> LinkRow:
    stage = prepare()
    act(stage)()
    return link_of(stage.mesh["rome"])


def check(stage: Stage, site: Site, allowed: list[LinkRow]) -> LinkRow:
    """A site after the fault: its link is one of those allowed, and covers only what is there."""
    row = link_of(site)
    assert row in allowed
    users = site.namespace("users")
    covered = [key for key, version in stage.versions.items() if version <= row.through]
    assert users.get_many(covered) == [b"value"] * len(covered)
    now = site.host.replication.watermark("users", None)
    assert now == {IDS["oslo"]: row.through}
    assert site.host.replication.watermark("users", site.now()) == now
    return row


def check_images(stage: Stage, allowed: list[LinkRow]) -> None:
    """The same after a power cut, for each number of unsynced writes that it keeps."""
    for keep in range(stage.engine.unsynced + 1):
        check(stage, open_one(stage.engine.crash(keep), "rome", stage.mesh.time), allowed)


def run(act: Callable[[Stage], Callable[[], object]], plan: FaultPlan, after: LinkRow) -> bool:
    """One run under one plan; whether the fault came to pass."""
    stage = prepare()
    go = act(stage)
    stage.engine.arm(plan)
    allowed = [stage.before, after]
    alive = True
    try:
        go()
        allowed = [after]
    except OutcomeUnknown:
        pass
    except FloodmarkError:
        allowed = [stage.before]
    except SimulatedCrash:
        alive = False
    fired = stage.engine.fired
    check_images(stage, allowed)
    stage.engine.heal()
    if alive:
        rome = stage.mesh["rome"]
        settle(rome)
        check(stage, rome, allowed)
        check_images(stage, [link_of(rome)])
        # Whoever drives the link just goes on.
        stage.mesh.step("oslo", "rome")
        row = check(stage, rome, [link_of(rome)])
        assert row.through >= after.through
        assert row.wrong == 0
    return fired


def settle(site: Site) -> None:
    """Let a site that failed get over it: the first calls may still be refused."""
    for _ in range(2):
        try:
            site.heartbeat()
            return
        except FloodmarkError:
            continue
    site.heartbeat()


def visit(act: Callable[[Stage], Callable[[], object]], plan: FaultPlan) -> None:
    """Let the fault happen at every place."""
    after = undisturbed(act)
    for at in count(1):
        assert at <= POSITIONS_MAX, "the step does not come to an end"
        try:
            if not run(act, replace(plan, at=at), after):
                assert at > 2, "there were hardly any places to fail at"
                return
        except AssertionError as error:
            error.add_note(f"the fault was at {at}")
            raise


@pytest.mark.parametrize("plan", only((Fault.CRASH, Fault.UNKNOWN_APPLIED), PLANS))
@pytest.mark.parametrize("act", [note_only, apply_and_note])
def test_position_and_account_move_together_or_not_at_all_and_cover_only_what_is_durable(
    act: Callable[[Stage], Callable[[], object]], plan: str
) -> None:
    visit(act, PLANS[plan])


# Canaries: what the test above must catch


def test_site_that_takes_a_failed_write_for_done_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    store = Storage.store_guarded

    def forget_failures(self: Storage, rows: Sequence[WriteRow], guards: Sequence[Guard]) -> bool:
        with suppress(FloodmarkError):
            store(self, rows, guards)
        return True

    monkeypatch.setattr(Storage, "store_guarded", forget_failures)
    with pytest.raises(AssertionError, match="LinkRow"):
        visit(note_only, PLANS[Fault.TRANSIENT])


def test_link_that_is_stored_in_several_writes_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    store = Storage.store_guarded

    def store_one_by_one(self: Storage, rows: Sequence[WriteRow], guards: Sequence[Guard]) -> bool:
        return all(store(self, [row], guards) for row in rows)

    monkeypatch.setattr(Storage, "store_guarded", store_one_by_one)
    with pytest.raises(AssertionError):
        visit(note_only, PLANS[Fault.CRASH])


def test_position_that_is_stored_before_the_changes_is_caught() -> None:
    def note_first(stage: Stage) -> Callable[[], object]:
        target = stage.mesh["rome"].host.replication
        applied = prepare().mesh.apply("oslo", "rome", stage.step)

        def go() -> None:
            target.advance_link(stage.step, applied)
            stage.mesh.apply("oslo", "rome", stage.step)

        return go

    with patch.object(Links, "admit", lambda *_: ()), pytest.raises(AssertionError):
        visit(note_first, PLANS[Fault.CRASH])
