"""The steps of the demo that need Spark, with all of its parts.  The whole of it is left to make soak."""

import io
from collections.abc import Iterator
from pathlib import Path
from tempfile import gettempdir

import pytest
from rich.console import Console
from tests.test_readme import shown_on_the_picture

from floodmark.cli.demo import story
from floodmark.cli.demo.stage import Stage
from floodmark.spark import SparkOptions

pytestmark = pytest.mark.slow


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A directory for temporary files, which must be empty afterwards."""
    directory = tmp_path / "temporary"
    directory.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(directory))
    assert gettempdir() == str(directory)
    yield directory
    assert not list(directory.iterdir())


@pytest.mark.usefixtures("spark", "temporary")
def test_a_dropped_change_is_named_found_and_mended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # The session is there already, and was started with other settings.
    monkeypatch.setattr(story, "SPARK", SparkOptions())
    monkeypatch.setattr(story, "BEFORE_LOSS_SECONDS", 0)
    steps = [story.serve_two_sites, story.lose_a_change, story.find_the_loss, story.mend]
    monkeypatch.setattr(story, "STEPS", steps)
    shown = io.StringIO()
    console = Console(file=shown, width=80, highlight=False, soft_wrap=True)
    stage = Stage(console, unicode=True, live=False)
    account = story.perform(stage, tmp_path / "sites", kept=False)
    assert account["passed"], shown.getvalue()
    assert [step.step for step in stage.steps] == ["serve", "loss", "find", "repair"]
    for step in stage.steps:
        assert step.title in shown_on_the_picture()
    assert "\x1b" not in shown.getvalue()
