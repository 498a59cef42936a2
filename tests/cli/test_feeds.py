"""feed create, list, show, pause, resume, update, remove, rebalance, statistics and run."""

import json
import signal
from pathlib import Path

import pytest
from tests.cli.support import (
    PROCESS_SECONDS_MAX,
    Server,
    get_page,
    on_terminal,
    read_pages_url,
    run,
    run_process,
    running,
)
from tests.feed.support_losing import lose_changes
from tests.sizes import only

import floodmark
from floodmark.cli.commands.feeds import describe
from floodmark.feed.named.feeds import FeedState
from floodmark.feed.named.runner import RunnerStatistics
from floodmark.host.embedded import EmbeddedHost


@pytest.fixture
def lake(directory: Path) -> Path:
    """A site with a feed to nowhere."""
    options = ("--sink", "blackhole:", "--since", "beginning")
    assert run("feed", "create", directory, "lake", "users", *options).code == 0
    return directory


def state(directory: Path, name: str = "lake") -> str:
    shown: str = run("feed", "show", directory, name, "--json").json["state"]
    return shown


def test_create_shows_what_it_will_do(directory: Path) -> None:
    options = ["--sink", "blackhole:", "--prefix", "a", "--description", "for the lake", "--ranges", "3"]
    more = ["--concurrency", "4", "--batch-records", "10", "--backoff-ms", "5", "--rate-bytes-max", "1000"]
    more += ["--linger-ms", "20"]
    outcome = run("feed", "create", directory, "lake", "users", *options, *more)
    assert (outcome.code, outcome.errors) == (0, "")
    shown = dict(line.split(maxsplit=1) for line in outcome.lines)
    assert (shown["state"], shown["namespace"], shown["until"]) == ("normal", "users", "for ever")
    assert shown["keys"] == "from a to before b"
    assert shown["sink"] == "blackhole:, 4 at a time, 10 a batch, at most 1,000 bytes/s"
    assert shown["description"] == "for the lake"
    fields = run("feed", "show", directory, "lake", "--json").json
    assert (fields["prefix"], fields["ranges_max"], fields["concurrency"]) == ("a", 3, 4)
    assert (fields["batch_records"], fields["backoff_ms"], fields["rate_bytes_max"]) == (10, 5, 1_000)
    assert fields["linger_ms"] == 20
    assert (fields["name"], fields["error"], fields["until"], fields["holder"]) == ("lake", None, None, None)
    assert isinstance(fields["checkpoint"], str)


def test_a_feed_begins_where_it_is_told_to(directory: Path) -> None:
    first, second, third = (row["version"] for row in run("changes", directory, "--json").json_lines)

    def checkpoint(name: str, *options: str) -> int:
        created = run("feed", "create", directory, name, "users", "--sink", "blackhole:", *options, "--json")
        return int(created.json["checkpoint"])

    assert checkpoint("a") >= int(third)
    assert "at its snapshot" in run("feed", "show", directory, "a").text
    assert checkpoint("b", "--since", "beginning") < int(first)
    assert checkpoint("c", "--since", second) == int(second)
    assert checkpoint("d", "--since", "now") >= int(third)


def test_names_and_namespaces_that_are_taken_or_missing_are_findings(lake: Path) -> None:
    again = run("feed", "create", lake, "lake", "users", "--sink", "blackhole:")
    assert (again.code, "feed 'lake' is already there" in again.errors) == (1, True)
    assert run("feed", "create", lake, "x", "none", "--sink", "blackhole:").code == 1
    for command in ("show", "pause", "resume", "remove", "rebalance", "statistics", "run"):
        outcome = run("feed", command, lake, "none")
        assert outcome.code == 1
        assert "try: floodmark feed list SITE" in outcome.errors


def test_a_sink_that_is_not_installed_here_is_refused(directory: Path) -> None:
    outcome = run("feed", "create", directory, "lake", "users", "--sink", "parquets:x")
    assert outcome.code == 64
    assert "there is no sink parquets: here" in outcome.errors
    assert run("feed", "list", directory, "--json").json_lines == []


def test_list_has_a_line_a_feed(lake: Path) -> None:
    run("feed", "create", lake, "archive", "users", "--sink", "parquet:exports")
    header, archive, row = (line.split() for line in run("feed", "list", lake).lines)
    assert header == ["name", "state", "checkpoint", "lag", "sink", "run", "by"]
    assert (archive[0], row[:2], row[-2:]) == ("archive", ["lake", "normal"], ["blackhole:", "none"])
    assert [feed["name"] for feed in run("feed", "list", lake, "--json").json_lines] == ["archive", "lake"]


def test_pause_update_resume_and_remove(lake: Path) -> None:
    refused = run("feed", "update", lake, "lake", "--ranges", "3")
    assert (refused.code, "pause it first" in refused.errors) == (1, True)
    assert run("feed", "pause", lake, "lake", "--json").json["state"] == "stopped"
    assert run("feed", "pause", lake, "lake").code == 1
    changed = run("feed", "update", lake, "lake", "--ranges", "3", "--batch-records", "7", "--json").json
    assert (changed["ranges_max"], changed["batch_records"], changed["concurrency"]) == (3, 7, 2)
    until = run("feed", "update", lake, "lake", "--until", str(2**62), "--json").json["until"]
    assert until == str(2**62)
    assert run("feed", "update", lake, "lake", "--no-until", "--json").json["until"] is None
    assert run("feed", "run", lake, "lake").code == 1
    assert run("feed", "resume", lake, "lake", "--json").json["state"] == "normal"
    assert run("feed", "remove", lake, "lake").text == "removed lake\n"
    assert run("feed", "list", lake, "--json").output == b""


def test_update_of_nothing_or_of_both_is_a_usage_error(lake: Path) -> None:
    run("feed", "pause", lake, "lake")
    assert run("feed", "update", lake, "lake").code == 64
    assert run("feed", "update", lake, "lake", "--until", "5", "--no-until").code == 64


def test_resume_may_skip_ahead(lake: Path) -> None:
    third = run("changes", lake, "--json").json_lines[-1]["version"]
    run("feed", "pause", lake, "lake")
    assert run("feed", "resume", lake, "lake", "--since", third, "--json").json["checkpoint"] == third


def test_rebalance_cuts_along_the_partitions_of_now(lake: Path) -> None:
    assert len(run("feed", "show", lake, "lake", "--json").json["ranges"]) == 1
    run("partition", "split", lake, "users", "b")
    ranges = run("feed", "rebalance", lake, "lake", "--json").json["ranges"]
    assert [part["start_key"] for part in ranges] == ["", "b"]


def test_statistics_tell_the_lags(lake: Path) -> None:
    shown = run("feed", "statistics", lake, "lake", "--json").json
    assert shown["checkpoint_lag_ms"] > 0
    assert set(shown) >= {"resolved_lag_ms", "resolved_version", "checkpoint", "ranges", "holder", "state"}
    names = [line.split("  ")[0] for line in run("feed", "statistics", lake, "lake").lines]
    assert {"checkpoint lag", "resolved lag"} <= set(names)


# run


def test_what_heartbeats_have_shown_is_told(lake: Path) -> None:
    assert "no: no heartbeat has come yet" in run("feed", "show", lake, "lake").text
    assert run("feed", "show", lake, "lake", "--json").json["checks"]["intervals_wrong"] == 0
    with floodmark.open(lake, background=False) as site:
        alarm = lose_changes(site, "lake").alarm
    assert alarm is not None
    for command in ("show", "statistics"):
        shown = run("feed", command, lake, "lake")
        assert "1 unchecked (the last: first interval), 1 wrong" in shown.text
        assert "1 of 1 changes between version" in shown.text
        fields = run("feed", command, lake, "lake", "--json").json
        (finding,) = fields["checks"]["findings"]
        assert (finding["expected_changes"], finding["got_changes"], fields["alarm"]) == (1, 0, alarm)
    assert f"alarm of lake: {alarm}" in run("feed", "list", lake).errors
    assert f"feed lake: {alarm}" in run("status", lake).text


def test_a_feed_of_some_keys_says_that_it_is_not_checked(directory: Path) -> None:
    run("feed", "create", directory, "lake", "users", "--sink", "blackhole:", "--prefix", "a")
    assert "no: it reads only some of the namespace's keys" in run("feed", "show", directory, "lake").text


def test_once_delivers_everything_up_to_the_present_and_ends(directory: Path, tmp_path: Path) -> None:
    exports = tmp_path / "exports"
    run("feed", "create", directory, "lake", "users", "--sink", f"parquet:{exports}")
    refused = run("feed", "run", directory, "lake", "--once", "--allow", f"parquet:{tmp_path}/else")
    assert (refused.code, exports.exists()) == (77, False)
    assert f"may not write to the feed's sink parquet:{exports}" in refused.errors
    allowed = ["--allow", f"parquet:{tmp_path}", "--once"]
    outcome = run("feed", "run", directory, "lake", *allowed)
    assert (outcome.code, outcome.errors) == (0, "")
    assert outcome.text.startswith("lake is normal: 3 changes delivered, up to ")
    assert list(exports.rglob("*.parquet"))
    assert run("feed", "run", directory, "lake", *allowed).text.startswith("lake is normal: 0 changes")
    assert run("feed", "show", directory, "lake", "--json").json["holder"] is None


def test_once_as_json_ends_with_a_line_that_says_so(lake: Path) -> None:
    *_, last = run("feed", "run", lake, "lake", "--once", "--json").json_lines
    assert (last["feed"], last["state"], last["changes"], last["ended"]) == ("lake", "normal", 3, True)
    assert last["checkpoint"] == run("feed", "show", lake, "lake", "--json").json["checkpoint"]


def test_a_feed_with_a_target_finishes_by_itself(directory: Path) -> None:
    second = run("changes", directory, "--json").json_lines[1]["version"]
    run("feed", "create", directory, "lake", "users", "--sink", "blackhole:", "--until", second)
    outcome = run("feed", "run", directory, "lake")
    assert (outcome.code, outcome.text.startswith("lake is finished: 2 changes delivered")) == (0, True)
    assert state(directory) == "finished"
    assert run("feed", "run", directory, "lake").code == 1


def test_a_feed_whose_changes_are_gone_fails_and_says_how_to_go_on(lake: Path) -> None:
    run("namespace", "update", lake, "users", "--retention", "0s")
    with floodmark.open(lake, background=False) as site:
        assert isinstance(site.host, EmbeddedHost)
        # As if its lifetime were over.
        site.host.safe_points.release("feed/lake")
        site.collect_garbage()
    outcome = run("feed", "run", lake, "lake")
    assert (outcome.code, outcome.output) == (2, b"")
    assert "feed resume it --since" in outcome.errors
    assert state(lake) == "failed"
    assert run("doctor", lake).code == 1
    snapshot = run("put", lake, "users", "ada", "programmer").text.strip()
    assert run("feed", "resume", lake, "lake", "--since", snapshot, "--json").json["state"] == "normal"


def test_the_sink_stdout_has_stdout_for_itself(directory: Path) -> None:
    run("feed", "create", directory, "lines", "users", "--sink", "stdout:")
    outcome = run_process("feed", "run", directory, "lines", "--once", "--json")
    assert outcome.code == 0
    assert [row["key"] for row in outcome.json_lines] == ["ada", "alan", "grace"]
    assert json.loads(outcome.errors.splitlines()[-1])["ended"] is True


@pytest.mark.slow
def test_a_reader_of_the_sink_stdout_that_leaves_ends_the_run_quietly(directory: Path) -> None:
    with floodmark.open(directory, background=False) as site:
        # Several batches, each larger than what a pipe holds.
        for _ in range(3):
            site.namespace("users").put_many({b"row-%05d" % n: bytes(50) for n in range(2_000)})
    run("feed", "create", directory, "lines", "users", "--sink", "stdout:")
    with running("feed", "run", directory, "lines") as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.readline()
        process.stdout.close()
        assert process.wait(PROCESS_SECONDS_MAX) == 0
        assert process.stderr.read() == b""


@pytest.mark.slow
def test_a_reader_of_the_progress_that_leaves_ends_the_run_quietly(lake: Path) -> None:
    with running("feed", "run", lake, "lake", "--json") as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.readline()
        process.stdout.close()
        assert process.wait(PROCESS_SECONDS_MAX) == 0
        assert process.stderr.read() == b""
    assert run("feed", "show", lake, "lake", "--json").json["holder"] is None


@pytest.mark.parametrize("number", only([signal.SIGTERM], [signal.SIGINT, signal.SIGTERM]))
def test_a_signal_ends_a_run_cleanly_with_its_checkpoint_stored(lake: Path, number: signal.Signals) -> None:
    third = int(run("changes", lake, "--json").json_lines[-1]["version"])
    with running("feed", "run", lake, "lake", "--json", "--metrics", "127.0.0.1:0") as process:
        pages = read_pages_url(process)
        assert process.stdout is not None
        while int(json.loads(process.stdout.readline())["checkpoint"]) < third:
            pass
        assert 'floodmark_feed_run_changes_total{feed="lake"} 3.0' in get_page(f"{pages}/metrics")
        assert get_page(f"{pages}/readyz") == "ok\n"
        process.send_signal(number)
        output, errors = process.communicate(timeout=PROCESS_SECONDS_MAX)
    assert (process.returncode, errors) == (0, b"")
    last = json.loads(output.splitlines()[-1])
    assert (last["ended"], last["state"], last["changes"]) == (True, "normal", 3)
    shown = run("feed", "show", lake, "lake", "--json").json
    assert (shown["checkpoint"], shown["holder"]) == (last["checkpoint"], None)


@pytest.mark.slow
def test_a_run_on_a_terminal_has_a_live_line(lake: Path) -> None:
    shown = on_terminal("feed", "run", lake, "lake", until=lambda text: "checkpoint lag" in text)
    assert "changes/s" in shown
    assert "resolved lag" in shown
    assert "lake is normal: 3 changes delivered" in shown


@pytest.mark.slow
def test_a_feed_of_a_server_is_run_from_elsewhere_by_one_process_at_a_time(server: Server) -> None:
    run("feed", "create", server.url, "lake", "users", "--sink", "blackhole:")
    with running("feed", "run", server.url, "lake", "--json") as process:
        try:
            assert process.stdout is not None
            process.stdout.readline()
            holder = run("feed", "show", server.url, "lake", "--json").json["holder"]
            refused = run("feed", "run", server.url, "lake", "--no-wait")
            assert run("feed", "pause", server.url, "lake").code == 0
            output, errors = process.communicate(timeout=PROCESS_SECONDS_MAX)
        finally:
            process.kill()
    assert (process.returncode, json.loads(output.splitlines()[-1])["state"]) == (0, "stopped")
    assert holder is not None
    assert refused.code == 69
    assert f"is run by {holder}" in refused.errors
    assert errors == b""
    run("feed", "remove", server.url, "lake")


@pytest.mark.slow
def test_a_runner_whose_feed_is_removed_says_so(server: Server) -> None:
    run("feed", "create", server.url, "gone", "users", "--sink", "blackhole:")
    with running("feed", "run", server.url, "gone", "--json") as process:
        assert process.stdout is not None
        process.stdout.readline()
        run("feed", "remove", server.url, "gone")
        output, errors = process.communicate(timeout=PROCESS_SECONDS_MAX)
    assert (process.returncode, errors) == (1, b"")
    assert json.loads(output.splitlines()[-1])["state"] == "removed"


def test_a_runner_in_one_line() -> None:
    statistics = RunnerStatistics(
        feed="lake",
        state=FeedState.ERROR,
        changes=7,
        bytes=700,
        batches=1,
        changes_per_second=1_234.4,
        bytes_per_second=2_048.0,
        checkpoint=5,
        resolved=6,
        checkpoint_lag_ms=61_000,
        resolved_lag_ms=12,
        buffered_bytes=0,
        problem="no room",
        failures=2,
        retry_budget_ms=1,
        ranges=[],
    )
    assert describe(statistics) == (
        "lake  error  1,234 changes/s  2.0 KiB/s  checkpoint lag 1m1s  resolved lag 12 ms  attempt 3: no room"
    )
