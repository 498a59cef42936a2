"""Whole sites in one thread under one seed, with everything that can go wrong.

Three real sites, on disks that fail and forget, under clocks that are off and jump, copy each other over a
network that loses, repeats and delays; writers, readers and garbage collection go on all the while.  The
promises of the design are checked as it goes (`witness.py`, `chronicle.py`, `readers.py`), and in the end,
when everything has healed, all sites must hold the same (`convergence.py`).

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
