"""What tests of Floodmark, and of engines for it, are built from.  Shipped; imported only by tests."""

from floodmark.testing.clock import SimulatedTime
from floodmark.testing.contracts import EngineContract
from floodmark.testing.engine import (
    READS,
    UNKNOWN_FAULTS,
    WRITES,
    Fault,
    FaultPlan,
    FaultyEngine,
    Operation,
    SimulatedCrash,
)
from floodmark.testing.sinks import SinkContract
from floodmark.testing.site_contract import SiteContract

__all__ = [
    "EngineContract",
    "Fault",
    "FaultPlan",
    "FaultyEngine",
    "Operation",
    "READS",
    "SimulatedCrash",
    "SimulatedTime",
    "SinkContract",
    "SiteContract",
    "UNKNOWN_FAULTS",
    "WRITES",
]
