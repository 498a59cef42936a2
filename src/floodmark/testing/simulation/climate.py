"""The parameters of a world: how often each action and each fault occurs."""

from dataclasses import dataclass
from datetime import timedelta
from random import Random

from floodmark.testing.simulation.network import Weather


@dataclass(frozen=True, kw_only=True)
class Climate:
    """The parameters of one world.  Weights are relative to each other; an action without one never occurs.

    `holders` is the share of feeds that hold a safe point, and `in_parts` says whether several tasks share
    each step of a link.
    """

    weather: Weather
    disks_fail: bool
    clocks_jump_far: bool
    in_parts: bool
    holders: float
    log_retention: timedelta | None
    writes: float = 40
    reads: float = 20
    collections: float
    reshapes: float
    jumps: float
    crashes: float
    cuts: float
    drivers: float
    looks: float


def draw_climate(random: Random) -> Climate:
    """Draw a climate in which some actions and faults never occur."""

    def sometimes(weight: float) -> float:
        return weight * random.random() if random.random() < 0.7 else 0.0

    return Climate(
        weather=Weather(loss=sometimes(0.05), duplication=sometimes(0.2)),
        disks_fail=random.random() < 0.6,
        clocks_jump_far=random.random() < 0.4,
        in_parts=random.random() < 0.3,
        holders=sometimes(0.6),
        log_retention=timedelta(milliseconds=500) if random.random() < 0.3 else None,
        collections=2 + sometimes(10),
        reshapes=sometimes(6),
        jumps=sometimes(6),
        crashes=sometimes(4),
        cuts=sometimes(3),
        drivers=sometimes(3),
        looks=4 + sometimes(16),
    )
