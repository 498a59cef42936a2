"""`python -m floodmark.testing.simulation`: run one seed or many, and show what went wrong."""

import sys
from argparse import ArgumentParser

from floodmark.testing.simulation.faults import FAULTS, PUBLISHING_FAULTS
from floodmark.testing.simulation.runner import Failure, run_seed
from floodmark.testing.simulation.world import STEPS


def main(arguments: list[str] | None = None) -> int:
    """Run what the command line asks for; 1 if a promise was broken."""
    parser = ArgumentParser(prog="python -m floodmark.testing.simulation", description=__doc__)
    parser.add_argument("--seed", type=int, default=0, help="the first seed")
    parser.add_argument("--seeds", type=int, default=1, help="how many seeds, one after the other")
    parser.add_argument("--steps", type=int, default=STEPS, help="how long each one lives")
    parser.add_argument(
        "--fault", choices=sorted(FAULTS | PUBLISHING_FAULTS), help="plant a fault, to see it found"
    )
    parser.add_argument("--publishes", action="store_true", help="publish data sets")
    options = parser.parse_args(arguments)
    for seed in range(options.seed, options.seed + options.seeds):
        outcome = run_seed(seed, steps=options.steps, fault=options.fault, publishes=options.publishes)
        print(outcome)
        if isinstance(outcome, Failure):
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
