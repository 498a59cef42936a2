"""Make docs/metrics.md, and the Grafana dashboard and Prometheus alerts of examples/sites, from the metrics.

.venv/bin/python docs/make_metrics.py
"""

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Final, NamedTuple

from prometheus_client.core import CounterMetricFamily

from floodmark.server.counters import ServerMetrics
from floodmark.server.metrics import DESCRIBED, Group

ROOT: Final = Path(__file__).resolve().parent.parent


class Described(NamedTuple):
    """A metric as Prometheus stores it."""

    name: str
    kind: str
    labels: tuple[str, ...]
    help: str


class Alert(NamedTuple):
    """A condition that an operator should know of, how long it lasts first, and what to do."""

    name: str
    expression: str
    lasts: str
    severity: str
    advice: str


ALERTS: Final = (
    Alert("FloodmarkDown", 'up{job="floodmark"} == 0', "1m", "critical", "Start the server; see its log."),
    Alert(
        "FloodmarkSiteFails", "floodmark_site_up == 0", "1m", "critical", "Run floodmark doctor on the site."
    ),
    Alert(
        "FloodmarkDiskNearlyFull",
        "floodmark_disk_free_bytes < 2e9",
        "5m",
        "critical",
        "Make room: the site refuses writes before the disk is full.",
    ),
    Alert(
        "FloodmarkCertificateExpires",
        "floodmark_certificate_expiry_timestamp_seconds - time() < 14 * 86400",
        "1h",
        "warning",
        "Renew the certificate, and restart the server, which reads it when it starts.",
    ),
    Alert(
        "FloodmarkOverloaded",
        "rate(floodmark_delayed_read_versions_total[5m]) > 0",
        "10m",
        "warning",
        "More writes arrive than the disk or the processor can take: look at both, or send fewer at once.",
    ),
    Alert(
        "FloodmarkWritesStopped",
        "floodmark_rocksdb_writes_stopped == 1 "
        "or increase(floodmark_rocksdb_background_errors_total[15m]) > 0",
        "1m",
        "critical",
        "RocksDB takes no writes: the disk is too slow, full or broken; see the log of the server.",
    ),
    Alert(
        "FloodmarkBackgroundFails",
        "floodmark_background_failing == 1",
        "5m",
        "warning",
        "Heartbeats or garbage collection fail; floodmark status tells why.",
    ),
    Alert(
        "FloodmarkResolvedHeldBack",
        "floodmark_resolved_version_held_seconds > 60",
        "1m",
        "warning",
        "A write or a transaction holds readers of changes back; floodmark status names it.",
    ),
    Alert(
        "FloodmarkBugs",
        'increase(floodmark_requests_total{outcome="bug"}[15m]) > 0',
        "0m",
        "warning",
        "Report what the log says.",
    ),
    Alert(
        "FloodmarkLinkAlarm",
        "floodmark_link_alarm == 1",
        "2m",
        "warning",
        "Run floodmark status on the site; it names the link and what to do.",
    ),
    Alert(
        "FloodmarkChangesLost",
        "floodmark_link_intervals_wrong_total > 0 or floodmark_feed_intervals_wrong_total > 0",
        "0m",
        "critical",
        "Run floodmark verify --topology FILE; --repair gives each key its winner.",
    ),
    Alert(
        "FloodmarkLinkBehind",
        "floodmark_link_backlog_seconds > 300",
        "5m",
        "warning",
        "Check that floodmark replicate runs and reaches both sites.",
    ),
    Alert(
        "FloodmarkFeedAlarm",
        "floodmark_feed_alarm == 1",
        "2m",
        "warning",
        "Run floodmark feed show for the feed.",
    ),
    Alert(
        "FloodmarkSubscriptionBehind",
        "floodmark_subscription_lag_seconds > 900",
        "5m",
        "warning",
        "The consumer is slow or gone; floodmark subscription show names its holder.",
    ),
    Alert(
        "FloodmarkReplicateTargetDown",
        "floodmark_replicate_target_up == 0",
        "2m",
        "warning",
        "floodmark replicate does not reach the site: check that it serves, and the token and root for it.",
    ),
    Alert(
        "FloodmarkFeedRunFails",
        "floodmark_feed_run_failures > 0",
        "5m",
        "warning",
        "The sink or the site refuses what floodmark feed run delivers; its /health says why.",
    ),
    Alert(
        "FloodmarkDrift",
        "floodmark_verify_drift_keys > 0",
        "0m",
        "critical",
        "Run floodmark verify --topology FILE --repair, and find out what lost the changes.",
    ),
    Alert(
        "FloodmarkVerifyLate",
        "floodmark_verify_whole_pass_age_seconds > 3 * 86400",
        "0m",
        "warning",
        "floodmark verify --watch could not compare everything for three days; its /health says why.",
    ),
    Alert(
        "FloodmarkNodeDown",
        "floodmark_node_up == 0 and floodmark_node_drained == 0",
        "1m",
        "warning",
        "Start the node again, or floodmark node remove it.",
    ),
)


def described() -> dict[str, list[Described]]:
    """Every metric, by the command that serves it."""
    requests = []
    for family in ServerMetrics(["put"]).families("site"):
        # The library keeps names of labels in the samples.
        names = {name: None for sample in family.samples for name in sample.labels if name != "le"}
        name = f"{family.name}_total" if family.type == "counter" else family.name
        requests.append(Described(name, family.type, tuple(names), family.documentation))
    found = {command: [*_of_groups(groups)] for command, groups in DESCRIBED.items()}
    return found | {"serve": [*requests, *found["serve"]]}


def _of_groups(groups: Iterable[Group]) -> Iterator[Described]:
    for group in groups:
        for metric in group.metrics:
            counts = metric.family is CounterMetricFamily
            kind = metric.family(metric.name, metric.help).type
            more = () if metric.label is None else (metric.label,)
            yield Described(f"{metric.name}{'_total' * counts}", kind, (*group.labels, *more), metric.help)


def page() -> str:
    """The text of docs/metrics.md."""
    tables = []
    for command, metrics in described().items():
        tables += [f"## floodmark {command}", "", "| metric | kind | labels | meaning |", "|---|---|---|---|"]
        tables += [
            f"| `{each.name}` | {each.kind} | {', '.join(each.labels)} | {each.help} |" for each in metrics
        ]
        tables.append("")
    alerts = [f"| `{each.name}` | `{each.expression}` | {each.lasts} | {each.advice} |" for each in ALERTS]
    return "\n".join(
        [
            "# Metrics",
            "",
            "With `--metrics HOST:PORT` these commands serve metrics for Prometheus at `/metrics`, with",
            "those of their process. `docs/make_metrics.py` makes this page, a dashboard for Grafana",
            "([dashboard.json](../examples/sites/dashboard.json)) and alerts",
            "([alerts.yaml](../examples/sites/alerts.yaml)) from one list",
            "([metrics.py](../src/floodmark/server/metrics.py)).",
            "",
            *tables,
            "## Alerts",
            "",
            "| alert | condition | for | what to do |",
            "|---|---|---|---|",
            *alerts,
            "",
        ]
    )


def dashboard() -> str:
    """A Grafana dashboard with a row for each command and a panel for each metric."""
    panels: list[dict[str, Any]] = []
    top = 0
    for command, metrics in described().items():
        row = {"type": "row", "title": f"floodmark {command}", "collapsed": False, "panels": []}
        panels.append({"id": len(panels) + 1, "gridPos": {"h": 1, "w": 24, "x": 0, "y": top}, **row})
        for number, each in enumerate(metrics):
            place = {"h": 8, "w": 8, "x": number % 3 * 8, "y": top + 1 + number // 3 * 8}
            panels.append({"id": len(panels) + 1, "gridPos": place, **_panel(each)})
        top += 1 + (len(metrics) + 2) // 3 * 8
    source = {"name": "source", "type": "datasource", "query": "prometheus"}
    site: dict[str, Any] = {"name": "site", "type": "query"}
    site |= {
        "query": "label_values(floodmark_site_up, site)",
        "datasource": {"type": "prometheus", "uid": "${source}"},
    }
    whole = {"uid": "floodmark", "title": "Floodmark", "schemaVersion": 39, "refresh": "30s"}
    whole |= {"time": {"from": "now-1h", "to": "now"}, "panels": panels}
    whole |= {"templating": {"list": [source, site | {"multi": True, "includeAll": True, "refresh": 2}]}}
    return json.dumps(whole, indent=1) + "\n"


def _panel(metric: Described) -> dict[str, Any]:
    chosen = '{site=~"$site"}' if "site" in metric.labels else ""
    expression = f"{metric.name}{chosen}"
    if metric.kind == "counter":
        expression = f"rate({expression}[$__rate_interval])"
    elif metric.kind == "histogram":
        by, bucket = ", ".join(["le", *metric.labels]), f"{metric.name}_bucket{chosen}"
        expression = f"histogram_quantile(0.99, sum by ({by}) (rate({bucket}[$__rate_interval])))"
    legend = " ".join(f"{{{{{name}}}}}" for name in metric.labels)
    return {
        "type": "timeseries",
        "title": metric.name.removeprefix("floodmark_"),
        "description": metric.help,
        "datasource": {"type": "prometheus", "uid": "${source}"},
        "targets": [{"refId": "A", "expr": expression, "legendFormat": legend}],
    }


def rules() -> str:
    """The alerts as a file of rules for Prometheus.  JSON is YAML, and needs no library."""
    listed = [
        {
            "alert": each.name,
            "expr": each.expression,
            "for": each.lasts,
            "labels": {"severity": each.severity},
            "annotations": {"summary": f"{each.name}: {each.advice}"},
        }
        for each in ALERTS
    ]
    return json.dumps({"groups": [{"name": "floodmark", "rules": listed}]}, indent=1) + "\n"


FILES: Final = {
    ROOT / "docs" / "metrics.md": page,
    ROOT / "examples" / "sites" / "dashboard.json": dashboard,
    ROOT / "examples" / "sites" / "alerts.yaml": rules,
}

if __name__ == "__main__":
    for path, make in FILES.items():
        path.parent.mkdir(exist_ok=True)
        path.write_text(make(), "utf-8")
