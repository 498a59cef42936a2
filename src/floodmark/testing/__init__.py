"""Simulated time, a faulty engine, contracts of engines and sinks.  Shipped; imported only by tests."""

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
    "UNKNOWN_FAULTS",
    "WRITES",
]
