"""The findings of `verify --watch` so far, as Prometheus metrics that are made when it scrapes."""

from collections.abc import Iterator
from threading import Lock
from typing import TYPE_CHECKING, Final

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from floodmark.clock import TimeSource, monotonic_ms
from floodmark.divergence.outcome import Outcome
from floodmark.divergence.rules import Verdict

if TYPE_CHECKING:
    from floodmark.spark.jobs import VerifySummary

_PAIR: Final = ("namespace", "left", "right")
_DRIFT: Final = tuple(verdict for verdict in Verdict if verdict.is_drift)


class VerifyMetrics(Collector):
    """Metrics of the last pass, and totals of all passes."""

    def __init__(self, time_source: TimeSource = monotonic_ms) -> None:
        self._time_source = time_source
        self._lock = Lock()
        self._last: VerifySummary | None = None
        self._whole_at_ms: int | None = None
        self._compared: dict[tuple[str, ...], int] = {}
        self._passes = {True: 0, False: 0}
        self._registry = CollectorRegistry()
        self._registry.register(self)

    def add(self, summary: "VerifySummary") -> None:
        """Take in the summary of a pass."""
        with self._lock:
            self._last = summary
            self._passes[summary.whole] += 1
            if summary.whole and summary.pairs and not summary.doubts:
                self._whole_at_ms = self._time_source()
            for pair in summary.pairs:
                labels = (pair.namespace, pair.left, pair.right)
                self._compared[labels] = self._compared.get(labels, 0) + pair.compared

    def render(self) -> bytes:
        """The metrics in Prometheus' text format."""
        return generate_latest(self._registry)

    def find_alarms(self) -> list[str]:
        """The alarms: drift and doubts of the last pass."""
        last = self._last
        if last is None:
            return []
        drifted = [
            f"{pair.namespace}: {pair.left} and {pair.right} have drifted apart in {pair.drift:,} keys"
            for pair in last.pairs
            if pair.drift
        ]
        return [*drifted, *last.doubts]

    @property
    def has_looked(self) -> bool:
        """Whether a pass is complete."""
        return self._last is not None

    def collect(self) -> Iterator[Metric]:
        """What Prometheus asks for."""
        with self._lock:
            yield from self._collect()

    def _collect(self) -> Iterator[Metric]:
        compared = CounterMetricFamily(
            "floodmark_verify_keys_compared", "Keys that were compared, in all passes.", labels=_PAIR
        )
        for labels, count in self._compared.items():
            compared.add_metric(labels, count)
        yield compared
        passes = CounterMetricFamily(
            "floodmark_verify_passes", "Passes, over everything or over what has changed.", labels=("kind",)
        )
        for whole, count in self._passes.items():
            passes.add_metric(["whole" if whole else "changed"], count)
        yield passes
        if self._last is not None:
            yield from _describe(self._last)
        if self._whole_at_ms is not None:
            yield GaugeMetricFamily(
                "floodmark_verify_whole_pass_age_seconds",
                "Seconds since the last pass over everything that left no doubt.",
                (self._time_source() - self._whole_at_ms) / 1000,
            )


def _describe(summary: "VerifySummary") -> Iterator[Metric]:
    """The last pass: what has drifted or lags now."""
    lag = GaugeMetricFamily("floodmark_verify_lag_keys", "Keys whose changes are under way.", labels=_PAIR)
    drift = GaugeMetricFamily(
        "floodmark_verify_drift_keys", "Keys that have drifted apart.", labels=(*_PAIR, "kind")
    )
    for pair in summary.pairs:
        labels = (pair.namespace, pair.left, pair.right)
        lag.add_metric(labels, pair.lag)
        for verdict in _DRIFT:
            drift.add_metric((*labels, str(verdict)), getattr(pair, str(verdict)))
    yield lag
    yield drift
    outcome = GaugeMetricFamily(
        "floodmark_verify_outcome", "1 for what the last pass said of the sites.", labels=("outcome",)
    )
    for each in Outcome:
        outcome.add_metric([str(each)], int(summary.outcome is each))
    yield outcome
    yield GaugeMetricFamily("floodmark_verify_pass_seconds", "How long the last pass took.", summary.seconds)
