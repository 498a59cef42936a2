"""Every record becomes one JSON object on one line, whatever is in it, and no secret with it."""

import io
import json
import logging
import math
import sys
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import msgspec
import pytest

from floodmark.model.access import Role
from floodmark.model.actions import Action
from floodmark.model.errors import (
    InvalidConfiguration,
    InvalidKey,
    NotAllowed,
    NotAuthenticated,
    OutcomeUnknown,
    StorageFailed,
)
from floodmark.server.access import Caller
from floodmark.server.logs import (
    JsonFormatter,
    RefusedCallers,
    auditing,
    auditing_administration,
    configure_logging,
)
from floodmark.testing.clock import SimulatedTime

LOG = logging.getLogger("floodmark.site")


class Lines(io.StringIO):
    """A stream whose lines are read as JSON."""

    def objects(self) -> list[dict[str, object]]:
        text = self.getvalue()
        assert text.isascii()
        assert not text or text.endswith("\n")
        return [json.loads(line, parse_constant=pytest.fail) for line in text.splitlines()]


@pytest.fixture
def lines() -> Iterator[Lines]:
    stream = Lines()
    undo = configure_logging(site="oslo", level="debug", stream=stream)
    yield stream
    undo()


class Unspeakable:
    """A value that cannot say what it is."""

    def __str__(self) -> str:
        raise RuntimeError("no")

    __repr__ = __str__


def test_record_has_time_level_logger_message_and_context(lines: Lines) -> None:
    LOG.warning("%d keys left", 3, extra={"partition": 65, "feed": "indexer", "unknown": 1})
    (line,) = lines.objects()
    time = line.pop("time")
    assert line == {
        "level": "warning",
        "logger": "floodmark.site",
        "message": "3 keys left",
        "site": "oslo",
        "partition": 65,
        "feed": "indexer",
    }
    assert isinstance(time, str)
    assert time.endswith("Z")
    assert abs(datetime.fromisoformat(time) - datetime.now(UTC)).total_seconds() < 60


@pytest.mark.parametrize(
    ("seconds", "time"),
    [(0.0, "1970-01-01T00:00:00.000Z"), (1_700_000_000.9996, "2023-11-14T22:13:20.999Z")],
)
def test_time_is_in_utc_with_milliseconds(seconds: float, time: str) -> None:
    record = logging.LogRecord("floodmark", logging.INFO, "", 0, "x", None, None)
    record.created = seconds
    assert json.loads(JsonFormatter().format(record))["time"] == time


def test_record_may_name_another_site(lines: Lines) -> None:
    LOG.info("a peer answered", extra={"site": "bergen", "node": 2})
    (line,) = lines.objects()
    assert (line["site"], line["node"]) == ("bergen", 2)


def test_exception_is_one_field_on_the_same_line(lines: Lines) -> None:
    try:
        raise ValueError("broken\nin two")
    except ValueError:
        LOG.exception("it failed")
    (line,) = lines.objects()
    assert line["message"] == "it failed"
    traceback = str(line["exception"])
    assert traceback.startswith("Traceback")
    assert traceback.endswith("ValueError: broken\nin two")


def test_log_call_for_an_exception_that_is_not_there_is_harmless(lines: Lines) -> None:
    LOG.error("no exception", exc_info=True)
    LOG.error("with a stack", stack_info=True)
    first, second = lines.objects()
    assert "exception" not in first
    assert "test_logs.py" in str(second["stack"])


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        ("a\nb\u2028c\x00", "a\nb\u2028c\x00"),
        ("blåbær", "blåbær"),
        ("half a pair \ud800", "half a pair \\ud800"),
        (b"ada", "ada"),
        (b"\xff\x00ada", "\\xff\x00ada"),
        (True, True),
        (1.5, 1.5),
        (math.nan, "nan"),
        (-math.inf, "-inf"),
        (1 << 53, 1 << 53),
        (458_752_000_000_000_001, "458752000000000001"),
        (10**5000, "(int that cannot be shown)"),
        (Role.WRITE, 2),
        ((1, {"a": b"b"}), [1, {"a": "b"}]),
        ({1: {2}}, {"1": [2]}),
        ([[[[[1]]]]], [[[["(list too deep to show)"]]]]),
        (Unspeakable(), "(Unspeakable that cannot be shown)"),
        ("x" * 2_000, "x" * 1_000 + "…"),
        (b"x" * 2_000, "x" * 1_000 + "…"),
        (list(range(1_000)), list(range(100))),
    ],
    ids=lambda value: type(value).__name__,
)
def test_odd_values_are_shown_and_break_nothing(lines: Lines, value: object, shown: object) -> None:
    LOG.info("odd", extra={"action": value})
    (line,) = lines.objects()
    assert line["action"] == shown


def test_list_that_holds_itself_ends(lines: Lines) -> None:
    ring: list[object] = []
    ring.append(ring)
    LOG.info("ring", extra={"action": ring})
    assert len(lines.objects()) == 1


@pytest.mark.parametrize(
    ("message", "arguments", "shown"),
    [
        ("%d keys", ("three",), "%d keys (arguments that do not fit: ('three',))"),
        ("%s and %s", (1,), "%s and %s (arguments that do not fit: (1,))"),
        ("%s", (Unspeakable(),), "%s (arguments that do not fit: (tuple that cannot be shown))"),
    ],
    ids=["wrong kind", "too few", "unspeakable"],
)
def test_arguments_that_do_not_fit_the_message_cost_no_record(
    message: str, arguments: tuple[object, ...], shown: str
) -> None:
    record = logging.LogRecord("floodmark", logging.INFO, "", 0, message, arguments, None)
    assert json.loads(JsonFormatter().format(record))["message"] == shown


def test_message_that_no_encoding_knows_is_written(lines: Lines) -> None:
    LOG.info("\ud800 and %s", "\udfff")
    (line,) = lines.objects()
    assert line["message"] == "\\ud800 and \\udfff"


# Setting up


def test_only_the_loggers_of_floodmark_are_touched(lines: Lines) -> None:
    root, other = logging.getLogger(), logging.getLogger("somebody.else")
    before = list(root.handlers), root.level
    other.error("not ours")
    LOG.debug("ours")
    assert [line["message"] for line in lines.objects()] == ["ours"]
    assert (list(root.handlers), root.level) == before


def test_record_is_not_written_again_by_the_root_logger(lines: Lines) -> None:
    root = Lines()
    handler = logging.StreamHandler(root)
    logging.getLogger().addHandler(handler)
    try:
        LOG.warning("ours")
        logging.getLogger("somebody.else").warning("theirs")
    finally:
        logging.getLogger().removeHandler(handler)
    assert root.getvalue() == "theirs\n"
    assert len(lines.objects()) == 1


def test_undoing_leaves_the_logger_as_it_was() -> None:
    logger = logging.getLogger("floodmark")
    before = list(logger.handlers), logger.level, logger.propagate
    undo = configure_logging(level="error", stream=io.StringIO())
    assert (list(logger.handlers), logger.level, logger.propagate) != before
    undo()
    undo()
    assert (list(logger.handlers), logger.level, logger.propagate) == before


def test_second_configuration_replaces_the_first(lines: Lines) -> None:
    second = Lines()
    undo = configure_logging(site="bergen", level="warning", stream=second)
    try:
        LOG.info("too small")
        LOG.warning("once")
    finally:
        undo()
    assert lines.objects() == []
    assert [line["message"] for line in second.objects()] == ["once"]


def test_logs_go_to_stderr_if_nothing_else_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    undo = configure_logging()
    try:
        LOG.info("hello")
    finally:
        undo()
    output = capsys.readouterr()
    assert output.out == ""
    assert json.loads(output.err)["message"] == "hello"


def test_file_that_was_rotated_away_is_opened_anew(tmp_path: Path) -> None:
    path = tmp_path / "floodmark.log"
    undo = configure_logging(stream=path)
    try:
        LOG.info("before")
        path.rename(tmp_path / "floodmark.log.1")
        LOG.info("after")
    finally:
        undo()
    assert json.loads((tmp_path / "floodmark.log.1").read_text())["message"] == "before"
    assert json.loads(path.read_text())["message"] == "after"


def test_stream_that_knows_only_ascii_gets_good_json(tmp_path: Path) -> None:
    with (tmp_path / "log").open("w", encoding="ascii", errors="backslashreplace") as stream:
        undo = configure_logging(stream=stream)
        try:
            LOG.info("blåbær")
        finally:
            undo()
    assert json.loads((tmp_path / "log").read_text())["message"] == "blåbær"


def test_unusable_level_and_file_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidConfiguration, match="'loud' is no level"):
        configure_logging(level="loud")
    with pytest.raises(InvalidConfiguration, match="cannot write logs"):
        configure_logging(stream=tmp_path / "nowhere" / "log")


# Who has changed what


class Settings(msgspec.Struct):
    """Plain data, as administrative calls take it."""

    merge: str
    token: str


def test_administration_is_noted_with_who_did_what(lines: Lines) -> None:
    with auditing_administration(Caller("ada", Role.ADMIN), "split", {"namespace": "users", "key": b"m"}):
        assert lines.objects() == []
    (line,) = lines.objects()
    del line["time"]
    assert line == {
        "level": "info",
        "logger": "floodmark.audit",
        "message": "ada: split: done",
        "site": "oslo",
        "caller": "ada",
        "role": "admin",
        "action": "split",
        "arguments": {"namespace": "users", "key": "m"},
        "outcome": "done",
    }


@pytest.mark.parametrize(
    ("error", "outcome"),
    [
        (NotAllowed("x"), "not_allowed"),
        (OutcomeUnknown("x"), "unknown"),
        (StorageFailed("x"), "retryable"),
        (InvalidKey("x"), "refused"),
        (KeyError("x"), "bug"),
    ],
)
def test_administration_that_failed_is_noted_with_its_outcome(
    lines: Lines, error: Exception, outcome: str
) -> None:
    with pytest.raises(type(error)), auditing_administration(Caller("ada", Role.ADMIN), "split", {}):
        raise error
    assert [line["outcome"] for line in lines.objects()] == [outcome]


def test_what_lasts_is_noted_when_it_begins_and_when_it_ends(lines: Lines) -> None:
    action = Action(Role.ADMIN, audited=True, lengthy=True, unsaid=("values",))
    with auditing(Caller("ada", Role.ADMIN), "gc", action, {"values": b"x", "namespace": "users"}):
        assert [line["outcome"] for line in lines.objects()] == ["begun"]
    assert [line["outcome"] for line in lines.objects()] == ["begun", "done"]
    assert [line["arguments"] for line in lines.objects()] == [{"namespace": "users"}] * 2


def test_secrets_are_left_out_of_what_is_noted(lines: Lines) -> None:
    arguments = {
        "token": "s3cret",
        "Password": "s3cret",
        "peer": {"url": "grpc://a", "tls_key": "s3cret"},
        "sinks": [{"name": "kafka", "client_secret": "s3cret"}],
        "settings": Settings("fields", "s3cret"),
        "deep": [[[[{"token": "s3cret"}]]]],
    }
    with auditing_administration(Caller("ada", Role.ADMIN), "replicate", arguments):
        pass
    (line,) = lines.objects()
    assert "s3cret" not in lines.getvalue()
    assert line["arguments"] == {
        "token": "(left out)",
        "Password": "(left out)",
        "peer": {"url": "grpc://a", "tls_key": "(left out)"},
        "sinks": [{"name": "kafka", "client_secret": "(left out)"}],
        "settings": {"merge": "fields", "token": "(left out)"},
        "deep": [[["(list too deep to show)"]]],
    }


def test_refused_callers_are_logged_once_a_second_and_counted_meanwhile(lines: Lines) -> None:
    time = SimulatedTime()
    refused = RefusedCallers(time)
    for number in range(3):
        refused.note(f"10.0.0.{number}:1", "put", NotAuthenticated("who is this?"))
    time.advance(1_000)
    refused.note("10.0.0.9:1", "resp.auth", NotAuthenticated("who is this?"))
    assert [line["message"] for line in lines.objects()] == [
        "refused a caller from 10.0.0.0:1 at put: who is this?",
        "refused a caller from 10.0.0.9:1 at resp.auth: who is this?; 2 others since the last line",
    ]


def test_stderr_is_looked_up_when_logging_is_set_up(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = Lines()
    monkeypatch.setattr(sys, "stderr", stream)
    undo = configure_logging()
    try:
        LOG.info("here")
    finally:
        undo()
    assert [line["message"] for line in stream.objects()] == ["here"]
