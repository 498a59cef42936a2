"""Which sinks a runner opens: a feed's URI is chosen by others, and the rights are the runner's."""

from pathlib import Path

import pytest

from floodmark.feed.sinks.base import AllowedSinks
from floodmark.feed.sinks.blackhole import BlackholeSink
from floodmark.model.errors import InvalidArgument, NotAllowed
from floodmark.testing.sinks import context

BERGEN = "kafka+tls://bergen:7100"


@pytest.mark.parametrize(
    ("entry", "uri"),
    [
        ("parquet:/srv/exports", "parquet:/srv/exports"),
        ("parquet:/srv/exports/", "parquet:/srv/exports/users/2024"),
        ("parquet:exports", "parquet:exports/users?compression=zstd"),
        ("parquet:", "parquet:/anywhere"),
        (BERGEN, f"{BERGEN}/users"),
        (f"{BERGEN}/", f"{BERGEN}/users"),
        (f"{BERGEN}/users", f"{BERGEN}/users"),
    ],
)
def test_an_entry_covers_its_place_and_what_lies_below(entry: str, uri: str) -> None:
    assert str(AllowedSinks(["blackhole:", entry]).admit(uri)) == uri


@pytest.mark.parametrize(
    ("entry", "uri"),
    [
        ("parquet:/srv/exports", "parquet:/srv/exports2"),
        ("parquet:/srv/exports", "parquet:/srv"),
        ("parquet:/srv/exports", "parquet:/srv/exports/../../etc"),
        ("parquet:exports", "parquet:/exports"),
        ("parquet:exports", "parquet://host/exports"),
        (BERGEN, "kafka+tls://bergen:7101/users"),
        (BERGEN, "kafka+tls://bergen:7100.attacker/users"),
        (BERGEN, "kafka://bergen:7100/users"),
        (f"{BERGEN}/users", f"{BERGEN}/users2"),
        (f"{BERGEN}/users", f"{BERGEN}/users/../orders"),
        ("parquet:", f"{BERGEN}/users"),
    ],
)
def test_nothing_else_is_covered(entry: str, uri: str) -> None:
    with pytest.raises(NotAllowed, match="may not write"):
        AllowedSinks([entry]).admit(uri)


def test_links_are_followed(tmp_path: Path) -> None:
    (tmp_path / "secret").mkdir()
    (tmp_path / "exports").mkdir()
    (tmp_path / "exports" / "link").symlink_to(tmp_path / "secret")
    allowed = AllowedSinks([f"parquet:{tmp_path}/exports"])
    with pytest.raises(NotAllowed):
        allowed.admit(f"parquet:{tmp_path}/exports/link")
    assert allowed.admit(f"parquet:{tmp_path}/exports/new").path == f"{tmp_path}/exports/new"


def test_files_are_named_by_the_runner_and_not_by_the_feed() -> None:
    allowed = AllowedSinks([f"{BERGEN}?token_file=secret/bergen"])
    assert allowed.admit(f"{BERGEN}/users").parameters == {"token_file": "secret/bergen"}
    assert allowed.admit(f"{BERGEN}/users?token_file=secret/bergen").parameters == {
        "token_file": "secret/bergen"
    }
    for name in ("token_file=secret/oslo", "tls_key_file=secret/key", "PASSWORD_FILE=x", "keytab_location=x"):
        with pytest.raises(NotAllowed, match="names a file"):
            allowed.admit(f"{BERGEN}/users?{name}")


def test_what_reaches_nothing_needs_no_entry_and_what_is_unknown_is_told() -> None:
    nothing = AllowedSinks()
    assert isinstance(nothing.open("blackhole:", context()), BlackholeSink)
    assert nothing.admit("stdout:").scheme == "stdout"
    with pytest.raises(InvalidArgument, match="there is no sink nowhere:"):
        nothing.open("nowhere:", context())
