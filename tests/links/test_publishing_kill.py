"""Data sets are published at three sites while publishers, sites and drivers are killed and others write."""

import subprocess
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from threading import Event, Thread

import pytest
from tests.links.kill_contract import KillFixtures, Replicate, kill_all
from tests.links.support import FLOODMARK, SiteProcess
from tests.waiting import HANG_SECONDS, wait_until

import floodmark
from floodmark.host.catalog import GenerationRow
from floodmark.model.errors import OutcomeUnknown, Retryable

ROWS = 3_000
Publish = Callable[..., "subprocess.Popen[bytes]"]


class Writer:
    """Writes keys of its own at a site, one after the other, whatever happens to the site."""

    def __init__(self, site: SiteProcess) -> None:
        self.acknowledged = 0
        self._site = site
        self._ended = Event()
        self._thread = Thread(target=self._run, daemon=True)
        self._thread.start()

    def key(self, number: int) -> bytes:
        return b"own-%s-%05d" % (self._site.name.encode(), number)

    def _run(self) -> None:
        while not self._ended.is_set():
            with suppress(Retryable, OutcomeUnknown), floodmark.connect(self._site.url) as site:
                while not self._ended.wait(0.05):
                    site.namespace("users").put(self.key(self.acknowledged), b"x")
                    self.acknowledged += 1
            self._ended.wait(0.1)

    def end(self) -> None:
        self._ended.set()
        self._thread.join(HANG_SECONDS)


@pytest.mark.slow
class TestKilledPublishers(KillFixtures):
    """The links run in a process; everything can be killed."""

    runner = "process"

    @pytest.fixture
    def publish(self, tmp_path: Path, sites: dict[str, SiteProcess]) -> Iterator[Publish]:
        """Starts `floodmark publish --topology`, with the numbered data set."""
        running: list[subprocess.Popen[bytes]] = []

        def start(number: int, *options: str) -> "subprocess.Popen[bytes]":
            file = tmp_path / f"{number}.csv"
            rows = (f"key-{row:05},set-{number}" for row in range(ROWS))
            file.write_text("\n".join(["key,value", *rows]) + "\n")
            where = [str(file), sites["oslo"].url, "users", "--topology", str(tmp_path / "topology.toml")]
            command = [*FLOODMARK, "publish", *where, "--resume", "nightly", *options]
            running.append(subprocess.Popen(command, start_new_session=True))
            return running[-1]

        yield start
        for process in running:
            kill_all(process)

    def test_all_sites_hold_the_last_data_set_and_what_was_written_since(
        self, sites: dict[str, SiteProcess], replicate: Replicate, publish: Publish
    ) -> None:
        assert replicate("--once").wait(HANG_SECONDS) == 0
        oslo, rome, bonn = sites.values()
        with ExitStack() as stack:
            writers = [Writer(site) for site in sites.values()]
            for writer in writers:
                stack.callback(writer.end)
            driver = replicate()
            assert publish(1).wait(HANG_SECONDS) == 0
            # The publisher is killed while it loads, and goes on.
            killed = publish(2)
            wait_until(lambda: is_begun(rome, killed), "the data set is begun at rome")
            kill_all(killed)
            assert publish(2).wait(HANG_SECONDS) == 0
            # A site is killed while it loads.
            hindered = publish(3)
            wait_until(lambda: is_begun(rome, hindered), "the data set is begun at rome")
            rome.kill()
            hindered.wait(HANG_SECONDS)
            rome.start()
            assert publish(3).wait(HANG_SECONDS) == 0
            # A site is away, and so is the driver.
            kill_all(driver)
            bonn.kill()
            assert publish(4, "--without", "bonn").wait(HANG_SECONDS) == 0
            bonn.start()
            driver = replicate()
            wait_until(lambda: present(bonn).base == present(oslo).base, "bonn has got the data set")
            before = [writer.acknowledged for writer in writers]
            assert publish(5).wait(HANG_SECONDS) == 0
            after = [writer.acknowledged for writer in writers]
            wait_until(lambda: writers[0].acknowledged > after[0] + 5, "somebody writes")
        kill_all(driver)
        assert replicate("--once").wait(HANG_SECONDS) == 0
        rows = {b"key-%05d" % row: b"set-5" for row in range(ROWS)}
        held = [contents(site) for site in sites.values()]
        assert held[0] == held[1] == held[2]
        assert {key: value for key, value in held[0].items() if key in rows} == rows
        for writer, old, kept in zip(writers, before, after, strict=True):
            assert all(writer.key(number) not in held[0] for number in range(old))
            assert all(writer.key(number) in held[0] for number in range(kept + 1, writer.acknowledged))


def is_begun(site: SiteProcess, publisher: "subprocess.Popen[bytes]") -> bool:
    """Whether a publisher has begun at a site, or has ended already."""
    if publisher.poll() is not None:
        return True
    with suppress(Retryable), floodmark.connect(site.url) as connected:
        return any(each.state.value == "loading" for each in connected.generations.list("users"))
    return False


def present(site: SiteProcess) -> GenerationRow:
    with floodmark.connect(site.url) as connected:
        return connected.host.namespaces.find_namespace("users").present


def contents(site: SiteProcess) -> dict[bytes, bytes]:
    with floodmark.connect(site.url) as connected:
        return dict(connected.namespace("users").scan())
