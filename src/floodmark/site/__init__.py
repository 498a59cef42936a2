"""The façade that users hold: sites and namespaces."""

from floodmark.codec.objects import Codec
from floodmark.feed import SafePoint
from floodmark.host.catalog import NamespaceSettings
from floodmark.host.statistics import GarbageReport, SiteStatistics
from floodmark.site.batch import Batch
from floodmark.site.codecs import CodedNamespace, CodedView
from floodmark.site.embedding import open_engine
from floodmark.site.namespace import CounterNamespace, Namespace, View
from floodmark.site.site import Site
from floodmark.site.transaction import Transaction
from floodmark.site.writer import Writer

__all__ = [
    "Batch",
    "Codec",
    "CodedNamespace",
    "CodedView",
    "CounterNamespace",
    "GarbageReport",
    "Namespace",
    "NamespaceSettings",
    "SafePoint",
    "Site",
    "SiteStatistics",
    "Transaction",
    "View",
    "Writer",
    "open_engine",
]
