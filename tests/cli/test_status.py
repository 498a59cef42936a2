"""status --watch, and what status says about readers and feeds."""

import json
import signal
from dataclasses import replace
from pathlib import Path

import pytest
from tests.cli.support import PROCESS_SECONDS_MAX, Server, on_terminal, run, running

import floodmark
from floodmark.cli.commands.status import SiteLook, draw, look_at
from floodmark.cli.render.text import BARS
from floodmark.feed import ChangeStatistics, ReaderStatistics
from floodmark.host.statistics import PartitionHeat
from floodmark.model.partition import Hold, HoldKind
from floodmark.model.stream import Way
from floodmark.partition import HeatSample


def look(directory: Path) -> SiteLook:
    with floodmark.open(directory, background=False) as site:
        return look_at(site)


def drawn(before: SiteLook, now: SiteLook) -> list[str]:
    """What a terminal shows, without its styles."""
    lines = draw("data/oslo", before, now, BARS)
    return ["".join(part if isinstance(part, str) else part[0] for part in line) for line in lines]


def test_feeds_are_shown(directory: Path) -> None:
    run("feed", "create", directory, "lake", "users", "--sink", "blackhole:")
    shown = dict(line.split(maxsplit=1) for line in run("status", directory).lines)
    assert shown["feeds"] == "lake normal"
    (feed,) = run("status", directory, "--json").json["feeds"]
    assert (feed["name"], feed["state"], feed["holder"]) == ("lake", "normal", None)
    assert isinstance(feed["checkpoint"], str)


def test_what_holds_the_resolved_version_back_is_an_alarm(directory: Path) -> None:
    now = look(directory)
    hold = Hold(kind=HoldKind.PREPARED, version=7, age_ms=2_500, transaction="0-9")
    held = replace(now, statistics=replace(now.statistics, held_back_by=[hold]))
    (alarm,) = [line for line in drawn(now, held) if line.startswith("alarm")]
    assert alarm.endswith(
        "the prepared write of transaction 0-9 has held the resolved version at 7 for 2.5 s"
    )
    assert run("status", directory, "--json").json["held_back_by"] == []


@pytest.mark.slow
def test_open_readers_of_a_server_are_shown_by_their_way(server: Server) -> None:
    with running("changes", server.url, "--namespace", "users", "--follow") as process:
        try:
            assert process.stdout is not None
            for _ in range(3):
                process.stdout.readline()
            status = run("status", server.url, "--json").json
            shown = run("status", server.url).text
        finally:
            process.send_signal(signal.SIGINT)
            process.wait(PROCESS_SECONDS_MAX)
    assert status["url"] == server.url
    (reader,) = status["readers"]["open"]
    assert (reader["follow"], reader["way"] in set(Way)) == (True, True)
    assert sum(status["readers"]["changes"].values()) >= 3
    assert isinstance(reader["position"], str)
    assert "1 open, 1 by " in shown


def test_rates_are_those_between_two_looks(directory: Path) -> None:
    first = look(directory)
    statistics = first.statistics
    reader = ReaderStatistics(namespace=1, follow=True, position=5, lag_ms=1_500, way=Way.TAIL, changes={})
    later = replace(
        first,
        taken_at_ms=first.taken_at_ms + 2_000,
        lag_ms=12,
        statistics=replace(
            statistics,
            commits=statistics.commits + 100,
            changes=statistics.changes + 5_000,
            bytes_written=statistics.bytes_written + 4 * 1024 * 1024,
            readers=ChangeStatistics(open=[reader], changes={Way.TAIL: 600, Way.LOG: 20}),
        ),
    )
    lines = drawn(first, later)
    shown = dict(line.split(maxsplit=1) for line in lines if len(line.split()) > 1)
    assert shown["writes"] == "50 commits/s, 2.0 MiB/s"
    assert shown["changes"] == "2,500/s"
    assert shown["delivered"] == "300/s by tail, 10/s by log"
    assert shown["readers"] == "1 open, 1 by tail; the last is 1.5 s behind"
    assert shown["lag"] == "12 ms"


def test_the_first_look_has_no_rates_and_divides_by_nothing(directory: Path) -> None:
    first = look(directory)
    lines = drawn(first, first)
    assert "writes       0 commits/s, 0 bytes/s" in lines
    assert "delivered    none" in lines


def test_the_busiest_partitions_come_first_with_bars(directory: Path) -> None:
    run("partition", "split", directory, "users", "m")
    first = look(directory)
    left, right = first.statistics.partitions

    def heat(partition: int, *writes: int) -> PartitionHeat:
        samples = [
            HeatSample(from_ms=n * 1000, to_ms=n * 1000 + 1000, writes=count, reads=0, bytes_written=0)
            for n, count in enumerate(writes)
        ]
        return PartitionHeat(id=partition, range=first.heat[0].range, samples=samples)

    busy = replace(first, heat=[heat(left.id, 1, 2, 0), heat(right.id, 4, 8, 0)])
    lines = drawn(busy, busy)
    header, second, last = lines[-3:]
    assert header.split()[:4] == ["partition", "from", "to", "writes/s"]
    assert (second.split()[0], last.split()[0]) == (str(right.id), str(left.id))
    assert second.rstrip().endswith("8         ████████████  ▄█")
    assert last.rstrip().endswith("2         ███           ▁▂")


@pytest.mark.slow
def test_watching_on_a_terminal_draws_anew_until_ctrl_c(server: Server) -> None:
    shown = on_terminal("status", server.url, "--watch", until=lambda text: text.count("resolved") >= 3)
    assert shown.count("commits/s") >= 3
    assert "Traceback" not in shown
    assert shown.rindex("\x1b[?25h") > shown.rindex("\x1b[?25l"), "the cursor was not given back"


@pytest.mark.slow
def test_watching_elsewhere_prints_a_line_of_json_each_second(server: Server) -> None:
    with running("status", server.url, "--watch", "--json") as process:
        assert process.stdout is not None
        first, second = (json.loads(process.stdout.readline()) for _ in range(2))
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=PROCESS_SECONDS_MAX)
    assert (process.returncode, errors) == (130, b"")
    assert int(second["resolved_version"]) > int(first["resolved_version"])


@pytest.mark.slow
def test_a_directory_can_be_watched_too(directory: Path) -> None:
    shown = on_terminal("status", directory, "--watch", until=lambda text: text.count("resolved") >= 2)
    assert "this process owns the site" in shown
    assert run("status", directory).code == 0
