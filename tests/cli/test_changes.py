"""changes: in order, from where the reader is, and never with a silent gap."""

from datetime import timedelta
from pathlib import Path

from tests.cli.support import run

import floodmark


def test_changes_are_printed_in_commit_order(directory: Path) -> None:
    run("delete", directory, "users", "ada")
    rows = [line.split("\t") for line in run("changes", directory).lines]
    assert [row[2:] for row in rows] == [
        ["users", "upsert", "ada", "countess"],
        ["users", "upsert", "alan", "logician"],
        ["users", "upsert", "grace", "admiral"],
        ["users", "delete", "ada"],
    ]
    versions = [int(row[0]) for row in rows]
    assert versions == sorted(set(versions))


def test_changes_as_json_have_the_fields_of_a_change(directory: Path) -> None:
    version = run("delete", directory, "users", "ada", "--json").json["version"]
    change = run("changes", directory, "--json").json_lines[-1]
    partition, time = change.pop("partition"), change.pop("time")
    assert isinstance(partition, int)
    assert time.endswith("Z")
    assert change == {
        "namespace": "users",
        "key": "ada",
        "type": "delete",
        "value": None,
        "version": version,
        "origin_version": version,
        "origin_site_id": 88,
        "expires_at": None,
        "snapshot": False,
        "batch": None,
        "position": f"{version}/users/ada",
    }


def test_since_is_exclusive_and_until_inclusive(directory: Path) -> None:
    first, second, third = (row["version"] for row in run("changes", directory, "--json").json_lines)
    between = run("changes", directory, "--since", first, "--until", second, "--json").json_lines
    assert [row["version"] for row in between] == [second]
    assert run("changes", directory, "--since", third).output == b""


def test_a_position_in_the_middle_of_a_commit_is_a_place_to_go_on_from(directory: Path) -> None:
    with floodmark.open(directory) as site:
        orders, users = site.create_namespace("orders"), site.namespace("users")
        with site.transaction() as transaction:
            for number in range(5):
                transaction.put(users, b"u%d" % number, b"1")
                transaction.put(orders, b"o%d" % number, b"1")
    rows = run("changes", directory, "--json").json_lines
    assert len({row["version"] for row in rows[-10:]}) == 1
    for images in ([], ["--before-images"]):
        for count, row in enumerate(reversed(rows)):
            behind = run("changes", directory, "--since", row["position"], *images, "--json").json_lines
            assert [each["position"] for each in behind] == [
                each["position"] for each in rows[len(rows) - count :]
            ]


def test_a_position_that_is_none_is_refused(directory: Path) -> None:
    for wrong in ("7/users", "x/users/ada", "7" * 30 + "/users/ada"):
        assert run("changes", directory, "--since", wrong).code == 64
    gone = run("changes", directory, "--since", "7/nowhere/ada")
    assert "no namespace 'nowhere'" in gone.errors


def test_changes_of_one_namespace_and_prefix(directory: Path) -> None:
    run("namespace", "create", directory, "orders")
    run("put", directory, "orders", "a1", "paid")
    everything = run("changes", directory, "--json").json_lines
    assert [row["namespace"] for row in everything] == ["users", "users", "users", "orders"]
    users = run("changes", directory, "--namespace", "users", "--prefix", "a", "--json").json_lines
    assert [row["key"] for row in users] == ["ada", "alan"]


def test_following_ends_at_until(directory: Path) -> None:
    versions = [row["version"] for row in run("changes", directory, "--json").json_lines]
    followed = run("changes", directory, "--follow", "--until", versions[-1], "--json")
    assert (followed.code, [row["version"] for row in followed.json_lines]) == (0, versions)


def collect_all(directory: Path) -> int:
    """Collect everything but the newest versions; the oldest version that is kept."""
    with floodmark.open(directory, background=False) as site:
        site.update_namespace("users", retention=timedelta(0))
        site.collect_garbage()
        return site.statistics().namespaces[0].oldest_version


def test_without_a_beginning_it_says_where_the_kept_changes_begin(directory: Path) -> None:
    oldest = collect_all(directory)
    put = run("put", directory, "users", "edsger", "professor").text
    outcome = run("changes", directory, "--json")
    assert (outcome.code, outcome.json_lines[-1]["version"]) == (0, put.strip())
    assert f"the changes after {oldest} " in outcome.errors


def test_a_beginning_that_was_collected_is_an_error_never_a_gap(directory: Path) -> None:
    oldest = collect_all(directory)
    outcome = run("changes", directory, "--since", "1")
    assert (outcome.code, outcome.output) == (2, b"")
    assert outcome.errors.startswith("error: version ")
    assert f" is no longer kept; the oldest is {oldest} " in outcome.errors


def test_a_prefix_needs_a_namespace(directory: Path) -> None:
    outcome = run("changes", directory, "--prefix", "a")
    assert outcome.code == 64
    assert "needs a namespace" in outcome.errors


def test_beginning_and_now_are_places_to_begin(directory: Path) -> None:
    collect_all(directory)
    put = run("put", directory, "users", "edsger", "professor").text.strip()
    gone = run("changes", directory, "--since", "beginning")
    assert (gone.code, "--since snapshot" in gone.errors) == (2, True)
    kept = run("changes", directory, "--json")
    assert [row["version"] for row in kept.json_lines] == [put]
    assert run("changes", directory, "--since", "now").output == b""


def test_before_images_show_what_was_there(directory: Path) -> None:
    run("put", directory, "users", "ada", "programmer")
    run("delete", directory, "users", "ada")
    rows = run("changes", directory, "--namespace", "users", "--prefix", "ada", "--before-images").lines
    assert [row.split("\t")[3:] for row in rows] == [
        ["insert", "ada", "countess"],
        ["update_preimage", "ada", "countess"],
        ["update_postimage", "ada", "programmer"],
        ["delete", "ada", "programmer"],
    ]


def test_resolved_markers_are_checkpoints(directory: Path) -> None:
    rows = run("changes", directory, "--resolved", "--json").json_lines
    assert [row["key"] for row in rows if row["type"] == "upsert"] == ["ada", "alan", "grace"]
    versions = [int(row["version"]) for row in rows]
    assert versions == sorted(versions)
    marker = rows[-1]
    assert (marker["type"], set(marker)) == ("resolved", {"type", "version", "time", "place"})
    assert run("changes", directory, "--since", marker["version"]).output == b""
    last = run("changes", directory, "--resolved").lines[-1].split("\t")
    assert last[2:] == ["", "resolved"]


def test_a_snapshot_has_every_key_and_goes_on_from_each_place(directory: Path) -> None:
    collect_all(directory)
    options = ["--namespace", "users", "--since", "snapshot", "--resolved", "--json"]
    rows = run("changes", directory, *options).json_lines
    assert [(row["key"], row["snapshot"]) for row in rows if row["type"] == "upsert"] == [
        ("ada", True),
        ("alan", True),
        ("grace", True),
    ]
    within, *_, behind = [row["place"] for row in rows if row["type"] == "resolved"]
    assert "@0x" in within
    assert run("changes", directory, "--namespace", "users", "--since", within).output == b""
    start = within.partition("@")[0] + "@0x"
    again = run("changes", directory, "--namespace", "users", "--since", start, "--json").json_lines
    assert [row["key"] for row in again] == ["ada", "alan", "grace"]
    assert run("changes", directory, "--since", behind).output == b""


def test_changes_of_a_key_range(directory: Path) -> None:
    options = ["--namespace", "users", "--start-key", "alan", "--end-key", "grace", "--json"]
    assert [row["key"] for row in run("changes", directory, *options).json_lines] == ["alan"]
    assert run("changes", directory, "--start-key", "a").code == 64
