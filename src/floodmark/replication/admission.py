"""Decides which changes a site applies: from whom, and from which version on.

The topology names the sources of a namespace; a site refuses changes of any other.  It also refuses changes
older than a deletion that it has collected.  Among members none is older, because garbage collection waits
for them. But a site that took part before this one knew of it was not waited for: its older writes would come
back to life here, and stay dead elsewhere.
"""

from collections.abc import Callable

from floodmark.model.version import Version, moment_of
from floodmark.partition import Node
from floodmark.replication.members import Members


class Admission:
    """Judges the changes that arrive at one site.  A site without a topology applies all of them."""

    def __init__(self, node: Node, members: Members, name_of: Callable[[int], str | None]) -> None:
        self._retention = node.retention
        self._members = members
        self._name_of = name_of

    def why_refused(self, source: int, namespace: int, begin: Version) -> str | None:
        """Why the site refuses changes of a source after a version, in a namespace of an id; or None."""
        name = self._name_of(namespace)
        if self._members.topology is None or name is None:
            return None
        if source not in self._members.sources(name):
            return "the topology in force here does not let this namespace come from that site"
        horizon = self.horizon(source, namespace)
        return why_too_old(self._members.name_of(source), name, begin, horizon) if begin < horizon else None

    def horizon(self, source: int, namespace: int) -> Version:
        """The version of a source after which its changes must begin."""
        name, member = self._name_of(namespace), self._members.find(source)
        # The members have agreed on the changes of a removed site.
        if name is None or member is None or not member.is_active:
            return 0
        return self._retention.collected_horizon(namespace)


def why_too_old(source: str, namespace: str, begin: Version, horizon: Version) -> str:
    """The message for changes that begin before collected deletions."""
    return (
        f"they go back to {moment_of(begin).isoformat()}, and deletions up to "
        f"{moment_of(horizon).isoformat()} are forgotten here, because it took part before this site knew; "
        f"write them again at {source!r} with `floodmark namespace rewrite LOCATION {namespace}`"
    )
