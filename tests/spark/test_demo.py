"""The steps of the demo that need Spark, with all of its parts.  The whole of it is left to make soak."""

import io
from collections.abc import Iterator
from pathlib import Path
from tempfile import gettempdir

import pytest
from rich.console import Console
from tests.test_readme import shown_on_the_picture

from floodmark.cli.demo import links, losing, play
from floodmark.cli.demo.agreement import find_the_loss, mend
from floodmark.cli.demo.losing import lose_a_change
from floodmark.cli.demo.pair import Pair
from floodmark.cli.demo.serving import serve_two_sites
from floodmark.cli.demo.stage import Motion, Stage
from floodmark.spark import SparkOptions

pytestmark = pytest.mark.slow


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where everything goes that nobody should find afterwards."""
    directory = tmp_path / "temporary"
    directory.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(directory))
    assert gettempdir() == str(directory)
    yield directory
    assert not list(directory.iterdir())


def begin_spark(_stage: Stage, pair: Pair) -> None:
    pair.spark.begin()


@pytest.mark.usefixtures("spark", "temporary")
def test_a_dropped_change_is_named_found_and_mended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # The session is there already, and was started with other settings.
    monkeypatch.setattr(links, "spark_options", lambda _scratch: SparkOptions())
    monkeypatch.setattr(losing, "BEFORE_SECONDS", 0)
    monkeypatch.setattr(play, "STEPS", [serve_two_sites, begin_spark, lose_a_change, find_the_loss, mend])
    shown = io.StringIO()
    console = Console(file=shown, width=80, highlight=False, soft_wrap=True)
    stage = Stage(console, unicode=True, motion=Motion.LINES)
    account = play.perform(stage, tmp_path / "sites", kept=False)
    assert account["passed"], shown.getvalue()
    assert [step.name for step in stage.steps] == ["serve", "loss", "find", "repair"]
    for step in stage.steps:
        assert step.title in shown_on_the_picture()
    assert "\x1b" not in shown.getvalue()
    assert not (tmp_path / "sites" / "spark" / "scratch").exists()
