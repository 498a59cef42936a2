"""The guide to Spark: every Python block of it runs, in order, and prints what the page says."""

import re
from pathlib import Path

import pytest
from tests.cli.support import ROOT
from tests.cli.test_tutorial import find_blocks, is_as_shown, run_python

import floodmark
from floodmark.server import serve
from floodmark.site import Site
from floodmark.spark.source import options, stream, writing

pytestmark = pytest.mark.slow

GUIDE = ROOT / "docs" / "spark.md"
URL = "grpc://127.0.0.1:7100"


# Spark's own, which it hands on.
SPARKS = {"checkpointLocation"}


def write_users(site: Site) -> None:
    """What the guide finds in the site."""
    users = site.create_namespace("users")
    for key, age in ((b"ada", 35), (b"alan", 41), (b"grace", 45), (b"ada", 36)):
        users.put(key, f'{{"age":{age}}}'.encode())
    users.delete(b"grace")
    site.create_namespace("copy")


def in_place(code: str, url: str, directory: Path) -> str:
    """The code of a block with the server that runs, and with names of files that Java understands, too.

    Java stays in the directory that it was started in.
    """
    return re.sub(r'"((?:lake|state)/)', rf'"{directory}/\1', code).replace(URL, url)


@pytest.mark.usefixtures("spark")
def test_every_python_block_of_the_guide_prints_what_it_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    site = floodmark.open("data/oslo", site="oslo")
    write_users(site)
    blocks = find_blocks(GUIDE.read_text("utf-8"))
    assert {block.language for block in blocks} == {"python", "sh", "text"}
    names: dict[str, object] = {"__name__": "guide"}
    with serve(site, "127.0.0.1:0") as server:
        for block, following in zip(blocks, [*blocks[1:], None], strict=True):
            if block.language == "python":
                printed = run_python(in_place(block.text, server.url, tmp_path), names)
                shown = following.text if following and following.language == "text" else ""
                assert is_as_shown(shown, printed), f"{GUIDE.name}, line {block.line}:\n{printed}"
        copied = dict(site.namespace("copy").scan())
        assert copied == dict(site.namespace("users").scan())


def test_the_guide_lists_every_option_and_no_other() -> None:
    tables = re.findall(
        r"^\| option \| meaning \|\n(.*?)\n\n", GUIDE.read_text("utf-8"), re.MULTILINE | re.DOTALL
    )
    listed = {
        name
        for table in tables
        for row in table.splitlines()
        for name in re.findall(r"`(\w+)`", row.split("|")[1])
    }
    known = options.SNAPSHOT | options.CHANGES | stream.OPTIONS | writing.OPTIONS
    assert listed == known - SPARKS
