"""partition list, split, merge and heat."""

from pathlib import Path

from tests.cli.support import Server, on_terminal, run
from tests.server.support import serving

import floodmark


def ids(directory: Path) -> list[int]:
    return [row["id"] for row in run("partition", "list", directory, "--json").json_lines]


def test_a_split_cuts_before_the_key_and_a_merge_joins_again(directory: Path) -> None:
    split = run("partition", "split", directory, "users", "b", "--json").json
    assert ids(directory) == [split["left"], split["right"]]
    left, right = run("partition", "list", directory, "--json").json_lines
    assert (left["start"], right["end"]) == (None, None)
    assert left["end"] == right["start"] == {"namespace": "users", "key": "b"}
    merged = run("partition", "merge", directory, str(split["left"]), str(split["right"]), "--json").json
    assert ids(directory) == [merged["partition"]]
    assert len(run("scan", directory, "users").lines) == 3


def test_partitions_are_listed_with_keys_that_can_be_typed(directory: Path) -> None:
    outcome = run("partition", "split", directory, "users", "0xff00")
    assert "now ends before 0xff00" in outcome.text
    header, left, right = run("partition", "list", directory).lines
    assert header.split() == ["id", "from", "to"]
    assert left.endswith("  the first key  users 0xff00")
    assert right.endswith("  users 0xff00   the last key")
    first, second = ids(directory)
    joined = run("partition", "merge", directory, str(first), str(second))
    assert joined.text.startswith(f"{first} and {second} are now ")


def test_a_bound_in_a_dropped_namespace_is_shown_by_its_id(directory: Path) -> None:
    run("partition", "split", directory, "users", "b")
    run("namespace", "drop", directory, "users", "--yes")
    assert "#1 b" in run("partition", "list", directory).text


def test_heat_counts_the_writes_of_other_processes_by_the_partitions_of_now(directory: Path) -> None:
    run("partition", "split", directory, "users", "b")
    run("put", directory, "users", "alan", "pioneer")
    left, right = run("partition", "heat", directory, "--json").json_lines
    assert (left["writes"], right["writes"]) == (3, 1)
    assert (sum(left["writes_by_interval"]), sum(right["writes_by_interval"])) == (3, 1)
    assert left["from"] < left["to"]
    header, busy, quiet = run("partition", "heat", directory, "--last", "1h").lines
    assert header.split() == ["id", "from", "to", "writes", "bytes", "share", "over", "time"]
    assert busy.count("█") > quiet.count("█") > 0


def test_heat_of_a_server_counts_reads_as_well(tmp_path: Path) -> None:
    with serving() as (site, server):
        users = site.create_namespace("users")
        site.split("users", b"m")
        users.put(b"ada", b"countess")
        for _ in range(3):
            users.get(b"zoe")
        left, right = run("partition", "heat", server.url, "--json").json_lines
        assert (left["writes"], left["reads"], right["writes"], right["reads"]) == (1, 0, 0, 3)
        assert left["bytes"] > right["bytes"] == 0
        assert sum(right["reads_by_interval"]) == 3
        shown = run("partition", "heat", server.url, "--html", tmp_path / "heat.html")
        assert shown.lines[0].split()[3:6] == ["writes", "reads", "bytes"]
    page = (tmp_path / "heat.html").read_text("utf-8")
    assert page.count('class="strip"') == 2
    assert "users m" in page
    assert "http" not in page


def test_heat_can_be_watched(server: Server) -> None:
    shown = on_terminal(
        *("partition", "heat", server.url, "--watch"), until=lambda text: text.count("over time") >= 2
    )
    assert shown.count("over time") >= 2


def test_heat_of_an_idle_site_has_no_bars(tmp_path: Path) -> None:
    run("init", tmp_path / "oslo")
    assert "█" not in run("partition", "heat", tmp_path / "oslo").text


def test_heat_is_drawn_in_ascii_where_nothing_else_can_be_shown(directory: Path) -> None:
    outcome = run("partition", "heat", directory, encoding="ascii")
    assert (outcome.code, outcome.output.isascii()) == (0, True)
    assert "@@@@" in outcome.text


def test_heat_starts_where_the_kept_changes_begin(directory: Path) -> None:
    run("namespace", "update", directory, "users", "--retention", "0s")
    run("gc", directory)
    with floodmark.open(directory, background=False) as site:
        site.namespace("users").put(b"ada", b"programmer")
    assert 1 <= run("partition", "heat", directory, "--json").json["writes"] <= 4


def test_what_cannot_be_split_or_merged_is_a_finding(directory: Path) -> None:
    left, right = run("partition", "split", directory, "users", "b", "--json").json.values()
    for arguments in (
        ["users", "b"],
        [str(right), str(left)],
        ["1", "2"],
    ):
        command = "split" if arguments[0] == "users" else "merge"
        outcome = run("partition", command, directory, *arguments)
        assert outcome.code == 1
        assert "try: floodmark partition list" in outcome.errors
    assert run("partition", "merge", directory, "left", "right").code == 64
