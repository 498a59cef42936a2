"""Whose changes a site takes in, and from where on.

Only those who share a namespace know what the others must not forget: whoever is not among them is refused.
And nothing comes that is older than a deletion which this site has forgotten.  Among members that follows
from garbage collection, which waits for all of them.  But a site that took part before this one knew of it
was not waited for: here its older writes would come back to life, and elsewhere stay dead.
"""

from collections.abc import Callable

from floodmark.model.version import Version, moment_of
from floodmark.partition import Node
from floodmark.replication.members import Members


class Admission:
    """Judges what arrives at one site.  Without a topology nobody has promised anything: all is let in."""

    def __init__(self, node: Node, members: Members, name_of: Callable[[int], str | None]) -> None:
        self._retention = node.retention
        self._members = members
        self._name_of = name_of

    def why_refused(self, source: int, namespace: int, begin: Version) -> str | None:
        """Why changes of a source in a namespace, named by its id, behind a version are not taken in."""
        name = self._name_of(namespace)
        if self._members.topology is None or name is None:
            return None
        if source not in self._members.sources(name):
            return "the topology in force here does not let this namespace come from that site"
        horizon = self.horizon(source, namespace)
        return why_too_old(self._members.name_of(source), name, begin, horizon) if begin < horizon else None

    def horizon(self, source: int, namespace: int) -> Version:
        """Behind which version of a source all must lie that it brings."""
        name, member = self._name_of(namespace), self._members.find(source)
        # Of a site that was removed only that is brought which all members have agreed on.
        if name is None or member is None or not member.is_active:
            return 0
        return self._retention.collected_horizon(namespace)


def why_too_old(source: str, namespace: str, begin: Version, horizon: Version) -> str:
    """What is wrong with changes that begin before deletions which are forgotten, and what to do."""
    return (
        f"they go back to {moment_of(begin).isoformat()}, and deletions up to "
        f"{moment_of(horizon).isoformat()} are forgotten here, because it took part before this site knew; "
        f"write them again at {source!r} with `floodmark namespace rewrite LOCATION {namespace}`"
    )
