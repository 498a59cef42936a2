"""put, get, update, add, delete and scan, for people and for programs."""

from pathlib import Path

import pytest
from tests.cli.support import run

import floodmark


def test_put_prints_the_version_and_get_the_value(directory: Path) -> None:
    put = run("put", directory, "users", "edsger", "professor")
    assert (put.code, put.errors) == (0, "")
    with floodmark.open(directory, background=False) as site:
        record = site.namespace("users").record(b"edsger")
    assert record is not None
    assert put.text == f"{record.version}\n"
    assert run("get", directory, "users", "edsger").text == "professor\n"


def test_put_and_get_as_json_tell_the_same_version(directory: Path) -> None:
    put = run("put", directory, "users", "edsger", "professor", "--ttl", "1h", "--json").json
    got = run("get", directory, "users", "edsger", "--json").json
    assert (put["namespace"], put["key"]) == ("users", "edsger")
    assert (got["found"], got["value"], got["version"]) == (True, "professor", put["version"])
    assert got["time"] == put["time"]
    assert got["time"].endswith("Z")
    assert got["origin_version"] == put["version"]
    assert got["expires_at"] > put["time"]


def test_versions_in_json_are_text_because_readers_round_large_numbers(directory: Path) -> None:
    version = run("put", directory, "users", "edsger", "professor", "--json").json["version"]
    assert isinstance(version, str)
    assert int(version) > 2**53


def test_a_value_from_stdin_is_taken_as_it_is_and_raw_gives_it_back(directory: Path) -> None:
    content = bytes(range(256)) + b"\n"
    assert run("put", directory, "users", "portrait", "-", stdin=content).code == 0
    assert run("get", directory, "users", "portrait", "--raw").output == content


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (b"one\ntwo\n", "one\ntwo\n"),
        (b"tab\tstop", "tab\tstop\n"),
        ("blåbær".encode(), "blåbær\n"),
        (b"", "\n"),
        (b"\x1b[31mred", "0x1b5b33316d726564\n"),
        (b"\xff\x00", "0xff00\n"),
        (b"0x12", "0x30783132\n"),
    ],
)
def test_get_shows_text_as_it_is_and_anything_else_as_hexadecimal(
    directory: Path, value: bytes, shown: str
) -> None:
    run("put", directory, "users", "key", "-", stdin=value)
    assert run("get", directory, "users", "key").text == shown


def test_keys_may_be_hexadecimal(directory: Path) -> None:
    run("put", directory, "users", "0x00ff", "0x6869")
    assert run("get", directory, "users", "0x00ff").text == "hi\n"
    assert run("get", directory, "users", "0x00ff", "--json").json["key_base64"] == "AP8="


def test_keys_that_start_with_a_dash_stand_behind_two(directory: Path) -> None:
    assert run("put", directory, "users", "--", "-k", "-v").code == 0
    assert run("get", directory, "users", "--", "-k").text == "-v\n"


def test_a_key_that_is_not_there_is_a_finding(shared: Path) -> None:
    outcome = run("get", shared, "users", "nobody")
    assert (outcome.code, outcome.output) == (1, b"")
    assert outcome.errors == "not found: nobody in namespace users\n"
    outcome = run("get", shared, "users", "nobody", "--json")
    assert (outcome.code, outcome.json) == (1, {"namespace": "users", "key": "nobody", "found": False})


def test_delete_prints_its_version_and_the_past_stays(directory: Path) -> None:
    before = run("get", directory, "users", "ada", "--json").json["version"]
    deleted = run("delete", directory, "users", "ada", "--json").json
    assert int(deleted["version"]) > int(before)
    assert run("get", directory, "users", "ada").code == 1
    assert run("get", directory, "users", "ada", "--at", before).text == "countess\n"
    assert int(run("delete", directory, "users", "ada").text) > int(deleted["version"])


def test_get_at_a_time_reads_what_was_there_then(directory: Path) -> None:
    first = run("get", directory, "users", "ada", "--json").json
    with floodmark.open(directory, background=False) as site:
        while site.now() >> 18 == int(first["version"]) >> 18:
            pass
        site.namespace("users").put(b"ada", b"programmer")
    assert run("get", directory, "users", "ada", "--at", first["time"]).text == "countess\n"
    assert run("get", directory, "users", "ada", "--at", "1999-12-31T23:59:59Z").code == 1


def test_scan_prints_a_line_a_key(directory: Path) -> None:
    assert run("scan", directory, "users").text == "ada\tcountess\nalan\tlogician\ngrace\tadmiral\n"
    run("put", directory, "users", "0x00ff", "two\nlines")
    assert run("scan", directory, "users", "--limit", "1").text == "0x00ff\t0x74776f0a6c696e6573\n"
    assert run("scan", directory, "users", "--limit", "2", "--json").json_lines == [
        {"key_base64": "AP8=", "value": "two\nlines"},
        {"key": "ada", "value": "countess"},
    ]


@pytest.mark.parametrize(
    ("options", "keys"),
    [
        (["--prefix", "a"], ["ada", "alan"]),
        (["--start-key", "alan"], ["alan", "grace"]),
        (["--end-key", "alan"], ["ada"]),
        (["--start-key", "b", "--end-key", "c"], []),
        (["--reverse"], ["grace", "alan", "ada"]),
        (["--reverse", "--limit", "1"], ["grace"]),
        (["--limit", "0"], []),
        (["--at", "2001-01-01T00:00:00Z"], []),
    ],
)
def test_scan_takes_ranges_limits_directions_and_the_past(
    shared: Path, options: list[str], keys: list[str]
) -> None:
    outcome = run("scan", shared, "users", *options, "--json")
    assert (outcome.code, [row["key"] for row in outcome.json_lines]) == (0, keys)


def test_output_that_is_not_unicode_gets_json_that_is_ascii(directory: Path) -> None:
    run("put", directory, "users", "blåbær", "blå")
    outcome = run("scan", directory, "users", "--prefix", "b", "--json", encoding="ascii")
    assert outcome.output.isascii()
    assert outcome.json == {"key": "blåbær", "value": "blå"}
    assert run("scan", directory, "users", "--prefix", "b", encoding="ascii").code == 0


# Records that are merged


def test_update_writes_fields_and_delete_takes_them(directory: Path) -> None:
    assert run("namespace", "create", directory, "profiles", "--merge", "fields").code == 0
    put = run("put", directory, "profiles", "ada", '{"name": "Ada", "city": "Paris"}')
    update = run("update", directory, "profiles", "ada", '{"city": "London", "born": 1815}', "--json").json
    assert int(update["version"]) > int(put.text)
    assert run("get", directory, "profiles", "ada").text == '{"born":1815,"city":"London","name":"Ada"}\n'
    assert run("delete", directory, "profiles", "ada", "--field", "born", "--field", "city").code == 0
    assert run("update", directory, "profiles", "ada", "-", stdin=b'{"title":"countess"}').code == 0
    assert run("get", directory, "profiles", "ada").text == '{"name":"Ada","title":"countess"}\n'
    run("delete", directory, "profiles", "ada")
    assert run("get", directory, "profiles", "ada").code == 1


def test_add_counts(directory: Path) -> None:
    assert run("namespace", "create", directory, "visits", "--merge", "counter").code == 0
    assert run("add", directory, "visits", "home").code == 0
    version = run("add", directory, "visits", "home", "44").text
    assert run("add", directory, "visits", "home", "--", "-3").code == 0
    assert run("get", directory, "visits", "home").text == "42\n"
    assert run("get", directory, "visits", "home", "--at", version.strip()).text == "45\n"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("update", "users", "ada", "{}"), "update is not possible in namespace 'users'"),
        (("add", "users", "ada"), "add is not possible in namespace 'users'"),
        (("delete", "users", "ada", "--field", "name"), "delete_field is not possible in namespace 'users'"),
        (("put", "visits", "home", "1"), "put is not possible in namespace 'visits'"),
        (("update", "profiles", "ada", "[]"), "must be a JSON object"),
    ],
)
def test_wrong_kind_of_record_is_a_matter_of_usage(
    directory: Path, words: tuple[str, ...], said: str
) -> None:
    run("namespace", "create", directory, "profiles", "--merge", "fields")
    run("namespace", "create", directory, "visits", "--merge", "counter")
    command, *rest = words
    outcome = run(command, directory, *rest)
    assert outcome.code == 64
    assert said in outcome.errors
