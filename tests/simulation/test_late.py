"""What a link brings too late is refused: it may be about something that was deleted and forgotten since."""

from collections.abc import Mapping
from contextlib import nullcontext
from unittest.mock import patch

import pytest

from floodmark.model.errors import StaleLink
from floodmark.model.partition import ApplyStream, LinkGuard, WriteStream
from floodmark.replication.links import Links
from floodmark.testing.simulation import World
from floodmark.testing.simulation.drivers import DistantSite
from floodmark.testing.simulation.sites import SimulatedSite
from floodmark.testing.simulation.world import TOPOLOGY


class Sent:
    """The batches that links have sent."""

    def __init__(self) -> None:
        self.batches: list[tuple[SimulatedSite, LinkGuard, Mapping[bytes, bytes]]] = []
        self._original = DistantSite.write_stream

    def write_stream(self, target: DistantSite, command: ApplyStream) -> WriteStream:
        stream, link = self._original(target, command), command.link
        assert link is not None
        send = stream.send
        stream.send = lambda rows: self.batches.append((target._site, link, dict(rows))) or send(rows)  # type: ignore[method-assign, func-returns-value]
        return stream


@pytest.mark.parametrize("guarded", [True, False])
def test_a_change_that_comes_after_its_tombstone_was_collected_stays_dead(guarded: bool) -> None:
    world, sent = World(1), Sent()
    oslo, rome, _ = world.sites

    def go_round() -> None:
        world.time.advance(1_000)
        for site in world.sites:
            site.call(lambda opened: opened.heartbeat())
        for link in world.links:
            link.run_step()

    with (
        patch.object(DistantSite, "write_stream", autospec=True, side_effect=sent.write_stream),
        nullcontext() if guarded else patch.object(Links, "admit", lambda *_: ()),
    ):
        for site in world.sites:
            site.start()
            site.create_namespaces(TOPOLOGY)
        oslo.call(lambda opened: opened.namespace("users").put(b"key", b"1"))
        go_round()
        _, guard, rows = next(each for each in sent.batches if each[0] is rome)
        oslo.call(lambda opened: opened.namespace("users").delete(b"key"))
        for _ in range(4):
            go_round()
        for site in world.sites:
            assert site.call(lambda opened: opened.collect_garbage()).keys_removed == 1

        def deliver() -> None:
            rome.call_host(lambda host: host.write_stream(ApplyStream(True, guard)).send(rows).result())

        if guarded:
            with pytest.raises(StaleLink):
                deliver()
        else:
            deliver()
        found = rome.call(lambda opened: opened.namespace("users").get(b"key"))
        assert found == (None if guarded else b"1")
