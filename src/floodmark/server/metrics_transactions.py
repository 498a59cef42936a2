"""The metrics of transactions, and of the logs that they are written to."""

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from floodmark.host.ports import LogReport, Transactions
from floodmark.log import Histogram
from floodmark.model.transaction import TransactionState

_LABELS = ("site", "log", "owner")


def transaction_families(site: str, transactions: Transactions) -> Iterator[Metric]:
    """How many transactions there are, and what was written to their logs since the site was opened."""
    yield from _count(site, transactions)
    yield from _logs(site, transactions.logs())


def _count(site: str, transactions: Transactions) -> Iterator[Metric]:
    counts = transactions.count()
    count = GaugeMetricFamily(
        "floodmark_transactions", "Transactions that have not ended, by state.", labels=("site", "state")
    )
    for state in (TransactionState.OPEN, TransactionState.COMMITTING, TransactionState.ABORTING):
        count.add_metric((site, state.value), counts.states.get(state, 0))
    yield count
    oldest = GaugeMetricFamily(
        "floodmark_transaction_oldest_age_seconds",
        "The age of the oldest transaction that has not ended; 0 if there is none.",
        labels=("site",),
    )
    oldest.add_metric((site,), counts.oldest_age_ms / 1000)
    yield oldest


def _logs(site: str, reports: list[LogReport]) -> Iterator[Metric]:
    records = _histogram("records_per_entry", "Records in a batched entry")
    sizes = _histogram("entry_size_bytes", "Bytes of a batched entry")
    delays = _histogram("oldest_record_delay_seconds", "How long the oldest record of an entry had waited")
    flushes = CounterMetricFamily(
        "floodmark_txn_log_flushes",
        "Batched entries that were written, by what had them written.",
        labels=(*_LABELS, "trigger"),
    )
    bare = CounterMetricFamily(
        "floodmark_txn_log_bare_entries", "Entries of one record that were written.", labels=_LABELS
    )
    failed = CounterMetricFamily(
        "floodmark_txn_log_failed_appends", "Entries that could not be written.", labels=_LABELS
    )
    live = GaugeMetricFamily("floodmark_txn_log_live_records", "Records that are needed.", labels=_LABELS)
    for report in reports:
        labels, statistics = (site, report.log.value, report.owner), report.statistics
        _add(records, labels, statistics.records_per_entry)
        _add(sizes, labels, statistics.entry_size_bytes)
        _add(delays, labels, statistics.oldest_record_delay_seconds)
        for trigger, number in statistics.flushes.items():
            flushes.add_metric((*labels, trigger.value), number)
        bare.add_metric(labels, statistics.bare_entries)
        failed.add_metric(labels, statistics.failed_appends)
        live.add_metric(labels, report.live_records)
    yield from (records, sizes, delays, flushes, bare, failed, live)


def _histogram(name: str, what: str) -> HistogramMetricFamily:
    return HistogramMetricFamily(f"floodmark_txn_log_{name}", f"{what}.", labels=_LABELS)


def _add(family: HistogramMetricFamily, labels: tuple[str, ...], histogram: Histogram) -> None:
    family.add_metric(labels, histogram.cumulative(), histogram.sum)
