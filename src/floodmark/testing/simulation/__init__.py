"""Simulates whole sites in one thread under one seed, with all kinds of faults.

Three real sites, on disks that fail and lose unsynced writes, with skewed and jumping clocks, replicate over
a network that loses, repeats and delays calls, while writers, readers and garbage collection run.  The
promises of the design are checked throughout (`witness.py`, `chronicle.py`, `readers.py`).  In the end, when
all faults are repaired, all sites must hold the same (`convergence.py`).

    python -m floodmark.testing.simulation --seed 17
"""

from floodmark.testing.simulation.faults import FAULTS, PUBLISHING_FAULTS, PlantedFault, plant
from floodmark.testing.simulation.history import Violation
from floodmark.testing.simulation.runner import Failure, Success, first_failure, run_seed
from floodmark.testing.simulation.world import World

__all__ = [
    "FAULTS",
    "PUBLISHING_FAULTS",
    "Failure",
    "PlantedFault",
    "Success",
    "Violation",
    "World",
    "first_failure",
    "plant",
    "run_seed",
]
