"""A world whose run is over: all sites are there, all has arrived, and something can be tried with it."""

from operator import methodcaller
from random import Random

from floodmark.codec.ordered import decode_version, encode_prefix, encode_version
from floodmark.model.ranges import prefix_end
from floodmark.model.version import Version
from floodmark.partition.families import DATA
from floodmark.testing.simulation import World
from floodmark.testing.simulation.chronicle import qualified
from floodmark.testing.simulation.history import Key
from floodmark.testing.simulation.sites import SimulatedSite, embedded

Stored = tuple[Version, bytes]


class Stage:
    """A world whose run is over, one site of it that is to lose something, and others that write.

    If the run has left only two sites, the broken one is the other that writes.
    """

    def __init__(self, seed: int, steps: int) -> None:
        self.world = World(seed)
        self.world.run(steps)
        sites = self.world.sites
        self.broken, self.writer, *rest = Random(seed).sample(sites, len(sites))
        self.sound = [self.writer, *rest]
        self.other = rest[0] if rest else self.broken

    def drain(self) -> None:
        """Let everything arrive everywhere, and everybody know it."""
        self.world.time.advance(1_000)
        for site in self.world.sites:
            site.call(lambda each: each.heartbeat())
        for link in self.world.links:
            link.run_step()

    def stored(self, key: Key) -> Stored:
        """What the site that is to be broken stores of a key, with its version."""
        found = find_stored(self.broken, key)
        assert found is not None
        return found

    def plant(self, key: Key, stored: Stored | None) -> None:
        """Let the broken site hold something of a key, or nothing, as if it had never been otherwise."""
        prefix = encode_prefix(qualified(key))
        end = prefix_end(prefix)
        assert end is not None

        self.broken.disk.delete_range(DATA, prefix, end)
        if stored is not None:
            self.broken.disk.write([(DATA, prefix + encode_version(stored[0]), stored[1])])
        self.broken.disk.sync()

    def collect(self) -> None:
        """Let every site forget what was deleted, and nobody hold anything that keeps it.

        What a link held to a site that is gone would go by itself, after a day.
        """
        self.world.readers.clear()
        links = tuple(f"link-{site.name}-" for site in self.world.sites)
        for site in self.world.sites:
            for point in site.call(lambda each: each.safe_points()):
                if not point.name.startswith(links):
                    site.call(methodcaller("release_safe_point", point.name))
        # The first collection tells of expiries, which have to arrive like anything else.
        for _ in range(4):
            self.drain()
            for site in self.world.sites:
                site.call(lambda each: each.collect_garbage())


def find_stored(site: SimulatedSite, key: Key) -> Stored | None:
    """The newest row of a key in a site's engine."""
    prefix = encode_prefix(qualified(key))
    row = site.call_host(lambda host: embedded(host).node.engine.ceiling(DATA, prefix, prefix))
    return None if row is None else (decode_version(row[0]), row[1])
