"""What callers may do to the clock that all share."""

from contextlib import suppress
from pathlib import Path

from tests.server.support import LOOPBACK, connected, token_of, write_roles

from floodmark.clock.hybrid import READ_SKEW_MS_MAX, SKEW_MS_MAX
from floodmark.engine import MemoryEngine
from floodmark.model.access import Role
from floodmark.model.errors import VersionInFuture
from floodmark.model.version import COUNTER_MAX, compose
from floodmark.partition import FAMILIES
from floodmark.server import ServerOptions, serve
from floodmark.site import open_engine
from floodmark.testing.clock import SimulatedTime


def test_a_reader_moves_the_clock_less_ahead_than_peers_tolerate(tmp_path: Path) -> None:
    """By a version that is asked for, or read at; and however often, in the same millisecond or the next."""
    time = SimulatedTime(1_700_000_000_000)
    access = write_roles(tmp_path / "access.toml", "users")
    site = open_engine(MemoryEngine(FAMILIES), site="oslo", site_id=7, time_source=time, background=False)
    users = site.create_namespace("users")
    users.put(b"ada", b"countess", ttl=60)
    with (
        serve(site, LOOPBACK, ServerOptions(access=access)) as server,
        connected(server, token=token_of(Role.READ, "users")) as remote,
    ):
        host = remote.host
        for number in range(50):
            for ahead_ms in (249 + number, READ_SKEW_MS_MAX, 500):
                version = compose(time() + ahead_ms, COUNTER_MAX)
                with suppress(VersionInFuture):
                    host.versions.observe(version)
                with suppress(VersionInFuture):
                    remote.namespace("users").get(b"ada", at=version)
            host.versions.now()
        assert site.statistics().clock_ahead_ms <= READ_SKEW_MS_MAX + 1 < SKEW_MS_MAX
