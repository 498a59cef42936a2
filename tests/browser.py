"""Debian's Chromium without a screen, for tests of pages; a test without it is skipped, and says so."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from selenium import webdriver
from selenium.webdriver.chrome.service import Service
from tests.waiting import wait_until

# What a machine under load may take to start a browser and to draw a page.
SCRIPT_SECONDS = 120


class Browser:
    """A window on a page."""

    def __init__(self, driver: Any) -> None:
        self.driver = driver

    def open(self, url: str) -> None:
        """Load a page in a window that remembers nothing."""
        # A page that differs in the fragment alone would not be loaded.
        self.driver.get("about:blank")
        self.driver.get(url)

    def run(self, script: str, *arguments: object) -> Any:
        """What a script returns."""
        return self.driver.execute_script(script, *arguments)

    def text(self, selector: str) -> str:
        """What a reader sees of an element; empty without it."""
        found = self.run("return document.querySelector(arguments[0])?.innerText ?? ''", selector)
        return str(found)

    def attribute(self, selector: str, name: str) -> str | None:
        """An attribute of the first such element."""
        found: str | None = self.run(
            "return document.querySelector(arguments[0])?.getAttribute(arguments[1])", selector, name
        )
        return found

    def wait_text(self, selector: str, text: str) -> None:
        """Return when an element shows a text."""
        wait_until(
            lambda: text in self.text(selector),
            lambda: f"no {text!r} in {selector}: {self.text(selector)!r}",
            pause_seconds=0.1,
        )

    def resize(self, width: int, height: int, *, dark: bool = False) -> None:
        """The size of the window, and what its reader prefers."""
        scheme = "dark" if dark else "light"
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)

    def picture(self, file: Path) -> None:
        """Write what the window shows, as PNG."""
        assert self.driver.save_screenshot(str(file))

    def log(self) -> list[str]:
        """What the browser has complained of since the last call."""
        return [str(line["message"]) for line in self.driver.get_log("browser")]


@contextmanager
def open_browser() -> Iterator[Browser]:
    """A browser without a screen."""
    browser, driver = shutil.which("chromium"), shutil.which("chromedriver")
    if browser is None or driver is None:
        pytest.skip("NO BROWSER: install Debian's packages chromium and chromium-driver")
    options = webdriver.ChromeOptions()
    options.binary_location = browser
    for argument in (
        "--headless=new",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-dev-shm-usage",
        "--hide-scrollbars",
    ):
        options.add_argument(f"--{argument}")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    started = webdriver.Chrome(options=options, service=Service(driver))
    try:
        started.set_script_timeout(SCRIPT_SECONDS)
        yield Browser(started)
    finally:
        started.quit()
