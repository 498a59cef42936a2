"""Running seeds: one by one, each with a report that can be replayed when it fails."""

from collections.abc import Iterable
from contextlib import nullcontext
from traceback import format_tb
from typing import NamedTuple

from floodmark.testing.simulation.faults import plant
from floodmark.testing.simulation.history import Violation
from floodmark.testing.simulation.world import STEPS, World


class Failure(NamedTuple):
    """A seed that broke a promise."""

    seed: int
    steps: int
    fault: str | None
    publishes: bool
    violation: Violation
    events: list[str]

    def __str__(self) -> str:
        options = f" --steps {self.steps}" * (self.steps != STEPS)
        options += f" --fault {self.fault}" * (self.fault is not None)
        options += " --publishes" * self.publishes
        return "\n".join(
            [
                f"seed {self.seed}: {self.violation}",
                *self.events,
                *_show_cause(self.violation),
                f"replay it: python -m floodmark.testing.simulation --seed {self.seed}{options}",
            ]
        )


def _show_cause(violation: Violation) -> list[str]:
    """The origin of an unexpected error."""
    cause = violation.__cause__
    return [] if cause is None else ["where it came from:", *map(str.rstrip, format_tb(cause.__traceback__))]


class Success(NamedTuple):
    """A seed in which every promise held; the digest names its history."""

    seed: int
    digest: str

    def __str__(self) -> str:
        return f"seed {self.seed}: every promise held (history {self.digest})"


def run_seed(
    seed: int, *, steps: int = STEPS, fault: str | None = None, publishes: bool = False
) -> Success | Failure:
    """Run one seed, and return the result."""
    world = World(seed, publishes=publishes)
    try:
        with nullcontext() if fault is None else plant(fault):
            world.run(steps)
    except Violation as violation:
        return Failure(seed, steps, fault, publishes, violation, world.history.concerning(violation))
    return Success(seed, world.history.digest())


def first_failure(
    seeds: Iterable[int], *, steps: int = STEPS, fault: str | None = None, publishes: bool = False
) -> Failure | None:
    """Run seeds until one fails; return the failure, or None."""
    outcomes = (run_seed(seed, steps=steps, fault=fault, publishes=publishes) for seed in seeds)
    return next((outcome for outcome in outcomes if isinstance(outcome, Failure)), None)
