"""Progress: on a terminal, only when it takes time, and never in the output."""

import io
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from threading import Event

import pytest
from rich.console import Console
from tests.waiting import HANG_SECONDS

from floodmark.cli.failures import report
from floodmark.cli.render import progress as progress_module
from floodmark.cli.render.output import Column, Output, note, speaks_unicode
from floodmark.cli.render.progress import counted, progress, tracked
from floodmark.model.errors import InvalidArgument

LONG = 1_000.0


class Screen(io.StringIO):
    """What a terminal shows, and a way to wait for something to be shown."""

    def __init__(self) -> None:
        super().__init__()
        self._shown = Event()

    def write(self, text: str) -> int:
        written = super().write(text)
        self._shown.set()
        return written

    def wait_shown(self) -> None:
        assert self._shown.wait(HANG_SECONDS), "nothing was shown"


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Screen:
    """What is seen on a stderr that is a terminal."""
    monkeypatch.setenv("TERM", "xterm")
    seen = Screen()
    console = Console(file=seen, force_terminal=True, width=100)
    monkeypatch.setattr(progress_module, "console_on", lambda _: console)
    return seen


def test_work_that_takes_time_shows_progress(terminal: Screen) -> None:
    with progress("collecting garbage", seconds=0):
        terminal.wait_shown()
    assert "collecting garbage" in terminal.getvalue()


def test_work_that_is_done_at_once_shows_nothing(terminal: Screen) -> None:
    with progress("collecting garbage", seconds=LONG):
        pass
    assert list(counted(range(5), "rows", seconds=LONG)) == [0, 1, 2, 3, 4]
    assert terminal.getvalue() == ""


def test_items_are_counted_as_they_pass(terminal: Screen) -> None:
    passed = 0
    for item in counted(range(2_500), "rows read", seconds=0):
        passed += item >= 0
        if passed == 2_400:
            terminal.wait_shown()
    assert passed == 2_500
    assert "rows read" in terminal.getvalue()


def test_what_is_done_and_how_much_of_it_is_shown(terminal: Screen) -> None:
    with tracked("examining", seconds=0) as track:
        terminal.wait_shown()
        track("records read", 12_345)
    shown = terminal.getvalue()
    assert "examining" in shown
    assert "records read 12,345" in shown


def test_progress_ends_when_the_work_fails(terminal: Screen) -> None:
    def fail() -> None:
        with progress("dividing", seconds=0):
            terminal.wait_shown()
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    shown = terminal.getvalue()
    assert shown.rindex("\x1b[?25h") > shown.rindex("\x1b[?25l"), "the cursor was not given back"


def test_nothing_is_shown_where_there_is_no_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    with progress("collecting garbage", seconds=0):
        pass
    assert list(counted([1], "rows", seconds=0)) == [1]
    assert capsys.readouterr() == ("", "")


def test_text_is_never_taken_for_markup(capsys: pytest.CaptureFixture[str]) -> None:
    Output(json=False).line("[bold]:smile:[/bold] ", ("[red]", "red"))
    assert capsys.readouterr().out == "[bold]:smile:[/bold] [red]\n"


@pytest.mark.parametrize(("encoding", "unicode"), [("utf-8", True), ("UTF8", True), ("ascii", False)])
def test_bars_need_an_encoding_that_has_them(encoding: str, unicode: bool) -> None:
    assert speaks_unicode(io.TextIOWrapper(io.BytesIO(), encoding)) is unicode


def test_raw_output_comes_behind_what_was_printed_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with (tmp_path / "output").open("w+", encoding="utf-8") as stream:
        monkeypatch.setattr(sys, "stdout", stream)
        shown = Output(json=False)
        shown.line("first")
        shown.raw(b"\xff")
    assert (tmp_path / "output").read_bytes() == b"first\n\xff"


STEERING = "a\x1b[2J\x1b]0;title\x07b\r\u202ec"


def test_texts_of_others_steer_no_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    """Whichever way they are printed; several lines are only what the command itself prints so."""
    printer = Output(json=False)
    printer.line(STEERING, (STEERING, "dim"))
    printer.fields([("description", STEERING + "\nstate  fine")])
    printer.table(["feed", "error"], [("copy", STEERING + "\nother  fine")])
    note(STEERING)
    report(InvalidArgument(STEERING), debug=False, json=False)
    printed = capsys.readouterr()
    for text in (printed.out, printed.err):
        assert all(line.isprintable() for line in text.split("\n"))
        assert "\\x1b[2J" in text
    assert len(printed.out.splitlines()) == 4


def test_a_text_of_several_lines_stays_one(capsys: pytest.CaptureFixture[str]) -> None:
    Output(json=False).line("one\ttwo\nthree")
    assert capsys.readouterr().out == "one\ttwo\nthree\n"


@dataclass(frozen=True)
class Tide:
    name: str
    lag_ms: int
    checkpoint: int
    floods: bool
    ports: list[str]
    note: str | None = None


TIDE = Tide("spring", 12_345, 470_473_302_343_417_856, True, ["oslo", "rome"])


def test_one_shape_is_fields_for_programs_and_names_and_values_for_people(
    capsys: pytest.CaptureFixture[str],
) -> None:
    Output(json=True).report(TIDE)
    assert json.loads(capsys.readouterr().out) == {
        "name": "spring",
        "lag_ms": 12_345,
        "checkpoint": "470473302343417856",
        "floods": True,
        "ports": ["oslo", "rome"],
        "note": None,
    }
    Output(json=False).report(TIDE)
    assert capsys.readouterr().out.splitlines() == [
        "name        spring",
        "lag         12.3 s",
        "checkpoint  470473302343417856  2026-11-15T03:26:59.999Z",
        "floods      yes",
        "ports       oslo, rome",
    ]


def test_many_of_a_shape_are_json_lines_or_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    columns: dict[str, Column[Tide]] = {
        "tide": "name",
        "at": "checkpoint",
        "ports": lambda tide: str(len(tide.ports)),
    }
    Output(json=True).rows([TIDE, TIDE], columns)
    assert [json.loads(line)["name"] for line in capsys.readouterr().out.splitlines()] == ["spring", "spring"]
    Output(json=False).rows([TIDE], columns)
    assert capsys.readouterr().out.splitlines() == [
        "tide    at                        ports",
        "spring  2026-11-15T03:26:59.999Z  2",
    ]


def test_a_table_on_a_narrow_terminal_wraps_its_cells_and_steers_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("NO_COLOR", "TERM"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "30")
    screen = io.StringIO()
    Output(json=False, stream=screen).table(
        ["feed", "error"], [("copy", f"[bold]{STEERING} and words and words")]
    )
    lines = screen.getvalue().splitlines()
    assert len(lines) > 2
    assert "[bold]a\\x1b[2J" in screen.getvalue().replace("\n", "")
    assert "\x1b[2J" not in screen.getvalue()
