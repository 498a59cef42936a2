"""The outcome of a comparison: the sites agree, have drifted apart, or neither is certain.

Lag is no finding, because recent changes are still being copied.  But the lag of a site that has received
nothing from another for long may hide drift.
"""

from collections.abc import Iterable, Mapping, Sequence
from datetime import timedelta
from enum import StrEnum
from typing import NamedTuple

import msgspec

from floodmark.divergence.comparing import ComparedTally, Pair, Vantage
from floodmark.model.version import Version, moment_of, physical_ms


class Outcome(StrEnum):
    """The answer to the question whether sites agree."""

    AGREE = "agree"
    DRIFT = "drift"
    UNKNOWN = "unknown"


def conclude(drift: int, doubts: Sequence[str]) -> Outcome:
    """The outcome for a number of drifted keys and some doubts: any drift is DRIFT, else any doubt UNKNOWN.

    >>> conclude(1, ["rome cannot be reached"]).value, conclude(0, ["rome cannot be reached"]).value
    ('drift', 'unknown')
    """
    if drift:
        return Outcome.DRIFT
    return Outcome.UNKNOWN if doubts else Outcome.AGREE


class SiteDoubt(msgspec.Struct, frozen=True):
    """The reason why a namespace of a site cannot be compared."""

    site: str
    namespace: str
    reason: str


def tell_doubts(doubts: Iterable[str | SiteDoubt]) -> list[str]:
    """Doubts as messages, each once.  Namespaces of a site with the same reason share a message.

    >>> tell_doubts([SiteDoubt("rome", "users", "no answer"), SiteDoubt("rome", "orders", "no answer")])
    ["'orders', 'users' of rome cannot be compared: no answer"]
    """
    # In the order of their first mention; the value is None for a plain message.
    told: dict[tuple[str, str], set[str] | None] = {}
    for doubt in doubts:
        if isinstance(doubt, str):
            told.setdefault((doubt, ""), None)
            continue
        names = told.setdefault((doubt.site, doubt.reason), set())
        assert names is not None
        names.add(doubt.namespace)
    return [
        first if names is None else f"{_list(names)} of {first} cannot be compared: {reason}"
        for (first, reason), names in told.items()
    ]


class Compared(NamedTuple):
    """A namespace that was compared: the vantages of its sites, and the tallies of their pairs."""

    namespace: str
    vantages: Sequence[Vantage]
    tallies: Mapping[Pair, ComparedTally]


def find_overdue(compared: Iterable[Compared], max_lag: timedelta) -> list[str]:
    """Doubts about differences that count as lag: one for each site that lacks changes for too long."""
    late: dict[str, dict[str, Version]] = {}
    namespaces: dict[str, set[str]] = {}
    for namespace, vantages, tallies in compared:
        lagging = {site for pair, tally in tallies.items() if tally.lag for site in pair}
        names = {vantage.site_id: vantage.site for vantage in vantages}
        for vantage in vantages:
            for source, through in sorted(vantage.mark.items()):
                if vantage.site in lagging and _age(vantage, through) > max_lag:
                    oldest = late.setdefault(vantage.site, {})
                    name = names.get(source, f"site {source}")
                    oldest[name] = min(through, oldest.get(name, through))
                    namespaces.setdefault(vantage.site, set()).add(namespace)
    return [
        f"{site} has the changes in {_list(namespaces[site])} "
        f"{' and '.join(f'of {source} {_describe(through)}' for source, through in sources.items())}; what "
        "was lost since cannot be told from lag: see that replication runs"
        for site, sources in late.items()
    ]


def _list(namespaces: Iterable[str]) -> str:
    return ", ".join(map(repr, sorted(namespaces)))


def _age(vantage: Vantage, through: Version) -> timedelta:
    return timedelta(milliseconds=physical_ms(vantage.version) - physical_ms(through))


def _describe(through: Version) -> str:
    return f"only up to {moment_of(through).isoformat(timespec='seconds')}" if through else "not at all yet"
