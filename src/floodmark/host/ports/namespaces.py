"""The port to a site's namespaces."""

from datetime import timedelta
from typing import Protocol

import msgspec
from msgspec import UNSET, UnsetType

from floodmark.host.catalog import NamespaceRow, NamespaceSettings
from floodmark.model.access import Role
from floodmark.model.actions import Action, Scope


class NamespaceUpdate(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The settings of a namespace that change; a setting that is not named stays."""

    ttl: timedelta | UnsetType | None = UNSET
    retention: timedelta | UnsetType = UNSET


class NamespacePort(Protocol):
    """Creates, finds, changes and drops namespaces."""

    @Action(Role.ADMIN, Scope.NAMESPACE, audited=True)
    def create_namespace(self, namespace: str, settings: NamespaceSettings) -> NamespaceRow:
        """Add a namespace."""
        ...

    @Action(Role.READ, Scope.NAMESPACE, repeatable=True)
    def find_namespace(self, namespace: str) -> NamespaceRow:
        """The namespace of a name."""
        ...

    @Action(Role.READ, shown_by=lambda row: row.name, repeatable=True)
    def list_namespaces(self) -> list[NamespaceRow]:
        """All namespaces by name, dropped ones included until their data is gone."""
        ...

    @Action(Role.ADMIN, Scope.NAMESPACE, audited=True)
    def update_namespace(self, namespace: str, update: NamespaceUpdate) -> NamespaceRow:
        """Change settings of a namespace."""
        ...

    @Action(Role.ADMIN, Scope.NAMESPACE, audited=True, lengthy=True)
    def drop_namespace(self, namespace: str) -> None:
        """Drop a namespace.  Raises InvalidConfiguration if other sites share it."""
        ...
