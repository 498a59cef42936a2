"""doctor: healthy, damaged, locked; in a directory and behind a server."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import cast

import pytest
from tests.cli.support import Server, run, run_process

import floodmark
from floodmark.cli.commands.doctor import compare_clocks, judge
from floodmark.codec.ordered import encode_key
from floodmark.host.embedded import EmbeddedHost
from floodmark.host.examination import CheckResult, Severity
from floodmark.model.version import compose
from floodmark.partition.families import DATA


def damage(directory: Path, key: bytes, change: Callable[[bytes], bytes]) -> None:
    """Change the stored bytes of a record, through the engine."""
    with floodmark.open(directory, background=False) as site:
        record = site.namespace("users").record(key)
        assert record is not None
        assert isinstance(site.host, EmbeddedHost)
        engine = site.host.node.engine
        stored_key = encode_key(1, key, record.version)
        stored = engine.get(DATA, stored_key)
        assert stored is not None
        engine.write([(DATA, stored_key, change(stored))])


def flip_last(stored: bytes) -> bytes:
    return stored[:-1] + bytes([stored[-1] ^ 0x40])


def test_a_healthy_site_is_called_so(directory: Path) -> None:
    outcome = run("doctor", directory)
    assert (outcome.code, outcome.errors, outcome.lines[-1]) == (0, "", "healthy")
    rows = [line.split(maxsplit=1) for line in outcome.lines[:-1]]
    assert {row[0] for row in rows} == {"ok"}
    shown = " ".join(row[1] for row in rows)
    for check in ("lock", "format", "clock", "disk", "heartbeat", "partitions", "feeds", "records"):
        assert check in shown
    assert "3 read, and all are whole" in shown
    assert "bytes are free" in shown


def test_a_damaged_record_is_a_finding_with_what_to_do(directory: Path) -> None:
    damage(directory, b"ada", flip_last)
    outcome = run("doctor", directory)
    assert (outcome.code, outcome.lines[-1]) == (1, "2 problems")
    (line,) = (line for line in outcome.lines if line.startswith("problem  records"))
    assert "1 of 3 records are damaged: b'ada' of users at version " in line
    advice = outcome.lines[outcome.lines.index(line) + 1]
    assert advice.strip().startswith("try: restore them from a backup")
    report = run("doctor", directory, "--json").json
    assert (report["directory"], report["healthy"]) == (str(directory), False)
    problems = [finding for finding in report["findings"] if finding["severity"] == "problem"]
    assert [finding["check"] for finding in problems] == ["records", "change log"]
    assert all(finding["advice"] for finding in problems)


def test_overwriting_a_damaged_record_is_advice_that_helps(directory: Path) -> None:
    damage(directory, b"ada", flip_last)
    assert run("get", directory, "users", "ada").code == 2
    run("put", directory, "users", "ada", "countess")
    assert run("get", directory, "users", "ada").text == "countess\n"


def test_quick_leaves_the_data_alone(directory: Path) -> None:
    damage(directory, b"ada", flip_last)
    outcome = run("doctor", directory, "--quick")
    assert (outcome.code, outcome.lines[-1]) == (0, "healthy")
    assert "records" not in outcome.text


def test_doctor_changes_nothing(directory: Path) -> None:
    before = run("changes", directory).output
    run("doctor", directory)
    assert run("changes", directory).output == before


def test_a_site_that_another_process_has_open_could_not_be_told(directory: Path) -> None:
    with floodmark.open(directory, background=False):
        outcome = run("doctor", directory)
        report = run("doctor", directory, "--json")
    assert (outcome.code, outcome.lines[-1]) == (2, "could not be told")
    assert "is open in process" in outcome.lines[0]
    assert "floodmark doctor grpc://HOST:PORT" in outcome.lines[1]
    assert (report.code, report.json["healthy"]) == (2, False)
    assert [finding["severity"] for finding in report.json["findings"]] == ["unknown"]


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b'{"site": "oslo", "site_id": 88, "format": 99}', "Install a newer Floodmark"),
        (b"{", "is damaged"),
    ],
)
def test_a_site_that_cannot_be_opened_is_a_finding(directory: Path, content: bytes, words: str) -> None:
    (directory / "floodmark.json").write_bytes(content)
    outcome = run("doctor", directory)
    assert (outcome.code, outcome.lines[-1]) == (1, "1 problem")
    assert words in outcome.lines[0]


def test_damaged_metadata_is_a_finding(directory: Path) -> None:
    with floodmark.open(directory, background=False) as site:
        assert isinstance(site.host, EmbeddedHost)
        engine = site.host.node.engine
        engine.write([("meta", b"namespaces/" + (1).to_bytes(3, "big"), b"{")])
    outcome = run("doctor", directory)
    assert outcome.code == 1
    assert "metadata row" in outcome.lines[0]


def test_feeds_and_safe_points_in_good_order_are_no_finding(directory: Path) -> None:
    run("safepoint", "hold", directory, "audit")
    run("feed", "create", directory, "lake", "users", "--sink", "blackhole:")
    assert run("doctor", directory).code == 0
    run("feed", "pause", directory, "lake")
    assert run("doctor", directory).code == 0


def test_a_server_is_examined_while_it_serves(server: Server) -> None:
    outcome = run("doctor", server.url)
    assert (outcome.code, outcome.errors, outcome.lines[-1]) == (0, "", "healthy")
    assert f"the server at {server.url} answers" in outcome.text
    assert "the server's time and this machine's agree" in outcome.text
    assert "bytes are free" in outcome.text
    report = run("doctor", server.url, "--quick", "--json").json
    assert (report["url"], report["healthy"]) == (server.url, True)
    assert "records" not in {finding["check"] for finding in report["findings"]}


@pytest.mark.slow
def test_the_directory_of_a_server_leads_to_its_url(server: Server) -> None:
    directory = server.log_path.with_suffix("")
    outcome = run_process("doctor", directory, "--json")
    (finding,) = json.loads(outcome.output)["findings"]
    assert outcome.code == 2
    assert f"process {server.process.pid} " in finding["message"]


class OtherClock:
    """A site whose time is what a test says."""

    def __init__(self, now_ms: int) -> None:
        self._now_ms = now_ms

    def now(self) -> int:
        return compose(self._now_ms, 5)


@pytest.mark.parametrize(
    ("server_ms", "severity", "words"),
    [
        (10_000, Severity.OK, "agree"),
        (10_500, Severity.OK, "agree"),
        (9_500, Severity.OK, "agree"),
        (11_000, Severity.WARNING, "1,000 ms ahead of"),
        (7_000, Severity.WARNING, "3,000 ms behind"),
    ],
)
def test_clocks_that_differ_are_a_warning(server_ms: int, severity: Severity, words: str) -> None:
    finding = compare_clocks(cast(floodmark.Site, OtherClock(server_ms)), lambda: 10_000)
    assert finding.severity is severity
    assert words in finding.message


@pytest.mark.parametrize(
    ("severities", "code"),
    [
        ([Severity.OK], 0),
        ([Severity.OK, Severity.UNKNOWN], 2),
        ([Severity.OK, Severity.WARNING], 1),
        ([Severity.UNKNOWN, Severity.PROBLEM], 1),
    ],
)
def test_what_is_wrong_counts_more_than_what_could_not_be_told(severities: list[Severity], code: int) -> None:
    assert judge([CheckResult("check", severity, "words") for severity in severities]) == code
