"""The façade that users hold: sites and namespaces."""

from floodmark.site.catalog import NamespaceSettings
from floodmark.site.namespace import Namespace, View
from floodmark.site.opening import open, open_engine
from floodmark.site.safepoints import SafePoint
from floodmark.site.site import Site
from floodmark.site.statistics import GarbageReport, SiteStatistics

__all__ = [
    "GarbageReport",
    "Namespace",
    "NamespaceSettings",
    "SafePoint",
    "Site",
    "SiteStatistics",
    "View",
    "open",
    "open_engine",
]
