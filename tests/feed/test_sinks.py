"""How sinks are found by their URIs, and what the small ones do."""

import io
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.cli.support import run

import floodmark
from floodmark.feed.sinks.base import known_schemes, open_sink, parse_sink, require_sink
from floodmark.feed.sinks.blackhole import BlackholeSink
from floodmark.feed.sinks.stdout import StdoutSink, encode_line
from floodmark.model.errors import Closed, InvalidArgument
from floodmark.testing.sinks import SINCE, change, context, write

# Finding a sink


def test_the_sinks_that_come_with_floodmark_are_known() -> None:
    assert {"blackhole", "parquet", "stdout"} <= set(known_schemes())


@pytest.mark.parametrize("ask", [lambda uri: open_sink(uri, context()), require_sink])
def test_an_unknown_kind_of_sink_is_refused_with_those_that_there_are(ask: object) -> None:
    assert callable(ask)
    with pytest.raises(InvalidArgument) as refusal:
        ask("kafak://broker/topic")
    for scheme in ("kafak:", "blackhole:", "parquet:", "stdout:"):
        assert scheme in str(refusal.value)


@pytest.mark.parametrize("scheme", ["blackhole", "stdout"])
def test_an_unknown_parameter_is_refused(scheme: str) -> None:
    with pytest.raises(InvalidArgument, match="no parameter colour"):
        open_sink(f"{scheme}:?colour=red", context())


@pytest.mark.parametrize("uri", ["blackhole:somewhere", "stdout://host", "stdout:file"])
def test_a_place_is_refused_where_there_is_none(uri: str) -> None:
    with pytest.raises(InvalidArgument, match="behind the colon"):
        open_sink(uri, context())


def test_a_package_adds_a_sink_by_an_entry_point(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a package for Kafka will: nothing of Floodmark knows of it."""
    information = tmp_path / "other_sinks-1.0.dist-info"
    information.mkdir()
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: other-sinks\nVersion: 1.0\n")
    (information / "entry_points.txt").write_text("[floodmark.sinks]\nother = other_sinks:open_sink\n")
    (tmp_path / "other_sinks.py").write_text(
        "def open_sink(address, context):\n    return address, context\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    assert "other" in known_schemes()
    require_sink("other://place")
    opened: object = open_sink("other://place/path?a=b", context())
    assert opened == (parse_sink("other://place/path?a=b"), context())


def test_what_a_sink_needs_is_loaded_by_those_who_use_it() -> None:
    script = (
        "import sys, floodmark.feed.named.runner; from floodmark.feed.sinks.base import require_sink;"
        "require_sink('parquet:x');"
        "print('pyarrow.parquet' in sys.modules or 'pyarrow.flight' in sys.modules)"
    )
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "False"


@pytest.mark.parametrize("scheme", ["floodmark", "floodmark+tls"])
def test_a_sink_that_was_replaced_names_the_command_to_use(scheme: str) -> None:
    for refuse in (require_sink, lambda uri: open_sink(uri, context())):
        with pytest.raises(InvalidArgument, match="floodmark replicate SOURCE TARGET --runner process"):
            refuse(f"{scheme}://bergen:7100/users")
    assert scheme not in known_schemes()


# URIs


@pytest.mark.parametrize(
    "uri",
    [
        "stdout:",
        "parquet:relative/directory",
        "parquet:/absolute/directory?compression=none",
        "parquet:with%20blank",
        "kafka://[::1]:9092/users?password_file=/etc/password",
        "other+tls://bergen/users",
    ],
)
def test_a_uri_is_put_together_again_as_it_was(uri: str) -> None:
    assert str(parse_sink(uri)) == uri
    assert parse_sink(str(parse_sink(uri))) == parse_sink(uri)


@pytest.mark.parametrize(
    "uri",
    ["", "plain", "://x", "parquet:x#y", "parquet:x?a", "parquet:x?a=1&a=2", "kafka://[::1/x", "a:\n"],
)
def test_a_uri_that_cannot_be_read_is_refused(uri: str) -> None:
    with pytest.raises(InvalidArgument):
        parse_sink(uri)


def test_escapes_in_a_path_are_undone() -> None:
    assert parse_sink("parquet:a%20b%3Fc").path == "a b?c"


# Stdout


def test_lines_are_those_of_the_command(tmp_path: Path) -> None:
    """What `floodmark changes --json` prints, byte for byte, before the position that only it adds."""
    with floodmark.open(tmp_path / "oslo", site="oslo", background=False) as site:
        users = site.create_namespace("users")
        users.put(b"ada", "Gräfin\n".encode())
        users.put(b"\xff\x00", b"\xfe", ttl=1_000)
        users.put("ключ".encode(), b"")
        users.delete(b"ada")
        lines = list(map(encode_line, site.changes("users")))
    printed = run("changes", tmp_path / "oslo", "--namespace", "users", "--json").output.splitlines()
    assert [line.partition(b',"position":')[0] + b"}\n" for line in printed] == lines
    assert len(lines) == 4


def test_an_output_that_nobody_reads_ends_the_feed() -> None:
    class Broken(io.BytesIO):
        def write(self, data: object) -> int:
            raise BrokenPipeError

    sink = StdoutSink(Broken())
    with pytest.raises(Closed, match="closed by its reader"):
        sink.write([change(1, b"a")], since=SINCE, through=SINCE + 1)


def test_stdout_prints_to_stdout(capsysbinary: pytest.CaptureFixture[bytes]) -> None:
    sink = open_sink("stdout:", context())
    write(sink, [change(1, b"a"), change(2, b"b", None)], since=0, through=2)
    sink.close()
    assert capsysbinary.readouterr().out == encode_line(change(1, b"a")) + encode_line(change(2, b"b", None))


# Blackhole


def test_a_black_hole_takes_everything() -> None:
    sink = open_sink("blackhole:", context())
    assert isinstance(sink, BlackholeSink)
    write(sink, [change(1, b"a")], since=0, through=1)


class NarrowPipe(io.BytesIO):
    """A stream that takes a few bytes at a time, as an unbuffered pipe may."""

    def write(self, data: Any) -> int:
        return super().write(bytes(data)[:7])


def test_stdout_prints_whole_lines_into_a_narrow_pipe() -> None:
    pipe = NarrowPipe()
    changes = [change(1, b"a"), change(2, b"b", None)]
    StdoutSink(pipe).write(changes, since=0, through=2)
    assert pipe.getvalue() == b"".join(map(encode_line, changes))
