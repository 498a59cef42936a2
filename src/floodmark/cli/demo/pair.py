"""The two sites, what joins them, and what was truly written: what the steps share."""

from collections.abc import Callable
from contextlib import ExitStack, nullcontext, suppress
from pathlib import Path
from types import TracebackType
from typing import Final

from floodmark.cli.demo.board import Link, summarize
from floodmark.cli.demo.links import Frame, Links, Spark
from floodmark.cli.demo.messaging import MESSAGES, UNREAD, Messaging, Truth
from floodmark.cli.demo.servers import Server
from floodmark.cli.demo.stage import wait_until
from floodmark.host.statistics import LinkStatistics
from floodmark.model.errors import LinkStalled
from floodmark.model.version import Version
from floodmark.replication.topology import MemberSite, SharedNamespace, Topology, render_topology

NAMES: Final = ("oslo", "rome")
TOPOLOGY_FILE: Final = "topology.toml"
START_SECONDS_MAX: Final = 240.0
# Of each link so many heartbeats are waited for, to be sure that one of them covers everything before.
HEARTBEATS: Final = 2


class Pair:
    """Both sites, the people at each, and the links between them.  At the end all processes are gone."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self.servers = {name: Server(name, home) for name in NAMES}
        self.truth = Truth()
        self.topology: Topology | None = None
        self.people = {name: Messaging(server, self.truth) for name, server in self.servers.items()}
        self.spark = Spark(home / "spark")
        self.links = Links(self.spark)
        self._before: list[int] = []

    def __enter__(self) -> "Pair":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        with ExitStack() as ending:
            for server in self.servers.values():
                ending.callback(server.stop)
            # Another Ctrl-C leaves both as they are: they end with the process.
            for stop in (self.links.stop, self.spark.stop):
                _end(stop, quietly=error is not None)

    @property
    def topology_file(self) -> Path:
        """Where the topology is written down."""
        return self.home / TOPOLOGY_FILE

    @property
    def urls(self) -> list[str]:
        """Where the servers are."""
        return [server.url for server in self.servers.values()]

    def share(self) -> None:
        """Let the sites share their namespaces."""
        topology = Topology(
            epoch=1,
            sites={
                name: MemberSite(id=server.site.id, url=server.url) for name, server in self.servers.items()
            },
            namespaces={
                MESSAGES: SharedNamespace(merge="last_write"),
                UNREAD: SharedNamespace(merge="counter"),
            },
        )
        self.topology_file.write_text(render_topology(topology), "utf-8")
        for server in self.servers.values():
            server.site.set_topology(topology)
        self.topology = topology

    def start_people(self) -> None:
        """Let the people of both sites write."""
        for people in self.people.values():
            people.start()

    def stop_people(self) -> None:
        """Return when nobody writes any more, and all that was written is acknowledged."""
        for people in self.people.values():
            people.stop()

    def start_links(self, transform: Callable[[Frame], Frame] | None = None) -> None:
        """Let the links run, anew if they do already; nobody waits for them."""
        assert self.topology is not None, "the sites share nothing yet"
        self.links.stop()
        self._before = self.heartbeats()
        self.links.start(self.topology, transform)

    def wait_for_links(self) -> None:
        """Return when a heartbeat has come over each link since they were started."""
        if not wait_until(lambda: _has_grown(self._before, self.heartbeats(), 1), START_SECONDS_MAX):
            reasons = [link.stalled for link in self.look() if link.stalled is not None]
            raise LinkStalled(
                f"no heartbeat has come over the links in {START_SECONDS_MAX:.0f} s; "
                f"{reasons[0] if reasons else 'try again when the machine has less to do'}"
            )

    def require_well(self) -> None:
        """Nothing while everything runs; an error that says what does not."""
        for server in self.servers.values():
            server.require_running()
        self.spark.require_well()
        self.links.require_well()
        for people in self.people.values():
            people.require_well()

    # The links, as the sites at their ends tell of them

    def entries(self) -> dict[tuple[str, str], list[LinkStatistics]]:
        """What the sites say about what comes to them: by source and target, an entry for each namespace."""
        self.require_well()
        found: dict[tuple[str, str], list[LinkStatistics]] = {}
        for target, server in self.servers.items():
            for link in server.site.replication().links:
                found.setdefault((link.source, target), []).append(link)
        return dict(sorted(found.items()))

    def look(self) -> list[Link]:
        """The links, each over all namespaces."""
        return [summarize(source, target, entries) for (source, target), entries in self.entries().items()]

    def positions(self) -> dict[str, Version]:
        """What the sites have got to."""
        return {name: server.site.resolved_version() for name, server in self.servers.items()}

    def have_reached(self, positions: dict[str, Version]) -> bool:
        """Whether everything up to there has arrived at the other site."""
        return all(
            entry.through >= positions[source]
            for (source, _), entries in self.entries().items()
            for entry in entries
        )

    def heartbeats(self) -> list[int]:
        """How many heartbeats have come, of each link and namespace."""
        return [
            entry.intervals_checked + entry.intervals_unchecked + entry.intervals_wrong
            for entries in self.entries().values()
            for entry in entries
        ]


class Settling:
    """Whether all that was written until now has arrived, and heartbeats that came later have checked it."""

    def __init__(self, pair: Pair) -> None:
        self._pair = pair
        self._goal = pair.positions()
        self._heartbeats: list[int] | None = None

    def __call__(self) -> bool:
        if self._heartbeats is None:
            if self._pair.have_reached(self._goal):
                self._heartbeats = self._pair.heartbeats()
            return False
        return _has_grown(self._heartbeats, self._pair.heartbeats(), HEARTBEATS)


def _end(stop: Callable[[], None], *, quietly: bool) -> None:
    """Stop something.  After an error, or Ctrl-C, what cannot be stopped well would only hide it."""
    with suppress(Exception) if quietly else nullcontext():
        stop()


def _has_grown(before: list[int], now: list[int], by: int) -> bool:
    return all(later >= earlier + by for earlier, later in zip(before, now, strict=True))
