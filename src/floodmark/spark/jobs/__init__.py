"""The jobs: each is a function and a command, and safe to run again after being killed anywhere."""

from floodmark.spark.jobs.backup import BackupSummary, backup, list_backups
from floodmark.spark.jobs.check import CheckSummary, check_backup
from floodmark.spark.jobs.export import ExportSummary, export
from floodmark.spark.jobs.export_cut import common_cut, read_export
from floodmark.spark.jobs.feed import FeedRunSummary, run_feed
from floodmark.spark.jobs.links import LinkSummary, TopologySummary, replicate_topology, site_addresses
from floodmark.spark.jobs.progress import Progress
from floodmark.spark.jobs.replicate import NamespaceReplication, ReplicateSummary, replicate
from floodmark.spark.jobs.restore import RestoreSummary, restore
from floodmark.spark.jobs.returning import ReturnSummary, join, rejoin
from floodmark.spark.jobs.verify import PairSummary, VerifySummary, verify
from floodmark.spark.jobs.verify_watch import watch

__all__ = [
    "BackupSummary",
    "CheckSummary",
    "ExportSummary",
    "FeedRunSummary",
    "LinkSummary",
    "NamespaceReplication",
    "PairSummary",
    "Progress",
    "ReplicateSummary",
    "RestoreSummary",
    "ReturnSummary",
    "TopologySummary",
    "VerifySummary",
    "backup",
    "check_backup",
    "common_cut",
    "export",
    "join",
    "list_backups",
    "read_export",
    "rejoin",
    "replicate",
    "replicate_topology",
    "restore",
    "run_feed",
    "site_addresses",
    "verify",
    "watch",
]
