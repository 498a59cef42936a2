"""The console in a browser, over real sites: each panel, a killed site, a lost change, strange names."""

import json
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.compute
import pytest
from tests.browser import Browser, open_browser
from tests.links.support import FLOODMARK, Replication, SiteProcess, wait_checked
from tests.nodes import node_cluster
from tests.waiting import wait_until

import floodmark
from floodmark.host.comparisons import ComparisonNote
from floodmark.links import reading, steps
from floodmark.links.driver import run_links
from floodmark.links.process import ProcessRunner
from floodmark.replication.topology import parse_topology
from floodmark.server import ServerOptions, hash_token, new_token, serve
from floodmark.server.console import routes, watching

pytestmark = pytest.mark.slow

MARKUP = '<img src=x onerror="window.hacked=1"><script>window.hacked=1</script>'
LOST = b"lost"
WIDE, NARROW = 1280, 400


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with open_browser() as found:
        yield found


@contextmanager
def command(*words: str) -> Iterator[dict[str, Any]]:
    """A command that runs beside the test, and what it printed when it was ready."""
    process = subprocess.Popen([*FLOODMARK, *words, "--json"], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        yield json.loads(process.stdout.readline())
    finally:
        process.terminate()
        process.communicate()


class TwoSites:
    """Two sites as processes that share `users`, with links between them, and a console over both."""

    def __init__(self, directory: Path) -> None:
        self.oslo, self.rome = SiteProcess(directory / "oslo", 1), SiteProcess(directory / "rome", 2)
        self.topology = parse_topology(
            f'epoch = 1\n[sites.oslo]\nid = 1\nurl = "{self.oslo.url}"\n'
            f'[sites.rome]\nid = 2\nurl = "{self.rome.url}"\n[namespaces.users]\n'
        )
        for each in (self.oslo, self.rome):
            with floodmark.connect(each.url) as site:
                site.set_topology(self.topology)
        self.url = ""

    def replicating(self) -> Replication:
        """The links, for as long as the block lasts."""

        def run(topology: Any, addresses: Any, **more: Any) -> Any:
            return run_links(topology, addresses, ProcessRunner(), **more)

        return Replication(run, self.topology)


@pytest.fixture(scope="module")
def sites(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TwoSites]:
    made = TwoSites(tmp_path_factory.mktemp("console"))
    try:
        with command("console", made.oslo.url, made.rome.url, "--listen", "127.0.0.1:0") as told:
            made.url = told["url"]
            yield made
    finally:
        made.oslo.kill()
        made.rome.kill()


def test_each_panel_shows_what_the_site_tells(sites: TwoSites, browser: Browser) -> None:
    with floodmark.connect(sites.oslo.url) as oslo, floodmark.connect(sites.rome.url) as rome:
        users = oslo.namespace("users")
        users.put_many({b"ada-%d" % number: b"countess" for number in range(50)})
        for _ in range(9):
            users.get(b"ada-1")
        oslo.split("users", b"ada-3")
        oslo.feeds.create("warehouse", "users", "blackhole:")
        with oslo.subscribe("indexer", "users"):
            pass
        with sites.replicating():
            wait_checked(rome, 1)
            browser.resize(WIDE, 1000)
            browser.open(sites.url)
            browser.wait_text("#links", "oslo → rome")
            told = rome.host.status.overview()
            (link,) = told.links
            browser.wait_text("#links", "moving")
            assert link.intervals_wrong == 0
            browser.wait_text("#sentence", "Nothing is wrong: oslo and rome answer, and 2 links move.")
        partitions = oslo.partitions()
        for partition in partitions:
            browser.wait_text("#heat", f"oslo · partition {partition.id}")
        browser.wait_text("#heat", f"floodmark partition split {sites.oslo.url} {partitions[0].id} --auto")
        browser.wait_text("#readers", "feed warehouse")
        browser.wait_text("#readers", "not run")
        browser.wait_text("#readers", "subscription indexer")
        browser.wait_text("#readers", "feed/warehouse")
        browser.wait_text("#transactions", "Committed")
        browser.wait_text("#verify", "never run")
        browser.wait_text("#verify", f"floodmark verify {sites.oslo.url} {sites.rome.url}")
        note = ComparisonNote(sites=["oslo", "rome"], outcome="agree", compared=50, agree=50)
        oslo.host.verification.note_comparison(note)
        browser.wait_text("#verify", "the sites agree")
        assert "never run" not in browser.text("#verify")
        oslo.host.verification.note_comparison(ComparisonNote(sites=["oslo", "rome"], done=3, total=8))
        browser.wait_text("#verify", "3 of 8 ranges")
        machine = oslo.host.status.overview().machine
        browser.wait_text("#machine", f"Floodmark {machine.release}, Python {machine.python}")
        browser.wait_text("#machine", "agrees with this console's")


def test_killed_site_is_said_at_once_and_comes_back(sites: TwoSites, browser: Browser) -> None:
    # What the page promises: silent after two seconds without an answer, told with the next frame.
    assert watching.SILENT_MS / 1000 + routes.FRAME_SECONDS <= 3
    browser.resize(WIDE, 1000)
    browser.open(sites.url)
    state = '.card[data-site="oslo"]'
    wait_until(lambda: browser.attribute(state, "data-state") == "answering", "oslo to answer")
    sites.oslo.kill()
    wait_until(lambda: browser.attribute(state, "data-state") == "silent", "oslo to be silent")
    browser.wait_text(".alarms", "oslo · site does not answer")
    browser.wait_text(".alarms", "What to do: look whether its server runs")
    assert browser.attribute("#health", "data-severity") == "problem"
    # The other site is still shown as it is.
    assert browser.attribute('.card[data-site="rome"]', "data-state") == "answering"
    sites.oslo.start()
    wait_until(lambda: browser.attribute(state, "data-state") == "answering", "oslo to answer again")
    wait_until(lambda: "does not answer" not in browser.text("#health"), "the alarm to go")


def test_nodes_of_a_site_are_shown_and_a_lost_one_is_an_alarm(browser: Browser) -> None:
    with node_cluster() as cluster:
        cluster.spread()
        with command("console", cluster.url, "--listen", "127.0.0.1:0") as told:
            browser.resize(WIDE, 1000)
            browser.open(told["url"])
            browser.wait_text("#links", "1 (keeper)")
            rows = rows_of(browser, "Nodes")
            assert [row["Node"] for row in rows] == ["1 (keeper)", "2", "3"]
            for row, server in zip(rows, cluster.servers.values(), strict=True):
                assert (row["State"], row["Partitions"], row["URL"]) == ("✓beats", "1", server.url)
                assert row["Ceiling"].endswith(" ahead")
                assert row["Last beat"].endswith(" ago")
            browser.wait_text("#heat", "at node 3")
            cluster.kill(3)
            cluster.take_over()
            browser.wait_text(".alarms", "node 3")
            assert [row["State"] for row in rows_of(browser, "Nodes")] == ["✓beats", "✓beats", "✖lost"]
            # The next keeper tells of the site what the last one told.
            cluster.kill(1)
            cluster.take_over()
            browser.wait_text("#links", "2 (keeper)")
            browser.wait_text(".card", "answers")
            partitions = [row["Partitions"] for row in rows_of(browser, "Nodes")]
            assert partitions == ["0", "3", "0"]


def rows_of(browser: Browser, caption: str) -> list[dict[str, str]]:
    """The cells of a table by the names of their columns."""
    found: list[dict[str, str]] = browser.run(
        "return [...document.querySelectorAll('table')]"
        ".filter((each) => each.caption.textContent === arguments[0])"
        ".flatMap((each) => [...each.tBodies[0].rows]).map((row) => Object.fromEntries("
        "[...row.cells].map((cell) => [cell.dataset.name, cell.textContent])))",
        caption,
    )
    return found


def test_lost_change_is_an_alarm(sites: TwoSites, browser: Browser, monkeypatch: pytest.MonkeyPatch) -> None:
    def lose(*arguments: Any) -> Iterator[pyarrow.RecordBatch]:
        for rows in reading.read_step(*arguments):
            kept = [LOST not in key for key in rows.column("key").to_pylist()]
            yield rows.filter(pyarrow.array(kept, pyarrow.bool_()))

    monkeypatch.setattr(steps, "read_step", lose)
    browser.open(sites.url)
    with floodmark.connect(sites.oslo.url) as oslo, sites.replicating():
        with floodmark.connect(sites.rome.url) as rome:
            wait_checked(rome, 1)
            oslo.namespace("users").put(LOST, b"dinner at eight?")
            wait_until(lambda: rome.replication().links[0].intervals_wrong, "the heartbeat to tell")
        browser.wait_text(".alarms", "oslo to rome")
        browser.wait_text("#links", "changes lost or doubled")
        assert browser.attribute("#health", "data-severity") != "ok"
        assert "What to do" in browser.text(".alarms")


def test_markup_in_names_keys_and_values_is_text(sites: TwoSites, browser: Browser) -> None:
    with floodmark.connect(sites.oslo.url) as oslo:
        oslo.namespace("users").put(MARKUP.encode(), MARKUP.encode())
        found = ComparisonNote(
            sites=[MARKUP, "rome"], outcome="drift", drift=1, sample=[f"users/{MARKUP}"], doubts=[MARKUP]
        )
        oslo.host.verification.note_comparison(found)
    browser.open(sites.url)
    browser.wait_text("#verify", f"users/{MARKUP}")
    browser.wait_text(".alarms", MARKUP)
    browser.run(
        "document.querySelector('#lookup-namespace').value = 'users';"
        "document.querySelector('#lookup-key').value = arguments[0];"
        "document.querySelector('#lookup').requestSubmit()",
        MARKUP,
    )
    browser.wait_text("#found .value", MARKUP)
    assert MARKUP in browser.text("#found .looked")
    # The forms of the page have no images, and one script, which it loads.
    assert browser.run("return [window.hacked ?? 0, document.images.length, document.scripts.length]") == [
        0,
        0,
        1,
    ]


def test_what_is_inline_or_foreign_does_not_run(sites: TwoSites, browser: Browser) -> None:
    browser.open(sites.url)
    browser.wait_text("#connection", "Live")
    browser.log()
    browser.run(
        "const inline = document.createElement('script'); inline.textContent = 'window.hacked = 1';"
        "const image = document.createElement('img'); image.src = 'http://127.0.0.1:9/x.png';"
        "document.body.append(inline, image); document.body.setAttribute('style', 'color: red');"
    )
    complaints = wait_until(
        lambda: [line for line in browser.log() if "Content Security Policy" in line], "CSP"
    )
    assert complaints
    assert browser.run("return window.hacked ?? 0") == 0


def test_page_fits_narrow_windows_and_is_used_by_keyboard(sites: TwoSites, browser: Browser) -> None:
    for width, dark in ((NARROW, False), (NARROW, True), (WIDE, True)):
        browser.resize(width, 900, dark=dark)
        browser.open(sites.url)
        browser.wait_text("#links", "oslo → rome")
        assert browser.run("return document.documentElement.scrollWidth") <= width
    names = browser.run(
        "return [...document.querySelectorAll('a[href], button, input, [tabindex=\"0\"]')]"
        ".filter((each) => each.offsetParent && !(each.textContent || each.ariaLabel || each.labels?.length))"
        ".map((each) => each.outerHTML)"
    )
    assert names == []
    browser.run("document.querySelector('#lookup-key').focus()")
    # An update of the page leaves the focus where it is.
    shown = browser.text("#as-of")
    wait_until(lambda: browser.text("#as-of") != shown, "the next frame")
    assert browser.run("return document.activeElement.id") == "lookup-key"


def test_token_is_asked_for_and_without_it_nothing_is_shown(tmp_path: Path, browser: Browser) -> None:
    token, access = new_token(), tmp_path / "access.toml"
    access.write_text(
        f'[[access]]\nname = "ada"\nrole = "read"\ntoken_sha256 = "{hash_token(token)}"\n', "utf-8"
    )
    site = floodmark.open(tmp_path / "oslo", site="oslo")
    options = ServerOptions(access=access, console_listen="127.0.0.1:0", resp_listen=None)
    with serve(site, "127.0.0.1:0", options) as server:
        assert server.console_url is not None
        browser.open(server.console_url)
        tries = ("wrong", "#login-problem", "not in this server's access file"), (token, "#sentence", "oslo")
        for given, answer, said in tries:
            browser.wait_text("#login", "A token, please")
            assert "oslo" not in browser.text("body")
            browser.run(
                "document.querySelector('#token').value = arguments[0];"
                "document.querySelector('#login').requestSubmit()",
                given,
            )
            browser.wait_text(answer, said)
        browser.wait_text("#sentence", "oslo answers")
        # Kept for this tab alone, and in no URL.
        assert token not in browser.run(
            "return location.href + document.cookie + JSON.stringify(localStorage)"
        )


def test_page_says_when_nothing_new_comes_and_when_its_server_is_gone(
    tmp_path: Path, browser: Browser, monkeypatch: pytest.MonkeyPatch
) -> None:
    frame_seconds = routes.FRAME_SECONDS
    options = ServerOptions(console_listen="127.0.0.1:0", resp_listen=None)
    with serve(floodmark.open(tmp_path, site="oslo"), "127.0.0.1:0", options) as server:
        url = server.console_url
        assert url is not None
        browser.open(url)
        browser.wait_text("#connection", "Live")
        monkeypatch.setattr(routes, "FRAME_SECONDS", 4.9)
        browser.wait_text("#connection", "Stale")
        browser.wait_text("#notice", "No news for")
        monkeypatch.setattr(routes, "FRAME_SECONDS", frame_seconds)
        browser.wait_text("#connection", "Live")
    browser.wait_text("#connection", "Unreachable")
    browser.wait_text("#notice", "tries again each second")
    again = ServerOptions(console_listen=url.removeprefix("http://").removesuffix("/"), resp_listen=None)
    with serve(floodmark.open(tmp_path), "127.0.0.1:0", again):
        browser.wait_text("#connection", "Live")
        wait_until(lambda: not browser.text("#notice"), "the notice to go")
