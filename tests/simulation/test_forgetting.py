"""When all has arrived and garbage is collected, sites hold equal bytes, and remember nothing that is gone.

Deletes inside of records go at each site in its own time (`merge/pruning.py`); until then sites that hold the
same may hold it in other bytes.  Once everybody knows that everybody has everything, nothing of that is left.
"""

import pytest
from tests.simulation.support_stage import Stage
from tests.sizes import only

from floodmark.codec.states import remembers_deletes
from floodmark.codec.values import decode_value, unmark_batch
from floodmark.host import garbage
from floodmark.testing.simulation.copies import DistantMember, Nearby, SiteCopy, take_copy
from floodmark.testing.simulation.verifiers import check_agreement
from floodmark.testing.simulation.workload import TTL_SECONDS
from floodmark.testing.simulation.world import STEPS

SEEDS = 8
SHORT_STEPS = 40
SOAK_SEEDS = 500


def forget(stage: Stage) -> list[SiteCopy]:
    """Let all that was deleted be forgotten; what each site holds then, tombstones included."""
    stage.world.time.advance(1_000 * max(TTL_SECONDS))
    stage.collect()
    return [take_copy(DistantMember(Nearby(), site.name, site)) for site in stage.world.sites]


def bytes_of(copy: SiteCopy) -> dict[str, dict[bytes, bytes]]:
    """What a site holds, but for the mark of a batch: of a merged record, the write that came last has it."""
    return {
        name: {key: unmark_batch(stored) for key, stored in records.items()}
        for name, records in copy.records.items()
    }


def require_equal_and_forgetful(stage: Stage) -> None:
    first, *others = forget(stage)
    for other in others:
        assert bytes_of(other) == bytes_of(first), (first.of, other.of)
    records = [decode_value(stored) for each in first.records.values() for stored in each.values()]
    assert records
    assert not any(record.deleted or record.expires_at is not None for record in records)
    assert not any(remembers_deletes(record.stamps) for record in records if record.stamps is not None)
    check_agreement(stage.world.sites)


@pytest.mark.parametrize("seed", only([0, 1], range(SEEDS)))
def test_sites_hold_equal_bytes_when_deletes_are_forgotten(seed: int) -> None:
    require_equal_and_forgetful(Stage(seed, SHORT_STEPS))


@pytest.mark.soak
def test_sites_hold_equal_bytes_when_deletes_are_forgotten_in_many_worlds() -> None:
    for seed in range(SOAK_SEEDS):
        require_equal_and_forgetful(Stage(seed, STEPS))


@pytest.mark.slow
def test_without_pruning_they_would_remember(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(garbage, "prune_namespace", lambda *_: 0)
    copies = [copy for seed in range(SEEDS) for copy in forget(Stage(seed, SHORT_STEPS))]
    profiles = [copy.records["profiles"] for copy in copies]
    stamps = [decode_value(stored).stamps for each in profiles for stored in each.values()]
    assert any(remembers_deletes(body) for body in stamps if body is not None)
