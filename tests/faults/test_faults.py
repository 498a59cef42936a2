"""Storage fails at every place, in every way, under every kind of write, and the promises hold."""

from typing import Final

import pytest
from tests.faults.harness import visit
from tests.faults.operations import OPERATIONS
from tests.sizes import only

from floodmark.testing import READS, UNKNOWN_FAULTS, Fault, FaultPlan

UNTIL_HEALED: Final = 1_000_000

WRITE_PLANS: Final = {
    **{str(kind): FaultPlan(at=1, kind=kind) for kind in Fault},
    **{
        f"{kind}, recovery fails once": FaultPlan(at=1, kind=kind, recover_failures=1)
        for kind in sorted(UNKNOWN_FAULTS)
    },
    "unknown, applied, recovery fails": FaultPlan(
        at=1, kind=Fault.UNKNOWN_APPLIED, recover_failures=UNTIL_HEALED
    ),
}

READ_PLANS: Final = {
    f"{kind} read": FaultPlan(at=1, kind=kind, counts=READS) for kind in (Fault.TRANSIENT, Fault.PERSISTENT)
}


@pytest.mark.parametrize("plan", only((Fault.CRASH, Fault.UNKNOWN_APPLIED), WRITE_PLANS))
@pytest.mark.parametrize("operation", OPERATIONS)
def test_the_promises_hold_when_a_write_to_storage_fails(operation: str, plan: str) -> None:
    places = visit(operation, WRITE_PLANS[plan])
    assert (places > 0) == OPERATIONS[operation].writes


@pytest.mark.parametrize("plan", only(("transient read",), READ_PLANS))
@pytest.mark.parametrize("operation", OPERATIONS)
def test_the_promises_hold_when_a_read_from_storage_fails(operation: str, plan: str) -> None:
    visit(operation, READ_PLANS[plan])
