"""Sites that share namespaces, and what must be the same at all of them."""

import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from threading import Event, Thread
from types import TracebackType
from typing import Protocol

from tests.server.support import LOOPBACK
from tests.waiting import HANG_SECONDS, wait_until

import floodmark
from floodmark.codec.ordered import qualify_range
from floodmark.codec.values import decode_value, encode_value
from floodmark.links.driver import TopologySummary, site_addresses
from floodmark.replication.topology import Topology, parse_topology
from floodmark.server import Server, ServerOptions, serve
from floodmark.site import Site

FLOODMARK = (sys.executable, "-m", "floodmark.cli")

NAMES = ("oslo", "rome", "bonn")
POLICIES = {"users": "last_write", "profiles": "fields", "counts": "counter"}


# Runs the links of a topology: `run_links` with a runner, or a function of Spark.
Run = Callable[..., TopologySummary]


@dataclass(frozen=True, kw_only=True)
class Served:
    """A site that is open in the test's process, and its server."""

    site: Site
    server: Server
    directory: Path

    @property
    def url(self) -> str:
        return self.server.url


class ServeSite(Protocol):
    """Opens a site in a directory named like it, and serves it until the test ends."""

    def __call__(self, name: str = "oslo", options: ServerOptions | None = None) -> Served: ...


@contextmanager
def serving_sites(directory: Path) -> Iterator[ServeSite]:
    """Serves sites below a directory."""
    with ExitStack() as stack:

        def start(name: str = "oslo", options: ServerOptions | None = None) -> Served:
            site = floodmark.open(directory / name, site=name)
            server = stack.enter_context(serve(site, LOOPBACK, options))
            return Served(site=site, server=server, directory=directory / name)

        yield start


def describe(urls: Mapping[str, str], ids: Mapping[str, int], epoch: int = 1) -> str:
    """The topology in which all sites share all namespaces, as TOML."""
    lines = [f"epoch = {epoch}"]
    for name, url in urls.items():
        lines += [f"[sites.{name}]", f"id = {ids[name]}", f'url = "{url}"']
    for name, merge in POLICIES.items():
        lines += [f"[namespaces.{name}]", f'merge = "{merge}"']
    return "\n".join(lines) + "\n"


def share(serve_site: ServeSite, names: Sequence[str] = NAMES) -> tuple[dict[str, Served], Topology]:
    """Serve sites that share namespaces; each is cut into partitions of its own."""
    served = {name: serve_site(name) for name in names}
    text = describe(
        {name: each.url for name, each in served.items()},
        {name: each.site.id for name, each in served.items()},
    )
    topology = parse_topology(text)
    for number, each in enumerate(served.values()):
        each.site.set_topology(topology)
        for cut in range(number):
            each.site.split("users", b"key-%02d" % (7 * (cut + 1)))
    return served, topology


def write_everywhere(sites: Sequence[Site], rounds: int, begin: int = 0) -> None:
    """Writes at every site, many of them to the same keys."""
    for number in range(begin, begin + rounds):
        for site in sites:
            users, profiles, counts = (site.namespace(name) for name in POLICIES)
            own = b"%s-%d" % (site.name.encode(), number)
            users.put_many({b"key-%02d" % (number % 20): own, b"own-" + own: b"x"})
            if number % 5 == 4:
                users.delete(b"key-%02d" % (number % 20))
            profiles.update(b"ada", {site.name: number, "last": site.name})
            if number % 7 == 6:
                profiles.delete_field(b"ada", "last")
            counts.add(b"all", 1)


def stored(site: Site, namespace: str) -> dict[bytes, bytes]:
    """What a site holds of a namespace, tombstones included, without the traces of where it is held."""
    row = site.host.namespaces.find_namespace(namespace)
    keys = qualify_range(row.id)
    held = {}
    for partition in site.host.router.maps.map.overlapping(keys):
        part = partition.range.intersect(keys)
        assert part is not None
        for batch in partition.scan_records(part, site.now(), dead=True):
            for key, value in zip(batch["key"].to_pylist(), batch["value"].to_pylist(), strict=True):
                record = decode_value(value)
                held[key] = encode_value(
                    record.value, record.expires_at, record.deleted, stamps=record.stamps
                )
    return held


def require_equal(sites: Sequence[Site]) -> None:
    """All sites hold the same bytes."""
    first, *others = sites
    for namespace in POLICIES:
        expected = stored(first, namespace)
        assert expected
        for site in others:
            assert stored(site, namespace) == expected, f"{namespace} at {first.name} and {site.name}"


class SiteProcess:
    """A site behind a server that can be stopped, or killed and started again, always under one URL."""

    def __init__(self, directory: Path, number: int, listen: str = LOOPBACK) -> None:
        self.name = directory.name
        self._directory = directory
        self._listen = listen
        with floodmark.open(directory, site=self.name, site_id=number):
            pass
        self.start()

    def start(self) -> None:
        command = [*FLOODMARK, "serve", str(self._directory), "--listen", self._listen]
        self._popen = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, stderr=subprocess.DEVNULL)
        assert self._popen.stdout is not None
        found = None
        while found is None and (line := self._popen.stdout.readline()):
            found = re.search(r"grpc://(\S+:\d+)", line)
        assert found is not None, "the server did not start"
        self._listen = found[1]

    @property
    def url(self) -> str:
        return f"grpc://{self._listen}"

    def kill(self) -> None:
        self._popen.kill()
        self._popen.communicate()

    def stop(self) -> None:
        """Let it fall silent: the system takes connections for it, and nobody answers."""
        self._popen.send_signal(signal.SIGSTOP)


class Replication:
    """All links of a topology, running beside the test."""

    def __init__(self, run_links: Run, topology: Topology) -> None:
        self._stop = Event()
        self._failure: BaseException | None = None
        self.summary: TopologySummary | None = None

        def run() -> None:
            try:
                self.summary = run_links(topology, site_addresses(topology), stop=self._stop)
            except BaseException as failure:
                self._failure = failure

        self._thread = Thread(target=run, daemon=True)

    def __enter__(self) -> "Replication":
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._stop.set()
        self._thread.join(HANG_SECONDS)
        if self._failure is not None:
            raise self._failure


def wait_checked(site: Site, intervals: int) -> None:
    """Return when each link that ends at a site has gone through so many more checked intervals."""
    before = {(link.source, link.namespace): link.intervals_checked for link in site.replication().links}

    def is_checked() -> bool:
        return all(
            link.intervals_checked >= before[link.source, link.namespace] + intervals
            for link in site.replication().links
        )

    wait_until(is_checked, lambda: f"links of {site.name}: {site.replication().links}")
