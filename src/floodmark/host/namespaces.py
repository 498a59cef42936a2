"""The namespaces of a site of this process."""

from dataclasses import replace

from msgspec import UNSET

from floodmark.host.catalog import Catalog, NamespaceRow, NamespaceSettings
from floodmark.host.ports.namespaces import NamespaceUpdate
from floodmark.host.sharing import Sharing


class LocalNamespaces:
    """The port to namespaces, over a catalog."""

    def __init__(self, catalog: Catalog, sharing: Sharing) -> None:
        self._catalog = catalog
        self._sharing = sharing

    def create_namespace(self, namespace: str, settings: NamespaceSettings) -> NamespaceRow:
        return self._catalog.create(namespace, settings)

    def find_namespace(self, namespace: str) -> NamespaceRow:
        return self._catalog.get(namespace)

    def list_namespaces(self) -> list[NamespaceRow]:
        return sorted(self._catalog.all(), key=lambda row: row.name)

    def update_namespace(self, namespace: str, update: NamespaceUpdate) -> NamespaceRow:
        def change(settings: NamespaceSettings) -> NamespaceSettings:
            return replace(
                settings,
                ttl=settings.ttl if update.ttl is UNSET else update.ttl,
                retention=settings.retention if update.retention is UNSET else update.retention,
            )

        self._catalog.update(namespace, change)
        return self._catalog.get(namespace)

    def drop_namespace(self, namespace: str) -> None:
        self._sharing.require_unshared(namespace)
        self._catalog.drop(namespace)
