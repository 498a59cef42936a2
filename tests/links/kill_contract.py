"""The contract of a runner under kill -9 of sources, targets and drivers: all sites end with the same bytes.

A subclass names its runner as the command does.
"""

import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Event, Thread

import pytest
from tests.links.support import FLOODMARK, NAMES, POLICIES, SiteProcess, describe, require_equal
from tests.waiting import HANG_SECONDS, wait_until

import floodmark
from floodmark.model.errors import OutcomeUnknown, Retryable
from floodmark.site import Site

Replicate = Callable[..., "subprocess.Popen[bytes]"]


def kill_all(process: "subprocess.Popen[bytes]") -> None:
    """Kill -9 a driver, its Java and its Python workers."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait(HANG_SECONDS)


@contextmanager
def writing(url: str, acknowledged: list[int]) -> Iterator[None]:
    """Write at a site while the block lasts, whatever happens to the site."""
    ended = Event()

    def write() -> None:
        number = 0
        while not ended.is_set():
            try:
                with floodmark.connect(url) as site:
                    while not ended.wait(0.2):
                        write_once(site, number)
                        number += 1
                        acknowledged[0] = number
            except (Retryable, OutcomeUnknown):
                ended.wait(0.1)

    writer = Thread(target=write, daemon=True)
    writer.start()
    try:
        yield
    finally:
        ended.set()
        writer.join(HANG_SECONDS)


def write_once(site: Site, number: int) -> None:
    users, profiles, counts = (site.namespace(name) for name in POLICIES)
    users.put_many(
        {b"key-%02d" % (number % 20): site.name.encode(), b"%s-%05d" % (site.name.encode(), number): b"x"}
    )
    profiles.update(b"ada", {site.name: number, "last": site.name})
    counts.add(b"all")


class KillFixtures:
    """Sites and drivers that are processes."""

    runner: str

    @pytest.fixture
    def sites(self, tmp_path: Path) -> Iterator[dict[str, SiteProcess]]:
        processes = {name: SiteProcess(tmp_path / name, number) for number, name in enumerate(NAMES, 1)}
        yield processes
        for process in processes.values():
            process.kill()

    @pytest.fixture
    def replicate(self, tmp_path: Path, sites: dict[str, SiteProcess]) -> Iterator[Replicate]:
        """Starts `floodmark replicate --topology`; a process that still runs at the end is killed."""
        file = tmp_path / "topology.toml"
        ids = {name: number for number, name in enumerate(NAMES, 1)}
        file.write_text(describe({name: each.url for name, each in sites.items()}, ids), "utf-8")
        running: list[subprocess.Popen[bytes]] = []

        def start(*options: str) -> "subprocess.Popen[bytes]":
            runner = ["--runner", self.runner]
            command = [*FLOODMARK, "replicate", "--topology", str(file), "--json", *runner, *options]
            running.append(subprocess.Popen(command, stdout=subprocess.DEVNULL, start_new_session=True))
            return running[-1]

        yield start
        for process in running:
            kill_all(process)


class KillContract(KillFixtures):
    """Kills drivers and sites in the middle of their work."""

    def test_sites_and_drivers_that_are_killed_converge(
        self, sites: dict[str, SiteProcess], replicate: Replicate
    ) -> None:
        first = replicate("--once")
        assert first.wait(HANG_SECONDS) == 0
        acknowledged: dict[str, list[int]] = {name: [0] for name in sites}
        oslo, rome, _ = sites.values()

        def wait_arrived(target: SiteProcess, source: str) -> None:
            """Return when something that was written from now on has come through."""
            goal = acknowledged[source][0]
            key = b"%s-%05d" % (source.encode(), goal)

            def has_arrived() -> bool:
                with suppress(Retryable), floodmark.connect(target.url) as site:
                    return site.namespace("users").get(key) is not None
                return False

            wait_until(has_arrived, f"{key!r} at {target.name}")

        with (
            writing(oslo.url, acknowledged["oslo"]),
            writing(rome.url, acknowledged["rome"]),
            writing(sites["bonn"].url, acknowledged["bonn"]),
        ):
            driver = replicate()
            wait_arrived(rome, "oslo")
            rome.kill()
            # The others do not wait for it.
            wait_arrived(sites["bonn"], "oslo")
            rome.start()
            wait_arrived(rome, "oslo")
            kill_all(driver)
            driver = replicate()
            wait_arrived(oslo, "rome")
            oslo.kill()
            oslo.start()
            kill_all(driver)
        last = replicate("--once")
        assert last.wait(HANG_SECONDS) == 0
        with (
            floodmark.connect(oslo.url) as one,
            floodmark.connect(rome.url) as two,
            floodmark.connect(sites["bonn"].url) as three,
        ):
            require_equal([one, two, three])
            found = set(dict(one.namespace("users").scan()))
            for name, (count,) in acknowledged.items():
                assert {b"%s-%05d" % (name.encode(), number) for number in range(count)} <= found
            assert (one.namespace("counts").get(b"all") or 0) >= sum(
                count for (count,) in acknowledged.values()
            )
            for site in (one, two, three):
                assert all(link.intervals_wrong == 0 for link in site.replication().links)
