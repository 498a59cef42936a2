"""subscription list, show, seek and remove."""

from pathlib import Path

import pytest
from tests.cli.support import Server, run

import floodmark
from floodmark.feed.subscription.subscriptions import SubscriptionSpec
from floodmark.model import KeyRange
from floodmark.site.connecting import connect

NAME = "indexer"
ALL_KEYS = KeyRange()


def subscribe(site: floodmark.Site, keys: KeyRange = ALL_KEYS) -> None:
    """Open a subscription and go away again, without having acknowledged anything."""
    spec = SubscriptionSpec(name=NAME, namespace="users", keys=keys)
    opened = site.host.subscriptions.open(spec, 0, "a-test", 60)
    site.host.subscriptions.release(NAME, opened.epoch)


@pytest.fixture
def subscribed(directory: Path) -> Path:
    with floodmark.open(directory, background=False) as site:
        subscribe(site)
    return directory


def test_list_has_a_line_a_subscription(subscribed: Path) -> None:
    header, row = (line.split() for line in run("subscription", "list", subscribed).lines)
    assert header[:2] == ["name", "namespace"]
    assert (row[:2], row[3], row[-1]) == ([NAME, "users"], "3", "none")
    listed = run("subscription", "list", subscribed, "--json").json
    assert (listed["name"], listed["backlog"], listed["backlog_is_exact"]) == (NAME, 3, True)


def test_a_site_without_subscriptions_has_an_empty_list(directory: Path) -> None:
    assert run("subscription", "list", directory, "--json").output == b""
    assert run("subscription", "list", directory).text.startswith("name  namespace")


def test_show_tells_how_far_it_is(directory: Path) -> None:
    with floodmark.open(directory, background=False) as site:
        subscribe(site, KeyRange(b"a", b"b"))
    shown = dict(line.split("  ", maxsplit=1) for line in run("subscription", "show", directory, NAME).lines)
    fields = {name: value.strip() for name, value in shown.items()}
    assert (fields["keys"], fields["backlog"], fields["consumer"]) == ("from a to before b", "2", "none")
    told = run("subscription", "show", directory, NAME, "--json").json
    assert (told["start_key"], told["end_key"], told["unacked"]) == ("a", "b", 0)
    assert isinstance(told["through"], str)


def test_seek_moves_it_to_a_version_and_to_both_ends(subscribed: Path) -> None:
    def backlog(place: str) -> int:
        left: int = run("subscription", "seek", subscribed, NAME, place, "--json").json["backlog"]
        return left

    second = run("changes", subscribed, "--json").json_lines[1]["version"]
    assert backlog(second) == 1
    assert backlog("now") == 0
    assert backlog("beginning") == 3


def test_remove_forgets_it(subscribed: Path) -> None:
    assert run("subscription", "remove", subscribed, NAME).text == f"removed {NAME}\n"
    for command in (["show", NAME], ["remove", NAME], ["seek", NAME, "now"]):
        outcome = run("subscription", command[0], subscribed, *command[1:])
        assert outcome.code == 1
        assert "try: floodmark subscription list SITE" in outcome.errors


def test_one_that_is_consumed_is_left_alone(directory: Path) -> None:
    with floodmark.open(directory, background=False) as site:
        site.host.subscriptions.open(SubscriptionSpec(name=NAME, namespace="users"), 0, "a-test", 600)
    for command in (["remove", NAME], ["seek", NAME, "now"]):
        outcome = run("subscription", command[0], directory, *command[1:])
        assert outcome.code == 69
        assert "a-test" in outcome.errors
    assert run("subscription", "show", directory, NAME, "--json").json["holder"] == "a-test"


def test_subscriptions_of_a_server(server: Server) -> None:
    with connect(server.url) as site:
        subscribe(site)
    assert run("subscription", "list", server.url, "--json").json["backlog"] == 3
    assert run("subscription", "seek", server.url, NAME, "now", "--json").json["backlog"] == 0
    assert run("subscription", "remove", server.url, NAME).code == 0
