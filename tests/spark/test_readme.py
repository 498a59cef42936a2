"""What the README shows of Spark, of jobs and of sites that copy each other is what happens."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from deltalake import DeltaTable
from pyspark.sql import SparkSession
from tests.cli.support import run
from tests.links.support import Served
from tests.spark.test_operations import IDS, Machines
from tests.test_readme import URL, blocks, commands

import floodmark


def test_spark_reads_a_site_and_follows_it(spark: SparkSession, served: Served, tmp_path: Path) -> None:
    served.site.create_namespace("users").put(b"ada", b"countess")
    code = blocks("python")[2].replace(URL, served.url)
    for name in ("state", "lake"):
        code = code.replace(f'"{name}"', repr(str(tmp_path / name)))
    names: dict[str, Any] = {"spark": spark}
    exec(code, names)
    (query,) = spark.streams.active
    query.processAllAvailable()
    query.stop()
    assert [bytes(row.key) for row in names["users"].collect()] == [b"ada"]
    assert [row._change_type for row in spark.read.parquet(str(tmp_path / "lake")).collect()] == ["upsert"]


@pytest.mark.usefixtures("spark")
def test_a_site_is_backed_up_restored_and_exported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with floodmark.open("data/oslo", site="oslo") as site:
        site.create_namespace("users").put(b"ada", b"countess")
    floodmark.open("data/rome", site="rome").close()
    backup, restore, export = commands(2)
    taken = run(*backup, "--json")
    assert taken.code == 0, taken.errors
    # The backup is younger than the moment on the page.
    restored = run(*(taken.json["version"] if word.startswith("2026-") else word for word in restore))
    exported = run(*export)
    assert (restored.code, exported.code) == (0, 0), restored.errors + exported.errors
    assert run("get", "data/rome", "users", "ada").text == "countess\n"
    assert DeltaTable("lake/users").to_pyarrow_table().num_rows == 1


@pytest.fixture
def machines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Machines]:
    """Oslo and Rome, each with a server."""
    monkeypatch.chdir(tmp_path)
    machines = Machines(tmp_path)
    for name in ("oslo", "rome"):
        run("init", tmp_path / "data" / name, "--site", name, "--id", str(IDS[name]))
        machines.serve(name)
    yield machines
    machines.end()


@pytest.mark.usefixtures("spark")
def test_sites_copy_each_other_and_agree(machines: Machines) -> None:
    Path("topology.toml").write_text(machines.place(blocks("toml")[0]), "utf-8")
    for words in commands(3):
        # Without an end it would go on until Ctrl-C.
        end = ["--once"] if words[0] == "replicate" else []
        outcome = run(*map(machines.place, words), *end)
        assert outcome.code == 0, outcome.errors
    assert outcome.lines[-1] == "the sites agree"
