"""Sites for layers: in this process, behind a server, and over three nodes, under simulated time."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import pytest
from tests.contracts.site.base import open_in_memory
from tests.nodes import LOOPBACK, node_cluster
from tests.site.support import HookedEngine, nothing, open_memory

from floodmark.host.remote import RemoteHost
from floodmark.layers import large_values
from floodmark.server import serve
from floodmark.site import Site
from floodmark.site.connecting import connect
from floodmark.testing import SimulatedCrash
from floodmark.testing.clock import SimulatedTime

CHUNK = 100


@dataclass
class Place:
    """A site as its user holds it, and a way to let time pass there."""

    site: Site
    advance: Callable[[int], None]


@pytest.fixture(params=["embedded", "server", "nodes"])
def place(request: pytest.FixtureRequest) -> Iterator[Place]:
    if request.param == "nodes":
        with node_cluster() as cluster:
            # Chunks and records of large values, or spans of different objects, lie at different nodes.
            cluster.spread()

            def advance(milliseconds: int) -> None:
                cluster.time.advance(milliseconds)
                cluster.tick()

            with connect(cluster.url) as site:
                yield Place(site, partial(_advance_all, advance, site))
        return
    time = SimulatedTime()
    with open_in_memory(time) as site:
        if request.param == "embedded":
            yield Place(site, time.advance)
            return
        with serve(site, LOOPBACK) as server, connect(server.url) as client:
            yield Place(client, partial(_advance_all, time.advance, client))


def _advance_all(advance: Callable[[int], None], client: Site, milliseconds: int) -> None:
    """Let time pass at a site, and let its client know: it asks for the time once in a while only."""
    advance(milliseconds)
    assert isinstance(client.host, RemoteHost)
    client.host._clock.hello()


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Values of more than CHUNK bytes are cut, three chunks to a commit."""
    monkeypatch.setattr(large_values, "CHUNK_BYTES", CHUNK)
    monkeypatch.setattr(large_values, "COMMIT_CHUNKS", 3)


def cut_at_every_write(
    prepare: Callable[[Site, SimulatedTime], object], work: Callable[[Site, SimulatedTime], object]
) -> Iterator[tuple[Site, SimulatedTime]]:
    """A site after a power cut at each write of `work`, and at last after all of them."""
    for allowed in range(1_000):
        engine, time = HookedEngine(), SimulatedTime()
        with open_memory(engine, time) as site:
            prepare(site, time)
            left = iter(range(allowed))

            def refuse(operation: str, left: Iterator[int] = left) -> None:
                if operation == "write" and next(left, None) is None:
                    raise SimulatedCrash

            engine.before = refuse
            try:
                work(site, time)
                ended = True
            except SimulatedCrash:
                ended = False
            engine.before = nothing
            survivor = engine.crashed()
        with open_memory(survivor, time) as site:
            yield site, time
        if ended:
            return
