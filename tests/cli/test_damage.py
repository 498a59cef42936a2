"""Getting past a record that is damaged all the same, and saying which it was."""

from pathlib import Path

import pytest
from tests.cli.support import run

import floodmark
from floodmark.codec.ordered import encode_namespace
from floodmark.model.version import Version
from floodmark.partition.commit.entering import Entrance
from floodmark.site import Site


@pytest.fixture
def damaged(directory: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The version of a record that a release has stored which checked less; others are around it."""
    with monkeypatch.context() as patched, floodmark.open(directory) as site:
        patched.setattr(Entrance, "check", lambda *_: None)
        version = plant(site, b"bad")
        site.namespace("users").put(b"zoe", b"last")
    return str(version)


def plant(site: Site, key: bytes) -> Version:
    qualified = encode_namespace(site.namespace("users").id) + key
    return site.host.router.put_one(qualified, b"xx\x40", durable=True)


KEYS = ["ada", "alan", "grace", "zoe"]


def test_changes_stop_at_it_unless_told_otherwise(directory: Path, damaged: str) -> None:
    for options in ((), ("--on-corrupt", "fail")):
        stopped = run("changes", directory, *options)
        assert stopped.code != 0
        assert damaged in stopped.errors
        assert "--on-corrupt" in stopped.errors


@pytest.mark.parametrize(("choice", "code"), [("report", 1), ("skip", 0)])
@pytest.mark.parametrize("more", [(), ("--before-images",), ("--resolved",)])
def test_changes_get_past_it_and_name_it(
    directory: Path, damaged: str, choice: str, code: int, more: tuple[str, ...]
) -> None:
    told = run("changes", directory, "--on-corrupt", choice, *more)
    assert told.code == code
    rows = [line.split("\t") for line in told.lines]
    assert [row[4] for row in rows if row[2:3] == ["users"]] == KEYS
    assert f"left out bad at {damaged}" in told.errors
    told_json = run("changes", directory, "--on-corrupt", choice, "--json").json_lines
    assert [row["key"] for row in told_json if row["type"] != "damaged"] == KEYS
    ((key, version),) = [(row["key"], row["version"]) for row in told_json if row["type"] == "damaged"]
    assert (key, version) == ("bad", damaged)


def test_a_feed_stops_at_it_and_is_let_past_it(directory: Path, damaged: str) -> None:
    run("feed", "create", directory, "copy", "users", "--sink", "blackhole:", "--since", "0")
    assert run("feed", "run", directory, "copy", "--once").code != 0
    assert run("feed", "run", directory, "copy", "--once", "--on-corrupt", "skip").code == 0
    shown = run("feed", "show", directory, "copy", "--json").json
    assert shown["skipped_count"] == 1
    assert [(each["key"], each["version"]) for each in shown["skipped"]] == [("bad", damaged)]
    assert f"bad at {damaged}" in run("feed", "show", directory, "copy").text


def test_a_feed_that_reports_ends_with_a_finding_and_keeps_the_list(directory: Path, damaged: str) -> None:
    create = ("feed", "create", directory, "copy", "users", "--sink", "blackhole:", "--since", "0")
    run(*create, "--on-corrupt", "report")
    told = run("feed", "run", directory, "copy", "--once")
    assert told.code == 1
    assert f"left out bad at {damaged}" in told.errors
    with floodmark.open(directory) as site:
        feed = site.feeds.show("copy")
        assert [change.key for change in feed.skipped] == [b"bad"]
        assert feed.checkpoint > int(damaged)
    # The same again, from the beginning: it is still one change.
    run("feed", "pause", directory, "copy")
    run("feed", "update", directory, "copy", "--on-corrupt", "fail")
    assert run("feed", "show", directory, "copy", "--json").json["on_corrupt"] == "fail"
