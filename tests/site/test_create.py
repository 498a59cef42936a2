"""`create=False` opens what is there and makes nothing."""

from pathlib import Path

import pytest

import floodmark
from floodmark.model.errors import NotASite


@pytest.mark.parametrize("prepare", ["missing", "empty"])
def test_nothing_is_made_where_no_site_is(tmp_path: Path, prepare: str) -> None:
    path = tmp_path / "oslo"
    if prepare == "empty":
        path.mkdir()
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(NotASite, match=r"holds no site.*create"):
        floodmark.open(path, create=False)
    assert sorted(tmp_path.rglob("*")) == before


def test_site_that_is_there_is_opened(tmp_path: Path) -> None:
    with floodmark.open(tmp_path, site="oslo", background=False):
        pass
    with floodmark.open(tmp_path, create=False, background=False) as site:
        assert site.name == "oslo"
