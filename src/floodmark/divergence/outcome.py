"""The outcome of a comparison: the sites agree, have drifted apart, or it cannot be told.

Lag is no finding, because recent changes are under way.  But the lag of a site that has got nothing from
another for long may hide anything.
"""

from collections.abc import Mapping, Sequence
from datetime import timedelta
from enum import StrEnum

from floodmark.divergence.comparing import ComparedTally, Pair, Vantage
from floodmark.model.version import Version, moment_of, physical_ms


class Outcome(StrEnum):
    """The answer to the question whether sites agree."""

    AGREE = "agree"
    DRIFT = "drift"
    UNKNOWN = "unknown"


def conclude(drift: int, doubts: Sequence[str]) -> Outcome:
    """Drift is certain, whatever else is not; without it, every doubt counts.

    >>> conclude(1, ["rome cannot be reached"]).value, conclude(0, ["rome cannot be reached"]).value
    ('drift', 'unknown')
    """
    if drift:
        return Outcome.DRIFT
    return Outcome.UNKNOWN if doubts else Outcome.AGREE


def find_overdue(
    namespace: str, vantages: Sequence[Vantage], tallies: Mapping[Pair, ComparedTally], max_lag: timedelta
) -> list[str]:
    """Doubts about differences that count as lag: which sites have got nothing from others for too long."""
    lagging = {site for pair, tally in tallies.items() if tally.lag for site in pair}
    names = {vantage.site_id: vantage.site for vantage in vantages}
    doubts = []
    for vantage in vantages:
        late = [
            f"of {names.get(source, f'site {source}')} {_describe(through)}"
            for source, through in sorted(vantage.mark.items())
            if vantage.site in lagging and _age(vantage, through) > max_lag
        ]
        if late:
            doubts.append(
                f"{vantage.site} has the changes in {namespace!r} {' and '.join(late)}; what was lost since "
                "cannot be told from lag: see that replication runs"
            )
    return doubts


def _age(vantage: Vantage, through: Version) -> timedelta:
    return timedelta(milliseconds=physical_ms(vantage.version) - physical_ms(through))


def _describe(through: Version) -> str:
    return f"only up to {moment_of(through).isoformat(timespec='seconds')}" if through else "not at all yet"
