"""What is shipped beside the package: units, containers and the source distribution."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from tests.cli.test_help import parse

from floodmark.replication.topology import parse_topology

ROOT = Path(__file__).resolve().parent.parent
EXAMPLES = ROOT / "examples"


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


def test_commands_of_the_containers_can_be_typed() -> None:
    text = (EXAMPLES / "sites" / "compose.yaml").read_text("utf-8")
    found = [re.split(r",\s*", listed) for listed in re.findall(r"command: \[(.*?)\]", text, re.DOTALL)]
    assert [parse([word.strip('"') for word in words]) for words in found] == ["serve", "serve", "replicate"]


def test_every_file_that_the_containers_mount_is_there() -> None:
    text = (EXAMPLES / "sites" / "compose.yaml").read_text("utf-8")
    mounted = re.findall(r"\./([\w.]+):", text)
    assert mounted
    assert [name for name in mounted if not (EXAMPLES / "sites" / name).is_file()] == []
    topology = parse_topology((EXAMPLES / "sites" / "topology.toml").read_bytes())
    assert {site.url for site in topology.sites.values()} == {"grpc://oslo:7100", "grpc://rome:7100"}


def test_the_image_copies_files_that_there_are() -> None:
    copied = re.findall(
        r"^COPY (.*) \S+$", (EXAMPLES / "sites" / "Dockerfile").read_text("utf-8"), re.MULTILINE
    )
    assert [name for line in copied for name in line.split() if not (ROOT / name).exists()] == []


def test_the_source_distribution_names_what_there_is() -> None:
    for line in (ROOT / "MANIFEST.in").read_text("utf-8").splitlines():
        verb, *names = line.split()
        assert verb == "global-exclude" or [name for name in names if not (ROOT / name).exists()] == []


def test_the_source_distribution_has_what_its_tests_import() -> None:
    manifest = (ROOT / "MANIFEST.in").read_text("utf-8")
    texts = [path.read_text("utf-8") for path in (ROOT / "tests").rglob("*.py")]
    imported = {name for text in texts for name in re.findall(r"^(?:from|import) (\w+)", text, re.MULTILINE)}
    needed = {name for name in imported if (ROOT / name).is_dir()}
    assert needed == {"benchmarks", "tests"}
    assert needed <= set(re.findall(r"^graft (\w+)", manifest, re.MULTILINE))
