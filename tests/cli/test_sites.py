"""init, status, gc, version and safe points."""

import platform
from importlib.metadata import version
from pathlib import Path

import pytest
from tests.cli.support import run

import floodmark


def test_init_makes_a_site_and_leaves_one_that_is_there(tmp_path: Path) -> None:
    directory = tmp_path / "data" / "oslo"
    assert run("init", directory, "--json").json == {
        "directory": str(directory),
        "site": "oslo",
        "site_id": 88,
        "created": True,
    }
    run("namespace", "create", directory, "users")
    assert run("init", directory, "--site", "oslo", "--json").json["created"] is False
    assert run("init", directory).text.startswith("already there: site oslo with id 88")
    assert len(run("namespace", "list", directory, "--json").lines) == 1


def test_init_takes_a_name_and_an_id(tmp_path: Path) -> None:
    made = run("init", tmp_path / "x", "--site", "bergen", "--id", "7")
    assert made.text.startswith("made site bergen with id 7 in ")
    assert run("init", tmp_path / "x", "--site", "oslo").code == 64
    assert run("init", tmp_path / "y", "--id", "256").code == 64


def test_init_refuses_a_directory_with_other_files(tmp_path: Path) -> None:
    (tmp_path / "letter.txt").touch()
    outcome = run("init", tmp_path)
    assert (outcome.code, sorted(path.name for path in tmp_path.iterdir())) == (69, ["letter.txt"])


def test_status_says_how_the_site_is(directory: Path) -> None:
    shown = dict(line.split(maxsplit=1) for line in run("status", directory).lines)
    assert shown["site"] == "oslo, id 88, format 5"
    assert shown["directory"] == str(directory)
    assert (shown["namespaces"], shown["partitions"]) == ("users", "1")


def test_status_as_json_has_all_statistics(directory: Path) -> None:
    status = run("status", directory, "--json").json
    with floodmark.open(directory, background=False) as site:
        fields = set(type(site.statistics()).__dataclass_fields__)
    assert set(status) == fields | {"directory", "safe_points", "lag_ms", "feeds", "nodes", "replication"}
    assert int(status["resolved_version"]) >= int(status["version"]) > 0
    assert status["namespaces"][0]["oldest_version"] == "0"
    (partition,) = status["partitions"]
    assert (partition["start"], partition["end"]) == (None, None)


def test_gc_says_what_it_removed(directory: Path) -> None:
    for value in ("one", "two", "three"):
        run("put", directory, "users", "ada", value)
    assert run("gc", directory, "--json").json["versions_removed"] == 0
    run("namespace", "update", directory, "users", "--retention", "0s")
    collected = run("gc", directory, "--json").json
    assert (collected["runs"], collected["versions_removed"]) == (1, 3)
    assert int(collected["log_trimmed_version"]) > 0
    removed = run("gc", directory).lines[1]
    assert removed.split() == ["removed", "0", "versions"]
    assert run("get", directory, "users", "ada").text == "three\n"


def test_a_safe_point_holds_garbage_collection_until_it_is_released(directory: Path) -> None:
    before = run("get", directory, "users", "ada", "--json").json["version"]
    held = run("safepoint", "hold", directory, "audit", "--at", before, "--namespace", "users", "--json").json
    assert (held["name"], held["version"], held["namespace"]) == ("audit", before, "users")
    run("put", directory, "users", "ada", "programmer")
    run("namespace", "update", directory, "users", "--retention", "0s")
    run("gc", directory)
    assert run("get", directory, "users", "ada", "--at", before).text == "countess\n"
    assert run("safepoint", "release", directory, "audit").text == "released audit\n"
    run("gc", directory)
    outcome = run("get", directory, "users", "ada", "--at", before)
    assert outcome.code == 2
    assert "is no longer kept; the oldest is" in outcome.errors


def test_safe_points_are_listed_with_their_end(directory: Path) -> None:
    assert run("safepoint", "list", directory, "--json").output == b""
    shown = run("safepoint", "hold", directory, "reader", "--lifetime", "2h")
    assert shown.text.startswith("reader keeps ")
    listed = run("safepoint", "list", directory, "--json").json
    assert listed["namespace"] is None
    assert listed["expires_at"] in shown.text
    header, row = run("safepoint", "list", directory).lines
    assert header.split()[:2] == ["name", "namespace"]
    assert row.split()[:2] == ["reader", "all"]
    assert "safe points  1" in run("status", directory).text
    assert run("safepoint", "release", directory, "reader", "--json").json["released"] is True
    assert run("safepoint", "release", directory, "reader").code == 1


@pytest.mark.parametrize(("lifetime", "code"), [("0s", 64), ("36500d", 0), ("999999999d", 64)])
def test_odd_lifetimes_do_no_harm(directory: Path, lifetime: str, code: int) -> None:
    assert run("safepoint", "hold", directory, "reader", "--lifetime", lifetime).code == code
    assert run("safepoint", "list", directory).code == 0


def test_version_names_all_that_a_report_needs() -> None:
    versions = {"floodmark": version("floodmark"), "format": 5, "python": platform.python_version()}
    assert run("version", "--json").json == versions
    assert run("version").text.startswith(f"floodmark {versions['floodmark']} (format 5, Python ")
    assert run("--version").text == f"floodmark {version('floodmark')}\n"
    assert run("--debug", "--version").text == run("--version").text
    assert run("version").text.startswith(run("--version").text.strip())
