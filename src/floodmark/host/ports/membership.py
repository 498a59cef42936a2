"""The port to a site's part in a topology: what it shares, and how it joins, returns and catches up."""

from typing import Protocol

from floodmark.model.access import Role
from floodmark.model.actions import Action, Scope
from floodmark.model.version import Version
from floodmark.replication.topology import Topology


class MembershipPort(Protocol):
    """Puts topologies in force, and shares namespaces."""

    @Action(Role.READ, Scope.SITE, repeatable=True)
    def topology(self) -> Topology | None:
        """The topology in force at this site; None if the site shares nothing."""
        ...

    @Action(Role.ADMIN, Scope.SITE, audited=True, repeatable=True)
    def set_topology(self, topology: Topology) -> None:
        """Put a topology in force, and create its namespaces that are missing here."""
        ...

    @Action(Role.READ, Scope.NAMESPACE, repeatable=True)
    def rewritable_version(self, namespace: str) -> Version:
        """All that other sites wrote into a namespace up to here is in; 0 if one of them sent nothing yet."""
        ...

    @Action(Role.READ, Scope.NAMESPACE, repeatable=True)
    def shared_since(self, namespace: str, position: Version) -> Version:
        """The version after which a site at a position finds all that it still needs of a namespace."""
        ...

    @Action(Role.REPLICATE, Scope.NAMESPACE, audited=True, repeatable=True)
    def note_rewritten(self, namespace: str, since: Version) -> None:
        """Remember that all data of a namespace was rewritten above a version: it may be shared."""
        ...

    @Action(Role.ADMIN, Scope.NAMESPACE, audited=True, repeatable=True)
    def declare_loaded(self, namespace: str) -> Version:
        """End the loading of a namespace: its history begins here, and this is its first version.

        Loaded records are no changes, so no reader of changes may begin before this version.  Calling it
        again does nothing.
        """
        ...

    @Action(Role.ADMIN, Scope.NAMESPACE, audited=True, repeatable=True)
    def adopt_watermark(self, namespace: str, watermark: dict[int, Version], horizon: Version) -> None:
        """Let links go on from the position of the site from which a namespace was loaded."""
        ...

    @Action(Role.ADMIN, Scope.SITE, audited=True, repeatable=True)
    def finish_rejoining(self) -> list[str]:
        """Let a restored site take part again, unless it lacks namespaces: these."""
        ...
