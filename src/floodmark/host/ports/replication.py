"""The port to the links that end, or begin, at a site."""

from typing import Protocol

from floodmark.model.access import Role
from floodmark.model.actions import Action, Scope
from floodmark.model.version import Version
from floodmark.replication.applied import Applied
from floodmark.replication.links import LinkPosition
from floodmark.replication.step import LinkStep, NamespaceCut, NamespacePosition


class ReplicationPort(Protocol):
    """Tells and moves the positions of links."""

    @Action(Role.READ, shown_by=lambda link: link.namespace, repeatable=True)
    def links(self) -> list[LinkPosition]:
        """The positions of this site in the changes of others, by source and namespace."""
        ...

    @Action(Role.READ, Scope.NAMESPACE, namespaces=lambda arguments: arguments["namespaces"], repeatable=True)
    def link_positions(self, source_id: int, namespaces: list[str]) -> list[NamespacePosition]:
        """The positions of this site in namespaces of one source; missing namespaces are left out."""
        ...

    @Action(
        Role.READ,
        Scope.NAMESPACE,
        namespaces=lambda arguments: arguments["positions"],
        repeatable=True,
        lengthy=True,
    )
    def cut_link(self, positions: dict[str, Version], changes_max: int | None) -> list[NamespaceCut]:
        """Where the next step of a link ends whose target is at these positions."""
        ...

    @Action(
        Role.REPLICATE,
        Scope.NAMESPACE,
        audited=True,
        unsaid=("applied",),
        repeatable=True,
        # A site that was away brings all heartbeats that it has missed.
        large=True,
        namespaces=lambda arguments: [part.name for part in arguments["step"].namespaces] or [None],
    )
    def advance_link(self, step: LinkStep, applied: Applied) -> None:
        """Store the position after a step whose changes are applied and durable.  Repeating does nothing."""
        ...

    @Action(
        Role.REPLICATE,
        Scope.NAMESPACE,
        audited=True,
        repeatable=True,
        namespaces=lambda arguments: arguments["namespaces"] or [None],
    )
    def stall_link(self, source_id: int, namespaces: list[str], reason: str) -> None:
        """Report why a link does not advance.  The reason is shown until it does."""
        ...

    @Action(Role.READ, Scope.NAMESPACE, repeatable=True)
    def watermark(self, namespace: str, at: Version | None) -> dict[int, Version]:
        """The watermark of a namespace, without the site's own entry, now or as of a version."""
        ...
