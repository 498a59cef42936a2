"""A site behind a server is the same site: it keeps the same contract, in the clear and over TLS."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path
from typing import ClassVar

import pytest
from tests.contracts.site.base import SITE, SITE_ID, START_MS, open_in_memory, refused
from tests.contracts.site.contract import SiteContract
from tests.server.certificates import Certificates, make_certificates

from floodmark.engine import Engine
from floodmark.host.remote import RemoteHost
from floodmark.model.errors import InvalidArgument, InvalidKey, InvalidRange, InvalidTimeToLive, InvalidValue
from floodmark.server import Server, ServerOptions, hash_token, new_token, serve
from floodmark.site import Site, connecting
from floodmark.site.connecting import connect
from floodmark.testing.clock import SimulatedTime

LISTEN = "127.0.0.1:0"


@contextmanager
def simulated_clock(time: SimulatedTime) -> Iterator[None]:
    """Let clients that connect in the block measure time by a simulated clock, as the served site does."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(connecting, "RemoteHost", partial(RemoteHost, elapsed_source=time))
        yield


class ServedSiteContract(SiteContract):
    """The contract over a client of a server."""

    def open_site(self, time: SimulatedTime, directory: Path) -> AbstractContextManager[Site]:
        return self.connected(open_in_memory(time), time)

    def open_on(self, engine: Engine, time: SimulatedTime) -> AbstractContextManager[Site]:
        return self.connected(open_in_memory(time, engine), time)

    @contextmanager
    def connected(self, served: Site, time: SimulatedTime) -> Iterator[Site]:
        """A client of a server that serves a site."""
        with self.serve(served) as server:
            with simulated_clock(time):
                site = self.connect(server)
            with site:
                yield site

    def serve(self, served: Site) -> Server:
        return serve(served, LISTEN)

    def connect(self, server: Server) -> Site:
        return connect(server.url)


@pytest.mark.slow
class TestSiteBehindServer(ServedSiteContract):
    """In the clear: nothing that the one below has not as well."""


@pytest.mark.slow
class TestSiteBehindServerWithTlsAndToken(ServedSiteContract):
    certificates: ClassVar[Certificates]
    access: ClassVar[Path]
    token: ClassVar[str]

    @pytest.fixture(autouse=True, scope="class")
    @classmethod
    def credentials(cls, tmp_path_factory: pytest.TempPathFactory) -> None:
        directory = tmp_path_factory.mktemp("credentials")
        cls.certificates = make_certificates(directory / "certificates")
        cls.token = new_token()
        cls.access = directory / "access.toml"
        entry = f'[[access]]\nname = "tester"\nrole = "admin"\ntoken_sha256 = "{hash_token(cls.token)}"\n'
        cls.access.write_text(entry, "utf-8")

    def serve(self, served: Site) -> Server:
        server = self.certificates.server
        options = ServerOptions(
            tls_certificate=server.certificate_path, tls_key=server.key_path, access=self.access
        )
        return serve(served, LISTEN, options)

    def connect(self, server: Server) -> Site:
        assert server.url.startswith("grpc+tls://")
        return connect(server.url, token=self.token, tls_root=self.certificates.root_path)


def test_connecting_gives_a_site_in_real_time() -> None:
    with serve(open_in_memory(SimulatedTime(START_MS)), LISTEN) as server, connect(server.url) as site:
        assert type(site) is Site
        assert (site.name, site.id) == (SITE, SITE_ID)
        users = site.create_namespace("users")
        version = users.put(b"ada", b"countess", ttl=3600)
        assert list(users.scan(at=version)) == [(b"ada", b"countess")]
        assert [change.version for change in site.changes("users")] == [version]


def test_durability_of_a_connection_holds_for_writes_that_name_none() -> None:
    with serve(open_in_memory(SimulatedTime(START_MS)), LISTEN) as server:
        with connect(server.url, durability="async") as site:
            users = site.create_namespace("users")
            version = users.put(b"ada", b"countess")
            assert site.resolved_version() < version
            durable = users.put(b"ada", b"programmer", durability="fsync")
            assert site.resolved_version() >= durable
        with connect(server.url) as site:
            version = site.namespace("users").put(b"bob", b"builder")
            assert site.resolved_version() >= version


def test_bad_arguments_are_refused_before_anything_is_sent() -> None:
    """Nobody is there any more to refuse them."""
    server = serve(open_in_memory(SimulatedTime(START_MS)), LISTEN)
    with connect(server.url) as site:
        users = site.create_namespace("users")
        writer = users.writer()
        server.close()
        refused(InvalidKey, lambda: users.get(b""))
        refused(InvalidKey, lambda: users.get_many([b"ada", b""]))
        refused(InvalidKey, lambda: users.put_many({b"": b"x"}))
        refused(InvalidKey, lambda: writer.put(b"", b"x"))
        refused(InvalidKey, lambda: site.split("users", b""))
        refused(InvalidValue, lambda: users.put(b"ada", "x"), key=b"ada")  # type: ignore[arg-type]
        refused(InvalidTimeToLive, lambda: users.put(b"ada", b"x", ttl=0))
        refused(InvalidArgument, lambda: users.delete(b"ada", durability="disk"))  # type: ignore[arg-type]
        refused(InvalidArgument, lambda: users.scan(limit=-1))
        refused(InvalidRange, lambda: users.scan(b"b", b"a"))
        refused(InvalidRange, lambda: users.delete_range(b"b", b"a"))
        refused(InvalidRange, lambda: site.changes("users", start_key=b"b", end_key=b"a"))
