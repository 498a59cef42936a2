"""The commands publish and generation."""

from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
from tests.cli.support import run


@pytest.fixture
def site(tmp_path: Path) -> Path:
    path = tmp_path / "oslo"
    assert run("init", path, "--site", "oslo").code == 0
    assert run("namespace", "create", path, "prices").code == 0
    assert run("put", path, "prices", "kiwi", "1").code == 0
    return path


def test_a_file_replaces_a_namespace_and_a_rollback_brings_it_back(site: Path, tmp_path: Path) -> None:
    file = tmp_path / "prices.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"sku": ["apple", "pear"], "price": [2, 3]}), file)
    published = run("publish", file, site, "prices", "--key", "sku", "--json").json
    assert (published["generation"], published["rows"], published["refused"]) == (2, 2, 0)
    assert run("scan", site, "prices").lines == ['apple\t{"price":2}', 'pear\t{"price":3}']
    assert run("get", site, "prices", "kiwi", "--at", str(int(published["version"]) - 1)).lines == ["1"]
    assert run("generation", "rollback", site, "prices").code == 0
    assert run("scan", site, "prices").lines == ["kiwi\t1"]
    listed = run("generation", "list", site, "prices", "--json").json_lines
    assert [row["state"] for row in listed] == ["kept", "kept", "current"]
    # All versions are strings, as in other reports.
    assert [listed[1][name] for name in ("base", "since")] == [published["base"], published["version"]]
    assert isinstance(published["base"], str)


def test_refused_rows_go_to_a_file_up_to_a_limit(site: Path, tmp_path: Path) -> None:
    file, refused = tmp_path / "prices.jsonl", tmp_path / "refused.csv"
    file.write_text(
        '{"key": "apple", "value": "2"}\n{"key": null, "value": "3"}\n{"key": "", "value": "4"}\n'
    )
    assert run("publish", file, site, "prices").code != 0
    assert run("scan", site, "prices").lines == ["kiwi\t1"]
    few = run("publish", file, site, "prices", "--refused", refused, "--refused-max", "1")
    assert "more than 1 rows are refused" in few.errors
    dry = run("publish", file, site, "prices", "--dry-run", "--refused", refused, "--json").json
    assert dry == {"rows": 1, "refused": 2}
    assert run("scan", site, "prices").lines == ["kiwi\t1"]
    assert run("publish", file, site, "prices", "--refused", refused, "--json").json["refused"] == 2
    assert run("scan", site, "prices").lines == ["apple\t2"]
    assert [line.split(",")[0] for line in refused.read_text().splitlines()] == ["key", "None", ""]


def test_a_file_without_the_column_of_keys_is_refused(site: Path, tmp_path: Path) -> None:
    file = tmp_path / "prices.csv"
    file.write_text("name,value\napple,2\n")
    assert "Name the column of keys with --key" in run("publish", file, site, "prices").errors
    assert "not there" in run("publish", tmp_path / "none.csv", site, "prices").errors


@pytest.mark.parametrize("name", ["prices.parquet", "prices.csv", "prices.json"])
def test_a_damaged_file_is_refused_and_changes_nothing(site: Path, tmp_path: Path, name: str) -> None:
    file = tmp_path / name
    # The columns of the CSV are damaged behind what is read at first.
    rows = "".join(f"key-{number},{number}\n" for number in range(200_000))
    file.write_text(f"key,value\n{rows}1,2,3\n" if name.endswith("csv") else '{"key": ')
    refused = run("publish", file, site, "prices")
    assert refused.code == 64
    assert f"{name} cannot be read as" in refused.errors
    assert run("scan", site, "prices").lines == ["kiwi\t1"]
    assert len(run("generation", "list", site, "prices", "--json").json_lines) == 1


def test_changes_go_on_over_a_swap_from_any_position(site: Path, tmp_path: Path) -> None:
    file = tmp_path / "prices.csv"
    file.write_text("key,value\napple,2\npear,3\n")
    assert run("publish", file, site, "prices").code == 0
    ended = run("changes", site)
    assert ended.code == 2
    assert "--on-generation" in ended.errors
    lines = run("changes", site, "--on-generation", "difference", "--resolved").lines
    kinds = ["upsert", "resolved", "generation", "resolved", "upsert", "delete", "upsert"]
    assert [line.split("\t")[3] for line in lines][: len(kinds)] == kinds
    changes = run("changes", site, "--on-generation", "difference", "--json").json_lines
    assert [each["key"] for each in changes] == ["kiwi", "", "apple", "kiwi", "pear"]
    position = changes[2]["position"]
    rest = run("changes", site, "--since", position, "--on-generation", "difference", "--json").json_lines
    assert rest == changes[3:]
    place = next(line for line in lines if "@" in line).split("\t")[0]
    rest = run("changes", site, "--since", place, "--json").json_lines
    assert rest == changes[2:]


def test_a_key_in_several_rows_fails_also_in_a_dry_run_unless_the_last_counts(
    site: Path, tmp_path: Path
) -> None:
    file = tmp_path / "prices.csv"
    file.write_text("key,value\nplum,x\napple,y\nplum,z\n")
    for options in ([], ["--dry-run"]):
        assert "stands in several rows" in run("publish", file, site, "prices", *options).errors
    assert "fail and last" in run("publish", file, site, "prices", "--duplicates", "first").errors
    assert run("scan", site, "prices").lines == ["kiwi\t1"]
    assert run("publish", file, site, "prices", "--duplicates", "last", "--json").json["rows"] == 2
    assert run("scan", site, "prices").lines == ["apple\ty", "plum\tz"]


def test_a_counter_takes_no_data_set(site: Path, tmp_path: Path) -> None:
    file = tmp_path / "counts.csv"
    file.write_text("key,value\napple,1\n")
    assert run("namespace", "create", site, "counts", "--merge", "counter").code == 0
    for options in ([], ["--dry-run"]):
        assert "merges by 'counter'" in run("publish", file, site, "counts", *options).errors
