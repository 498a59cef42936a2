"""A data set that is published at the sites of a topology, by the command and over the wire."""

from pathlib import Path
from typing import Any

import pytest
from tests.cli.support import Outcome, run
from tests.links.support import Served, ServeSite, describe, share
from tests.waiting import HANG_SECONDS, wait_until

from floodmark.cli.failures import DONE, UNREACHABLE
from floodmark.divergence.comparing import compare_keys
from floodmark.host.catalog import GenerationRow
from floodmark.host.publishing import LocalGenerations
from floodmark.model.errors import InvalidConfiguration, PartitionStopped, PartlyDone


@pytest.fixture
def topology(tmp_path: Path, served: dict[str, Served]) -> Path:
    file = tmp_path / "topology.toml"
    file.write_text(
        describe(
            {name: each.url for name, each in served.items()},
            {name: each.site.id for name, each in served.items()},
        )
    )
    return file


@pytest.fixture
def served(serve_site: ServeSite) -> dict[str, Served]:
    return share(serve_site)[0]


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    file = tmp_path / "users.csv"
    file.write_text("key,value\nada,countess\ngrace,admiral\n")
    return file


ROWS = {b"ada": b"countess", b"grace": b"admiral"}


def status_of(served: Served) -> Any:
    return run("status", served.url, "--json").json["replication"]


def users_of(served: Served) -> dict[bytes, bytes]:
    return dict(served.site.namespace("users").scan())


def test_a_file_is_published_at_all_sites_and_changes_made_since_stay(
    served: dict[str, Served], topology: Path, rows: Path
) -> None:
    oslo, rome, bonn = served.values()
    base = rome.site.namespace("users").put(b"alan", b"old")
    # A read moves the clock past its version.
    bonn.site.namespace("users").get(b"grace", at=base)
    bonn.site.namespace("users").put(b"grace", b"rear admiral")
    published = run(
        *("publish", rows, oslo.url, "users", "--base", str(base)),
        *("--topology", topology, "--json"),
    ).json
    assert set(published["others"]) == {"rome", "bonn"}
    assert all(isinstance(version, str) for version in published["others"].values())
    assert users_of(oslo) == users_of(rome) == ROWS
    assert users_of(bonn) == ROWS | {b"grace": b"rear admiral"}
    done = run("replicate", "--topology", topology, "--once", "--runner", "process")
    assert done.code == DONE, done.errors
    for each in served.values():
        assert users_of(each) == ROWS | {b"grace": b"rear admiral"}
    hosts = [each.site.host for each in served.values()]
    assert not [*compare_keys(hosts, "users", [*ROWS, b"alan"])]


def test_a_site_that_was_away_gets_the_data_set_by_its_links(
    served: dict[str, Served], topology: Path, rows: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A run looks for data sets once, when it begins.
    monkeypatch.setattr("floodmark.links.planning.HOLD_MS", HANG_SECONDS * 1_000)
    oslo, rome, bonn = served.values()
    bonn.site.namespace("users").put(b"alan", b"written while it was away")
    some = run("publish", rows, oslo.url, "users", "--topology", topology, "--without", "bonn", "--json")
    assert set(some.json["others"]) == {"rome"}
    assert b"alan" in users_of(bonn)
    replicate = ("replicate", "--topology", topology, "--once", "--runner", "process")
    first = run(*replicate)
    waits = "it waits until its changes up to"
    assert (first.code, waits in first.text) == (UNREACHABLE, True), first.errors
    (link,) = [
        each for each in status_of(bonn)["links"] if (each["source"], each["namespace"]) == ("oslo", "users")
    ]
    assert waits in link["stalled"]
    shown = " ".join(run("status", bonn.url).text.split())
    assert f"oslo to bonn, users: {waits}" in shown
    assert "are there before it brings the data set of" in shown
    wait_until(lambda: run(*replicate).code == DONE, "the data set does not come")
    assert users_of(oslo) == users_of(rome) == users_of(bonn) == ROWS
    assert not [each for each in status_of(bonn)["links"] if each["stalled"]]


def test_all_sites_go_back_by_a_command_that_names_them(
    served: dict[str, Served], topology: Path, rows: Path
) -> None:
    oslo, rome, bonn = served.values()
    oslo.site.namespace("users").put(b"alan", b"1")
    replicate = ("replicate", "--topology", topology, "--once", "--runner", "process")
    run(*replicate)
    assert run("publish", rows, oslo.url, "users", "--topology", topology).code == DONE
    bonn.site.namespace("users").put(b"joan", b"2")
    refused = run("generation", "rollback", oslo.url, "users")
    assert "roll back at all sites (`--topology`" in refused.errors
    back = ("generation", "rollback", oslo.url, "users", "--topology", topology)
    late = run(*back, "--wait", "10ms")
    assert "up to 1970" not in late.errors
    assert "cannot go back yet" in late.errors

    def roll_back(*options: str) -> Outcome:
        """Run the command until the links, each of which ran at another moment, have brought enough."""
        run(*replicate)
        for _ in range(10):
            run(*replicate)
            done = run(*back, "--wait", "10ms", "--json", *options)
            if "cannot go back yet" not in done.errors:
                break
        return done

    done = roll_back()
    assert (done.code, done.json["number"]) == (DONE, 3), done.errors
    assert users_of(oslo) == users_of(rome) == users_of(bonn) == {b"alan": b"1", b"joan": b"2"}
    for _ in range(2):
        run(*replicate)
    some = roll_back("--without", "bonn")
    assert some.code == DONE, some.errors
    assert users_of(oslo) == users_of(rome) == {**ROWS, b"joan": b"2"}
    for _ in range(2):
        run(*replicate)
    assert users_of(bonn) == users_of(oslo)


def test_not_all_sites_or_a_stranger_is_refused(served: dict[str, Served], serve_site: ServeSite) -> None:
    oslo, rome, _ = served.values()
    with pytest.raises(InvalidConfiguration, match="shared with bonn; publish at all"):
        oslo.site.generations.publish("users", ROWS, others=[rome.site])
    stranger = serve_site("bari")
    stranger.site.create_namespace("apart")
    oslo.site.create_namespace("apart")
    with pytest.raises(InvalidConfiguration, match="'bari' does not share"):
        oslo.site.generations.publish("apart", ROWS, others=[stranger.site])
    with pytest.raises(InvalidConfiguration, match="shared with bonn, rome; roll back at all"):
        oslo.site.generations.rollback("users")
    with pytest.raises(InvalidConfiguration, match="is shared with other sites"):
        oslo.site.host.generations.rollback_generation("users", None, "an earlier release", 1)


def test_a_site_that_fails_after_others_have_swapped_gets_the_data_set_by_its_links(
    served: dict[str, Served], topology: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    oslo, rome, bonn = served.values()
    swap, swapped = LocalGenerations.swap_generation, []

    def fail_once(self: LocalGenerations, *arguments: Any, **named: Any) -> GenerationRow:
        swapped.append(self)
        if len(swapped) == 2:
            raise PartitionStopped("the disk is full")
        return swap(self, *arguments, **named)

    monkeypatch.setattr(LocalGenerations, "swap_generation", fail_once)
    with pytest.raises(PartlyDone, match="was published at oslo, and not at 'rome'"):
        oslo.site.generations.publish("users", ROWS, others=[rome.site, bonn.site])
    assert users_of(oslo) == ROWS
    assert users_of(rome) == users_of(bonn) == {}
    assert [each.state.value for each in rome.site.generations.list("users")] == ["current"]
    for _ in range(2):
        run("replicate", "--topology", topology, "--once", "--runner", "process")
    assert users_of(rome) == users_of(bonn) == ROWS
