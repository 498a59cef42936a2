"""The jobs: each is a function and a command, and safe to run again after being killed anywhere."""

from floodmark.links.driver import LinkSummary, TopologySummary, site_addresses
from floodmark.spark.jobs.backups.backup import BackupSummary, backup, list_backups
from floodmark.spark.jobs.backups.parts import CheckSummary, check_backup
from floodmark.spark.jobs.backups.restore import RestoreSummary, ReturnSummary, join, rejoin, restore
from floodmark.spark.jobs.exports.export import ExportSummary, common_cut, export, read_export
from floodmark.spark.jobs.feed import FeedRunSummary, run_feed
from floodmark.spark.jobs.verifying.verify import PairSummary, VerifySummary, verify
from floodmark.spark.jobs.verifying.watch import watch
from floodmark.spark.links import replicate, replicate_topology
from floodmark.spark.runtime.progress import JobProgress

__all__ = [
    "BackupSummary",
    "CheckSummary",
    "ExportSummary",
    "FeedRunSummary",
    "LinkSummary",
    "PairSummary",
    "JobProgress",
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
