"""Large values on the command line: from files and to files, by the same commands as other values."""

from pathlib import Path

import pytest
from tests.cli.support import run

import floodmark
from floodmark.layers import LargeValues

CONTENT = bytes(range(256)) * 6_000


@pytest.fixture
def configs(directory: Path) -> Path:
    """A site with a namespace of large values."""
    assert run("namespace", "create", directory, "configs", "--large-values").code == 0
    return directory


def test_a_file_is_put_and_comes_back(configs: Path, tmp_path: Path) -> None:
    (tmp_path / "dump.xml").write_bytes(CONTENT)
    put = run("put", configs, "configs", "switch-17", "--file", tmp_path / "dump.xml", "--json").json
    with floodmark.open(configs, background=False) as site:
        assert LargeValues(site, "configs").get(b"switch-17", at=int(put["version"])) == CONTENT
    got = run("get", configs, "configs", "switch-17", "--file", tmp_path / "back.xml", "--json").json
    assert (got["found"], got["bytes"]) == (True, len(CONTENT))
    assert (tmp_path / "back.xml").read_bytes() == CONTENT
    assert sorted(each.name for each in tmp_path.glob("*.xml*")) == ["back.xml", "dump.xml"]
    assert run("get", configs, "configs", "switch-17", "--raw").output == CONTENT
    assert run("scan", configs, "configs").text == "switch-17\t1,536,000 bytes\n"


def test_small_values_are_put_and_shown_as_ever(configs: Path) -> None:
    assert run("put", configs, "configs", "router", "up").code == 0
    assert run("put", configs, "configs", "firewall", "-", stdin=b"down").code == 0
    assert run("get", configs, "configs", "router").text == "up\n"
    assert run("get", configs, "configs", "firewall", "--json").json["value"] == "down"
    assert run("delete", configs, "configs", "router").code == 0
    missing = run("get", configs, "configs", "router")
    assert (missing.code, missing.text) == (1, "")


def test_what_was_replaced_is_swept_after_an_hour(configs: Path, tmp_path: Path) -> None:
    (tmp_path / "dump.xml").write_bytes(CONTENT)
    for _ in range(2):
        run("put", configs, "configs", "switch-17", "--file", tmp_path / "dump.xml")
    assert run("namespace", "sweep", configs, "configs").text == "values removed: 0\n"
    assert run("namespace", "sweep", configs, "users").code == 64


def test_a_file_for_a_plain_namespace_is_a_value(directory: Path, tmp_path: Path) -> None:
    (tmp_path / "ada.png").write_bytes(CONTENT[:1_000])
    assert run("put", directory, "users", "portrait", "--file", tmp_path / "ada.png").code == 0
    assert run("get", directory, "users", "portrait", "--file", tmp_path / "back.png").code == 0
    assert (tmp_path / "back.png").read_bytes() == CONTENT[:1_000]


def test_wrong_command_lines_say_what_to_do(configs: Path, tmp_path: Path) -> None:
    (tmp_path / "dump.xml").write_bytes(CONTENT)
    assert run("put", configs, "configs", "switch-17").code == 64
    assert run("put", configs, "configs", "switch-17", "x", "--file", tmp_path / "dump.xml").code == 64
    assert run("put", configs, "configs", "switch-17", "x", "--ttl", "1h").code == 64
    assert run("put", configs, "configs", "switch-17", "--file", tmp_path / "none.xml").code == 66
    assert run("put", configs, "users", "switch-17", "--file", tmp_path / "dump.xml").code == 64
    run("put", configs, "configs", "switch-17", "--file", tmp_path / "dump.xml")
    shown = run("get", configs, "configs", "switch-17")
    assert shown.code == 64
    assert "--file FILE" in shown.errors
