"""What is shipped beside the package: units, containers and the source distribution."""

import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import yaml
from tests.cli.test_help import parse

from floodmark.replication.topology import parse_topology

ROOT = Path(__file__).resolve().parent.parent
EXAMPLES = ROOT / "examples"
SITES = EXAMPLES / "sites"


@pytest.mark.parametrize("unit", sorted(EXAMPLES.rglob("*.service")), ids=lambda unit: unit.name)
def test_systemd_takes_the_unit(unit: Path, tmp_path: Path) -> None:
    analyze = shutil.which("systemd-analyze")
    if analyze is None:
        pytest.skip("systemd-analyze is missing; install systemd")
    # It looks whether the program is there.
    text = unit.read_text("utf-8").replace("/usr/local/bin/floodmark", sys.executable)
    (tmp_path / unit.name).write_text(text, "utf-8")
    checked = subprocess.run(
        [analyze, "verify", tmp_path / unit.name], capture_output=True, text=True, check=False
    )
    assert (checked.returncode, checked.stderr) == (0, "")


def read_services(example: Path) -> dict[str, Any]:
    """The containers of an example."""
    read = yaml.safe_load((example / "compose.yaml").read_text("utf-8"))
    found: dict[str, Any] = read["services"]
    named = {volume.partition(":")[0] for each in found.values() for volume in each.get("volumes", ())}
    assert read["volumes"].keys() == {name for name in named if not name.startswith("./")}
    return found


@pytest.fixture(scope="module")
def services() -> dict[str, Any]:
    """The containers of the example with two sites."""
    return read_services(SITES)


@pytest.mark.parametrize("example", ["sites", "nodes"])
def test_containers_of_ours_can_be_built_and_run_and_say_when_they_are_ready(example: str) -> None:
    found = read_services(EXAMPLES / example)
    ours = {name: each for name, each in found.items() if "build" in each}
    assert {name: parse(each["command"]) for name, each in ours.items()} == {
        "sites": {"oslo": "serve", "rome": "serve", "replicate": "replicate"},
        "nodes": dict.fromkeys(("node-1", "node-2", "node-3"), "serve"),
    }[example]
    for each in ours.values():
        context = EXAMPLES / example / each["build"]["context"]
        assert (context / each["build"]["dockerfile"]).samefile(SITES / "Dockerfile")
        *_, check = each["healthcheck"]["test"]
        (port,) = re.findall(r"http://127.0.0.1:(\d+)/readyz", check)
        assert any(word.startswith("--metrics=") and word.endswith(f":{port}") for word in each["command"])
        assert all("healthcheck" in found[name] for name in each.get("depends_on", ()))


def test_prometheus_reads_every_container_that_serves_metrics(
    services: dict[str, Any], tmp_path: Path
) -> None:
    read = yaml.safe_load((SITES / "prometheus.yaml").read_text("utf-8"))
    (job,) = read["scrape_configs"]
    (listed,) = job["static_configs"]
    assert {*listed["targets"]} == {f"{name}:9100" for name, each in services.items() if "command" in each}
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("promtool is missing; install Debian's package prometheus")
    read["rule_files"] = [str(SITES / "alerts.yaml")]
    (tmp_path / "prometheus.yaml").write_text(yaml.safe_dump(read), "utf-8")
    checked = subprocess.run(
        [promtool, "check", "config", tmp_path / "prometheus.yaml"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert checked.returncode == 0, checked.stdout + checked.stderr


def test_every_file_that_the_containers_mount_is_there(services: dict[str, Any]) -> None:
    mounts = [volume for each in services.values() for volume in each.get("volumes", ())]
    files = [mount.partition(":")[0] for mount in mounts if mount.startswith("./")]
    assert files
    assert [name for name in files if not (SITES / name).is_file()] == []
    topology = parse_topology((SITES / "topology.toml").read_bytes())
    assert {site.url for site in topology.sites.values()} == {"grpc://oslo:7100", "grpc://rome:7100"}


def test_the_image_copies_files_that_there_are() -> None:
    copied = re.findall(r"^COPY (.*) \S+$", (SITES / "Dockerfile").read_text("utf-8"), re.MULTILINE)
    names = {name for line in copied for name in line.split()}
    assert [name for name in names if not (ROOT / name).exists()] == []
    # All else stays out of what is sent to build it.
    ignored = (SITES / "Dockerfile.dockerignore").read_text("utf-8").splitlines()
    assert {line.removeprefix("!") for line in ignored if line.startswith("!")} == names
    assert ignored[0] == "*"


def test_the_package_gives_no_address_that_was_made_up() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    reserved = (".example", ".invalid", ".test", ".localhost", "example.com", "example.org", "example.net")
    hosts = {name: urlsplit(url).hostname or "" for name, url in project.get("urls", {}).items()}
    assert [name for name, host in hosts.items() if not host or host.endswith(reserved)] == []


def test_the_source_distribution_names_what_there_is() -> None:
    for line in (ROOT / "MANIFEST.in").read_text("utf-8").splitlines():
        verb, *names = line.split()
        assert (
            verb in ("global-exclude", "prune")
            or [name for name in names if not (ROOT / name).exists()] == []
        )


def test_the_source_distribution_has_what_its_tests_import() -> None:
    manifest = (ROOT / "MANIFEST.in").read_text("utf-8")
    texts = [path.read_text("utf-8") for path in (ROOT / "tests").rglob("*.py")]
    imported = {name for text in texts for name in re.findall(r"^(?:from|import) (\w+)", text, re.MULTILINE)}
    needed = {name for name in imported if (ROOT / name).is_dir()}
    assert needed == {"benchmarks", "tests"}
    assert needed <= set(re.findall(r"^graft (\w+)", manifest, re.MULTILINE))
