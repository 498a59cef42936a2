"""The demo: what it claims can fail, what it starts it ends, and whatever goes wrong is said."""

import io
import os
import signal
import socket
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import psutil
import pytest
from rich.console import Console
from tests.cli.support import FLOODMARK, Outcome, run
from tests.test_readme import shown_on_the_picture
from tests.waiting import DEMO_SECONDS_MAX, HANG_SECONDS

from floodmark.cli.demo import story
from floodmark.cli.demo.stage import Stage
from floodmark.cli.demo.story import (
    LOST_KEY,
    MESSAGES,
    PEOPLE,
    UNREAD,
    DemoPair,
    DemoServer,
    check_unread,
    find_the_loss,
    newest_key,
    serve_two_sites,
    survive_a_kill,
)
from floodmark.divergence.comparing import Drift, DriftSide
from floodmark.divergence.rules import Verdict
from floodmark.model.change import Stamp
from floodmark.model.errors import Retryable
from floodmark.replication.topology import parse_topology
from floodmark.spark.jobs import PairSummary, VerifySummary
from floodmark.spark.jobs.verifying.verify import DriftFound

STEPS = ["serve", "crash", "copy", "verify", "loss", "find", "repair"]


def claim(stage: Stage, _pair: DemoPair, *, holds: bool = True) -> None:
    stage.begin("claim", "Something about water")
    stage.check("water flows down", holds)
    stage.sum_up("water was watched", drops=3)


def claim_wrongly(stage: Stage, pair: DemoPair) -> None:
    claim(stage, pair, holds=False)


def claim_nothing(stage: Stage, _pair: DemoPair) -> None:
    stage.begin("empty", "Nothing at all")


def on_stage(**options: Any) -> tuple[Stage, io.StringIO]:
    shown = io.StringIO()
    console = Console(file=shown, width=100, highlight=False, soft_wrap=True)
    return Stage(console, **{"unicode": True, "live": False, **options}), shown


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[DemoPair]:
    with ExitStack() as ending:
        yield DemoPair(tmp_path, ending)


# As a whole


@pytest.mark.soak
def test_demo_passes_and_its_sites_can_be_used_afterwards(tmp_path: Path) -> None:
    home, temporary = tmp_path / "demo sites", tmp_path / "temporary"
    temporary.mkdir()
    finished = subprocess.run(
        [FLOODMARK, "demo", "--json", "--directory", home],
        capture_output=True,
        stdin=subprocess.DEVNULL,
        timeout=DEMO_SECONDS_MAX,
        env=os.environ | {"TMPDIR": str(temporary)},
        check=False,
    )
    outcome = Outcome(finished.returncode, finished.stdout, finished.stderr.decode())
    assert (outcome.code, outcome.errors) == (0, "")
    account = outcome.json
    assert [step["step"] for step in account["steps"]] == STEPS
    assert [step["title"] for step in account["steps"] if step["title"] not in shown_on_the_picture()] == []
    assert all(check["passed"] for step in account["steps"] for check in step["checks"])
    figures = {step["step"]: step["figures"] for step in account["steps"]}
    assert figures["crash"]["kept"] == figures["crash"]["acknowledged"] >= 3_000
    assert figures["copy"]["messages"] > 5_000
    assert figures["copy"]["reads_checked"] > 0
    assert figures["loss"]["finding"].startswith("1 of ")
    assert (figures["find"]["drift"], figures["repair"]["repaired"]) == (1, 1)
    assert not list(temporary.glob("floodmark-*"))
    sites = [
        dict(line.split("\t", 1) for line in run("scan", home / name, "unread").lines) for name in PEOPLE
    ]
    assert sites[0] == sites[1]
    assert "dinner at eight?" in run("get", home / "rome", MESSAGES, "ada+grace/invitation").text
    topology = parse_topology((home / "topology.toml").read_text())
    assert set(topology.sites) == set(PEOPLE)


# What is claimed and told


def test_demo_tells_its_steps_a_summary_and_what_to_try_next(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(story, "STEPS", [claim])
    outcome = run("demo")
    assert (outcome.code, outcome.errors) == (0, "")
    assert "\x1b" not in outcome.text
    shown, _, summary = outcome.text.partition("\nSummary\n")
    assert shown.endswith("\n 1  Something about water\n    ✓ water flows down\n")
    assert summary.startswith("    ✓ water was watched\n    1 of 1 checks held, in 0 s\n")
    tries = [line.strip() for line in summary.partition("\nTry next\n")[2].splitlines()]
    for line in tries[1:]:
        command = line.partition("  ")[0].split()
        assert run(*command[1:]).code == 0, line


@pytest.mark.slow
def test_demo_whose_sites_are_kept_tells_how_to_serve_them(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(story, "STEPS", [serve_two_sites])
    outcome = run("demo", "--directory", tmp_path / "sites")
    assert (outcome.code, outcome.errors) == (0, "")
    topology = parse_topology((tmp_path / "sites" / "topology.toml").read_text())
    for name, site in topology.sites.items():
        assert site.url is not None
        listen = site.url.removeprefix("grpc://")
        assert f"floodmark serve {tmp_path}/sites/{name} --listen {listen} &" in outcome.text
        assert run("status", tmp_path / "sites" / name).code == 0


@pytest.mark.parametrize("step", [claim_wrongly, claim_nothing])
def test_demo_that_fails_ends_with_1_and_says_where(monkeypatch: pytest.MonkeyPatch, step: Any) -> None:
    monkeypatch.setattr(story, "STEPS", [claim, step])
    outcome = run("demo")
    assert outcome.code == 1
    summary = outcome.text.partition("\nSummary\n")[2]
    broken = "Something about water: water flows down" if step is claim_wrongly else "nothing was checked"
    assert summary.splitlines()[1].startswith("    ✗ ")
    assert broken in summary.splitlines()[1]
    account = run("demo", "--json").json
    assert (account["passed"], [each["passed"] for each in account["steps"]]) == (False, [True, False])
    assert account["steps"][0]["figures"] == {"drops": 3}


def test_demo_is_plain_where_nothing_else_can_be_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(story, "STEPS", [claim])
    outcome = run("demo", encoding="ascii")
    assert (outcome.code, outcome.output.isascii()) == (0, True)
    assert "    ok water flows down\n" in outcome.text


def test_demo_keeps_away_from_a_directory_with_something_in_it(directory: Path) -> None:
    outcome = run("demo", "--directory", directory)
    assert outcome.code == 64
    assert "not empty" in outcome.errors
    assert len(run("scan", directory, "users").lines) == 3


def test_demo_without_spark_says_how_to_get_it() -> None:
    script = (
        "import sys; sys.modules['pyspark'] = None; from floodmark.cli import main; sys.exit(main(['demo']))"
    )
    finished = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert finished.returncode == 64
    assert "floodmark[spark]" in finished.stderr


# The servers


@pytest.mark.slow
def test_a_killed_server_has_all_that_it_acknowledged_and_counters_tell_the_truth(pair: DemoPair) -> None:
    stage, shown = on_stage()
    serve_two_sites(stage, pair)
    survive_a_kill(stage, pair)
    assert stage.passed, shown.getvalue()
    pair.start_people()
    pair.wait(lambda: pair.sent.total() > 0 and pair.reads["checked"] > 0)
    pair.people.stop()
    assert pair.reads["wrong"] == 0
    counted = Counter[str]()
    messages = 0
    for server in pair.servers.values():
        keys = [key for key, _ in server.site.namespace(MESSAGES).scan()]
        messages += len(keys) - (newest_key(server.name) in keys)
        counted.update({name.decode(): int(value) for name, value in server.site.namespace(UNREAD).scan()})
    assert (counted, messages) == (pair.sent, pair.sent.total())
    # No link has run: neither site knows what the other counted, and the check must say so.
    check_unread(stage, pair)
    assert not stage.passed


@pytest.mark.slow
def test_a_server_whose_port_is_taken_says_so(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        server = DemoServer("oslo", tmp_path, "127.0.0.1:{1}".format(*taken.getsockname()))
        with pytest.raises(Retryable, match=rf"oslo did not start on {server.listen}: .*{server.listen}"):
            server.start()
        server.stop()


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_servers_too(tmp_path: Path, number: signal.Signals) -> None:
    script = f"""
import sys
from threading import Event
from floodmark.cli import main
from floodmark.cli.demo import story

def stand(stage, pair):
    print(*[server.process.pid for server in pair.servers.values()], flush=True)
    Event().wait({HANG_SECONDS})

story.STEPS[:] = [story.serve_two_sites, stand]
sys.exit(main(["demo", "--json"]))
"""
    command = [sys.executable, "-c", script]
    environment = os.environ | {"TMPDIR": str(tmp_path)}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as demo:
        assert demo.stdout is not None
        servers = [psutil.Process(int(word)) for word in demo.stdout.readline().split()]
        assert len(servers) == 2
        demo.send_signal(number)
        assert demo.wait(HANG_SECONDS) == 130
    assert psutil.wait_procs(servers, HANG_SECONDS)[1] == []
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("sent", "drift", "passed"), [(3, 1, True), (0, 1, False), (3, 2, False)])
def test_the_loss_is_found_only_if_people_wrote_meanwhile_and_nothing_else_is_reported(
    sent: int, drift: int, passed: bool, pair: DemoPair, monkeypatch: pytest.MonkeyPatch
) -> None:
    sides = DriftSide("oslo", 1, Stamp(1, 1), {}, 7, False), DriftSide("rome", 0, None, {}, None, False)
    counts = PairSummary(
        namespace=MESSAGES,
        left="oslo",
        right="rome",
        compared=9,
        agree=9 - drift,
        lag=0,
        value_mismatch=0,
        missing_left=0,
        missing_right=drift,
    )
    lost = DriftFound(MESSAGES, Drift(LOST_KEY, Verdict.MISSING_RIGHT, *sides))

    def compare(_stage: Stage, pair: DemoPair) -> VerifySummary:
        pair.sent["grace"] += sent
        return VerifySummary(sites=["oslo", "rome"], pairs=[counts], sample=[lost])

    monkeypatch.setattr(story, "compare", compare)
    stage, shown = on_stage()
    find_the_loss(stage, pair)
    assert stage.passed is passed, shown.getvalue()
