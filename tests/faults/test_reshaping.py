"""A split or merge after one whose outcome is not known starts from the map that really holds."""

from collections.abc import Callable
from contextlib import suppress
from typing import Final

import pytest
from tests.faults.harness import check_lasting, healthy_engine, make_world, require_usable
from tests.faults.observation import Observation
from tests.faults.operations import OPERATIONS, merge_first_two, users
from tests.sizes import only

from floodmark.model.errors import FloodmarkError, OutcomeUnknown, PartitionNotFound, Retryable
from floodmark.site import Site
from floodmark.testing import UNKNOWN_FAULTS, Fault, FaultPlan

PLACES_MAX: Final = 10

RESHAPES: Final[dict[str, Callable[[Site], object]]] = {
    "split at j": lambda site: site.split("users", b"j"),
    "split at l": lambda site: site.split("users", b"l"),
    "merge": merge_first_two,
}


def check_map(seen: Observation) -> None:
    """Partitions follow each other without holes, from the first key to the last."""
    starts, ends = zip(*seen.layout.partitions, strict=True)
    assert starts == (b"", *ends[:-1])
    assert ends[-1] is None


@pytest.mark.parametrize("recover_failures", only([0], [0, 1]))
@pytest.mark.parametrize("fault", sorted(UNKNOWN_FAULTS))
@pytest.mark.parametrize("second", RESHAPES)
@pytest.mark.parametrize("first", RESHAPES)
def test_reshaping_after_an_unknown_outcome_leaves_a_whole_map(
    first: str, second: str, fault: Fault, recover_failures: int
) -> None:
    for at in range(1, PLACES_MAX):
        world = make_world(OPERATIONS["split"], healthy_engine, bound_is_due=False)
        world.engine.arm(FaultPlan(at=at, kind=fault, recover_failures=recover_failures))
        with suppress(OutcomeUnknown, Retryable):
            RESHAPES[first](world.site)
        for _ in range(2):
            try:
                RESHAPES[second](world.site)
                break
            except PartitionNotFound:
                break
            except FloodmarkError:
                continue
        fired = world.engine.fired
        world.engine.heal()
        for key in (b"a", b"i", b"j", b"k", b"l", b"m", b"x"):
            users(world.site).put(key, b"after the second")
        require_usable(world, attempts=1, backwards=False)
        check_lasting(world, check_map)
        if not fired:
            return
    pytest.fail("the faults do not come to an end")
