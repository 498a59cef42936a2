"""A network between sites: calls fail, are repeated, come late and overtake each other, or get no answer.

One site may be unable to call another for a while, although the other can still call it.  A caller gets an
answer at once or the error `Unreachable`, and then does not know whether the call was lost, the answer was
lost, or the call is still in flight and will be run later.
"""

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from random import Random
from typing import Protocol, TypeVar

from floodmark.model.errors import FloodmarkError, Unreachable
from floodmark.testing.simulation.clocks import Schedule

Result = TypeVar("Result")


@dataclass(frozen=True, kw_only=True)
class Weather:
    """The faults of a network: the chances that a call is lost or repeated, and the longest delay."""

    loss: float = 0.0
    duplication: float = 0.0
    late_ms_max: int = 600


class Carrier(Protocol):
    """Runs calls at other places."""

    def call(self, caller: str, target: str, action: Callable[[], Result]) -> Result: ...


class Network:
    """Carries calls between named places."""

    def __init__(self, random: Random, schedule: Schedule) -> None:
        self.weather = Weather()
        self._random = random
        self._schedule = schedule
        self._cut: set[tuple[str, str]] = set()

    def cut(self, caller: str, target: str) -> None:
        """Block calls from one place to another, but not those in the other direction."""
        self._cut.add((caller, target))

    def mend(self, caller: str, target: str) -> None:
        """Unblock calls from one place to another."""
        self._cut.discard((caller, target))

    def heal(self) -> None:
        """Unblock all calls, and lose and repeat none from now on."""
        self._cut.clear()
        self.weather = Weather()

    def call(self, caller: str, target: str, action: Callable[[], Result]) -> Result:
        """Run an action at the target: once, twice or not at all, now or later."""
        random, weather = self._random, self.weather
        if (caller, target) in self._cut:
            raise Unreachable(f"{target} does not answer {caller}")
        if random.random() < weather.loss:
            if random.random() < 0.5:
                self._deliver_late(caller, target, action)
            raise Unreachable(f"the call of {caller} to {target} got lost")
        result = action()
        if random.random() < weather.duplication:
            self._deliver_late(caller, target, action)
        if random.random() < weather.loss:
            raise Unreachable(f"the answer of {target} to {caller} got lost")
        return result

    def _deliver_late(self, caller: str, target: str, action: Callable[[], object]) -> None:
        def deliver() -> None:
            if (caller, target) not in self._cut:
                with suppress(FloodmarkError):
                    action()

        self._schedule.after(self._random.randint(1, self.weather.late_ms_max), deliver)
