"""topology show and set, namespace rewrite, and what status says about links."""

from pathlib import Path

import pytest
from tests.cli.support import Server, run, serving
from tests.replication.support_links import Mesh

import floodmark
from floodmark.cli.commands.status import draw, look_at
from floodmark.cli.render.text import BARS
from floodmark.replication.topology import parse_topology

TEXT = """epoch = 1

[sites.oslo]
id = {oslo}

[sites.rome]
id = 2
url = "grpc://rome:7100"

[namespaces.users]

[namespaces.orders]
sites = ["oslo", "rome"]
"""


def topology_file(directory: Path, text: str = TEXT) -> Path:
    """A topology of the site in a directory and another one."""
    with floodmark.open(directory, background=False) as site:
        file = directory.with_name("topology.toml")
        file.write_text(text.format(oslo=site.id), "utf-8")
        return file


@pytest.fixture
def empty(tmp_path: Path) -> Path:
    run("init", tmp_path / "oslo", "--site", "oslo")
    return tmp_path / "oslo"


def test_what_is_set_is_shown_and_can_be_set_again(empty: Path) -> None:
    file = topology_file(empty)
    done = run("topology", "set", empty, file)
    assert (done.code, done.text) == (0, "oslo follows topology 1 and shares: orders, users\n")
    shown = run("topology", "show", empty)
    assert parse_topology(shown.output) == parse_topology(file.read_bytes())
    file.write_bytes(shown.output)
    assert run("topology", "set", empty, file, "--json").json == {
        "site": "oslo",
        "epoch": 1,
        "namespaces": ["orders", "users"],
    }
    assert run("topology", "show", empty, "--json").json["sites"]["rome"]["url"] == "grpc://rome:7100"
    assert [each["name"] for each in run("namespace", "list", empty, "--json").json_lines] == [
        "orders",
        "users",
    ]


def test_topology_is_set_at_a_server_too(tmp_path: Path) -> None:
    run("init", tmp_path / "oslo", "--site", "oslo")
    file = topology_file(tmp_path / "oslo")
    with serving(tmp_path / "oslo") as server:
        assert run("topology", "set", server.url, file).code == 0
        assert run("topology", "show", server.url, "--json").json["epoch"] == 1


def test_site_without_a_topology_says_so(server: Server) -> None:
    outcome = run("topology", "show", server.url)
    assert (outcome.code, outcome.output) == (1, b"")
    assert "shares nothing" in outcome.errors


def test_wrong_file_is_told_and_changes_nothing(empty: Path) -> None:
    file = topology_file(empty, TEXT.replace("id = 2", "id = {oslo}"))
    outcome = run("topology", "set", empty, file)
    assert outcome.code == 64
    assert f"{file} cannot be used: sites 'oslo' and 'rome' both have id" in " ".join(outcome.errors.split())
    assert run("topology", "set", empty, file.with_name("missing.toml")).code == 66
    assert run("topology", "show", empty).code == 1


def test_comments_of_a_topology_survive_the_removal_of_a_site(empty: Path) -> None:
    text = "# Our sites\n" + TEXT.replace("id = 2", "id = 2  # in the cellar").replace(
        "[sites.rome]", 'url = "{url}"  # home\n\n# Goes in spring\n[sites.rome]'
    )
    with serving(empty) as server:
        with floodmark.connect(server.url) as site:
            text = text.format(oslo=site.id, url=server.url)
        file = empty.with_name("topology.toml")
        file.write_text(text, "utf-8")
        assert run("topology", "set", server.url, file).code == 0
        removed = run("topology", "remove", "rome", "--topology", file)
        assert (removed.code, removed.errors) == (0, "")
    changed = file.read_text("utf-8")
    assert parse_topology(changed).sites["rome"].state == "removed"
    expected = text.replace("epoch = 1", "epoch = 3").splitlines()
    assert [line for line in expected if line not in changed.splitlines()] == []
    assert len(changed.splitlines()) == len(expected) + 2


def test_namespace_with_data_is_shared_after_it_was_rewritten(directory: Path) -> None:
    file = topology_file(directory)
    refusal = run("topology", "set", directory, file)
    assert refusal.code == 64
    assert "floodmark namespace rewrite LOCATION users" in " ".join(refusal.errors.split())
    rewritten = run("namespace", "rewrite", directory, "users")
    assert rewritten.code == 0
    assert "rewritten   3 records" in rewritten.text
    assert run("topology", "set", directory, file).code == 0
    again = run("namespace", "rewrite", directory, "orders", "--json")
    assert again.code == 69, "rome has not sent anything yet"
    assert "let replication run" in " ".join(again.errors.split())
    assert run("get", directory, "users", "ada").text == "countess\n"


def test_rewriting_tells_programs_what_it_did(directory: Path) -> None:
    told = run("namespace", "rewrite", directory, "users", "--json").json
    assert (told["namespace"], told["records_read"], told["records_written"]) == ("users", 3, 3)
    assert isinstance(told["since"], str)


# status


def test_links_and_alarms_are_shown(empty: Path) -> None:
    run("topology", "set", empty, topology_file(empty))
    shown = dict(line.split("  ", 1) for line in run("status", empty).lines)
    assert shown["from rome"].strip().startswith("2 namespaces, no heartbeat yet, ")
    replication = run("status", empty, "--json").json["replication"]
    assert (replication["epoch"], replication["alarms"]) == (1, [])
    assert [link["namespace"] for link in replication["links"]] == ["orders", "users"]
    assert replication["links"][0]["through"] == "0"


def test_terminal_shows_links_in_trouble_first() -> None:
    mesh = Mesh("oslo", "rome", "bonn")
    mesh.put("rome", b"ada")
    mesh.exchange()
    mesh.time.advance(11_000)
    mesh.beat("rome")
    mesh.step("rome", "oslo")
    look = look_at(mesh["oslo"])
    lines = draw("data/oslo", look, look, BARS)
    shown = ["".join(part if isinstance(part, str) else part[0] for part in line) for line in lines]
    (header,) = [number for number, line in enumerate(shown) if line.startswith("source")]
    assert shown[header + 1].split() == ["bonn", "users", "12.0", "s", "-", "-", "12.0", "s", "overdue"]
    assert shown[header + 2].split()[:2] == ["rome", "users"]
    assert shown[header + 2].split()[-1] == "no"
    (alarm,) = [line for line in shown if line.startswith("alarm")]
    assert "bonn to oslo, users: no heartbeat for 12 s" in alarm
    (rome,) = [line for line in shown if line.startswith("from rome")]
    assert "users, heartbeat 0 ms ago, lag p50 1.0 s, lag p99 1.0 s, 0 ms behind" in rome
