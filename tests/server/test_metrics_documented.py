"""Every metric is documented, and the dashboard and the alerts name metrics that there are."""

import re
import shutil
import subprocess
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import pytest

import floodmark
from floodmark.partition import FAMILIES
from floodmark.server.counters import ServerMetrics
from floodmark.server.page import MetricsPage

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def made() -> Any:
    spec = spec_from_file_location("make_metrics", ROOT / "docs" / "make_metrics.py")
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_files_are_as_the_script_makes_them(made: Any) -> None:
    for path, make in made.FILES.items():
        assert path.read_text("utf-8") == make(), f"{path.name} is old: run docs/make_metrics.py"


def test_every_metric_of_a_page_is_documented_with_its_labels(made: Any, tmp_path: Path) -> None:
    known = {each.name: each for each in made.described()["serve"]}
    with floodmark.open(tmp_path / "oslo", site="oslo", background=False) as site:
        site.create_namespace("users").put(b"ada", b"countess")
        site.subscribe("indexer", "users").close()
        site.feeds.create("copy", "users", "blackhole:")
        page = MetricsPage(site, ServerMetrics(["put"]), {"server": 1.0})
        families = [each for each in page.collect() if each.name.startswith("floodmark_")]
    shown = {f"{each.name}{'_total' * (each.type == 'counter')}": each for each in families}
    # Of one node in a directory there is nothing to count as a node of several.
    assert known.keys() - shown.keys() == {"floodmark_node_takeovers_total", "floodmark_node_restarts_total"}
    for name, family in shown.items():
        assert (known[name].kind, known[name].help) == (family.type, family.documentation)
        for sample in family.samples:
            assert set(sample.labels) - {"le"} == set(known[name].labels), name
    assert next(iter(shown["floodmark_disk_free_bytes"].samples)).value > 0
    cache = next(iter(shown["floodmark_rocksdb_block_cache_bytes"].samples))
    assert cache.value > 0
    stored = {sample.labels["family"] for sample in shown["floodmark_rocksdb_memtables_bytes"].samples}
    assert stored == {*FAMILIES}
    (backlog,) = shown["floodmark_subscription_backlog_changes"].samples
    assert (backlog.labels["subscription"], backlog.value) == ("indexer", 1)


def test_alerts_name_metrics_that_there_are(made: Any) -> None:
    known = {each.name for metrics in made.described().values() for each in metrics}
    for alert in made.ALERTS:
        assert set(re.findall(r"floodmark_\w+", alert.expression)) <= known


def test_prometheus_takes_the_alerts() -> None:
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("promtool is missing; install Debian's package prometheus")
    checked = subprocess.run(
        [promtool, "check", "rules", ROOT / "examples" / "sites" / "alerts.yaml"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert checked.returncode == 0, checked.stdout + checked.stderr


def test_durations_are_measured_by_group() -> None:
    metrics = ServerMetrics([f"administration.call_{number}" for number in range(90)])
    (durations,) = (each for each in metrics.families("oslo") if each.name == "floodmark_request_seconds")
    assert {sample.labels["group"] for sample in durations.samples} == {"administration", "other"}
