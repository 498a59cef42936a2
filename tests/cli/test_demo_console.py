"""The demo with its console in a browser, from which docs/ has its pictures.

FLOODMARK_PICTURES=docs .venv/bin/python -m pytest -m soak tests/cli/test_demo_console.py
"""

import os
import re
import subprocess
from pathlib import Path
from typing import Final

import pytest
from tests.browser import open_browser
from tests.cli.support import FLOODMARK
from tests.waiting import DEMO_SECONDS_MAX, wait_until

PICTURE_BYTES_MAX: Final = 200_000
WIDTH, HEIGHT, NARROW = 1280, 1180, 400


@pytest.mark.soak
def test_console_of_the_demo_shows_the_lost_change_and_its_repair(tmp_path: Path) -> None:
    pictures = Path(os.environ.get("FLOODMARK_PICTURES", tmp_path))
    with (
        open_browser() as browser,
        subprocess.Popen([FLOODMARK, "demo", "--console"], stdout=subprocess.PIPE, text=True) as demo,
    ):
        assert demo.stdout is not None
        link = next(found for line in demo.stdout if (found := re.search(r"watch both on (\S+)", line)))
        browser.resize(WIDTH, HEIGHT)
        browser.open(link[1])
        browser.wait_text("#links", "oslo → rome")
        # Lag and heat for some seconds, and then the change that gets lost, after most steps of the demo.
        wait_until(
            lambda: "changes lost or doubled" in browser.text("#links"),
            "the loss",
            seconds=DEMO_SECONDS_MAX,
            pause_seconds=0.2,
        )
        browser.picture(pictures / "console.png")
        wait_until(lambda: "drifted apart" in browser.text("#verify"), "the drift", pause_seconds=0.1)
        said = demo.stdout.read()
        assert demo.wait() == 0, said
    size = (pictures / "console.png").stat().st_size
    assert 20_000 < size < PICTURE_BYTES_MAX
