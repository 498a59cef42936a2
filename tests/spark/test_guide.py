"""The guide to Spark: every Python block of it runs, in order, and prints what the page says."""

from pathlib import Path

import pytest
from tests.cli.support import ROOT
from tests.cli.test_tutorial import find_blocks, is_as_shown, run_python

import floodmark
from floodmark.server import serve
from floodmark.site import Site

GUIDE = ROOT / "docs" / "spark.md"
URL = "grpc://127.0.0.1:7100"


def write_users(site: Site) -> None:
    """What the guide finds in the site."""
    users = site.create_namespace("users")
    for key, age in ((b"ada", 35), (b"alan", 41), (b"grace", 45), (b"ada", 36)):
        users.put(key, f'{{"age":{age}}}'.encode())
    users.delete(b"grace")
    site.create_namespace("copy")


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
                printed = run_python(block.text.replace(URL, server.url), names)
                shown = following.text if following and following.language == "text" else ""
                assert is_as_shown(shown, printed), f"{GUIDE.name}, line {block.line}:\n{printed}"
        copied = dict(site.namespace("copy").scan())
        assert copied == dict(site.namespace("users").scan())
